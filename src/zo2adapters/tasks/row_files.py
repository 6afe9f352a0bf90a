"""Recognise the format of a data file's rows, and read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zo2adapters.tasks.answers import Questions, read_questions
from zo2adapters.tasks.candidates import Choices, read_choices
from zo2adapters.tasks.labelled import LabelledRows, read_labelled_rows
from zo2adapters.tasks.preference_task import read_preferences
from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.row_source import parsed_rows
from zo2adapters.tasks.rows import Dataset, converted_rows, read_dataset
from zo2core.errors import DataError, OptionError

Rows = Dataset | Choices | LabelledRows
EvaluationRows = Rows | Questions

MOST_ANSWER_TOKENS = 50  # most tokens of an answer that is generated in an evaluation of a run


def format_of(path: Path, options: RowOptions | None = None) -> RowFormat:
    """Recognise the format of a file by its first row."""
    return RowFormat.of(next((row for _, row in converted_rows(path, options or RowOptions())), {}))


def with_labels(options: RowOptions, path: Path) -> RowOptions:
    """The options with the labels that a file has, if its rows are prompts with labels and the options name no labels."""
    if options.labels:
        return options
    labels = options.labels_in(row for _, row in parsed_rows(path))
    if len(labels) == 1:
        raise DataError(
            path,
            found=f"the label {labels[0]!r} in every row",
            expected="at least two labels, which are compared",
            remedy="name all labels with --labels, or name the column as --completion-column",
        )
    return replace(options, labels=labels)


def split_rows(rows: Rows, share: float, *, seed: int) -> tuple[Rows, Rows]:
    """Split rows into those to train on and those to evaluate on, each in file order."""
    count = len(rows)
    if count < 2:
        raise OptionError("eval_split", found="1 row", expected="at least 2", remedy="leave it out, or add rows")
    generator = Random(f"evaluation {seed}")  # noqa: S311 - which rows are evaluated on is not a secret
    # Python promises the sequence of random() across its versions.
    order = sorted(range(count), key=lambda _: generator.random())
    chosen = set(order[: min(max(round(count * share), 1), count - 1)])
    parts = [[index for index in range(count) if (index in chosen) is held_out] for held_out in (False, True)]
    trained, evaluated = (tuple(rows.rows[index] for index in part) for part in parts)
    changed: Any = replace  # the three classes of rows have their rows in a field of this name
    return changed(rows, rows=trained), changed(rows, rows=evaluated)


def read_rows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    labelled_for: PretrainedConfig | None = None,
    options: RowOptions | None = None,
    keeps_sources: bool = False,
    vocabulary: int | None = None,
) -> Rows:
    """Read and tokenise a file of rows of any format that can be trained on."""
    options = RowOptions() if options is None else options
    reading: Any = {"sequence_length": sequence_length, "options": options, "vocabulary": vocabulary}
    if labelled_for is not None:
        return read_labelled_rows(path, tokenizer, labelled_for, **reading)
    match format_of(path, options):
        case RowFormat.CANDIDATES:
            return read_choices(path, tokenizer, **reading)
        case RowFormat.PREFERENCES:
            return read_preferences(path, tokenizer, **reading)
        case _:
            return read_dataset(path, tokenizer, keeps_sources=keeps_sources, **reading)


class DataFiles(NamedTuple):
    """The files of a run, and how their rows are read."""

    data: Path
    evaluation: Path | None  # None: no file to evaluate on
    options: RowOptions
    eval_split: float | None = None  # share of the training rows that is evaluated on; None: none
    eval_seed: int = 0  # seed that chooses these rows
    keeps_sources: bool = False  # whether rows of text are kept as JSON as well

    def read(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sequence_length: int,
        labelled_for: PretrainedConfig | None,
        vocabulary: int | None = None,
    ) -> tuple[Rows, EvaluationRows | None]:
        """Read and tokenise the rows to train on, and those to evaluate on. See ``read_rows``.

        Rows to evaluate on may also have answers. These are generated with at most 50 tokens, and half the sequence length.
        """
        options = with_labels(self.options, self.data) if labelled_for is None else self.options
        reading: Any = {"sequence_length": sequence_length, "labelled_for": labelled_for, "options": options}
        reading |= {"keeps_sources": self.keeps_sources, "vocabulary": vocabulary}
        rows = read_rows(self.data, tokenizer, **reading)
        if self.eval_split is not None:
            return split_rows(rows, self.eval_split, seed=self.eval_seed)
        if self.evaluation is None:
            return rows, None
        if not options.labels and labelled_for is None:
            reading["options"] = with_labels(options, self.evaluation)
        if labelled_for is None and format_of(self.evaluation, reading["options"]) is RowFormat.ANSWERS:
            del reading["labelled_for"], reading["keeps_sources"]
            new = min(MOST_ANSWER_TOKENS, sequence_length // 2)
            return rows, read_questions(self.evaluation, tokenizer, max_new_tokens=new, **reading)
        return rows, read_rows(self.evaluation, tokenizer, **reading)
