r"""An append-only file of records, one JSON object a line, whose last member is a checksum: ``{...,"crc32":"89abcdef"}\n``.

The checksum is the CRC-32 of all bytes of the line before the comma in front of it. A record counts once its whole line is
on disk; a torn last line is dropped, damage anywhere else is an error.

Files of earlier versions have lines ``CRC32 JSON\n``, with the checksum of the JSON's bytes. They are read as well: the
first byte of a line tells its format. Records appended to such a file are in the present format.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zo2core.io.durable import (
    DisturbedFileError,
    close_locked,
    make_directory,
    open_locked,
    open_regular,
    require_same_file,
    sync_path,
)

Record = Mapping[str, Any]

CHECKSUM = "crc32"  # name of the checksum's member, which records may not use
_MEMBER = b',"%s":"%%08x"}' % CHECKSUM.encode()
_MEMBER_BYTES = len(_MEMBER % 0)


class DamagedRecordError(ValueError):
    """A line that is not a record, nor the torn end of the file."""

    def __init__(self, line: int, reason: str) -> None:
        self.line = line  # line number, from 1
        super().__init__(reason)


class RecordFile:
    """Records on disk. Reading takes no lock; a writer holds one from ``lock`` or the first record on."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()  # the process may change its directory
        self._descriptor: int | None = None
        self._end = 0  # bytes of whole records
        self._size: int | None = 0  # bytes of the file; None where a record, even a whole one, may follow ``_end``
        self._identity: tuple[int, int] | None = None  # device and inode of the file; None: it did not exist
        self._created = False  # this object created the file
        self._settled = False  # the file's name and the records of earlier processes are durable
        self.loaded: list[Record] = []  # records of the file when it was opened
        self.torn = b""  # bytes after the last whole record then
        with contextlib.suppress(FileNotFoundError), open_regular(self._path) as file:
            self._identity = _identity(os.fstat(file.fileno()))
            self._load(file.read())

    def lock(self) -> None:
        """Open the file for writing, if it exists; no other process can until ``close``."""
        if self._identity is not None:
            self._require_undisturbed(self._open_for_writing())

    def append(
        self, record: Record, count: Callable[[], object] = lambda: None, is_counted: Callable[[], bool] = lambda: True
    ) -> None:
        """Write a record, and count it in memory; on return it is durable.

        Args:
            record: The record.
            count: Adds the record to what this process has in memory.
            is_counted: Whether ``count`` has had its effect. After any exception, also an interrupt, the record is removed
                from the file if it has not: file and memory both have the record, or neither has.
        """
        end = self._end
        try:
            self._write(record)
            count()
        except BaseException:
            if not is_counted():
                with contextlib.suppress(OSError):
                    self.retract(end)
            raise

    def _write(self, record: Record) -> None:
        line = to_line(record)
        descriptor = self._open_for_writing()
        self._require_undisturbed(descriptor)
        self._size = None
        os.ftruncate(descriptor, self._end)  # drops a torn record
        done = 0
        while done < len(line):
            done += os.pwrite(descriptor, line[done:], self._end + done)
        os.fsync(descriptor)
        if not self._settled:
            sync_path(self._path.parent)
        self._size = self._end + len(line)
        self._require_undisturbed(descriptor)  # a record in a file without a name would be lost
        self._settled = True
        self._end = self._size

    def settle(self) -> None:
        """Make the loaded records durable: the process that wrote the last one may have been killed before its sync."""
        if not self._settled and self._end > 0:
            sync_path(self._path)
            sync_path(self._path.parent)
            self._settled = True

    def retract(self, end: int | None = None) -> None:
        """Remove the last record from the file."""
        end = self._end if end is None else end
        if end != self._end:
            self._end, self._size = end, None  # the next append overwrites it in any case
        if self._descriptor is not None and self._created and end == 0:
            self.remove()
        elif self._descriptor is not None and self._size != end:
            os.ftruncate(self._descriptor, end)
            os.fsync(self._descriptor)
            self._size = end

    def remove(self) -> None:
        """Remove the file, unless another one is at its path; the next record creates a new one."""
        if self._descriptor is not None:
            self._identity = _identity(os.fstat(self._descriptor))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if _identity(os.stat(self._path)) == self._identity:
                self._path.unlink()
                sync_path(self._path.parent)
        self._end, self._size, self._identity, self._settled = 0, 0, None, False
        self.close()  # only now: the lock keeps others out until the name is gone

    def close(self) -> None:
        """Close the file, which ends its lock. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            close_locked(descriptor)

    def _load(self, raw: bytes) -> None:
        self._size = len(raw)
        lines = raw.split(b"\n")
        torn = lines.pop()  # empty if the last line is whole
        for number, line in enumerate(lines, start=1):
            try:
                self.loaded.append(from_line(line))
            except (ValueError, RecursionError) as error:
                if number == len(lines) and not torn and _without_checksum(line) is None:
                    break
                raise DamagedRecordError(number, str(error)) from error
            self._end += len(line) + 1
        self.torn = raw[self._end :]

    def _open_for_writing(self) -> int:
        """Open the file and lock it: two writers would truncate each other's records."""
        if self._descriptor is None and self._identity is None:
            make_directory(self._path.parent)
            self._created = True
            try:
                self._descriptor = open_locked(self._path, os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                self._created = False
        if self._descriptor is None:
            try:
                self._descriptor = open_locked(self._path)
            except FileNotFoundError as error:
                raise DisturbedFileError from error
        if self._identity is None:
            self._identity = _identity(os.fstat(self._descriptor))
        return self._descriptor

    def _require_undisturbed(self, descriptor: int) -> None:
        """Raise if the path leads to another file, or the file's size is not the one that this object left."""
        require_same_file(descriptor, self._path)
        status = os.fstat(descriptor)
        if _identity(status) != self._identity:
            raise DisturbedFileError
        if self._size is not None and status.st_size != self._size:
            raise DisturbedFileError(f"{status.st_size} bytes, where this process left {self._size}")


def to_json(record: Record) -> bytes:
    """A record as JSON, compact and in ASCII, without its checksum."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode()


def to_line(record: Record) -> bytes:
    """A record's bytes in the file."""
    assert record, "the checksum follows another member"
    assert CHECKSUM not in record, "the checksum is added here"
    raw = to_json(record)[:-1]
    return raw + _MEMBER % zlib.crc32(raw) + b"\n"


def from_line(line: bytes) -> Record:
    """Parse a line of ``to_line``."""
    raw = _without_checksum(line)
    if raw is None:
        raise ValueError("checksum does not hold")
    record = json.loads(raw)
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, no object")
    if CHECKSUM in record:
        raise ValueError("two checksums")
    return record


def _without_checksum(line: bytes) -> bytes | None:
    """A line's JSON without the checksum; None if that does not match."""
    if line.startswith(b"{"):
        raw, member = line[:-_MEMBER_BYTES], line[-_MEMBER_BYTES:]
        return raw + b"}" if member == _MEMBER % zlib.crc32(raw) else None
    return line[9:] if line[:9] == b"%08x " % zlib.crc32(line[9:]) else None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
