"""Which tensors of a checkpoint make up a parameter, where transformers renames and joins them as it loads a model.

Its own rules are followed, on numbers of rows in place of rows: what comes out says where each row of a parameter lies. So a
parameter is read from its places straight into its memory, and written back to them. Rules that compute with values, or move
them within a row, are refused.
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

from zo2core import CheckpointError, UnsupportedModelError
from zo2core.checkpoint import Piece, TensorEntry

_MOVING = {  # operations that move whole rows, and compute nothing; the oldest transformers has no Split
    getattr(core_model_loading, name, None)
    for name in ("MergeModulelist", "SplitModulelist", "Concatenate", "Chunk", "Split", "Interleave", "Transpose")
}
_MOST_NUMBERED = 1 << 26  # rows of one conversion; int64 numbers of more would take more than half a gigabyte


def parameter_pieces(entries: Mapping[str, TensorEntry], model: PreTrainedModel) -> dict[str, tuple[Piece, ...]]:
    """Follow transformers' rules from a checkpoint's tensors to the names of the model.

    Args:
        entries: The checkpoint's tensors by their names.
        model: Skeleton of the model; its tensors are on the meta device or not.

    Returns:
        Name in the model's ``state_dict`` to the pieces that make up the tensor, in its order. Names that the model does not
        have come along with the whole tensor.

    Raises:
        CheckpointError: if two tensors are for one name, do not fit together, or have another shape than the model's.
        UnsupportedModelError: for a rule that cannot be followed so.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, own = model.base_model_prefix, model.state_dict()
    pieces: dict[str, tuple[Piece, ...]] = {}
    joined: dict[str, list[tuple[str, TensorEntry]]] = {}  # target to pattern and tensor
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = rename_source_key(name, [], [], prefix, own)
        entry = entries[name]
        if pattern is not None and target in own:
            joined.setdefault(target, []).append((pattern, entry))
            continue
        if target in own and entry.shape != tuple(own[target].shape):
            raise CheckpointError(
                f"{entry.path}: {target}",
                found=f"shape {list(entry.shape)}",
                expected=f"{list(own[target].shape)}, as config.json says",
                remedy="use the config.json that belongs to these shards",
            )
        if target in pieces:
            raise _second(entry, target, pieces[target][0].entry)
        pieces[target] = (Piece.whole(entry),)
    for target, sources in joined.items():
        for name, made in _converted(model, own, target, sources, deepcopy(by_pattern[sources[0][0]])).items():
            if name in pieces:
                raise _second(made[0].entry, name, pieces[name][0].entry)
            pieces[name] = made
    return pieces


def _converted(
    model: PreTrainedModel,
    own: Mapping[str, torch.Tensor],
    target: str,
    sources: Sequence[tuple[str, TensorEntry]],
    rule: WeightConverter,
) -> dict[str, tuple[Piece, ...]]:
    """Run one rule on row numbers; the pieces of every tensor of the model that comes out."""
    entries = [entry for _, entry in sources]
    where = f"{entries[0].path}: {entries[0].name}"
    for operation in rule.operations:
        if type(operation) not in _MOVING:
            raise UnsupportedModelError(
                where,
                found=f"{operation!r}, by which transformers makes {target}",
                expected="conversions that move whole rows",
                remedy="load the model with transformers, save it with save_original_format=False, and use that",
            )
    by_elements = any(len(entry.shape) < 2 for entry in entries)  # a vector is no row
    sizes = [1 if by_elements else entry.shape[-1] for entry in entries]
    counts = [math.prod(entry.shape) // max(size, 1) for entry, size in zip(entries, sizes, strict=True)]
    firsts = [0, *accumulate(counts)]
    if firsts[-1] > _MOST_NUMBERED:
        raise UnsupportedModelError(
            where,
            found=f"{firsts[-1]} rows for {target}",
            expected=f"at most {_MOST_NUMBERED} in one conversion",
            remedy="this architecture needs an adapter of its own",
        )
    for (pattern, entry), first, count in zip(sources, firsts, counts, strict=False):
        shape = entry.shape if by_elements else (*entry.shape[:-1], 1)
        rule.add_tensor(target, entry.name, pattern, torch.arange(first, first + count).view(shape))  # type: ignore[arg-type]
    try:
        converted: dict[str, Any] = rule.convert(target, model=model, config=model.config)
    except Exception as error:  # any: tensors that do not fit together surface inside the operations
        raise _misfit(where, target, f"tensors that do not fit together ({type(error).__name__}: {error})") from error
    tensors = {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
    numbers = torch.cat([value.reshape(-1) for value in tensors.values()])
    if not torch.equal(numbers.sort().values, torch.arange(firsts[-1])):
        raise _misfit(where, target, "rows of which some are left over")
    result = {}
    for name, value in tensors.items():
        shape = tuple(own[name].shape) if name in own else ()
        if tuple(value.shape) != (shape if by_elements else (*shape[:-1], 1)) or (
            not by_elements and any(size != shape[-1] for size in sizes)
        ):
            raise _misfit(where, name, f"{len(entries)} tensor(s), the first of shape {list(entries[0].shape)}")
        result[name] = tuple(_pieces(value.reshape(-1), entries, firsts, sizes[0]))
    return result


def _pieces(numbers: torch.Tensor, entries: Sequence[TensorEntry], firsts: Sequence[int], size: int) -> list[Piece]:
    """Join consecutive rows of one tensor into pieces."""
    begins_tensor = torch.isin(numbers, torch.tensor(firsts))
    begins_tensor[1:] |= numbers[1:] != numbers[:-1] + 1
    begins_tensor[:1] = True
    starts = [*begins_tensor.nonzero().flatten().tolist(), len(numbers)]
    pieces = []
    for start, stop in pairwise(starts):
        row = int(numbers[start])
        index = bisect_right(firsts, row) - 1
        pieces.append(Piece(entries[index], (row - firsts[index]) * size, (stop - start) * size))
    return pieces


def _second(entry: TensorEntry, target: str, first: TensorEntry) -> CheckpointError:
    return CheckpointError(
        f"{entry.path}: {entry.name}",
        found=f"a second tensor for {target}, beside {first.name}",
        expected="one tensor for each parameter",
        remedy="remove one of them",
    )


def _misfit(where: str, name: str, found: str) -> CheckpointError:
    return CheckpointError(
        where,
        found=found,
        expected=f"what transformers makes {name} of, as config.json says",
        remedy="use the config.json that belongs to these shards",
    )
