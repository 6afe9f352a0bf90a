r"""An append-only file of records, one JSON object a line, whose last member is a checksum: ``{...,"crc32":"89abcdef"}\n``.

The checksum is the CRC-32 of all bytes of the line before the comma that leads to it. A record counts once its line is on
disk whole; a torn last line is dropped, damage anywhere else is not.

Files of earlier versions have lines ``CRC32 JSON\n``, with the checksum of the JSON's bytes. They are read, too: a line
tells by its first byte which it is. What is appended to such a file is in the present format.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
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

CHECKSUM = "crc32"  # the member that no record may have of its own
_MEMBER = b',"%s":"%%08x"}' % CHECKSUM.encode()
_MEMBER_BYTES = len(_MEMBER % 0)


class DamagedRecordError(ValueError):
    """A line that is no record, and is not the torn end of the file."""

    def __init__(self, line: int, reason: str) -> None:
        self.line = line  # of the file, from 1
        super().__init__(reason)


class RecordFile:
    """Records on disk. Reading takes no lock; whoever writes holds one from ``lock`` or the first record on.

    Args:
        path: File to continue; created with the first record. To read, a link is followed; to write, it is refused.

    Raises:
        OSError: if it is there and cannot be read, or is no regular file.
        DamagedRecordError: if it is damaged elsewhere than in its last line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()  # the process may change its directory
        self._descriptor: int | None = None
        self._end = 0  # bytes of whole records
        self._size: int | None = 0  # bytes of the file; None after an append that failed
        self._identity: tuple[int, int] | None = None  # device and inode of the file; None: it was not there
        self._made = False  # by this object
        self._failed = False  # an append did, or was interrupted; beyond the end may stand a record, even a whole one
        self._settled = False  # the file's name is durable, and so is what an earlier process wrote
        self.loaded: list[Record] = []  # what the file held when it was opened
        self.torn = b""  # what stood behind the last whole record then
        raw = self._read()
        if raw is not None:
            self._load(raw)

    @property
    def end(self) -> int:
        """Bytes of the records that count."""
        return self._end

    def lock(self) -> None:
        """Open the file for writing, if it is there: no other process can from then on until ``close``.

        Raises:
            LockedFileError: if another engine writes it.
            DisturbedFileError: if it is not as this object read it.
            OSError: if it cannot be opened for writing.
        """
        if self._identity is not None:
            self._require_undisturbed(self._open_for_writing())

    def append(self, record: Record) -> None:
        """Write a record; on return it is durable.

        Raises:
            LockedFileError: if another engine writes the file.
            DisturbedFileError: if the file is not as this object left it.
            OSError: if it failed otherwise. In all cases the file's records stay as they were; the next append takes the
                torn one's place.
        """
        line = to_line(record)
        descriptor = self._open_for_writing()
        self._require_undisturbed(descriptor)
        self._failed, self._size = True, None
        os.ftruncate(descriptor, self._end)  # drops a torn record of this or an earlier attempt
        done = 0
        while done < len(line):
            done += os.pwrite(descriptor, line[done:], self._end + done)
        os.fsync(descriptor)
        if not self._settled:
            sync_path(self._path.parent)
        self._size = self._end + len(line)
        self._require_undisturbed(descriptor)  # a record in a file without a name would not outlive the process
        self._settled = True
        self._end, self._failed = self._size, False

    def settle(self) -> None:
        """Make the records that were loaded durable: whoever wrote the last one may have been killed before its sync.

        Raises:
            OSError: if that failed.
        """
        if not self._settled and self._end > 0:
            sync_path(self._path)
            sync_path(self._path.parent)
            self._settled = True

    def retract(self, end: int | None = None) -> None:
        """Make sure that a record does not count, not even for whoever reads the file later.

        Args:
            end: What ``end`` was before the record; None: the record is one whose append failed.

        Raises:
            OSError: if that failed; a later process may count it, this object does not.
        """
        end = self._end if end is None else end
        if end != self._end:
            self._end, self._failed, self._size = end, True, None  # whatever comes, the next append takes its place
        if self._descriptor is not None and self._made and end == 0:
            self.remove()
        elif self._descriptor is not None and self._failed:
            os.ftruncate(self._descriptor, end)
            os.fsync(self._descriptor)
            self._failed, self._size = False, end

    def remove(self) -> None:
        """Remove the file, unless another one has taken its place; the next record makes it anew.

        Raises:
            OSError: if that failed.
        """
        if self._descriptor is not None:
            self._identity = _identity(os.fstat(self._descriptor))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if _identity(os.stat(self._path)) == self._identity:
                self._path.unlink()
                sync_path(self._path.parent)
        self._end, self._size, self._identity, self._failed, self._settled = 0, 0, None, False, False
        self.close()  # only now: the lock holds others off until the name is gone

    def close(self) -> None:
        """Close the file, which ends its lock. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            close_locked(descriptor)

    def _read(self) -> bytes | None:
        """The file's bytes; None if it is not there."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return None
        with file:
            self._identity = _identity(os.fstat(file.fileno()))
            return file.read()

    def _load(self, raw: bytes) -> None:
        self._size = len(raw)
        lines = raw.split(b"\n")
        torn = lines.pop()  # empty if the file ends with a whole line
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
        """Open the file and lock it: two writers would cut each other's records off."""
        if self._descriptor is None and self._identity is None:
            make_directory(self._path.parent)
            self._made = True  # if it opens
            try:
                self._descriptor = open_locked(self._path, os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                self._made = False
        if self._descriptor is None:
            try:
                self._descriptor = open_locked(self._path)
            except FileNotFoundError as error:
                raise _displaced() from error
        if self._identity is None:
            self._identity = _identity(os.fstat(self._descriptor))
        return self._descriptor

    def _require_undisturbed(self, descriptor: int) -> None:
        """Refuse a file that is not the one under the path, or has not the bytes that this object left it with."""
        require_same_file(descriptor, self._path)
        status = os.fstat(descriptor)
        if _identity(status) != self._identity:
            raise _displaced()
        if self._size is not None and status.st_size != self._size:
            raise DisturbedFileError(f"{status.st_size} bytes, where this process left {self._size}")


def to_json(record: Record) -> bytes:
    """A record as JSON, compact and in ASCII, without its checksum."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode()


def to_line(record: Record) -> bytes:
    """A record's bytes in the file."""
    assert record, "a record has a member"
    assert CHECKSUM not in record, "the file adds the checksum"
    raw = to_json(record)[:-1]
    return raw + _MEMBER % zlib.crc32(raw) + b"\n"


def from_line(line: bytes) -> Record:
    """Undo ``to_line``.

    Args:
        line: Without its newline.

    Raises:
        ValueError, RecursionError: if it is no record, or its checksum does not hold.
    """
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
    """A line's JSON without the checksum; None if that does not hold."""
    if line.startswith(b"{"):
        raw, member = line[:-_MEMBER_BYTES], line[-_MEMBER_BYTES:]
        return raw + b"}" if member == _MEMBER % zlib.crc32(raw) else None
    return line[9:] if line[:9] == b"%08x " % zlib.crc32(line[9:]) else None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _displaced() -> DisturbedFileError:
    return DisturbedFileError("that the file was removed or replaced while in use")
