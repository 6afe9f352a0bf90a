"""The course of a run: whether it has got worse for good, and where it was best. A function of the journal alone.

Directions are independent and of unit variance, so after some steps each weight has moved by the root of the sum of
``(lr * projected_grad)^2``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from zo2core.estimators.running_range import level
from zo2core.types import Update

BLOCK = 10  # steps whose median loss says how a run stands; it is judged after every such block
MOST_MOVED = 1.0  # weights of trained models are below 1: if each moved by more, nothing is left of one

# Note: How much worse is worse for good. The noise of single losses must never stop a run, so each margin is at least half
# a nat, half of the loss itself, and twice the distance from the median to the extreme of what the loss is held against:
# batches of one row, of which one in ten is hard, have medians of ten that leap. What was learned counts as lost when more
# than half of it is. A model that was ruined may have a low loss as well, that of a coin, which it cannot leave any more;
# it is told by how far its weights have moved.


class Course(NamedTuple):
    """What the whole blocks of a run come to."""

    version: int = 0  # updates looked at
    last: Update | None = None  # of them
    squares: float = 0.0  # of how far each weight has moved
    best: float = math.inf  # the lowest median loss of a block
    best_end: int = 0  # the version after that block

    def extended(self, past: Sequence[Update]) -> Course:
        """The course of a run with these updates: this one's, if they go on from it."""
        begun = self.version <= len(past) and (self.version == 0 or past[self.version - 1] is self.last)
        course = self if begun else Course()
        for start in range(course.version, len(past) - BLOCK + 1, BLOCK):
            course = course._after(past[start : start + BLOCK])
        return course

    def _after(self, block: Sequence[Update]) -> Course:
        end, now = self.version + BLOCK, median(map(level, block))
        best, best_end = (now, end) if now < self.best else (self.best, self.best_end)
        return Course(end, block[-1], sum(map(squared_move, block), self.squares), best, best_end)


def squared_move(update: Update) -> float:
    """The square of how far an update moves each weight."""
    return sum((update.lr * grad) ** 2 for grad in update.projected_grads)


def drift(course: Course, past: Sequence[Update], *, window: int) -> tuple[str, str] | None:
    """Tell whether a run has got worse for good; it is judged when the last block is whole.

    Args:
        course: Of these updates.
        past: All updates so far.
        window: Steps that the beginning, and the best block with those before it, have at most.

    Returns:
        What was found and what was expected; None if nothing is wrong, or it is not judged now.
    """
    if not past or course.version != len(past):
        return None
    moved = math.sqrt(course.squares)
    if moved > MOST_MOVED:
        return f"each weight moved by {moved:.2g} in all", f"at most {MOST_MOVED:g}, since most weights are below it"
    now = median(map(level, past[-BLOCK:]))
    found = f"a median loss of {now:.4g} in the last {BLOCK} steps"
    begun = _beginning(past[:window])
    start, worst = median(begun), max(begun)
    limit = worst + max(0.5, 0.5 * abs(worst), 2 * (worst - start))
    if now > limit:
        return found, f"at most {limit:.4g}, since the run began with {start:.4g}"
    around = max(map(level, past[max(0, course.best_end - window) : course.best_end]))
    limit = course.best + max(0.5, 0.5 * abs(course.best), 0.5 * (start - course.best), 2 * (around - course.best))
    if now > limit:
        return found, f"at most {limit:.4g}, since the best ten steps had {course.best:.4g}"
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
