"""Byte ranges of files, past the page cache: direct I/O where the file system takes it, else buffered.

A model that is read once a step would push everything else out of the page cache, and inside a memory limit the cache counts
as the process's own. Direct I/O wants page-aligned offsets, lengths and addresses. Where memory lies as far from a page's
start as its bytes do in the file, whole pages are read in place; the rest goes through a small buffer of the calling thread.
Where direct I/O is refused, buffered reads give their pages back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import Self

import torch

from zo2core.io.durable import close_locked, open_descriptor, open_locked, require_same_file

PAGE = 4096  # bytes; a multiple of the block size of today's disks
STAGING = 6 << 20  # bytes of one thread's buffer, in huge pages: a chunk and the pages in which it begins and ends
IN_PLACE = 1 << 20  # bytes; from this size on it pays to read the two broken pages on their own

_thread = threading.local()


class RangedFile:
    """A file that any thread may read by range, and write if it was opened for writing.

    Args:
        path: The file's path.
        writable: Open it for writing, too, and lock it until ``close``; it is created if it does not exist. Links are
            followed only for reading.

    Raises:
        LockedFileError: if another engine writes it.
        OSError: if it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self._set_up(path, open_locked(path, os.O_CREAT) if writable else None)

    @classmethod
    def unnamed(cls, directory: Path) -> Self:
        """A new file without a name, to be written and read: it is gone once it is closed, or with the process.

        Raises:
            OSError: if it cannot be made.
        """
        file = cls.__new__(cls)
        with tempfile.TemporaryFile(dir=directory) as made:
            descriptor = os.dup(made.fileno())
        file._set_up(Path(f"/proc/self/fd/{descriptor}"), descriptor)
        return file

    def _set_up(self, path: Path, writable: int | None) -> None:
        """Open the file for direct I/O beside a descriptor that is open for writing, if there is one."""
        self._path = path
        self._flags = os.O_RDONLY if writable is None else os.O_RDWR
        self._lock = threading.Lock()
        self._buffered = writable
        self._direct: int | None = None
        self._takes_direct = True
        try:
            self._direct = open_descriptor(path, self._flags | os.O_DIRECT)
            if writable is not None:
                require_same_file(writable, f"/proc/self/fd/{self._direct}")
        except OSError as error:
            if error.errno != errno.EINVAL:
                self.close()
                raise
            self._takes_direct = False
            self._open_buffered()

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill memory from a byte offset on.

        Raises:
            OSError: from the system.
            EOFError: if the file ends first.
        """
        if self._takes_direct and self._direct is not None:
            try:
                done = _read_direct(self._direct, offset, out)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._takes_direct = False  # some file systems take the flag and refuse the reads
                done = 0
            if done >= len(out):
                return
            offset, out = offset + done, out[done:]
        buffered = self._open_buffered()
        _read_exactly(buffered, offset, out)
        os.posix_fadvise(buffered, offset, len(out), os.POSIX_FADV_DONTNEED)

    def write(self, offset: int, data: memoryview) -> None:
        """Write memory at a byte offset; ``sync`` makes it durable.

        Raises:
            OSError: from the system.
        """
        if self._takes_direct and self._direct is not None and _is_aligned(offset, data):
            try:
                done = 0
                while done < len(data) and done % PAGE == 0:
                    done += os.pwrite(self._direct, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._takes_direct = False
                done = 0
            if done == len(data):
                return
            offset, data = offset + done, data[done:]
        buffered, done = self._open_buffered(), 0
        while done < len(data):
            done += os.pwrite(buffered, data[done:], offset + done)

    def sync(self) -> None:
        """Make what was written durable.

        Raises:
            OSError: from the system.
        """
        for descriptor in (self._direct, self._buffered):
            if descriptor is not None:
                os.fdatasync(descriptor)

    def close(self) -> None:
        """Close the file, which ends its lock. It must not be in use any more. May be called twice."""
        with self._lock:
            descriptors = [descriptor for descriptor in (self._direct, self._buffered) if descriptor is not None]
            self._direct = self._buffered = None
        for descriptor in descriptors:
            close_locked(descriptor)

    def _open_buffered(self) -> int:
        with self._lock:
            if self._buffered is None:
                self._buffered = open_descriptor(self._path, self._flags)
            return self._buffered


def whole_pages(nbytes: int) -> int:
    """Round a size in bytes up to pages."""
    return -(-nbytes // PAGE) * PAGE


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Page-aligned zeros, in huge pages where the system has them.

    Direct I/O pins every page it reads into: with small pages the measured disks reached less than half their rate.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel or a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def byte_view(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's bytes. It does not keep the tensor's memory alive."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if len(view) else 0


def _is_aligned(offset: int, view: memoryview) -> bool:
    return offset % PAGE == 0 and len(view) % PAGE == 0 and _address(view) % PAGE == 0


def _read_direct(descriptor: int, offset: int, out: memoryview) -> int:
    """Read whole pages in place if there are enough of them, the rest by way of the buffer; return how far it came."""
    head = min(-offset % PAGE, len(out))
    body = (len(out) - head) // PAGE * PAGE
    if (_address(out) - offset) % PAGE != 0 or body < IN_PLACE:
        return _read_staged(descriptor, offset, out)
    done = _read_staged(descriptor, offset, out[:head])
    if done == head:
        done += _read_pages(descriptor, offset + done, out[done : head + body], at_least=body)
    if done == head + body:
        done += _read_staged(descriptor, offset + done, out[done:])
    return done


def _read_staged(descriptor: int, offset: int, out: memoryview) -> int:
    """Read the pages around a range into this thread's buffer, and the range from there; return how far it came."""
    staging = _staging()
    done = 0
    while done < len(out):
        skip = (offset + done) % PAGE
        wanted = min(len(out) - done, STAGING - skip)
        pages = -(-(skip + wanted) // PAGE) * PAGE
        count = _read_pages(descriptor, offset + done - skip, staging[:pages], at_least=skip + wanted)
        if count < skip + wanted:
            break
        ctypes.memmove(_address(out[done:]), _address(staging) + skip, wanted)  # lets other threads run
        done += wanted
    return done


def _staging() -> memoryview:
    if not hasattr(_thread, "staging"):
        _thread.staging = memoryview(anonymous_memory(STAGING))[:STAGING]
    staging: memoryview = _thread.staging
    return staging


def _read_pages(descriptor: int, offset: int, out: memoryview, *, at_least: int) -> int:
    """Read into page-aligned memory until enough is there, or no more comes; return how far it came.

    After a short read the next one has to start at a page again; the file's last page may be short.
    """
    done = 0
    while done < at_least:
        start = done - done % PAGE
        reached = start + os.preadv(descriptor, [out[start:]], offset + start)
        if reached <= done:
            break
        done = reached
    return done


def _read_exactly(descriptor: int, offset: int, out: memoryview) -> None:
    """Read until ``out`` is full; one call of the system may give less."""
    done = 0
    while done < len(out):
        count = os.preadv(descriptor, [out[done:]], offset + done)
        if count == 0:
            raise EOFError(f"end of file at byte {offset + done}")
        done += count
