"""The lanes of work, and how much of a stretch of time each was busy."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, Protocol


class Lane(Enum):
    """What kind of work, and who does it."""

    READ = "read"  # disk to host
    CARRY = "carry"  # the host's arithmetic on what travels: replaying, rounding, widening
    UPLOAD = "upload"  # host to device
    ACTIVATIONS_IN = "activations in"  # the same way, for those that waited in host memory
    REPLAY = "replay"  # the device's arithmetic
    EVALUATE = "evaluate"  # the device's perturbing and forwards
    OFFLOAD = "offload"  # device to host
    ACTIVATIONS_OUT = "activations out"  # the same way, to wait there
    WRITE = "write"  # host to disk


COMPUTE = (Lane.REPLAY, Lane.EVALUATE)  # one after the other: together they are one lane


class Event(Protocol):
    """A point in the order of work."""

    @property
    def passed(self) -> bool:
        """Whether all work before it is done."""

    @property
    def seconds(self) -> float:
        """When it passed, on the clock of ``time.perf_counter``; to be asked once it has."""


class LaneUse(NamedTuple):
    """How much of a stretch of time a lane was at work."""

    busy_seconds: float
    nbytes: int


def bound_seconds(uses: Mapping[Lane, LaneUse]) -> float:
    """The time that the slowest lane alone takes; replay and forwards share one."""
    compute = sum(uses[lane].busy_seconds for lane in COMPUTE)
    return max(compute, *(use.busy_seconds for lane, use in uses.items() if lane not in COMPUTE))
