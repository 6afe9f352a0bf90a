"""BAdam: block coordinate descent, with an optimizer's state for one segment at a time (arXiv 2404.02827, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zo2core.optimizers.lomo import EverySegment
from zo2core.optimizers.torch_optimizer import OptimizerFactory, TorchOptimizer
from zo2core.protocols import UpdateInputs
from zo2core.ranges import require_whole
from zo2core.types import HALVES, MAX_SEED, BlockLayout, StateSpec

_BEGUN = "begun"  # name of the flag that the float32 copies of a segment have been made


class BAdam(EverySegment):
    """Trains one segment for a number of steps, then another one. Each epoch has a new random order of all segments.

    A segment begins with a new optimizer. 16-bit weights have a float32 copy while their segment is trained. The optimizer
    changes the copy, which is rounded into the weights after each step.

    Args:
        factory: Called with the segment's parameters: ``partial(torch.optim.AdamW, lr=1e-6)``. The rate of each step
            replaces the factory's.
        every: Steps for which a segment is trained.
        seed: Decides the order of segments.
        options: Name and options of the optimizer, as JSON values, for the journal.

    Raises:
        OptionError: if ``every`` or ``seed`` is out of its range, the factory returns no optimizer, or the optimizer's step
            needs a closure.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        *,
        every: int = 50,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        require_whole("every", every, 1)
        require_whole("seed", seed, 0, MAX_SEED)
        self._optimizer = TorchOptimizer(factory)
        self._every = every
        self._seed = seed
        self._options = {"name": "badam", "optimizer": self._optimizer.options["name"]} if options is None else options

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return {**self._options, "switch_every": self._every, "switch_seed": self._seed}

    @property
    def turn(self) -> int:
        """Steps for which a segment is trained. See the contract."""
        return self._every

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """The one segment whose turn it is. See the contract."""
        epoch, turn = divmod(step // self._every, len(trained))
        generator = torch.Generator().manual_seed((self._seed + epoch) % (MAX_SEED + 1))
        order = torch.randperm(len(trained), generator=generator)
        return (trained[int(order[turn])],)

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """The optimizer's states of float32 weights, and a float32 copy of each 16-bit weight. See the contract."""
        wide = [replace(spec, dtype=torch.float32) if spec.dtype in HALVES else spec for spec in layout.parameters]
        masters = [
            StateSpec(_master(spec.name), spec.shape, torch.float32) for spec in layout.parameters if spec.dtype in HALVES
        ]
        begun = [StateSpec(_BEGUN, (), torch.uint8)] if masters else []
        return [*begun, *masters, *self._optimizer.states(replace(layout, parameters=tuple(wide)))]

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place. See the contract."""
        weights, states = inputs.weights, inputs.states
        masters = {name: states[_master(name)] for name, weight in weights.items() if weight.dtype in HALVES}
        if masters and not states[_BEGUN]:
            for name, master in masters.items():
                master.copy_(weights[name])
            states[_BEGUN].fill_(1)
        self._optimizer.apply(inputs._replace(weights={**weights, **masters}))
        for name, master in masters.items():
            weights[name].copy_(master)


def _master(name: str) -> str:
    """Name of the float32 copy of a parameter."""
    return f"{name}.master"
