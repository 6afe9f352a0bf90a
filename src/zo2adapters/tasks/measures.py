"""What ``zo2 evaluate`` measures of a model on rows of each format, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.answers import Questions, answer
from zo2adapters.tasks.candidates import Choices
from zo2adapters.tasks.label_task import evaluated_batches
from zo2adapters.tasks.labelled import LabelledRows, classifies, padding_of
from zo2adapters.tasks.language_modelling_task import evaluate_dataset, perplexity
from zo2adapters.tasks.row_files import EvaluationRows
from zo2adapters.tasks.scoring import score
from zo2adapters.tasks.tokenizer import pad_token_id
from zo2core import Engine
from zo2core.ranges import counted


class Measure(NamedTuple):
    """One number that an evaluation measures."""

    name: str
    value: float
    standard_error: float | None = None  # of the value; None: it cannot be estimated, or is not
    is_share: bool = False  # whether it is a share of the rows, shown in percent
    digits: int = 4  # decimals of a value that is no share


class Evaluated(NamedTuple):
    """The measures of one model on rows."""

    measures: Sequence[Measure]
    size: str  # how many rows were evaluated, and in how many sweeps
    finite: Sequence[float]  # losses or log-likelihoods, which are finite unless something went wrong


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How rows are evaluated."""

    batch_size: int
    packed: bool = False  # whether the rows of a batch of texts are concatenated instead of padded
    progress: Callable[[int], object]  # called with a number of the units of ``total``


def units_of(rows: EvaluationRows) -> tuple[int, str]:
    """The work of an evaluation for a progress bar: how many units, and what is counted."""
    if isinstance(rows, Choices):
        return sum(len(choice.candidates) for choice in rows), "candidate"
    return len(rows), "row"


def measured(engine: Engine, model: HFBlockModel, rows: EvaluationRows, tokenizer: Any, options: Measuring) -> Evaluated:
    """Evaluate the current weights on rows of any format."""
    if isinstance(rows, LabelledRows):
        return _labels(engine, model, rows, options)
    pad = pad_token_id(tokenizer)
    if isinstance(rows, Questions):
        return _answers(engine, model, rows, tokenizer, pad, options)
    if isinstance(rows, Choices):
        return _choices(engine, model, rows, pad, options)
    result = evaluate_dataset(
        engine, rows, batch_size=options.batch_size, pad=pad, packed=options.packed, progress=options.progress
    )
    sums = [loss * tokens for loss, tokens in zip(result.losses, result.tokens_of_batches, strict=True) if tokens]
    error = standard_error(sums, [tokens for tokens in result.tokens_of_batches if tokens])
    return Evaluated(
        [Measure("loss", result.loss, error, digits=6), Measure("perplexity", perplexity(result.loss))],
        _size((result.tokens, "token"), (len(rows), "row"), (result.sweeps, "sweep")),
        [result.loss],
    )


def standard_error(sums: Sequence[float], weights: Sequence[float]) -> float | None:
    """The standard error of a mean ``sum(sums) / sum(weights)`` of independent groups of rows.

    It is that of a ratio estimator; with a weight of 1 for each row, the usual one of a mean.
    """
    count, total = len(sums), math.fsum(weights)
    if count < 2 or not all(map(math.isfinite, sums)):
        return None
    mean = math.fsum(sums) / total
    squares = math.fsum((value - mean * weight) ** 2 for value, weight in zip(sums, weights, strict=True))
    return math.sqrt(squares * count / (count - 1)) / total


def _size(*parts: tuple[int, str]) -> str:
    return ", ".join(counted(number, noun) for number, noun in parts)


def _mean(name: str, values: Sequence[float]) -> Measure:
    """The mean of a value of each row, a share."""
    return Measure(name, math.fsum(values) / len(values), standard_error(values, [1.0] * len(values)), is_share=True)


def _labels(engine: Engine, model: HFBlockModel, rows: LabelledRows, options: Measuring) -> Evaluated:
    outputs = evaluated_batches(
        engine,
        model,
        rows,
        batch_size=options.batch_size,
        pad=padding_of(model.config),
        progress=options.progress,
    )
    losses, right, counts = zip(*outputs, strict=True)
    loss = math.fsum(losses) / len(rows)
    measures = [Measure("loss", loss, standard_error(losses, counts), digits=6)]
    if classifies(model.config):
        number = round(math.fsum(right))
        measures.append(_mean("accuracy", [1.0] * number + [0.0] * (len(rows) - number)))
    return Evaluated(measures, counted(len(rows), "row"), [loss])


def _choices(engine: Engine, model: HFBlockModel, choices: Choices, pad: int, options: Measuring) -> Evaluated:
    scored = score(
        engine,
        model,
        [choice.prompt for choice in choices],
        [choice.candidates for choice in choices],
        batch_size=options.batch_size,
        pad_token_id=pad,
        progress=options.progress,
    )
    right = [float(choice.is_right(index)) for index, choice in zip(scored.choices(), choices, strict=True)]
    size = _size((len(choices), "row"), (units_of(choices)[0], "candidate"), (scored.sweeps, "sweep"))
    return Evaluated([_mean("accuracy", right)], size, [value for values in scored.log_likelihoods for value in values])


def _answers(
    engine: Engine, model: HFBlockModel, questions: Questions, tokenizer: Any, pad: int, options: Measuring
) -> Evaluated:
    scores = answer(
        engine,
        model,
        tokenizer,
        questions,
        batch_size=options.batch_size,
        pad_token_id=pad,
        progress=options.progress,
    )
    measures = [_mean("F1", scores.f1_of_rows), _mean("exact match", scores.exact_match_of_rows)]
    return Evaluated(measures, counted(len(questions), "row"), [])
