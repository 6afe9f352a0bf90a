"""A causal language model's loss over slices of tokens, so that its logits are never there whole."""

from __future__ import annotations

from collections.abc import Callable

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
        hidden: Final hidden states, (rows, tokens, ...), before the norm.
        labels: (rows, tokens); each token but the last predicts the next one's.
        predictions: Rows and columns of the tokens from which a labelled one is predicted.
        chunk: Labelled tokens whose logits are in memory at a time.
        logits: Norm and head: (n, ...) to (n, vocabulary).
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
