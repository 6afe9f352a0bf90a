"""Safe opening and durable writing of files.

Every file that this project writes is created or opened here. A new file is created only at a free path; a file that is
written again has one writer, which holds a lock. A symbolic link at the path of a written file is refused, so that its
target is not overwritten. Files to read may be links, as in the hub's cache. Only regular files are opened: opening a FIFO
would wait for its other end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from filelock import lock_descriptor

_locked: set[int] = set()  # this process's descriptors that hold a lock; global, as descriptors are


class LockedFileError(OSError):
    """Another engine has the file open for writing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EAGAIN, "a file that another engine writes", str(path))


class DisturbedFileError(OSError):
    """Another process removed, replaced or changed the file while it was in use."""

    def __init__(self, reason: str = "that the file was removed or replaced while in use") -> None:
        super().__init__(errno.ESTALE, reason)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, if it does not exist. On return their names are durable."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync_path(directory.parent)


def sync_path(path: Path) -> None:
    """Sync a file's data, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
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
    """Open a file for reading and writing and lock it until ``close_locked``. Links are not followed.

    The lock is an exclusive ``flock`` on the file itself. It ends with the process, and needs no lock file. A second writer
    is refused, in this process as in another one. Readers need no lock.
    """
    descriptor: int | None = None
    try:
        descriptor = open_no_follow(path, os.O_RDWR | flags)
        _locked.add(descriptor)
        if not lock_descriptor(descriptor, blocking=False):
            raise LockedFileError(path)
        require_same_file(descriptor, path)  # its last writer may have removed it before the lock was free
        return descriptor
    except BaseException as error:
        if descriptor is not None:
            if flags & os.O_EXCL and not isinstance(error, LockedFileError):  # else another engine owns the file
                path.unlink(missing_ok=True)
            close_locked(descriptor)
        raise


def close_locked(descriptor: int) -> None:
    """Close a descriptor of ``open_locked``; on return the lock is free, even if a child is just being forked."""
    if descriptor in _locked:
        _locked.discard(descriptor)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def require_same_file(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Check that a path still leads to an open file."""
    try:
        named: os.stat_result | None = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        named = None
    if named is None or not os.path.samestat(os.fstat(descriptor), named):
        raise DisturbedFileError


def _release_in_child() -> None:
    """Give up the parent's locks in a forked child: a lock is held as long as any process has the descriptor open.

    The descriptors are redirected to the null device, so that the child's copies of objects cannot write to the files.
    """
    if _locked:
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for descriptor in _locked:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)
        _locked.clear()


os.register_at_fork(after_in_child=_release_in_child)


def create_file(path: Path) -> BinaryIO:
    """Open a new file for writing. An existing path is refused, and a link there is not followed."""
    return path.open("xb")


def partial_path(path: Path) -> Path:
    """The hidden sibling to which ``replace_file`` writes first; nobody else's file has such a name."""
    return path.with_name(f".{path.name}.partial")


def replace_file(path: Path, content: bytes | Sequence[bytes | memoryview]) -> None:
    """Replace a file's content atomically; on return the new content is durable."""
    partial = partial_path(path)
    partial.unlink(missing_ok=True)  # left by a process that was killed, or a planted link
    try:
        with create_file(partial) as file:
            for part in [content] if isinstance(content, bytes) else content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
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
