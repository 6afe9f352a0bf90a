"""A causal language model's loss over slices of tokens, so that its logits are never there whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


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
    """The mean loss over labelled tokens; tokens without a label cost nothing.

    Args:
        hidden: Final hidden states, (rows, tokens, hidden size), before the norm.
        labels: (rows, tokens); each token but the last predicts the next one's.
        predictions: Rows and columns of the tokens from which a labelled one is predicted.
        chunk: Labelled tokens whose logits are in memory at a time.
        logits: Norm and head: (n, hidden size) to (n, vocabulary).
        loss_function: The model's own, by Hugging Face.
        vocab_size: Size of the model's vocabulary.

    Returns:
        0-d, as ``loss_function`` gives it.
    """
    targets = labels[:, 1:]
    rows, places = predictions
    count = len(rows)
    terms = []
    for start in range(0, count, chunk):
        at = rows[start : start + chunk], places[start : start + chunk]
        terms.append(  # a sum, divided by the labelled tokens of all chunks
            loss_function(
                logits(hidden[at]), None, vocab_size=vocab_size, shift_labels=targets[at], num_items_in_batch=count
            )
        )
    return torch.stack(terms).sum()


def stacked_losses(
    hidden: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    predictions: Sequence[tuple[torch.Tensor, torch.Tensor]],
    chunk: int,
    *,
    logits: Callable[[torch.Tensor], torch.Tensor],
    loss_function: Callable[..., torch.Tensor],
    vocab_size: int,
) -> list[torch.Tensor]:
    """``chunked_loss`` of several streams, whose logits are made together.

    Args:
        hidden: Of each stream, as there.
        labels: Of each stream, as there.
        predictions: Of each stream, as there. Streams with fewer than another are filled up, for logits that nobody reads.
        chunk: Labelled tokens of a stream whose logits are in memory at a time.
        logits: Norm and head of all streams: as many rows of each, one stream's after another's.
        loss_function: As there.
        vocab_size: As there.

    Returns:
        0-d, one a stream.
    """
    counts = [len(rows) for rows, _ in predictions]
    terms: list[list[torch.Tensor]] = [[] for _ in hidden]
    for start in range(0, max(counts), chunk):
        length = min(chunk, max(counts) - start)
        places = []
        for rows, columns in predictions:
            at = torch.arange(start, start + length, device=rows.device).clamp(max=len(rows) - 1)
            places.append((rows[at], columns[at]))
        taken = torch.cat([states[at] for states, at in zip(hidden, places, strict=True)])
        for stream, own in enumerate(torch.split(logits(taken), length)):
            count = max(0, min(length, counts[stream] - start))
            if count:
                rows, columns = (index[:count] for index in places[stream])
                targets = labels[stream][:, 1:][rows, columns]
                options = {"shift_labels": targets, "num_items_in_batch": counts[stream]}
                terms[stream].append(loss_function(own[:count], None, vocab_size=vocab_size, **options))
    return [torch.stack(own).sum() for own in terms]
