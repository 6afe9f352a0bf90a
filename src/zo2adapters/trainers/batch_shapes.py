"""The shapes of the batches that rows make: what forwards take follows from them, and nothing is run for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

from zo2adapters.tasks.batches import training_batches
from zo2adapters.tasks.row_files import Rows
from zo2adapters.trainers.batching import Batching

_SAMPLED = 200  # batches: more do not change their mean


class BatchShape(NamedTuple):
    """The shape of one batch, or the mean shape of several."""

    rows: int
    tokens: float  # of each row, padding included
    predictions: float  # of the whole batch: tokens for which the loss needs logits

    @classmethod
    def whole(cls, rows: int, tokens: int) -> BatchShape:
        """The shape of rows without padding, all of whose tokens have labels."""
        return cls(rows, tokens, rows * (tokens - 1))


class RowShapes(NamedTuple):
    """What a run's rows come to."""

    longest: BatchShape  # the largest batch that there can be: memory is reserved for it
    step: BatchShape  # the mean of a step's batch
    evaluation: BatchShape | None  # the mean of an evaluation's batches; None: there is no evaluation
    evaluation_batches: int  # of one evaluation

    @classmethod
    def of_length(cls, batching: Batching, tokens: int) -> RowShapes:
        """Shapes for rows that all have so many tokens."""
        shape = BatchShape.whole(*batching.shape(batching.batch_size, tokens))
        return cls(shape, shape, None, 0)

    @classmethod
    def of_rows(cls, batching: Batching, data: Rows, evaluation: Rows | None, *, seed: int) -> RowShapes:
        """Shapes for rows as a run batches them.

        Args:
            batching: How rows become batches.
            data: The rows to train on.
            evaluation: The rows to evaluate on; None: there are none.
            seed: Seed of the order of rows.
        """
        read = [data, *([] if evaluation is None else [evaluation])]
        longest, sequences = max(rows.longest for rows in read), max(rows.most_sequences for rows in read)
        steps = islice(training_batches(data, batch_size=batching.batch_size, seed=seed), _SAMPLED)
        step = _mean(_shape(batch, pack=batching.pack) for batch in steps)
        largest = BatchShape.whole(*batching.shape(batching.batch_size * sequences, longest))
        if evaluation is None:
            return cls(largest, step, None, 0)
        starts = range(0, len(evaluation), batching.batch_size)
        groups = ([evaluation[i] for i in range(at, min(at + batching.batch_size, len(evaluation)))] for at in starts)
        return cls(largest, step, _mean(_shape(rows, pack=batching.pack) for rows in groups), len(starts))


def _shape(rows: Sequence[Any], *, pack: bool) -> BatchShape:
    lengths = [length for row in rows for length in row.sequences]
    tokens, predictions = [length for length, _ in lengths], sum(predicted for _, predicted in lengths)
    if pack:
        return BatchShape(1, sum(tokens), predictions)
    return BatchShape(len(tokens), max(tokens), predictions)


def _mean(shapes: Iterable[BatchShape]) -> BatchShape:
    """The mean batch; its rows are those of the largest one, and its tokens fewer for it."""
    listed = list(shapes)
    rows = max(shape.rows for shape in listed)
    tokens = fmean(shape.rows * shape.tokens for shape in listed) / rows
    return BatchShape(rows, tokens, fmean(shape.predictions for shape in listed))
