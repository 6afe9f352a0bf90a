"""Padded batches of rows: endless shuffled epochs for training, file order for evaluation."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from random import Random
from typing import Protocol, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from zo2adapters.tasks.rows import Dataset, TokenizedRow
from zo2core.ranges import require_whole
from zo2core.sweep.microbatch import IGNORE_INDEX

Row = TypeVar("Row", covariant=True)


class Rows(Protocol[Row]):
    """Rows that are indexed from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def collate(rows: Sequence[TokenizedRow], *, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad rows on the right into one batch."""
    ids = [torch.tensor(row.input_ids, dtype=torch.int64) for row in rows]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id)
    position = torch.arange(input_ids.shape[1])
    tokens = position < torch.tensor([[len(row.input_ids)] for row in rows])
    prompt = position < torch.tensor([[row.prompt_length] for row in rows])
    for index, row in enumerate(rows):
        for start, end in row.later_prompts:
            prompt[index, start:end] = True
    labels = input_ids.masked_fill(prompt | ~tokens, IGNORE_INDEX)
    return {"input_ids": input_ids, "attention_mask": tokens.to(torch.int64), "labels": labels}


def training_batches(dataset: Rows[Row], *, batch_size: int, seed: int, first_step: int = 0) -> Iterator[list[Row]]:
    """Iterate over epochs without end; the order of rows in an epoch depends on the seed and the epoch only."""
    require_whole("batch_size", batch_size, 1)
    require_whole("first_step", first_step, 0)
    epoch, skipped = divmod(first_step * batch_size, len(dataset))
    orders = (_epoch_order(len(dataset), seed, number) for number in count(epoch))
    indices = islice(chain.from_iterable(orders), skipped, None)
    return ([dataset[index] for index in islice(indices, batch_size)] for _ in count())


def evaluation_batches(dataset: Dataset, *, batch_size: int) -> Iterator[list[TokenizedRow]]:
    """Iterate over the rows once, in file order; the last batch may be smaller."""
    require_whole("batch_size", batch_size, 1)
    return (list(dataset.rows[start : start + batch_size]) for start in range(0, len(dataset), batch_size))


def _epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    # The seed is hashed because Random takes the absolute value of an integer. Rows are sorted by draws because only the
    # sequence of random() is stable across versions of Python, not that of shuffle(), and a resumed run may use another one.
    digest = hashlib.sha256(f"{seed} {epoch}".encode())
    generator = Random(int(digest.hexdigest(), 16))  # noqa: S311 - the order of rows is not a secret
    return sorted(range(rows), key=lambda _: generator.random())
