"""The steps of a run that are evaluated, and the best of them. The journal has all results, with checksums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zo2adapters.trainers.options import TrainOptions

Results = Mapping[str, float]  # results of one evaluation by name, among them the one that ``criterion`` takes

PREFIX = "evaluation_"  # prefix of a result's name in a row of metrics
_SHARES = ("accuracy", "f1", "exact_match")  # results that are shares of the rows
_SECONDS = f"{PREFIX}seconds"  # of a row of metrics: how long the evaluation took


def is_due(options: TrainOptions, step: int) -> bool:
    """Whether the run is evaluated after this number of steps."""
    every = options.evaluate_every
    return options.evaluates and (step in (0, options.steps) or (every is not None and step % every == 0))


def best_step(losses: Mapping[int, float]) -> int | None:
    """Step with the smallest loss, the earliest of equal ones; None if no loss is a number."""
    comparable = {step: loss for step, loss in losses.items() if not math.isnan(loss)}
    return min(comparable, key=lambda step: (comparable[step], step), default=None)


def criterion(results: Results) -> float:
    """The result of an evaluation by which steps are compared; smaller is better, and NaN is none.

    It is ``loss`` where evaluations measure what steps minimise, otherwise ``choice_loss``, the loss over the candidates of
    a row, or 1 - ``f1`` of generated answers. Earlier versions wrote the last two as ``loss``.
    """
    for name in ("loss", "choice_loss"):
        if name in results:
            return results[name]
    return 1 - results.get("f1", math.nan)


def criteria_of(evaluations: Mapping[int, Results]) -> dict[int, float]:
    """The criterion of each evaluation, by step."""
    return {step: criterion(results) for step, results in evaluations.items()}


def results_of_row(row: Mapping[str, Any]) -> Results:
    """The results in a row of metrics, without the prefix of their names; none in the row of a step."""
    if "loss" in row:
        return {}
    return {
        name.removeprefix(PREFIX): value
        for name, value in row.items()
        if name.startswith(PREFIX) and name != _SECONDS and type(value) is float
    }


def row_of_evaluation(step: int, results: Results) -> dict[str, Any]:
    """The row of metrics of an evaluation, without its duration."""
    return {"step": step, **{f"{PREFIX}{name}": value for name, value in results.items()}}


def shown_results(results: Results) -> str:
    """Results as text, shares of rows in percent."""
    texts = {name: f"{value:.1%}" if name in _SHARES else f"{value:.4f}" for name, value in results.items()}
    return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in texts.items())
