"""Weights formed of a base and thin factors: ``base + own shared^T``, summed in float32 and rounded once.

Products are added one after the other, so that every machine forms the same weights: a matrix product's order of sums is its
library's own. ``form`` is what runs, compiled or Triton's; ``_form`` is the reference, and all give the same bits.
"""

from __future__ import annotations

from concurrent.futures import Executor
from functools import partial

import torch

from zo2core.kernels import native
from zo2core.kernels.dispatch import triton_kernels

_WORTH_HELP = 1 << 16  # weights of a matrix that are worth a second thread
_AT_ONCE = 1 << 18  # weights that the reference sums at a time


def form(
    base: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, out: torch.Tensor, helper: Executor | None = None
) -> None:
    """Write a matrix of which only a base and what was added to it are kept.

    Args:
        base: (rows, columns), contiguous, of a floating-point dtype.
        own: (rows, thin), float32.
        shared: (columns, thin), of a floating-point dtype.
        out: As ``base``; may be its memory.
        helper: Runs a part of the work beside the caller, where compiled kernels do it.
    """
    own = own.contiguous()
    if (kernels := triton_kernels(base)) is not None:
        kernels.form(base, own, shared.float().t().contiguous(), out)
    elif native.takes(base, out):
        panels, rows = native.panels(shared), len(base)
        run = partial(native.form, base, own, panels, out)
        cut = rows // 2 if helper is not None and base.numel() >= _WORTH_HELP else rows
        rest = None if helper is None or cut == rows else helper.submit(run, cut, rows)
        try:
            run(0, cut)
        finally:
            if rest is not None:
                rest.result()
    else:
        _form(base, own, shared, out)


def _form(base: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> None:
    """The reference."""
    columns, rows = shared.float().t().contiguous(), max(1, _AT_ONCE // max(base.shape[1], 1))
    for weights, factors, memory in zip(*(torch.split(matrix, rows) for matrix in (base, own, out)), strict=True):
        sums, product = torch.zeros_like(weights, dtype=torch.float32), torch.empty_like(weights, dtype=torch.float32)
        for k, column in enumerate(columns):
            sums += torch.mul(factors[:, k, None], column, out=product)
        memory.copy_(weights.float() + sums)
