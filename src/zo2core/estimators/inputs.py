"""Inputs of estimators: learning rates, seeds of directions and their distribution."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass

from zo2core.errors import OptionError
from zo2core.protocols import CounterNoise, NoiseGenerator, ZOEstimator
from zo2core.ranges import require_number


def learning_rate(estimator: ZOEstimator, step: int) -> float:
    """Return the learning rate of a step.

    Raises:
        OptionError: if it is not positive and finite. A schedule may also return 0, as a warm-up does at its first step.
    """
    if callable(estimator.lr):
        value = estimator.lr(step)
        require_number(f"lr at step {step}", value, least=0, remedy="correct the learning rate schedule")
    else:
        value = estimator.lr
        require_number("lr", value, above=0)
    return float(value)


def describe_lr(lr: float | Callable[[int], float]) -> float | str:
    """Describe a learning rate by a JSON value, which is the same for equal learning rates."""
    if not callable(lr):
        return float(lr)
    return repr(lr) if is_dataclass(lr) else "a function"


def direction_seeds(run_seed: int, step: int, first: int | None) -> Iterator[int]:
    """Yield seeds in [0, 1e9), as MeZO draws them, from a separate generator for each step.

    Args:
        run_seed: Seed of the run.
        step: 0-based.
        first: A first seed that the caller chose, from which the others follow; None draws all seeds.
    """
    if first is not None:
        yield first
    rng = random.Random(f"{run_seed}/{step}" if first is None else f"given/{first}")  # noqa: S311 - no secret
    while True:
        yield rng.randrange(1_000_000_000)


def distinct(seeds: Iterator[int], count: int) -> tuple[int, ...]:
    """Take ``count`` different seeds. A repeated seed is skipped, so that q directions are different."""
    taken: dict[int, None] = {}
    while len(taken) < count:
        taken[next(seeds)] = None
    return tuple(taken)


def require_distribution(estimator: ZOEstimator, noise: NoiseGenerator) -> None:
    """Refuse noise of another distribution than the estimator needs."""
    needed = estimator.distribution
    if needed is None or (isinstance(noise, CounterNoise) and noise.distribution is needed):
        return
    raise OptionError(
        "noise",
        found=noise.name,
        expected=f"{needed.value} noise, which the estimator {estimator.options.get('name')} needs",
        remedy=f"pass noise=PhiloxNoise(Distribution.{needed.name})",
    )
