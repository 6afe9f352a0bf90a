"""The rows of data files as tokens, four bytes each where there are many."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2core.errors import OptionError

Label = int | float | tuple[float, ...]  # a class, a number, or a number for each class


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """A row of text, or of a prompt and its completion."""

    input_ids: array[int]  # (length,), int32
    prompt_length: int  # number of leading tokens without loss
    line: int  # line of the file, or number of the row, from 1
    later_prompts: tuple[tuple[int, int], ...] = ()  # start and end of further tokens without loss, within the row
    source: str = ""  # the row of the file as JSON, for runs that need it

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The texts of the row, each as its tokens."""
        return [self.input_ids]

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The sequences of the row: tokens of each, and for how many of these the loss needs logits."""
        without_loss = max(self.prompt_length, 1) + sum(end - start for start, end in self.later_prompts)
        return [(len(self.input_ids), len(self.input_ids) - without_loss)]

    @property
    def content(self) -> bytes:
        """What a digest of rows covers."""
        later = repr(self.later_prompts).encode() if self.later_prompts else b""
        return b"%d %d\n" % (len(self.input_ids), self.prompt_length) + self.input_ids.tobytes() + later


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """A text, or two, with a label."""

    input_ids: array[int]  # (length,), int32
    token_type_ids: array[int]  # (length,), int32; empty if the tokenizer makes none
    label: Label

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The texts of the row, each as its tokens."""
        return [self.input_ids]

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Tokens of each sequence, and for how many of these the loss needs logits."""
        return [(len(self.input_ids), 1)]

    @property
    def content(self) -> bytes:
        """What a digest of rows covers."""
        return json.dumps([self.input_ids.tolist(), self.token_type_ids.tolist(), self.label]).encode()


@dataclass(frozen=True, slots=True)
class Choice:
    """A prompt with candidates. Of preferences, the first candidate is the chosen one."""

    prompt: tuple[int, ...]  # tokens before the candidates; at least one
    candidates: tuple[tuple[int, ...], ...]  # tokens of each candidate; at least two candidates
    answers: tuple[int, ...]  # indices of the right candidates, at least one

    @property
    def answer(self) -> int:
        """Index of the right candidate, the first if several are right."""
        return self.answers[0]

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The texts of the row, each as its tokens."""
        return [self.prompt, *self.candidates]

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Tokens of each sequence, and for how many of these the loss needs logits."""
        return [(len(self.prompt) + len(candidate), len(candidate)) for candidate in self.candidates]

    @property
    def content(self) -> bytes:
        """What a digest of rows covers."""
        return json.dumps([self.prompt, self.candidates, self.answer, self.answers[1:]]).encode()


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its right answers."""

    prompt: tuple[int, ...]  # token ids, at least one
    answers: tuple[str, ...]  # right answers, at least one

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The texts of the row, each as its tokens."""
        return [self.prompt]

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Tokens of each sequence, and for how many of these the loss needs logits."""
        return [(len(self.prompt), 1)]


AnyRow = TokenizedRow | LabelledRow | Choice | Question


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Any]):
    """The rows of a data file, in file order."""

    rows: tuple[Any, ...]  # at least one of the four classes above, by the format
    format: RowFormat = RowFormat.TEXT
    truncated: int = 0  # number of rows that were shortened to the sequence length
    dropped: int = 0  # number of longer rows that were left out
    new_tokens: int = 0  # most tokens of an answer that is generated to each row
    columns: tuple[str, ...] = ()  # of the file's first row
    options: RowOptions = field(default_factory=RowOptions)  # how the file was read, with the labels that it has

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with an answer that is generated."""
        longest: int = max(tokens for row in self.rows for tokens, _ in row.sequences)
        return longest + self.new_tokens

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows. A prompt counts once."""
        return sum(len(part) for row in self.rows for part in row.parts)

    @property
    def most_sequences(self) -> int:
        """Most sequences of a row."""
        return max(len(row.sequences) for row in self.rows)

    def digest(self) -> str:
        """SHA-256 over the tokens of all rows, the lengths of their prompts, their labels and answers."""
        if self.format is RowFormat.ANSWERS:
            return hashlib.sha256(json.dumps([[row.prompt, row.answers] for row in self.rows]).encode()).hexdigest()
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(row.content)
        return digest.hexdigest()

    def split(self, share: float) -> tuple[Rows, Rows]:
        """Split the rows into those to train on and those to evaluate on, each in file order."""
        count = len(self)
        if count < 2:
            raise OptionError("eval_split", found="1 row", expected="at least 2", remedy="leave it out, or add rows")
        chosen = set(shuffled(count, "evaluation 0")[: min(max(round(count * share), 1), count - 1)])
        parts = [tuple(row for index, row in enumerate(self) if (index in chosen) is held_out) for held_out in (False, True)]
        return replace(self, rows=parts[0]), replace(self, rows=parts[1])


def shuffled(count: int, seed: int | str) -> list[int]:
    """All indices below a count, in an order that depends on the seed alone."""
    generator = Random(seed)  # noqa: S311 - the order of rows is not a secret
    # Sorted by draws, because Python promises the sequence of random() across its versions, not that of shuffle(), and a
    # resumed run may use another version.
    return sorted(range(count), key=lambda _: generator.random())
