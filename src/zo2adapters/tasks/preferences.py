"""Data files of preferences: rows of ``prompt``, ``chosen`` and ``rejected``, as for TRL's DPOTrainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from zo2adapters.tasks.candidates import Choice, Choices, read_choice_rows, row_error
from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.rows import require_known, tokenized_row

_KEYS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Preferences(Choices):
    """The rows of a file of preferences, in file order; the first candidate is the chosen one."""

    format: ClassVar = RowFormat.PREFERENCES


def read_preferences(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    options: RowOptions | None = None,
    vocabulary: int | None = None,
) -> Preferences:
    """Read and tokenise a file of preferences."""
    tokenized = partial(_tokenized, tokenizer=tokenizer, options=options or RowOptions())
    known = partial(require_known, tokenizer=tokenizer, vocabulary=vocabulary)
    kept, dropped = read_choice_rows(path, tokenized, known, sequence_length, options or RowOptions())
    return Preferences(kept, dropped=dropped)


def _tokenized(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: RowOptions) -> Choice:
    kinds = {type(row.get(key)) for key in _KEYS}
    if kinds not in ({str}, {list}):
        found = f"the keys {', '.join(map(repr, row))}" if type(None) in kinds else json.dumps(row)[:60]
        raise row_error(found, "'prompt', 'chosen' and 'rejected', all texts or all lists of messages", "correct the row")
    both = [tokenized_row({"prompt": row["prompt"], "completion": row[key]}, tokenizer, options) for key in _KEYS[1:]]
    shared = min(length for _, length in both)
    choice = Choice(tuple(both[0][0][:shared]), tuple(tuple(ids[shared:]) for ids, _ in both), 0)
    if not choice.prompt or not all(choice.candidates):
        lengths = " and ".join(str(len(candidate)) for candidate in choice.candidates)
        found = f"a common prompt of {shared} tokens, completions of {lengths} tokens"
        raise row_error(found, "at least 1 token of each", "lengthen the texts, or remove the row")
    return choice
