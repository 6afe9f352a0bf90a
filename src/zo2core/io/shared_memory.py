"""Host memory that several processes have: made by one, reached by the others through its descriptor, gone with the last."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Self

_NAME = "zo2core"
_LINK = f"/memfd:{_NAME} (deleted)"  # what the kernel says of a descriptor of such memory
_FLOCK = struct.Struct("hh4xqqi4x")  # of 64-bit Linux: type, whence, start, length, process

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # to reach beyond memory that shrank ends a process


class SharedMemory:
    """Zeros at first, and locks on its bytes.

    A lock is of this object, not of a thread: it does not keep threads that use the same object apart. It ends with the
    process, however that ends.

    Args:
        descriptor: Descriptor of the memory; it is this object's from now on, and closed if it cannot be mapped.

    Raises:
        OSError: if it cannot be mapped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        try:
            self.buffer = mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED)
        except BaseException:
            self.close()
            raise

    @classmethod
    def made(cls, nbytes: int) -> Self:
        """New memory.

        Raises:
            OSError: if the system has none.
        """
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @classmethod
    def reached(cls, process: object, descriptor: object, nbytes: int) -> Self:
        """Memory that another process of the same user made.

        Args:
            process: Process id, as the other process states it. Anything but memory that ``made`` makes is refused before it
                is opened.
            descriptor: The memory's in that process, as it says.
            nbytes: Number of bytes of the memory.

        Raises:
            OSError: if it cannot be reached, or is something else.
        """
        for number in (process, descriptor):
            if type(number) is not int or number < 0:  # a bool or a string could name another path
                raise _refused(f"{str(number)[:40]!r} in place of a process's or descriptor's number")
        path = f"/proc/{process}/fd/{descriptor}"
        _require_link(path)
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _require_link(f"/proc/self/fd/{opened}")  # the other process may have put something else in its place
            status = os.fstat(opened)
            if status.st_uid != os.geteuid():
                raise _refused(f"memory of another user, number {status.st_uid}")
            if status.st_size != nbytes:
                raise _refused(f"{status.st_size} bytes of memory in place of {nbytes}")
            if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise _refused("memory that can shrink")
        except BaseException:
            os.close(opened)
            raise
        return cls(opened)

    @property
    def descriptor(self) -> int:
        """By which others reach it, as long as this object is open."""
        return self._descriptor

    @contextlib.contextmanager
    def locked(self, byte: int) -> Iterator[None]:
        """Hold the lock of a byte; wait until no other object holds it."""
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        try:
            yield
        finally:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))

    def close(self) -> None:
        """Close the descriptor; the memory goes with what was made of ``buffer``. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _require_link(path: str) -> None:
    link = os.readlink(path)
    if link != _LINK:
        raise _refused(f"{link!r} in place of memory of this library")


def _refused(found: str) -> OSError:
    return OSError(errno.EINVAL, found)
