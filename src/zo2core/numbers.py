"""The numbers of a step: where its directions come from, and what is refused before it counts as taken."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import torch

from zo2core.errors import NonFiniteLossError
from zo2core.estimators import require_positive
from zo2core.protocols import ZOEstimator
from zo2core.types import Evaluation, Update


def learning_rate(estimator: ZOEstimator, step: int) -> float:
    """The learning rate of a step.

    Raises:
        OptionError: if it is not positive and finite.
    """
    value = estimator.lr(step) if callable(estimator.lr) else estimator.lr
    require_positive(f"lr at step {step}", value)
    return float(value)


def directions(run_seed: int, step: int, given: int | None) -> Iterator[int]:
    """Seeds in [0, 1e9), as MeZO draws them, from a generator of the step's own; a given seed comes first."""
    if given is not None:
        yield given
    rng = random.Random(f"{run_seed}/{step}" if given is None else f"given/{given}")  # noqa: S311 - no secret
    while True:
        yield rng.randrange(1_000_000_000)


def probes(estimator: ZOEstimator | None, updates: Sequence[Update]) -> int:
    """The most directions that a step probes, of those to come and of those taken."""
    taken = max((len(update.seeds) for update in updates), default=1)
    if estimator is None:
        return taken
    return max(taken, len({evaluation.seed for evaluation in estimator.evaluations(0, directions(0, 0, None))}))


def require_finite(step: int, evaluation: Evaluation, loss: torch.Tensor) -> None:
    """Refuse a step one of whose losses is not finite.

    Raises:
        NonFiniteLossError: naming the evaluation.
    """
    if not math.isfinite(loss.item()):
        raise NonFiniteLossError(
            f"step {step}, seed {evaluation.seed}, shift {evaluation.shift:+g}",
            found=f"loss {loss.item()}",
            expected="a finite loss",
            remedy="lower lr or zo_eps, or use dtype bfloat16 or float32 where float16 overflows; the step was not taken",
        )


def require_finite_update(update: Update) -> None:
    """Refuse an update that would destroy the weights.

    Raises:
        NonFiniteLossError: if a projected gradient is not finite.
    """
    if not all(math.isfinite(grad) for grad in update.projected_grads):
        raise NonFiniteLossError(
            f"step {update.step}",
            found=f"projected gradients {update.projected_grads}",
            expected="finite ones",
            remedy="raise zo_eps: the difference of the losses was divided by too small a number; the step was not taken",
        )
