"""Gradients of several workers, added up in the order of ranks.

The reference is one process that runs each worker's rows as one micro-batch: it adds the same
gradients in the same order. Where a worker has several micro-batches, their sum comes first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zo2core.workers.workers import Workers


def summed(
    gradients: dict[str, torch.Tensor],
    forms: Mapping[str, tuple[torch.Size, torch.dtype]],
    workers: Workers,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The sums of all workers' gradients, by name; those that no worker has are left out.

    Gradients of one dtype are exchanged as one tensor.

    Args:
        gradients: This worker's gradients by name; the dictionary is emptied.
        forms: Shape and dtype of each parameter that may have a gradient, the same on all workers.
        workers: The workers.
        device: Device of the gradients.
    """
    flags = torch.tensor([name in gradients for name in forms], dtype=torch.uint8, device=device)
    any_present = torch.stack(workers.all_gather_tensors(flags)).any(dim=0).tolist()
    present = [name for name, is_there in zip(forms, any_present, strict=True) if is_there]
    sums: dict[str, torch.Tensor] = {}
    for dtype in dict.fromkeys(forms[name][1] for name in present):
        alike = [name for name in present if forms[name][1] is dtype]
        shapes = [forms[name][0] for name in alike]
        # A gradient that is missing is -0.0, which changes no bit of a sum.
        flat = [
            gradients.pop(name).reshape(-1)
            if name in gradients
            else torch.full((shape.numel(),), -0.0, dtype=dtype, device=device)
            for name, shape in zip(alike, shapes, strict=True)
        ]
        joined = torch.cat(flat)
        del flat
        parts = torch.split(workers.sum_tensors(joined), [shape.numel() for shape in shapes])
        for name, shape, part in zip(alike, shapes, parts, strict=True):
            sums[name] = part.view(shape).clone()
    return {name: sums[name] for name in present}
