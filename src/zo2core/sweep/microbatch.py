"""Micro-batches: a batch split along its rows, and the losses of its parts combined again.

A mean over tokens is not the mean of the parts' means: each part counts by its labelled tokens, as Hugging Face's Trainer
counts the micro-batches of one step (``num_items_in_batch``). What counts as a labelled token is decided here, for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zo2core.errors import BatchError, OptionError
from zo2core.types import Batch, RowGroup, require_tensors

IGNORE_INDEX = -100  # label of a token without loss, as in torch and Hugging Face


def predicted(labels: torch.Tensor) -> torch.Tensor:
    """Which tokens a causal language model's loss is averaged over.

    Args:
        labels: Integers, (..., tokens). Each token but the last predicts the label of the next one.

    Returns:
        Bool, (..., tokens - 1): whether the token at that place predicts a label that is not ``IGNORE_INDEX``.
    """
    return labels[..., 1:] != IGNORE_INDEX


def labelled_tokens(batch: Batch) -> int:
    """Count the tokens that the loss of a batch is averaged over; a batch without labels has none."""
    return int(predicted(batch["labels"]).sum().item()) if "labels" in batch else 0


def require_rows(rows: int | None) -> None:
    """Refuse a size of micro-batches that is not at least one row; None is no size.

    Raises:
        OptionError: naming the option.
    """
    if rows is not None and rows < 1:
        raise OptionError(
            "micro_batch_size", found=repr(rows), expected="at least 1", remedy="leave it out for no splitting"
        )


def split_rows(batch: Batch, rows: int | None) -> list[Batch]:
    """Split a batch into micro-batches of at most so many rows.

    A micro-batch loses the columns on the right in which all its rows are padding. On the left they stay: models count
    positions from there. A micro-batch without a labelled token is left out: it has no loss. Tensors with another number of
    rows than the labels (positions that all rows share) go with every micro-batch.

    Args:
        batch: With labels (rows, tokens); what the model would refuse is not split, so that the model does refuse it.
        rows: Rows of a micro-batch; None leaves the batch whole.

    Returns:
        The micro-batches in order, at least one; the batch itself where nothing is to be split.
    """
    require_tensors(batch)
    labels = batch.get("labels")
    if rows is None or labels is None or labels.dim() != 2 or len(labels) <= rows:
        return [batch]
    micro_batches = []
    for start in range(0, len(labels), rows):
        micro_batch = shard_of_rows(batch, start, start + rows)
        if labelled_tokens(micro_batch):
            micro_batches.append(micro_batch)
    return micro_batches or [batch]


def rows_of_group(batch: Batch, group: RowGroup) -> Batch:
    """The rows of a batch that are a group's; all groups keep the batch's columns.

    Args:
        batch: With labels (rows, tokens).
        group: One of several, which have equally many rows each, in order.

    Raises:
        BatchError: if the batch has no labels of rows, or its rows cannot be shared out evenly.
    """
    labels, groups = batch.get("labels"), group.groups
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        raise BatchError(
            "batch",
            found="no labels of shape (rows, tokens)",
            expected="a batch with labels, whose rows directions share out",
            remedy="pass one",
        )
    rows = len(labels)
    if rows % groups:
        raise BatchError(
            "batch",
            found=f"{rows} rows for {groups} directions",
            expected="a number of rows that is a multiple of the directions, each of which has as many",
            remedy=f"pass batches of {max(groups, rows - rows % groups)} rows, or choose another number of directions",
        )
    require_tensors(batch)
    share = rows // groups
    return rows_of(batch, group.number * share, (group.number + 1) * share)


def shard_of_rows(batch: Batch, start: int, stop: int) -> Batch:
    """A range of a batch's rows, without the columns on the right in which all of them are padding.

    Args:
        batch: With labels (rows, tokens).
        start: The first row.
        stop: The row after the last one.
    """
    rows = rows_of(batch, start, stop)
    return _without_padding(rows) if labelled_tokens(rows) else rows


def rows_to_shard(batches: Sequence[Batch]) -> int | None:
    """The rows of the smallest of batches, where all have labels (rows, tokens); None where they cannot be sharded."""
    labels = [batch.get("labels") for batch in batches]
    counts = [len(label) for label in labels if isinstance(label, torch.Tensor) and label.dim() == 2]
    return min(counts) if counts and len(counts) == len(labels) else None


def combined_loss(losses: Sequence[torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """The mean loss over the labelled tokens of all micro-batches.

    Args:
        losses: 0-d, one a micro-batch: means over its labelled tokens.
        tokens: Labelled tokens of each.

    Returns:
        0-d, of the losses' dtype and device; summed in float64. Of one micro-batch: its loss itself.
    """
    if len(losses) == 1:
        return losses[0]
    summed = torch.stack([loss.double() * count for loss, count in zip(losses, tokens, strict=True)]).sum()
    return (summed / sum(tokens)).to(losses[0].dtype)


def rows_of(batch: Batch, start: int, stop: int) -> dict[str, torch.Tensor]:
    """A range of a batch's rows, with what all rows share.

    Args:
        batch: With labels (rows, ...).
        start: The first row.
        stop: The row after the last one.
    """
    count = len(batch["labels"])
    return {key: value[start:stop] if value.dim() > 0 and len(value) == count else value for key, value in batch.items()}


def _without_padding(micro_batch: Batch) -> Batch:
    labels, mask = micro_batch["labels"], micro_batch.get("attention_mask")
    if mask is None or mask.shape != labels.shape:
        return micro_batch
    width = labels.shape[1]
    used = int(((mask != 0) | (labels != IGNORE_INDEX)).any(dim=0).nonzero().max()) + 1
    if used == width:
        return micro_batch
    return {
        key: value[:, :used].contiguous()
        if value.dim() > 1 and value.shape[1] == width and len(value) in (1, len(labels))
        else value
        for key, value in micro_batch.items()
    }
