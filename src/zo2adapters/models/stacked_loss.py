"""Losses of several streams that ran as one batch: their logits are made together, and each has a loss of its own."""

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
    """The losses that Hugging Face's model makes of all its logits.

    Args:
        batches: Batches of each stream.
        targets: Entries that the loss alone reads.
        logits: What the model makes of the other entries: (rows of all streams, tokens, vocabulary).
        loss_function: The model's own, by Hugging Face.
        vocab_size: Size of the model's vocabulary.

    Returns:
        0-d, one a stream.
    """
    joined = stack_rows(batches)
    assert joined is not None, "they were joined before"
    made = logits(**{key: value for key, value in joined.items() if key not in targets})
    kept = KeptLosses(len(batches))
    for own, batch in zip(torch.split(made, len(batches[0]["labels"])), batches, strict=True):
        kept.keep(loss_function(own, batch["labels"], vocab_size=vocab_size))
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
    """``chunked_loss`` of several streams, whose logits are made together.

    Args:
        hidden: Hidden states of all streams, one after the other, with as many rows each.
        batches: Batches of each stream. Those with fewer labelled tokens are padded; the logits of padding are not used.
        chunk: Labelled tokens of all streams whose logits are in memory at a time.
        logits: Norm and head of all streams: as many rows of each, one stream's after another's.
        loss_function: As there.
        vocab_size: As there.

    Returns:
        0-d, one a stream.
    """
    states = torch.split(hidden, len(batches[0]["labels"]))
    predicted = [predictions(batch) for batch in batches]
    counts = [len(rows) for rows, _ in predicted]
    chunk = max(1, chunk // len(batches))
    terms = [KeptLosses(-(-count // chunk)) for count in counts]
    for start in range(0, max(counts), chunk):
        length = min(chunk, max(counts) - start)
        places = []
        for rows, columns in predicted:
            at = torch.arange(start, start + length, device=rows.device).clamp(max=len(rows) - 1)
            places.append((rows[at], columns[at]))
        taken = torch.cat([own[at] for own, at in zip(states, places, strict=True)])
        for stream, own in enumerate(torch.split(logits(taken), length)):
            count = max(0, min(length, counts[stream] - start))
            if count:
                rows, columns = (index[:count] for index in places[stream])
                targets = batches[stream]["labels"][:, 1:][rows, columns]
                options = {"shift_labels": targets, "num_items_in_batch": counts[stream]}
                terms[stream].keep(loss_function(own[:count], None, vocab_size=vocab_size, **options))
    return [own.losses.sum() for own in terms]
