"""What ``zo2 evaluate`` and the evaluations of runs measure of a model on rows of each format, with standard errors."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zo2adapters.models.batches import pack
from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.model_directory import end_token_ids
from zo2adapters.tasks.batches import collate, file_batches
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.objectives import in_order, is_own_shard, score, sharded_forwards
from zo2adapters.tasks.row_options import RowFormat
from zo2adapters.tasks.row_reader import classifies, padding_of
from zo2adapters.tasks.rows import Question, Rows
from zo2core import Batch, Engine
from zo2core.ranges import counted

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


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

    @property
    def results(self) -> dict[str, float]:
        """The values by the names that a run records. A perplexity follows from the loss, and is not recorded."""
        values = {measure.name.lower().replace(" ", "_"): measure.value for measure in self.measures}
        return {name: value for name, value in values.items() if name != "perplexity"}


class Measuring(NamedTuple):
    """How a model is evaluated."""

    tokenizer: Any  # of rows with answers; others take none
    pad: int  # token id at padded positions of texts
    batch_size: int
    packed: bool = False  # whether the rows of a batch of texts are concatenated instead of padded
    progress: Callable[[int], object] = lambda rows: None  # called with a number of the units of ``units_of``


def units_of(rows: Rows) -> tuple[int, str]:
    """The work of an evaluation for a progress bar: how many units, and what is counted."""
    if rows.format is RowFormat.CANDIDATES:
        return sum(len(choice.candidates) for choice in rows), "candidate"
    return len(rows), "row"


def measured(engine: Engine, model: HFBlockModel, rows: Rows, options: Measuring) -> Evaluated:
    """Evaluate the current weights on rows of any format but preferences, which need the weights of the base."""
    measure = {RowFormat.LABELS: _labels, RowFormat.ANSWERS: _answers, RowFormat.CANDIDATES: _choices}
    return measure.get(rows.format, _texts)(engine, model, rows, options)


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


def normalized(text: str) -> str:
    """Remove case, punctuation, articles and superfluous space from a text."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1_of_words(text: str, right: str) -> float:
    """The F1 of the words that two texts share, from 0 to 1; for a right text of "no answer" it is 0 or 1."""
    words, right_words = normalized(text).split(), normalized(right).split()
    if right in ("CANNOTANSWER", "no answer"):
        return float(words == right_words)
    shared = sum((Counter(words) & Counter(right_words)).values())
    return 2 * shared / (len(words) + len(right_words)) if shared else 0.0


def _size(*parts: tuple[int, str]) -> str:
    return ", ".join(counted(number, noun) for number, noun in parts)


def _mean(name: str, values: Sequence[float]) -> Measure:
    """The mean of a value of each row, a share."""
    return Measure(name, math.fsum(values) / len(values), standard_error(values, [1.0] * len(values)), is_share=True)


def _texts(engine: Engine, model: HFBlockModel, rows: Rows, options: Measuring) -> Evaluated:
    """The model's own loss over labelled tokens."""

    def batches() -> Iterator[Batch]:
        for group in file_batches(rows, options.batch_size):
            options.progress(len(group))
            batch = collate(group, pad_token_id=options.pad)
            yield pack(batch) if options.packed else batch

    result = engine.evaluate(batches())
    sums = [loss * tokens for loss, tokens in zip(result.losses, result.tokens_of_batches, strict=True) if tokens]
    error = standard_error(sums, [tokens for tokens in result.tokens_of_batches if tokens])
    perplexity = math.exp(result.loss) if result.loss < 700 else math.inf
    return Evaluated(
        [Measure("loss", result.loss, error, digits=6), Measure("perplexity", perplexity)],
        _size((result.tokens, "token"), (len(rows), "row"), (result.sweeps, "sweep")),
        [result.loss],
    )


def _labels(engine: Engine, model: HFBlockModel, rows: Rows, options: Measuring) -> Evaluated:
    """The model's own loss and, for rows with a class, accuracy."""
    groups, pad = file_batches(rows, options.batch_size), padding_of(model.config)
    forward = CalledForward(model, _loss_and_right)
    values, _ = sharded_forwards(engine, groups, lambda group: collate(group, pad_token_id=pad), forward, options.progress)
    losses, right = zip(*values, strict=True)
    loss = math.fsum(losses) / len(rows)
    measures = [Measure("loss", loss, standard_error(losses, list(map(len, groups))), digits=6)]
    if classifies(model.config):
        number = round(math.fsum(right))
        measures.append(_mean("accuracy", [1.0] * number + [0.0] * (len(rows) - number)))
    return Evaluated(measures, counted(len(rows), "row"), [loss])


def _loss_and_right(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """A batch's loss times its number of rows, and its number of rows whose likeliest class is right: (2,), float64."""
    output, labels = model(**batch), batch["labels"]
    right = (output.logits.argmax(-1) == labels).sum() if labels.dim() == 1 else labels.new_zeros(())
    return torch.stack([output.loss.double() * len(labels), right.double()])


def _choices(engine: Engine, model: HFBlockModel, rows: Rows, options: Measuring) -> Evaluated:
    """Accuracy of the likeliest candidates."""
    scored = score(
        engine,
        model,
        [row.prompt for row in rows],
        [row.candidates for row in rows],
        batch_size=options.batch_size,
        pad_token_id=options.pad,
        progress=options.progress,
    )
    right = [float(index in row.answers) for index, row in zip(scored.choices(), rows, strict=True)]
    size = _size((len(rows), "row"), (units_of(rows)[0], "candidate"), (scored.sweeps, "sweep"))
    return Evaluated([_mean("accuracy", right)], size, [value for values in scored.log_likelihoods for value in values])


def _answers(engine: Engine, model: HFBlockModel, rows: Rows, options: Measuring) -> Evaluated:
    """F1 over words and exact match, as in SQuAD, of answers that are generated greedily up to the end of the line."""
    tokenizer = options.tokenizer
    ends = {*end_token_ids(model, tokenizer), *tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]}
    groups = file_batches(rows, options.batch_size)
    own: list[list[float]] = []
    for number, group in enumerate(groups):
        if is_own_shard(engine, number):
            columns = generate(
                engine,
                model,
                [row.prompt for row in group],
                max_new_tokens=rows.new_tokens,
                eos_token_ids=ends,
                pad_token_id=options.pad,
            )
            answers = zip(*columns, strict=True)
            own.append(
                [value for row, answer in zip(group, answers, strict=True) for value in _judged(row, answer, tokenizer)]
            )
        options.progress(len(group))
    values = [value for group in in_order(engine, own, rows.rows) for value in group]
    return Evaluated([_mean("F1", values[::2]), _mean("exact match", values[1::2])], counted(len(rows), "row"), [])


def _judged(row: Question, answer: Sequence[int | None], tokenizer: Any) -> tuple[float, float]:
    """Of a generated answer, the best F1 with a right one, and 1 if it is a right one."""
    raw = str(tokenizer.decode([token for token in answer if token is not None], skip_special_tokens=True))
    text = raw.strip().partition("\n")[0].strip()
    f1 = max(f1_of_words(text, right) for right in row.answers)
    return f1, float(any(normalized(text) == normalized(right) for right in row.answers))
