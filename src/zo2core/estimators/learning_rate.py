"""The learning rate of an estimator: a number, or a function of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass

from zo2core.estimators.ranges import require_positive, require_scheduled_lr
from zo2core.protocols import ZOEstimator


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
