"""LoRA layers of peft on the CPU, with fewer passes over memory and the same bits.

The forward of each LoRA layer of a model is replaced, and nothing else: parameters, names and
files stay peft's. Peft widens a layer's input to float32, adds ``scale * (x A^T) B^T`` to the
output and rounds the sum, each in passes of its own over memory. Here layers that read the same
input share its float32 copy, and the output and the gradient of the input are written in one pass
each.

What it computes is peft's, operation for operation; the two products whose inner index is the rank
are summed by ``zo2core.kernels.thin``, which compares its sums with those of torch's product.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from zo2adapters.models.library_names import names_of
from zo2core.kernels.thin import (
    MOST_COLUMNS,
    is_compiled,
    scaled_widened,
    sums_in_order,
    thin_product,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Workspace:
    """What the LoRA layers of a model share: the last input in float32, and helping threads.

    The float32 copy of an input is kept until a layer reads another input.
    """

    def __init__(self) -> None:
        self.helpers = ThreadPoolExecutor(thread_name_prefix="zo2-lora")
        self._input: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._widened = torch.empty(0)

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in float32, without its graph: ``x`` itself if it has that dtype."""
        if x.dtype is torch.float32:
            return x.detach()
        if x.is_inference():  # whose changes in place are not counted
            return x.float()
        is_same = self._input is not None and self._input() is x
        if not is_same or x._version != self._version:
            self._widened = x.detach().float()
            self._input = weakref.ref(x)
            self._version = x._version
        return self._widened


class FusedForward:
    """The forward of one LoRA layer: the fused one where it gives peft's bits, else peft's.

    Args:
        layer: A ``peft.tuners.lora.Linear`` around a linear layer, without dropout.
        workspace: That of the model.
    """

    def __init__(self, layer: Any, workspace: Workspace) -> None:
        self._layer, self._workspace = layer, workspace

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
        widened = self._workspace.widened(x)
        scale = layer.scaling[active[0]]
        helpers = self._workspace.helpers
        apply: Any = _AddedTerm.apply  # autograd's is untyped
        output = apply(x, layer.base_layer(x), down, up, widened, scale, helpers)
        return cast("torch.Tensor", output)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        """The forward of a copy of the layer, with the same workspace."""
        return FusedForward(deepcopy(self._layer, memo), self._workspace)

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
    return sums_in_order(rows, rank, len(up)) and sums_in_order(rows, rank, inputs)


class _AddedTerm(torch.autograd.Function):
    """``result + scale * (x A^T) B^T``, written over ``result`` where autograd allows it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        result: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        widened: torch.Tensor,
        scale: float,
        helpers: Executor,
    ) -> torch.Tensor:
        """Add the term to the base layer's output.

        Args:
            ctx: Of autograd.
            x: (..., inputs): the layer's input.
            result: (..., outputs): the base layer's output, of the same dtype.
            down: A, (rank, inputs), float32.
            up: B, (outputs, rank), float32.
            widened: ``x`` in float32, without a graph.
            scale: The adapter's scaling.
            helpers: Threads that compute parts of the products.
        """
        thin = functional.linear(widened, down)
        rows = thin.reshape(-1, thin.shape[-1])
        output = result
        if result._is_view():  # of a layer with a bias; autograd forbids to write over a view
            output = torch.empty_like(result)
        else:
            ctx.mark_dirty(result)
        thin_product(
            output.view(-1, len(up)),
            rows,
            up.t().contiguous(),
            result.view(-1, len(up)),
            scale=scale,
            helpers=helpers,
        )
        ctx.save_for_backward(widened, down, up, rows)
        ctx.scale = scale
        ctx.dtype = x.dtype
        ctx.helpers = helpers
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gradients of the input, of the base layer's output, of A and of B."""
        [gradient] = gradients
        widened, down, up, rows = ctx.saved_tensors
        needs_input, _, needs_down, needs_up, *_ = ctx.needs_input_grad
        scaled = scaled_widened(gradient.reshape(-1, len(up)).contiguous(), ctx.scale)
        of_up = scaled.t() @ rows if needs_up else None
        of_input = of_down = None
        if needs_input or needs_down:
            of_thin = scaled @ up
            if needs_down:
                of_down = of_thin.t() @ widened.reshape(-1, widened.shape[-1])
            if needs_input:
                of_input = torch.empty(widened.shape, dtype=ctx.dtype)
                thin_product(
                    of_input.view(-1, widened.shape[-1]),
                    of_thin,
                    down.contiguous(),
                    helpers=ctx.helpers,
                )
        return of_input, gradient, of_down, of_up, None, None, None


def fuse(modules: Iterable[nn.Module]) -> None:
    """Replace the forward of the LoRA layers among these modules that peft computes in the plain
    way.
    """
    with names_of("peft"):
        from peft.tuners.lora import layer as lora

    if not is_compiled():
        return
    workspace = Workspace()
    for layer in modules:
        if type(layer) is lora.Linear and _is_plain(layer):
            replaced: Any = layer
            replaced.forward = FusedForward(layer, workspace)


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
