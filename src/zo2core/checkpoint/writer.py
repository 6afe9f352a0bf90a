"""Write safetensors checkpoints as a stream: headers are known beforehand, tensors come one at a time.

A directory appears whole or not at all: everything is written beside it, into a directory that other users cannot enter, and
renamed at the end. Files are created and never opened where something stands: a planted link is not followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

import torch

from zo2core.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from zo2core.errors import CheckpointError, OutputError, reason
from zo2core.io.direct_file import byte_view
from zo2core.io.durable import create_file, open_regular, sync_path
from zo2core.types import ParameterSpec, SavedForm

MAX_SHARD = 5_000_000_000  # bytes; what the hub's tools expect

_COPIED = 1 << 20  # bytes, or elements, at a time
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}  # of constants
_NAMES |= {torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}  # of encoded matrices


@runtime_checkable
class WrittenOtherwise(Protocol):
    """A model that is written in files of its own, and not as a checkpoint of all its parameters."""

    @property
    def written(self) -> Collection[str]:
        """The parameters that ``write`` needs."""

    def write(self, directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], files: Mapping[str, Path | bytes]) -> None:
        """Write a directory, which must not exist or be empty; it appears whole or not at all.

        Args:
            directory: To write.
            tensors: Names and values of those in ``written``, and others; each is a view until the next is asked for.
            files: Further files of the directory: name to content, or to the file to copy.

        Raises:
            OutputError: if it cannot be written.
        """


def require_unused(directory: Path) -> None:
    """Refuse an output directory that holds something, or a path that is no directory.

    Raises:
        OutputError: naming the directory.
    """
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        raise OutputError(
            directory,
            found="something at this path",
            expected="a path that does not exist yet, or an empty directory",
            remedy="choose another output directory, or remove this one",
        )


def write_checkpoint(
    directory: Path,
    parameters: Sequence[ParameterSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    companions: Mapping[str, Path | bytes],
    *,
    dtype: torch.dtype | None = None,
    form: SavedForm | None = None,
    max_shard: int = MAX_SHARD,
) -> None:
    """Write a model directory that ``from_pretrained`` loads. Memory: one tensor at a time, the caller's own.

    Args:
        directory: Must not exist, or be empty.
        parameters: In the order in which ``tensors`` yields them.
        tensors: Name and CPU tensor, contiguous, of the parameter's dtype and size.
        companions: Other files: name to content, or to the file to copy.
        dtype: To which tensors are rounded as they are written; None: they are written as they are.
        form: In which tensors the checkpoint keeps the parameters, which together fill them, and what else it keeps; None:
            each is a tensor of its own, and there is nothing else.
        max_shard: Bytes of data after which a new shard begins; a larger tensor gets a shard of its own.

    Raises:
        OutputError: if the directory is in use or cannot be written. What was begun is removed.
    """
    form = form or SavedForm()
    written = {spec.name: spec if dtype is None else replace(spec, dtype=dtype) for spec in parameters}
    runs = {spec.name: form.parts_of(spec) for spec in parameters}
    saved = {
        run.tensor: replace(written[name], name=run.tensor, shape=run.shape) for name, some in runs.items() for run in some
    }
    others = [_saved(name, tensor) for name, tensor in form.constants.items()]
    with _laid_out(directory, [*saved.values(), *others], companions, max_shard) as places:
        missing = set(written)
        for name, tensor in tensors:
            missing.remove(name)
            spec, done = written[name], 0
            assert sum(run.numel for run in runs[name]) == tensor.numel() == spec.numel
            for run in runs[name]:
                file, begin = places[run.tensor]
                file.seek(begin + run.start * spec.dtype.itemsize)
                _write(file, tensor.view(-1)[done : done + run.numel], spec.dtype)
                done += run.numel
        assert not missing, missing  # in their place would be holes
        for name, tensor in form.constants.items():
            file, begin = places[name]
            file.seek(begin)
            _write(file, tensor.contiguous().view(-1), tensor.dtype)


def _saved(name: str, tensor: torch.Tensor) -> ParameterSpec:
    return ParameterSpec(name, tuple(tensor.shape), tensor.dtype, index=-1, decays=False)


def _write(file: IO[bytes], elements: torch.Tensor, dtype: torch.dtype) -> None:
    step = elements.numel() if elements.dtype is dtype else _COPIED
    for start in range(0, elements.numel(), max(step, 1)):
        part = elements[start : start + step].to(dtype)
        file.write(byte_view(part))  # a view of its memory, which it does not keep alive


def lay_out_checkpoint(
    directory: Path,
    parameters: Sequence[ParameterSpec],
    write_data: Callable[[IO[bytes], ParameterSpec], None],
    companions: Mapping[str, Path | bytes],
    *,
    max_shard: int = MAX_SHARD,
) -> None:
    """Write a model directory around data that the caller writes.

    Args:
        directory: Must not exist, or be empty.
        parameters: In the order of the data.
        write_data: Called for each parameter in turn; writes its bytes from where the file stands.
        companions: Other files: name to content, or to the file to copy.
        max_shard: Bytes of data after which a new shard begins; a larger tensor gets a shard of its own.

    Raises:
        OutputError: if the directory is in use or cannot be written. What was begun is removed.
    """
    with _laid_out(directory, parameters, companions, max_shard) as places:
        for spec in parameters:
            file, begin = places[spec.name]
            file.seek(begin)
            write_data(file, spec)


@contextlib.contextmanager
def _laid_out(
    directory: Path, tensors: Sequence[ParameterSpec], companions: Mapping[str, Path | bytes], max_shard: int
) -> Iterator[dict[str, tuple[IO[bytes], int]]]:
    """A directory with headers and companions, for the caller to write the data: name to file and first byte."""
    shards = _cut(tensors, max_shard)
    names = shard_names(len(shards))
    places: dict[str, tuple[IO[bytes], int]] = {}
    with new_directory(directory) as partial:
        write_companions(partial, companions)
        with contextlib.ExitStack() as opened:
            for name, specs in zip(names, shards, strict=True):
                file = opened.enter_context(create_file(partial / name))
                begin = _write_header(file, specs)
                for spec in specs:
                    places[spec.name] = (file, begin)
                    begin += spec.nbytes
            yield places
        weight_map = {spec.name: name for name, specs in zip(names, shards, strict=True) for spec in specs}
        write_index(partial, weight_map, total_size=sum(spec.nbytes for spec in tensors))


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Make a directory that appears whole and durable, or not at all.

    Args:
        directory: Must not exist, or be empty.

    Yields:
        A directory to write files into. It becomes ``directory`` at the end, or is removed if the body raises.

    Raises:
        OutputError: if the directory is in use, or the body or the renaming meets an error of the system.
    """
    require_unused(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Open to this user alone and with a name that cannot be guessed, so that nothing can be planted in it. The directory
        # inside it gets the rights of any new one.
        enclosure = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
        try:
            partial = enclosure / directory.name
            partial.mkdir()
            yield partial
            for path in [*partial.iterdir(), partial]:
                sync_path(path)
            try:
                partial.rename(directory)
            except OSError as error:
                if directory.is_dir() and not any(directory.iterdir()):
                    raise  # what stands there is not the reason
                if os.path.lexists(directory):
                    raise OutputError(
                        directory,
                        found="something at this path that another process put there in the meantime",
                        expected="a path that stays free until the directory is written",
                        remedy="use what is there now, or choose another output directory",
                    ) from error
                raise
            sync_path(directory.parent)
        finally:
            shutil.rmtree(enclosure, ignore_errors=True)
    except OSError as error:
        raise OutputError(
            directory,
            found=reason(error),
            expected="a directory that can be written",
            remedy="free space or choose another directory",
        ) from error


def shard_names(count: int) -> list[str]:
    """File names of a checkpoint of so many shards, as the hub's tools expect them."""
    return [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_index(directory: Path, weight_map: Mapping[str, str], *, total_size: int) -> None:
    """Write the index of a checkpoint, if it has several shards.

    Args:
        directory: Directory of the shards.
        weight_map: Tensor name to the name of its shard.
        total_size: Bytes of all tensors.
    """
    if not (directory / SINGLE_FILE).exists():
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
        write_file(directory / INDEX_FILE, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def write_companions(directory: Path, companions: Mapping[str, Path | bytes]) -> None:
    """Write or copy the small files beside the weights.

    Args:
        directory: Directory of the weights.
        companions: Name to content, or to the file to copy.

    Raises:
        CheckpointError: if a file to copy cannot be read.
        OSError: if something is at a path, or the system refuses.
    """
    for name, content in companions.items():
        with create_file(directory / name) as file:
            if isinstance(content, bytes):
                file.write(content)
                continue
            try:
                source = open_regular(content)
            except OSError as error:
                raise CheckpointError(
                    content, found=reason(error), expected="a readable file", remedy="restore the base model's files"
                ) from error
            with source:
                shutil.copyfileobj(source, file, _COPIED)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file.

    Raises:
        OSError: if something is at the path, or the system refuses.
    """
    with create_file(path) as file:
        file.write(content)


def _cut(parameters: Sequence[ParameterSpec], max_shard: int) -> list[list[ParameterSpec]]:
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
    """Write a shard's header; return where its data begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in parameters:
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the data begins at a multiple of 8, as the format asks of writers
    return file.write(struct.pack("<Q", len(raw)) + raw)
