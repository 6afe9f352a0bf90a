"""The rows of data files as tokens, four bytes each where there are many, and batches of them.

The order of training is one of endless shuffled epochs; sequences are padded, also those of prompts with candidates.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from random import Random
from typing import Any, TypeAlias, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2core.errors import BatchError, OptionError
from zo2core.ranges import require_whole
from zo2core.sweep.microbatch import IGNORE_INDEX

PROMPT, ANSWER, REFERENCE = "prompt", "is_answer", "reference"  # keys of a batch that the model's forward does not take
Row = TypeVar("Row")
Prompts: TypeAlias = Sequence[Sequence[int]]  # token ids of each prompt
Candidates: TypeAlias = Sequence[Prompts]  # token ids of the candidates of each prompt
Label = int | float | tuple[float, ...]  # a class, a number, or a number for each class


@dataclass(frozen=True, slots=True)
class _Text:
    """A row that is one sequence."""

    input_ids: array[int]  # (length,), int32

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The texts of the row, each as its tokens."""
        return [self.input_ids]


@dataclass(frozen=True, slots=True)
class TokenizedRow(_Text):
    """A row of text, or of a prompt and its completion."""

    prompt_length: int  # number of leading tokens without loss
    line: int  # line of the file, or number of the row, from 1
    later_prompts: tuple[tuple[int, int], ...] = ()  # start and end of further tokens without loss, within the row
    source: str = ""  # the row of the file as JSON, for runs that need it

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
class LabelledRow(_Text):
    """A text, or two, with a label."""

    token_type_ids: array[int]  # (length,), int32; empty if the tokenizer makes none
    label: Label

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

    @property
    def are_labelled(self) -> bool:
        """Whether the rows are prompts with labels, which became their candidates."""
        return self.format is RowFormat.CANDIDATES and "candidates" not in self.columns

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


def training_batches(rows: Sequence[Row], *, batch_size: int, seed: int, first_step: int = 0) -> Iterator[list[Row]]:
    """Iterate over epochs without end; the order of rows in an epoch depends on the seed and the epoch only."""
    require_whole("batch_size", batch_size, 1)
    require_whole("first_step", first_step, 0)
    epoch, skipped = divmod(first_step * batch_size, len(rows))
    # The seed is hashed because Random takes the absolute value of an integer.
    seeds = (int(hashlib.sha256(f"{seed} {number}".encode()).hexdigest(), 16) for number in count(epoch))
    indices = islice(chain.from_iterable(shuffled(len(rows), seed) for seed in seeds), skipped, None)
    return ([rows[index] for index in islice(indices, batch_size)] for _ in count())


def file_batches(rows: Sequence[Row], batch_size: int) -> list[Sequence[Row]]:
    """All rows once, in file order; the last batch may be smaller."""
    require_whole("batch_size", batch_size, 1)
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def collate(rows: Sequence[TokenizedRow | LabelledRow], *, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad rows on the right into one batch."""
    input_ids = _padded([row.input_ids for row in rows], pad_token_id)
    position = torch.arange(input_ids.shape[1])
    tokens = position < torch.tensor([[len(row.input_ids)] for row in rows])
    batch = {"input_ids": input_ids, "attention_mask": tokens.to(torch.int64)}
    labelled = [row for row in rows if isinstance(row, LabelledRow)]
    if labelled:
        batch["labels"] = torch.tensor([row.label for row in labelled])
        if labelled[0].token_type_ids:
            batch["token_type_ids"] = _padded([row.token_type_ids for row in labelled], 0)
        return batch
    prompt = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        assert isinstance(row, TokenizedRow)
        for start, end in ((0, row.prompt_length), *row.later_prompts):
            prompt[index, start:end] = True
    return {**batch, "labels": input_ids.masked_fill(prompt | ~tokens, IGNORE_INDEX)}


def _padded(rows: Sequence[array[int]], padding: int) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding)


def with_completion(prompt: Sequence[int], completion: Sequence[int], line: int = 0) -> TokenizedRow:
    """A row that learns a completion."""
    return TokenizedRow(array("i", [*prompt, *completion]), len(prompt), line)


def choice_batch(
    prompts: Prompts, candidates: Candidates, answers: Sequence[int | Sequence[int]], *, pad_token_id: int = 0
) -> dict[str, torch.Tensor]:
    """Make a batch for objectives of candidates; each pair of prompt and candidate is a row.

    Args:
        prompts: Token ids of each prompt, at least one.
        candidates: Two or more candidates of each prompt, as token ids, at least one.
        answers: Index of the right candidate of each prompt, or the indices of several.
        pad_token_id: Token id at padded positions.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``, each (rows, tokens), int64, with labels for the candidates' tokens
        alone; ``prompt``, the index of a row's prompt, and ``is_answer``, 1 where its candidate is right, each (rows,),
        int64.

    Raises:
        BatchError: if there is no prompt, or a prompt or candidate is empty, or a prompt has fewer than two candidates or
            none that is right.
    """
    rows: list[TokenizedRow] = []
    prompt_of: list[int] = []
    is_answer: list[int] = []
    if not prompts:
        raise BatchError("prompts", found="none", expected="at least one prompt", remedy="pass prompts")
    for number, (prompt, options, answer) in enumerate(zip(prompts, candidates, answers, strict=True)):
        right = [answer] if isinstance(answer, int) else list(answer)
        if not prompt or len(options) < 2 or not all(options) or not right or not set(right) <= set(range(len(options))):
            sizes = [len(candidate) for candidate in options]
            found = f"{len(prompt)} tokens, candidates of {sizes} tokens, answer {answer}"
            expected = "a prompt and at least two candidates, all with tokens, and the index of a right candidate"
            raise BatchError(f"prompts[{number}]", found=found, expected=expected, remedy="add what is missing")
        rows += [with_completion(prompt, candidate) for candidate in options]
        prompt_of += [number] * len(options)
        is_answer += [int(index in right) for index in range(len(options))]
    batch = collate(rows, pad_token_id=pad_token_id)
    return {**batch, PROMPT: torch.tensor(prompt_of), ANSWER: torch.tensor(is_answer)}


def preference_batch(
    prompts: Prompts, candidates: Candidates, references: Sequence[Sequence[float]], *, pad_token_id: int = 0
) -> dict[str, torch.Tensor]:
    """Make a batch for ``PreferenceLoss``.

    Args:
        prompts: Token ids of each prompt, at least one.
        candidates: The chosen and the rejected completion of each prompt, as token ids, at least one.
        references: Log-likelihoods of these two under the reference model, from ``score``, for each prompt.
        pad_token_id: Token id at padded positions.

    Returns:
        The batch of ``choice_batch``, and ``reference``, (rows,), float64.

    Raises:
        BatchError: if there is no prompt, or a prompt or completion is empty, or a prompt does not have two completions and
            two references.
    """
    for number, (completions, likelihoods) in enumerate(zip(candidates, references, strict=True)):
        if len(completions) != 2 or len(likelihoods) != 2:
            found = f"{len(completions)} candidates, {len(likelihoods)} references"
            expected = "a chosen and a rejected candidate, and the log-likelihood of each"
            raise BatchError(f"prompts[{number}]", found=found, expected=expected, remedy="add what is missing")
    batch = choice_batch(prompts, candidates, [0] * len(prompts), pad_token_id=pad_token_id)
    return {**batch, REFERENCE: torch.tensor(references, dtype=torch.float64).view(-1)}
