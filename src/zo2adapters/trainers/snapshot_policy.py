"""When a first-order run takes a snapshot: as often as it is told, or as costs it a fiftieth of its time."""

from __future__ import annotations

from collections.abc import Callable

LARGEST_SHARE = 0.02  # of the time since the last snapshot that the next one may cost


class SnapshotPolicy:
    """Says when a snapshot is due.

    Args:
        every: Steps between two snapshots; None: as many as make a snapshot cost at most ``LARGEST_SHARE``, by what the last
            one cost. The first is taken after the first step: only then is the cost known.
        clock: Seconds, from any moment on.
    """

    def __init__(self, every: int | None, clock: Callable[[], float]) -> None:
        self.every = every
        self.least = 1  # steps between two snapshots, if ``every`` is None: what the disk may be written
        self._clock = clock
        self._cost: float | None = None  # seconds that the last snapshot took
        self._taken = clock()

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is due after so many steps."""
        if self.every is not None:
            return step % self.every == 0
        if step % self.least:
            return False
        return self._cost is None or self._cost <= LARGEST_SHARE * (self._clock() - self._taken)

    def take(self, write: Callable[[], None]) -> None:
        """Call what writes a snapshot, and learn what that costs."""
        began = self._clock()
        write()
        self._taken = self._clock()
        self._cost = self._taken - began
