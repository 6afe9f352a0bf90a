"""Turn pickled PyTorch checkpoints into safetensors, one shard at a time and without running what a pickle may hold.

A pickle is a program. torch's restricted reader (``weights_only``) builds tensors and plain containers and refuses every
other instruction, so converting a file is as safe as that reader; a file it refuses is not converted.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from zo2adapters.models.checkpoint import companion_files
from zo2core import CheckpointError, new_directory, reason, require_unused, shard_names, write_index

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"

_ZIP = b"PK\x03\x04"  # how torch.save's files begin since PyTorch 1.6; older ones are bare pickles
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
_DTYPES |= {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.int8}
_DTYPES |= {torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}


def convert(source: Path, destination: Path, *, report: Callable[[str], None] | None = None) -> Path:
    """Write a model directory with pickled weights anew, with safetensors. Memory: one shard.

    Args:
        source: Holds ``pytorch_model.bin``, or shards and ``pytorch_model.bin.index.json``. It is only read.
        destination: Directory to write; must not exist, or be empty. It appears whole or not at all.
        report: Called with a line about each shard before it is read.

    Returns:
        ``destination``.

    Raises:
        CheckpointError: if a file is missing, damaged, outside of ``source`` or holds anything but named tensors.
        OutputError: if the destination is in use or cannot be written.
    """
    require_unused(destination)
    expected = _find_shards(source)
    names = shard_names(len(expected))
    assigned = {name: shard for shard, tensors in expected.items() for name in tensors}
    weight_map: dict[str, str] = {}
    total_size = 0
    with new_directory(destination) as partial:
        _copy_companions(source, partial)
        for number, (shard, target) in enumerate(zip(expected, names, strict=True), start=1):
            if report is not None:
                report(f"{shard} ({number} of {len(expected)})")
            sizes = _convert_shard(source / shard, partial / target, shard, assigned)
            for name in sizes:
                if name in weight_map:
                    raise _malformed(f"{source / shard}: {name}", "a tensor of another shard", "each tensor once")
                weight_map[name] = target
            for name in expected[shard]:
                if name not in sizes:
                    raise _malformed(source / shard, f"no tensor {name}", f"the tensor, as {INDEX_FILE} says")
            total_size += sum(sizes.values())
        if not weight_map:
            raise _malformed(source, "no tensors", "a model's weights")
        write_index(partial, weight_map, total_size=total_size)
    return destination


def _find_shards(directory: Path) -> dict[str, list[str]]:
    """Each shard's file name, to the tensors that the index expects there; a single file has no index."""
    index_path = directory / INDEX_FILE
    if index_path.exists():
        return _read_index(index_path)
    if (directory / SINGLE_FILE).exists():
        return {SINGLE_FILE: []}
    if any(directory.glob("*.safetensors")):
        raise CheckpointError(
            directory,
            found="safetensors weights only",
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            remedy="use this directory as it is; there is nothing to convert",
        )
    raise CheckpointError(
        directory,
        found="no pickled weights",
        expected=f"{SINGLE_FILE} or {INDEX_FILE}",
        remedy="name a directory that holds a model in the Hugging Face layout",
    )


def _read_index(path: Path) -> dict[str, list[str]]:
    try:
        pairs = list(json.loads(path.read_bytes())["weight_map"].items())
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise _malformed(path, f"no usable index ({error})", "a JSON object with a weight_map") from error
    shards: dict[str, list[str]] = {}
    for name, shard in sorted(pairs, key=str):
        # Printable: neither NUL nor half a surrogate pair, with which no file can be opened.
        plain = isinstance(shard, str) and shard.isprintable() and shard == os.path.basename(shard)
        if not plain or not shard.endswith(".bin"):
            raise CheckpointError(
                f"{path}: {name}",
                found=f"shard {str(shard)[:200]!r}",
                expected="the name of a .bin file in the index's own directory",
                remedy="do not use this checkpoint unless you know why its index points elsewhere",
            )
        shards.setdefault(shard, []).append(name)
    if not shards:
        raise _malformed(path, "an empty weight_map", "the model's tensors")
    return dict(sorted(shards.items()))


def _convert_shard(source: Path, target: Path, shard: str, assigned: Mapping[str, str]) -> dict[str, int]:
    """Convert one file; what it loads is gone on return. Returns the bytes of each tensor written."""
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, value in _load(source).items():
        _check(f"{source}: {str(name)[:200]}", name, value)
        if assigned.get(name, shard) == shard:  # else a copy; the index says which one counts
            tensors[name] = _own(value.detach(), storages)
    try:
        save_file(tensors, target, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error  # the new directory reports it, as it does every write that fails
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _load(path: Path) -> Mapping[Any, Any]:
    try:
        with path.open("rb") as file:
            mappable = file.read(len(_ZIP)) == _ZIP
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except pickle.UnpicklingError as error:
        # The error in the context is the reader's own; torch's text around it tells how to load the file unsafely.
        raise CheckpointError(
            path,
            found=f"a pickle that does more than build tensors ({str(error.__context__ or error).splitlines()[0][:200]})",
            expected="tensors by name",
            remedy="get the file again in case it is damaged; else ask its author for safetensors, and do not load it",
        ) from error
    # torch's reader meets damaged bytes with whatever they lead to: KeyError, RuntimeError, AssertionError, ...
    except Exception as error:
        found = f"a damaged file ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise _malformed(path, found, "a file that torch.save wrote") from error
    if not isinstance(state, Mapping):
        raise _malformed(path, f"a {type(state).__name__}", "tensors by name")
    return state


def _check(where: str, name: object, value: object) -> None:
    if not isinstance(name, str) or name == "__metadata__":  # which safetensors keeps for itself
        raise _malformed(where, f"the key {str(name)[:80]!r}", "the name of a tensor")
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            where,
            found=f"a {type(value).__name__}",
            expected="a tensor",
            remedy="use a checkpoint of model weights alone, without a training state around them",
        )
    dense = value.layout is torch.strided and not value.is_nested and value.device.type == "cpu"
    if not dense or value.dtype not in _DTYPES:
        found = f"{value.dtype}, {value.layout}, on {value.device.type}"
        raise _malformed(where, found, "a dense tensor of real numbers, integers or booleans")
    if value.nbytes > value.untyped_storage().nbytes():  # by strides of 0; a small file could ask for any memory so
        raise _malformed(where, f"{value.nbytes} bytes", f"{value.untyped_storage().nbytes()}, as are stored")


def _own(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """The tensor itself if it lies alone and in order in its storage, else a copy: safetensors shares no memory."""
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
    storages.add(storage.data_ptr())
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _copy_companions(source: Path, destination: Path) -> None:
    for path in companion_files(source):
        shutil.copyfile(path, destination / path.name)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    found = reason(error)
    return CheckpointError(path, found=found, expected="a readable file", remedy="get the checkpoint's files again")


def _malformed(where: object, found: str, expected: str) -> CheckpointError:
    return CheckpointError(where, found=found, expected=expected, remedy="get the checkpoint's files again")
