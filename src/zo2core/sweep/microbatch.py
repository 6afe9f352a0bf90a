"""Micro-batches: a batch cut along its rows, and the losses of the pieces put together again.

A mean over tokens is not the mean of the pieces' means: each counts by its labelled tokens, as Hugging Face's Trainer counts
the micro-batches of one step (``num_items_in_batch``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zo2core.types import Batch

IGNORE_INDEX = -100  # the label of a token without loss, as in Hugging Face and torch


def predicted(labels: torch.Tensor) -> torch.Tensor:
    """Where a causal language model has a loss: at tokens whose next one has a label.

    Args:
        labels: (..., tokens). The first token's label does not count, since nothing predicts it.

    Returns:
        Truth values, (..., tokens - 1): whether a token's successor is predicted from it.
    """
    return labels[..., 1:] != IGNORE_INDEX


def labelled_tokens(batch: Batch) -> int:
    """Count the tokens whose loss a causal language model averages."""
    return int(predicted(batch["labels"]).sum().item())


def cut(batch: Batch, rows: int | None) -> list[Batch]:
    """Cut a batch into pieces of at most so many rows.

    A piece loses the columns on the right in which all its rows are padding. On the left they stay: models count positions
    from there. A piece without a labelled token is left out: it has no loss. Tensors with another number of rows than the
    labels (positions that all rows share) go with every piece.

    Args:
        batch: With labels (rows, tokens); what the model would refuse is not cut, so that it does.
        rows: Of a piece; None leaves the batch whole.

    Returns:
        The pieces in order, at least one; the batch itself where nothing is to be cut.
    """
    labels = batch.get("labels")
    if rows is None or labels is None or labels.dim() != 2 or len(labels) <= rows:
        return [batch]
    pieces = []
    for start in range(0, len(labels), rows):
        piece = {
            key: value[start : start + rows] if value.dim() > 0 and len(value) == len(labels) else value
            for key, value in batch.items()
        }
        if labelled_tokens(piece):
            pieces.append(_without_padding(piece))
    return pieces or [batch]


def joined_loss(losses: Sequence[torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """The mean loss over all pieces' labelled tokens.

    Args:
        losses: 0-d, one a piece: means over its labelled tokens.
        tokens: Labelled tokens of each.

    Returns:
        0-d, of the losses' dtype and device; summed in float64. Of one piece: its loss itself.
    """
    if len(losses) == 1:
        return losses[0]
    summed = torch.stack([loss.double() * count for loss, count in zip(losses, tokens, strict=True)]).sum()
    return (summed / sum(tokens)).to(losses[0].dtype)


def _without_padding(piece: Batch) -> Batch:
    labels, mask = piece["labels"], piece.get("attention_mask")
    if mask is None or mask.shape != labels.shape:
        return piece
    width = labels.shape[1]
    used = int(((mask != 0) | (labels != IGNORE_INDEX)).any(dim=0).nonzero().max()) + 1
    if used == width:
        return piece
    return {
        key: value[:, :used].contiguous() if value.dim() > 1 and value.shape[1] == width else value
        for key, value in piece.items()
    }
