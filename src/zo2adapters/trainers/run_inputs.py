"""What a run reads before it starts: its model's headers, its tokenizer and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self, TypeAlias

from transformers import PreTrainedTokenizerBase

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.batches import file_batches, training_batches
from zo2adapters.tasks.registry import MODEL_LOSS
from zo2adapters.tasks.row_options import RowFormat
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import Rows
from zo2adapters.tasks.tokenizer import is_dated, load_tokenizer, pad_token_id, vocabulary_of
from zo2adapters.trainers.options import Batching, TrainOptions
from zo2adapters.trainers.worker_options import settled_alike
from zo2core import Workers

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


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Model, tokenizer and rows of a run."""

    options: TrainOptions  # with the values that were chosen for this machine
    directory: Path  # of the model
    model: HFBlockModel
    tokenizer: PreTrainedTokenizerBase
    pad: int  # token id at padded positions
    length: int  # most tokens of a row
    data: Rows
    evaluation: Rows | None  # None: the run does not evaluate

    @classmethod
    def read(cls, options: TrainOptions, workers: Workers | None = None) -> Self:
        """Open the model, and read and tokenise the rows."""
        directory = resolve_directory(options.model)
        model, options = settled_alike(options, workers, lambda options: options.opened(directory))
        tokenizer = load_tokenizer(directory)
        if not is_dated(tokenizer):
            options = replace(options, rows=replace(options.rows, rendered_at=None))
        length = options.batching.length_for(model)
        reader = RowReader(
            tokenizer,
            length,
            options.rows,
            labelled_for=model.config if options.takes_labels else None,
            keeps_sources=bool(options.rewards.reward),
            vocabulary=vocabulary_of(model.config),
        )
        data, evaluation = reader.read_files(options.data, options.evaluation, options.eval_split)
        return cls(
            options=options,
            directory=directory,
            model=model,
            tokenizer=tokenizer,
            pad=pad_token_id(tokenizer),
            length=length,
            data=data,
            evaluation=evaluation,
        )

    def reopened(self, options: TrainOptions) -> Self:
        """The same rows for a run with other options of model and method."""
        model = options.opened(self.directory)
        return replace(self, options=options.settled(model), model=model)

    @property
    def files(self) -> list[Rows]:
        """The rows of each file."""
        return [self.data, *([] if self.evaluation is None else [self.evaluation])]

    @property
    def longest(self) -> int:
        """Tokens of the longest row of all files."""
        return max(rows.longest for rows in self.files)

    @property
    def most_sequences(self) -> int:
        """Most sequences of a row of all files."""
        return max(rows.most_sequences for rows in self.files)

    @property
    def largest(self) -> BatchShape:
        """Shape of the largest possible batch, for which memory is reserved."""
        batching = self.options.batching
        return BatchShape.whole(*batching.shape(batching.batch_size * self.most_sequences, self.longest))

    def tokens(self) -> dict[str, object]:
        """Padding token, and number and digest of the tokens of each data file."""
        tokens: dict[str, object] = {"padding": self.pad}
        for name, dataset in (("data", self.data), ("evaluation", self.evaluation)):
            if dataset is not None:
                tokens[f"{name} tokens"] = dataset.tokens
                tokens[f"{name} sha256"] = dataset.digest()
        return tokens

    def shapes(self) -> RowShapes:
        """The shapes of the run's batches."""
        given: Any = {"seed": self.options.seed}
        if self.options.objective == MODEL_LOSS and self.data.format is RowFormat.CANDIDATES:
            given["trained"] = lambda row: [row.sequences[row.answer]]
        shapes = RowShapes.of_rows(self.options.batching, self.data, self.evaluation, **given)
        return shapes._replace(new_tokens=self.options.rewards.new_tokens)
