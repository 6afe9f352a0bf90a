"""Snapshots of a first-order run: all that its later steps depend on besides the base, one file each.

A gradient is no scalar, so a step cannot be replayed from the journal. A run that goes on takes the last snapshot and
repeats the steps since, to the same bits. A snapshot is a safetensors file, so that other programs can read its tensors.
What is no tensor stands as JSON in the header's ``__metadata__``, and before it the SHA-256 of the whole file, in which
these 64 digits count as zeros. A file appears whole and durable under its name, or not at all. It has the journal's
checksum at its step: a snapshot of another run does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zo2core.errors import CheckpointError, OptionError, OutputError, ZO2Warning, reason
from zo2core.io.direct_file import byte_view
from zo2core.io.durable import make_directory, read_regular, replace_file

FORMAT = 1

_NAME = re.compile(r"snapshot-(0|[1-9]\d{0,17})\.safetensors")
_BEGIN = b'{"__metadata__":{"sha256":"'  # of the header; the digits follow
_DIGITS = slice(8 + len(_BEGIN), 8 + len(_BEGIN) + 64)  # of the file
_TENSOR = "tensor"  # key of an object that stands for a tensor, in the JSON of a state
_ITEMS = "items"  # key of an object that stands for a mapping: its keys may be numbers
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Snapshot(NamedTuple):
    """What a run goes on from."""

    step: int  # number of steps taken
    state: Mapping[str, Any]  # of an engine: nested mappings and lists of tensors, numbers, strings and None


class Snapshots:
    """The snapshots in a run's directory. One engine writes them; others may read meanwhile.

    Args:
        directory: Directory of the run; made with the first snapshot.
        chain: The checksum of the run's journal at a version, or None if the journal is shorter. Asking makes the journal
            durable.
        require_version: Refuses a journal that is shorter than what a file, which is named, knows of.
    """

    def __init__(
        self, directory: Path, chain: Callable[[int], int | None], require_version: Callable[[int, str], None]
    ) -> None:
        self._directory = directory
        self._chain = chain
        self._require_version = require_version
        self._last: int | None = None  # step of the last one that was written or read here

    def path(self, step: int) -> Path:
        """Where the snapshot of a step is, if there is one."""
        return self._directory / f"snapshot-{step}.safetensors"

    @property
    def last(self) -> int | None:
        """The step of the last snapshot that was written or read here; None: there was none."""
        return self._last

    @property
    def steps(self) -> list[int]:
        """The steps that have a file, ascending; whether it is whole is seen when it is read."""
        try:
            names = [path.name for path in self._directory.iterdir()]
        except OSError:
            return []
        return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found is not None)

    def write(self, snapshot: Snapshot, *, keep: Collection[int] = ()) -> None:
        """Write a snapshot, durably; of the others only the one before it is kept, to fall back on.

        Args:
            snapshot: Snapshot of a step that the journal has.
            keep: Steps whose snapshots are kept as well.

        Raises:
            OutputError: if it cannot be written.
            OptionError: if the state holds something that no snapshot can.
        """
        step, path = snapshot.step, self.path(snapshot.step)
        chain = self._chain(step)
        assert chain is not None, "the step was taken"
        try:
            make_directory(self._directory)
            replace_file(path, _to_bytes(snapshot, chain))
        except OSError as error:
            raise OutputError(
                path,
                found=reason(error),
                expected="a file that can be written and synced",
                remedy="free space or mend the disk; the run goes on from the snapshot before",
            ) from error
        kept = {step, self._last, *keep}
        self._last = step
        for other in self.steps:
            if other not in kept:
                self.path(other).unlink(missing_ok=True)

    def read(self, step: int) -> Snapshot:
        """The snapshot of a step, checked.

        Raises:
            CheckpointError: if there is none, it is damaged, or it is of another run.
            JournalError: if the journal has lost the step.
        """
        path = self.path(step)
        try:
            raw = read_regular(path)
        except OSError as error:
            listed = ", ".join(map(str, self.steps)) or "none"
            raise CheckpointError(
                path,
                found=f"no snapshot of step {step} ({reason(error)})",
                expected=f"one of the steps that have a snapshot: {listed}",
                remedy="name one of these; other steps of a first-order run are not kept",
            ) from error
        snapshot, chain = _from_bytes(path, raw)
        if snapshot.step != step:
            raise _damaged(path, f"the snapshot of step {snapshot.step}", f"that of step {step}")
        self._require_version(step, path.name)
        if self._chain(step) != chain:
            raise _damaged(path, "the snapshot of another run", "one of this run")
        return snapshot

    def newest(self) -> Snapshot | None:
        """The last snapshot that is whole; one that is not is passed over, with a warning.

        Returns:
            It; None if no snapshot was taken yet: the run then goes on from its beginning.

        Raises:
            CheckpointError: if there are some, and none is whole.
            JournalError: if the journal has lost the step of one.
        """
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
                    f"{damage.where}: {damage.found}. The run goes on from the snapshot of step {step}, and repeats the "
                    "steps since, with the same bits",
                    ZO2Warning,
                    stacklevel=2,
                )
            self._last = step
            return snapshot
        if damages:
            raise CheckpointError(
                self._directory,
                found="; ".join(f"{Path(damage.where).name}: {damage.found}" for damage in damages),
                expected="a snapshot that is whole",
                remedy="restore one from a copy, or remove these files to repeat the run from its beginning",
            ) from damages[0]
        return None

    def clear_partial(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        with contextlib.suppress(OSError):
            for path in self._directory.glob("snapshot-*.partial"):
                path.unlink(missing_ok=True)


def _to_bytes(snapshot: Snapshot, chain: int) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    state = _encoded(snapshot.state, "", tensors)
    told = {"format": FORMAT, "step": snapshot.step, "chain": f"{chain:08x}", "state": state}
    header: dict[str, object] = {"__metadata__": {"sha256": "0" * 64, "zo2": json.dumps(told, separators=(",", ":"))}}
    end, data = 0, []
    for name, tensor in tensors.items():
        content = bytes(byte_view(tensor)) if tensor.numel() else b""
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(content)],
        }
        data.append(content)
        end += len(content)
    raw = json.dumps(header, separators=(",", ":")).encode()
    assert raw.startswith(_BEGIN), "the digits stand at a fixed place"
    raw += b" " * (-len(raw) % 8)  # the data begins at a multiple of 8, as the format asks of writers
    whole = bytearray().join([struct.pack("<Q", len(raw)), raw, *data])
    whole[_DIGITS] = hashlib.sha256(whole).hexdigest().encode()
    return bytes(whole)


def _from_bytes(path: Path, raw: bytes) -> tuple[Snapshot, int]:
    """Undo ``_to_bytes``; the bytes are compared with their checksum before anything in them is believed."""
    zeroed = bytearray(raw)
    zeroed[_DIGITS] = b"0" * 64
    if len(raw) < _DIGITS.stop or hashlib.sha256(zeroed).hexdigest().encode() != raw[_DIGITS]:
        raise _damaged(path, "a damaged snapshot: its checksum does not hold", "the bytes that were written")
    try:
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        told = json.loads(header.pop("__metadata__")["zo2"])
        if told["format"] != FORMAT:
            raise _damaged(path, f"a snapshot of format {told['format']}", f"one of format {FORMAT}")
        tensors = {name: _tensor(raw, 8 + length, entry) for name, entry in header.items()}
        return Snapshot(int(told["step"]), _decoded(told["state"], tensors)), int(told["chain"], 16)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError, struct.error) as error:
        raise _damaged(path, f"no snapshot of this format ({error})", "a file that a run has written") from error


def _tensor(raw: bytes, data_start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    content = bytearray(raw[data_start + begin : data_start + end])
    dtype = _DTYPES[entry["dtype"]]
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.view(entry["shape"])


def _encoded(value: object, name: str, tensors: dict[str, torch.Tensor]) -> object:
    """A state as JSON, whose tensors are put aside under names that say where they stand.

    Raises:
        OptionError: if it holds something else.
    """
    if isinstance(value, torch.Tensor) and value.dtype in _NAMES:
        assert name not in tensors, "names say where tensors stand"
        tensors[name] = value.detach().cpu().contiguous()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        items = value.items()
        return {_ITEMS: [[key, _encoded(inner, f"{name}.{key}" if name else str(key), tensors)] for key, inner in items]}
    if isinstance(value, list | tuple):
        return [_encoded(inner, f"{name}.{place}", tensors) for place, inner in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptionError(
        "optimizer",
        found=f"{name}, a {type(value).__name__}, in its state",
        expected="tensors, numbers, strings and None, in mappings and lists",
        remedy="use an optimizer whose state a snapshot can hold",
    )


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict) and _TENSOR in value:
        return tensors[value[_TENSOR]]
    if isinstance(value, dict):
        return {key: _decoded(inner, tensors) for key, inner in value[_ITEMS]}
    if isinstance(value, list):
        return [_decoded(inner, tensors) for inner in value]
    return value


def _damaged(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(path, found=found, expected=expected, remedy="restore it from a copy")
