r"""The journal: an append-only list of updates. With the base checkpoint it is the weights of every step.

File format: one line a record, ``CRC32 JSON\n``: eight hexadecimal digits over the JSON's bytes, a space, the JSON, UTF-8.
The first line is the header (format version, what the run was made of), each further line one update. Floats are written
so that reading gives the same bits. A record counts once its line is on disk whole; a torn last line is dropped.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zo2core.errors import JournalError, ZO2Error
from zo2core.types import Evaluation, Update

FORMAT = 1

Header = Mapping[str, Any]


class Journal:
    """Updates 0, 1, 2, ... of one run, in memory and, given a path, on disk as well.

    Args:
        path: File to continue, or to create with the first record. None keeps the journal in memory.

    Raises:
        JournalError: if the file exists and cannot be read, or is damaged elsewhere than in a torn last record.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._header: Header | None = None
        self._updates: list[Update] = []
        self._descriptor: int | None = None
        self._end = 0  # bytes of whole records
        if self._path is not None and self._path.exists():
            self._load(self._path)

    @property
    def header(self) -> Header | None:
        """What the run was made of; None before it began."""
        return self._header

    @property
    def updates(self) -> Sequence[Update]:
        """All updates so far, a live view."""
        return self._updates

    def begin(self, header: Header) -> None:
        """Write the header of a new journal, or check that an existing one belongs to the same run.

        Args:
            header: JSON values only.

        Raises:
            JournalError: if the journal was begun with another header (each difference is spelled out), or the file cannot
                be written.
        """
        header = {"format": FORMAT, **json.loads(json.dumps(header, allow_nan=False))}
        if self._header is None:
            self._write(header)
            self._header = header
        elif dict(self._header) != header:
            keys = [key for key in sorted({*self._header, *header}) if self._header.get(key) != header.get(key)]
            raise JournalError(
                self._name,
                found="; ".join(f"{key} {self._header.get(key)!r}" for key in keys),
                expected="; ".join(f"{key} {header.get(key)!r}" for key in keys),
                remedy="continue with the base checkpoint and options the journal was begun with, or begin a new one",
            )

    def append(self, update: Update) -> None:
        """Add the next update; on return it is durable if the journal is a file.

        Raises:
            JournalError: if the file cannot be written. The journal stays as it was.
        """
        assert update.step == len(self._updates), "updates are appended in order"
        self._write(_encode(update))
        self._updates.append(update)

    def close(self) -> None:
        """Close the file. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    @property
    def _name(self) -> str:
        return "journal" if self._path is None else str(self._path)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        line = _to_line(record)
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._descriptor, self._end)  # drops a torn record of this or an earlier attempt
            done = 0
            while done < len(line):
                done += os.pwrite(self._descriptor, line[done:], self._end + done)
            os.fsync(self._descriptor)
        except OSError as error:
            raise JournalError(
                self._path,
                found=error.strerror or str(error),
                expected="a file that can be written and synced",
                remedy="free space or mend the disk; the step was not taken and can be repeated",
            ) from error
        self._end += len(line)

    def _load(self, path: Path) -> None:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise JournalError(
                path, found=error.strerror or str(error), expected="a readable journal", remedy="check the path"
            ) from error
        lines = raw.split(b"\n")
        torn = lines.pop()  # empty if the file ends with a whole line
        for number, line in enumerate(lines, start=1):
            try:
                self._take(_from_line(line))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError, ZO2Error) as error:
                if number == len(lines) and not torn and not _checksum_holds(line):
                    break
                raise JournalError(
                    f"{path}, line {number}",
                    found=f"a damaged record ({error})",
                    expected=f"record {number - 1} of a journal of format {FORMAT}",
                    remedy="restore the journal from a copy; what follows the damage cannot be trusted",
                ) from error
            self._end += len(line) + 1

    def _take(self, record: Mapping[str, Any]) -> None:
        if self._header is None:
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']!r}")
            self._header = record
            return
        update = _decode(record)
        if update.step != len(self._updates):
            raise ValueError(f"step {update.step} instead of {len(self._updates)}")
        self._updates.append(update)


def _to_line(record: Mapping[str, Any]) -> bytes:
    raw = json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(raw), raw)


def _checksum_holds(line: bytes) -> bool:
    return line[:9] == b"%08x " % zlib.crc32(line[9:])


def _from_line(line: bytes) -> dict[str, Any]:
    if not _checksum_holds(line):
        raise ValueError("checksum does not hold")
    record = json.loads(line[9:])
    if not isinstance(record, dict):
        raise TypeError(f"a {type(record).__name__}")
    return record


def _encode(update: Update) -> dict[str, Any]:
    return {
        "step": update.step,
        "evaluations": [list(evaluation) for evaluation in update.evaluations],
        "seeds": list(update.seeds),
        "projected_grads": list(update.projected_grads),
        "lr": update.lr,
        "zo_eps": update.zo_eps,
        "weight_decay": update.weight_decay,
        "perturb_in_place": update.perturb_in_place,
        "losses": list(update.losses),
    }


def _decode(record: Mapping[str, Any]) -> Update:
    update = Update(
        step=_integer(record["step"]),
        evaluations=tuple(Evaluation(_integer(seed), _real(shift)).validated() for seed, shift in record["evaluations"]),
        seeds=tuple(Evaluation(_integer(seed), 0.0).validated().seed for seed in record["seeds"]),
        projected_grads=tuple(_real(value) for value in record["projected_grads"]),
        lr=_real(record["lr"]),
        zo_eps=_real(record["zo_eps"]),
        weight_decay=_real(record["weight_decay"]),
        perturb_in_place=_boolean(record["perturb_in_place"]),
        losses=tuple(_real(value) for value in record["losses"]),
    )
    if len(update.seeds) != len(update.projected_grads):
        raise ValueError(f"{len(update.seeds)} seeds and {len(update.projected_grads)} projected gradients")
    return update


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _real(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise TypeError(f"{value!r} is not a finite number")
    return float(value)  # type: ignore[arg-type]


def _boolean(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is not a boolean")
    return value
