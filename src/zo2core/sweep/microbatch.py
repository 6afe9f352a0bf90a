"""Micro-batches: a batch split along its rows, and the losses of its parts combined again.

A mean over tokens is not the mean of the parts' means: each part is weighted by its labelled tokens, as Hugging Face's
Trainer weights the micro-batches of a step (``num_items_in_batch``). This module defines what a labelled token is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zo2core.errors import BatchError
from zo2core.ranges import require_whole
from zo2core.types import Batch, RowGroup, require_tensors

IGNORE_INDEX = -100  # label of a token without loss, as in torch and Hugging Face


def predicted(labels: torch.Tensor) -> torch.Tensor:
    """Mark the tokens over which a causal language model's loss is averaged."""
    return labels[..., 1:] != IGNORE_INDEX


def labelled_tokens(batch: Batch) -> int:
    """Count the tokens over which the loss of a batch is averaged; a batch without labels has none."""
    return int(predicted(batch["labels"]).sum().item()) if "labels" in batch else 0


def require_rows(rows: int | None) -> None:
    """Refuse micro-batches of less than one row; None does not split batches."""
    if rows is not None:
        require_whole("micro_batch_size", rows, 1)


def split_rows(batch: Batch, rows: int | None) -> list[Batch]:
    """Split a batch into micro-batches of at most ``rows`` rows.

    Columns on the right that are padding in all rows of a micro-batch are removed. Columns on the left stay, since models
    count positions from there. A micro-batch without a labelled token is left out: it has no loss. A tensor with another
    number of rows than the labels (positions that all rows share) is part of every micro-batch.
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
    """Select the rows of a group; all groups keep the batch's columns."""
    labels, groups = batch.get("labels"), group.groups
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        raise BatchError(
            "batch",
            found="no labels of shape (rows, tokens)",
            expected="a batch with such labels, whose rows are divided among directions",
            remedy="pass a batch with labels",
        )
    rows = len(labels)
    if rows % groups:
        raise BatchError(
            "batch",
            found=f"{rows} rows for {groups} directions",
            expected="a multiple of the number of directions, so that each has equally many rows",
            remedy=f"pass batches of {max(groups, rows - rows % groups)} rows, or choose another number of directions",
        )
    require_tensors(batch)
    size = rows // groups
    return rows_of(batch, group.number * size, (group.number + 1) * size)


def shard_of_rows(batch: Batch, start: int, stop: int) -> Batch:
    """A range of a batch's rows, without the columns on the right in which all of them are padding."""
    rows = rows_of(batch, start, stop)
    return _without_padding(rows) if labelled_tokens(rows) else rows


def rows_to_shard(batches: Sequence[Batch]) -> int | None:
    """Return the number of rows of the smallest batch; None if a batch without labels (rows, tokens) prevents sharding."""
    labels = [batch.get("labels") for batch in batches]
    counts = [len(label) for label in labels if isinstance(label, torch.Tensor) and label.dim() == 2]
    return min(counts) if counts and len(counts) == len(labels) else None


def combined_loss(losses: Sequence[torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """Compute the mean loss over the labelled tokens of all micro-batches."""
    if len(losses) == 1:
        return losses[0]
    summed = torch.stack([loss.double() * count for loss, count in zip(losses, tokens, strict=True)]).sum()
    return (summed / sum(tokens)).to(losses[0].dtype)


def rows_of(batch: Batch, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Select a range of a batch's rows. Tensors that all rows share are kept whole."""
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
