"""What a visit asks of noise, and who does it: one perturber for noise drawn into memory, one for counter-based noise."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from zo2core.protocols import CounterNoise, NoiseGenerator, Stores
from zo2core.sweep.counter_perturber import CounterPerturber
from zo2core.sweep.drawn_perturber import DrawnPerturber
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import Evaluation
from zo2core.updates import Trajectory

# Note: Second thread. Handing work over takes tens of microseconds; segments with fewer elements are done on one thread.
PARALLEL_FROM = 1 << 17


class Perturber(Protocol):
    """Moves weights during one sweep: those in the stores through updates, those in the work buffer to evaluations."""

    @property
    def seeds(self) -> Collection[int]:
        """Directions that this sweep draws."""

    @property
    def version(self) -> int:
        """The present version, which replaying leads to."""

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version; its bytes are final for this sweep when this returns.

        The work buffer may already be on its way to the first evaluation.

        Args:
            index: The segment.
            stores: Its own store, and those it borrows from, by segment.
            version: Of its store before.

        Returns:
            The version after.
        """

    def show(self, index: int, stores: Stores) -> None:
        """Bring what a segment only reads to where its forward reads it, once a visit.

        Args:
            index: The segment, replayed.
            stores: As for ``replay``.
        """

    def move(self, index: int, stores: Stores, before: Evaluation | None, evaluation: Evaluation | None) -> None:
        """Bring the work buffer to the weights of a segment's next evaluation.

        Args:
            index: The segment, replayed.
            stores: As for ``replay``.
            before: The evaluation that the work buffer is at; None for the first one of the visit.
            evaluation: The one to come; None is the weights as they are.
        """

    def finish(self) -> None:
        """Wait until the second thread has let go of the memory, however the sweep ended."""


def choose_perturber(
    noise: NoiseGenerator, buffer: WorkBuffer, worker: ThreadPoolExecutor | None
) -> Callable[[Trajectory], Perturber]:
    """What makes the perturber of a sweep from what the sweep does to the weights.

    Args:
        noise: Draws z.
        buffer: One sweep at a time may use it.
        worker: The second thread; None does without.
    """
    if isinstance(noise, CounterNoise):
        return partial(CounterPerturber, noise, buffer, worker, parallel_from=PARALLEL_FROM)
    return partial(DrawnPerturber, noise, buffer, worker, parallel_from=PARALLEL_FROM)
