"""Factors of ended periods on disk, from which a run resumes without drawing thousands of updates again.

The files are a cache: replaying the journal on the base gives the same bits, but takes longer. The sums of an ended period
never change, so those of each parameter are written once. A period counts once the manifest has its record, which follows
the sums of all parameters, and only if the journal's checksum at its end and the checksums of its bytes match. Damaged
periods are dropped with a warning and replayed.

Trade-off: factors take as much disk as memory: for each period float32 numbers, rank times the rows of every matrix, and all
vectors.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from io import RawIOBase
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from zo2core.errors import ScratchError, ZO2Warning, reason
from zo2core.io.checksum import chunk_checksum, combined_checksum
from zo2core.io.direct_file import RangedFile, byte_view
from zo2core.io.durable import LockedFileError, make_directory, open_regular, replace_file
from zo2core.io.record_log import DamagedRecordError, Record, RecordFile, to_line
from zo2core.journal import Journal
from zo2core.types import ParameterSpec

DATA = "factors.bin"
MANIFEST = "factors.jsonl"
FORMAT = 1  # version of the manifest


class FactorFile:
    """The sums of all parameters at the end of each period on disk. Not thread-safe.

    The files are locked while they are open for writing: from the start if they exist, else from the first period.
    """

    def __init__(self, directory: Path, elements: dict[str, int], *, period: int, journal: Journal, writes: bool) -> None:
        self._directory = directory.absolute()  # the process may change its own
        self._elements = elements
        self._period = period
        self._journal = journal
        self._writes = writes
        self._positions = {name: position for position, name in enumerate(elements)}
        *offsets, self._size = accumulate((4 * count for count in elements.values()), initial=0)
        self._offsets = dict(zip(elements, offsets, strict=True))  # bytes from a period's start
        self._ended: dict[int, dict[str, str]] = {}  # checksums of written sums by parameter, for periods without a record
        self._manifest: RecordFile | None = None  # open for writing from the first record on
        self._data: RangedFile | None = None  # open for writing from the first sums on
        self._reading: RawIOBase | None = None  # open from the first read on
        self._records: list[Record] = []
        try:
            if writes and any(os.path.lexists(self._directory / name) for name in (DATA, MANIFEST)):
                self._try_or_warn(self._lock)
            self._records = self._try_or_warn(self._read_manifest) or []
        except BaseException:
            self.close()
            raise

    @property
    def periods(self) -> int:
        """Number of periods on disk, from the run's first one on."""
        return len(self._records)

    def read(self, spec: ParameterSpec, period: int) -> torch.Tensor | None:
        """Read a parameter's sums at the end of a period."""
        sums = torch.empty(self._elements[spec.name], dtype=torch.float32)
        try:
            self._read(spec, period, sums)
        except (OSError, EOFError) as error:
            self._warn(reason(error))
            is_temporary = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)  # as too many open files
            self._drop(period, on_disk=not is_temporary)
            return None
        return sums

    def keep(self, spec: ParameterSpec, period: int, sums: torch.Tensor) -> None:
        """Write a parameter's sums at the end of a period, which gets its record with the sums of the last parameter."""
        if not self._writes:
            return
        try:
            self._write(spec.name, period, sums)
            while len(self._ended.get(self.periods, ())) == len(self._elements):
                self._append_record()
        except OSError as error:
            self._warn(reason(error))
            self._writes = False
            self._ended.clear()

    def close(self) -> None:
        """Close the files. May be called twice."""
        for file in (self._manifest, self._data, self._reading):
            if file is not None:
                file.close()
        self._manifest = self._data = self._reading = None

    def _lock(self) -> None:
        """Open the file of sums for writing. Its lock covers the manifest."""
        try:
            self._data = RangedFile(self._directory / DATA, writable=True)
        except LockedFileError as error:
            raise ScratchError(
                self._directory / DATA,
                found=reason(error),
                expected="a directory for ended periods that no other engine uses",
                remedy="close that engine, wait until its process has ended, or choose another directory",
            ) from error

    def _read_manifest(self) -> list[Record]:
        """Read the valid records: those up to the first that is not of the next period and of this journal."""
        try:
            header, *records = RecordFile(self._directory / MANIFEST).loaded or [{}]
        except DamagedRecordError as error:
            self._warn(f"line {error.line}: {error}")
            return []
        if header != self._header():
            return []  # the files of another run
        valid: list[Record] = []
        for record in records:
            version = (len(valid) + 1) * self._period
            if record.get("version") != version:
                break
            chain = self._journal.chain(version)
            if chain is None:
                self._journal.require_version(version, str(self._directory / MANIFEST))
            checksums = record.get("xxh3")
            if record.get("chain") != chain or not isinstance(checksums, list) or len(checksums) != len(self._elements):
                break
            valid.append(record)
        return valid

    def _read(self, spec: ParameterSpec, period: int, sums: torch.Tensor) -> None:
        if self._reading is None:
            # Through the page cache, and ahead: small ranges of all periods are read while the disk reads blocks.
            self._reading = open_regular(self._directory / DATA).detach()  # unbuffered: a buffer would miss later writes
            os.posix_fadvise(self._reading.fileno(), 0, self.periods * self._size, os.POSIX_FADV_WILLNEED)
        view = byte_view(sums)
        self._reading.seek(period * self._size + self._offsets[spec.name])
        done = 0
        while done < len(view):
            if not (count := self._reading.readinto(view[done:])):
                raise EOFError(f"{DATA} ends in period {period}")
            done += count
        record = self._records[period]
        if record["xxh3"][self._positions[spec.name]] != self._checksum(spec.name, record["version"], view):
            raise EOFError(f"damaged sums of {spec.name} in period {period}")

    def _write(self, name: str, period: int, sums: torch.Tensor) -> None:
        if self._data is None:
            make_directory(self._directory)
            self._data = RangedFile(self._directory / DATA, writable=True)
        on_host = sums.cpu().contiguous()  # waits for a device, once a period
        view = byte_view(on_host)
        self._data.write(period * self._size + self._offsets[name], view)
        self._ended.setdefault(period, {})[name] = self._checksum(name, (period + 1) * self._period, view)

    def _append_record(self) -> None:
        """Make the next period's sums durable, and then append its record."""
        period = self.periods
        version = (period + 1) * self._period
        if self._manifest is None:  # without records that are not valid
            self._replace_manifest()
            self._manifest = RecordFile(self._directory / MANIFEST)
        self._manifest.retract()
        chain = self._journal.chain(version)  # makes the journal durable up to there
        assert chain is not None, "the updates of an ended period are in the journal"
        assert self._data is not None
        self._data.sync()
        checksums, end = self._ended[period], self._manifest.end
        record = {"version": version, "chain": chain, "xxh3": [checksums[name] for name in self._elements]}
        try:
            self._manifest.append(record)
            self._records.append(record)
        except BaseException:  # also an interrupt: manifest and memory agree on the periods
            if self.periods == period:
                with contextlib.suppress(OSError):
                    self._manifest.retract(end)
            raise
        del self._ended[period]

    def _replace_manifest(self) -> None:
        lines = [to_line(record) for record in [self._header(), *self._records]]
        replace_file(self._directory / MANIFEST, b"".join(lines))

    def _drop(self, period: int, *, on_disk: bool) -> None:
        """Drop a period and those after it, and write no more: parameters that read them already will not end them again."""
        del self._records[period:]
        if self._writes:
            self._writes = False
            self._ended.clear()
            if on_disk and self._data is not None:  # while the lock is held
                self._try_or_warn(self._replace_manifest)
            self.close()

    def _header(self) -> Record:
        return {"format": FORMAT, "elements": list(self._elements.values()), "chain": self._journal.chain(0)}

    def _checksum(self, name: str, version: int, view: memoryview) -> str:
        """Checksum of a parameter's position, version and bytes."""
        return combined_checksum([self._positions[name], version, chunk_checksum(view)])

    def _try_or_warn(self, action: Callable[[], Any]) -> Any:
        """Return an action's result; None, with a warning, if the disk fails: the run does not need the files."""
        try:
            return action()
        except (OSError, EOFError) as error:
            self._warn(reason(error))
            return None

    def _warn(self, found: str) -> None:
        warnings.warn(
            f"{self._directory / MANIFEST}: {found}. The updates of ended periods are replayed from the journal, "
            "with the same bits",
            ZO2Warning,
            stacklevel=2,
        )


def sum_elements(parameters: Sequence[ParameterSpec], rank: int) -> dict[str, int]:
    """Number of a period's sums by parameter: m times the rank for a matrix (m, n), n for a vector (n,)."""
    return {spec.name: spec.shape[0] * rank if len(spec.shape) == 2 else spec.numel for spec in parameters}
