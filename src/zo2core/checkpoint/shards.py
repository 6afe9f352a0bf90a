"""Shards in safetensors: headers are read by safetensors, ranges straight into the caller's memory.

Format (https://github.com/huggingface/safetensors): 8 bytes, little endian, the header's length;
the header; the data of the tensors, one after the other. Checkpoints of several shards have a
``model.safetensors.index.json``, whose ``weight_map`` gives the shard of each tensor.

Trade-off: positioned reads instead of a memory map, so that only the caller's buffer holds weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from zo2core.errors import CheckpointError, reason, system_error, system_errors_as
from zo2core.io.direct_file import PAGE, RangedFile, byte_view, near_ranges
from zo2core.io.durable import DisturbedFileError, FileState, open_descriptor, open_regular
from zo2core.types import ParameterSpec, SavedPart

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD = 5_000_000_000  # bytes, as the hub's tools expect

_MAX_INDEX = 100_000_000  # bytes
_STAGING = 1 << 20  # elements converted at a time where dtypes differ, or bytes copied
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
    state: FileState | None = None  # of the file when its header was read

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The floating-point dtype; None for integers, booleans and 8-bit floats."""
        return _FLOATS.get(self.dtype)

    def read(self) -> bytes:
        """Read the tensor's bytes, of a tensor that is small."""
        content = bytearray(self.nbytes)
        with contextlib.closing(SafetensorsReader({})) as reader:
            reader.read_bytes(self, 0, memoryview(content))
        return bytes(content)

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


class _Read(NamedTuple):
    """Memory to fill from a byte of a tensor on."""

    entry: TensorEntry
    offset: int
    out: memoryview


def open_safetensors(path: Path) -> Any:
    """Open a file by ``safe_open``, which calls a file missing whatever kept it from opening it."""
    try:
        return safe_open(str(path), "np")
    except FileNotFoundError:
        os.close(open_descriptor(path, os.O_RDONLY))  # raises the system's own error
        raise


def parse_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check one shard's header; its data is not read."""
    try:
        # Mapped without the permission to write, which needs no memory. A FIFO would be waited for:
        # it is refused first.
        typed = system_errors_as(
            CheckpointError, path, expected="a readable safetensors file", remedy="check the path"
        )
        with typed, open_regular(path) as file, open_safetensors(path) as shard:
            state = FileState.of(file.fileno())
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            slices = [(name, shard.get_slice(name)) for name in shard.offset_keys()]
    except SafetensorError as error:
        raise malformed(path, str(error), "a whole safetensors file") from error
    entries: dict[str, TensorEntry] = {}
    start = 8 + header_bytes
    for name, tensor in slices:
        dtype = tensor.get_dtype()
        shape = tuple(tensor.get_shape())
        if dtype not in DTYPES:
            raise malformed(f"{path}: {name}", f"dtype {dtype}", f"one of {', '.join(DTYPES)}")
        entries[name] = TensorEntry(
            name, dtype, shape, path, start, math.prod(shape) * DTYPES[dtype].itemsize, state
        )
        start += entries[name].nbytes
    return entries


@contextlib.contextmanager
def refusing_changes(path: Path) -> Iterator[None]:
    """A context in which a file that another process has changed becomes a typed error."""
    try:
        yield
    except DisturbedFileError as error:
        raise _changed_file(path, error) from error


def _changed_file(path: Path, error: OSError) -> CheckpointError:
    expected = "the file as it was when it was opened"
    remedy = "restore it, and give the command again; a run resumes from its last step"
    return malformed(path, reason(error), expected, remedy=remedy)


class BaseFiles:
    """The files of a base, in the states that they had when they were opened.

    Note: what a base's files decide is read at different times. Weights in memory and the settings
    of a tokenizer are read once, streamed blocks at each step, and what an export copies at the
    end. A file that changes in between would make a run of two bases, also if no step reads it.

    Args:
        states: State by path. Paths may be links: a link that leads to another file is a change.
        small: Those of these files that are beside the weights, and small: a run records their
            digests.
    """

    def __init__(
        self, states: Mapping[Path, FileState] = MappingProxyType({}), small: Iterable[Path] = ()
    ) -> None:
        self._states = dict(states)
        self._small = tuple(small)

    def require_unchanged(self) -> None:
        """Refuse a file that was written, replaced or removed since, by one call of the system for
        each.

        Raises:
            CheckpointError: naming the first such file.
        """
        for path, state in self._states.items():
            try:
                state.require(path, path)
            except OSError as error:
                raise _changed_file(path, error) from error

    def digests(self) -> dict[str, str]:
        """SHA-256 of each small file, by name.

        Raises:
            CheckpointError: if one cannot be read.
        """
        digests = {}
        for path in self._small:
            expected, remedy = "a readable file", "restore it"
            with (
                system_errors_as(CheckpointError, path, expected=expected, remedy=remedy),
                open_regular(path) as file,
            ):
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests

    def require_digests(self, recorded: Mapping[str, str]) -> None:
        """Refuse small files that are others than those that a run recorded.

        Raises:
            CheckpointError: naming the first such file.
        """
        now = self.digests()
        for name in sorted({*now, *recorded}):
            if now.get(name) != recorded.get(name):
                found, expected = (
                    "no file" if digest is None else f"a file with sha256 {digest[:12]}"
                    for digest in (now.get(name), recorded.get(name))
                )
                remedy = "restore the file, or start a new run"
                where = Path(*{path.parent for path in self._small}, name)
                raise malformed(where, found, f"{expected}, as when the run began", remedy=remedy)


def malformed(
    where: object, found: str, expected: str, *, remedy: str = "download the file again"
) -> CheckpointError:
    """The error for a file that is missing, damaged, or of another format."""
    return CheckpointError(where, found, expected, remedy)


def find_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Find every tensor of a checkpoint directory: one file, or several with an index.

    Only headers are read. Which files count is what transformers decides: ``model.safetensors``
    before an index, and of a tensor in several shards the one in the last of them by name.

    Args:
        directory: Directory of ``model.safetensors``, or of shards and
            ``model.safetensors.index.json``.

    Returns:
        Location of each tensor by name.

    Raises:
        CheckpointError: if there is no such file, a shard or a tensor is missing, a shard is
            malformed, or the index or a link names a file outside the directory. Links of the hub's
            cache are followed.
    """
    chosen = choose_weights(directory)
    if chosen is None:
        remedy = "pass a directory with a model in the Hugging Face layout"
        raise malformed(
            directory, "no safetensors weights", f"{SINGLE_FILE} or {INDEX_FILE}", remedy=remedy
        )
    require_own_file(chosen, directory)
    if chosen.name == SINGLE_FILE:
        return parse_header(chosen)
    weight_map = parse_index(chosen)
    entries: dict[str, TensorEntry] = {}
    missing = dict(weight_map)
    for shard in sorted(set(weight_map.values())):
        require_own_file(directory / shard, directory)
        of_shard = parse_header(directory / shard)
        entries |= of_shard
        for name in of_shard:
            if missing.get(name) == shard:
                del missing[name]
    for name, shard in missing.items():
        remedy = "download the shard and the index again, from one revision"
        expected = f"the tensor, as {INDEX_FILE} says"
        raise malformed(directory / shard, f"no tensor {name}", expected, remedy=remedy)
    return entries


def choose_weights(
    directory: Path, names: Sequence[str] = (SINGLE_FILE, INDEX_FILE)
) -> Path | None:
    """The first of these files that a directory has: transformers prefers one file to an index.

    Returns:
        Path of the file with all weights, or of the index of several; None if there is neither.
    """
    return next((directory / name for name in names if (directory / name).exists()), None)


def parse_index(path: Path, *, suffix: str = "") -> dict[str, str]:
    """Read an index: the shard of each tensor, a file with this suffix in the index's own
    directory.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_INDEX + 1)
        if len(raw) > _MAX_INDEX:
            raise malformed(path, f"more than {_MAX_INDEX} bytes", "an index")
        index = json.loads(raw)
        weight_map = index["weight_map"]
        pairs = list(weight_map.items())
    except OSError as error:
        raise system_error(
            CheckpointError, path, error, expected="a readable index", remedy="check the path"
        ) from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise malformed(
            path, f"no usable index ({error})", "a JSON object with a weight_map"
        ) from error
    for name, shard in pairs:
        # Printable: no NUL and no lone surrogate, with which a file cannot be opened.
        plain = isinstance(shard, str) and shard.isprintable() and shard == os.path.basename(shard)
        if not plain or shard in {"", ".", ".."} or not shard.endswith(suffix):
            expected = f"the name of a file{suffix and f' *{suffix}'} in the index's own directory"
            remedy = "do not use this checkpoint unless you know why its index points elsewhere"
            raise malformed(
                f"{path}: {name}", f"shard {str(shard)[:200]!r}", expected, remedy=remedy
            )
    return dict(pairs)


def states_of(entries: Iterable[TensorEntry]) -> dict[Path, FileState]:
    """The states of the files of tensors, when their headers were read, by path."""
    return {entry.path: entry.state for entry in entries if entry.state is not None}


def check_float(entry: TensorEntry) -> torch.dtype:
    """Return a tensor's floating-point dtype."""
    if entry.torch_dtype is None:
        remedy = "use the unquantised checkpoint, or one whose config.json says how it is quantised"
        raise malformed(
            f"{entry.path}: {entry.name}",
            f"dtype {entry.dtype}",
            f"one of {', '.join(_FLOATS)}",
            remedy=remedy,
        )
    return entry.torch_dtype


class SafetensorsReader:
    """The tensors of a checkpoint by parameter name, read on demand. The files are never written.

    Args:
        entries: Location by parameter name: of its tensor, or of the pieces of tensors that make up
            the parameter, in the order of its elements. All tensors of a parameter have one dtype;
            those of an encoded parameter are bytes.
    """

    def __init__(self, entries: Mapping[str, TensorEntry | Sequence[Piece]]) -> None:
        self._pieces = {
            name: (Piece.whole(entry),) if isinstance(entry, TensorEntry) else tuple(entry)
            for name, entry in entries.items()
        }
        self._ends = {
            name: list(accumulate(piece.numel for piece in pieces))
            for name, pieces in self._pieces.items()
        }
        self._files: dict[Path, RangedFile] = {}
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of names, dtypes, shapes and of 4 KiB each of every tensor's beginning, middle
        and end.
        """
        digest = hashlib.sha256()
        for name, pieces in sorted(self._pieces.items()):
            for piece in pieces:
                part = [] if piece == Piece.whole(piece.entry) else [piece.start, piece.numel]
                digest.update(
                    json.dumps([name, piece.entry.dtype, piece.entry.shape, *part]).encode()
                )
                for sample in self.samples(piece.entry):
                    digest.update(sample)
        return digest.hexdigest()

    def page_offset(self, spec: ParameterSpec) -> int | None:
        """Offset in bytes of a parameter from the start of a page in its shard.

        None if the parameter is converted when it is read, or its offset is not a multiple of its
        item size.
        """
        entry, start, _ = self._pieces[spec.name][0]
        offset = (entry.start + start * spec.stored_dtype.itemsize) % PAGE
        as_stored = (
            entry.dtype == "U8" if spec.encoding is not None else entry.torch_dtype == spec.dtype
        )
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
        last = entry.nbytes - size
        offsets = (0, last // 2, last)
        samples = {offset: bytearray(size) for offset in offsets}  # of a small tensor, one
        for offset, sample in samples.items():
            self.read_bytes(entry, offset, memoryview(sample))
        return [samples[offset] for offset in offsets]

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of a parameter, converted to the memory's dtype.

        Args:
            parameter: Name of the parameter.
            out: Host memory, 1-D, contiguous.
            start: First element of the range.

        Raises:
            CheckpointError: if the file cannot be read or ends early.
        """
        pieces = self._pieces[parameter]
        ends = self._ends[parameter]
        done = 0
        reads: list[_Read] = []
        for index in range(bisect_right(ends, start), len(pieces)):
            if done == out.numel():
                break
            entry, begin, numel = pieces[index]
            skipped = start + done - (ends[index] - numel)  # elements of the piece before the range
            part = out[done : done + numel - skipped]
            reads += self._read_or_convert(entry, begin + skipped, part)
            done += part.numel()
        # else memory would stay unfilled
        assert done == out.numel(), f"{parameter} ends at element {start + done}"
        self._read_all(reads)

    def _read_or_convert(
        self, entry: TensorEntry, start: int, out: torch.Tensor
    ) -> Iterator[_Read]:
        """The read that fills memory with a range of a tensor; none if that was converted."""
        dtype = (
            torch.uint8 if out.dtype is torch.uint8 and entry.dtype == "U8" else check_float(entry)
        )
        if dtype == out.dtype:
            yield _Read(entry, start * dtype.itemsize, byte_view(out))
            return
        staging = torch.empty(min(_STAGING, out.numel()), dtype=dtype)
        for first in range(0, out.numel(), _STAGING):
            chunk = out[first : first + _STAGING]
            stored = staging[: chunk.numel()]
            self.read_bytes(entry, (start + first) * dtype.itemsize, byte_view(stored))
            chunk.copy_(stored)

    def _read_all(self, reads: Sequence[_Read]) -> None:
        """Read ranges of tensors, together where they are near to one another in a file.

        The parts of an encoded matrix are tensors of their own, some of a few bytes: a mixture's
        block has thousands.
        """
        by_file: dict[Path, list[_Read]] = {}
        for read in reads:
            by_file.setdefault(read.entry.path, []).append(read)
        for path, of_file in by_file.items():
            ranges = [(read.entry.start + read.offset, len(read.out)) for read in of_file]
            for numbers in near_ranges(ranges):
                group = [of_file[number] for number in numbers]
                if len(group) > 1 and self._read_together(path, group):
                    continue
                for read in group:
                    self.read_bytes(*read)

    def _read_together(self, path: Path, group: Sequence[_Read]) -> bool:
        with refusing_changes(path):
            return self._file(group[0].entry).read_together(
                [(read.entry.start + read.offset, read.out) for read in group]
            )

    def close(self) -> None:
        """Close the shards. A later read opens them again."""
        with self._lock:
            files = self._files
            self._files = {}
        for file in files.values():
            file.close()

    def _file(self, entry: TensorEntry) -> RangedFile:
        with self._lock:
            if entry.path not in self._files:
                file = self._files[entry.path] = RangedFile(entry.path)
                if entry.state is not None:
                    file.state = entry.state
            return self._files[entry.path]

    def read_bytes(self, entry: TensorEntry, offset: int, out: memoryview) -> None:
        """Fill memory from a byte of a tensor on. See ``read_into``."""
        where = f"{entry.path}: {entry.name}"
        expected = f"{entry.nbytes} bytes at {entry.start}"
        remedy = "check the disk, and download the shard again"
        with system_errors_as(CheckpointError, where, expected=expected, remedy=remedy):
            file = self._file(entry)
            with refusing_changes(entry.path):
                file.read_into(entry.start + offset, out)


def same_samples(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two tensors agree in dtype, shape and 4 KiB each of their beginning, middle and
    end.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with contextlib.closing(SafetensorsReader({})) as reader:
        return reader.samples(first) == reader.samples(second)


def require_own_file(path: Path, directory: Path) -> Path:
    """Refuse a file of a model's directory that is a link to another directory; the file need not
    exist.

    A model may come from an untrusted source: a link in its directory could make this program read
    any file of the machine and copy it into an export. Links inside the directory are followed and,
    in the hub's cache, links to blobs of the same model. The directory itself may be a link.
    """
    target, root = (Path(os.path.realpath(item)) for item in (path, directory))
    cached = root.parent.parent  # in the hub's cache: models--ORGANISATION--NAME/snapshots/REVISION
    is_snapshot = root.parent.name == "snapshots" and cached.name.startswith("models--")
    if target.is_relative_to(root) or (is_snapshot and target.is_relative_to(cached / "blobs")):
        return target
    remedy = (
        "do not use this model unless you know why it links there; if so, replace the link by a "
        "copy"
    )
    raise malformed(
        path, f"a link to {target}", "a file of the model's own directory", remedy=remedy
    )


def header_bytes(
    metadata: Mapping[str, str], tensors: Iterable[tuple[str, str, Sequence[int], int]]
) -> bytes:
    """The header of a safetensors file with its length in front; the data follows."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the format asks writers to align the data to 8 bytes
    return struct.pack("<Q", len(raw)) + raw
