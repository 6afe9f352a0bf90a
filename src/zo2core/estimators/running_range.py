"""The range that a run's losses have been in lately, and which step lies far outside: a function of the journal alone.

All is computed from the losses that stand in the records, so it does not matter what an estimator, clipping or a guard
made of them. The *level* of a step is the mean of its losses; its *contrast* is how far they lie apart, over ``zo_eps``:
twice the projected gradient of a two-point estimator.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from zo2core.types import Update

RECENT = 10  # steps of which those that were refused do not count
LEAST = 20  # steps before which a single one is not judged

# Note: How far is far. A run must never be stopped by its noise, and a step should hardly ever be. Losses of small batches
# are anything but normal: most rows are easy, and one in a hundred is not. So a single step is held against the extremes of
# the last 200, not against their quartiles: rows that come once in 50 steps are within the range. With normal noise, five
# times the distance from the median to the extreme is nine standard deviations at the 20th step and fourteen at the 200th.


def level(update: Update) -> float:
    """The mean of a step's losses."""
    return sum(update.losses) / len(update.losses)


def is_refused(update: Update) -> bool:
    """Whether a step was not applied, though its losses differ."""
    return not any(update.projected_grads) and min(update.losses) != max(update.losses)


def outlier(update: Update, past: Sequence[Update], *, window: int, factor: float) -> str | None:
    """Tell how a step lies far outside the run's range, in words; None if it does not.

    Steps that were refused lately do not count: a jump that lasts is refused until the run stops.

    Args:
        update: The step, which is not taken yet.
        past: All updates before it.
        window: Steps whose median is the middle of the range; its extremes are those of four times as many.
        factor: How many times the distance from the middle to the extreme a loss may be away.
    """
    if len(past) < LEAST:
        return None
    counted = [*past[-4 * window : -RECENT], *(earlier for earlier in past[-RECENT:] if not is_refused(earlier))]
    now, apart, near = level(update), _contrast(update), counted[-LEAST:]
    if now <= max(map(level, near)) and apart <= max(map(_contrast, near)):
        return None  # within the last steps' range, hence within that of all: most steps are
    levels = [level(earlier) for earlier in counted]
    middle, extreme = median(levels[-window:]), max(levels)
    if now > middle + factor * max(extreme - middle, 0.1 * abs(middle)):
        return f"loss {now:.4g}, where the last {len(levels)} steps had {min(levels):.4g} to {extreme:.4g}"
    furthest = max(map(_contrast, counted))
    if apart > factor * furthest > 0:
        return f"losses {apart:.4g} zo_eps apart, where the last {len(levels)} steps had {furthest:.4g} at most"
    return None


def _contrast(update: Update) -> float:
    return (max(update.losses) - min(update.losses)) / update.zo_eps
