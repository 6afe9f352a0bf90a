"""Checkpoints written as a stream of tensors, one shard after the other.

Headers are known beforehand, and tensors are written one at a time. A directory appears whole or
not at all: everything is written to a private directory beside it, which is renamed at the end.
Only new files are opened for writing: a planted link is not followed. A private directory is locked
as long as its process runs. What a process left that was killed is removed by the next one that
writes the same directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

import torch

from zo2core.checkpoint.shards import (
    _STAGING,
    DTYPE_NAMES,
    INDEX_FILE,
    MAX_SHARD,
    SINGLE_FILE,
    SafetensorsReader,
    TensorEntry,
    header_bytes,
)
from zo2core.checkpoint.unused import refuse_used
from zo2core.encodings.decoding import decoded
from zo2core.errors import CheckpointError, OutputError, ZO2Warning, system_errors_as
from zo2core.io.direct_file import byte_view
from zo2core.io.durable import (
    DisturbedFileError,
    LockedFileError,
    close_locked,
    create_file,
    open_locked,
    open_regular,
    sync_path,
)
from zo2core.types import CopiedTensor, ParameterSpec, SavedForm, SavedPart, shown_bytes

_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}  # of file systems


@runtime_checkable
class CustomExport(Protocol):
    """A model with an export format of its own, such as an adapter, instead of a checkpoint of all
    parameters.
    """

    @property
    def exported_parameters(self) -> Collection[str]:
        """Names of the parameters that ``write`` needs."""

    def write(
        self,
        directory: Path,
        tensors: Iterable[tuple[str, torch.Tensor]],
        files: Mapping[str, Path | bytes],
    ) -> None:
        """Write the export; its directory appears whole or not at all."""


def require_unused(directory: Path) -> None:
    """Refuse an output path that exists, unless it is an empty directory; remove what killed
    processes have left of it.
    """
    remove_leftovers(directory)
    refuse_used(directory)


def write_checkpoint(
    directory: Path,
    parameters: Sequence[ParameterSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    companions: Mapping[str, Path | bytes],
    *,
    dtype: torch.dtype | None = None,
    form: SavedForm | None = None,
    max_shard: int = MAX_SHARD,
    origin: Callable[[str], str] = lambda name: "weights",
) -> None:
    """Write a model directory that ``from_pretrained`` loads. One tensor at a time is in memory.

    A number that is not finite is refused, also one that overflows in the written dtype. ``origin``
    names the file that a parameter comes from, for that error.
    """
    form = form or SavedForm()
    written = {
        spec.name: spec if dtype is None else replace(spec, dtype=dtype) for spec in parameters
    }
    parts = {spec.name: form.parts_of(spec) for spec in parameters}
    saved = {
        part.tensor: replace(written[name], name=part.tensor, shape=part.shape)
        for name in parts
        for part in parts[name]
    }
    header = [*saved.values(), *_further_tensors(form)]
    with new_checkpoint(directory, header, companions, max_shard) as locations:
        missing = set(written)
        for name, tensor in tensors:
            missing.remove(name)
            _write_parameter(written[name], parts[name], tensor, locations, origin)
        assert not missing, missing  # the file would have holes
        for name, tensor in form.constants.items():  # masks among them may have infinities
            file, start = locations[name]
            file.seek(start)
            file.write(byte_view(tensor.contiguous().view(-1)))
        for name, copied in form.copied.items():
            file, start = locations[name]
            file.seek(start)
            _copy(name, copied, file)


def _further_tensors(form: SavedForm) -> list[ParameterSpec]:
    """The tensors of an export that are no parameters."""
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in form.constants.items()}
    shapes |= {name: (copied.shape, copied.dtype) for name, copied in form.copied.items()}
    return [
        ParameterSpec(name, shape, dtype, index=-1, decays=False)
        for name, (shape, dtype) in shapes.items()
    ]


def _write_parameter(
    spec: ParameterSpec,
    parts: Sequence[SavedPart],
    tensor: torch.Tensor,
    locations: Mapping[str, tuple[IO[bytes], int]],
    origin: Callable[[str], str],
) -> None:
    """Write a parameter's elements to the parts of tensors that store them."""
    assert sum(part.numel for part in parts) == tensor.numel() == spec.numel
    elements = torch.split(tensor.view(-1), [part.numel for part in parts])
    for part, stored in zip(parts, elements, strict=True):
        file, start = locations[part.tensor]
        file.seek(start + part.start * spec.dtype.itemsize)
        for exact, rounded in _converted(stored, spec.dtype):
            if not is_finite(rounded):
                raise not_finite(f"{origin(spec.name)}: {spec.name}", exact, rounded)
            file.write(byte_view(rounded))  # the view does not keep the memory alive


def _copy(name: str, copied: CopiedTensor, file: IO[bytes]) -> None:
    """Write a tensor of another file, decoded."""
    with contextlib.closing(SafetensorsReader({})) as reader:
        entries = [TensorEntry(name, "U8", (part.nbytes,), *part) for part in copied.parts]
        if copied.encoding is None:
            [entry] = entries
            for begin in range(0, entry.nbytes, _STAGING):
                chunk = bytearray(min(_STAGING, entry.nbytes - begin))
                reader.read_bytes(entry, begin, memoryview(chunk))
                file.write(chunk)
            return
        stored = torch.empty(sum(entry.nbytes for entry in entries), dtype=torch.uint8)
        parts = torch.split(stored, [entry.nbytes for entry in entries])
        for entry, part in zip(entries, parts, strict=True):
            reader.read_bytes(entry, 0, byte_view(part))
    spec = ParameterSpec(
        name, copied.shape, copied.dtype, index=-1, decays=False, encoding=copied.encoding
    )
    weights = decoded(spec, stored)  # named: the view does not keep the memory alive
    file.write(byte_view(weights))


def _converted(
    elements: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield elements and what is written of them, in parts if they are converted."""
    step = elements.numel() if elements.dtype is dtype else _STAGING
    for begin in range(0, elements.numel(), max(step, 1)):
        part = elements[begin : begin + step]
        yield part, part.to(dtype)


def is_finite(values: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity, found without a copy of the tensor."""
    if not values.is_floating_point() or not values.numel():
        return True
    known = values if values.dtype.itemsize > 1 else values.float()  # of 8 bits
    smallest, largest = torch.aminmax(known)
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())


def not_finite(
    where: str, values: torch.Tensor, written: torch.Tensor, dtype: str | None = None
) -> CheckpointError:
    """The error for numbers of which what would be written, in a dtype, is not finite."""
    index = int((~written.float().isfinite()).view(-1).nonzero()[0])
    value = values.reshape(-1)[index].item()
    dtype = dtype or str(written.dtype).removeprefix("torch.")
    found = f"{value:g}"
    expected = "finite weights"
    remedy = "get the file again, or use another adapter or an earlier step of the run"
    if math.isfinite(value):
        found = f"{value:g}, which {dtype} cannot hold"
        expected = f"numbers in {dtype}'s range"
        remedy = "choose a dtype with a larger range"
    return CheckpointError(where, found, expected, remedy)


@contextlib.contextmanager
def new_checkpoint(
    directory: Path,
    tensors: Sequence[ParameterSpec],
    companions: Mapping[str, Path | bytes],
    max_shard: int,
) -> Iterator[dict[str, tuple[IO[bytes], int]]]:
    """Make a directory with headers and companions, and yield the file and offset of each tensor's
    data by name.
    """
    shards = _divide_into_shards(tensors, max_shard)
    names = shard_names(len(shards))
    locations: dict[str, tuple[IO[bytes], int]] = {}
    with new_directory(directory) as partial:
        write_companions(partial, companions)
        with contextlib.ExitStack() as opened:
            for name, specs in zip(names, shards, strict=True):
                file = opened.enter_context(create_file(partial / name))
                start = _write_header(file, specs)
                for spec in specs:
                    locations[spec.name] = (file, start)
                    start += spec.nbytes
            yield locations
        weight_map = {
            spec.name: name for name, specs in zip(names, shards, strict=True) for spec in specs
        }
        write_index(partial, weight_map, total_size=sum(spec.nbytes for spec in tensors))


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Make a directory that appears whole and durable, or not at all."""
    require_unused(directory)
    remedy = "free space or choose another directory"
    with system_errors_as(
        OutputError, directory, expected="a directory that can be written", remedy=remedy
    ):
        directory.parent.mkdir(parents=True, exist_ok=True)
        enclosure, lock = _make_enclosure(directory)
        try:
            # It gets the permissions of any new directory.
            partial = enclosure / directory.name
            partial.mkdir()
            yield partial
            for path in [*partial.iterdir(), partial]:
                sync_path(path)
            try:
                partial.rename(directory)
            except OSError as error:
                if directory.is_dir() and not any(directory.iterdir()):
                    raise  # an empty directory is not the reason
                if os.path.lexists(directory):
                    found = "something at this path that another process put there in the meantime"
                    expected = "a path that stays free until the directory is written"
                    remedy = "use what is there now, or choose another output directory"
                    raise OutputError(directory, found, expected, remedy) from error
                raise
            sync_path(directory.parent)
        finally:
            shutil.rmtree(enclosure, ignore_errors=True)
            if lock is not None:
                close_locked(lock)


def _make_enclosure(directory: Path) -> tuple[Path, int | None]:
    """Make a private directory beside an output directory, and lock it.

    It has a random name, so that other users can plant nothing in it.

    Returns:
        The path, and the lock's descriptor; None where the file system has no locks, so that nobody
        takes the directory for a leftover.
    """
    while True:
        enclosure = Path(tempfile.mkdtemp(prefix=_prefix(directory), dir=directory.parent))
        try:
            return enclosure, open_locked(_lock_path(enclosure, directory), os.O_CREAT | os.O_EXCL)
        except (FileNotFoundError, LockedFileError, DisturbedFileError):
            continue  # another process takes it for a leftover, since it was not locked yet
        except OSError as error:
            if error.errno in _WITHOUT_LOCKS:
                return enclosure, None
            shutil.rmtree(enclosure, ignore_errors=True)
            raise


def remove_leftovers(directory: Path) -> None:
    """Remove the private directories that killed processes have left beside an output directory.

    A process that still writes holds the lock of its own. Directories of other users or without a
    lock are left alone, and links, which neither ``rmdir`` nor ``rmtree`` follows.
    """
    with contextlib.suppress(OSError):
        for path in sorted(directory.parent.iterdir()):
            if path.name.startswith(_prefix(directory)):
                with contextlib.suppress(OSError):
                    _remove_leftover(path, directory)


def _remove_leftover(enclosure: Path, directory: Path) -> None:
    if enclosure.lstat().st_uid != os.geteuid():
        return
    if not any(enclosure.iterdir()):
        enclosure.rmdir()  # killed before it was locked
        return
    lock = open_locked(_lock_path(enclosure, directory))  # raises if a process holds it
    try:
        files = [path for path in (enclosure / directory.name).rglob("*") if path.is_file()]
        nbytes = sum(path.stat().st_size for path in files)
        shutil.rmtree(enclosure)
    finally:
        close_locked(lock)
    if files:
        warnings.warn(
            f"{enclosure} is removed: a process that was killed while it wrote {directory} had "
            f"left {shown_bytes(nbytes)} in it",
            ZO2Warning,
            stacklevel=4,
        )


def _prefix(directory: Path) -> str:
    return f".{directory.name}.partial-"


def _lock_path(enclosure: Path, directory: Path) -> Path:
    return enclosure / f"{directory.name}.lock"


def shard_names(count: int) -> list[str]:
    """File names of a checkpoint with ``count`` shards, as the hub's tools expect them."""
    return (
        [SINGLE_FILE]
        if count == 1
        else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )


def write_index(directory: Path, weight_map: Mapping[str, str], *, total_size: int) -> None:
    """Write the index of a checkpoint if it has several shards."""
    if not (directory / SINGLE_FILE).exists():
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
        write_companions(
            directory, {INDEX_FILE: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}
        )


def write_companions(directory: Path, companions: Mapping[str, Path | bytes]) -> None:
    """Write or copy the small files beside the weights."""
    for name, content in companions.items():
        with create_file(directory / name) as file:
            if isinstance(content, bytes):
                file.write(content)
                continue
            remedy = "restore the base model's files"
            with system_errors_as(
                CheckpointError, content, expected="a readable file", remedy=remedy
            ):
                source = open_regular(content)
            with source:
                shutil.copyfileobj(source, file, _STAGING)


def _divide_into_shards(
    parameters: Sequence[ParameterSpec], max_shard: int
) -> list[list[ParameterSpec]]:
    shards: list[list[ParameterSpec]] = [[]]
    size = 0
    for spec in parameters:
        if shards[-1] and size + spec.nbytes > max_shard:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _write_header(file: IO[bytes], parameters: Sequence[ParameterSpec]) -> int:
    """Write a shard's header; return the offset of its data."""
    tensors = ((spec.name, DTYPE_NAMES[spec.dtype], spec.shape, spec.nbytes) for spec in parameters)
    return file.write(header_bytes({"format": "pt"}, tensors))
