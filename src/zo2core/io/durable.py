"""Files opened with care: names and bytes that survive a power failure, and no surprises in what stands at a path."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO


def make_directory(path: Path) -> None:
    """Make a directory, unless it exists, and those above it that are missing. On return their names are durable.

    Raises:
        OSError: if the system refuses.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync_path(directory.parent)


def sync_path(path: Path) -> None:
    """Wait until a file's data, or a directory's names, are on disk.

    Raises:
        OSError: if the system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_file(path: Path) -> BinaryIO:
    """Open a new file for writing. Whatever stands at the path already, a link above all, is refused and not followed.

    Raises:
        OSError: if something is there, or the system refuses.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading. A FIFO, on which opening would wait for a writer, a device or a directory is refused.

    Raises:
        OSError: if it is none, or the system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no regular file", str(path))
