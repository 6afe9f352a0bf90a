"""JSONL files of questions with candidate answers: rows of ``prompt``, ``candidates`` and ``answer``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from zo2adapters.tasks.row_format import RowFormat
from zo2adapters.tasks.rows import TOO_LONG, completion_ids, parsed_rows
from zo2core import DataError


@dataclass(frozen=True, slots=True)
class Choice:
    """One row, as tokens."""

    prompt: tuple[int, ...]  # what all candidates share; at least one token
    candidates: tuple[tuple[int, ...], ...]  # what may follow it, without an EOS of our own; at least two
    answer: int  # the right candidate's place, from 0; of several the first
    also: tuple[int, ...] = ()  # places of others that are right

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The sequences of the row: tokens of each, and for how many of these the loss needs logits."""
        return [(len(self.prompt) + len(candidate), len(candidate)) for candidate in self.candidates]

    def is_right(self, place: int) -> bool:
        """Whether the candidate at this place is right."""
        return place == self.answer or place in self.also


@dataclass(frozen=True, slots=True)
class Choices:
    """The rows of a file of choices, in file order."""

    format: ClassVar = RowFormat.CANDIDATES

    rows: tuple[Choice, ...]  # at least one
    truncated: int = 0  # rows that lost their end: none, what is too long is refused

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Choice:
        return self.rows[index]

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and candidate."""
        return max(len(row.prompt) + len(candidate) for row in self.rows for candidate in row.candidates)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and candidates."""
        return sum(len(row.prompt) + sum(map(len, row.candidates)) for row in self.rows)

    @property
    def most_sequences(self) -> int:
        """Sequences that a row is at most: one a candidate."""
        return max(len(row.candidates) for row in self.rows)

    def digest(self) -> str:
        """SHA-256 over tokens and answers."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(json.dumps([row.prompt, row.candidates, row.answer, row.also]).encode())
        return digest.hexdigest()


def read_choices(path: Path, tokenizer: PreTrainedTokenizerBase, *, sequence_length: int) -> Choices:
    """Read and tokenise a file of choices. A candidate follows its prompt as it is written, spaces included.

    Args:
        path: JSONL file; ``answer`` is one of the candidates, or its place among them, from 0, or a list of places where
            several are right.
        tokenizer: The model's tokenizer.
        sequence_length: Most tokens of a prompt and a candidate; longer ones are refused.

    Raises:
        DataError: if the file cannot be read, or a row is malformed or too long; it names the line.
    """
    return Choices(tuple(_choices(path, tokenizer, sequence_length)))


def _choices(path: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Iterator[Choice]:
    for line, row in parsed_rows(path):

        def refuse(found: str, expected: str, remedy: str, line: int = line) -> DataError:
            return DataError(f"{path}, line {line}", found=found, expected=expected, remedy=remedy)

        prompt, answer = row.get("prompt"), row.get("answer")
        candidates: Any = row.get("candidates")
        if not isinstance(prompt, str) or not _texts(candidates):
            keys = ", ".join(map(repr, row))
            raise refuse(f"the keys {keys}", "a text 'prompt' and two or more texts 'candidates'", "write the row as such")
        right: Any = [candidates.index(answer)] if answer in candidates else answer
        right = right if isinstance(right, list) else [right]
        if not right or not all(type(place) is int and 0 <= place < len(candidates) for place in right):
            found = f"{json.dumps(answer)[:40]} as 'answer'"
            raise refuse(found, "one of the candidates, or its place from 0", "write the right candidate")
        choice = replace(tokenized_choice(prompt, candidates, right[0], tokenizer), also=tuple(right[1:]))
        shortest, longest = (len(choice.prompt) + pick(map(len, choice.candidates)) for pick in (min, max))
        if not 0 < len(choice.prompt) < shortest:
            found = f"{len(choice.prompt)} tokens of prompt, and {shortest - len(choice.prompt)} of the shortest candidate"
            raise refuse(found, "at least 1 of prompt and of each candidate", "mend the row")
        if longest > sequence_length:
            found = f"{len(choice.prompt)} tokens of prompt, {longest} with the longest candidate"
            raise refuse(found, f"at most {sequence_length} in all", TOO_LONG)
        yield choice


def tokenized_choice(prompt: str, candidates: Sequence[str], answer: int, tokenizer: PreTrainedTokenizerBase) -> Choice:
    """Tokenise a question. A token that merges the prompt's end with a candidate's start is part of the candidates."""
    rows = [completion_ids(prompt, candidate, tokenizer) for candidate in candidates]
    shared = min(length for _, length in rows)
    return Choice(tuple(rows[0][0][:shared]), tuple(tuple(ids[shared:]) for ids, _ in rows), answer)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(text, str) and text for text in value)
