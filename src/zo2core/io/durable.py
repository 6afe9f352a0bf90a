r"""Safe opening and durable writing of files, and files of records that are appended.

Every file that this project writes is created or opened here. A new file is created only at a free
path; a file that is written again has one writer, which holds a lock. A symbolic link at the path
of a written file is refused, so that its target is not overwritten. Files to read may be links, as
in the hub's cache. Only regular files are opened: opening a FIFO would wait for its other end.

A file of records has one JSON object a line, whose last member is a checksum:
``{...,"crc32":"89abcdef"}\n``. The checksum is the CRC-32 of all bytes of the line before the comma
in front of it. A record counts once its whole line is on disk; a torn last line is dropped, damage
anywhere else is an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from filelock import lock_descriptor

from zo2core.io import system_calls

_locked: set[int] = set()  # this process's descriptors that hold a lock; global, as descriptors are


class LockedFileError(OSError):
    """Another engine has the file open for writing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EAGAIN, "a file that another engine writes", str(path))


class DisturbedFileError(OSError):
    """Another process removed, replaced or changed the file while it was in use."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        reason: str = "that the file was removed or replaced while in use",
    ) -> None:
        super().__init__(errno.ESTALE, reason, str(path))


class FileState(NamedTuple):
    """What changes when another process writes into a file, or puts another file in its place.

    The number of a file alone says nothing: some file systems in user space give the same file
    another number from time to time. A file that takes the place of another has a time of change of
    its own, too, whatever its time of the last write is set to.
    """

    size: int  # bytes
    mtime_ns: int  # time of the last write
    ctime_ns: int  # time of the last change of the file or its attributes
    identity: tuple[int, int]  # numbers of the file system and of the file in it

    @classmethod
    def of(cls, file: int | str | os.PathLike[str]) -> Self:
        """The state of an open file, or of the file at a path."""
        status = os.stat(file)
        return cls(
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            identity=(status.st_dev, status.st_ino),
        )

    def require(self, file: int | str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        """Refuse an open file, or the file at a path, that is in another state."""
        present = FileState.of(file)
        if present.identity != self.identity and present.ctime_ns != self.ctime_ns:
            raise DisturbedFileError(path, "another file in its place")
        if present.size != self.size:
            reason = f"{present.size} bytes, where there were {self.size} before"
            raise DisturbedFileError(path, reason)
        if present.mtime_ns != self.mtime_ns:
            reason = "that another process has written into the file meanwhile"
            raise DisturbedFileError(path, reason)


@contextlib.contextmanager
def errors_naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """A context in which errors of the system name the file; those of a descriptor do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, if it does not exist.

    On return their names are durable.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync_path(directory.parent)


def sync_path(path: Path) -> None:
    """Sync a file's data, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with errors_naming(path):
            system_calls.sync(descriptor)
    finally:
        os.close(descriptor)


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, without waiting for the other end of a FIFO."""
    descriptor: int | None = None
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        os.set_blocking(descriptor, True)
        return descriptor
    except ValueError as error:  # a name with a null byte
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    except BaseException as error:
        if descriptor is not None:
            if flags & os.O_EXCL:
                os.unlink(path)
            os.close(descriptor)
        if flags & os.O_NOFOLLOW and isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a symbolic link", str(path)) from error
        raise


def open_no_follow(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, refusing symbolic links. Usable as ``opener`` of Python's ``open``."""
    return open_descriptor(path, flags | os.O_NOFOLLOW)


def open_locked(path: Path, flags: int = 0) -> int:
    """Open a file for reading and writing and lock it until ``close_locked``.

    Links are not followed.

    The lock is an exclusive ``flock`` on the file itself. It ends with the process, and needs no
    lock file. A second writer is refused, in this process as in another one. Readers need no lock.
    """
    descriptor: int | None = None
    try:
        descriptor = open_no_follow(path, os.O_RDWR | flags)
        _locked.add(descriptor)
        if not lock_descriptor(descriptor, blocking=False):
            raise LockedFileError(path)
        # its last writer may have removed it before the lock was free
        require_same_file(descriptor, path)
        return descriptor
    except BaseException as error:
        if descriptor is not None:
            if flags & os.O_EXCL and not isinstance(error, LockedFileError):
                # else another engine owns the file
                path.unlink(missing_ok=True)
            close_locked(descriptor)
        raise


def close_locked(descriptor: int) -> None:
    """Close a descriptor of ``open_locked``; on return the lock is free, even if a child is just
    being forked.
    """
    if descriptor in _locked:
        _locked.discard(descriptor)
        system_calls.unlock(descriptor)
    os.close(descriptor)


def require_same_file(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Check that a path still leads to an open file."""
    try:
        named: os.stat_result | None = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        named = None
    if named is None or not os.path.samestat(os.fstat(descriptor), named):
        raise DisturbedFileError(path)


def _release_in_child() -> None:
    """Give up the parent's locks in a forked child: a lock is held as long as any process has the
    descriptor open.

    The descriptors are redirected to the null device, so that the child's copies of objects cannot
    write to the files.
    """
    if _locked:
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for descriptor in _locked:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)
        _locked.clear()


os.register_at_fork(after_in_child=_release_in_child)


def require_new_file(path: Path) -> None:
    """Refuse the path of a new file that exists, or whose directory cannot be written.

    Raises:
        OSError: if it is refused.
    """
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # fails where the name is too long, say
        raise FileExistsError(errno.EEXIST, "something at this path", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "a directory that does not exist", str(path))
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "a directory that is not writable", str(path))


def create_file(path: Path) -> BinaryIO:
    """Open a new file for writing.

    An existing path is refused, and a link there is not followed.
    """
    return path.open("xb")


def partial_path(path: Path) -> Path:
    """The hidden sibling to which ``replace_file`` writes first; nobody else's file has such a
    name.
    """
    return path.with_name(f".{path.name}.partial")


def replace_file(
    path: Path,
    content: bytes | Iterable[bytes | memoryview],
    *,
    at_end: Callable[[], tuple[int, bytes]] | None = None,
) -> None:
    """Replace a file's content atomically; on return the new content is durable.

    Args:
        path: The file.
        content: The new content, or its parts, which are written as they come.
        at_end: Called once all parts are written: an offset, and the bytes to write there.
    """
    partial = partial_path(path)
    partial.unlink(missing_ok=True)  # left by a process that was killed, or a planted link
    try:
        with errors_naming(partial), create_file(partial) as file:
            for part in [content] if isinstance(content, bytes) else content:
                file.write(part)
            if at_end is not None:
                offset, replacement = at_end()
                file.seek(offset)
                file.write(replacement)
            file.flush()
            system_calls.sync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_path(path.absolute().parent)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading. FIFOs, devices and directories are refused."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file."""
    with open_regular(path) as file:
        return file.read()


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
    """Records on disk.

    Reading takes no lock; a writer holds one from ``lock`` or the first record on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()  # the process may change its directory
        self._descriptor: int | None = None
        self._end = 0  # bytes of whole records
        # bytes of the file; None where a record, even a whole one, may follow ``_end``
        self._size: int | None = 0
        # device and inode of the file; None: it did not exist
        self._identity: tuple[int, int] | None = None
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
        self,
        record: Record,
        count: Callable[[], object] = lambda: None,
        is_counted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Write a record, and count it in memory; on return it is durable.

        Args:
            record: The record.
            count: Adds the record to what this process has in memory.
            is_counted: Whether ``count`` has had its effect. After any exception, also an
                interrupt, the record is removed from the file if it has not: file and memory both
                have the record, or neither has.
        """
        end = self._end
        try:
            with errors_naming(self._path):
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
        system_calls.sync(descriptor)
        if not self._settled:
            sync_path(self._path.parent)
        self._size = self._end + len(line)
        self._require_undisturbed(descriptor)  # a record in a file without a name would be lost
        self._settled = True
        self._end = self._size

    def settle(self) -> None:
        """Make the loaded records durable: the process that wrote the last one may have been killed
        before its sync.
        """
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
            system_calls.sync(self._descriptor)
            self._size = end

    def remove(self) -> None:
        """Remove the file, unless another one is at its path; the next record creates a new one."""
        if self._descriptor is not None:
            self._identity = _identity(os.fstat(self._descriptor))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if _identity(os.stat(self._path)) == self._identity:
                self._path.unlink()
                sync_path(self._path.parent)
        self._end = 0
        self._size = 0
        self._identity = None
        self._settled = False
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
                if number == len(lines) and not torn and not _checksum_holds(line):
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
                raise DisturbedFileError(self._path) from error
        if self._identity is None:
            self._identity = _identity(os.fstat(self._descriptor))
        return self._descriptor

    def _require_undisturbed(self, descriptor: int) -> None:
        """Raise if the path leads to another file, or the file's size is not the one that this
        object left.
        """
        require_same_file(descriptor, self._path)
        status = os.fstat(descriptor)
        if _identity(status) != self._identity:
            raise DisturbedFileError(self._path)
        if self._size is not None and status.st_size != self._size:
            reason = f"{status.st_size} bytes, where this process left {self._size}"
            raise DisturbedFileError(self._path, reason)


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
    if not _checksum_holds(line):
        raise ValueError("checksum does not hold")
    record: Record = json.loads(line[:-_MEMBER_BYTES] + b"}")
    if CHECKSUM in record:
        raise ValueError("two checksums")
    return record


def _checksum_holds(line: bytes) -> bool:
    raw = line[:-_MEMBER_BYTES]
    return raw.startswith(b"{") and line[-_MEMBER_BYTES:] == _MEMBER % zlib.crc32(raw)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
