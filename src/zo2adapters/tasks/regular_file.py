"""Files that can be read to their end, and read again: no pipes, which hang, no devices, no directories."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading, without waiting for whoever would write into a pipe.

    Raises:
        OSError: if it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "something that is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: as ``open_regular`` does.
    """
    with open_regular(path) as file:
        return file.read()


def require_regular(path: Path) -> None:
    """Refuse what is there and is no regular file; what is not there is for others to refuse.

    Raises:
        OSError: naming the path.
    """
    with contextlib.suppress(FileNotFoundError):
        open_regular(path).close()
