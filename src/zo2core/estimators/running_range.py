"""Where a run's losses and projected gradients have been, and what lies far outside: functions of the journal alone.

Everything is computed from the losses that stand in the records, so it does not matter what an estimator, clipping or a
guard made of them. The *level* of a step is the mean of its losses; its *contrast* is how far they lie apart, over
``zo_eps``: twice the projected gradient of a two-point estimator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from zo2core.types import Update

RECENT = 10  # steps: what the present state is judged by
LEAST = 20  # steps before which a single one is not judged

# Note: How far is far. A run must never be stopped by its noise, and a step should hardly ever be. Losses of small batches
# are anything but normal: most rows are easy, and one in a hundred is not. So a single step is held against the extremes of
# the last 200, not against their quartiles: rows that come once in 50 steps are within the range. With normal noise, five
# times the distance from the median to the extreme is nine standard deviations at the 20th step and fourteen at the 200th.
#
# The state of a run is the median of its last 10 losses, looked at every 10 steps. The margin is at least half a unit (half
# a nat), half of the level itself, and twice the distance from the median to the extreme of what it is held against. What
# was learned counts as lost when more than half of it is.


def level(losses: Sequence[float]) -> float:
    """The mean of a step's losses."""
    return sum(losses) / len(losses)


def is_refused(update: Update) -> bool:
    """Whether a step was not applied, though its losses differ."""
    return not any(update.projected_grads) and min(update.losses) != max(update.losses)


def outlier(losses: Sequence[float], zo_eps: float, past: Sequence[Update], *, window: int, factor: float) -> str | None:
    """Tell how the losses of a step lie far outside the run's range, in words; None if they do not.

    Steps that were refused lately do not count: a jump that lasts is refused until the run stops.

    Args:
        losses: Of the step.
        zo_eps: Of the step.
        past: All updates before it.
        window: Steps whose median is the middle of the range; its extremes are those of four times as many.
        factor: How many times the distance from the middle to the extreme a loss may be away.
    """
    if len(past) < LEAST:
        return None
    counted = [*past[-4 * window : -RECENT], *(update for update in past[-RECENT:] if not is_refused(update))]
    now, apart = level(losses), _contrast(losses, zo_eps)
    near = counted[-LEAST:]
    if now <= max(level(update.losses) for update in near) and apart <= max(map(_contrast_of, near)):
        return None  # within the last steps' range, hence within that of all: most steps are
    levels = [level(update.losses) for update in counted]
    middle, extreme = median(levels[-window:]), max(levels)
    if now > middle + factor * max(extreme - middle, 0.1 * abs(middle)):
        return f"loss {now:.4g}, where the last {len(levels)} steps had {min(levels):.4g} to {extreme:.4g}"
    furthest = max(map(_contrast_of, counted))
    if apart > factor * furthest > 0:
        return f"losses {apart:.4g} zo_eps apart, where the last {len(levels)} steps had {furthest:.4g} at most"
    return None


class Drift(NamedTuple):
    """Where a run has drifted to."""

    now: float  # median of the last steps' losses
    limit: float  # what it should have stayed below
    reference: str  # what that follows from, in words


def drift(past: Sequence[Update], *, window: int) -> Drift | None:
    """Tell whether the last 10 steps are much worse than the run's beginning, or have lost most of what was learned.

    Args:
        past: All updates so far. Only every tenth step is judged, so that the run's best ten steps are found quickly.
        window: Steps that the beginning, and the best ten steps with those before them, have at most.
    """
    if not past or len(past) % RECENT != 0:
        return None
    now = median(level(update.losses) for update in past[-RECENT:])
    begun = _beginning(past[:window])
    start, worst = median(begun), max(begun)
    limit = worst + max(0.5, 0.5 * abs(worst), 2 * (worst - start))
    if now > limit:
        return Drift(now, limit, f"the run began with {start:.4g}")
    medians = [median(level(update.losses) for update in past[at : at + RECENT]) for at in range(0, len(past), RECENT)]
    best = min(medians)
    end = (medians.index(best) + 1) * RECENT
    around = [level(update.losses) for update in past[max(0, end - window) : end]]
    limit = best + max(0.5, 0.5 * abs(best), 0.5 * (start - best), 2 * (max(around) - best))
    return Drift(now, limit, f"the best ten steps had {best:.4g}") if now > limit else None


def best_step(past: Sequence[Update]) -> int:
    """The number of updates in the best weights of a run.

    These are the ones with the lowest loss among the ten steps (at the beginning, fewer) whose median is lowest: a single
    lucky batch does not win, nor does a step behind a leap that those ten steps end with.
    """
    levels = [level(update.losses) for update in past]
    medians = [median(levels[max(0, at + 1 - RECENT) : at + 1]) for at in range(len(levels))]
    end = medians.index(min(medians)) + 1
    begin = max(0, end - RECENT)
    return levels.index(min(levels[begin:end]), begin)


def _contrast(losses: Sequence[float], zo_eps: float) -> float:
    return (max(losses) - min(losses)) / zo_eps


def _contrast_of(update: Update) -> float:
    return _contrast(update.losses, update.zo_eps)


def _beginning(past: Sequence[Update]) -> list[float]:
    """The losses of the first steps, as long as the weights are about where they were: the first one at least.

    Directions are independent and of unit variance, so each weight has moved by the root of the sum of squares. Up to ten
    times ``zo_eps`` counts as about there.
    """
    levels: list[float] = []
    squares = 0.0
    for update in past:
        if levels and math.sqrt(squares) > 10 * update.zo_eps:
            break
        levels.append(level(update.losses))
        squares += sum((update.lr * grad) ** 2 for grad in update.projected_grads)
    return levels
