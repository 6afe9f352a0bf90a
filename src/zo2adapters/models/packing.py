"""Rows of different lengths, one behind the other in one row without padding: each counts positions of its own.

Hugging Face's forwards know such rows by their positions, and mask what belongs to another one. Not every model's do, and
then rows would see each other: a layer that is given no mask of that kind is found out before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zo2core import Batch, BatchError, UnsupportedModelError
from zo2core.sweep.microbatch import IGNORE_INDEX

_ROWS = 256  # of a mask that are looked at at a time: a whole one can be large


def pack(batch: Batch) -> dict[str, torch.Tensor]:
    """Lay the rows of a batch one behind the other.

    Args:
        batch: ``input_ids``, ``attention_mask`` (1 on tokens, 0 on padding) and ``labels``, each (batch, tokens), int64, and
            nothing else.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, each (1, tokens of all rows), int64. The first token of a row is not
        predicted from the row before: its label is ``IGNORE_INDEX``.

    Raises:
        BatchError: if it has other entries: whether they can be packed is not known.
    """
    wanted = {"input_ids", "attention_mask", "labels"}
    if batch.keys() != wanted:
        found, expected = ", ".join(sorted(batch)), ", ".join(sorted(wanted))
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
    """Whether rows of a batch have several sequences: positions begin anew, and no mask says otherwise."""
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2 or "attention_mask" in batch:
        return False
    return bool((positions[:, 1:] - positions[:, :-1] != 1).any())


@torch.inference_mode()
def require_apart(batch: Batch, calls: Callable[[], Iterable[tuple[Sequence[Any], Mapping[str, Any]]]]) -> None:
    """Refuse a model one of whose layers would let sequences of a packed row see each other.

    Args:
        batch: A packed one.
        calls: Finds out with which arguments each layer is called.

    Raises:
        UnsupportedModelError: naming the layer.
    """
    positions = batch["position_ids"]
    number = (torch.diff(positions, dim=1, prepend=positions[:, :1]) != 1).cumsum(dim=1)
    hiding: dict[torch.Tensor, bool] = {}  # by the mask, which layers mostly share
    for layer, (arguments, named) in enumerate(calls()):
        tensors = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)]
        masks = [value for value in tensors if value.dim() == 4 and value.shape[-2:] == (number.shape[1],) * 2]
        for mask in masks:
            if mask not in hiding:
                hiding[mask] = _hides(mask, number)
        if not any(hiding[mask] for mask in masks):
            raise UnsupportedModelError(
                f"layer {layer}",
                found="no attention mask that keeps packed rows apart",
                expected="one, as sdpa and eager attention get where a model knows packed rows by their positions",
                remedy="pad the rows: pass an attention_mask, and leave --pack out",
            )


def _hides(mask: torch.Tensor, number: torch.Tensor) -> bool:
    """Whether a mask, (rows or 1, heads or 1, tokens, tokens), hides what has another number; floats are added to scores."""
    for first in range(0, number.shape[1], _ROWS):
        part, own = mask[:, :, first : first + _ROWS], number[:, first : first + _ROWS]
        seen = part if part.dtype is torch.bool else part > torch.finfo(part.dtype).min / 2
        apart = own[:, :, None] != number[:, None, :]
        if bool((seen & apart[:, None]).any()):
            return False
    return True
