"""Inputs of blocks in a temporary file, by a thread of its own."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from zo2core.errors import ScratchError, reason
from zo2core.io.direct_file import RangedFile, anonymous_memory, view_of, whole_pages
from zo2core.profiling.timeline import Timeline
from zo2core.sweep.kept_inputs import InputKey, Storage
from zo2core.types import Lane, shown_bytes

_STAGING = 4 << 20  # bytes of page-aligned memory: what lies elsewhere would pass the page cache


class _Range(NamedTuple):
    """Where a storage's bytes are in the file."""

    storage: Storage
    offset: int
    nbytes: int


class InputFile:
    """Writes inputs to a file without a name, and reads them back, in the order of the calls.

    The file is made with the first input, in whole pages, past the page cache where the file system allows. It goes with
    the process.
    """

    def __init__(self, directory: Path, timeline: Timeline) -> None:
        self._directory = directory
        self._timeline = timeline
        self._file: RangedFile | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._staging = memoryview(anonymous_memory(_STAGING))  # pages take memory once they are touched
        self._ranges: dict[InputKey, list[_Range]] = {}
        self._end = 0
        self._started: list[Future[None]] = []

    def send(self, key: InputKey, storages: Sequence[Storage]) -> Future[None]:
        """Write storages behind the caller, and free them. See the contract."""
        ranges = []
        for storage in storages:
            ranges.append(_Range(storage, self._end, storage.nbytes()))
            self._end += whole_pages(storage.nbytes())
        self._ranges[key] = ranges
        return self._submit(key, ranges, write=True)

    def bring(self, key: InputKey) -> Future[None]:
        """Read storages ahead of the caller. See the contract."""
        return self._submit(key, self._ranges.pop(key), write=False)

    def clear(self) -> None:
        """Forget all inputs. After a failed write the file is closed, which frees its space on the disk."""
        for future in self._started:
            future.cancel()
        wait(self._started)
        if any(not future.cancelled() and future.exception() is not None for future in self._started):
            self._close_file()
        self._started.clear()
        self._ranges.clear()
        self._end = 0

    def close(self) -> None:
        """Close the file. May be called twice."""
        self.clear()
        self._close_file()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _submit(self, key: InputKey, ranges: Sequence[_Range], *, write: bool) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zo2-inputs")
        future = self._thread.submit(self._write if write else self._read, str(key), ranges)
        self._started.append(future)
        return future

    def _write(self, name: str, ranges: Sequence[_Range]) -> None:
        try:
            if self._file is None:
                self._file = RangedFile.unnamed(self._directory)
            staging = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._staging))
            with self._timeline.noted(Lane.WRITE, name, sum(part.nbytes for part in ranges)):
                for storage, offset, nbytes in ranges:
                    for start in range(0, nbytes, _STAGING):
                        count = min(_STAGING, nbytes - start)
                        ctypes.memmove(staging, storage.data_ptr() + start, count)  # releases the GIL
                        self._file.write(offset + start, self._staging[: whole_pages(count)])
                    storage.resize_(0)
        except OSError as error:
            raise ScratchError(
                self._directory,
                found=f"{reason(error)}, for the temporary file of the inputs of blocks",
                expected=f"a disk with {shown_bytes(self._end)} of free space, or more memory",
                remedy="free space there, allow more memory, or take smaller batches; the step was not taken",
            ) from error

    def _read(self, name: str, ranges: Sequence[_Range]) -> None:
        assert self._file is not None, "what is read was written"
        try:
            with self._timeline.noted(Lane.READ, name, sum(part.nbytes for part in ranges)):
                for storage, offset, nbytes in ranges:
                    storage.resize_(nbytes)
                    self._file.read_into(offset, view_of(storage.data_ptr(), nbytes))
        except (OSError, EOFError) as error:
            raise ScratchError(
                self._directory,
                found=f"{reason(error)}, for the temporary file of the inputs of blocks",
                expected="the inputs that were written there",
                remedy="repair the disk, allow more memory, or take smaller batches",
            ) from error

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
