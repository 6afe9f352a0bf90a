"""Where the seeds of a step's directions come from: from the run's seed and the step alone."""

from __future__ import annotations

import random
from collections.abc import Iterator


def direction_seeds(run_seed: int, step: int, given: int | None) -> Iterator[int]:
    """Yield seeds in [0, 1e9), as MeZO draws them, from a generator of the step's own.

    Args:
        run_seed: Seed of the run.
        step: 0-based.
        given: A seed that the caller chose for the step: it comes first, and those after it follow from it.
    """
    if given is not None:
        yield given
    rng = random.Random(f"{run_seed}/{step}" if given is None else f"given/{given}")  # noqa: S311 - no secret
    while True:
        yield rng.randrange(1_000_000_000)


def distinct(seeds: Iterator[int], count: int) -> tuple[int, ...]:
    """The first seeds that differ from each other: one that comes up again is passed over, so that q directions are q."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[next(seeds)] = None
    return tuple(found)
