"""A checkpoint's tensors, matched with the parameters and buffers of the model that its config describes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load
from transformers import PreTrainedModel

from zo2adapters.models.architecture import Architecture, parameter_names
from zo2adapters.models.conversion import parameter_pieces
from zo2core.checkpoint import Piece, TensorEntry, check_float, same_samples
from zo2core.errors import CheckpointError, UnsupportedModelError


class Matched(NamedTuple):
    """Where a model's tensors are stored in its checkpoint."""

    parameters: dict[str, tuple[Piece, ...]]  # by names of named_parameters()
    buffers: dict[str, TensorEntry]  # persistent ones

    def stored_differently(self, prefix: str) -> dict[str, tuple[Piece, ...]]:
        """The parameters that are not one tensor of the same name, with or without the base model's prefix."""
        return {
            name: pieces
            for name, pieces in self.parameters.items()
            if len(pieces) > 1
            or pieces[0] != Piece.whole(pieces[0].entry)
            or pieces[0].entry.name not in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        }


def match_tensors(
    directory: Path, entries: Mapping[str, TensorEntry], skeleton: PreTrainedModel, architecture: Architecture
) -> Matched:
    """Find each parameter's pieces and each persistent buffer."""
    pieces = parameter_pieces(entries, skeleton)
    state = skeleton.state_dict()
    unexpected = [name for name in pieces if name not in state and not _is_ignored(name, skeleton, architecture)]
    if unexpected:
        entry = pieces[sorted(unexpected)[0]][0].entry
        raise CheckpointError(
            f"{entry.path}: {entry.name}",
            found=f"{len(unexpected)} tensor(s) that the model of config.json does not have, this one first",
            expected="the parameters of the config's model",
            remedy="use the config.json that belongs to these shards, or open them with their head",
        )
    parameters: dict[str, tuple[Piece, ...]] = {}
    for name, aliases in parameter_names(skeleton).items():
        copies = [pieces[alias] for alias in aliases if alias in pieces]
        if not copies:
            raise _missing(directory, name, "every parameter of the model")
        _require_equal_ties(copies, name)
        _require_one_float(copies[0], name)
        parameters[name] = copies[0]
    known = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    buffers: dict[str, TensorEntry] = {}
    for name in state.keys() - known:
        if name not in pieces:
            raise _missing(directory, name, "every buffer that the model's checkpoints keep")
        buffers[name] = _whole(pieces[name], name)
    return Matched(parameters, dict(sorted(buffers.items())))


def require_dtype(parameters: Mapping[str, Sequence[Piece]], skeleton: PreTrainedModel, dtype: torch.dtype) -> None:
    """Refuse tensors of another dtype than the config's."""
    for name, pieces in parameters.items():
        entry = pieces[0].entry
        if entry.torch_dtype not in (dtype, skeleton.get_parameter(name).dtype):  # transformers keeps some in another dtype
            raise CheckpointError(
                f"{entry.path}: {entry.name}",
                found=f"dtype {entry.dtype}",
                expected=f"{dtype}, as config.json says",
                remedy="pass a dtype, to which tensors are converted as they are read",
            )


def load_buffers(buffers: Mapping[str, TensorEntry], skeleton: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Load a model's persistent buffers, which are few and small."""
    constants: dict[str, torch.Tensor] = {}
    for name, entry in buffers.items():
        header = {entry.name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (0, entry.nbytes)}}
        text = json.dumps(header).encode()
        value = load(len(text).to_bytes(8, "little") + text + entry.read())[entry.name]
        path, _, leaf = name.rpartition(".")
        module = skeleton.get_submodule(path)
        buffer = module._buffers[leaf]
        assert buffer is not None
        module._buffers[leaf] = value.to(buffer.dtype)
        constants[entry.name] = value
    return constants


def _missing(directory: Path, name: str, expected: str) -> CheckpointError:
    remedy = "get all shards; for a new head, load the model with transformers' class of this head, and save it"
    return CheckpointError(directory, found=f"no tensor {name}", expected=expected, remedy=remedy)


def _whole(pieces: Sequence[Piece], name: str) -> TensorEntry:
    """The tensor of a buffer."""
    entry = pieces[0].entry
    if tuple(pieces) == (Piece.whole(entry),):
        return entry
    raise UnsupportedModelError(
        f"{entry.path}: {entry.name}",
        found=f"a part of the buffer {name}",
        expected="buffers that are each a tensor of their own",
        remedy="save the model by transformers with save_original_format=False, and use that",
    )


def _require_one_float(pieces: Sequence[Piece], name: str) -> None:
    """Refuse a parameter that is not of one floating-point dtype."""
    first = pieces[0].entry
    for entry, _, _ in pieces:
        if check_float(entry) != first.torch_dtype:
            raise CheckpointError(
                f"{entry.path}: {entry.name}",
                found=f"dtype {entry.dtype}",
                expected=f"{first.dtype}, as in {first.name}: both are in {name}",
                remedy="convert the checkpoint to one dtype",
            )


def _is_ignored(name: str, skeleton: PreTrainedModel, architecture: Architecture) -> bool:
    """Whether a tensor is obsolete, as transformers or a declaration says."""
    patterns = [*(skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    return name.endswith(architecture.ignored or ("\0",)) or any(re.search(pattern, name) for pattern in patterns)


def _require_equal_ties(copies: Sequence[Sequence[Piece]], name: str) -> None:
    """Refuse a checkpoint whose copies of a tied weight differ: it was trained untied."""
    for copy in copies[1:]:
        for (first, *extent), (other, *other_extent) in zip_longest(copies[0], copy, fillvalue=(None, 0, 0)):
            if first is None or other is None or extent != other_extent or not same_samples(first, other):
                raise CheckpointError(
                    f"{copy[0].entry.path}: {copy[0].entry.name}",
                    found=f"other values than in {copies[0][0].entry.name}",
                    expected=f"equal values: config.json ties both to {name}",
                    remedy="set tie_word_embeddings to false in config.json",
                )
