"""Batches of Hugging Face models: checked before they run, packed, and with the values that forwards read from them.

Packing: rows of different lengths joined into one row without padding, each with positions from 0. Hugging Face's forwards
detect packed rows by their positions, and mask attention between them. Some models' forwards do not, so each layer's
attention mask is checked before anything is computed.

A branch on a tensor's value (is any token padding?) makes the host wait for the device. Masks and positions depend on the
batch alone, so the values are the same in each forward: a ``BranchCache`` keeps them, so that on a GPU no sweep waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from zo2core import Batch
from zo2core.errors import BatchError, UnsupportedModelError
from zo2core.sweep.microbatch import IGNORE_INDEX, predicted

_READS = {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.item, torch.Tensor.tolist}


class BranchCache(TorchFunctionMode):
    """A context in which reads of tensor values return what they returned the first time, in the same order.

    Only integers and booleans are cached, since floating-point values may depend on weights. Booleans are assumed not to, in
    all that a decoder does before its first layer and after its last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cached: list[tuple[str, Any]] = []  # what was read, and its value
        self._count = 0  # reads since the context was entered
        self._recording = True

    def __enter__(self) -> BranchCache:
        self._count = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._recording = False  # later reads beyond those of the first pass have another cause
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READS or args[0].is_floating_point():
            return func(*args, **(kwargs or {}))
        read = f"{func.__name__} of a tensor of shape {tuple(args[0].shape)} and {args[0].dtype}"
        index, self._count = self._count, self._count + 1
        if index >= len(self._cached):
            value = func(*args, **(kwargs or {}))
            if self._recording:
                self._cached.append((read, value))
            return value
        expected, value = self._cached[index]
        if read != expected:
            raise UnsupportedModelError(
                f"read {index} of a tensor's value in Hugging Face's forward",
                found=read,
                expected=f"{expected}, as the first time",
                remedy="write an adapter for this architecture: its forward reads values in no fixed order",
            )
        return value


class PreparedBatch(dict[str, torch.Tensor]):
    """A checked batch with cached properties, so that no sweep has to wait for the device."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.branches = BranchCache()
        labels = batch.get("labels")
        self.predictions = None if labels is None or labels.dim() != 2 else predictions(batch)
        self.is_padded = is_padded(batch)
        self.is_packed = is_packed(batch)


def longest_row(model: PreTrainedModel) -> int | None:
    """The largest number of tokens in a row; None if the config has no limit.

    Where positions start after the padding index, as in RoBERTa, those up to it are not usable.
    """
    longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
        if longest is not None and is_table and module.num_embeddings == longest and module.padding_idx is not None:
            return longest - int(module.padding_idx) - 1
    return longest


def check_batch(batch: Batch, config: PretrainedConfig, longest: int | None) -> None:
    """Refuse a batch that the model cannot train on."""
    if "labels" not in batch:
        raise _refusal("labels", "no labels", "a (batch, tokens) tensor", "pass input_ids and labels")
    check_inputs(batch, config, longest)
    if not bool(predicted(batch["labels"]).any()):
        raise _refusal("labels", "no token to predict", "a label beyond the first token", "leave this batch out")


def check_inputs(batch: Batch, config: PretrainedConfig, longest: int | None) -> None:
    """Refuse a batch that the model cannot run; labels are optional."""
    if "input_ids" not in batch:
        raise _refusal("input_ids", "no input_ids", "a (batch, tokens) tensor", "pass input_ids")
    ids = batch["input_ids"]
    labels = batch.get("labels", ids[:0])
    if ids.dim() != 2 or ids.is_floating_point() or ids.numel() == 0:
        raise _refusal(
            "input_ids", f"{ids.dtype} of shape {tuple(ids.shape)}", "integers (batch, tokens)", "pad to one length"
        )
    for key in ("labels", "attention_mask"):
        if key in batch and batch[key].shape != ids.shape:
            raise _refusal(key, f"shape {tuple(batch[key].shape)}", f"{tuple(ids.shape)} as input_ids", "pad alike")
    positions = batch.get("position_ids")  # each sequence of a packed row has its own
    tokens = ids.shape[1] if positions is None or not positions.numel() else int(positions.max()) + 1
    if longest is not None and tokens > longest:
        raise _refusal("input_ids", f"{tokens} tokens", f"at most {longest}", "cut the sequences")
    vocabulary = config.get_text_config().vocab_size
    for key, values in (("input_ids", ids), ("labels", labels[labels != IGNORE_INDEX])):
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < vocabulary:
            found = f"token {int(values.min())} to {int(values.max())}"
            raise _refusal(key, found, f"0 to {vocabulary - 1}", "use this model's own tokenizer")


def predictions(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and columns of the tokens whose next token is labelled: int64, (labelled tokens,) each."""
    if isinstance(batch, PreparedBatch) and batch.predictions is not None:
        return batch.predictions
    rows, columns = predicted(batch["labels"]).nonzero(as_tuple=True)
    return rows, columns


def stack_rows(batches: Sequence[Batch]) -> Batch | None:
    """Join batches along their rows; None if their entries differ in names or shapes.

    Entries that all rows of a batch share (positions, say) are kept once if they are equal in all batches.
    """
    first = batches[0]
    shapes = [{key: value.shape for key, value in batch.items()} for batch in batches]
    if any(shape != shapes[0] for shape in shapes):
        return None
    joined: dict[str, torch.Tensor] = {}
    for key, value in first.items():
        if value.dim() > 0 and len(value) == len(first["input_ids"]):
            joined[key] = torch.cat([batch[key] for batch in batches])
        elif all(batch[key] is value or torch.equal(batch[key], value) for batch in batches):
            joined[key] = value
        else:
            return None
    return joined


def branches_of(batch: Batch) -> contextlib.AbstractContextManager[object]:
    """The batch's cache of values that Hugging Face's forward branches on, as a context; empty if not prepared."""
    return batch.branches if isinstance(batch, PreparedBatch) else contextlib.nullcontext()


def is_padded(batch: Batch) -> bool:
    """Whether a batch masks any token, or packs rows, so that attention needs a mask."""
    if isinstance(batch, PreparedBatch):
        return batch.is_padded or batch.is_packed
    mask = batch.get("attention_mask")
    return mask is not None and not bool(mask.all())


def _refusal(key: str, found: str, expected: str, remedy: str) -> BatchError:
    return BatchError(f"batch[{key!r}]", found=found, expected=expected, remedy=remedy)


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
