"""Batches of rows: endless shuffled epochs for training, padded sequences, and prompts with candidates."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from typing import TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from zo2adapters.tasks.rows import LabelledRow, TokenizedRow, shuffled
from zo2core.errors import BatchError
from zo2core.ranges import require_whole
from zo2core.sweep.microbatch import IGNORE_INDEX

PROMPT, ANSWER, REFERENCE = "prompt", "is_answer", "reference"  # keys of a batch that the model's forward does not take

Row = TypeVar("Row")


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
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    answers: Sequence[int | Sequence[int]],
    *,
    pad_token_id: int = 0,
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
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    references: Sequence[Sequence[float]],
    *,
    pad_token_id: int = 0,
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
