"""A guard against divergence: the health of a run, judged by its updates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from zo2core.errors import DivergenceError, ZO2Warning
from zo2core.estimators.wrappers import EstimatorWrapper
from zo2core.ranges import require_number, require_whole
from zo2core.types import Update

# Run health: steps far outside the past losses, runs that have become permanently worse, and the
# best step of a run.
#
# All functions depend only on the losses in the journal's records, whatever an estimator, clipping
# or a guard computed from them. The *level* of a step is the mean of its losses. Its *contrast* is
# the range of its losses divided by ``zo_eps``: twice the projected gradient of a two-point
# estimator. Directions are independent with unit variance, so after some steps each weight has
# moved by the root of the sum of ``(lr * projected_grad)^2``.
#
# A guard against divergence: it skips steps far outside the run's range, and stops a run that has
# become worse.

RECENT = 10  # the last steps, of which refused ones do not count
LEAST = 20  # steps at the start of a run, none of which is refused

# Note: How far is far. Noise must never stop a run, and should hardly ever refuse a step. Losses of
# small batches are not normally distributed: most rows are easy, and one in a hundred is not. So a
# single step is compared with the extremes of the last 200, not with their quartiles: rows that
# come once in 50 steps are within the range. With normal noise, five times the distance from the
# median to the extreme is nine standard deviations at the 20th step and fourteen at the 200th.

BLOCK = 10  # steps with one median loss; the run is checked after each such block
# weights of trained models are below 1: if each moved by more, the model is destroyed
MOST_MOVED = 1.0

# Note: How much worse is permanently worse. The noise of single losses must never stop a run, so
# each margin is at least half a nat, half of the loss itself, and twice the distance from the
# median to the extreme of the losses it is compared with: with batches of one row, of which one in
# ten is hard, medians of ten steps jump. Progress counts as lost when more than half of it is. A
# destroyed model may also have a low loss, that of a coin toss, which no longer changes; the
# distance that its weights have moved shows it.


def level(update: Update) -> float:
    """Return the mean of a step's losses."""
    return sum(update.losses) / len(update.losses)


def is_refused(update: Update) -> bool:
    """Whether a step with different losses was not applied."""
    return not any(update.projected_grads) and min(update.losses) != max(update.losses)


def outlier(update: Update, past: Sequence[Update], *, window: int, factor: float) -> str | None:
    """Describe how a step lies far outside the run's range; None if it does not.

    Recently refused steps do not count, so that all steps after a lasting jump are refused until
    the run stops.
    """
    if len(past) < LEAST:
        return None
    counted = [
        *past[-4 * window : -RECENT],
        *(earlier for earlier in past[-RECENT:] if not is_refused(earlier)),
    ]
    now = level(update)
    contrast = _contrast(update)
    last = counted[-LEAST:]
    if now <= max(map(level, last)) and contrast <= max(map(_contrast, last)):
        return None  # a step within the range of the last steps, as most are, is within that of all
    levels = [level(earlier) for earlier in counted]
    middle = median(levels[-window:])
    extreme = max(levels)
    if now > middle + factor * max(extreme - middle, 0.1 * abs(middle)):
        return (
            f"loss {now:.4g}, where the last {len(levels)} steps had {min(levels):.4g} to "
            f"{extreme:.4g}"
        )
    largest = max(map(_contrast, counted))
    if contrast > factor * largest > 0:
        return (
            f"losses {contrast:.4g} zo_eps apart, where the last {len(levels)} steps had "
            f"{largest:.4g} at most"
        )
    return None


def _contrast(update: Update) -> float:
    return (max(update.losses) - min(update.losses)) / update.zo_eps


class RunHealth(NamedTuple):
    """A summary of a run's updates, in blocks of ``BLOCK`` steps."""

    version: int = 0  # number of updates in the summary
    last: Update | None = None  # last of these updates
    squares: float = 0.0  # square of the distance that each weight has moved
    best: float = math.inf  # lowest median loss of a block
    best_end: int = 0  # version after that block

    def extended(self, past: Sequence[Update]) -> RunHealth:
        """Return the summary of these updates: this one extended if they continue it, else a new
        one.
        """
        continues = self.version <= len(past) and (
            self.version == 0 or past[self.version - 1] is self.last
        )
        health = self if continues else RunHealth()
        for end in range(health.version + BLOCK, len(past) + 1, BLOCK):
            block = past[end - BLOCK : end]
            now = median(map(level, block))
            squares = sum(map(squared_move, block), health.squares)
            best, best_end = (now, end) if now < health.best else (health.best, health.best_end)
            health = RunHealth(end, block[-1], squares, best, best_end)
        return health


def squared_move(update: Update) -> float:
    """Return the square of the distance that an update moves each weight."""
    return sum((update.lr * grad) ** 2 for grad in update.projected_grads)


def drift(health: RunHealth, past: Sequence[Update], *, window: int) -> tuple[str, str] | None:
    """Check whether a run has become permanently worse; runs are checked at the end of a block."""
    if not past or health.version != len(past):
        return None
    moved = math.sqrt(health.squares)
    if moved > MOST_MOVED:
        return (
            f"each weight moved by {moved:.2g} in all",
            f"at most {MOST_MOVED:g}, since most weights are below it",
        )
    now = median(map(level, past[-BLOCK:]))
    found = f"a median loss of {now:.4g} in the last {BLOCK} steps"
    first_levels = _levels_while(past[:window], 10 * past[0].zo_eps)
    start = median(first_levels)
    worst = max(first_levels)
    limit = worst + max(0.5, 0.5 * abs(worst), 2 * (worst - start))
    if now > limit:
        return found, f"at most {limit:.4g}, since the run began with {start:.4g}"
    around = max(map(level, past[max(0, health.best_end - window) : health.best_end]))
    limit = health.best + max(
        0.5, 0.5 * abs(health.best), 0.5 * (start - health.best), 2 * (around - health.best)
    )
    if now > limit:
        return found, f"at most {limit:.4g}, since the best ten steps had {health.best:.4g}"
    return None


def best_step(past: Sequence[Update]) -> int:
    """Return the version of a run's best weights.

    Of the ten consecutive steps (fewer at the start) with the lowest median loss, it is the one
    with the lowest loss. So neither a single lucky batch wins, nor a step after a jump at the end
    of these ten, nor the weights of a destroyed model.
    """
    levels = _levels_while(past, MOST_MOVED)
    if not levels:
        return 0
    medians = [median(levels[max(0, step + 1 - BLOCK) : step + 1]) for step in range(len(levels))]
    end = medians.index(min(medians)) + 1
    start = max(0, end - BLOCK)
    return levels.index(min(levels[start:end]), start)


def _levels_while(past: Sequence[Update], most_moved: float) -> list[float]:
    """Return the levels of the first steps, at least one, until the weights have moved further than
    ``most_moved``.
    """
    levels: list[float] = []
    squares = 0.0
    for update in past:
        if levels and squares > most_moved**2:
            break
        levels.append(level(update))
        squares += squared_move(update)
    return levels


@dataclass(frozen=True, kw_only=True)
class GuardPolicy:
    """The limits of a guard.

    The defaults are chosen so that the guard never acts on a run that learns.

    Args:
        window: Number of steps in the running median of losses.
        factor: Largest distance of a step from that median, as a multiple of the distance from the
            median to the highest recent loss.
        refusals: Number of skipped steps, of the last ten, that ends the run.

    Raises:
        OptionError: if a number is out of its range.
    """

    window: int = 50
    factor: float = 5.0
    refusals: int = 5

    def __post_init__(self) -> None:
        require_whole("guard.window", self.window, RECENT)
        require_number("guard.factor", self.factor, least=1)
        require_whole("guard.refusals", self.refusals, 1, RECENT)


@dataclass(frozen=True, kw_only=True)
class Guarded(EstimatorWrapper):
    """An estimator whose steps are compared with the run's past before they are applied.

    A step whose losses lie far outside their past range, or whose update is larger than the
    weights, is *not applied*, and a warning says so. Its record has the losses, but projected
    gradients of 0, no weight decay and no in-place perturbations, so that replaying it changes no
    weight. All other updates are the wrapped estimator's, bit for bit. The functions ``outlier``
    and ``drift`` say how far is too far.

    The run ends with a ``DivergenceError`` if too many of the last ten steps were not applied, or
    if the run has become permanently worse by the measure of ``drift``. The error names the best
    step so far, from which to branch.

    The guard depends only on the journal, so a resumed run has the same bits, and ends with the
    same error.

    Args:
        estimator: The wrapped estimator.
        policy: The limits.
    """

    policy: GuardPolicy = field(default_factory=GuardPolicy)
    # A cache of the last summary, which follows from ``past``, so that a step does not start from
    # the first update again.
    _cached: list[RunHealth] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the wrapped estimator, and the limits."""
        policy = self.policy
        limits = {
            "window": policy.window,
            "factor": float(policy.factor),
            "refusals": policy.refusals,
        }
        return {**self.estimator.options, "guard": limits}

    def adjust(self, update: Update, past: Sequence[Update]) -> Update:
        """Leave the update as it is, or make it one that changes no weight.

        Raises:
            DivergenceError: if the run has diverged.
        """
        step = update.step
        policy = self.policy
        drifted = drift(self._health(past), past, window=policy.window)
        if drifted is not None:
            raise _diverged(step, past, *drifted)
        moves = math.sqrt(squared_move(update))
        reason = outlier(update, past, window=policy.window, factor=policy.factor)
        if reason is None and not moves > MOST_MOVED:
            return update
        reason = (
            reason
            or f"an update that moves each weight by {moves:.2g}, and most weights are below 1"
        )
        refused = 1 + sum(is_refused(earlier) for earlier in past[1 - RECENT :])
        if refused >= policy.refusals:
            found = (
                f"{refused} of the last {min(step + 1, RECENT)} steps cannot be applied ({reason})"
            )
            raise _diverged(step, past, found, f"fewer than {policy.refusals}")
        warnings.warn(f"step {step} is not applied: {reason}", ZO2Warning, stacklevel=2)
        unchanged = (0.0,) * len(update.projected_grads)
        return replace(update, projected_grads=unchanged, weight_decay=0.0, perturb_in_place=False)

    def _health(self, past: Sequence[Update]) -> RunHealth:
        health = (self._cached.pop() if self._cached else RunHealth()).extended(past)
        self._cached.append(health)
        return health


def _diverged(step: int, past: Sequence[Update], found: str, expected: str) -> DivergenceError:
    best = best_step(past)
    return DivergenceError(
        f"step {step}",
        found=found,
        expected=expected,
        remedy=(
            f"branch the journal at step {best}, the best so far, and continue with a lower `lr`; "
            "the step was not taken"
        ),
        best_step=best,
    )
