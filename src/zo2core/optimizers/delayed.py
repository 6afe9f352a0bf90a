"""Updates that a second thread computes, and that the next step applies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from zo2core.errors import OptionError
from zo2core.protocols import BlockUpdate, UpdateInputs, WrappedUpdate
from zo2core.types import HALVES, BlockLayout, StateSpec

_HAS_NEXT = "delayed.begun"  # name of the flag that a segment has next weights


class Delayed(WrappedUpdate):
    """Another optimizer, whose update of a step reaches the weights in the next step.

    This is the delayed update of ZeRO-Offload (arXiv 2101.06840, section 5.2). The gradients of
    step t are computed with weights that have the updates of steps 0 to t - 2. So this is another
    run than that of the optimizer alone. The update is computed by a thread of the host, in a copy
    of the weights, between a segment's backward pass and that of the next step. Where a device
    computes forward and backward, the host works beside it. After a step, the weights lack the
    step's own update.

    Args:
        update: The optimizer. It changes all segments at each step.

    Raises:
        OptionError: if the optimizer trains segments in turns.
    """

    def __init__(self, update: BlockUpdate) -> None:
        if update.turn is not None:
            raise OptionError(
                "update",
                found=f"{update.options['name']}, which trains segments in turns",
                expected="an optimizer that changes all segments at each step",
                remedy="delay another optimizer, such as TorchOptimizer(...)",
            )
        super().__init__(update)
        self._pending: dict[int, Future[None]] = {}  # by segment
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="zo2-update")

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the optimizer, and that it is delayed."""
        return {**self._update.options, "delayed": True}

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """The optimizer's states, the weights after the update that is due, and its gradients."""
        own_states: list[StateSpec] = []
        for spec in layout.parameters:
            dtype = torch.float32 if self.widens_gradients and spec.dtype in HALVES else spec.dtype
            own_states += [StateSpec(f"{spec.name}.next", spec.shape, spec.dtype)]
            own_states += [StateSpec(f"{spec.name}.gradient", spec.shape, dtype)]
        return [StateSpec(_HAS_NEXT, (), torch.uint8), *own_states, *self._update.states(layout)]

    def apply(self, inputs: UpdateInputs) -> None:
        """Give a segment the weights of the update before, and start this one in another thread."""
        segment = inputs.segment
        weights = inputs.weights
        states = inputs.states
        self._wait(segment)
        following = {name: states[f"{name}.next"] for name in weights}
        for name, weight in weights.items():
            if states[_HAS_NEXT]:
                weight.copy_(following[name])
            else:
                following[name].copy_(weight)
        states[_HAS_NEXT].fill_(1)
        gradients = {
            name: states[f"{name}.gradient"].copy_(gradient)
            for name, gradient in inputs.gradients.items()
        }

        late = inputs._replace(weights=following, gradients=gradients)
        # it holds for one thread
        self._pending[segment] = self._worker.submit(torch.no_grad()(self._update.apply), late)

    def settle(self) -> None:
        """Wait for all updates that were started."""
        for segment in list(self._pending):
            self._wait(segment)
        super().settle()

    def _wait(self, segment: int) -> None:
        if segment in self._pending:
            self._pending.pop(segment).result()
