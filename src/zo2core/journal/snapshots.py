"""Snapshots of a first-order run: the state from which it resumes, one file each.

A gradient is not a scalar, so a step cannot be replayed from the journal. A resumed run loads the
last snapshot and repeats the later steps, with the same bits. A snapshot is a safetensors file, so
that other programs can read its tensors. The rest of the state is JSON in the header's
``__metadata__``, after the SHA-256 of the whole file, for which these 64 digits count as zeros. A
file appears whole and durable under its name, or not at all. It has the journal's checksum at its
step, so that a snapshot of another run is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from zo2core.checkpoint.shards import (
    DTYPE_NAMES,
    DTYPES,
    TensorEntry,
    header_bytes,
    malformed,
    open_safetensors,
    parse_header,
)
from zo2core.errors import (
    CheckpointError,
    OptionError,
    OutputError,
    ZO2Warning,
    reason,
    system_error,
    system_errors_as,
)
from zo2core.io.direct_file import byte_view
from zo2core.io.durable import make_directory, open_regular, read_regular, replace_file

FORMAT = 1

_NAME = re.compile(r"snapshot-(0|[1-9]\d{0,17})\.safetensors")
_BEGIN = b'{"__metadata__":{"sha256":"'  # start of the header; the digits follow
_DIGITS = slice(8 + len(_BEGIN), 8 + len(_BEGIN) + 64)  # offsets of the digits in the file
_TENSOR = "tensor"  # key of the JSON object for a tensor
_ITEMS = "items"  # key of the JSON object for a mapping, whose keys may be numbers


class Snapshot(NamedTuple):
    """The state of a run after a step."""

    step: int  # number of steps taken
    # an engine's state: nested mappings and lists of tensors, numbers, strings and None
    state: Mapping[str, Any]


class Snapshots:
    """The snapshots in a run's directory. One engine writes them; others may read meanwhile."""

    def __init__(
        self,
        directory: Path,
        chain: Callable[[int], int | None],
        require_version: Callable[[int, str], None],
    ) -> None:
        self._directory = directory
        self._chain = chain
        self._require_version = require_version
        self.last: int | None = None  # step of the last snapshot that this object wrote or read
        self.written = 0  # bytes that this object has written

    def path(self, step: int) -> Path:
        """Path of a step's snapshot."""
        return self._directory / f"snapshot-{step}.safetensors"

    @property
    def steps(self) -> list[int]:
        """The steps that have a file, ascending. Files are checked when they are read."""
        matches = (_NAME.fullmatch(path.name) for path in self._directory.glob("snapshot-*"))
        return sorted(int(match[1]) for match in matches if match is not None)

    def write(self, snapshot: Snapshot, *, keep: Collection[int] = ()) -> None:
        """Write a snapshot durably, and remove older ones except the one before it, which serves as
        a fallback.
        """
        step = snapshot.step
        chain = self._chain(snapshot.step)
        assert chain is not None, "the step was taken"
        parts = _Parts(snapshot, chain)
        self._replace(step, parts, at_end=parts.digits)
        steps_to_keep = {step, self.last, *keep}
        self.last = step
        for other in self.steps:
            if other not in steps_to_keep:
                self.path(other).unlink(missing_ok=True)

    def content(self, step: int) -> bytes:
        """The bytes of a step's file, for another worker."""
        return read_regular(self.path(step))

    def digest(self, step: int) -> str:
        """The checksum that a step's file contains."""
        with open_regular(self.path(step)) as file:
            return file.read(_DIGITS.stop)[_DIGITS].decode(errors="replace")

    def receive(self, step: int, content: bytes) -> Snapshot:
        """Write another worker's file of a step durably, and read it."""
        self._replace(step, content)
        snapshot = self.read(step)
        self.last = step
        return snapshot

    def _replace(
        self,
        step: int,
        content: bytes | Iterable[bytes | memoryview],
        at_end: Callable[[], tuple[int, bytes]] | None = None,
    ) -> None:
        with system_errors_as(
            OutputError,
            self.path(step),
            expected="a file that can be written and synced",
            remedy="check the path and its disk",
            afterwards="the run resumes from the snapshot before",
        ):
            make_directory(self._directory)
            replace_file(self.path(step), content, at_end=at_end)
            self.written += self.path(step).stat().st_size

    def read(self, step: int) -> Snapshot:
        """Read and check the snapshot of a step. Its tensors are views of the mapped file."""
        path = self.path(step)
        try:
            snapshot, chain = _from_file(path)
        except FileNotFoundError as error:
            steps = ", ".join(map(str, self.steps))
            found = f"no snapshot of step {step} ({reason(error)})"
            expected = "one of the steps that have a snapshot"
            remedy = (
                "pass one of these steps, with --at on the command line; a first-order run keeps "
                "no others"
            )
            remedy = remedy if steps else "resume the run to its end, which writes its model"
            raise malformed(path, found, f"{expected}: {steps or 'none'}", remedy=remedy) from error
        except OSError as error:
            raise system_error(
                CheckpointError,
                path,
                error,
                expected="a readable snapshot",
                remedy="check the path and its disk",
            ) from error
        if snapshot.step != step:
            raise _damaged_file(
                path, f"the snapshot of step {snapshot.step}", f"that of step {step}"
            )
        self._require_version(step, path.name)
        if self._chain(step) != chain:
            raise _damaged_file(path, "the snapshot of another run", "one of this run")
        return snapshot

    def newest(self) -> Snapshot | None:
        """Read the newest undamaged snapshot, with a warning for each damaged one that is newer."""
        steps = self.steps
        damages = []
        for step in reversed(steps):
            try:
                snapshot = self.read(step)
            except CheckpointError as error:
                damages.append(error)
                continue
            for damage in damages:
                warnings.warn(
                    f"{damage.where}: {damage.found}. The run resumes from the snapshot of step "
                    f"{step}, and repeats the "
                    "later steps with the same bits",
                    ZO2Warning,
                    stacklevel=2,
                )
            self.last = step
            return snapshot
        if damages:
            found = "; ".join(f"{Path(damage.where).name}: {damage.found}" for damage in damages)
            remedy = (
                "restore one from a backup, or remove these files to repeat the run from its start"
            )
            raise malformed(
                self._directory, found, "an undamaged snapshot", remedy=remedy
            ) from damages[0]
        return None

    def clear_partial(self) -> None:
        """Remove partial files of processes that were killed while writing."""
        with contextlib.suppress(OSError):
            for path in self._directory.glob(".snapshot-*.partial"):
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class LateTensor:
    """A tensor of a state that is in memory only while it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]  # called once, in the order of the state

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Parts:
    """The header and the bytes of the tensors, which are not copied, and then the digits of the
    checksum.
    """

    def __init__(self, snapshot: Snapshot, chain: int) -> None:
        self._tensors: dict[str, torch.Tensor | LateTensor] = {}
        state = _encoded(snapshot.state, "", self._tensors)
        contents = {"format": FORMAT, "step": snapshot.step, "chain": f"{chain:08x}"}
        text = json.dumps({**contents, "state": state}, separators=(",", ":"))
        entries = [
            (name, DTYPE_NAMES[value.dtype], value.shape, value.nbytes)
            for name, value in self._tensors.items()
        ]
        self._header = header_bytes({"sha256": "0" * 64, "zo2": text}, entries)
        assert self._header[8:].startswith(_BEGIN), "the digits are at a fixed offset"
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes | memoryview]:
        self._digest.update(self._header)
        yield self._header
        for value in self._tensors.values():
            tensor = value.read() if isinstance(value, LateTensor) else value
            if tensor.numel():
                content = byte_view(tensor)  # which does not keep the tensor alive
                self._digest.update(content)
                yield content

    def digits(self) -> tuple[int, bytes]:
        """Offset and digits of the checksum of what was iterated over."""
        return _DIGITS.start, self._digest.hexdigest().encode()


def _from_file(path: Path) -> tuple[Snapshot, int]:
    """Parse a file of ``_to_parts``, after comparing its checksum. Tensors are views of it."""
    with open_regular(path) as file:
        raw = file.read(_DIGITS.stop)
        digest = hashlib.sha256(raw[: _DIGITS.start] + b"0" * 64)
        if (
            len(raw) < _DIGITS.stop
            or hashlib.file_digest(file, lambda: digest).hexdigest().encode() != raw[_DIGITS]
        ):
            raise _damaged_file(
                path,
                "a damaged snapshot: its checksum does not match",
                "the bytes that were written",
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        with open_safetensors(path) as opened:
            contents = json.loads(opened.metadata()["zo2"])
        if contents["format"] != FORMAT:
            raise _damaged_file(
                path, f"a snapshot of format {contents['format']}", f"one of format {FORMAT}"
            )
        entries = parse_header(path).items()
        state = _decode_parts(
            contents["state"], {name: _view(mapped, entry) for name, entry in entries}
        )
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__} as state")
        return Snapshot(int(contents["step"]), state), int(contents["chain"], 16)
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise _damaged_file(
            path, f"not a snapshot of this format ({error})", "a file that a run wrote"
        ) from error


def _view(mapped: mmap.mmap, entry: TensorEntry) -> torch.Tensor:
    """A tensor of a mapped file. What is written into it stays in this process.

    ``safe_open.get_tensor`` makes such views, too, but by calls of Python code, after which an
    exception of a signal's handler is that of a damaged file.
    """
    dtype = DTYPES[entry.dtype]
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
    aligned = raw.clone() if entry.start % dtype.itemsize else raw
    return aligned.view(dtype).view(entry.shape)


def _encoded(value: object, name: str, tensors: dict[str, torch.Tensor | LateTensor]) -> object:
    """Convert a state to JSON, and collect its tensors under names made of their keys."""
    if isinstance(value, LateTensor):
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, torch.Tensor) and value.dtype in DTYPE_NAMES:
        assert name not in tensors, "names are unique"
        tensors[name] = value.detach().cpu().contiguous()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        items = value.items()
        return {
            _ITEMS: [
                [key, _encoded(inner, f"{name}.{key}" if name else str(key), tensors)]
                for key, inner in items
            ]
        }
    if isinstance(value, list | tuple):
        return [_encoded(inner, f"{name}.{index}", tensors) for index, inner in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptionError(
        "optimizer",
        found=f"{name}, a {type(value).__name__}, in its state",
        expected="tensors, numbers, strings and None, in mappings and lists",
        remedy="use an optimizer whose state a snapshot can store",
    )


def _decode_parts(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict) and _TENSOR in value:
        return tensors[value[_TENSOR]]
    if isinstance(value, dict):
        return {key: _decode_parts(inner, tensors) for key, inner in value[_ITEMS]}
    if isinstance(value, list):
        return [_decode_parts(inner, tensors) for inner in value]
    return value


def _damaged_file(path: Path, found: str, expected: str) -> CheckpointError:
    return malformed(path, found, expected, remedy="restore it from a backup")
