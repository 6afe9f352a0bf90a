r"""An append-only file of records, one JSON object a line, whose last member is a checksum: ``{...,"crc32":"89abcdef"}\n``.

The checksum is the CRC-32 of all bytes of the line before the comma that leads to it. A record counts once its line is on
disk whole; a torn last line is dropped, damage anywhere else is not.

Files of earlier versions have lines ``CRC32 JSON\n``, with the checksum of the JSON's bytes. They are read, too: a line
tells by its first byte which it is. What is appended to such a file is in the present format.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from zo2core.io.durable import make_directory, sync_path

Record = Mapping[str, Any]

CHECKSUM = "crc32"  # the member that no record may have of its own
_MEMBER = b',"%s":"%%08x"}' % CHECKSUM.encode()
_MEMBER_BYTES = len(_MEMBER % 0)


class DamagedRecordError(ValueError):
    """A line that is no record, and is not the torn end of the file."""

    def __init__(self, line: int, reason: str) -> None:
        self.line = line  # of the file, from 1
        super().__init__(reason)


class DisturbedFileError(OSError):
    """Somebody else removed, replaced or changed the file while it was in use."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.ESTALE, reason)


class RecordFile:
    """Records on disk.

    Args:
        path: File to continue; created with the first record.

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
        self._failed = False  # an append did; beyond the end may stand a record, even a whole one
        self._settled = False  # the file's name is durable, and so is what an earlier process wrote
        self.loaded: list[Record] = []  # what the file held when it was opened
        self.torn = b""  # what stood behind the last whole record then
        raw = self._read()
        if raw is not None:
            self._load(raw)

    def append(self, record: Record) -> None:
        """Write a record; on return it is durable.

        Raises:
            DisturbedFileError: if the file is not as this object left it.
            OSError: if it failed otherwise. In both cases the file's records stay as they were; the next append takes the
                torn one's place.
        """
        line = to_line(record)
        if self._descriptor is None:
            self._descriptor = self._open_alone()
        self._require_undisturbed(self._descriptor)
        os.ftruncate(self._descriptor, self._end)  # drops a torn record of this or an earlier attempt
        done, self._failed, self._size = 0, True, None
        while done < len(line):
            done += os.pwrite(self._descriptor, line[done:], self._end + done)
        os.fsync(self._descriptor)
        if not self._settled:
            sync_path(self._path.parent)
        self._size = self._end + len(line)
        self._require_undisturbed(self._descriptor)  # a record in a file without a name would not outlive the process
        self._settled = True
        self._end += len(line)
        self._failed = False

    def settle(self) -> None:
        """Make the records that were loaded durable: whoever wrote the last one may have been killed before its sync.

        Raises:
            OSError: if that failed.
        """
        if not self._settled and self._end > 0:
            sync_path(self._path)
            sync_path(self._path.parent)
            self._settled = True

    def retract(self) -> None:
        """Make sure that a record whose append failed does not count, not even for whoever reads the file later.

        Raises:
            OSError: if that failed; it may still count.
        """
        if self._failed and self._descriptor is not None:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)
            self._failed, self._size = False, self._end

    def remove(self) -> None:
        """Remove the file; the next record makes it anew.

        Raises:
            OSError: if that failed.
        """
        self._path.unlink(missing_ok=True)
        sync_path(self._path.parent)
        self.close()  # only now: the lock holds others off until the name is gone
        self._end, self._size, self._identity, self._failed, self._settled = 0, 0, None, False, False

    def close(self) -> None:
        """Close the file. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _read(self) -> bytes | None:
        """The file's bytes; None if it is not there."""
        try:
            descriptor = _open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            self._identity = _identity(os.fstat(descriptor))
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

    def _open_alone(self) -> int:
        """Open the file for writing and lock it: two writers would cut each other's records off.

        The lock is on the file's own descriptor. It ends with the process, however that ends, and leaves no file behind that
        a copied or a deleted run would have to bring along.
        """
        if self._identity is None:
            make_directory(self._path.parent)
            descriptor = _open(self._path, os.O_RDWR | os.O_CREAT)
        else:
            try:
                descriptor = _open(self._path, os.O_RDWR)
            except FileNotFoundError as error:
                raise _displaced() from error
        try:
            if not lock_descriptor(descriptor, blocking=False):
                raise OSError(errno.EAGAIN, "a file that another engine writes")
        except BaseException:
            os.close(descriptor)
            raise
        if self._identity is None:
            self._identity = _identity(os.fstat(descriptor))
        return descriptor

    def _require_undisturbed(self, descriptor: int) -> None:
        """Refuse a file that is not the one under the path, or has not the bytes that this object left it with."""
        try:
            named = _identity(os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            named = None
        status = os.fstat(descriptor)
        if not named == _identity(status) == self._identity:
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


def _open(path: Path, flags: int) -> int:
    """Open a regular file, without waiting for whoever would write into another kind.

    Raises:
        OSError: if that failed, or if it is none.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except ValueError as error:  # a name with a null byte
        raise OSError(errno.EINVAL, str(error)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file")
    return descriptor


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _displaced() -> DisturbedFileError:
    return DisturbedFileError("that the file was removed or replaced while in use")
