"""Data files of questions with candidate answers: rows of ``prompt``, ``candidates`` and ``answer``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from zo2adapters.tasks.row_format import RowFormat
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.tasks.row_source import location
from zo2adapters.tasks.rows import TOO_LONG, completion_ids, converted_rows, is_dropped, require_kept
from zo2core import DataError


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
class Choices:
    """The rows of a file of choices, in file order."""

    format: ClassVar = RowFormat.CANDIDATES

    rows: tuple[Choice, ...]  # at least one
    truncated: int = 0  # number of shortened rows: always 0, because these rows cannot be cut
    dropped: int = 0  # number of rows that were left out because they are too long

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Choice:
        return self.rows[index]

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.rows)

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
    path: Path, tokenizer: PreTrainedTokenizerBase, *, sequence_length: int, options: RowOptions | None = None
) -> Choices:
    """Read and tokenise a file of choices. Each candidate is appended to its prompt as it is, including spaces.

    Args:
        path: The file; ``answer`` is the right candidate, or its index from 0, or a list of indices if several are right.
        tokenizer: The model's tokenizer.
        sequence_length: Most tokens of a prompt with a candidate; longer ones are refused by default.
        options: Columns of the rows, and what happens to rows that are too long; None: the defaults.

    Raises:
        DataError: if the file cannot be read, or a row is malformed or too long; the error gives the line.
    """
    rows = list(_choices(path, tokenizer, sequence_length, RowOptions() if options is None else options))
    kept = tuple(row for row in rows if row is not None)
    require_kept(path, len(kept), len(rows), sequence_length)
    return Choices(kept, dropped=len(rows) - len(kept))


def _choices(
    path: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int, options: RowOptions
) -> Iterator[Choice | None]:
    """Yield each row, None for one that is left out."""
    for line, row in converted_rows(path, options):

        def refuse(found: str, expected: str, remedy: str, line: int = line) -> DataError:
            return DataError(location(path, line), found=found, expected=expected, remedy=remedy)

        prompt, answer = row.get("prompt"), row.get("answer")
        candidates: Any = row.get("candidates")
        if not isinstance(prompt, str) or not _texts(candidates):
            keys = ", ".join(map(repr, row))
            raise refuse(f"the keys {keys}", "a text 'prompt' and two or more texts 'candidates'", "add the missing keys")
        right: Any = [candidates.index(answer)] if answer in candidates else answer
        right = right if isinstance(right, list) else [right]
        if not right or not all(type(index) is int and 0 <= index < len(candidates) for index in right):
            found = f"{json.dumps(answer)[:40]} as 'answer'"
            raise refuse(found, "one of the candidates, or its index from 0", "write the right candidate")
        choice = replace(tokenized_choice(prompt, candidates, right[0], tokenizer), also=tuple(right[1:]))
        shortest, longest = (len(choice.prompt) + pick(map(len, choice.candidates)) for pick in (min, max))
        if not 0 < len(choice.prompt) < shortest:
            found = f"a prompt of {len(choice.prompt)} tokens, a candidate of {shortest - len(choice.prompt)} tokens"
            raise refuse(found, "at least 1 token of each", "lengthen the texts, or remove the row")
        if is_dropped(location(path, line), longest, sequence_length, options):
            yield None
            continue
        if longest > sequence_length:
            found = f"a prompt of {len(choice.prompt)} tokens, {longest} with the longest candidate"
            raise refuse(found, f"at most {sequence_length} together", TOO_LONG)
        yield choice


def tokenized_choice(prompt: str, candidates: Sequence[str], answer: int, tokenizer: PreTrainedTokenizerBase) -> Choice:
    """Tokenise a question. A token that spans the end of the prompt and the start of a candidate counts as candidate."""
    rows = [completion_ids(prompt, candidate, tokenizer) for candidate in candidates]
    shared = min(length for _, length in rows)
    return Choice(tuple(rows[0][0][:shared]), tuple(tuple(ids[shared:]) for ids, _ in rows), answer)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(text, str) and text for text in value)
