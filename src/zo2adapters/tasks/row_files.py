"""Recognise the format of a JSONL file of rows, and read it."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zo2adapters.tasks.candidates import Choices, read_choices
from zo2adapters.tasks.labelled import LabelledRows, read_labelled_rows
from zo2adapters.tasks.preferences import read_preferences
from zo2adapters.tasks.row_format import RowFormat
from zo2adapters.tasks.rows import Dataset, parsed_rows, read_dataset

Rows = Dataset | Choices | LabelledRows


def format_of(path: Path) -> RowFormat:
    """Recognise the format of a file by its first row.

    Args:
        path: JSONL file for a causal language model.

    Raises:
        DataError: if the file cannot be read, or its first row is not a JSON object.
    """
    return RowFormat.of(next((row for _, row in parsed_rows(path)), {}))


def read_rows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    labelled_for: PretrainedConfig | None = None,
) -> Rows:
    """Read and tokenise a file of rows of any format that can be trained on.

    Args:
        path: JSONL file.
        tokenizer: The model's tokenizer.
        sequence_length: Most tokens of a row.
        labelled_for: Config of a model that takes texts with labels; None for a causal language model.

    Raises:
        DataError: if the file cannot be read, or a row is malformed.
    """
    if labelled_for is not None:
        return read_labelled_rows(path, tokenizer, labelled_for, sequence_length=sequence_length)
    match format_of(path):
        case RowFormat.CANDIDATES:
            return read_choices(path, tokenizer, sequence_length=sequence_length)
        case RowFormat.PREFERENCES:
            return read_preferences(path, tokenizer, sequence_length=sequence_length)
        case _:
            return read_dataset(path, tokenizer, sequence_length=sequence_length)
