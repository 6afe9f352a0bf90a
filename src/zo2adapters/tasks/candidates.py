"""Data files of questions with candidate answers: rows of ``prompt``, ``candidates`` and ``answer``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.row_source import Cell, at_row, location
from zo2adapters.tasks.rows import (
    TOO_LONG,
    FileRows,
    completion_ids,
    converted_rows,
    is_dropped,
    require_kept,
    require_known,
)
from zo2core.errors import DataError


@dataclass(frozen=True, slots=True)
class Choice:
    """One row, as tokens."""

    prompt: tuple[int, ...]  # tokens before the candidates; at least one
    candidates: tuple[tuple[int, ...], ...]  # tokens of each candidate, without an added EOS; at least two candidates
    answer: int  # index of the right candidate, the first if several are right
    also: tuple[int, ...] = ()  # indices of further right candidates

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The sequences of the row: tokens of each, and for how many of these the loss needs logits."""
        return [(len(self.prompt) + len(candidate), len(candidate)) for candidate in self.candidates]

    def is_right(self, index: int) -> bool:
        """Whether the candidate of this index is right."""
        return index == self.answer or index in self.also


@dataclass(frozen=True, slots=True)
class Choices(FileRows[Choice]):
    """The rows of a file of choices, in file order. These rows are never shortened."""

    format: ClassVar = RowFormat.CANDIDATES

    @property
    def longest(self) -> int:
        """Most tokens of a prompt with a candidate."""
        return max(len(row.prompt) + len(candidate) for row in self.rows for candidate in row.candidates)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and candidates."""
        return sum(len(row.prompt) + sum(map(len, row.candidates)) for row in self.rows)

    @property
    def most_sequences(self) -> int:
        """Most sequences of a row, one for each candidate."""
        return max(len(row.candidates) for row in self.rows)

    def digest(self) -> str:
        """SHA-256 over tokens and answers."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(json.dumps([row.prompt, row.candidates, row.answer, row.also]).encode())
        return digest.hexdigest()


def read_choices(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    options: RowOptions | None = None,
    vocabulary: int | None = None,
) -> Choices:
    """Read and tokenise a file of choices. Each candidate is appended to its prompt as it is, including spaces."""
    tokenized = partial(_tokenized, tokenizer=tokenizer)
    known = partial(require_known, tokenizer=tokenizer, vocabulary=vocabulary)
    kept, dropped = read_choice_rows(path, tokenized, known, sequence_length, options or RowOptions())
    return Choices(kept, dropped=dropped)


def read_choice_rows(
    path: Path,
    tokenized: Callable[[dict[str, Any]], Choice],
    known: Callable[[str, Iterable[int]], None],
    sequence_length: int,
    options: RowOptions,
) -> tuple[tuple[Choice, ...], int]:
    """Read a file whose rows have a prompt and several completions."""
    kept, dropped = [], 0
    for line, row in converted_rows(path, options):
        try:
            choice = tokenized(row)
        except DataError as error:
            raise at_row(error, path, line) from error
        where, longest = location(path, line), len(choice.prompt) + max(map(len, choice.candidates))
        if is_dropped(where, longest, sequence_length, options):
            dropped += 1
            continue
        if longest > sequence_length:
            found = f"a prompt of {len(choice.prompt)} tokens, {longest} with the longest completion"
            raise DataError(where, found=found, expected=f"at most {sequence_length} together", remedy=TOO_LONG)
        known(where, chain(choice.prompt, *choice.candidates))
        kept.append(choice)
    require_kept(path, len(kept), dropped, sequence_length)
    return tuple(kept), dropped


def row_error(found: str, expected: str, remedy: str) -> DataError:
    """An error of a row, without the file and the line."""
    return DataError("row", found=found, expected=expected, remedy=remedy)


def _tokenized(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Choice:
    prompt, answer = row.get("prompt"), row.get("answer")
    candidates: Any = row.get("candidates")
    if not isinstance(prompt, str) or not _texts(candidates):
        keys = ", ".join(map(repr, row))
        raise row_error(f"the keys {keys}", "a text 'prompt' and two or more texts 'candidates'", "add the missing keys")
    right: Any = answer.value if isinstance(answer, Cell) else answer
    right = [candidates.index(answer)] if answer in candidates else right
    right = right if isinstance(right, list) else [right]
    if not right or not all(type(index) is int and 0 <= index < len(candidates) for index in right):
        found = f"{json.dumps(answer)[:40]} as 'answer'"
        raise row_error(found, "one of the candidates, or its index from 0", "write the right candidate")
    choice = replace(tokenized_choice(prompt, candidates, right[0], tokenizer), also=tuple(right[1:]))
    if not choice.prompt or not all(choice.candidates):
        found = f"a prompt of {len(choice.prompt)} tokens, a candidate of {min(map(len, choice.candidates))} tokens"
        raise row_error(found, "at least 1 token of each", "lengthen the texts, or remove the row")
    return choice


def tokenized_choice(prompt: str, candidates: Sequence[str], answer: int, tokenizer: PreTrainedTokenizerBase) -> Choice:
    """Tokenise a question. A token that spans the end of the prompt and the start of a candidate counts as candidate."""
    rows = [completion_ids(prompt, candidate, tokenizer) for candidate in candidates]
    shared = min(length for _, length in rows)
    return Choice(tuple(rows[0][0][:shared]), tuple(tuple(ids[shared:]) for ids, _ in rows), answer)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(text, str) and text for text in value)
