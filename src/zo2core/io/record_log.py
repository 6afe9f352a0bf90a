r"""An append-only file of checksummed records, one a line: ``CRC32 JSON\n``.

Eight hexadecimal digits over the JSON's bytes, a space, the JSON in UTF-8. A record counts once its line is on disk whole; a
torn last line is dropped, damage anywhere else is not.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from zo2core.io.durable import make_directory, sync_path

Record = Mapping[str, Any]


class DamagedRecordError(ValueError):
    """A line is no record, and it is not the torn end of the file either."""

    def __init__(self, line: int, reason: str) -> None:
        self.line = line  # of the file, from 1
        super().__init__(reason)


class RecordFile:
    """Records on disk.

    Args:
        path: File to continue. It is created with the first record.

    Raises:
        OSError: if an existing file cannot be read.
        DamagedRecordError: if a line other than the last one is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._end = 0  # bytes of whole records
        self._failed = False  # an append failed; beyond the end there may be a record, even a whole one
        self._settled = False  # the file's name is durable, and so is what an earlier process wrote
        self.loaded: list[Record] = []  # what the file held when it was opened
        if path.exists():
            self._load(path.read_bytes())

    def append(self, record: Record) -> None:
        """Write a record; on return it is durable.

        Raises:
            OSError: if writing failed, or another process writes the file. The file's records stay as they were; the next
                append takes the torn one's place.
        """
        line = to_line(record)
        if self._descriptor is None:
            make_directory(self._path.parent)
            self._descriptor = self._open_alone()
        os.ftruncate(self._descriptor, self._end)  # drops a torn record of this or an earlier attempt
        done, self._failed = 0, True
        while done < len(line):
            done += os.pwrite(self._descriptor, line[done:], self._end + done)
        os.fsync(self._descriptor)
        if not self._settled:
            sync_path(self._path.parent)
        self._settled = True
        self._end += len(line)
        self._failed = False

    def _open_alone(self) -> int:
        """Open the file for writing and lock it: two writers would cut each other's records off.

        The lock is on the file's own descriptor. It ends with the process, however that ends, and leaves no file behind that
        a copied or a deleted run would have to bring along.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not lock_descriptor(descriptor, blocking=False):
                raise OSError(errno.EAGAIN, "a file that another engine writes")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

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
            OSError: if the file cannot be changed; the record may still count then.
        """
        if self._failed and self._descriptor is not None:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)
            self._failed = False

    def close(self) -> None:
        """Close the file. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _load(self, raw: bytes) -> None:
        lines = raw.split(b"\n")
        torn = lines.pop()  # empty if the file ends with a whole line
        for number, line in enumerate(lines, start=1):
            try:
                self.loaded.append(_from_line(line))
            except (ValueError, RecursionError) as error:
                if number == len(lines) and not torn and not _checksum_holds(line):
                    return
                raise DamagedRecordError(number, str(error)) from error
            self._end += len(line) + 1


def to_line(record: Record) -> bytes:
    """A record's bytes in the file."""
    raw = json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(raw), raw)


def _checksum_holds(line: bytes) -> bool:
    return line[:9] == b"%08x " % zlib.crc32(line[9:])


def _from_line(line: bytes) -> Record:
    if not _checksum_holds(line):
        raise ValueError("checksum does not hold")
    record = json.loads(line[9:])
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, no object")
    return record
