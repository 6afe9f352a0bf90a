"""A task for a confined process: one pickled file of tensors becomes one safetensors file.

torch's restricted reader (``weights_only``) runs no code. It trusts all else: that the archive's bytes are what was written,
that no entry is compressed, that a storage is as long as the pickle says. That is checked here, before a tensor is used.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

_ZIP = b"PK\x03\x04"  # how torch.save's files begin since PyTorch 1.6; older ones are bare pickles
_PICKLE = "data.pkl"  # in the archive's one directory, beside data/KEY for each storage
# What Python's reader of archives meets damaged ones with: bad structure and checksums, unknown methods of compression,
# encryption, ends that come early, numbers out of range.
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError)
_PIECE = 1 << 20  # bytes read at a time
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
_DTYPES |= {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.int8}
_DTYPES |= {torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
_AGAIN = "get the checkpoint's files again"


# Bytes of an element, by the name of the storage's class in a pickle; what has no class of its own is stored untyped.
_ITEM_SIZES = {"DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "LongStorage": 8}
_ITEM_SIZES |= {"IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1}
_ITEM_SIZES |= {"ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "UntypedStorage": 1}


class _RefusedError(Exception):
    """The file is not converted. The arguments are those of a ``CheckpointError``."""

    def __init__(self, where: object, found: str, expected: str, remedy: str = _AGAIN) -> None:
        super().__init__(where, found, expected, remedy)
        self.refusal = {"where": str(where), "found": found, "expected": expected, "remedy": remedy}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Convert one file.

    Args:
        request: ``source`` and ``target``, paths; ``shard``, the file's name in the index; ``assigned``, the shard of each
            tensor that the index names.

    Returns:
        ``sizes``, the bytes of each tensor written; or ``refused``, the fields of a ``CheckpointError``; or ``unwritable``,
        why the target cannot be written.
    """
    source, target = Path(request["source"]), Path(request["target"])
    try:
        tensors = _read(source, request["shard"], request["assigned"])
    except _RefusedError as error:
        return {"refused": error.refusal}
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        save_file(tensors, target, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        return {"unwritable": str(error)}
    return {"sizes": {name: tensor.nbytes for name, tensor in tensors.items()}}


def _read(path: Path, shard: str, assigned: Mapping[str, str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, value in _load(path).items():
        where = f"{path}: {name[:200]}" if isinstance(name, str) else str(path)
        _check(where, name, value)
        if assigned.get(name, shard) == shard:  # else a copy; the index says which one counts
            tensors[name] = _own(value.detach(), storages)
    return tensors


def _load(path: Path) -> Mapping[Any, Any]:
    with path.open("rb") as file:
        is_archive = file.read(len(_ZIP)) == _ZIP
    if is_archive:
        _check_archive(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        if is_archive:
            _check_storages(path)
    except pickle.UnpicklingError as error:
        # The error in the context is the reader's own; torch's text around it tells how to load the file unsafely.
        raise _RefusedError(
            path,
            f"a pickle that does more than build tensors ({str(error.__context__ or error).splitlines()[0][:200]})",
            "tensors by name",
            "get the file again in case it is damaged; else ask its author for safetensors, and do not load it",
        ) from error
    except (MemoryError, _RefusedError):
        raise
    except Exception as error:  # any: damaged bytes lead torch's reader to KeyError, RuntimeError, AssertionError, ...
        text = " ".join(str(error).split())
        if "allocate memory" in text:
            raise MemoryError from error
        found = f"a damaged file ({type(error).__name__}: {text[:200]})"
        raise _RefusedError(path, found, "a file that torch.save wrote") from error
    if not isinstance(state, Mapping):
        raise _RefusedError(path, f"a {type(state).__name__}", "tensors by name")
    return state


def _check_archive(path: Path) -> None:
    """Refuse an archive with compressed, repeated or overlapping entries, or with bytes that are not their checksums'."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                    raise _RefusedError(
                        f"{path}: {entry.filename[:200]}", "a compressed entry", "stored ones, as torch writes"
                    )
            if len({entry.filename.lower() for entry in entries}) < len(entries):  # torch's reader ignores their case
                raise _RefusedError(path, "two entries of one name", "each name once")
            nbytes, size = sum(entry.file_size for entry in entries), path.stat().st_size
            if nbytes > size:
                raise _RefusedError(path, f"entries of {nbytes} bytes in a file of {size}", "entries that do not overlap")
            for entry in entries:
                with archive.open(entry) as content:
                    while content.read(_PIECE):  # at the end the checksum is compared
                        pass
    except _DAMAGED as error:
        found = f"a damaged file ({' '.join(str(error).split())[:200]})"
        raise _RefusedError(path, found, "a file that torch.save wrote, with its checksums") from error


def _check_storages(path: Path) -> None:
    """Refuse an archive in which a storage is of another size than the pickle says: torch would read what lies behind it."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        name = next(name for name in entries if name.endswith(f"/{_PICKLE}") and name.count("/") == 1)
        with archive.open(name) as content:
            inventory = _Inventory(content, encoding="utf-8", errors="surrogateescape")
            inventory.load()
    for key, nbytes in inventory.sizes:
        entry = entries.get(f"{name.removesuffix(_PICKLE)}data/{key}")
        size = 0 if entry is None else entry.file_size
        if size != nbytes:
            raise _RefusedError(f"{path}: data/{key[:200]}", f"a storage of {size} bytes", f"{nbytes}, as its tensors say")


class _Inert:
    """Stands for whatever a pickle builds, and does nothing."""

    def __new__(cls, *_: object, **__: object) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None: ...


class _Inventory(pickle.Unpickler):
    """Reads a pickle for the storages that it asks for, and calls nothing that it names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sizes: set[tuple[str, int]] = set()  # key and bytes of each storage

    def find_class(self, module: str, name: str) -> Any:
        """Give the element size in place of a storage's class, and what does nothing in place of anything else."""
        return _ITEM_SIZES.get(name, _Inert) if module in {"torch", "torch.storage"} else _Inert

    def persistent_load(self, pid: Any) -> object:
        """Note a storage."""
        _, item_size, key, _, numel = pid
        self.sizes.add((str(key), numel * item_size))
        return _Inert()


def _check(where: str, name: object, value: object) -> None:
    if not isinstance(name, str) or name == "__metadata__":  # which safetensors keeps for itself
        # Of any other type, its text could be endless: tuples that hold one tuple twice, which holds another twice, ...
        shown = f"the key {str(name)[:80]!r}" if isinstance(name, str | int | float) else f"a {type(name).__name__} as key"
        raise _RefusedError(where, shown, "the name of a tensor")
    if not isinstance(value, torch.Tensor):
        remedy = "use a checkpoint of model weights alone, without a training state around them"
        raise _RefusedError(where, f"a {type(value).__name__}", "a tensor", remedy)
    dense = value.layout is torch.strided and not value.is_nested and value.device.type == "cpu"
    if not dense or value.dtype not in _DTYPES:
        found = f"{value.dtype}, {value.layout}, on {value.device.type}"
        raise _RefusedError(where, found, "a dense tensor of real numbers, integers or booleans")
    if value.nbytes > value.untyped_storage().nbytes():  # by strides of 0; a small file could ask for any memory so
        raise _RefusedError(where, f"{value.nbytes} bytes", f"{value.untyped_storage().nbytes()}, as are stored")


def _own(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """The tensor itself if it lies alone and in order in its storage, else a copy: safetensors shares no memory."""
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
    storages.add(storage.data_ptr())
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
