"""LoRA layers of peft on the CPU, with fewer passes over memory and the same bits.

The forward of each LoRA layer of a model is replaced, and nothing else: parameters, names and
files stay peft's. Peft widens a layer's input to float32, adds ``scale * (x A^T) B^T`` to the
output and rounds the sum, each in passes of its own over memory, and on the way back the same.
Here each product takes one pass, and nothing as large as the input is kept in float32.

What it computes is peft's, operation for operation: the products are those of
``zo2core.kernels.thin``, which compares its sums with those of torch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn

from zo2adapters.models.library_names import names_of
from zo2core.errors import ZO2Warning
from zo2core.kernels.thin import (
    MOST_COLUMNS,
    Product,
    is_compiled,
    knows_library,
    multiply,
    order_of,
    sums_in_order,
    thin_product,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FusedForward:
    """The forward of one LoRA layer: the fused one where it gives peft's bits, else peft's.

    Args:
        layer: A ``peft.tuners.lora.Linear`` around a linear layer, without dropout.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's output, as peft's forward computes it."""
        layer = self._layer
        active = [name for name in layer.active_adapters if name in layer.lora_A]
        has_one_term = len(active) == 1 and not (layer.disable_adapters or layer.merged)
        if args or kwargs or not has_one_term:
            return self._forward_of_peft(x, *args, **kwargs)
        down, up = layer.lora_A[active[0]].weight, layer.lora_B[active[0]].weight
        if not _fits(x, down, up):
            return self._forward_of_peft(x)
        scale = layer.scaling[active[0]]
        apply: Any = _AddedTerm.apply  # autograd's is untyped
        output = apply(x, layer.base_layer(x), down, up, scale)
        return cast("torch.Tensor", output)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        """The forward of a copy of the layer."""
        return FusedForward(deepcopy(self._layer, memo))

    def _forward_of_peft(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: Any = type(self._layer).forward(self._layer, x, *args, **kwargs)
        return cast("torch.Tensor", output)


def _fits(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether the fused function takes these tensors, and gives peft's bits for their shapes."""
    if type(x) is not torch.Tensor or x.device.type != "cpu" or x.numel() == 0:
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    if x.dtype not in _DTYPES:
        return False
    if down.dtype is not torch.float32 or up.dtype is not torch.float32:
        return False
    rank, inputs = down.shape
    rows = x.numel() // inputs
    if rows == 1:  # products with vectors are summed in another way
        return False
    if sums_in_order(rows, rank, len(up), inputs):
        return True
    if not knows_library():
        warnings.warn(
            "most LoRA layers run peft's own passes, slower and with the same bits: on this "
            "machine, torch's library adds products in an order that is not known here",
            ZO2Warning,
            stacklevel=2,
        )
    return False


class _AddedTerm(torch.autograd.Function):
    """``result + scale * (x A^T) B^T``, written over ``result`` where autograd allows it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        result: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Add the term to the base layer's output.

        Args:
            ctx: Of autograd.
            x: (..., inputs): the layer's input.
            result: (..., outputs): the base layer's output, of the same dtype.
            down: A, (rank, inputs), float32.
            up: B, (outputs, rank), float32.
            scale: The adapter's scaling.
        """
        wide = x.reshape(-1, x.shape[-1]).contiguous()
        thin = _multiplied(Product.ALONG_ROWS_BY_TRANSPOSE, wide, down.t(), 1.0)
        output = result
        if result._is_view():  # of a layer with a bias; autograd forbids to write over a view
            output = torch.empty_like(result)
        else:
            ctx.mark_dirty(result)
        thin_product(
            output.view(-1, len(up)),
            thin,
            up.t().contiguous(),
            result.view(-1, len(up)),
            scale=scale,
        )
        ctx.save_for_backward(x, down, up, thin)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gradients of the input, of the base layer's output, of A and of B."""
        [gradient] = gradients
        x, down, up, thin = ctx.saved_tensors
        needs_input, _, needs_down, needs_up, *_ = ctx.needs_input_grad
        scale = ctx.scale
        wide = gradient.reshape(-1, len(up)).contiguous()
        read = x.reshape(-1, x.shape[-1]).contiguous()
        of_up = of_input = of_down = None
        if needs_up:
            of_up = _multiplied(Product.ALONG_COLUMNS, wide, thin, scale)
        if needs_input or needs_down:
            of_thin = _multiplied(Product.ALONG_ROWS, wide, up, scale)
        if needs_down:
            product = Product.ALONG_COLUMNS_TRANSPOSED
            of_down = _multiplied(product, read, of_thin, 1.0)
        if needs_input:
            of_input = torch.empty(x.shape, dtype=x.dtype)
            thin_product(of_input.view(read.shape), of_thin, down.contiguous())
        return of_input, gradient, of_down, of_up, None


def _multiplied(
    product: Product, wide: torch.Tensor, thin: torch.Tensor, scale: float
) -> torch.Tensor:
    """Multiply ``scale * wide`` with a thin matrix, with the bits of torch's product."""
    outer, inner = wide.shape if product.is_along_rows else wide.shape[::-1]
    order = order_of(product, outer, inner, thin.shape[1])
    return multiply(product, wide, thin, order, scale=scale)


def fuse(modules: Iterable[nn.Module]) -> None:
    """Replace the forward of the LoRA layers among these modules that peft computes in the plain
    way.
    """
    with names_of("peft"):
        from peft.tuners.lora import layer as lora

    if not is_compiled():
        return
    for layer in modules:
        if type(layer) is lora.Linear and _is_plain(layer):
            replaced: Any = layer
            replaced.forward = FusedForward(layer)


def unfuse(modules: Iterable[nn.Module]) -> None:
    """Give all LoRA layers among these modules peft's forward again."""
    for layer in modules:
        if isinstance(layer.__dict__.get("forward"), FusedForward):
            del layer.forward


def _is_plain(layer: Any) -> bool:
    """Whether a layer adds its term and does nothing else, for any adapter."""
    if (
        type(layer.base_layer) is not nn.Linear
        or layer.lora_variant
        or any(layer.lora_bias.values())
    ):
        return False
    has_dropout = any(not isinstance(one, nn.Identity) for one in layer.lora_dropout.values())
    return not has_dropout and all(rank <= MOST_COLUMNS for rank in layer.r.values())
