"""The journal: an append-only list of updates. With the base checkpoint it is the weights of every step.

On disk it is a file of checksummed records (``io/record_log.py``): the first is the header (format version, what the run was
made of), each further one an update. Floats are written so that reading gives the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zo2core.errors import JournalError, ZO2Error, reason
from zo2core.io.record_log import DamagedRecordError, Record, RecordFile, to_line
from zo2core.types import Evaluation, ParameterSpec, Update

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
        self._name = "journal" if path is None else str(path)
        self._header: Header | None = None
        self._updates: list[Update] = []
        self._chain: list[int] = [0]  # version -> checksum over header and updates up to it
        self._file = None if path is None else self._open(Path(path))

    @property
    def header(self) -> Header | None:
        """What the run was made of. None before it began."""
        return self._header

    @property
    def updates(self) -> Sequence[Update]:
        """All updates so far, a live view."""
        return self._updates

    def begin(self, header: Header) -> None:
        """Write the header of a new journal, or check that an existing one belongs to the same run.

        Args:
            header: JSON values only. A key with the value None says nothing: it fits whatever the journal has.

        Raises:
            JournalError: if the journal was begun with another header (each difference is spelled out), or the file cannot
                be written.
        """
        header = {"format": FORMAT, **json.loads(json.dumps(header, allow_nan=False))}
        if self._header is None:
            self._write(header)
            self._take_header(header)
            return
        written, wanted = _leaves(self._header), _leaves({key: value for key, value in header.items() if value is not None})
        keys = [key for key in sorted({*written, *wanted}) if written.get(key) != wanted.get(key)]
        keys = [key for key in keys if key.split(".")[0] in header]
        keys = [key for key in keys if header[key.split(".")[0]] is not None]
        if keys:
            raise JournalError(
                self._name,
                found="; ".join(f"{key} {written.get(key)!r}" for key in keys),
                expected="; ".join(f"{key} {wanted.get(key)!r}" for key in keys),
                remedy="continue with the base checkpoint and options the journal was begun with, or begin a new one",
            )

    def append(self, update: Update) -> None:
        """Add the next update; on return it is durable if the journal is a file.

        Raises:
            JournalError: if the file cannot be written. The journal stays as it was.
        """
        assert update.step == len(self._updates), "updates are appended in order"
        record = _encode(update)
        _decode(record)  # refuses what could not be read back, before anything is written
        self._write(record)
        self._take_update(record)

    def until(self, step: int) -> Journal:
        """Copy the run's first steps into a journal in memory.

        Raises:
            JournalError: if the run is shorter.
        """
        if not 0 <= step <= len(self._updates):
            raise JournalError(
                self._name,
                found=f"{len(self._updates)} steps",
                expected=f"at least {step}",
                remedy=f"choose a step from 0 to {len(self._updates)}",
            )
        copy = Journal()
        copy._header = self._header
        copy._updates = self._updates[:step]
        copy._chain = self._chain[: step + 1]
        return copy

    def chain(self, version: int) -> int | None:
        """Return a checksum over header and updates 0..version-1. It tells whether bytes of a version belong to this run.

        Asking makes the journal durable as far as it goes: bytes of a version may be written once its checksum is known.

        Returns:
            The checksum, or None if the journal is shorter.

        Raises:
            JournalError: if an existing file cannot be synced.
        """
        if self._file is not None:
            try:
                self._file.settle()
            except OSError as error:
                raise JournalError(
                    self._name,
                    found=reason(error),
                    expected="a file that can be synced",
                    remedy="mend the disk; blocks are written back only after the journal",
                ) from error
        return self._chain[version] if 0 <= version < len(self._chain) else None

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            self._file.close()

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            self._file.append(record)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.retract()  # a record that is there but not synced would count for a resumed run
            raise JournalError(
                self._name,
                found=reason(error),
                expected="a file that can be written and synced",
                remedy="free space or mend the disk; the step was not taken and can be repeated",
            ) from error

    def _open(self, path: Path) -> RecordFile:
        number = 0
        try:
            file = RecordFile(path)
            for number, record in enumerate(file.loaded, start=1):
                if number == 1:
                    if record["format"] != FORMAT:
                        raise ValueError(f"format {record['format']!r}")
                    self._take_header(record)
                else:
                    self._take_update(record)
        except OSError as error:
            raise JournalError(path, found=reason(error), expected="a readable journal", remedy="check the path") from error
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, ZO2Error) as error:
            line = error.line if isinstance(error, DamagedRecordError) else number
            raise JournalError(
                f"{path}, line {line}",
                found=f"a damaged record ({error})",
                expected=f"record {line - 1} of a journal of format {FORMAT}",
                remedy="restore the journal from a copy; what follows the damage cannot be trusted",
            ) from error
        file.loaded.clear()
        return file

    def _take_header(self, header: Record) -> None:
        self._header = header
        self._chain = [zlib.crc32(to_line(header))]

    def _take_update(self, record: Record) -> None:
        update = _decode(record)
        if update.step != len(self._updates):
            raise ValueError(f"step {update.step} instead of {len(self._updates)}")
        self._updates.append(update)
        self._chain.append(zlib.crc32(to_line(record), self._chain[-1]))


def _leaves(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects, so that it can be told what differs."""
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        leaves |= _leaves(item, f"{prefix}{key}.") if isinstance(item, dict) else {prefix + key: item}
    return leaves


def _encode(update: Update) -> dict[str, Any]:
    return {
        "step": update.step,
        "evaluations": [[int(seed), float(shift)] for seed, shift in update.evaluations],
        "seeds": [int(seed) for seed in update.seeds],
        "projected_grads": [float(grad) for grad in update.projected_grads],
        "lr": float(update.lr),
        "zo_eps": float(update.zo_eps),
        "weight_decay": float(update.weight_decay),
        "perturb_in_place": bool(update.perturb_in_place),
        "losses": [float(loss) for loss in update.losses],
    }


def digest(parameters: Iterable[ParameterSpec]) -> str:
    """Return a checksum of a model's parameters: of names, shapes, dtypes, places, and of which of them decay."""
    listed = [[spec.name, list(spec.shape), str(spec.dtype), spec.index, spec.decays] for spec in parameters]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


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
