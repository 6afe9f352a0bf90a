"""Losses of several streams that ran as one batch: logits are computed together, and a loss for each stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zo2adapters.models.chunked_loss import KeptLosses
from zo2adapters.models.prepared_batch import predictions, stack_rows
from zo2core import Batch


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
