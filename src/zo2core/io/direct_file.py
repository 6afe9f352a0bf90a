"""Byte ranges of files, read and written past the page cache if the file system supports direct
I/O.

A model that is read once a step would evict everything else from the page cache, which also counts
towards the process's memory limit. Direct I/O requires page-aligned offsets, lengths and addresses.
If memory and file offset have the same position within a page, whole pages are read in place; the
rest goes through a small buffer of the calling thread. If direct I/O is refused, buffered reads
drop their pages from the cache. A system without O_DIRECT has one descriptor, whose reads are not
cached.

Large memory has a checksum for each chunk, computed on any thread, and one of them all in order.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
import xxhash

from zo2core.io import system_calls
from zo2core.io.durable import (
    DisturbedFileError,
    FileState,
    close_locked,
    errors_naming,
    open_descriptor,
    open_locked,
)

PAGE = 4096  # bytes; a multiple of the block size of today's disks
# bytes of a thread's buffer, in huge pages: a chunk and the pages in which it begins and ends
STAGING = 6 << 20
IN_PLACE = 1 << 20  # bytes from which it pays to read the partial first and last pages separately
NEAR = 64 << 10  # bytes that are read in about the time of a call
MOST_OF_A_CALL = 1 << 30  # bytes; macOS refuses 2 GiB, and Linux transfers less than was asked

_thread = threading.local()


class RangedFile:
    """A file whose ranges any thread may read, and write if it was opened for writing.

    A file that is only read must stay as it was when it was opened: each read checks that, after
    its last byte, since a writer changes the time of a file before its bytes.
    """

    def __init__(
        self, path: Path, *, writable: bool = False, _descriptor: int | None = None
    ) -> None:
        """Open the file for direct I/O, in addition to a descriptor that is open for writing, if
        there is one.
        """
        writing = open_locked(path, os.O_CREAT) if writable else _descriptor
        self._path = path
        self._name = path  # for errors
        self._flags = os.O_RDONLY if writing is None else os.O_RDWR
        self._lock = threading.Lock()
        self._buffered = writing
        self._direct: int | None = None
        self._supports_direct = True  # as long as ``_direct`` is open and no transfer was refused
        try:
            self._direct = open_descriptor(path, self._flags | system_calls.direct_flag())
            if writing is not None and not os.path.sameopenfile(writing, self._direct):
                raise DisturbedFileError(path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                self.close()
                raise
            system_calls.leave_uncached(self._open_buffered())
        self.state = None if writing is not None else FileState.of(self._open_descriptor)

    @classmethod
    def unnamed(cls, directory: Path) -> Self:
        """Open a new temporary file without a name, which is deleted when it is closed."""
        with tempfile.TemporaryFile(dir=directory) as temporary:
            descriptor = os.dup(temporary.fileno())
        file = cls(Path(system_calls.open_again(descriptor)), _descriptor=descriptor)
        file._name = directory
        return file

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill memory from a byte offset on."""
        with errors_naming(self._name):
            self._read_into(offset, out)

    def _read_into(self, offset: int, out: memoryview) -> None:
        done = self._try_direct(lambda descriptor: _read_direct(descriptor, offset, out))
        if done < len(out):
            buffered = self._open_buffered()
            offset = offset + done
            out = out[done:]
            done = _read_up_to(buffered, offset, out, at_least=len(out), unit=1)
            if done < len(out):
                self._require_unchanged()
                raise EOFError(f"end of file at byte {offset + done}")
            system_calls.drop_cached(buffered, offset, len(out))
        self._require_unchanged()

    def read_together(self, ranges: Sequence[tuple[int, memoryview]]) -> bool:
        """Fill memories from byte offsets on by one read of all pages that have them.

        Args:
            ranges: Offsets and memories, in the file's order, as ``near_ranges`` groups them.

        Returns:
            Whether they are filled. They are not where the file ends early or direct I/O is refused
            or fails: which of them cannot be read shows when they are read one by one.
        """
        first, _ = ranges[0]
        start = first - first % PAGE
        # the range that begins last need not end last
        nbytes = max(offset + len(out) for offset, out in ranges) - start
        staging = _staging()[: whole_pages(nbytes)]
        try:
            done = self._try_direct(
                lambda descriptor: _read_up_to(descriptor, start, staging, at_least=nbytes)
            )
        except OSError:
            return False
        if done < nbytes:
            return False
        for offset, out in ranges:
            ctypes.memmove(_address(out), _address(staging) + offset - start, len(out))
        self._require_unchanged()
        return True

    def write(self, offset: int, data: memoryview) -> None:
        """Write memory at a byte offset; ``sync`` makes it durable."""
        is_aligned = not (offset % PAGE or len(data) % PAGE or _address(data) % PAGE)
        with errors_naming(self._name):
            done = (
                self._try_direct(lambda descriptor: _write_pages(descriptor, offset, data))
                if is_aligned
                else 0
            )
            while done < len(data):
                part = data[done : done + MOST_OF_A_CALL]
                done += os.pwrite(self._open_buffered(), part, offset + done)

    def _try_direct(self, transfer: Callable[[int], int]) -> int:
        """The bytes that are transferred by direct I/O; 0 where the file system refuses it."""
        if self._direct is None or not self._supports_direct:
            return 0
        try:
            return transfer(self._direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # some file systems accept the flag and refuse the transfers
            self._supports_direct = False
            return 0

    def sync(self) -> None:
        """Make all writes durable."""
        for descriptor in (self._direct, self._buffered):
            if descriptor is not None:
                with errors_naming(self._name):
                    system_calls.sync_data(descriptor)

    def close(self) -> None:
        """Close the file, which ends its lock.

        No other thread may be using it. May be called twice.
        """
        with self._lock:
            descriptors = [
                descriptor
                for descriptor in (self._direct, self._buffered)
                if descriptor is not None
            ]
            self._direct = self._buffered = None
        for descriptor in descriptors:
            close_locked(descriptor)

    @property
    def _open_descriptor(self) -> int:
        """One of the open descriptors."""
        return self._open_buffered() if self._direct is None else self._direct

    def _require_unchanged(self) -> None:
        if self.state is not None:
            self.state.require(self._open_descriptor, self._name)

    def _open_buffered(self) -> int:
        with self._lock:
            if self._buffered is None:
                # The same file, also if another one is at its path by now.
                path = self._path if self._direct is None else system_calls.open_again(self._direct)
                self._buffered = open_descriptor(path, self._flags)
            return self._buffered


def near_ranges(ranges: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Group byte ranges of a file that one read of their pages reaches sooner than several.

    Args:
        ranges: Offset and size of each range, in any order.

    Returns:
        The numbers of each group's ranges, in the file's order. A range that would be read in place
        is by itself.
    """
    group: list[int] = []
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        offset, nbytes = ranges[number]
        if group:
            start, _ = ranges[group[0]]
            previous, length = ranges[group[-1]]
            is_near = offset - (previous + length) <= NEAR
            has_room = offset + nbytes - (start - start % PAGE) <= STAGING - PAGE
            if not is_near or not has_room or max(length, nbytes) >= IN_PLACE:
                yield group
                group = []
        group.append(number)
    if group:
        yield group


def whole_pages(nbytes: int) -> int:
    """Round a size in bytes up to pages."""
    return -(-nbytes // PAGE) * PAGE


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Page-aligned zeros, in huge pages if the system has them.

    Direct I/O pins every page that it reads into: with small pages, measured disks reached less
    than half their rate.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    system_calls.prefer_huge_pages(memory)
    return memory


def byte_view(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's bytes.

    It does not keep the tensor's memory alive.
    """
    return view_of(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def view_of(address: int, nbytes: int) -> memoryview:
    """A writable view of bytes at an address. It does not keep them alive."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if len(view) else 0


def chunk_checksum(chunk: memoryview) -> int:
    """64-bit XXH3 of a chunk's bytes. Releases the GIL."""
    return xxhash.xxh3_64_intdigest(chunk)


def combined_checksum(checksums: Iterable[int]) -> str:
    """XXH3 of chunks' checksums in order, 8 bytes each, little-endian; 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(
        b"".join(checksum.to_bytes(8, "little") for checksum in checksums)
    )


def _read_direct(descriptor: int, offset: int, out: memoryview) -> int:
    """Read whole pages in place if there are enough of them, the rest through the buffer; return
    the bytes read.
    """
    head = min(-offset % PAGE, len(out))
    body = (len(out) - head) // PAGE * PAGE
    if (_address(out) - offset) % PAGE != 0 or body < IN_PLACE:
        return _read_staged(descriptor, offset, out)
    done = _read_staged(descriptor, offset, out[:head])
    if done == head:
        done += _read_up_to(descriptor, offset + done, out[done : head + body], at_least=body)
    if done == head + body:
        done += _read_staged(descriptor, offset + done, out[done:])
    return done


def _read_staged(descriptor: int, offset: int, out: memoryview) -> int:
    """Read the pages around a range into this thread's buffer and copy the range; return the bytes
    read.
    """
    staging = _staging()
    done = 0
    while done < len(out):
        skip = (offset + done) % PAGE
        wanted = min(len(out) - done, STAGING - skip)
        pages = -(-(skip + wanted) // PAGE) * PAGE
        count = _read_up_to(
            descriptor, offset + done - skip, staging[:pages], at_least=skip + wanted
        )
        if count < skip + wanted:
            break
        ctypes.memmove(_address(out[done:]), _address(staging) + skip, wanted)  # releases the GIL
        done += wanted
    return done


def _staging() -> memoryview:
    if not hasattr(_thread, "staging"):
        _thread.staging = memoryview(anonymous_memory(STAGING))[:STAGING]
    staging: memoryview = _thread.staging
    return staging


def _read_up_to(
    descriptor: int, offset: int, out: memoryview, *, at_least: int, unit: int = PAGE
) -> int:
    """Read until ``at_least`` bytes are read or the file ends; return the bytes read.

    After a short read the next one starts at a multiple of ``unit``, which direct I/O needs; the
    last page may be short.
    """
    done = 0
    while done < at_least:
        start = done - done % unit
        part = out[start : start + MOST_OF_A_CALL]
        reached = start + os.preadv(descriptor, [part], offset + start)
        if reached <= done:
            break
        done = reached
    return done


def _write_pages(descriptor: int, offset: int, data: memoryview) -> int:
    """Write whole pages, until all are written or a write ends within one; return the bytes
    written.
    """
    done = 0
    while done < len(data) and done % PAGE == 0:
        part = data[done : done + MOST_OF_A_CALL]
        done += os.pwrite(descriptor, part, offset + done)
    return done
