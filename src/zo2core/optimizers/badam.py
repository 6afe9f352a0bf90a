"""BAdam: block coordinate descent, with an optimizer's state for one segment at a time (arXiv 2404.02827, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from zo2core.optimizers.torch_optimizer import ADAM_COPIES, OptimizerFactory, TorchOptimizer, make_optimizer
from zo2core.ranges import require_whole
from zo2core.types import HALVES, MAX_SEED, BlockLayout, widened


class BAdam:
    """Trains one segment for a number of steps, then another one. Each epoch has a new random order of all segments.

    A segment begins with a new optimizer. 16-bit weights have a float32 copy while their segment is trained. The optimizer
    changes the copy, which is rounded into the weights after each step.

    Args:
        factory: Called with the segment's parameters: ``partial(torch.optim.AdamW, lr=1e-6)``. The rate of each step
            replaces the factory's.
        every: Steps for which a segment is trained.
        seed: Decides the order of segments.
        options: Name and options of the optimizer, as JSON values, for the journal.
        state_copies: Size of a parameter's state as a multiple of the float32 parameter's, for the memory plan.

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
        state_copies: int = ADAM_COPIES,
    ) -> None:
        require_whole("every", every, 1)
        require_whole("seed", seed, 0, MAX_SEED)
        self._name = type(make_optimizer(factory, [torch.nn.Parameter(torch.empty(0))])).__name__
        self._factory = factory
        self._every = every
        self._seed = seed
        self._options = {"name": "badam", "optimizer": self._name} if options is None else options
        self._state_copies = state_copies
        self._period = -1  # turn that the state belongs to; -1 before the first step
        self._optimizer = TorchOptimizer(factory)
        self._masters: dict[str, torch.Tensor] = {}  # float32 copies of the segment's 16-bit weights, by name

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return {**self._options, "switch_every": self._every, "switch_seed": self._seed}

    @property
    def widens_gradients(self) -> bool:
        """Whether 16-bit gradients are converted to float32 first: yes."""
        return True

    @property
    def every(self) -> int:
        """Steps for which a segment is trained. After each turn the optimizer has no state."""
        return self._every

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """The one segment whose turn it is. See the contract."""
        epoch, turn = divmod(step // self._every, len(trained))
        generator = torch.Generator().manual_seed((self._seed + epoch) % (MAX_SEED + 1))
        order = torch.randperm(len(trained), generator=generator)
        return (trained[int(order[turn])],)

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
        if self._period != step // self._every:
            self._period = step // self._every
            self._optimizer = TorchOptimizer(self._factory)
            self._masters = {name: widened(w).cpu() for name, w in weights.items() if w.dtype in HALVES}
        self._optimizer.apply(segment, {**weights, **self._masters}, gradients, step=step, lr=lr)
        for name, master in self._masters.items():
            weights[name].copy_(master)

    def state_bytes(self, layouts: Sequence[BlockLayout]) -> int:
        """The state of the largest segment, in float32, and its float32 copy if it has 16 bits. See the contract."""
        sizes = []
        for layout in layouts:
            specs = [spec for spec in layout.parameters if not spec.frozen]
            masters = sum(spec.numel for spec in specs if spec.dtype in HALVES)
            sizes.append(torch.float32.itemsize * (self._state_copies * sum(spec.numel for spec in specs) + masters))
        return max(sizes)

    def state_dict(self) -> dict[str, Any]:
        """The state of the segment whose turn it is. See the contract."""
        return {"period": self._period, "masters": dict(self._masters), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a copy of this state. See the contract."""
        self._period = int(state["period"])
        self._masters = {name: master.clone() for name, master in state["masters"].items()}
        self._optimizer = TorchOptimizer(self._factory)
        self._optimizer.load_state_dict(state["optimizer"])
