"""Run health: which step lies far outside the losses so far, whether a run has got worse for good, and its best step.

All of it is a function of the journal alone: of the losses in the records, whatever an estimator, clipping or a guard made
of them. The *level* of a step is the mean of its losses; its *contrast* is how far they lie apart, over ``zo_eps``: twice
the projected gradient of a two-point estimator. Directions are independent and of unit variance, so after some steps each
weight has moved by the root of the sum of ``(lr * projected_grad)^2``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from zo2core.types import Update

RECENT = 10  # steps of which those that were refused do not count
LEAST = 20  # steps before which a single one is not judged

# Note: How far is far. A run must never be stopped by its noise, and a step should hardly ever be. Losses of small batches
# are anything but normal: most rows are easy, and one in a hundred is not. So a single step is held against the extremes of
# the last 200, not against their quartiles: rows that come once in 50 steps are within the range. With normal noise, five
# times the distance from the median to the extreme is nine standard deviations at the 20th step and fourteen at the 200th.

BLOCK = 10  # steps whose median loss says how a run stands; it is judged after every such block
MOST_MOVED = 1.0  # weights of trained models are below 1: if each moved by more, nothing is left of one

# Note: How much worse is worse for good. The noise of single losses must never stop a run, so each margin is at least half
# a nat, half of the loss itself, and twice the distance from the median to the extreme of what the loss is held against:
# batches of one row, of which one in ten is hard, have medians of ten that leap. What was learned counts as lost when more
# than half of it is. A model that was ruined may have a low loss as well, that of a coin, which it cannot leave any more;
# it is told by how far its weights have moved.


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


class RunHealth(NamedTuple):
    """A summary of a run's updates so far, block by block of ``BLOCK`` steps."""

    version: int = 0  # updates looked at
    last: Update | None = None  # of them
    squares: float = 0.0  # of how far each weight has moved
    best: float = math.inf  # the lowest median loss of a block
    best_end: int = 0  # the version after that block

    def extended(self, past: Sequence[Update]) -> RunHealth:
        """The summary of a run with these updates: this one extended if they continue it, and a new one if not."""
        begun = self.version <= len(past) and (self.version == 0 or past[self.version - 1] is self.last)
        health = self if begun else RunHealth()
        for start in range(health.version, len(past) - BLOCK + 1, BLOCK):
            health = health._after(past[start : start + BLOCK])
        return health

    def _after(self, block: Sequence[Update]) -> RunHealth:
        end, now = self.version + BLOCK, median(map(level, block))
        best, best_end = (now, end) if now < self.best else (self.best, self.best_end)
        return RunHealth(end, block[-1], sum(map(squared_move, block), self.squares), best, best_end)


def squared_move(update: Update) -> float:
    """The square of how far an update moves each weight."""
    return sum((update.lr * grad) ** 2 for grad in update.projected_grads)


def drift(health: RunHealth, past: Sequence[Update], *, window: int) -> tuple[str, str] | None:
    """Tell whether a run has got worse for good; it is judged when the last block is whole.

    Args:
        health: The summary of these updates.
        past: All updates so far.
        window: Steps that the beginning, and the best block with those before it, have at most.

    Returns:
        What was found and what was expected; None if nothing is wrong, or it is not judged now.
    """
    if not past or health.version != len(past):
        return None
    moved = math.sqrt(health.squares)
    if moved > MOST_MOVED:
        return f"each weight moved by {moved:.2g} in all", f"at most {MOST_MOVED:g}, since most weights are below it"
    now = median(map(level, past[-BLOCK:]))
    found = f"a median loss of {now:.4g} in the last {BLOCK} steps"
    begun = _beginning(past[:window])
    start, worst = median(begun), max(begun)
    limit = worst + max(0.5, 0.5 * abs(worst), 2 * (worst - start))
    if now > limit:
        return found, f"at most {limit:.4g}, since the run began with {start:.4g}"
    around = max(map(level, past[max(0, health.best_end - window) : health.best_end]))
    limit = health.best + max(0.5, 0.5 * abs(health.best), 0.5 * (start - health.best), 2 * (around - health.best))
    if now > limit:
        return found, f"at most {limit:.4g}, since the best ten steps had {health.best:.4g}"
    return None


def best_step(past: Sequence[Update]) -> int:
    """The number of updates in the best weights of a run.

    These are the ones with the lowest loss among the ten steps (at the beginning, fewer) whose median is lowest: a single
    lucky batch does not win, nor does a step behind a leap that those ten steps end with. Nor do weights of which nothing is
    left.
    """
    levels = _levels_while(past, MOST_MOVED)
    if not levels:
        return 0
    medians = [median(levels[max(0, at + 1 - BLOCK) : at + 1]) for at in range(len(levels))]
    end = medians.index(min(medians)) + 1
    begin = max(0, end - BLOCK)
    return levels.index(min(levels[begin:end]), begin)


def _beginning(past: Sequence[Update]) -> list[float]:
    """The losses of the first steps, as long as the weights are about where they were: within ten times ``zo_eps``."""
    return _levels_while(past, 10 * past[0].zo_eps)


def _levels_while(past: Sequence[Update], most_moved: float) -> list[float]:
    """The losses of the first steps, as long as no weight has moved further than this: of the first one at least."""
    levels: list[float] = []
    squares = 0.0
    for update in past:
        if levels and squares > most_moved**2:
            break
        levels.append(level(update))
        squares += squared_move(update)
    return levels
