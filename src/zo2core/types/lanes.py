"""The lanes of work, and the time that each was busy."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, Protocol


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
