"""When a first-order run takes snapshots: every so many steps, or one a minute if that costs at most 2 % of its time."""

from __future__ import annotations

from collections.abc import Callable

from zo2core.planning.speeds import RESUME_SECONDS

LARGEST_SHARE = 0.02  # cost of a snapshot, at most, as a share of the time since the last one


class SnapshotPolicy:
    """Says when a snapshot is due."""

    def __init__(self, every: int | None, clock: Callable[[], float]) -> None:
        self.every = every
        self.least = 1  # steps between two snapshots, if ``every`` is None: what the disk may be written
        self._clock = clock
        self._cost: float | None = None  # seconds that the last snapshot took
        self._taken = clock()

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is due after this number of steps."""
        if self.every is not None:
            return step % self.every == 0
        if step % self.least:
            return False
        return self._cost is None or self._clock() - self._taken >= interval(self._cost)

    def take(self, write: Callable[[], None]) -> None:
        """Write a snapshot, and measure its cost."""
        began = self._clock()
        write()
        self._taken = self._clock()
        self._cost = self._taken - began


def interval(cost: float) -> float:
    """Seconds between two snapshots, each of which takes so many: a resumed run repeats no more than that.

    Fewer seconds would write more to the disk: without this limit small snapshots were taken at almost every step.
    """
    return max(RESUME_SECONDS, cost / LARGEST_SHARE)
