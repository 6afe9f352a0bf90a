"""Products of thin matrices, such as those of LoRA, in one pass over what they are added to.

torch computes ``out + scale * (left @ right)`` in four passes over memory of float32, two of which
only change the dtype. The compiled functions here take one, with the same bits where torch's matrix
product adds its few products one after the other. Whether it does depends on the processor and on
the library that torch was built with, so ``sums_in_order`` compares them.
"""

from __future__ import annotations

from concurrent.futures import Executor
from functools import cache
from itertools import pairwise

import torch

from zo2core.kernels.dispatch import DTYPES, functions, library

MOST_COLUMNS = 64  # of the left matrix; a library's product of wider ones is as fast
_COMPARED_ROWS = 1024  # a product of more rows is compared in a sample of so many
_ROWS_AT_ONCE = 64  # of a library's product: the rest of the rows is computed by other code
_WORK_OF_A_THREAD = 1 << 21  # products from which another thread pays


def is_compiled() -> bool:
    """Whether the compiled functions are installed, and the processor has fast ones."""
    loaded = library()
    return loaded is not None and bool(loaded.zo2core_has_fused_products())


def sums_in_order(rows: int, inner: int, columns: int) -> bool:
    """Whether ``thin_product`` gives the bits of torch's product, compared on drawn matrices.

    Args:
        rows: Rows of the left matrix.
        inner: Columns of the left matrix, rows of the right one.
        columns: Columns of the right matrix.
    """
    if rows > _COMPARED_ROWS:
        rows = _COMPARED_ROWS + rows % _ROWS_AT_ONCE
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return _sums_in_order(rows, inner, columns, torch.get_num_threads(), precision)


@cache
def _sums_in_order(rows: int, inner: int, columns: int, threads: int, precision: str) -> bool:
    if not is_compiled() or inner > MOST_COLUMNS:
        return False
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(rows, inner, generator=generator)
    transposed = torch.randn(columns, inner, generator=generator)
    out = torch.empty(rows, columns)
    for right in (transposed.t(), transposed.t().contiguous()):
        thin_product(out, left, right.contiguous())
        if not torch.equal(out, left @ right):
            return False
    return True


def thin_product(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    base: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    helpers: Executor | None = None,
) -> None:
    """Write ``base + scale * (left @ right)``, or without a base the product; rounded once.

    Args:
        out: (rows, columns), contiguous, on the CPU, float32, bfloat16 or float16.
        left: (rows, inner), contiguous, float32.
        right: (inner, columns), contiguous, float32.
        base: Of the shape and dtype of ``out``, contiguous; may be ``out``.
        scale: Factor of the product.
        helpers: Run parts of the work in parallel, as many as torch has threads; None: nothing.
    """
    rows, columns = out.shape
    inner = len(right)

    def run(first: int, last: int) -> None:
        functions().zo2core_thin_product(
            DTYPES[out.dtype],
            out[first:last].data_ptr(),
            None if base is None else base[first:last].data_ptr(),
            left[first:last].data_ptr(),
            right.data_ptr(),
            scale,
            last - first,
            columns,
            inner,
        )

    parts = min(torch.get_num_threads(), 1 + rows * columns * inner // _WORK_OF_A_THREAD)
    if helpers is None or parts == 1:
        run(0, rows)
        return
    bounds = [rows * part // parts for part in range(parts + 1)]
    others = [helpers.submit(run, *bound) for bound in pairwise(bounds[1:])]
    try:
        run(0, bounds[1])
    finally:
        for other in others:
            other.result()


def scaled_widened(values: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * values.float()``, in one pass.

    Args:
        values: Contiguous, on the CPU, float32, bfloat16 or float16.
        scale: The factor.
    """
    out = torch.empty(values.shape)
    functions().zo2core_scale_widened(
        DTYPES[values.dtype], out.data_ptr(), values.data_ptr(), scale, values.numel()
    )
    return out
