"""Perturbers apply updates and write perturbed weights: one for noise drawn into memory, one for counter-based noise."""

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

# Note: Second thread. Starting work on it takes tens of microseconds, so smaller segments stay on one thread.
PARALLEL_FROM = 1 << 17


class Perturber(Protocol):
    """Changes weights during one sweep: applies updates to the stores, and writes perturbed weights to the work buffer."""

    @property
    def seeds(self) -> Collection[int]:
        """Seeds of the directions that this sweep draws."""

    @property
    def version(self) -> int:
        """The present version of the weights, at which segments are after ``replay``."""

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version; its bytes are final for this sweep when this returns.

        The work buffer may then hold weights of the first evaluation already.
        """

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let the forward read a segment's frozen weights. Called once a visit."""

    def perturb(self, index: int, stores: Stores, before: Evaluation | None, evaluation: Evaluation | None) -> None:
        """Write the weights of a segment's next evaluation to the work buffer."""

    def finish(self) -> None:
        """Wait until the second thread no longer uses the memory, however the sweep ended."""


def choose_perturber(
    noise: NoiseGenerator, buffer: WorkBuffer, worker: ThreadPoolExecutor | None
) -> Callable[[Trajectory], Perturber]:
    """Choose how perturbers are made."""
    if isinstance(noise, CounterNoise):
        return partial(CounterPerturber, noise, buffer, worker, parallel_from=PARALLEL_FROM)
    return partial(DrawnPerturber, noise, buffer, worker, parallel_from=PARALLEL_FROM)
