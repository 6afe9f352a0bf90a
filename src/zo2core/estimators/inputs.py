"""What estimators take: checked numbers, the learning rate of a step, the seeds of its directions, their distribution."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass

from zo2core.errors import OptionError
from zo2core.protocols import CounterNoise, NoiseGenerator, ZOEstimator


def require_positive(name: str, value: float) -> None:
    """Refuse a number that is not positive and finite.

    Raises:
        OptionError: naming the option.
    """
    if not (math.isfinite(value) and value > 0):
        raise OptionError(name, found=repr(value), expected="a positive finite number", remedy=f"choose `{name}` > 0")


def require_scheduled_lr(name: str, value: float) -> None:
    """Refuse a learning rate of a schedule that is negative or not finite.

    Raises:
        OptionError: naming the option.
    """
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(
            name,
            found=repr(value),
            expected="a finite number of at least 0",
            remedy="mend the learning rate's schedule",
        )


def require_weight_decay(value: float) -> None:
    """Refuse a weight decay that is negative or not finite.

    Raises:
        OptionError: naming the option.
    """
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(
            "weight_decay",
            found=repr(value),
            expected="a finite number of at least 0",
            remedy="pass 0 for no weight decay",
        )


def require_query_count(q: int, *, least: int) -> None:
    """Refuse a number of directions that is too small or no whole number.

    Raises:
        OptionError: naming the option.
    """
    if not isinstance(q, int) or q < least:
        raise OptionError(
            "q", found=repr(q), expected=f"a whole number of at least {least}", remedy=f"choose `q` >= {least}"
        )


def learning_rate(estimator: ZOEstimator, step: int) -> float:
    """The learning rate of a step.

    Raises:
        OptionError: if it is not positive and finite; a schedule may also give 0, as a warm-up does at its first step.
    """
    if callable(estimator.lr):
        value = estimator.lr(step)
        require_scheduled_lr(f"lr at step {step}", value)
    else:
        value = estimator.lr
        require_positive("lr", value)
    return float(value)


def describe_lr(lr: float | Callable[[int], float]) -> float | str:
    """A learning rate as a JSON value that two equal ones share."""
    if not callable(lr):
        return float(lr)
    return repr(lr) if is_dataclass(lr) else "a function"


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


def require_distribution(estimator: ZOEstimator, noise: NoiseGenerator) -> None:
    """Refuse noise that does not say to have the distribution that an estimator needs.

    Raises:
        OptionError: naming both.
    """
    needed = estimator.distribution
    if needed is None or (isinstance(noise, CounterNoise) and noise.distribution is needed):
        return
    raise OptionError(
        "noise",
        found=noise.name,
        expected=f"{needed.value} noise, which the estimator {estimator.options.get('name')} needs",
        remedy=f"pass noise=PhiloxNoise(Distribution.{needed.name})",
    )
