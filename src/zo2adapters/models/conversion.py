"""Which tensors of a checkpoint make up a parameter, where transformers renames and joins them as it loads a model.

Transformers' own rules run on row numbers in place of rows, and their result says where each row of a parameter is stored.
A parameter is read from there straight into its memory, and written back. Rules that compute with values, or move values
within a row, are refused.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from zo2core.checkpoint import Piece, TensorEntry
from zo2core.errors import CheckpointError, UnsupportedModelError

_ROW_OPERATIONS = {  # operations that only move whole rows; old versions of transformers have no Split
    getattr(core_model_loading, name, None)
    for name in ("MergeModulelist", "SplitModulelist", "Concatenate", "Chunk", "Split", "Interleave", "Transpose")
}
_MAX_ROWS = 1 << 26  # rows of one conversion; their int64 numbers take half a GiB


def parameter_pieces(entries: Mapping[str, TensorEntry], model: PreTrainedModel) -> dict[str, tuple[Piece, ...]]:
    """Apply transformers' rules to the names of a checkpoint's tensors."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    pieces: dict[str, tuple[Piece, ...]] = {}
    joined: dict[str, list[tuple[str, TensorEntry]]] = {}  # target to pattern and tensor
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        entry = entries[name]
        if pattern is not None and target in state:
            joined.setdefault(target, []).append((pattern, entry))
            continue
        if target in state and entry.shape != tuple(state[target].shape):
            raise CheckpointError(
                f"{entry.path}: {target}",
                found=f"shape {list(entry.shape)}",
                expected=f"{list(state[target].shape)}, as config.json says",
                remedy="use the config.json that belongs to these shards",
            )
        if target in pieces:
            raise _duplicate(entry, target, pieces[target][0].entry)
        pieces[target] = (Piece.whole(entry),)
    for target, sources in joined.items():
        for name, converted_pieces in _converted(model, state, target, sources, deepcopy(by_pattern[sources[0][0]])).items():
            if name in pieces:
                raise _duplicate(converted_pieces[0].entry, name, pieces[name][0].entry)
            pieces[name] = converted_pieces
    return pieces


def _converted(
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    target: str,
    sources: Sequence[tuple[str, TensorEntry]],
    rule: WeightConverter,
) -> dict[str, tuple[Piece, ...]]:
    """Run one rule on row numbers, and return the pieces of every tensor of the model that it makes."""
    entries = [entry for _, entry in sources]
    where = f"{entries[0].path}: {entries[0].name}"
    for operation in rule.operations:
        if type(operation) not in _ROW_OPERATIONS:
            raise UnsupportedModelError(
                where,
                found=f"{operation!r}, by which transformers makes {target}",
                expected="conversions that move whole rows",
                remedy="load the model with transformers, save it with save_original_format=False, and use that",
            )
    by_elements = any(len(entry.shape) < 2 for entry in entries)  # a vector is no row
    sizes = [1 if by_elements else entry.shape[-1] for entry in entries]
    counts = [math.prod(entry.shape) // max(size, 1) for entry, size in zip(entries, sizes, strict=True)]
    offsets = [0, *accumulate(counts)]
    if offsets[-1] > _MAX_ROWS:
        raise UnsupportedModelError(
            where,
            found=f"{offsets[-1]} rows for {target}",
            expected=f"at most {_MAX_ROWS} in one conversion",
            remedy="save the model by transformers with save_original_format=False, and use that",
        )
    for (pattern, entry), first, count in zip(sources, offsets, counts, strict=False):
        shape = entry.shape if by_elements else (*entry.shape[:-1], 1)
        rule.add_tensor(target, entry.name, pattern, torch.arange(first, first + count).view(shape))  # type: ignore[arg-type]
    try:
        converted: dict[str, Any] = rule.convert(target, model=model, config=model.config)
    except Exception as error:  # any: tensors that do not fit together surface inside the operations
        raise _mismatch(where, target, f"tensors that do not fit together ({type(error).__name__}: {error})") from error
    tensors = {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
    numbers = torch.cat([value.reshape(-1) for value in tensors.values()])
    if not torch.equal(numbers.sort().values, torch.arange(offsets[-1])):
        raise _mismatch(where, target, "rows that no parameter takes")
    result = {}
    for name, value in tensors.items():
        shape = tuple(state[name].shape) if name in state else ()
        if tuple(value.shape) != (shape if by_elements else (*shape[:-1], 1)) or (
            not by_elements and any(size != shape[-1] for size in sizes)
        ):
            raise _mismatch(where, name, f"{len(entries)} tensor(s), the first of shape {list(entries[0].shape)}")
        result[name] = tuple(_pieces(value.reshape(-1), entries, offsets, sizes[0]))
    return result


def _pieces(numbers: torch.Tensor, entries: Sequence[TensorEntry], offsets: Sequence[int], size: int) -> list[Piece]:
    """Join consecutive rows of one tensor into pieces."""
    begins_tensor = torch.isin(numbers, torch.tensor(offsets))
    begins_tensor[1:] |= numbers[1:] != numbers[:-1] + 1
    begins_tensor[:1] = True
    starts = [*begins_tensor.nonzero().flatten().tolist(), len(numbers)]
    pieces = []
    for start, stop in pairwise(starts):
        row = int(numbers[start])
        index = bisect_right(offsets, row) - 1
        pieces.append(Piece(entries[index], (row - offsets[index]) * size, (stop - start) * size))
    return pieces


def _duplicate(entry: TensorEntry, target: str, first: TensorEntry) -> CheckpointError:
    return CheckpointError(
        f"{entry.path}: {entry.name}",
        found=f"a second tensor for {target}, beside {first.name}",
        expected="one tensor for each parameter",
        remedy="remove one of them",
    )


def _mismatch(where: str, name: str, found: str) -> CheckpointError:
    return CheckpointError(
        where,
        found=found,
        expected=f"the tensors from which transformers makes {name}, as config.json says",
        remedy="use the config.json that belongs to these shards",
    )
