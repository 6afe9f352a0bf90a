"""Host memory that several processes have: made by one, reached by the others through its descriptor, gone with the last."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Self

_FLOCK = struct.Struct("hh4xqqi4x")  # of 64-bit Linux: type, whence, start, length, process


class SharedMemory:
    """Zeros at first, and locks on its bytes.

    A lock is of this object, not of a thread: it does not keep threads that use the same object apart. It ends with the
    process, however that ends.

    Args:
        descriptor: Of the memory; it is this object's from now on, and closed if it cannot be mapped.

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
        descriptor = os.memfd_create("zo2core", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @classmethod
    def reached(cls, process: int, descriptor: int) -> Self:
        """Memory that another process of the same user made.

        Raises:
            OSError: if it cannot be reached.
        """
        return cls(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

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
