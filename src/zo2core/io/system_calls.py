"""Calls of the system that Linux or macOS does not have, each with what the other has instead.

| for | Linux | macOS |
|---|---|---|
| reading past the page cache | a descriptor with O_DIRECT beside | F_NOCACHE on the only one |
| dropping what was read from the cache | posix_fadvise | nothing to drop, by F_NOCACHE |
| huge pages | madvise | nothing |
| reading ahead | posix_fadvise | what the system reads ahead by itself |
| durable writes | fsync, fdatasync | F_FULLFSYNC: its fsync leaves bytes in the disk's cache |
| the loopback interface | lo | lo0 |
| the processor's name | /proc/cpuinfo | its architecture |
| opening an open file again | /proc/self/fd | not needed: only O_DIRECT asks for it |

A call is looked for when it is made, so that tests can take it away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import platform
import re
import socket
from collections.abc import Callable
from pathlib import Path


def open_again(descriptor: int) -> str:
    """A path that leads to an open file, whatever is at its own path by now."""
    return f"/proc/self/fd/{descriptor}"


def direct_flag() -> int:
    """The flag that opens a file for direct I/O.

    Raises:
        OSError: ``EINVAL``, as from a file system that refuses it: the system has no such flag.
    """
    flag: int | None = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise OSError(errno.EINVAL, "a system without O_DIRECT")
    return flag


def leave_uncached(descriptor: int) -> None:
    """Keep what is read and written out of the page cache, where the system has a switch for it."""
    _control(descriptor, "F_NOCACHE")


def drop_cached(descriptor: int, offset: int, nbytes: int) -> None:
    """Drop a range of a file from the page cache."""
    _advise(descriptor, offset, nbytes, "POSIX_FADV_DONTNEED")


def read_ahead(descriptor: int, offset: int, nbytes: int) -> None:
    """Tell the system that a range of a file will be read soon."""
    _advise(descriptor, offset, nbytes, "POSIX_FADV_WILLNEED")


def _advise(descriptor: int, offset: int, nbytes: int, advice: str) -> None:
    """Tell the system how a range of a file is used, where it listens."""
    advise: Callable[[int, int, int, int], None] | None = getattr(os, "posix_fadvise", None)
    if advise is not None:
        advise(descriptor, offset, nbytes, getattr(os, advice))


def prefer_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages for memory, where the system has them."""
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):
            memory.madvise(advice)


def sync(descriptor: int) -> None:
    """Make a file, or the names in a directory, durable."""
    if not _control(descriptor, "F_FULLFSYNC"):
        os.fsync(descriptor)


def sync_data(descriptor: int) -> None:
    """Make a file's bytes durable, and of its attributes only those that lead to them."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        sync(descriptor)


def unlock(descriptor: int) -> None:
    """Give up the lock that is held on a file."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def loopback_interface() -> str:
    """The name of the network's interface to this host itself."""
    names = [name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)]
    return min(names, default="lo")


def processor_name() -> str:
    """The processor's model; its architecture where the system does not tell."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _control(descriptor: int, command: str) -> bool:
    """Carry out a command of ``fcntl``; false where system or file system does not have it."""
    number = getattr(fcntl, command, None)
    if number is None:
        return False
    try:
        fcntl.fcntl(descriptor, number, 1)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):
            raise
        return False
    return True
