"""The first-order method: its options, the memory that it needs, and what it refuses.

A sweep forward and backward computes gradients, and an optimizer changes the parameters. An
adapter's parameters are in memory. All parameters of a model change where they are stored: in
memory, or on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch

from zo2core.errors import OptionError, without_effect
from zo2core.optimizers.delayed import Delayed
from zo2core.optimizers.loss_scaling import LossScaling
from zo2core.optimizers.states import state_bytes
from zo2core.optimizers.torch_optimizer import OptimizerFactory, described
from zo2core.protocols import BlockModel, BlockUpdate
from zo2core.ranges import NormGroup, recorded_rate, require_number, require_whole
from zo2core.types import BlockLayout
from zo2core.workers.divided_states import DividedStates
from zo2core.workers.workers import Workers

# parameters, gradients, and two moments, as AdamW has them: no common optimizer keeps more
TRAINED_COPIES = 4


@dataclass(frozen=True)
class FirstOrder:
    """The first-order method.

    With a function that makes a ``torch.optim`` optimizer, an adapter is trained, which stays in
    memory over a base that is only read. With a ``BlockUpdate`` all parameters are: each segment is
    updated in the backward pass, where it is stored. Losses, gradients and parameters are those of
    ``torch.autograd`` and the same optimizer on the whole model, bit for bit.

    Args:
        optimizer: ``partial(torch.optim.AdamW, lr=2e-4)``, called with the trained parameters in
            registration order; or a ``BlockUpdate``: ``LOMO()``, ``TorchOptimizer(...)``,
            ``BAdam(...)``. None: for a custom training loop, which calls ``gradients`` and changes
            ``parameters`` itself.
        lr: Learning rate, or a function of the 0-based step. None: that of a ``torch.optim``
            optimizer.
        clip: Largest 2-norm of all gradients together; None does not clip. With a ``BlockUpdate``
            each step sweeps twice then, first to measure the norm (LOMO, arXiv 2306.09782, section
            3.3.1), unless a single segment is trained.
        clip_per: Which gradients ``clip`` takes together: "all"; or with a ``BlockUpdate`` "layer",
            those of a segment, which needs no sweep to measure them before (the grouped norm of the
            same section).
        clip_value: Largest absolute value of a gradient's elements, before the norm is clipped;
            None does not clip them. For a ``BlockUpdate``.
        scaling: How the loss is scaled, for forwards in float16; None does not scale it. A step
            whose gradients overflow is skipped. To find this before the first update, each step
            sweeps twice. For a ``BlockUpdate``.
        options: The ``torch.optim`` optimizer and its options, as JSON values for the journal of a
            run that is kept. None: its class, the options of a ``partial``, and ``lr``.
        divide_states: Whether each of several workers keeps the optimizer's states of a share of
            the segments, and sends the others the weights that it has changed (ZeRO's second stage,
            arXiv 1910.02054). No bit differs. For a ``BlockUpdate`` without turns, in memory.

    Raises:
        OptionError: if an option is out of its range, or has no effect.
    """

    optimizer: OptimizerFactory | BlockUpdate | None
    lr: float | Callable[[int], float] | None = None
    clip: float | None = None
    clip_per: NormGroup = "all"
    clip_value: float | None = None
    scaling: LossScaling | None = None
    options: Mapping[str, Any] | None = None
    divide_states: bool = False

    def __post_init__(self) -> None:
        for option, limit in (("clip_value", self.clip_value), ("clip", self.clip)):
            if limit is not None:
                require_number(option, limit, above=0, remedy="leave it out, to clip nothing")
        if self.update is not None and self.lr is None:
            expected = "a learning rate of the BlockUpdate"
            raise OptionError("lr", "None", expected, "pass FirstOrder(lr=...)")
        if self.clip_per not in get_args(NormGroup):
            raise OptionError("clip_per", repr(self.clip_per), "all or layer", "pass one of them")
        if self.clip_per != "all" and self.clip is None:
            raise without_effect("clip_per", self.clip_per, "clip, the largest norm")
        of_updates = {
            "clip_per": self.clip_per != "all",
            "clip_value": self.clip_value is not None,
            "scaling": self.scaling is not None,
            "divide_states": self.divide_states,
        }
        given = [option for option, is_given in of_updates.items() if is_given]
        if self.update is None and given:
            expected = "a BlockUpdate, which trains all parameters"
            raise without_effect(given[0], "an optimizer of an adapter", expected)
        if self.divide_states and self.update is not None and self.update.turn is not None:
            expected = "an optimizer that has the states of all segments, not of one at a time"
            raise without_effect("divide_states", "True", expected)

    @property
    def update(self) -> BlockUpdate | None:
        """The optimizer, if it changes all parameters, one segment at a time."""
        return self.optimizer if isinstance(self.optimizer, BlockUpdate) else None

    @property
    def factory(self) -> OptimizerFactory | None:
        """What makes the optimizer of an adapter, if there is one."""
        return None if isinstance(self.optimizer, BlockUpdate) else self.optimizer

    @property
    def journal_options(self) -> Mapping[str, Any]:
        """The method as JSON values, for the journal."""
        rates = {} if self.lr is None else {"lr": recorded_rate(self.lr)}
        if self.update is not None:
            return {**self.update_options, **rates, **self.update.rates}
        if self.options is not None:
            return self.options
        return {**described(self.optimizer), "clip_norm": self.clip, **rates}

    @property
    def update_options(self) -> Mapping[str, Any]:
        """Of a method with a ``BlockUpdate``: all but its learning rates, with which a state may be
        continued at other ones.
        """
        assert self.update is not None, "an adapter's optimizer has options of its own"
        scaling = {} if self.scaling is None else {"loss_scaling": asdict(self.scaling)}
        groups = {} if self.clip_per == "all" else {"clip_norm_per": self.clip_per}
        return {
            **self.update.options,
            "clip_value": self.clip_value,
            "clip_norm": self.clip,
            **groups,
            **scaling,
        }

    def update_of(
        self, layouts: Sequence[BlockLayout], workers: Workers | None
    ) -> BlockUpdate | None:
        """What changes all parameters, with the states of one of these workers, if they divide
        them.
        """
        update = self.update
        if update is None or workers is None or workers.size == 1 or not self.divide_states:
            return update
        return DividedStates(update, layouts, workers)

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        assert self.lr is not None, "it is required of a BlockUpdate"
        return self.lr(step) if callable(self.lr) else self.lr

    def measures_first(self, segments: int) -> bool:
        """Whether a step that trains so many segments has to measure all gradients before the first
        update.
        """
        clips_together = self.clip is not None and self.clip_per == "all"
        return self.scaling is not None or (clips_together and segments > 1)


@dataclass(frozen=True)
class AtSnapshot:
    """The method of an engine that evaluates and exports the parameters of a snapshot, and takes no
    steps.

    Args:
        step: Number of steps taken when the snapshot was taken.
        parameters: Values of the trained parameters, by name; None: the initial values of the run.
    """

    step: int
    parameters: Mapping[str, torch.Tensor] | None


def require_widened_gradients(model: BlockModel, method: FirstOrder, update: BlockUpdate) -> None:
    """Refuse float16 gradients of a scaled loss, which an optimizer takes as they are."""
    halves = [
        spec.name
        for layout in model.layouts
        for spec in layout.parameters
        if spec.dtype is torch.float16
    ]
    if method.scaling is not None and halves and not update.widens_gradients:
        raise OptionError(
            "scaling",
            found=f"float16 gradients of {halves[0]}, which the optimizer takes as they are",
            expected="float32 gradients, into which those of the scaled loss are converted",
            remedy="open the model with `precision='mixed'`, or use LOMO or AdaLOMO",
        )


def require_committable(model: BlockModel, update: BlockUpdate, commit_every: int) -> None:
    """Refuse a model or an optimizer whose segments cannot be committed to disk."""
    require_whole("commit_every", commit_every, 1)
    blocks = sum(not layout.resident for layout in model.layouts)
    if blocks < 2:
        raise OptionError("model", f"{blocks} block", "at least 2", "leave commit_every out")
    if isinstance(update, Delayed):
        raise OptionError(
            "update",
            found="Delayed, whose thread changes states while they are written",
            expected="an optimizer that has ended with a segment when it is written",
            remedy="pass the optimizer that it delays, or leave commit_every out",
        )


def trained_bytes(
    update: BlockUpdate, layouts: Sequence[BlockLayout], *, workers: int = 1
) -> tuple[int, int]:
    """Memory for gradients and for the optimizer's states: of the segment that takes most, if
    states last for a turn.
    """
    if update.turn is None:
        gradients = segment_gradient_bytes(update, layouts, workers=workers)
        return gradients, state_bytes(update, layouts)
    of_segments = [
        (
            segment_gradient_bytes(update, [layout], workers=workers),
            state_bytes(update, [layout]),
        )
        for layout in layouts
    ]
    return max(of_segments, key=sum)


def segment_gradient_bytes(
    update: BlockUpdate, layouts: Sequence[BlockLayout], *, workers: int = 1
) -> int:
    """Memory for the gradients of the largest segment, and for what the optimizer makes of them.

    While gradients are summed, there are two of each, and of several workers' three. While they are
    converted and clipped, there are two of one parameter at a time. Then the optimizer has its
    copies of one parameter beside the gradients of the whole segment.
    """
    most = 0
    for layout in layouts:
        trained = [spec for spec in layout.parameters if not spec.frozen]
        in_float32 = [4 * spec.numel for spec in trained]
        computed = sum(spec.nbytes for spec in trained)
        converted = computed
        if update.widens_gradients:
            converted = max(computed, sum(in_float32))
        largest = max((spec.nbytes for spec in trained), default=0)
        copies = update.copies * max(in_float32, default=0)
        summing = 2 * computed if workers == 1 else 3 * computed
        most = max(most, summing, converted + max(largest, copies))
    return most
