"""Segments in memory shared by all workers of a host: the first worker that needs a segment reads it and replays updates.

A segment's version is stored in the shared memory. It is read and changed under the segment's lock, which is held while
bytes are read or replayed, but not during forward passes: all workers compute a step's losses at the same version, and none
continues with the next step before all are done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from zo2core.errors import OutrunError
from zo2core.io.direct_file import PAGE, whole_pages
from zo2core.io.shared_memory import SharedMemory
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import TensorReader
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.loader import portions
from zo2core.sources.segment_source import SegmentSource
from zo2core.types import BlockLayout, Bucket

# A segment's mark is v + 1 at version v, and -(v + 1) while the bytes are being changed to v: they are lost if that fails.
UNREAD = 0
_MARK = 8  # bytes of a mark
_DIGEST = 64  # bytes of a digest's text


class SegmentLock:
    """A segment whose lock is held.

    Args:
        marks: Marks of all segments, int64, in shared memory.
        index: Index of the segment.
    """

    def __init__(self, marks: torch.Tensor, index: int) -> None:
        self._marks = marks
        self._index = index

    @property
    def version(self) -> int:
        """Version of the bytes."""
        return int(self._marks[self._index]) - 1

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Context that changes the bytes to a version; after an exception they are lost."""
        self._marks[self._index] = -(version + 1)
        yield
        self._marks[self._index] = version + 1


class SharedSource(SegmentSource):
    """One copy of the model for the workers of a host.

    Args:
        weights: The base checkpoint. Belongs to the caller.
        layouts: Segments in visiting order.
        memory: Memory of ``shared_bytes``, the same for all workers. It belongs to this source.
        base_digests: Expected digests of the base's segments; None does not check them.
        timeline: Records every read.
    """

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        memory: SharedMemory,
        *,
        base_digests: BaseDigests | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(weights, layouts, base_digests=base_digests, timeline=timeline)
        self._weights = weights
        self._memory = memory
        self._base_digests = base_digests
        whole = torch.frombuffer(memory.buffer, dtype=torch.uint8)
        header_bytes = _header_bytes(len(self._layouts))
        count = len(self._layouts)
        self._marks = whole[: count * _MARK].view(torch.int64)
        self._digests = whole[count * _MARK : count * (_MARK + _DIGEST)].view(count, _DIGEST)
        sizes = [whole_pages(layout.nbytes) for layout in self._layouts]
        # `.data` has its own version counter: otherwise a mark that changes would change all weights for torch.autograd.
        self._pages = [pages.data for pages in portions(whole[header_bytes:], sizes)]
        self._views = [
            layout.views(pages[: layout.nbytes]) for layout, pages in zip(self._layouts, self._pages, strict=True)
        ]
        self._locks = [threading.Lock() for _ in self._layouts]  # keep this process's two threads apart
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="zo2-read-ahead")
        self._reading: dict[int, Future[None]] = {}

    def acquire(self, index: int) -> Bucket:
        """Wait until this or another worker has read a segment. See the contract."""
        with self._lock:
            self._require_open()
            self._order.acquired(index)
            self._read_ahead()
            self._reading.pop(index, None)  # if this prefetch failed, the segment is read again
        with self._locked(index) as lock:
            self._read(index)
            self._compare(index)
            return Bucket(index, self._pages[index][: self._layouts[index].nbytes], self._views[index], lock.version)

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Do nothing: version and loss of the bytes are marked in shared memory when they change."""

    @contextmanager
    def turn(self, index: int) -> Iterator[SegmentLock]:
        """Hold the lock of an acquired segment; bytes that another worker lost are read again.

        Raises:
            CheckpointError: if the bytes cannot be read.
        """
        with self._locked(index) as lock:
            self._read(index)
            yield lock

    def require_version(self, version: int) -> None:
        """Refuse results of a forward pass if other workers changed the weights in the meantime.

        Args:
            version: This worker's version, the highest that a segment may have.

        Raises:
            OutrunError: if a segment has a later version, or is being changed to one.
        """
        furthest = int(self._marks.abs().max()) - 1
        if furthest > version:
            raise OutrunError(
                "shared weights",
                found=f"other workers at step {furthest}, and this one at step {version}",
                expected="all workers at the same step",
                remedy="let no worker take steps while another one reads the weights; restart from the journals",
            )

    def close(self) -> None:
        """Wait for reads in flight and free the memory."""
        self._ahead.shutdown(cancel_futures=True)
        super().close()

    def _free_memory(self) -> None:
        self._views.clear()
        self._pages.clear()
        self._memory.close()

    def _is_ready(self, segment: int) -> bool:
        return int(self._marks[segment]) > UNREAD

    @contextmanager
    def _locked(self, index: int) -> Iterator[SegmentLock]:
        with self._locks[index], self._memory.locked(index):
            yield SegmentLock(self._marks, index)

    def _read(self, index: int) -> None:
        """Read a segment from the base unless it is in memory. The caller holds its lock."""
        if int(self._marks[index]) > UNREAD:
            return
        loading = self._open_loader().load(index, self._pages[index], self._views[index])
        loading.wait()
        text = "" if self._base_digests is None else self._base_digests.known(self._layouts[index])
        if text:  # a replayer without a journal has no digests
            self._digests[index, : len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._marks[index] = 1  # version 0

    def _compare(self, index: int) -> None:
        """Check the digest of a segment that another worker read."""
        layout, digests = self._layouts[index], self._base_digests
        if digests is not None and digests.wants(layout):
            digests.check(layout, bytes(self._digests[index].tolist()).rstrip(b"\0").decode(), self._weights)

    def _read_ahead(self) -> None:
        for segment in self._order.ahead():
            if int(self._marks[segment]) == UNREAD and segment not in self._reading:
                self._reading[segment] = self._ahead.submit(self._read_if_unread, segment)

    def _read_if_unread(self, index: int) -> None:
        with self._locked(index):
            if int(self._marks[index]) == UNREAD:
                self._read(index)


def shared_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of memory of a ``SharedSource`` of these segments."""
    return _header_bytes(len(layouts)) + sum(whole_pages(layout.nbytes) for layout in layouts)


def _header_bytes(segments: int) -> int:
    return -(-segments * (_MARK + _DIGEST) // PAGE) * PAGE
