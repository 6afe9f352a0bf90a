"""Factors of ended periods on disk: a run is resumed from them, without drawing thousands of updates again.

Nothing depends on these files. Base and journal make the same numbers, bit for bit; they only take longer. Sums of a period
that has ended never change, so each parameter's are written once, as they end, and stay in memory nowhere else. They count
with the record that follows those of all parameters, and only if the journal has its checksum at the period's end and the
bytes have theirs. Whatever is damaged is told, dropped and replayed.

Trade-off: what factors take in memory they take on disk as well, a period at a time: float32 numbers, rank times the rows
of every matrix, and all vectors.
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
FORMAT = 1  # of the manifest


class FactorFile:
    """The sums of all parameters at the end of each period, as far as they were kept. One thread at a time uses it.

    Its files are locked while they are open for writing: from the beginning if they are there, else from the first period.

    Args:
        directory: Directory of the run; made with the first period that is kept.
        elements: How many float32 numbers each parameter's sums have, by its name.
        period: Steps of a period.
        journal: Journal of the run, begun.
        writes: Whether periods that end are kept.

    Raises:
        ScratchError: if another engine writes the files. If it begins to later, a warning says that nothing is kept here.
        JournalError: if the journal cannot be made durable, or is shorter than it was when a period was kept.
    """

    def __init__(self, directory: Path, elements: dict[str, int], *, period: int, journal: Journal, writes: bool) -> None:
        self._directory = directory.absolute()  # the process may change its own
        self._elements = elements
        self._period = period
        self._journal = journal
        self._writes = writes
        self._places = {name: at for at, name in enumerate(elements)}
        *offsets, self._size = accumulate((4 * count for count in elements.values()), initial=0)
        self._offsets = dict(zip(elements, offsets, strict=True))  # in a period's bytes
        self._ended: dict[int, dict[str, str]] = {}  # period -> checksums of the parameters that have ended it
        self._manifest: RecordFile | None = None  # open once a period is kept
        self._data: RangedFile | None = None  # open once a parameter has ended a period
        self._reading: RawIOBase | None = None  # open from the first read on
        self._records: list[Record] = []
        try:
            if writes and any(os.path.lexists(self._directory / name) for name in (DATA, MANIFEST)):
                self._try(self._lock)
            self._records = self._try(self._read_manifest) or []
        except BaseException:
            self.close()
            raise

    @property
    def periods(self) -> int:
        """How many are kept: the run's first ones."""
        return len(self._records)

    def read(self, spec: ParameterSpec, period: int) -> torch.Tensor | None:
        """Read a parameter's sums at the end of a period.

        Args:
            spec: The parameter.
            period: One of ``periods``.

        Returns:
            Flat, float32, on the CPU; None if they are damaged: then this and all later periods are not kept any more.
        """
        sums = torch.empty(self._elements[spec.name], dtype=torch.float32)
        try:
            self._read(spec, period, sums)
        except (OSError, EOFError) as error:
            self._tell(reason(error))
            is_passing = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)  # too many open files, say
            self._drop(period, on_disk=not is_passing)
            return None
        return sums

    def keep(self, spec: ParameterSpec, period: int, sums: torch.Tensor) -> None:
        """Write a parameter's sums at the end of a period, which is kept once all parameters have ended it.

        Args:
            spec: The parameter.
            period: From 0; none of ``periods``.
            sums: Float32, on any device.
        """
        if not self._writes:
            return
        try:
            self._write(spec.name, period, sums)
            while len(self._ended.get(self.periods, ())) == len(self._elements):
                self._count_in()
        except OSError as error:
            self._tell(reason(error))
            self._writes = False
            self._ended.clear()

    def close(self) -> None:
        """Close the files. May be called twice."""
        for file in (self._manifest, self._data, self._reading):
            if file is not None:
                file.close()
        self._manifest = self._data = self._reading = None

    def _lock(self) -> None:
        """Open the file of sums for writing. Its lock is that of the manifest, too."""
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
        """The records that count: the first ones, as long as each is of the next period and of this journal."""
        try:
            header, *records = RecordFile(self._directory / MANIFEST).loaded or [{}]
        except DamagedRecordError as error:
            self._tell(f"line {error.line}: {error}")
            return []
        if header != self._header():
            return []  # of another run
        counting: list[Record] = []
        for record in records:
            version = (len(counting) + 1) * self._period
            if record.get("version") != version:
                break
            chain = self._journal.chain(version)
            if chain is None:
                self._journal.require_version(version, str(self._directory / MANIFEST))
            checksums = record.get("xxh3")
            if record.get("chain") != chain or not isinstance(checksums, list) or len(checksums) != len(self._elements):
                break
            counting.append(record)
        return counting

    def _read(self, spec: ParameterSpec, period: int, sums: torch.Tensor) -> None:
        if self._reading is None:
            # Through the page cache, and ahead: small ranges of all periods are wanted, while the disk brings blocks.
            self._reading = open_regular(self._directory / DATA).detach()  # its buffer would be older than later writes
            os.posix_fadvise(self._reading.fileno(), 0, self.periods * self._size, os.POSIX_FADV_WILLNEED)
        view = byte_view(sums)
        self._reading.seek(period * self._size + self._offsets[spec.name])
        done = 0
        while done < len(view):
            if not (count := self._reading.readinto(view[done:])):
                raise EOFError(f"{DATA} ends in period {period}")
            done += count
        record = self._records[period]
        if record["xxh3"][self._places[spec.name]] != self._checksum(spec.name, record["version"], view):
            raise EOFError(f"damaged sums of {spec.name} in period {period}")

    def _write(self, name: str, period: int, sums: torch.Tensor) -> None:
        if self._data is None:
            make_directory(self._directory)
            self._data = RangedFile(self._directory / DATA, writable=True)
        on_host = sums.cpu().contiguous()  # waits for a device, once a period
        view = byte_view(on_host)
        self._data.write(period * self._size + self._offsets[name], view)
        self._ended.setdefault(period, {})[name] = self._checksum(name, (period + 1) * self._period, view)

    def _count_in(self) -> None:
        """Make the next period durable, and then write the record without which its bytes do not count."""
        period = self.periods
        version = (period + 1) * self._period
        if self._manifest is None:  # of the records that count, and no others
            self._replace_manifest()
            self._manifest = RecordFile(self._directory / MANIFEST)
        self._manifest.retract()
        chain = self._journal.chain(version)  # on return the journal is durable as far
        assert chain is not None, "a period has ended once its updates are in the journal"
        assert self._data is not None
        self._data.sync()
        checksums, end = self._ended[period], self._manifest.end
        record = {"version": version, "chain": chain, "xxh3": [checksums[name] for name in self._elements]}
        try:
            self._manifest.append(record)
            self._records.append(record)
        except BaseException:  # also an interrupt: manifest and memory agree on how many periods count
            if self.periods == period:
                with contextlib.suppress(OSError):
                    self._manifest.retract(end)
            raise
        del self._ended[period]

    def _replace_manifest(self) -> None:
        lines = [to_line(record) for record in [self._header(), *self._records]]
        replace_file(self._directory / MANIFEST, b"".join(lines))

    def _drop(self, period: int, *, on_disk: bool) -> None:
        """Forget a period and those after it, and keep no other: parameters that had read them will not end them again."""
        del self._records[period:]
        if self._writes:
            self._writes = False
            self._ended.clear()
            if on_disk and self._data is not None:  # while the lock is held
                self._try(self._replace_manifest)
            self.close()

    def _header(self) -> Record:
        return {"format": FORMAT, "elements": list(self._elements.values()), "chain": self._journal.chain(0)}

    def _checksum(self, name: str, version: int, view: memoryview) -> str:
        """Checksum of a parameter's bytes and of its name."""
        return combined_checksum([self._places[name], version, chunk_checksum(view)])

    def _try(self, action: Callable[[], Any]) -> Any:
        """What an action gives; None, after a warning, if the disk does not let it: the run needs none of it."""
        try:
            return action()
        except (OSError, EOFError) as error:
            self._tell(reason(error))
            return None

    def _tell(self, found: str) -> None:
        warnings.warn(
            f"{self._directory / MANIFEST}: {found}. What ended periods have learned is replayed from the journal, "
            "with the same bits",
            ZO2Warning,
            stacklevel=2,
        )


def sum_elements(parameters: Sequence[ParameterSpec], rank: int) -> dict[str, int]:
    """How many numbers the sums of a period have: of a matrix (m, n) m times the rank, of a vector its own."""
    return {spec.name: spec.shape[0] * rank if len(spec.shape) == 2 else spec.numel for spec in parameters}
