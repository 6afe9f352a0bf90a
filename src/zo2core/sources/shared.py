"""Every segment once for all workers of a host: whoever needs it first reads it, whoever meets it first replays it.

A segment's version stands beside its bytes. It is read and changed under the segment's lock, which is held while bytes are
read or replayed, and by nobody who computes: when a step's losses are made, all workers have the same version, and none goes
on to the next before all are done.
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

# A segment's mark: version v is v + 1, and -(v + 1) while it is brought there, which loses the bytes if it does not end.
UNREAD = 0
_MARK = 8  # bytes
_DIGEST = 64  # bytes for a digest's text


class SegmentLock:
    """A segment while its lock is held.

    Args:
        marks: Marks of all segments, shared.
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
        """Change the bytes; they have this version if that ends well, and are lost otherwise."""
        self._marks[self._index] = -(version + 1)
        yield
        self._marks[self._index] = version + 1


class SharedSource(SegmentSource):
    """One copy of the model for the workers of a host.

    Args:
        weights: The base checkpoint. Belongs to the caller.
        layouts: Segments in visiting order.
        memory: Memory of ``shared_bytes``, the same for all workers. It belongs to this source.
        base_digests: What the base's segments have to be; None does not look.
        timeline: Every read is noted there.
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
        head = _head_bytes(len(self._layouts))
        count = len(self._layouts)
        self._marks = whole[: count * _MARK].view(torch.int64)
        self._digests = whole[count * _MARK : count * (_MARK + _DIGEST)].view(count, _DIGEST)
        sizes = [whole_pages(layout.nbytes) for layout in self._layouts]
        self._pages = portions(whole[head:], sizes)
        self._views = [
            layout.views(pages[: layout.nbytes]) for layout, pages in zip(self._layouts, self._pages, strict=True)
        ]
        self._locks = [threading.Lock() for _ in self._layouts]  # keep this process's two threads apart
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="zo2-read-ahead")
        self._reading: dict[int, Future[None]] = {}

    def acquire(self, index: int) -> Bucket:
        """Wait until a segment is read, by whichever worker. See the contract."""
        with self._lock:
            self._require_open()
            self._order.acquired(index)
            self._read_ahead()
            self._reading.pop(index, None)  # whatever became of it: what counts is whether it fails now
        with self._turn(index) as turn:
            self._read(index)
            self._compare(index)
            return Bucket(index, self._pages[index][: self._layouts[index].nbytes], self._views[index], turn.version)

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Do nothing: the version stands beside the bytes, and lost bytes are marked where they are lost."""

    @contextmanager
    def turn(self, index: int) -> Iterator[SegmentLock]:
        """Hold the lock of a segment that was acquired; bytes that another worker lost are read again.

        Raises:
            CheckpointError: if they cannot be read.
        """
        with self._turn(index) as turn:
            self._read(index)
            yield turn

    def require_version(self, version: int) -> None:
        """Refuse what was made of bytes that other workers have changed in the meantime.

        Args:
            version: Version that this worker is at; no segment may be at a later one.

        Raises:
            OutrunError: if one is, or was on its way there.
        """
        furthest = int(self._marks.abs().max()) - 1
        if furthest > version:
            raise OutrunError(
                "shared weights",
                found=f"other workers at step {furthest}, and this one at step {version}",
                expected="all at the same step",
                remedy="let no worker take steps while another one looks at the weights; begin again from the journals",
            )

    def close(self) -> None:
        """Wait for reads under way and let go of the memory."""
        self._ahead.shutdown(cancel_futures=True)
        super().close()

    def _give_back(self) -> None:
        self._views.clear()
        self._pages.clear()
        self._memory.close()

    def _is_ready(self, segment: int) -> bool:
        return int(self._marks[segment]) > UNREAD

    @contextmanager
    def _turn(self, index: int) -> Iterator[SegmentLock]:
        with self._locks[index], self._memory.locked(index):
            yield SegmentLock(self._marks, index)

    def _read(self, index: int) -> None:
        """Read a segment from the base unless its bytes are there. Its lock is held."""
        if int(self._marks[index]) > UNREAD:
            return
        loading = self._open_loader().load(index, self._pages[index], self._views[index])
        loading.wait()
        text = "" if self._base_digests is None else self._base_digests.known(self._layouts[index])
        if text:  # a replayer without a journal neither knows nor learns one
            self._digests[index, : len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._marks[index] = 1  # version 0

    def _compare(self, index: int) -> None:
        """Take another worker's digest of a segment that it read for an own one."""
        layout, digests = self._layouts[index], self._base_digests
        if digests is not None and digests.wants(layout):
            digests.check(layout, bytes(self._digests[index].tolist()).rstrip(b"\0").decode(), self._weights)

    def _read_ahead(self) -> None:
        for segment in self._order.ahead():
            if int(self._marks[segment]) == UNREAD and segment not in self._reading:
                self._reading[segment] = self._ahead.submit(self._read_if_unread, segment)

    def _read_if_unread(self, index: int) -> None:
        with self._turn(index):
            if int(self._marks[index]) == UNREAD:
                self._read(index)


def shared_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of memory that a ``SharedSource`` of these segments takes."""
    return _head_bytes(len(layouts)) + sum(whole_pages(layout.nbytes) for layout in layouts)


def _head_bytes(segments: int) -> int:
    return -(-segments * (_MARK + _DIGEST) // PAGE) * PAGE
