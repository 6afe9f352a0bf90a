"""Weights formed of a base and two low-rank factors: ``base + left right^T``, summed in float32 and rounded once.

Products are added one after the other, so that every machine forms the same weights: a library's matrix product sums in an
order of its own choice. ``form`` runs a compiled kernel or Triton's; ``_form`` is the reference, and all give the same bits.
"""

from __future__ import annotations

from concurrent.futures import Executor
from functools import partial

import torch

from zo2core.kernels import native
from zo2core.kernels.dispatch import triton_kernels

_TWO_THREADS = 1 << 16  # weights of a matrix from which a second thread pays
_FORMED_AT_ONCE = 1 << 18  # weights that the reference sums at a time


def form(
    base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, helper: Executor | None = None
) -> None:
    """Write ``base + left right^T``.

    Args:
        base: (rows, columns), contiguous, of a floating-point dtype.
        left: (rows, rank), float32.
        right: (columns, rank), of a floating-point dtype.
        out: Memory of the shape and dtype of ``base``; may be ``base``.
        helper: Runs half of the work in parallel if compiled kernels do it.
    """
    left = left.contiguous()
    if (kernels := triton_kernels(base)) is not None:
        kernels.form(base, left, right.float().t().contiguous(), out)
    elif native.takes(base, out):
        run = partial(native.form, base, left, native.panels(right), out)
        native.run_in_halves(run, len(base), None if base.numel() < _TWO_THREADS else helper)
    else:
        _form(base, left, right, out)


def _form(base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Form a matrix with torch operations: the reference."""
    columns, rows = right.float().t().contiguous(), max(1, _FORMED_AT_ONCE // max(base.shape[1], 1))
    for weights, factors, memory in zip(*(torch.split(matrix, rows) for matrix in (base, left, out)), strict=True):
        sums, product = torch.zeros_like(weights, dtype=torch.float32), torch.empty_like(weights, dtype=torch.float32)
        for k, column in enumerate(columns):
            sums += torch.mul(factors[:, k, None], column, out=product)
        memory.copy_(weights.float() + sums)
