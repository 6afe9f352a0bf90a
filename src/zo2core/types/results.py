"""What steps and evaluations report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zo2core.types.lanes import Lane, LaneUse, bound_seconds
from zo2core.types.steps import Update


class StepResult(NamedTuple):
    """What one step reports."""

    step: int  # 0-based
    loss: float  # of the first evaluation, as MeZO reports it
    losses: tuple[float, ...]  # one an evaluation
    projected_grads: tuple[float, ...]  # one a probe
    seeds: tuple[int, ...]  # one a probe
    lr: float  # applied to each probe, as the journal has it
    seconds: float  # wall time
    lanes: Mapping[Lane, LaneUse]  # busy seconds and bytes of disk, transfers and compute
    share_applied: (
        float | None
    )  # share of the stored weights that the update changes, by a sample; None: it was not looked at

    @classmethod
    def of(cls, update: Update, seconds: float, lanes: Mapping[Lane, LaneUse], share_applied: float | None) -> StepResult:
        """The report of a step that led to this update."""
        loss, *_ = update.losses
        grads, seeds = update.projected_grads, update.seeds
        return cls(
            update.step, loss, update.losses, grads, seeds, update.lr, seconds, lanes=lanes, share_applied=share_applied
        )

    @property
    def bytes_moved(self) -> int:
        """Blocks and activations, uploaded plus offloaded; 0 where the device computes on the buckets themselves."""
        return _bytes_moved(self.lanes)

    @property
    def bound_seconds(self) -> float:
        """What the slowest lane alone takes: no order of work makes a step faster."""
        return bound_seconds(self.lanes)


class GradientStepResult(NamedTuple):
    """What one first-order step reports."""

    step: int  # 0-based
    loss: float  # before the update
    grad_norm: float  # 2-norm of all gradients together, before clipping
    seconds: float  # wall time
    lanes: Mapping[Lane, LaneUse]  # busy seconds and bytes of disk, transfers and compute

    @property
    def bytes_moved(self) -> int:
        """Blocks and activations, uploaded plus offloaded; 0 where the device computes on the buckets themselves."""
        return _bytes_moved(self.lanes)

    @property
    def bound_seconds(self) -> float:
        """What the slowest lane alone takes: no order of work makes a step faster."""
        return bound_seconds(self.lanes)


class EvaluationResult(NamedTuple):
    """What an evaluation reports."""

    loss: float  # mean over labelled tokens
    losses: tuple[float, ...]  # one a batch
    tokens: int  # labelled tokens; 0 for an objective, which counts in its own way
    sweeps: int
    seconds: float  # wall time
    tokens_of_batches: tuple[int, ...] = ()  # labelled tokens, one a batch; empty for an objective


def _bytes_moved(lanes: Mapping[Lane, LaneUse]) -> int:
    moving = (Lane.UPLOAD, Lane.OFFLOAD, Lane.ACTIVATIONS_IN, Lane.ACTIVATIONS_OUT)
    return sum(lanes[lane].nbytes for lane in moving)
