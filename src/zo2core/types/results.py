"""The lanes of work, and the time that each was busy.

The results of steps and evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, Protocol

from zo2core.types.steps import Update


class Lane(Enum):
    """A kind of work and the hardware that does it."""

    READ = "read"  # disk to host
    HOST = "host"  # the host's arithmetic for a device: replays, and conversions to and from the transfer dtype
    UPLOAD = "upload"  # host to device
    ACTIVATIONS_IN = "activations in"  # host to device, for activations
    REPLAY = "replay"  # replays on the device
    EVALUATE = "evaluate"  # perturbations, forwards and backward passes on the device
    OFFLOAD = "offload"  # device to host
    ACTIVATIONS_OUT = "activations out"  # device to host, for activations
    WRITE = "write"  # host to disk


COMPUTE = (Lane.REPLAY, Lane.EVALUATE)  # never at the same time: together they are one lane


class Event(Protocol):
    """A point in the order of work."""

    @property
    def passed(self) -> bool:
        """Whether all work before it is done."""

    @property
    def seconds(self) -> float:
        """When it passed, on the clock of ``time.perf_counter``. Only read once it has passed."""


class LaneUse(NamedTuple):
    """The work of a lane during a step or sweep."""

    busy_seconds: float
    nbytes: int


def bound_seconds(uses: Mapping[Lane, LaneUse]) -> float:
    """Return the busy time of the slowest lane; replays and forwards count as one lane."""
    compute = sum(uses[lane].busy_seconds for lane in COMPUTE)
    return max(compute, *(use.busy_seconds for lane, use in uses.items() if lane not in COMPUTE))


class StepResult(NamedTuple):
    """The result of one step. Of a first-order step, the loss is that before the update, and there are no directions."""

    step: int  # 0-based
    loss: float  # of the first evaluation, as MeZO reports it
    losses: tuple[float, ...]  # by evaluation; the loss of a first-order step
    projected_grads: tuple[float, ...]  # by direction
    seeds: tuple[int, ...]  # by direction
    lr: float  # applied to each direction, or by the optimizer
    seconds: float  # wall time
    lanes: Mapping[Lane, LaneUse]  # busy seconds and bytes of disk, transfers and compute
    share_applied: float | None = None  # share of sampled weights that the update changes; None: it was not measured
    grad_norm: float | None = None  # 2-norm of all gradients together, before clipping; None for a zeroth-order step

    @classmethod
    def of(cls, update: Update, seconds: float, lanes: Mapping[Lane, LaneUse], share_applied: float | None) -> StepResult:
        """Return the result of a step with this update."""
        loss, *_ = update.losses
        grads, seeds = update.projected_grads, update.seeds
        return cls(
            update.step, loss, update.losses, grads, seeds, update.lr, seconds, lanes=lanes, share_applied=share_applied
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes of blocks and activations that were uploaded and offloaded; 0 if the device computes in host memory."""
        moving = (Lane.UPLOAD, Lane.OFFLOAD, Lane.ACTIVATIONS_IN, Lane.ACTIVATIONS_OUT)
        return sum(self.lanes[lane].nbytes for lane in moving)

    @property
    def bound_seconds(self) -> float:
        """Busy time of the slowest lane: no order of work makes a step faster."""
        return bound_seconds(self.lanes)


class EvaluationResult(NamedTuple):
    """The result of an evaluation."""

    loss: float  # mean over labelled tokens
    losses: tuple[float, ...]  # by batch
    tokens: int  # labelled tokens; 0 for an objective, which may not be a mean over tokens
    sweeps: int
    seconds: float  # wall time
    tokens_of_batches: tuple[int, ...] = ()  # labelled tokens, one a batch; empty for an objective
