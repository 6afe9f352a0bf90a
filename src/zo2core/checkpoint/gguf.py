"""Reader of GGUF files, the checkpoints of llama.cpp: headers are read and checked, tensors are
read by range.

Format (https://github.com/ggml-org/ggml/blob/master/docs/models.md), little endian: ``GGUF``, a
version, the numbers of tensors and of metadata values; the values, each with a key and a type; for
each tensor its name, its sizes (of a row first), its type and its offset in the data, which begin
at the next multiple of the alignment. A model may be split into files named
``NAME-00001-of-0000N.gguf``, each with a header of its own; the first has the metadata.

Each size in a header is compared with the size of the file before it is used. Long values stay in
the file.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

from zo2core.checkpoint.shards import (
    TensorEntry,
    malformed,
    refusing_changes,
    require_own_file,
)
from zo2core.encodings.forms import GGUF_BLOCKS
from zo2core.errors import CheckpointError, UnsupportedModelError, system_errors_as
from zo2core.io.durable import FileState, open_regular

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_KEY_BYTES = (1 << 16) - 1  # of a metadata key, the format's own limit
_NAME_BYTES = 1 << 10  # of a tensor's name; llama.cpp writes at most 63
_SHORT = 1 << 16  # bytes of a string that is kept in memory; longer ones stay in the file
# far above those of any model
_MOST_VALUES = 1 << 12
_MOST_TENSORS = 1 << 16
_MOST_FILES = 1 << 10
_MOST_AXES = 4  # axes of a tensor, ggml's limit
_LARGEST_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
# layouts of numbers, by the type's number
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TYPES = {block.number: name for name, block in GGUF_BLOCKS.items()} | {28: "F64", 40: "NVFP4"}
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


class StoredText(NamedTuple):
    """A long string of the metadata, which stays in the file."""

    start: int  # byte offset in the file
    nbytes: int


class StoredArray(NamedTuple):
    """An array of the metadata, which stays in the file."""

    kind: int  # the number of its elements' type
    length: int  # elements
    start: int  # byte offset in the file


Scalar: TypeAlias = int | float | bool
Value: TypeAlias = Scalar | str | StoredText | StoredArray


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF model's metadata and tensors."""

    path: Path
    metadata: Mapping[str, Value]
    kinds: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]
    state: FileState  # of the file with the metadata, when it was read

    def text(self, key: str) -> str | None:
        """A string of the metadata, from memory or from the file; None if there is no such key."""
        value = self.metadata.get(key)
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, StoredText):
            raise malformed(f"{self.path}: {key}", f"{str(value)[:80]}", "a string")
        with _opened(self.path, value.start, self.state) as cursor:
            return cursor.text(value.nbytes, key)

    def array(self, key: str) -> Iterator[Scalar | str]:
        """Yield the elements of an array of the metadata; none if there is no such key."""
        value = self.metadata.get(key)
        if value is None:
            return
        if not isinstance(value, StoredArray):
            raise malformed(f"{self.path}: {key}", f"{str(value)[:80]!r}", "an array")
        with _opened(self.path, value.start, self.state) as cursor:
            for _ in range(value.length):
                is_text = value.kind == _STRING
                yield (
                    cursor.text(cursor.integer(), key)
                    if is_text
                    else cursor.scalar(_SCALARS[value.kind])
                )


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header of a GGUF file and, if its model is split, the headers of its other
    files.

    The data of tensors are not read.
    """
    first = _read_file(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return first
    named = _SPLIT_NAME.fullmatch(path.name)
    if (
        not isinstance(count, int)
        or not 1 < count <= _MOST_FILES
        or named is None
        or int(named["count"]) != count
    ):
        expected = f"a file NAME-00001-of-N.gguf of N files, 2 to {_MOST_FILES}, as its header says"
        raise malformed(
            path,
            f"this name, and split.count {str(count)[:40]}",
            expected,
            remedy="keep the files' own names",
        )
    tensors: dict[str, TensorEntry] = {}
    for number in range(count):
        part = first
        if number:
            sibling = path.with_name(f"{named['stem']}-{number + 1:05}-of-{count:05}{SUFFIX}")
            require_own_file(sibling, path.parent)
            part = _read_file(sibling)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            found = f"split.no {str(part.metadata.get('split.no'))[:40]}, counted from 0"
            remedy = "pass the path of the file 00001, with all others beside it"
            raise malformed(
                part.path, found, f"file {number} of {count}, as its name says", remedy=remedy
            )
        for name in sorted(tensors.keys() & part.tensors.keys()):
            raise malformed(
                f"{part.path}: {name}",
                "a tensor that an earlier file has",
                "each tensor in one file",
            )
        tensors |= part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise malformed(
            path,
            f"{len(tensors)} tensors in {count} files",
            f"{str(total)[:40]}, as split.tensors.count says",
        )
    metadata = {key: value for key, value in first.metadata.items() if key not in _SPLIT_KEYS}
    return GGUFFile(path, metadata, first.kinds, tensors, first.state)


class _Cursor:
    """Reads a file from its start to its end; lengths beyond the end are refused."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.state = FileState.of(file.fileno())
        self.size = self.state.size

    def require(self, nbytes: int, what: str) -> None:
        """Refuse a length that is longer than the rest of the file."""
        rest = self.size - self.file.tell()
        if nbytes > rest:
            raise malformed(
                self.path,
                f"{what} of {nbytes} bytes, where {rest} are left",
                "a header that lies in the file",
            )

    def bytes(self, nbytes: int, what: str) -> bytes:
        self.require(nbytes, what)
        content = self.file.read(nbytes)
        if len(content) != nbytes:
            raise malformed(
                self.path, f"{what} that ends early", "a file that stays as it is while it is read"
            )
        return content

    def scalar(self, kind: str) -> Scalar:
        layout = struct.Struct(f"<{kind}")
        (value,) = layout.unpack(self.bytes(layout.size, "a value"))
        return value  # type: ignore[no-any-return]

    def integer(self, kind: str = "Q") -> int:
        return int(self.scalar(kind))

    def text(self, length: int, what: str, most: int | None = None) -> str:
        if most is not None and length > most:
            raise malformed(self.path, f"{what} of {length} bytes", f"at most {most}")
        try:
            return self.bytes(length, what).decode()
        except UnicodeDecodeError as error:
            raise malformed(
                f"{self.path}: {what[:80]}", f"bytes that are not UTF-8 ({error.reason})", "text"
            ) from error

    def skip(self, nbytes: int, what: str) -> None:
        self.require(nbytes, what)
        self.file.seek(nbytes, os.SEEK_CUR)


@contextlib.contextmanager
def _opened(path: Path, start: int = 0, state: FileState | None = None) -> Iterator[_Cursor]:
    """A context with a cursor on a file, in this state.

    Errors of the system become ``CheckpointError``.
    """
    typed = system_errors_as(
        CheckpointError, path, expected="a readable GGUF file", remedy="check the path"
    )
    with typed, open_regular(path) as file:
        if state is not None:
            with refusing_changes(path):
                state.require(file.fileno(), path)
        file.seek(start)
        yield _Cursor(path, file)


def _read_file(path: Path) -> GGUFFile:
    with _opened(path) as cursor:
        if cursor.size < 24 or cursor.bytes(4, "the magic") != _MAGIC:
            raise malformed(path, "another beginning than GGUF's", "a GGUF file")
        version = cursor.integer("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            found = (
                "a file for big-endian machines" if swapped else f"version {version} of the format"
            )
            expected, remedy = (
                "version 2 or 3, little endian",
                "convert the model with a recent llama.cpp",
            )
            raise UnsupportedModelError(path, found, expected, remedy)
        tensors = cursor.integer()
        values = cursor.integer()
        for count, most, what in (
            (tensors, _MOST_TENSORS, "tensors"),
            (values, _MOST_VALUES, "metadata values"),
        ):
            if count > most:
                raise malformed(path, f"{count} {what}", f"at most {most}")
        metadata = dict[str, Value]()
        kinds = dict[str, int]()
        for _ in range(values):
            key = cursor.text(cursor.integer(), "a key", _KEY_BYTES)
            if key in metadata:
                raise malformed(f"{path}: {key[:80]}", "a key that occurs twice", "each key once")
            kinds[key] = cursor.integer("I")
            metadata[key] = _value(cursor, kinds[key], key)
        alignment = metadata.get("general.alignment", 32)
        if not (
            type(alignment) is int
            and 0 < alignment <= _LARGEST_ALIGNMENT
            and alignment & (alignment - 1) == 0
        ):
            raise malformed(path, f"general.alignment {str(alignment)[:40]}", "a power of 2")
        entries = [_tensor(cursor) for _ in range(tensors)]
        start = -(-cursor.file.tell() // alignment) * alignment
        entries = [entry._replace(state=cursor.state) for entry in entries]
        placed = _placed(path, entries, start, cursor.size, alignment)
        return GGUFFile(path, metadata, kinds, placed, cursor.state)


def _placed(
    path: Path, entries: list[TensorEntry], start: int, size: int, alignment: int
) -> dict[str, TensorEntry]:
    """Check the offsets of tensors, which count from ``start``, and return entries that count from
    the file's beginning.
    """
    placed: dict[str, TensorEntry] = {}
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.start):
        where = f"{path}: {entry.name}"
        offset = entry.start
        if entry.name in placed:
            raise malformed(where, "a name that occurs twice", "each tensor once")
        if offset % alignment:
            raise malformed(
                where,
                f"data at offset {offset}",
                f"a multiple of {alignment}, the file's alignment",
            )
        if offset < end:
            raise malformed(
                where, f"data at offset {offset}", f"{end}, where the tensor before it ends"
            )
        end = offset + entry.nbytes
        if start + end > size:
            found = f"{entry.nbytes} bytes at {start + offset} in a file of {size}"
            raise malformed(where, found, "data that lie in the file")
        placed[entry.name] = entry._replace(start=start + offset)
    return {entry.name: placed[entry.name] for entry in entries}


def _tensor(cursor: _Cursor) -> TensorEntry:
    """Read the header's entry of a tensor. Its ``start`` counts from the beginning of the data."""
    name = cursor.text(cursor.integer(), "a tensor's name", _NAME_BYTES)
    where = f"{cursor.path}: {name}"
    axes = cursor.integer("I")
    if not 1 <= axes <= _MOST_AXES:
        raise malformed(where, f"{axes} axes", f"1 to {_MOST_AXES}")
    shape = tuple(reversed([cursor.integer() for _ in range(axes)]))
    number = cursor.integer("I")
    offset = cursor.integer()
    kind = _TYPES.get(number, f"type {number}")
    if kind not in GGUF_BLOCKS:
        expected = f"one of {', '.join(GGUF_BLOCKS)}"
        remedy = "use a file in one of these types; llama-quantize makes one"
        raise UnsupportedModelError(where, f"a tensor in {kind}", expected, remedy)
    block = GGUF_BLOCKS[kind]
    if not all(0 < size < 1 << 40 for size in shape) or shape[-1] % block.weights:
        expected = f"sizes of at least 1, and rows of whole blocks of {block.weights}, in {kind}"
        raise malformed(where, f"shape {list(shape)}", expected)
    return TensorEntry(
        name, kind, shape, cursor.path, offset, math.prod(shape) // block.weights * block.nbytes
    )


def _value(cursor: _Cursor, kind: int, key: str) -> Value:
    """Read a metadata value, or skip one that stays in the file."""
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    if kind == _STRING:
        length = cursor.integer()
        if length <= _SHORT:
            return cursor.text(length, key)
        start = cursor.file.tell()
        cursor.skip(length, "a string")
        return StoredText(start, length)
    if kind != _ARRAY:
        raise malformed(
            f"{cursor.path}: {key[:80]}", f"a value of type {kind}", "a type from 0 to 12"
        )
    element = cursor.integer("I")
    count = cursor.integer()
    start = cursor.file.tell()
    if element in _SCALARS:
        cursor.skip(count * struct.calcsize(f"<{_SCALARS[element]}"), "an array")
    elif element == _STRING:
        cursor.require(8 * count, "an array of strings")
        for _ in range(count):
            cursor.skip(cursor.integer(), "a string")
    else:
        raise malformed(
            f"{cursor.path}: {key[:80]}", f"an array of type {element}", "numbers or strings"
        )
    return StoredArray(element, count, start)
