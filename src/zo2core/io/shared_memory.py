"""Host memory shared by processes: one creates it, the others open its descriptor, and it is freed with the last one."""

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
_LINK = f"/memfd:{_NAME} (deleted)"  # target of the descriptor's link in /proc
_FLOCK = struct.Struct("hh4xqqi4x")  # of 64-bit Linux: type, whence, start, length, process

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # access beyond memory that shrank kills a process


class SharedMemory:
    """Memory, zeroed at first, with locks on its bytes.

    A lock belongs to this object, not to a thread: it does not exclude threads that use the same object. It ends with the
    process.

    Args:
        descriptor: Descriptor of the memory, which this object closes, also if it cannot be mapped.

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
    def create(cls, nbytes: int) -> Self:
        """Create new memory.

        Raises:
            OSError: if the system refuses.
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
    def attach(cls, process: object, descriptor: object, nbytes: int) -> Self:
        """Open memory that another process of the same user created.

        Args:
            process: Process id that the other process reported. A descriptor of anything but memory of ``create`` is refused
                before it is opened.
            descriptor: Descriptor of the memory in that process.
            nbytes: Expected size of the memory.

        Raises:
            OSError: if it cannot be opened, or is not such memory.
        """
        for number in (process, descriptor):
            if type(number) is not int or number < 0:  # a bool or a string could name another path
                raise _refused(f"{str(number)[:40]!r} in place of a process's or descriptor's number")
        path = f"/proc/{process}/fd/{descriptor}"
        _require_link(path)
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _require_link(f"/proc/self/fd/{opened}")  # the other process may have replaced it meanwhile
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
        """Descriptor with which other processes attach, as long as this object is open."""
        return self._descriptor

    @contextlib.contextmanager
    def locked(self, byte: int) -> Iterator[None]:
        """Hold the lock of a byte, waiting until no other object holds it."""
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        try:
            yield
        finally:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped while ``buffer`` is used. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _require_link(path: str) -> None:
    link = os.readlink(path)
    if link != _LINK:
        raise _refused(f"{link!r} in place of memory of this library")


def _refused(found: str) -> OSError:
    return OSError(errno.EINVAL, found)
