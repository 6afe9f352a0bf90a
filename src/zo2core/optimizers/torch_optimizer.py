"""Any ``torch.optim`` optimizer with a state for each parameter, one segment at a time. The state is in host memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from zo2core.errors import OptionError
from zo2core.types import BlockLayout, trained

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Any]  # the result has the interface of torch.optim.Optimizer
ADAM_COPIES = 2  # sizes of a parameter: its two moments; no common optimizer keeps more


def make_optimizer(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> Any:
    """Make the optimizer of these parameters.

    Raises:
        OptionError: if the factory returns no optimizer, or the optimizer's step needs a closure.
    """
    optimizer = factory(parameters) if callable(factory) else None
    step = getattr(optimizer, "step", None)
    if not callable(step):
        raise OptionError(
            "optimizer",
            found=repr(factory)[:80],
            expected="a factory that is called with the parameters, such as partial(torch.optim.AdamW, lr=2e-4)",
            remedy="pass such a factory",
        )
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptionError(
            "optimizer",
            found=f"{type(optimizer).__name__}, whose step evaluates the loss again by a closure",
            expected="an optimizer whose step only reads gradients",
            remedy="use another optimizer, such as torch.optim.AdamW",
        )
    return optimizer


class TorchOptimizer:
    """The optimizer that a factory makes, one for each segment. Each step has the bits of one over all parameters.

    The arithmetic is done by the host, where the states are: ZeRO-Offload's arrangement (arXiv 2101.06840). Weights that a
    device holds are copied to the host and back.

    Args:
        factory: Called with a segment's parameters: ``partial(torch.optim.AdamW, lr=1e-5, fused=True)``. The learning rate
            of each step replaces the factory's.
        options: Name and options of the optimizer, as JSON values, for the journal.
        state_copies: Size of a parameter's state as a multiple of the parameter's, for the memory plan.

    Raises:
        OptionError: if the factory returns no optimizer, or the optimizer's step needs a closure.
    """

    def __init__(
        self, factory: OptimizerFactory, *, options: Mapping[str, Any] | None = None, state_copies: int = ADAM_COPIES
    ) -> None:
        made = make_optimizer(factory, [nn.Parameter(torch.empty(0))])
        self._factory = factory
        self._options = {"name": type(made).__name__} if options is None else options
        self._state_copies = state_copies
        self._segments: dict[int, tuple[dict[str, nn.Parameter], Any]] = {}  # parameters without data, and their optimizer
        self._loaded: dict[int, Any] = {}  # states of segments that have no optimizer yet

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return self._options

    @property
    def widens_gradients(self) -> bool:
        """Whether 16-bit gradients are converted to float32 first: no, as in a loop over the whole model."""
        return False

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """All of them."""
        return trained

    def apply(
        self,
        segment: int,
        weights: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        *,
        step: int,
        lr: float,
    ) -> None:
        """Change a segment's weights in place. See the contract."""
        parameters, optimizer = self._of(segment, weights)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, parameter in parameters.items():
            parameter.data = weights[name].cpu()
            parameter.grad = gradients[name].cpu() if name in gradients else None
        optimizer.step()
        for name, parameter in parameters.items():
            if weights[name].device.type != "cpu":
                weights[name].copy_(parameter.data)
            parameter.grad, parameter.data = None, parameter.data.new_empty(0)

    def _of(self, segment: int, weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, nn.Parameter], Any]:
        """A segment's parameters and their optimizer, which are made at the segment's first step."""
        if segment not in self._segments:
            parameters = {name: nn.Parameter(torch.empty(0, dtype=weight.dtype)) for name, weight in weights.items()}
            optimizer = self._factory(list(parameters.values()))
            if segment in self._loaded:
                optimizer.load_state_dict(self._loaded.pop(segment))
            self._segments[segment] = parameters, optimizer
        return self._segments[segment]

    def state_bytes(self, layouts: Sequence[BlockLayout]) -> int:
        """The states of all parameters, each of its parameter's dtype. See the contract."""
        return self._state_copies * sum(spec.nbytes for spec in trained(layouts))

    def state_dict(self) -> dict[str, Any]:
        """The states of the segments' optimizers. See the contract."""
        made = {segment: optimizer.state_dict() for segment, (_, optimizer) in self._segments.items()}
        return {"segments": {**self._loaded, **made}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with copies of these states. See the contract."""
        self._segments.clear()
        self._loaded = {int(segment): copied_state(inner) for segment, inner in state["segments"].items()}


def copied_state(value: Any) -> Any:
    """Copy a state's tensors, which may lie in a file.

    Args:
        value: Nested mappings and lists of tensors and other values, which are kept.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: copied_state(inner) for key, inner in value.items()}
    return [copied_state(inner) for inner in value] if isinstance(value, list) else value
