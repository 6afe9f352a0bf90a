"""What a run reads before it starts: its model's headers, its tokenizer and its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.registry import MODEL_LOSS
from zo2adapters.tasks.row_options import RowFormat
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import Rows
from zo2adapters.tasks.tokenizer import is_dated, load_tokenizer, pad_token_id, vocabulary_of
from zo2adapters.trainers.batch_shapes import BatchShape, RowShapes
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.worker_options import settled_alike
from zo2core import Workers


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
