"""Data files of preferences: rows of ``prompt``, ``chosen`` and ``rejected``, as for TRL's DPOTrainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from zo2adapters.tasks.candidates import Choice, Choices
from zo2adapters.tasks.row_format import RowFormat
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.tasks.row_source import location
from zo2adapters.tasks.rows import TOO_LONG, converted_rows, is_dropped, require_kept, tokenized_row
from zo2core import DataError

_KEYS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Preferences(Choices):
    """The rows of a file of preferences, in file order; the first candidate is the chosen one."""

    format: ClassVar = RowFormat.PREFERENCES


def read_preferences(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, sequence_length: int, options: RowOptions | None = None
) -> Preferences:
    """Read and tokenise a file of preferences.

    Args:
        path: The file. The three values of a row are strings, or lists of messages. Completions get an EOS as in
            ``read_dataset``.
        tokenizer: The model's tokenizer.
        sequence_length: Most tokens of a prompt with a completion; longer ones are refused by default.
        options: Columns of the rows, and what happens to rows that are too long; None: the defaults.

    Raises:
        DataError: if the file cannot be read, or a row is malformed or too long; the error gives the line.
    """
    rows = list(_preferences(path, tokenizer, sequence_length, RowOptions() if options is None else options))
    kept = tuple(row for row in rows if row is not None)
    require_kept(path, len(kept), len(rows), sequence_length)
    return Preferences(kept, dropped=len(rows) - len(kept))


def _preferences(
    path: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int, options: RowOptions
) -> Iterator[Choice | None]:
    """Yield each row, None for one that is left out."""
    for line, row in converted_rows(path, options):

        def refuse(found: str, expected: str, remedy: str, line: int = line) -> DataError:
            return DataError(location(path, line), found=found, expected=expected, remedy=remedy)

        kinds = {type(row.get(key)) for key in _KEYS}
        if kinds not in ({str}, {list}):
            found = f"the keys {', '.join(map(repr, row))}" if type(None) in kinds else json.dumps(row)[:60]
            raise refuse(found, "'prompt', 'chosen' and 'rejected', all texts or all lists of messages", "correct the row")
        try:
            both = [tokenized_row({"prompt": row["prompt"], "completion": row[key]}, tokenizer) for key in _KEYS[1:]]
        except DataError as error:  # the error lacks path and line
            raise refuse(error.found, error.expected, error.remedy) from error
        shared = min(length for _, length in both)
        longest = max(len(ids) for ids, _ in both)
        choice = Choice(tuple(both[0][0][:shared]), tuple(tuple(ids[shared:]) for ids, _ in both), 0)
        if not choice.prompt or not all(choice.candidates):
            lengths = " and ".join(str(len(candidate)) for candidate in choice.candidates)
            found = f"a common prompt of {shared} tokens, completions of {lengths} tokens"
            raise refuse(found, "at least 1 token of each", "lengthen the texts, or remove the row")
        if is_dropped(location(path, line), longest, sequence_length, options):
            yield None
            continue
        if longest > sequence_length:
            found = f"a prompt of {shared} tokens, {longest} with the longer completion"
            raise refuse(found, f"at most {sequence_length} together", TOO_LONG)
        yield choice
