"""A task for a limited process: convert one pickled file of tensors to safetensors.

``torch.load(weights_only=True)`` runs no code. It does not check the archive's checksums, nor that
storages have the sizes that the pickle gives; both are checked here before a tensor is used.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

# first bytes of torch.save's files since PyTorch 1.6; older ones are bare pickles
_ZIP = b"PK\x03\x04"
# names of entries that are storages, in the archive's one directory
_STORAGE = re.compile(r"[^/]*/data/")
# Errors of zipfile for damaged archives: bad structure and checksums, unknown compression,
# encryption, truncation, ...
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError)
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
_DTYPES |= {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.int8}
_DTYPES |= {torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
_REMEDY = "get the checkpoint's files again"


class _RefusedError(Exception):
    """The file is not converted. The arguments are those of a ``CheckpointError``."""

    def __init__(self, where: object, found: str, expected: str, remedy: str = _REMEDY) -> None:
        super().__init__(where, found, expected, remedy)
        self.refusal = {"where": str(where), "found": found, "expected": expected, "remedy": remedy}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Convert one file."""
    source = Path(request["source"])
    target = Path(request["target"])
    try:
        tensors = _read(source)
    except _RefusedError as error:
        return {"refused": error.refusal}
    try:
        os.close(
            os.open(
                target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
            )
        )
        save_file(tensors, target, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        return {"unwritable": str(error)}
    return {"sizes": {name: tensor.nbytes for name, tensor in tensors.items()}}


def _read(path: Path) -> dict[str, torch.Tensor]:
    stored = _stored_sizes(path)
    state = _load(path, mmap=stored is not None)  # older files cannot be mapped
    for name, value in state.items():
        _check(f"{path}: {name[:200]}" if isinstance(name, str) else str(path), name, value)
    if stored is not None:
        _check_storages(path, stored, state.values())
    for name, value in state.items():
        _check_numbers(f"{path}: {name[:200]}", value)
    storages: set[int] = set()
    return {name: _unshared(value.detach(), storages) for name, value in state.items()}


def _load(path: Path, *, mmap: bool) -> Mapping[Any, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        # The error in the context is the reader's own; torch's text around it tells how to load the
        # file unsafely.
        raise _RefusedError(
            path,
            "a pickle that does more than build tensors "
            f"({str(error.__context__ or error).splitlines()[0][:200]})",
            "tensors by name",
            "get the file again in case it is damaged; else ask its author for safetensors, and "
            "do not load it",
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # any: damaged bytes lead torch's reader to KeyError, RuntimeError, AssertionError, ...
        text = " ".join(str(error).split())
        if "allocate memory" in text:
            raise MemoryError from error
        found = f"a damaged file ({type(error).__name__}: {text[:200]})"
        raise _RefusedError(path, found, "a file that torch.save wrote") from error
    if not isinstance(state, Mapping):
        raise _RefusedError(path, f"a {type(state).__name__}", "tensors by name")
    return state


def _stored_sizes(path: Path) -> list[int] | None:
    """The sizes of an archive's storages; None: the file is a bare pickle.

    Archives with compressed entries or wrong checksums are refused, which ``torch.load(mmap=True)``
    does not check.
    """
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return None
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise _RefusedError(
                    path, "compressed entries", "uncompressed entries, as torch writes them"
                )
            damaged = archive.testzip()
    except _DAMAGED as error:
        found = f"a damaged file ({' '.join(str(error).split())[:200]})"
        raise _RefusedError(path, found, "a file that torch.save wrote") from error
    if damaged is not None:
        raise _RefusedError(
            f"{path}: {damaged[:200]}", "a damaged file", "bytes with the archive's checksum"
        )
    return sorted(entry.file_size for entry in entries if _STORAGE.match(entry.filename))


def _check_storages(path: Path, stored: list[int], tensors: Iterable[torch.Tensor]) -> None:
    """Refuse an archive whose storages have other sizes than the pickle says: torch would read
    beyond them.
    """
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    named = sorted(storages.values())
    if [size for size in stored if size] != [size for size in named if size]:
        found = f"storages of other sizes ({sum(stored)} bytes in all)"
        raise _RefusedError(path, found, f"the sizes of its tensors ({sum(named)} bytes in all)")


def _check(where: str, name: object, value: object) -> None:
    if not isinstance(name, str) or name == "__metadata__":  # reserved by safetensors
        # The text of other types could be endless: a tuple that holds a tuple twice, which holds
        # another twice, ...
        found = (
            f"the key {str(name)[:80]!r}"
            if isinstance(name, str | int | float)
            else f"a {type(name).__name__} as key"
        )
        raise _RefusedError(where, found, "the name of a tensor")
    if not isinstance(value, torch.Tensor):
        remedy = "use a checkpoint of model weights alone, without a training state around them"
        raise _RefusedError(where, f"a {type(value).__name__}", "a tensor", remedy)
    dense = value.layout is torch.strided and not value.is_nested and value.device.type == "cpu"
    if not dense or value.dtype not in _DTYPES:
        found = f"{value.dtype}, {value.layout}, on {value.device.type}"
        raise _RefusedError(where, found, "a dense tensor of real numbers, integers or booleans")
    nbytes = value.untyped_storage().nbytes()
    if value.nbytes > nbytes:  # by strides of 0, with which a small file could take any memory
        raise _RefusedError(
            where, f"{value.nbytes} bytes", f"at most {nbytes}, the size of its storage"
        )


def _check_numbers(where: str, value: torch.Tensor) -> None:
    """Refuse NaN and infinity, once it is known that the tensor lies in its storage."""
    if not value.is_floating_point() or not value.numel():
        return
    bounds = torch.aminmax(value if value.dtype.itemsize > 1 else value.float())
    for bound in bounds:
        if not math.isfinite(bound.item()):
            raise _RefusedError(where, f"{bound.item():g} among its numbers", "finite weights")


def _unshared(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """The tensor itself if it is contiguous and alone in its storage, else a copy, since
    safetensors shares no memory.
    """
    storage = tensor.untyped_storage()
    whole = (
        tensor.is_contiguous()
        and storage.nbytes() == tensor.nbytes
        and storage.data_ptr() not in storages
    )
    storages.add(storage.data_ptr())
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
