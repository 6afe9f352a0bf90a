"""A causal language model's loss over chunks of tokens, so that its logits are never in memory whole.

Losses of several streams that ran as one batch: logits are computed together, and a loss for each stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zo2adapters.models.packing import predictions, stack_rows
from zo2core import Batch

# Note: Losses one after another. A loss allocates its logits in float32, twice, and then a scalar. If that scalar were kept,
# it would lie behind the freed memory, and glibc, which aligns torch's allocations, could not reuse all of it for the next
# loss: 32 losses would take 32 times as much. So each scalar is copied into one tensor and freed.


def chunked_loss(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    predictions: tuple[torch.Tensor, torch.Tensor],
    chunk: int,
    *,
    logits: Callable[[torch.Tensor], torch.Tensor],
    loss_function: Callable[..., torch.Tensor],
    vocab_size: int,
) -> torch.Tensor:
    """Compute the mean loss over labelled tokens; logits of unlabelled tokens are not computed."""
    targets = labels[:, 1:]
    rows, columns = predictions
    count = len(rows)
    terms = KeptLosses(-(-count // chunk))
    for start in range(0, count, chunk):
        at = rows[start : start + chunk], columns[start : start + chunk]
        terms.keep(  # a sum, divided by the labelled tokens of all chunks
            loss_function(
                logits(hidden[at]), None, vocab_size=vocab_size, shift_labels=targets[at], num_items_in_batch=count
            )
        )
    return terms.losses.sum()


class KeptLosses:
    """A fixed number of losses in one tensor. See the note: Losses one after another."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept = 0
        self._losses: torch.Tensor | None = None

    def keep(self, loss: torch.Tensor) -> None:
        """Store a copy of the next loss, 0-d."""
        if self._losses is None:
            self._losses = loss.new_empty(self._count)
        self._losses[self._kept] = loss
        self._kept += 1

    @property
    def losses(self) -> torch.Tensor:
        """All losses, 1-D."""
        assert self._losses is not None, "no loss was kept"
        assert self._kept == self._count, "a loss is missing"
        return self._losses


def whole_losses(
    batches: Sequence[Batch],
    targets: Sequence[str],
    logits: Callable[..., torch.Tensor],
    *,
    loss_function: Callable[..., torch.Tensor],
    vocab_size: int,
) -> list[torch.Tensor]:
    """Compute the losses from all logits at once."""
    joined = stack_rows(batches)
    assert joined is not None, "stacked batches can be joined"
    all_logits = logits(**{key: value for key, value in joined.items() if key not in targets})
    kept = KeptLosses(len(batches))
    for logits_of_stream, batch in zip(torch.split(all_logits, len(batches[0]["labels"])), batches, strict=True):
        kept.keep(loss_function(logits_of_stream, batch["labels"], vocab_size=vocab_size))
    return list(kept.losses.unbind())


def stacked_losses(
    hidden: torch.Tensor,
    batches: Sequence[Batch],
    chunk: int,
    *,
    logits: Callable[[torch.Tensor], torch.Tensor],
    loss_function: Callable[..., torch.Tensor],
    vocab_size: int,
) -> list[torch.Tensor]:
    """``chunked_loss`` of several streams, whose logits are made together."""
    states = torch.split(hidden, len(batches[0]["labels"]))
    predicted = [predictions(batch) for batch in batches]
    counts = [len(rows) for rows, _ in predicted]
    chunk = max(1, chunk // len(batches))
    terms = [KeptLosses(-(-count // chunk)) for count in counts]
    for start in range(0, max(counts), chunk):
        length = min(chunk, max(counts) - start)
        positions = []
        for rows, columns in predicted:
            at = torch.arange(start, start + length, device=rows.device).clamp(max=len(rows) - 1)
            positions.append((rows[at], columns[at]))
        selected = torch.cat([state[at] for state, at in zip(states, positions, strict=True)])
        for stream, chunk_logits in enumerate(torch.split(logits(selected), length)):
            count = max(0, min(length, counts[stream] - start))
            if count:
                rows, columns = (index[:count] for index in positions[stream])
                targets = batches[stream]["labels"][:, 1:][rows, columns]
                options = {"shift_labels": targets, "num_items_in_batch": counts[stream]}
                terms[stream].keep(loss_function(chunk_logits[:count], None, vocab_size=vocab_size, **options))
    return [losses.losses.sum() for losses in terms]
