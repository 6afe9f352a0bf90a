"""What a user should know of how a run goes, each in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from zo2adapters.trainers.options import TrainOptions
from zo2core import DivergenceError, StepResult, Update, ZO2Error
from zo2core.estimators import EstimatorName
from zo2core.estimators.run_health import best_step

LEAST_APPLIED = 0.5  # share of the weights that an update should change
LEAST_FALL = 0.1  # of the loss, that the steps of a run should promise
JUDGED_AFTER = 20  # steps

_FEWEST_STEPS = 100  # of a run that is meant to learn something


class Watch:
    """Looks at each step of a run, and says what is wrong with all of them, once."""

    def __init__(self) -> None:
        self._said_rounding = False

    def lines(self, result: StepResult, updates: Sequence[Update], options: TrainOptions) -> list[str]:
        """What there is to say after a step.

        Args:
            result: Result of the step.
            updates: Updates of the run, this step's the last.
            options: Options of the run.
        """
        lines = []
        rounding = None if self._said_rounding else rounded_away(result, options)
        if rounding is not None:
            self._said_rounding = True
            lines.append(rounding)
        if len(updates) == JUDGED_AFTER and (small := too_small(updates, options)) is not None:
            lines.append(small)
        return lines


def ruined(updates: Sequence[Update]) -> str | None:
    """Say if the steps left nothing of the model, in a line; None if they did not.

    Directions are independent and of unit variance, so weights have moved by the root of the sum of squares. Of weights
    below 1 that moved by more than 1 nothing is left, whatever the loss has come to.
    """
    moved = math.sqrt(sum((update.lr * grad) ** 2 for update in updates for grad in update.projected_grads))
    losses = [update.losses[0] for update in updates]
    share = max(len(losses) // 10, 1)
    first, last = fmean(losses[:share]), fmean(losses[-share:])
    if moved <= 1 and last <= 2 * first + 1:
        return None
    went = f"each weight moved by {moved:.2g}, the loss from {first:.4g} to {last:.4g}"
    return f"{went}: the steps were too large for a model to survive; zo2 tune finds an --lr that holds"


def rounded_away(result: StepResult, options: TrainOptions) -> str | None:
    """Say if a step's update changes fewer than half of the weights; None if it does not, or was not looked at.

    Args:
        result: Result of the step.
        options: Options of the run. They decide the remedy: a run whose weights are rounded as they travel back from a
            device is in mixed precision already.
    """
    if result.share_applied is None or result.share_applied >= LEAST_APPLIED:
        return None
    name, _, back = options.model_options.transfer_dtype.partition("-")
    remedy = f"--transfer-dtype {name}" if back else "--precision mixed, or --dtype float32"
    return (
        f"step {result.step}: the update changes {result.share_applied:.0%} of the stored weights; the "
        f"others round back to their old values; keep them in float32 ({remedy}), or raise --lr"
    )


def too_small(updates: Sequence[Update], options: TrainOptions) -> str | None:
    """Say if all steps of a run together promise next to nothing; None if they do not.

    Along its direction an update of ``lr * g`` lets the loss of its batch fall by ``lr * g`` times the slope there, to first
    order. The slope follows from the losses, since g may have been clipped or divided. Nothing is said of FZOO, which takes
    one side of each direction.
    """
    if options.steps < _FEWEST_STEPS or options.optimization.estimator is EstimatorName.FZOO:
        return None
    fall, loss = options.steps * median(map(_promised_fall, updates)), updates[0].losses[0]
    if fall >= LEAST_FALL * abs(loss):
        return None
    return (
        f"after {len(updates)} steps: with slopes like these, all {options.steps} steps lower the loss of {loss:.3g} by "
        f"{fall:.1g} at most; lr {options.optimization.lr:g} is far too small, and zo2 tune finds a better one"
    )


def _promised_fall(update: Update) -> float:
    """How far the loss falls along the update's directions, by the slopes between both sides of each."""
    sides = zip(update.losses[::2], update.losses[1::2], update.projected_grads, strict=True)
    return sum(update.lr * grad * (plus - minus) / (2 * update.zo_eps) for plus, minus, grad in sides)


def diverged(error: ZO2Error, updates: Sequence[Update], options: TrainOptions) -> DivergenceError:
    """An error that ended a run, with the command that finds a rate that holds, and the one that goes on with it.

    No rate is named: what a smaller one does was not seen.
    """
    best = best_step(updates)
    return DivergenceError(
        error.where,
        found=error.found,
        expected=error.expected,
        remedy=f"find a learning rate below {options.optimization.lr:g} that holds, with this run's batch size and "
        f"directions: zo2 tune --model {options.model} --data {options.data} --output TRIALS; then go on with it from step "
        f"{best}, the best so far: zo2 train --resume {options.output} --from-step {best} --output NEW --lr RATE",
        best_step=best,
    )
