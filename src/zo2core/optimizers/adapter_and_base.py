"""An adapter by one optimizer and its base by another, in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from zo2core.errors import OptionError
from zo2core.protocols import BlockUpdate, UpdateInputs
from zo2core.ranges import recorded_rate
from zo2core.types import HALVES, BlockLayout, StateSpec

T = TypeVar("T")


class AdapterAndBase(BlockUpdate):
    """Trains an adapter and the base under it, each by its own optimizer and learning rate.

    This is LoRA with LOMO (arXiv 2306.09782, section 4.3.2): an adapter by AdamW, and the base by
    LOMO. The gradients of both are those of one backward pass, and a norm to clip is that of all of
    them together.

    Args:
        adapter: The optimizer of the adapter, with the learning rate of ``FirstOrder``.
        base: The optimizer of all other parameters.
        base_lr: Learning rate of the base: a number, or a function of the 0-based step.
        is_of_adapter: Whether a parameter of this name is the adapter's.

    Raises:
        OptionError: if an optimizer trains segments in turns, or if the adapter has parameters in
            16 bits.
    """

    def __init__(
        self,
        adapter: BlockUpdate,
        base: BlockUpdate,
        *,
        base_lr: float | Callable[[int], float],
        is_of_adapter: Callable[[str], bool],
    ) -> None:
        for update in (adapter, base):
            if update.turn is not None:
                raise OptionError(
                    "update",
                    found=f"{update.options['name']}, which trains segments in turns",
                    expected="optimizers that change all segments at each step",
                    remedy="pass another optimizer, such as LOMO()",
                )
        self._adapter = adapter
        self._base = base
        self._base_lr = base_lr
        self._is_of_adapter = is_of_adapter

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of both optimizers, and a name made of theirs."""
        adapter = dict(self._adapter.options)
        base = dict(self._base.options)
        name = f"{adapter['name']} and {base['name']}"
        return {"name": name, "adapter": adapter, "base": base}

    @property
    def rates(self) -> Mapping[str, Any]:
        """The learning rate of the base."""
        return {"base_lr": recorded_rate(self._base_lr)}

    @property
    def widens_gradients(self) -> bool:
        """Whether the base's optimizer gets 16-bit gradients in float32; the adapter has none."""
        return self._base.widens_gradients

    @property
    def copies(self) -> int:
        """Most float32 tensors of the size of one parameter that an optimizer has at a time."""
        return max(self._adapter.copies, self._base.copies)

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """The states of both optimizers."""
        parameters = {spec.name: spec for spec in layout.parameters}
        adapter = tuple(self._part(parameters, of_adapter=True).values())
        base = tuple(self._part(parameters, of_adapter=False).values())
        narrow = next((spec.name for spec in adapter if spec.dtype in HALVES), None)
        if narrow is not None:
            raise OptionError(
                "adapter",
                found=f"{narrow}, in 16 bits",
                expected="an adapter in float32 beside a base that is trained, too",
                remedy="leave modules_to_save out of its config: the base's own are trained",
            )
        alone = replace(layout, offsets=None, states=())
        return [
            *self._adapter.states(replace(alone, parameters=adapter)),
            *self._base.states(replace(alone, parameters=base)),
        ]

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place."""
        for_adapter = self._inputs(inputs, of_adapter=True)
        if for_adapter.weights:
            self._adapter.apply(for_adapter)
        step = inputs.step
        base_lr = self._base_lr(step) if callable(self._base_lr) else self._base_lr
        for_base = self._inputs(inputs, of_adapter=False)
        self._base.apply(for_base._replace(lr=base_lr))

    def settle(self) -> None:
        """Finish the work of both optimizers."""
        self._adapter.settle()
        self._base.settle()

    def _inputs(self, inputs: UpdateInputs, *, of_adapter: bool) -> UpdateInputs:
        return inputs._replace(
            weights=self._part(inputs.weights, of_adapter=of_adapter),
            gradients=self._part(inputs.gradients, of_adapter=of_adapter),
        )

    def _part(self, named: Mapping[str, T], *, of_adapter: bool) -> dict[str, T]:
        """The values of the adapter's parameters by name, or those of the base's."""
        return {
            name: value for name, value in named.items() if self._is_of_adapter(name) == of_adapter
        }
