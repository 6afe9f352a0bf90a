"""Warnings about the health of a run: rounded-away updates, too small steps, divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from zo2adapters.trainers.options import TrainOptions
from zo2core import StepResult, Update, ZO2Error
from zo2core.errors import DivergenceError
from zo2core.estimators import ESTIMATORS
from zo2core.guard import best_step
from zo2core.ranges import counted

LEAST_APPLIED = 0.5  # share of the weights that an update should change
LEAST_FALL = 0.1  # share of the loss by which all steps together should lower it
JUDGED_AFTER = 20  # steps after which the step size is judged

_FEWEST_STEPS = 100  # shorter runs are not expected to learn, and are not judged


class HealthMonitor:
    """Checks each step of a run, and gives each warning once."""

    def __init__(self) -> None:
        self._warned_of_rounding = False

    def warnings(self, result: StepResult, updates: Sequence[Update], options: TrainOptions) -> list[str]:
        """Warnings after a step."""
        warnings = []
        rounding = None if self._warned_of_rounding else rounded_away(result, options)
        if rounding is not None:
            self._warned_of_rounding = True
            warnings.append(rounding)
        if len(updates) == JUDGED_AFTER and (small := too_small(updates, options)) is not None:
            warnings.append(small)
        return warnings


def destroyed(updates: Sequence[Update]) -> str | None:
    """Warning that the steps have destroyed the model; None if they have not.

    Directions are independent and of unit variance, so each weight has moved by the root of the sum of squares. Weights are
    below 1, so a model whose weights have moved by more than 1 is destroyed, whatever its loss.
    """
    moved = math.sqrt(sum((update.lr * grad) ** 2 for update in updates for grad in update.projected_grads))
    losses = [update.losses[0] for update in updates]
    share = max(len(losses) // 10, 1)
    first, last = fmean(losses[:share]), fmean(losses[-share:])
    if moved <= 1 and last <= first + abs(first) + 1:
        return None
    changes = f"each weight moved by {moved:.2g}, and the loss went from {first:.4g} to {last:.4g}"
    return f"{changes}: the steps were too large and destroyed the model; zo2 tune finds an --lr that does not diverge"


def rounded_away(result: StepResult, options: TrainOptions) -> str | None:
    """Warning that a step's update changed fewer than half of the weights; None if it changed more, or was not measured."""
    if result.share_applied is None or result.share_applied >= LEAST_APPLIED:
        return None
    name, _, back = options.model_options.transfer_dtype.partition("-")
    remedy = f"--precision mixed:transfer={name}" if back else "--precision mixed, or --dtype float32"
    return (
        f"step {result.step}: the update changed {result.share_applied:.0%} of the stored weights; the "
        f"others rounded back to their old values; keep them in float32 ({remedy}), or raise --lr"
    )


def too_small(updates: Sequence[Update], options: TrainOptions) -> str | None:
    """Warning that all steps of the run together can hardly lower the loss; None if they can.

    To first order an update of ``lr * g`` along a direction lowers the batch's loss by ``lr * g`` times the slope there.
    The slope is computed from the losses, since g may have been clipped or divided. An estimator that evaluates
    one side of each direction, such as FZOO, gives no slope, and is not judged.
    """
    if options.steps < _FEWEST_STEPS or not ESTIMATORS[options.optimization.estimator].multi_query.is_two_sided:
        return None
    fall, loss = options.steps * median(map(_promised_fall, updates)), updates[0].losses[0]
    if fall >= LEAST_FALL * abs(loss):
        return None
    return (
        f"after {counted(len(updates), 'step')}: at this rate, all {options.steps} steps lower the loss of {loss:.3g} by at "
        f"most {fall:.1g}; lr {options.optimization.rate:g} is far too small, and zo2 tune finds a better one"
    )


def _promised_fall(update: Update) -> float:
    """Expected fall of the loss by an update, from the slopes between both sides of its directions."""
    sides = zip(update.losses[::2], update.losses[1::2], update.projected_grads, strict=True)
    return sum(update.lr * grad * (plus - minus) / (2 * update.zo_eps) for plus, minus, grad in sides)


def diverged(error: ZO2Error, updates: Sequence[Update], options: TrainOptions) -> DivergenceError:
    """The error that ended a run, with commands to find a smaller learning rate and to continue with it."""
    best = best_step(updates)
    return DivergenceError(
        error.where,
        found=error.found,
        expected=error.expected,
        remedy=f"find a learning rate below {options.optimization.rate:g} that does not diverge, with this run's batch size "
        f"and directions: zo2 tune --model {options.model} --data {options.data} --output TRIALS; then continue from "
        f"step {best}, the best so far: {options.resume_command} --from-step {best} --output NEW --lr RATE",
        best_step=best,
    )
