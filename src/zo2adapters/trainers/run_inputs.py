"""What a run reads before it starts: its model's headers, its tokenizer and its rows."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from zo2adapters.models.architecture import product_seconds
from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.footprint import Masking
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.limited_backend import release
from zo2adapters.tasks.registry import MODEL_LOSS
from zo2adapters.tasks.row_options import RowFormat
from zo2adapters.tasks.row_source import saved_path
from zo2adapters.tasks.rows import RowReader, Rows, file_batches, training_batches
from zo2adapters.tasks.tokenizer import is_dated, load_tokenizer, pad_token_id, vocabulary_of
from zo2adapters.trainers.options import Batching, TrainOptions
from zo2adapters.trainers.process import require_same_inputs
from zo2core import SharedBase, Workers
from zo2core.kernels.matmul_precision import EXACT, changes_products
from zo2core.ranges import counted

# of a row: tokens of each, and for how many the loss needs logits
Sequences: TypeAlias = Sequence[tuple[int, int]]

MOST_SAMPLED = 50  # most tokens of an answer to a sample's prompt
# to average over, whichever ends first; more hardly change the mean
_SAMPLED_BATCHES, _SAMPLED_ROWS = 200, 20_000


class Branch(NamedTuple):
    """A step of another run."""

    parent: Path  # the other run's directory
    step: int


@dataclass(frozen=True)
class RunStart:
    """What a run is before anything is read: its options, what it starts from, and who takes
    part.
    """

    options: TrainOptions
    _: KW_ONLY
    resumes: bool = False  # whether its directory has steps, or options, from which it goes on
    branch: Branch | None = None  # from which it is to begin
    evaluates: bool = True  # whether its rows to evaluate on are evaluated
    workers: Workers | None = None  # None: a run of one process
    shared: SharedBase | None = None  # the base that other runs read, too


class BatchShape(NamedTuple):
    """The shape of one batch, or the mean shape of several."""

    rows: int
    tokens: float  # tokens per row, padding included
    predictions: float  # tokens of the whole batch for which the loss needs logits
    masking: Masking = Masking.NONE

    @classmethod
    def whole(cls, rows: int, tokens: int) -> BatchShape:
        """The shape of rows without padding, all of whose tokens have labels."""
        return cls(rows, tokens, rows * (tokens - 1))


class LargestBatch(NamedTuple):
    """The largest batch that can be drawn, for which memory is reserved."""

    lengths: Sequence[int]  # tokens of its sequences, the longest first
    masking: Masking = Masking.NONE  # with SEQUENCES they are one row
    # most tokens of a sequence for which logits are needed; None: of all tokens
    predictions: int | None = None

    @classmethod
    def of_length(cls, batching: Batching, tokens: int) -> LargestBatch:
        """A batch of rows that all have this number of tokens."""
        masking = Masking.SEQUENCES if batching.pack else Masking.NONE
        return cls([tokens] * batching.batch_size, masking)

    def micro_batches(self, rows: int | None) -> list[tuple[int, int]]:
        """Rows and tokens of micro-batches of at most so many rows, if each of the longest rows
        is in another one; None: of the batch.
        """
        if self.masking is Masking.SEQUENCES:
            return [(1, sum(self.lengths))]
        count = len(self.lengths)
        size = count if rows is None else min(rows, count)
        parts = -(-count // size)
        return [(min(size, count - at * size), self.lengths[at]) for at in range(parts)]

    @property
    def shape(self) -> BatchShape:
        """Its shape, without micro-batches."""
        [(rows, tokens)] = self.micro_batches(None)
        return BatchShape.whole(rows, tokens)._replace(masking=self.masking)


class Prompts(NamedTuple):
    """Prompts that are continued together."""

    rows: int
    tokens: int  # of the longest one
    new_tokens: int  # of the longest continuation


class RowShapes(NamedTuple):
    """Batch shapes of a run."""

    largest: LargestBatch
    step: BatchShape  # mean of the steps' batches
    evaluation: BatchShape | None = None  # mean of an evaluation's batches; None: no evaluation
    evaluation_batches: int = 0  # batches of one evaluation
    largest_evaluated: LargestBatch | None = None  # the largest batch of an evaluation
    prompts: Sequence[Prompts] = ()  # what is generated beside steps

    @property
    def masking(self) -> Masking:
        """What the largest batches mask, of steps or of evaluations."""
        if self.largest.masking is Masking.NONE and self.largest_evaluated is not None:
            return self.largest_evaluated.masking
        return self.largest.masking

    @classmethod
    def of_length(cls, batching: Batching, tokens: int) -> RowShapes:
        """Shapes for rows that all have this number of tokens."""
        largest = LargestBatch.of_length(batching, tokens)
        return cls(largest, largest.shape)


def _mean_shape(batches: Iterable[Sequence[Sequences]], batching: Batching) -> BatchShape:
    """Mean shape of batches: the rows of the largest one, and tokens per row such that their
    product is the mean of all, each micro-batch of which is padded alone.
    """
    counts = list[int]()
    positions = list[int]()
    predictions = list[int]()
    masking = Masking.SEQUENCES if batching.pack else Masking.NONE
    for batch in batches:
        sequences = [sequence for row in batch for sequence in row]
        lengths = [length for length, _ in sequences]
        size = batching.micro_batch_size or len(lengths)
        parts = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        padded = sum(len(part) * max(part) for part in parts)
        if not batching.pack and padded > sum(lengths):
            masking = Masking.PADDING
        counts.append(1 if batching.pack else len(lengths))
        positions.append(sum(lengths) if batching.pack else padded)
        predictions.append(sum(predicted for _, predicted in sequences))
    rows = max(counts)
    return BatchShape(rows, fmean(positions) / rows, fmean(predictions), masking)


class Division(NamedTuple):
    """How batches are divided because a whole one has no room in memory."""

    batch_size: int
    micro_batch_size: int | None  # None: as the user has it
    loss_chunk: int | None  # tokens that have logits at a time; None: as the user has it

    def notice(self) -> str:
        """A line that says so."""
        parts = []
        if self.micro_batch_size is not None:
            parts.append(f"micro-batches of {counted(self.micro_batch_size, 'row')}")
        if self.loss_chunk is not None:
            parts.append(f"logits of {self.loss_chunk} tokens at a time")
        return (
            f"a batch of {counted(self.batch_size, 'row')} has no room: {' and '.join(parts)}, "
            "which change a result by rounding and are kept when the run is resumed"
        )


@dataclass(frozen=True)
class RowlessInputs:
    """A model and options to plan with, for rows that are as long as they may be."""

    options: TrainOptions
    model: HFBlockModel
    division: Division | None = None  # None: batches are not divided because of memory

    sequences_of_a_row: ClassVar[int] = 1

    @property
    def largest(self) -> LargestBatch:
        """The largest batch."""
        batching = self.options.batching
        return LargestBatch.of_length(batching, batching.length_for(self.model))

    def shapes(self) -> RowShapes:
        """The shapes of the batches."""
        batching = self.options.batching
        return RowShapes.of_length(batching, batching.length_for(self.model))


@dataclass(frozen=True)
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
    division: Division | None = None  # None: batches are not divided because of memory

    @classmethod
    def read(cls, start: RunStart, *, digests: bool = False) -> Self:
        """Open the model, and read and tokenise the rows.

        Args:
            start: The run. If it resumes: earlier versions let a run begin with labels that no row
                has.
            digests: Whether the digests of files are computed, as the record of a run has them.
        """
        options = start.options
        workers = start.workers
        directory = resolve_directory(options.model)
        model, options = _settled_alike(options, workers, directory)
        tokenizer = load_tokenizer(directory)
        if not is_dated(tokenizer):
            options = options.having(rendered_at=None)
        length = options.batching.length_for(model)
        labelled_for = model.config if options.takes_labels else None
        vocabulary = vocabulary_of(model.config)
        sources = bool(options.rewards.reward)
        reader = RowReader(
            tokenizer,
            length,
            options.rows,
            labelled_for,
            keeps_sources=sources,
            rewards_read=options.rewards.columns,
            vocabulary=vocabulary,
            digests=digests,
        )
        data, evaluation = reader.read_files(options.data, options.evaluation, options.eval_split)
        release()  # the memory of a process that tokenised
        inputs = cls(
            options, directory, model, tokenizer, pad_token_id(tokenizer), length, data, evaluation
        )
        options.rows.require_labelled(
            are_labelled=start.resumes or any(rows.are_labelled for rows in inputs.files)
        )
        options.require_rows(data.format, None if evaluation is None else evaluation.format)
        paths = {"data": options.data, "evaluation": options.evaluation}
        named = {
            option: (path, rows)
            for (option, path), rows in zip(paths.items(), inputs.files, strict=False)
        }
        require_same_inputs(model, options.model, named, workers)
        return inputs

    def reopened(self, options: TrainOptions) -> Self:
        """The same rows for a run with other options of model and method."""
        model = options.opened(self.directory)
        return replace(self, options=options.settled(model), model=model)

    def having(self, **values: Any) -> Self:
        """The same inputs for a run with other values of options that change neither model nor
        rows.
        """
        return replace(self, options=self.options.having(**values))

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
    def sequences_of_a_row(self) -> int:
        """Most sequences of a row that steps run."""
        return max(len(self._learned(row)) for row in self.data)

    @property
    def largest(self) -> LargestBatch:
        """The largest batch that can be drawn to train on.

        A batch has rows of one epoch, or of the end of one and of those that follow.
        """
        count = len(self.data)
        size = self.options.batching.batch_size
        epochs = 1 if count % size == 0 else 1 + -(-size // count)
        return self._longest([self._learned(row) for row in self.data] * epochs)

    def _longest(self, rows: Sequence[Sequences]) -> LargestBatch:
        """The longest rows, as many as a batch has. All have as many sequences as one of them."""
        size = self.options.batching.batch_size
        lengths = heapq.nlargest(size, (max(tokens for tokens, _ in row) for row in rows))
        sequences = max(map(len, rows))
        predictions = max(predicted for row in rows for _, predicted in row)
        each = [length for length in lengths for _ in range(sequences)]
        masking = Masking.NONE
        if self.options.batching.pack:
            masking = Masking.SEQUENCES
        elif len({tokens for row in rows for tokens, _ in row}) > 1:
            masking = Masking.PADDING
        return LargestBatch(each, masking, predictions if self._has_candidates else None)

    @property
    def _has_candidates(self) -> bool:
        """Whether steps compare sequences, by logits of labelled tokens alone."""
        formats = (RowFormat.CANDIDATES, RowFormat.PREFERENCES)
        return self.data.format in formats and self.options.objective != MODEL_LOSS

    def _learned(self, row: Any) -> Sequences:
        """The sequences of a row that steps run."""
        learns_one = (
            self.options.objective == MODEL_LOSS and self.data.format is RowFormat.CANDIDATES
        )
        return [row.sequences[row.answer]] if learns_one else row.sequences

    def batches(self, first_step: int = 0) -> Iterator[list[Any]]:
        """The rows of each step, without end."""
        options = self.options
        size, seed = options.batching.batch_size, options.seed
        return training_batches(self.data, batch_size=size, seed=seed, first_step=first_step)

    @cached_property
    def tokens(self) -> dict[str, object]:
        """Padding token, and number and digest of the tokens of each data file."""
        tokens: dict[str, object] = {"padding": self.pad}
        for name, rows in zip(("data", "evaluation"), self.files, strict=False):
            tokens |= {f"{name} tokens": rows.tokens, f"{name} sha256": rows.digest()}
        return tokens

    @property
    def checksums(self) -> dict[str, str]:
        """The digest of each data file, by the path that a run saves."""
        paths = (self.options.data, self.options.evaluation)
        return {
            saved_path(path): rows.sha256
            for path, rows in zip(paths, self.files, strict=False)
            if path is not None
        }

    def shapes(self) -> RowShapes:
        """The shapes of the run's batches."""
        batching = self.options.batching
        evaluated = self.evaluation
        sampled = min(_SAMPLED_BATCHES, -(-_SAMPLED_ROWS // batching.batch_size))
        steps = islice(self.batches(), sampled)
        trained = ([self._learned(row) for row in rows] for rows in steps)
        step = _mean_shape(trained, batching)
        mean = None
        count = 0
        if evaluated is not None:
            batches = file_batches(evaluated, batching.batch_size)
            mean = _mean_shape(([row.sequences for row in rows] for rows in batches), batching)
            count = len(batches)
        largest = None
        if evaluated is not None:
            largest = self._longest([row.sequences for row in evaluated])
        return RowShapes(self.largest, step, mean, count, largest, self._prompts(evaluated))

    def _prompts(self, evaluated: Rows | None) -> list[Prompts]:
        """What is generated in evaluations, and for samples."""
        prompts = []
        if evaluated is not None and evaluated.new_tokens:
            size, new_tokens = self.options.batching.batch_size, evaluated.new_tokens
            prompts.append(Prompts(size, evaluated.longest - new_tokens, new_tokens))
        if self.options.samples:
            rows = (self.data if evaluated is None else evaluated)[: self.options.samples]
            longest = max(tokens for row in rows for tokens, _ in row.sequences)
            prompts.append(Prompts(len(rows), longest, MOST_SAMPLED))
        return prompts

    def notices(self) -> list[str]:
        """Lines about precision and data to print before the run."""
        options = self.options
        model = self.model
        data = self.data
        evaluation = self.evaluation
        rows = len(data)
        batch_size = options.batching.batch_size
        lines = [_precision(options, model), *_matmul_precision(options)]
        if self.division is not None:
            lines.append(self.division.notice())
        settings = model.config.get_text_config().to_dict().items()
        rates = [
            f"{name} {value:g}"
            for name, value in settings
            if "drop" in name and isinstance(value, float) and value > 0
        ]
        if options.optimization.optimizer is not None and rates:
            lines.append(
                f"no dropout: steps run in evaluation mode; {', '.join(rates)} has no effect"
            )
        lines += row_notices(data, "trained on")
        if options.eval_split is not None and evaluation is not None:
            lines.append(
                f"{len(evaluation)} of {rows + len(evaluation)} rows are evaluated on instead of "
                "trained on"
            )
        elif evaluation is not None:
            lines += row_notices(evaluation, "evaluated on", others=data)
        if batch_size > rows:
            lines.append(
                f"the data has {counted(rows, 'row')}: a batch of {batch_size} contains the same "
                "ones more than once"
            )
        return lines


def _settled_alike(
    options: TrainOptions, workers: Workers | None, directory: Path
) -> tuple[HFBlockModel, TrainOptions]:
    """Open the model, with the first worker's choices of what depends on the machine."""
    if workers is not None and workers.rank > 0:
        [dtype, loss_chunk, start], *_ = workers.all_gather(None)
        options = options.having(dtype=dtype, loss_chunk=loss_chunk, rendered_at=start)
    elif options.rows.rendered_at is None:
        options = options.having(rendered_at=datetime.now().isoformat())
    model = options.opened(directory)
    options = options.settled(model)
    if workers is not None and workers.rank == 0:
        workers.all_gather(
            [options.model_options.dtype, options.batching.loss_chunk, options.rows.rendered_at]
        )
    return model, options


def row_notices(rows: Rows, used_for: str, *, others: Rows | None = None) -> list[str]:
    """Lines about columns that are not read, and rows longer than the sequence length.

    Args:
        rows: The rows.
        used_for: What they are used for, such as trained on.
        others: Rows whose lines are printed, too; columns that are not read are named once.
    """
    lines = rows.use.notices(used_for)
    if lines and not rows.options.names_columns:
        lines[0] += ". --prompt-template and --prompt-column, or zo2 init, use more"
    if others is not None and {*others.use.unread} >= {*rows.use.unread}:
        lines = []
    numbers = {
        "cut to the sequence length": rows.truncated,
        "left out, since longer": rows.dropped,
        "split at the sequence length": rows.divided,
        "learned turn by turn, since the chat template changes earlier answers": rows.by_turn,
    }
    lengths = [f"{words}: {counted(number, 'row')}" for words, number in numbers.items() if number]
    return lines + [line if others is None else f"evaluation: {line}" for line in lengths]


def _matmul_precision(options: TrainOptions) -> list[str]:
    """A line about products of float32 matrices, unless they are exact."""
    precision = options.model_options.matmul_precision
    device = options.storage.device
    if precision == EXACT:
        return []
    line = f"matmul precision: {precision}"
    if changes_products(precision, torch.device(device)):
        return [f"{line}, for products of float32 matrices on {device}"]
    return [f"{line} has no effect: on {device} it gives the products of {EXACT}"]


def _precision(options: TrainOptions, model: HFBlockModel) -> str:
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    if any(spec.frozen for spec in specs):
        precision = (
            "exact"
            if model.autocast is None
            else f"mixed, computed in {dtype_name(model.autocast)}"
        )
        line = f"precision: {precision}; an adapter in float32 on weights that are only read"
        layers = (re.search(r"(\w+)(\.base_layer)*\.lora_A\.", spec.name) for spec in specs)
        names = dict.fromkeys(found[1] for found in layers if found is not None)
        return f"{line}: LoRA of {', '.join(names)}" if names else line
    stored = specs[0].dtype
    if model.autocast is not None:
        return (
            f"precision: mixed, weights in {dtype_name(stored)}, computed in "
            f"{dtype_name(model.autocast)}"
        )
    line = f"precision: exact, all in {dtype_name(stored)}"
    if options.optimization.rank is not None:
        line = (
            f"precision: exact, computed in {dtype_name(stored)}; weights are only read, updates "
            "add up in float32"
        )
    elif stored in (torch.float16, torch.bfloat16):
        line += "; small updates are rounded away, which --precision mixed avoids"
    if stored is torch.float16 and options.storage.device == "cpu":
        times = product_seconds(torch.float16) / product_seconds(torch.bfloat16)
        line += f"; on this CPU a matrix product takes {times:.1f} times as long as in bfloat16"
    return line


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as options have it."""
    return str(dtype).removeprefix("torch.")
