"""Read safetensors shards: first the headers, which are checked, then byte ranges straight into the caller's memory.

Format (https://github.com/huggingface/safetensors): 8 bytes, little endian, the header's length; the header, a JSON object
from tensor name to dtype, shape and [begin, end) offsets that count from the header's end; the data. Checkpoints of several
shards have a ``model.safetensors.index.json``, whose ``weight_map`` gives the shard of each tensor.

Trade-off: positioned reads instead of a memory map, so that only the caller's buffer holds weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zo2core.errors import CheckpointError, reason
from zo2core.io.direct_file import PAGE, RangedFile, byte_view
from zo2core.io.durable import open_regular
from zo2core.types import ParameterSpec, SavedPart

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_STAGING = 1 << 20  # elements converted at a time if the checkpoint has another dtype
_SAMPLE = 4096  # bytes of each of the three samples of a tensor

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = _FLOATS | {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
}  # by their names in safetensors
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorEntry(NamedTuple):
    """The location of one tensor on disk."""

    name: str
    dtype: str  # safetensors' name, such as "F32" or "BF16"
    shape: tuple[int, ...]
    path: Path  # of the shard
    start: int  # byte offset in the file
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The floating-point dtype; None for integers, booleans and 8-bit floats."""
        return _FLOATS.get(self.dtype)

    def read(self) -> bytes:
        """Read the tensor's bytes, of a tensor that is small.

        Safetensors' own reader maps the whole shard privately, which the system refuses for a shard larger than its memory.
        """
        try:
            with open_regular(self.path) as file:
                file.seek(self.start)
                content = file.read(self.nbytes)
        except OSError as error:
            raise self._unreadable(reason(error)) from error
        if len(content) < self.nbytes:
            raise self._unreadable(f"{len(content)} bytes")
        return content

    def _unreadable(self, found: str) -> CheckpointError:
        expected, remedy = f"the tensor's {self.nbytes} bytes", "get the shard again"
        return CheckpointError(f"{self.path}: {self.name}", found=found, expected=expected, remedy=remedy)

    def as_bytes(self) -> TensorEntry:
        """The same location as a tensor of bytes."""
        return self._replace(dtype="U8", shape=(self.nbytes,))


class Piece(NamedTuple):
    """A range of a tensor's elements that is part of a parameter."""

    entry: TensorEntry
    start: int  # first element in the tensor
    numel: int

    @classmethod
    def whole(cls, entry: TensorEntry) -> Piece:
        """A whole tensor."""
        return cls(entry, 0, math.prod(entry.shape))

    @property
    def saved_part(self) -> SavedPart:
        """The same range, as a writer needs it."""
        return SavedPart(self.entry.name, self.entry.shape, self.start, self.numel)


def parse_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check one shard's header; its data is not read."""
    try:
        with open_regular(path) as file:
            info = os.fstat(file.fileno())
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _malformed(path, f"{len(prefix)} bytes", "at least 8 bytes, the header's length")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(_MAX_HEADER, info.st_size - 8):
                raise _malformed(
                    path,
                    f"a header of {length} bytes in a file of {info.st_size}",
                    "a header that lies inside the file",
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(
            path, found=reason(error), expected="a readable safetensors file", remedy="check the path"
        ) from error
    return _parse_entries(path, raw, data_start=8 + length, data_size=info.st_size - 8 - length)


def _parse_entries(path: Path, raw: bytes, *, data_start: int, data_size: int) -> dict[str, TensorEntry]:
    try:
        header = json.loads(raw, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"a header that is not JSON ({error})", "a JSON object") from error
    if not isinstance(header, dict):
        raise _malformed(path, f"a header that is a {type(header).__name__}", "a JSON object")
    header.pop("__metadata__", None)
    entries = [_parse_entry(path, name, value, data_start) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    end = data_start
    for entry in entries:
        if entry.start != end:
            raise _malformed(
                f"{path}: {entry.name}", f"data at byte {entry.start}", f"byte {end}, where the tensor before it ends"
            )
        end += entry.nbytes
    if end != data_start + data_size:
        raise _malformed(path, f"{data_size} bytes of data", f"{end - data_start} bytes, as the header says")
    return {entry.name: entry for entry in entries}


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _malformed(path, "a name that occurs twice in the header", "each name once")
    return result


def _parse_entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    where = f"{path}: {name}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise _malformed(where, f"{str(value)[:80]!r}", "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise _malformed(where, f"dtype {str(dtype)[:40]!r}", f"one of {', '.join(DTYPES)}")
    if not _are_sizes(shape):
        raise _malformed(where, f"shape {str(shape)[:80]}", "a list of sizes")
    if not (_are_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise _malformed(where, f"data_offsets {str(offsets)[:80]}", "two offsets, begin and end")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise _malformed(where, f"{offsets[1] - offsets[0]} bytes", f"{nbytes} bytes for {dtype} of shape {shape}")
    return TensorEntry(name, dtype, tuple(shape), path, data_start + offsets[0], nbytes)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value) and len(value) < 64


def _malformed(where: object, found: str, expected: str) -> CheckpointError:
    return CheckpointError(where, found=found, expected=expected, remedy="download the file again")


def find_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Find every tensor of a checkpoint directory: one file, or several with an index. Only headers are read.

    Args:
        directory: Directory of ``model.safetensors``, or of shards and ``model.safetensors.index.json``.

    Returns:
        Location of each tensor by name.

    Raises:
        CheckpointError: if there is no such file, a shard or a tensor is missing, a shard is malformed, or the index or a
            link names a file outside the directory. Links of the hub's cache are followed.
    """
    index_path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).exists() and not index_path.exists():
        require_own_file(directory / SINGLE_FILE, directory)
        return parse_header(directory / SINGLE_FILE)
    if not index_path.exists():
        raise CheckpointError(
            directory,
            found="no safetensors weights",
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            remedy="pass a directory with a model in the Hugging Face layout",
        )
    require_own_file(index_path, directory)
    weight_map = _parse_index(index_path)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        require_own_file(directory / shard, directory)
        for name, entry in parse_header(directory / shard).items():
            if weight_map.get(name, shard) != shard:
                continue  # a copy; the index names the shard that counts
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries:
            raise CheckpointError(
                directory / shard,
                found=f"no tensor {name}",
                expected=f"the tensor, as {INDEX_FILE} says",
                remedy="download the shard and the index again, from one revision",
            )
    return entries


def _parse_index(path: Path) -> dict[str, str]:
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_HEADER + 1)
        if len(raw) > _MAX_HEADER:
            raise _malformed(path, f"more than {_MAX_HEADER} bytes", "an index")
        index = json.loads(raw)
        weight_map = index["weight_map"]
        pairs = list(weight_map.items())
    except OSError as error:
        raise CheckpointError(path, found=reason(error), expected="a readable index", remedy="check the file") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _malformed(path, f"no usable index ({error})", "a JSON object with a weight_map") from error
    for name, shard in pairs:
        # Printable: no NUL and no lone surrogate, with which a file cannot be opened.
        plain = isinstance(shard, str) and shard.isprintable() and shard == os.path.basename(shard)
        if not plain or shard in {"", ".", ".."}:
            raise CheckpointError(
                f"{path}: {name}",
                found=f"shard {str(shard)[:200]!r}",
                expected="the name of a file in the index's own directory",
                remedy="do not use this checkpoint unless you know why its index points elsewhere",
            )
    return dict(pairs)


def check_float(entry: TensorEntry) -> torch.dtype:
    """Return a tensor's floating-point dtype."""
    if entry.torch_dtype is None:
        raise CheckpointError(
            f"{entry.path}: {entry.name}",
            found=f"dtype {entry.dtype}",
            expected=f"one of {', '.join(_FLOATS)}",
            remedy="use the unquantised checkpoint, or one whose config.json says how it is quantised",
        )
    return entry.torch_dtype


class SafetensorsReader:
    """The tensors of a checkpoint by parameter name, read on demand. The files are never written.

    Args:
        entries: Location by parameter name: of its tensor, or of the pieces of tensors that make up the parameter, in the
            order of its elements. All tensors of a parameter have one dtype; those of an encoded parameter are bytes.
    """

    def __init__(self, entries: Mapping[str, TensorEntry | Sequence[Piece]]) -> None:
        self._pieces = {
            name: (Piece.whole(entry),) if isinstance(entry, TensorEntry) else tuple(entry)
            for name, entry in entries.items()
        }
        self._ends = {name: list(accumulate(piece.numel for piece in pieces)) for name, pieces in self._pieces.items()}
        self._files: dict[Path, RangedFile] = {}
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of names, dtypes, shapes and of 4 KiB each of every tensor's beginning, middle and end."""
        digest = hashlib.sha256()
        for name, pieces in sorted(self._pieces.items()):
            for piece in pieces:
                part = [] if piece == Piece.whole(piece.entry) else [piece.start, piece.numel]
                digest.update(json.dumps([name, piece.entry.dtype, piece.entry.shape, *part]).encode())
                for sample in self.samples(piece.entry):
                    digest.update(sample)
        return digest.hexdigest()

    def page_offset(self, spec: ParameterSpec) -> int | None:
        """Offset in bytes of a parameter from the start of a page in its shard.

        None if the parameter is converted when it is read, or its offset is not a multiple of its item size.
        """
        entry, start, _ = self._pieces[spec.name][0]
        offset = (entry.start + start * spec.stored_dtype.itemsize) % PAGE
        as_stored = entry.dtype == "U8" if spec.encoding is not None else entry.torch_dtype == spec.dtype
        return offset if as_stored and offset % spec.stored_dtype.itemsize == 0 else None

    def itemsize(self, parameter: str) -> int:
        """Bytes of an element in a parameter's shard."""
        entry = self._pieces[parameter][0].entry
        return entry.nbytes // max(math.prod(entry.shape), 1)

    def origin(self, parameter: str) -> str:
        """Path of a parameter's shard, or of the first of several."""
        return str(self._pieces[parameter][0].entry.path)

    def samples(self, entry: TensorEntry) -> list[bytearray]:
        """Read 4 KiB each of a tensor's beginning, middle and end.

        Raises:
            CheckpointError: if they cannot be read.
        """
        size = min(_SAMPLE, entry.nbytes)
        samples = [bytearray(size) for _ in range(3)]
        for sample, offset in zip(samples, (0, (entry.nbytes - size) // 2, entry.nbytes - size), strict=True):
            self._read(entry, offset, memoryview(sample))
        return samples

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of a parameter, converted to the memory's dtype.

        Args:
            parameter: Name of the parameter.
            out: Host memory, 1-D, contiguous.
            start: First element of the range.

        Raises:
            CheckpointError: if the file cannot be read or ends early.
        """
        for entry, first, part in self._ranges(parameter, out, start):
            self._read_range(entry, first, part)

    def _ranges(self, parameter: str, out: torch.Tensor, start: int) -> Iterator[tuple[TensorEntry, int, torch.Tensor]]:
        """Divide a range of a parameter by its pieces: tensor, first element in it, and memory to fill."""
        pieces, ends, done = self._pieces[parameter], self._ends[parameter], 0
        for index in range(bisect_right(ends, start), len(pieces)):
            if done == out.numel():
                return
            entry, begin, numel = pieces[index]
            skipped = start + done - (ends[index] - numel)
            part = out[done : done + numel - skipped]
            yield entry, begin + skipped, part
            done += part.numel()
        assert done == out.numel(), f"{parameter} ends at element {start + done}"  # else memory would stay unfilled

    def _read_range(self, entry: TensorEntry, start: int, out: torch.Tensor) -> None:
        dtype = torch.uint8 if out.dtype is torch.uint8 and entry.dtype == "U8" else check_float(entry)
        if dtype == out.dtype:
            self._read(entry, start * dtype.itemsize, byte_view(out))
            return
        staging = torch.empty(min(_STAGING, out.numel()), dtype=dtype)
        for first in range(0, out.numel(), _STAGING):
            chunk = out[first : first + _STAGING]
            stored = staging[: chunk.numel()]
            self._read(entry, (start + first) * dtype.itemsize, byte_view(stored))
            chunk.copy_(stored)

    def close(self) -> None:
        """Close the shards. A later read opens them again."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _file(self, path: Path) -> RangedFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = RangedFile(path)
            return self._files[path]

    def _read(self, entry: TensorEntry, offset: int, out: memoryview) -> None:
        try:
            self._file(entry.path).read_into(entry.start + offset, out)
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{entry.path}: {entry.name}",
                found=f"{error}",
                expected=f"{entry.nbytes} bytes at {entry.start}",
                remedy="check the disk, and download the shard again",
            ) from error


def same_samples(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two tensors agree in dtype, shape and 4 KiB each of their beginning, middle and end."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    reader = SafetensorsReader({})
    try:
        return reader.samples(first) == reader.samples(second)
    finally:
        reader.close()


def require_own_file(path: Path, directory: Path) -> Path:
    """Refuse a file of a model's directory that is a link to another directory; the file need not exist.

    A model may come from an untrusted source: a link in its directory could make this program read any file of the machine
    and copy it into an export. Links inside the directory are followed and, in the hub's cache, links to blobs of the same
    model. The directory itself may be a link.
    """
    target, root = (Path(os.path.realpath(item)) for item in (path, directory))
    cached = root.parent.parent  # in the hub's cache: models--ORGANISATION--NAME/snapshots/REVISION
    is_snapshot = root.parent.name == "snapshots" and cached.name.startswith("models--")
    if target.is_relative_to(root) or (is_snapshot and target.is_relative_to(cached / "blobs")):
        return target
    raise CheckpointError(
        path,
        found=f"a link to {target}",
        expected="a file of the model's own directory",
        remedy="do not use this model unless you know why it links there; if so, replace the link by a copy",
    )
