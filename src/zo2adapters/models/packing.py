"""Packing: rows of different lengths joined into one row without padding, each with positions from 0.

Hugging Face's forwards detect packed rows by their positions, and mask attention between them. Some models' forwards do not,
so each layer's attention mask is checked before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zo2core import Batch
from zo2core.errors import BatchError, UnsupportedModelError
from zo2core.sweep.microbatch import IGNORE_INDEX

_MASK_ROWS = 256  # rows of a mask that are checked at a time, since a mask can be large


def pack(batch: Batch) -> dict[str, torch.Tensor]:
    """Join the rows of a batch into one row.

    Args:
        batch: ``input_ids``, ``attention_mask`` (1 on tokens, 0 on padding) and ``labels``, each (batch, tokens), int64, and
            nothing else.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, each (1, tokens of all rows), int64. The label of each row's first
        token is ``IGNORE_INDEX``, since it is not predicted from the row before.

    Raises:
        BatchError: if the batch has other entries, which may not be packable.
    """
    needed = {"input_ids", "attention_mask", "labels"}
    if batch.keys() != needed:
        found, expected = ", ".join(sorted(batch)), ", ".join(sorted(needed))
        raise BatchError("batch", found=found, expected=f"{expected}, to pack them", remedy="leave the batch padded")
    mask = batch["attention_mask"].bool()
    positions = mask.long().cumsum(dim=1) - 1
    labels = batch["labels"].masked_fill(positions == 0, IGNORE_INDEX)
    return {
        "input_ids": batch["input_ids"][mask][None],
        "labels": labels[mask][None],
        "position_ids": positions[mask][None],
    }


def is_packed(batch: Batch) -> bool:
    """Whether a row of a batch has several sequences: its positions restart, and there is no mask."""
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2 or "attention_mask" in batch:
        return False
    return bool((positions[:, 1:] - positions[:, :-1] != 1).any())


@torch.inference_mode()
def require_separating_masks(batch: Batch, calls: Callable[[], Iterable[tuple[Sequence[Any], Mapping[str, Any]]]]) -> None:
    """Refuse a model in which a layer would attend across the sequences of a packed row."""
    positions = batch["position_ids"]
    sequence_ids = (torch.diff(positions, dim=1, prepend=positions[:, :1]) != 1).cumsum(dim=1)
    separates: dict[torch.Tensor, bool] = {}  # by mask, since most layers share one
    for layer, (arguments, keywords) in enumerate(calls()):
        tensors = [value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)]
        masks = [value for value in tensors if value.dim() == 4 and value.shape[-2:] == (sequence_ids.shape[1],) * 2]
        for mask in masks:
            if mask not in separates:
                separates[mask] = _separates(mask, sequence_ids)
        if not any(separates[mask] for mask in masks):
            raise UnsupportedModelError(
                f"layer {layer}",
                found="no attention mask that separates packed rows",
                expected="a mask from the positions of packed rows, as models make for sdpa and eager attention",
                remedy="pad the rows: pass an attention_mask, and leave --pack out",
            )


def _separates(mask: torch.Tensor, sequence_ids: torch.Tensor) -> bool:
    """Whether a mask, (rows or 1, heads or 1, tokens, tokens), hides other sequences; floats are added to scores."""
    for first in range(0, sequence_ids.shape[1], _MASK_ROWS):
        part, numbers = mask[:, :, first : first + _MASK_ROWS], sequence_ids[:, first : first + _MASK_ROWS]
        visible = part if part.dtype is torch.bool else part > torch.finfo(part.dtype).min / 2
        apart = numbers[:, :, None] != sequence_ids[:, None, :]
        if bool((visible & apart[:, None]).any()):
            return False
    return True
