"""Products of several runs with one weight, made as one product of the rows of all.

A product of few rows with a large weight takes longer for each row than one of many rows. Runs that
visit a block of their shared base together wait for each other at each of its large linear layers,
forward and backward, and one product takes the rows of all. A run's operations are otherwise those
of the run alone.

Whether a row's bits depend on the rows beside it is up to the library that torch calls, to the
processor and to the shapes. So for each shape both are compared once, on drawn rows; where they
differ, each run has a product of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zo2core.kernels.thin import LibraryState, library_state
from zo2core.schedulers.lockstep import Lockstep

T = TypeVar("T")

# Note: Which products are joined. Waiting takes about 0.1 ms for each run and product, so small
# weights are left alone, and a product of more rows is hardly slower for each of them.
LEAST_WEIGHTS = 1 << 23
MOST_ROWS = 128
_MOST_COMPARED = 1024  # shapes whose comparison is remembered


def large_weights(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some weights whose products are worth waiting for."""
    return [weight for weight in weights if weight.numel() >= LEAST_WEIGHTS]


class _Layer(NamedTuple):
    """What has to be equal in products of several runs for one product to take the rows of all.

    An address alone does not say it: a part of a weight may begin where the weight does, and a run
    may have a bias of its own.
    """

    weight: int  # address
    shape: torch.Size
    stride: tuple[int, ...]
    bias: int | None  # address
    is_backward: bool


@dataclass
class _Product:
    """A run's product with a weight, which waits for those of the other runs."""

    rows: torch.Tensor  # (..., inputs), or backward (rows, outputs); contiguous
    weight: torch.Tensor  # (outputs, inputs)
    bias: torch.Tensor | None  # (outputs,)
    is_backward: bool
    result: torch.Tensor | None = None

    @property
    def layer(self) -> _Layer:
        """The layer, by which products of several runs are joined."""
        bias = None if self.bias is None else self.bias.data_ptr()
        weight = self.weight
        return _Layer(weight.data_ptr(), weight.shape, weight.stride(), bias, self.is_backward)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The product of other rows, as torch computes it forward or backward."""
        if self.is_backward:
            return rows @ self.weight
        return functional.linear(rows, self.weight, self.bias)


class _Shape(NamedTuple):
    """What the bits of a joined product may depend on."""

    rows: tuple[torch.Size, ...]  # of each run
    weight: torch.Size
    stride: tuple[int, ...]  # of the weight
    dtype: torch.dtype
    has_bias: bool
    is_backward: bool
    library: LibraryState


class JoinedProducts:
    """Runs functions of several runs in turn, and joins their products with the same weight."""

    def __init__(self) -> None:
        self._lockstep: Lockstep[_Product] = Lockstep(self._serve)
        self._keeps_bits: dict[_Shape, bool] = {}

    def run(
        self, functions: Sequence[Callable[[], T]], weights: Collection[torch.Tensor]
    ) -> list[T | Exception]:
        """Run functions in threads of their own, one at a time, to their ends.

        Args:
            functions: The functions, each of another run.
            weights: The weights, read by all of them, for whose products functions wait.

        Returns:
            What each function returned, or the exception that it raised.
        """
        addresses = {weight.data_ptr() for weight in weights}
        return self._lockstep.run(
            [partial(self._run_joining, function, addresses) for function in functions]
        )

    def multiply(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        is_backward: bool,
    ) -> torch.Tensor:
        """Return a run's product, after all runs have asked for theirs."""
        product = _Product(rows, weight, bias, is_backward)
        self._lockstep.request(product)
        assert product.result is not None, "products are served together"
        return product.result

    def _run_joining(self, function: Callable[[], T], addresses: Collection[int]) -> T:
        with _LinearMode(self, addresses):
            return function()

    @torch.no_grad()
    def _serve(self, products: Sequence[_Product]) -> None:
        """Compute products, those of the same layer as one."""
        groups: dict[_Layer, list[_Product]] = {}
        for product in products:
            groups.setdefault(product.layer, []).append(product)
        for group in groups.values():
            parts = [product.rows for product in group]
            if len(group) > 1 and self._has_equal_bits(group[0], parts):
                results = _apart(group[0].of(_as_one_matrix(parts)), parts)
            else:
                results = [product.of(product.rows) for product in group]
            for product, result in zip(group, results, strict=True):
                product.result = result

    def _has_equal_bits(self, product: _Product, parts: Sequence[torch.Tensor]) -> bool:
        """Whether a product of the rows of all runs gives each of them the bits of its own."""
        shape = _Shape(
            tuple(part.shape for part in parts),
            product.weight.shape,
            product.weight.stride(),
            product.weight.dtype,
            product.bias is not None,
            product.is_backward,
            library_state(),
        )
        if shape not in self._keeps_bits:
            if not product.weight.any():  # zeros, whose sums are equal in any order
                return False
            if len(self._keeps_bits) >= _MOST_COMPARED:
                self._keeps_bits.clear()
            self._keeps_bits[shape] = compares_equal(product.of, parts)
        return self._keeps_bits[shape]


def compares_equal(
    multiply: Callable[[torch.Tensor], torch.Tensor], parts: Sequence[torch.Tensor]
) -> bool:
    """Whether the product of drawn rows in one matrix equals that of each part of them."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.empty_like(part).normal_(generator=generator) for part in parts]
    joined = multiply(_as_one_matrix(drawn))
    return torch.equal(joined, _as_one_matrix([multiply(rows) for rows in drawn]))


def _as_one_matrix(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _apart(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of each part, in memory of their own."""
    of_parts = torch.split(rows, [part.numel() // part.shape[-1] for part in parts])
    return [
        of_part.clone().view(*part.shape[:-1], rows.shape[-1])
        for of_part, part in zip(of_parts, parts, strict=True)
    ]


class _LinearMode(TorchFunctionMode):
    """Has the linear layers of some weights wait for those of other runs."""

    def __init__(self, products: JoinedProducts, addresses: Collection[int]) -> None:
        super().__init__()
        self._products = products
        self._addresses = addresses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or compute a linear layer together with other runs."""
        if func is functional.linear and not kwargs and self._joins(*args):
            x, weight, bias = args if len(args) > 2 else (*args, None)
            return _JoinedLinear.apply(x, weight, bias, self._products)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def _joins(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> bool:
        """Whether a linear layer is one of a frozen weight of all runs, and of few rows."""
        if weight.data_ptr() not in self._addresses or not x.is_contiguous():
            return False
        if x.dtype is not weight.dtype or torch.is_autocast_enabled("cpu"):
            return False
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            return False
        return 0 < x.numel() <= MOST_ROWS * weight.shape[1]


class _JoinedLinear(torch.autograd.Function):
    """``x W^T + b`` of a frozen weight, for several runs at once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        products: JoinedProducts,
    ) -> torch.Tensor:
        """Compute the layer's output.

        Args:
            ctx: Of autograd.
            x: (..., inputs), contiguous.
            weight: (outputs, inputs).
            bias: (outputs,).
            products: Joins the products of all runs.
        """
        ctx.save_for_backward(weight)
        ctx.products = products
        return products.multiply(x, weight, bias, is_backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The gradient of the input."""
        [gradient] = gradients
        [weight] = ctx.saved_tensors
        rows = gradient.reshape(-1, len(weight))
        if rows.is_contiguous():
            product = ctx.products.multiply(rows, weight, None, is_backward=True)
        else:  # a library may sum in another order where rows are not contiguous
            product = rows @ weight
        return product.view(*gradient.shape[:-1], weight.shape[1]), None, None, None
