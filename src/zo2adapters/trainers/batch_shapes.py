"""Shapes of the batches that rows make, from which the cost of forward passes is estimated without running them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from zo2adapters.tasks.batches import file_batches, training_batches
from zo2adapters.tasks.rows import Rows
from zo2adapters.trainers.batching import Batching

Sequences: TypeAlias = Sequence[tuple[int, int]]  # of a row: tokens of each, and for how many the loss needs logits

_SAMPLED_BATCHES, _SAMPLED_ROWS = 200, 20_000  # to average over, whichever ends first; more hardly change the mean


class BatchShape(NamedTuple):
    """The shape of one batch, or the mean shape of several."""

    rows: int
    tokens: float  # tokens per row, padding included
    predictions: float  # tokens of the whole batch for which the loss needs logits

    @classmethod
    def whole(cls, rows: int, tokens: int) -> BatchShape:
        """The shape of rows without padding, all of whose tokens have labels."""
        return cls(rows, tokens, rows * (tokens - 1))


class RowShapes(NamedTuple):
    """Batch shapes of a run."""

    longest: BatchShape  # the largest possible batch, for which memory is reserved
    step: BatchShape  # mean of the steps' batches
    evaluation: BatchShape | None  # mean of an evaluation's batches; None: no evaluation
    evaluation_batches: int  # batches of one evaluation
    micro_rows: int | None  # rows that run at a time; None: all of a batch
    new_tokens: int | None = None  # tokens that are generated for each row of a step; None: steps generate nothing

    @classmethod
    def of_length(cls, batching: Batching, tokens: int) -> RowShapes:
        """Shapes for rows that all have this number of tokens."""
        shape = BatchShape.whole(*batching.shape(batching.batch_size, tokens))
        return cls(shape, shape, None, 0, batching.micro_batch_size)

    @classmethod
    def of_rows(
        cls,
        batching: Batching,
        data: Rows,
        evaluation: Rows | None,
        *,
        seed: int,
        trained: Callable[[Any], Sequences] = lambda row: row.sequences,
    ) -> RowShapes:
        """Shapes for rows as a run batches them."""
        files = [data, *([] if evaluation is None else [evaluation])]
        longest, sequences = max(rows.longest for rows in files), max(rows.most_sequences for rows in files)
        sampled = min(_SAMPLED_BATCHES, -(-_SAMPLED_ROWS // batching.batch_size))
        steps = islice(training_batches(data, batch_size=batching.batch_size, seed=seed), sampled)
        step = _mean(_shape([trained(row) for row in batch], pack=batching.pack) for batch in steps)
        largest = BatchShape.whole(*batching.shape(batching.batch_size * sequences, longest))
        if evaluation is None:
            return cls(largest, step, None, 0, batching.micro_batch_size)
        batches = file_batches(evaluation, batching.batch_size)
        mean = _mean(_shape([row.sequences for row in rows], pack=batching.pack) for rows in batches)
        return cls(largest, step, mean, len(batches), batching.micro_batch_size)


def _shape(rows: Sequence[Sequences], *, pack: bool) -> BatchShape:
    sequences = [sequence for row in rows for sequence in row]
    lengths, predictions = [length for length, _ in sequences], sum(predicted for _, predicted in sequences)
    if pack:
        return BatchShape(1, sum(lengths), predictions)
    return BatchShape(len(lengths), max(lengths), predictions)


def _mean(shapes: Iterable[BatchShape]) -> BatchShape:
    """Mean shape: the rows of the largest batch, and tokens per row such that their product is the mean of all batches."""
    batches = list(shapes)
    rows = max(shape.rows for shape in batches)
    tokens = fmean(shape.rows * shape.tokens for shape in batches) / rows
    return BatchShape(rows, tokens, fmean(shape.predictions for shape in batches))
