"""Products of matrices of which one is thin, such as those of LoRA, in one pass over the wide one.

torch computes such products in float32. For matrices of 16 bits that takes further passes over
memory, which only change the dtype, and its library has no fast code for few columns. The compiled
functions here read and write wide matrices in their own dtype, and take the terms of a sum in the
order in which the library takes them, so that bits are equal. That order depends on the shape, on
the processor and on the library that torch was built with. It is found by comparing results on
drawn matrices; where the library's order is none of those known here, torch computes the product.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional

from zo2core.kernels.dispatch import DTYPES
from zo2core.kernels.native import functions, library
from zo2core.kernels.parallel import thread_count

MOST_COLUMNS = 64  # of a thin matrix; a library's product of wider ones is as fast
_LANES = 8  # a thin matrix has a multiple of so many columns, the last ones filled with zeros
_CHAINS = 4  # sums that ``Order.block`` of 0 means
_COMPARED_ROWS = 1024  # a product of more rows is compared in a sample of so many
_ROWS_AT_ONCE = 64  # of a library's product: the rest of the rows is computed by other code
_COMPARED_SUMS = 512  # at least, since few may be equal by chance
_WORK_OF_A_PART = 1 << 17  # products that one thread computes at once
_COMMON = (256, 512, 8)  # outer and inner dimension and columns of a product like LoRA's
_LINE = 32  # rows or columns of which one thread computes all, since they share a line of the cache


class Order(NamedTuple):
    """The order in which a sum takes its terms."""

    # Terms that are added one after the other; sums of blocks are added then. 0: four sums, each of
    # every fourth term.
    block: int
    is_fused: bool  # whether a term's multiplication and addition round once


_ALL = 1 << 40  # a block of all terms
_ORDERS = [
    Order(_ALL, is_fused=False),
    Order(0, is_fused=False),
    *(Order(block, is_fused=True) for block in (192, _ALL, 0, 384, 256)),
]


class LibraryState(NamedTuple):
    """What torch's products depend on besides their shapes."""

    threads: int
    precision: str  # of products of float32 matrices


def library_state() -> LibraryState:
    """What torch's products now depend on besides their shapes."""
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return LibraryState(torch.get_num_threads(), precision)


class Product(Enum):
    """A product of a wide matrix and a thin one (inner, columns), as torch is asked for it."""

    ALONG_ROWS = "wide @ thin"
    ALONG_ROWS_BY_TRANSPOSE = "wide @ thin, with thin given as its transpose"
    ALONG_COLUMNS = "wide^T @ thin"
    ALONG_COLUMNS_TRANSPOSED = "thin^T @ wide"

    @property
    def is_along_rows(self) -> bool:
        """Whether the wide matrix is (outer, inner); else it is (inner, outer)."""
        return self in (Product.ALONG_ROWS, Product.ALONG_ROWS_BY_TRANSPOSE)

    def by_torch(self, wide: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
        """Compute the product by torch, of float32."""
        if self is Product.ALONG_ROWS:
            return wide @ thin
        if self is Product.ALONG_ROWS_BY_TRANSPOSE:
            return functional.linear(wide, thin.t().contiguous())
        if self is Product.ALONG_COLUMNS:
            return wide.t() @ thin
        return thin.t() @ wide


def is_compiled() -> bool:
    """Whether the compiled functions are installed, and the processor has fast ones."""
    loaded = library()
    return loaded is not None and bool(loaded.zo2core_has_fused_products())


def sums_in_order(rows: int, inner: int, *columns: int) -> bool:
    """Whether ``thin_product`` gives the bits of torch's products, compared on drawn matrices.

    Args:
        rows: Rows of the left matrix.
        inner: Columns of the left matrix, rows of the right ones.
        columns: Columns of each right matrix.
    """
    state = library_state()
    return all(_sums_in_order(_compared(rows), inner, count, state) for count in columns)


@cache
def _sums_in_order(rows: int, inner: int, columns: int, state: LibraryState) -> bool:
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


def order_of(product: Product, outer: int, inner: int, columns: int) -> Order | None:
    """The order of torch's sums, found by comparing products of drawn matrices; None: another one.

    Args:
        product: How torch is asked for the product.
        outer: The dimension of the wide matrix over which no sum is taken.
        inner: The other one.
        columns: Columns of the thin matrix.
    """
    return _order_of(product, _compared(outer), inner, columns, library_state())


@cache
def _order_of(
    product: Product, outer: int, inner: int, columns: int, state: LibraryState
) -> Order | None:
    if not is_compiled() or columns > MOST_COLUMNS:
        return None
    generator = torch.Generator().manual_seed(inner)
    takes_chains = product.is_along_rows and inner % _CHAINS == 0
    # a library that takes blocks takes halves where there are fewer terms than two blocks have
    candidates = [*_ORDERS, Order(max(inner // 2, 1), is_fused=True)]
    orders = [order for order in candidates if order.block or takes_chains]
    for _ in range(-(-_COMPARED_SUMS // (outer * columns))):
        shape = (outer, inner) if product.is_along_rows else (inner, outer)
        wide = torch.randn(shape, generator=generator)
        thin = torch.randn(inner, columns, generator=generator)
        expected = product.by_torch(wide, thin)
        orders = [
            order for order in orders if torch.equal(multiply(product, wide, thin, order), expected)
        ]
    return orders[0] if orders else None


def knows_library() -> bool:
    """Whether the order of the library's sums is known for products of a common shape.

    Where it is not, it is likely known for few others.
    """
    return any(order_of(product, *_COMMON) is not None for product in Product)


def _compared(rows: int) -> int:
    """A number of rows whose product is computed as that of all."""
    if rows <= _COMPARED_ROWS:
        return rows
    return _COMPARED_ROWS + rows % _ROWS_AT_ONCE


def multiply(
    product: Product,
    wide: torch.Tensor,
    thin: torch.Tensor,
    order: Order | None,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Multiply ``scale * wide`` with a thin matrix, in float32.

    Args:
        product: Which of the matrices are transposed.
        wide: Contiguous, on the CPU, float32, bfloat16 or float16.
        thin: (inner, columns), float32.
        order: That of torch's sums; None: torch computes the product.
        scale: Factor of the wide matrix.
    """
    if order is None:
        widened = wide.float()
        return product.by_torch(widened if scale == 1 else widened * scale, thin)
    columns = thin.shape[1]
    missing = -columns % _LANES
    if missing:
        thin = functional.pad(thin, (0, missing))  # products of zeros do not change a sum
    thin = thin.contiguous()
    inner, width = thin.shape
    outer = wide.shape[0 if product.is_along_rows else 1]
    has_columns_first = product is Product.ALONG_COLUMNS_TRANSPOSED
    out = torch.empty((width, outer) if has_columns_first else (outer, width))
    sums = (DTYPES[wide.dtype], out.data_ptr(), wide.data_ptr(), thin.data_ptr(), scale)
    sizes = (outer, inner, width, *order)
    division = (_at_once(inner * width), thread_count())
    if product.is_along_rows:
        functions().zo2core_row_sums(*sums, *sizes, *division)
    else:
        functions().zo2core_column_sums(*sums, *sizes, *division, has_columns_first)
    if missing:
        out = out.narrow(0 if has_columns_first else 1, 0, columns).contiguous()
    return out


def thin_product(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    base: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
) -> None:
    """Write ``base + scale * (left @ right)``, or without a base the product; rounded once.

    Args:
        out: (rows, columns), contiguous, on the CPU, float32, bfloat16 or float16.
        left: (rows, inner), contiguous, float32.
        right: (inner, columns), contiguous, float32.
        base: Of the shape and dtype of ``out``, contiguous; may be ``out``.
        scale: Factor of the product.
    """
    rows, columns = out.shape
    inner = len(right)
    functions().zo2core_thin_product(
        DTYPES[out.dtype],
        out.data_ptr(),
        None if base is None else base.data_ptr(),
        left.data_ptr(),
        right.data_ptr(),
        scale,
        rows,
        columns,
        inner,
        _at_once(columns * inner),
        thread_count(),
    )


def _at_once(products: int) -> int:
    """Rows or columns of a part of the work, each of which takes so many products."""
    return -(-_WORK_OF_A_PART // max(1, products * _LINE)) * _LINE
