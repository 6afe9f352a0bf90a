"""Products with a thin matrix: the bits of torch's, whatever order torch's library sums in."""

import ctypes
import ctypes.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from profiles import each_choice

from zo2core.kernels import native, thin
from zo2core.kernels.thin import Order, Product

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PRODUCTS = list(Product)
ORDERS = [*thin._ORDERS, Order(5, is_fused=True), Order(5, is_fused=False)]

pytestmark = pytest.mark.skipif(not thin.is_compiled(), reason="the compiled kernels are not built")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def fused_add() -> Callable[[float, float, float], float]:
    """``x * y + z``, rounded once to float32."""
    function = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_float] * 3
    return lambda x, y, z: float(function(x, y, z))


def rounded_add(x: float, y: float, z: float) -> float:
    return float(torch.tensor(x) * torch.tensor(y) + torch.tensor(z))


def sum_in(order: Order, left: list[float], right: list[float]) -> float:
    """The sum of products in an order, number by number."""
    add = fused_add() if order.is_fused else rounded_add

    def chain(terms: slice) -> torch.Tensor:
        total = 0.0
        for x, y in zip(left[terms], right[terms], strict=True):
            total = add(x, y, total)
        return torch.tensor(total)

    if order.block == 0:
        first, second, third, fourth = (chain(slice(start, None, 4)) for start in range(4))
        return float((first + third) + (second + fourth))
    total = torch.tensor(0.0)
    for start in range(0, len(left), order.block):
        total += chain(slice(start, start + order.block))
    return float(total)


@pytest.mark.parametrize(
    ("product", "order"),
    [
        (product, order)
        for product in PRODUCTS
        for order in ORDERS
        if order.block or product.is_along_rows
    ],
    ids=str,
)
def test_a_sum_takes_its_terms_in_the_order(product: Product, order: Order) -> None:
    outer, inner, columns = 3, 12, 2
    wide = drawn(outer, inner) if product.is_along_rows else drawn(inner, outer)
    right = drawn(inner, columns)
    result = thin.multiply(product, wide, right, order)
    rows = wide if product.is_along_rows else wide.t()
    expected = [[sum_in(order, a, b) for b in right.t().tolist()] for a in rows.tolist()]
    transposed = product is Product.ALONG_COLUMNS_TRANSPOSED
    assert (result.t() if transposed else result).tolist() == expected


@pytest.mark.parametrize(
    ("product", "dtype", "columns", "outer", "inner"),
    each_choice(PRODUCTS, DTYPES, [1, 2, 7, 8, 9, 16, 64], [2, 17, 100], [4, 130, 576]),
)
def test_a_product_is_torchs(
    product: Product, dtype: torch.dtype, columns: int, outer: int, inner: int
) -> None:
    wide = drawn(*((outer, inner) if product.is_along_rows else (inner, outer)), dtype=dtype)
    right = drawn(inner, columns)
    order = thin.order_of(product, outer, inner, columns)
    result = thin.multiply(product, wide, right, order, scale=0.3)
    assert torch.equal(result, product.by_torch(wide.float() * 0.3, right))


@pytest.mark.parametrize("inner", [256, 1024])
@pytest.mark.parametrize("product", PRODUCTS)
def test_usual_sizes_have_a_known_order(product: Product, inner: int) -> None:
    if thin.order_of(product, 576, inner, 8) is None:
        pytest.skip("this machine's library adds in another order: LoRA takes peft's own path")


@pytest.mark.parametrize(
    ("product", "order"),
    [
        (product, order)
        for product in PRODUCTS
        for order in thin._ORDERS
        if order.block or product.is_along_rows
    ],
    ids=str,
)
def test_the_order_of_a_library_is_found(
    product: Product, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(product: Product, wide: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return thin.multiply(product, wide, right, order)

    monkeypatch.setattr(Product, "by_torch", library)
    find = thin._order_of.__wrapped__  # without what is known of torch's library
    assert find(product, 70, 1024, 8, thin.library_state()) == order


@pytest.mark.parametrize("product", PRODUCTS)
def test_where_no_order_is_torchs_torch_computes(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thin, "_ORDERS", [Order(5, is_fused=False)])
    outer, inner, columns = 35, 410, 8
    assert thin.order_of(product, outer, inner, columns) is None
    wide = drawn(*((outer, inner) if product.is_along_rows else (inner, outer)))
    right = drawn(inner, columns)
    result = thin.multiply(product, wide, right, None, scale=3)
    assert torch.equal(result, product.by_torch(wide * 3, right))


RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
IN_THREADS = ctypes.CFUNCTYPE(None, RUN, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@contextmanager
def own_threads() -> Iterator[list[int]]:
    """Within the context parts of products run in other threads than those of torch's library;
    yields the number of threads that each product asked for.
    """
    asked: list[int] = []

    def run_in_threads(run: Callable[[int], None], argument: int, threads: int, _: int) -> None:
        asked.append(threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, [argument] * threads))

    function = IN_THREADS(run_in_threads)
    native.functions().zo2core_use_threads(ctypes.cast(function, ctypes.c_void_p))
    try:
        yield asked
    finally:
        native.functions().zo2core_use_threads(native.torch_threads())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [2, 7, 65, 130])
def test_threads_change_no_bits(rows: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = drawn(rows, 8), drawn(8, 700)
    base = drawn(rows, 700).bfloat16()
    order = Order(192, is_fused=True)

    def results() -> list[torch.Tensor]:
        out = base.clone()
        thin.thin_product(out, left, right, out, scale=0.3)
        products = []
        for product in PRODUCTS:
            wide = base if product is not Product.ALONG_ROWS else base.t().contiguous()
            thin_matrix = drawn(wide.shape[product.is_along_rows], 8)
            products.append(thin.multiply(product, wide, thin_matrix, order))
        return [out, *products]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    expected = results()
    monkeypatch.setattr(thin, "_WORK_OF_A_PART", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    of_torch = results()
    with own_threads() as asked:
        others = results()
    for alone, *in_parts in zip(expected, of_torch, others, strict=True):
        assert all(torch.equal(alone, result) for result in in_parts)
    # two products along columns, and one along the columns of the others' rows, have 700 each
    divided = 0 if threads == 1 else 3 if rows < 64 else 5
    assert asked == [threads] * divided


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 3, 8])
def test_a_thin_product_adds_its_terms_one_after_the_other(inner: int, dtype: torch.dtype) -> None:
    left, right, base = drawn(3, inner), drawn(inner, 11), drawn(3, 11, dtype=dtype)
    order = Order(thin._ALL, is_fused=True)
    sums = [[sum_in(order, a, b) for b in right.t().tolist()] for a in left.tolist()]
    out = torch.empty_like(base)
    thin.thin_product(out, left, right, base, scale=0.3)
    assert torch.equal(out, (base + torch.tensor(sums) * 0.3).to(dtype))
    thin.thin_product(out, left, right)
    assert torch.equal(out, torch.tensor(sums).to(dtype))


def test_sums_of_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thin.sums_in_order(34, 1, 72), "one term has one order"

    def reversed_sums(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        out.copy_(left.flip(1) @ right.flip(0))

    monkeypatch.setattr(thin, "thin_product", reversed_sums)
    assert not thin.sums_in_order(35, 8, 72)
