"""GGUF files, written byte by byte so that tests can write wrong ones."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf

TYPE_NUMBERS = {kind.name: int(kind) for kind in gguf.GGMLQuantizationType}
_KINDS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}


class Tensor(NamedTuple):
    """A tensor to write: sizes in torch's order, and its bytes."""

    name: str
    shape: Sequence[int]
    kind: str | int
    content: bytes
    offset: int | None = None  # None: behind the tensor before


def text(value: str | bytes) -> bytes:
    """A string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(value: Any) -> bytes:
    """A value's type and the value."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        kind, layout = {**_KINDS, str: (8, ""), int: (5, "i")}[type(value[0])]  # llama.cpp has signed ones in arrays
        items = (text(item) if kind == 8 else struct.pack(f"<{layout}", item) for item in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
    kind, layout = _KINDS[type(value)]
    return struct.pack(f"<I{layout}", kind, value)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Sequence[Tensor], *, version: int = 3, alignment: int = 32) -> bytes:
    """A GGUF file."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(text(key) + scalar(value) for key, value in metadata.items())
    data = b""
    for tensor in tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        number = tensor.kind if isinstance(tensor.kind, int) else TYPE_NUMBERS[tensor.kind]
        sizes = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += text(tensor.name) + struct.pack("<I", len(tensor.shape)) + sizes + struct.pack("<IQ", number, offset)
        data += tensor.content + bytes(-len(tensor.content) % alignment)
    return header + bytes(-len(header) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor]) -> Path:
    """Write a GGUF file, and return its path."""
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path
