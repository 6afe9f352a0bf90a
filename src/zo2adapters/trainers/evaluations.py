"""Which steps of a run are evaluated, and which of them is the best one.

The journal has the result of each evaluation, with a checksum. Journals of earlier versions have none: there the results
stood in ``metrics.jsonl`` alone, where a changed digit goes unnoticed, so they are shown and decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zo2adapters.trainers.options import TrainOptions
from zo2core import Journal

Results = Mapping[str, float]  # of one evaluation, by name; "loss" is among them

PREFIX = "evaluation_"  # of a result's name in a row of metrics
_LISTED = 6  # steps that a line spells out


def is_due(options: TrainOptions, step: int) -> bool:
    """Whether a run is evaluated after so many steps."""
    every = options.evaluate_every
    return options.evaluation is not None and (step in (0, options.steps) or (every is not None and step % every == 0))


def due_steps(options: TrainOptions, journal: Journal) -> list[int]:
    """The steps so far after which the run was to be evaluated; of a branch, those since it began."""
    branched = [] if journal.header is None else journal.header.get("branched", [])
    first = branched[-1]["step"] if branched else 0
    return [step for step in range(first, journal.version + 1) if is_due(options, step)]


def best_step(losses: Mapping[int, float]) -> int | None:
    """The step of the smallest loss, the first of equal ones; None if there is no loss that is a number."""
    numbers = {step: loss for step, loss in losses.items() if not math.isnan(loss)}
    return min(numbers, key=lambda step: (numbers[step], step), default=None)


def losses_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The loss of each evaluation among rows of metrics, by its step."""
    return {row["step"]: row[f"{PREFIX}loss"] for row in rows if f"{PREFIX}loss" in row}


def row_of_evaluation(step: int, results: Results) -> dict[str, Any]:
    """The row of metrics of an evaluation, without the time that it took."""
    return {"step": step, **{f"{PREFIX}{name}": value for name, value in results.items()}}


def told(results: Results) -> str:
    """Results in words."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in results.items())


def shown_steps(steps: Sequence[int]) -> str:
    """Steps in words, cut where they are many."""
    listed, more = ", ".join(map(str, steps[:_LISTED])), len(steps) - _LISTED
    return f"{'step' if len(steps) == 1 else 'steps'} {listed}" + (f" and {more} more" if more > 0 else "")
