"""The order in which the scheduler needs segments, and how far a source prefetches along it.

Write segments back in the background.

Segments of a checkpoint on disk in buckets of host memory: a bucket for each, or a few for a model of any size.

A segment stays in a bucket of its own, as embedding and head always do. Blocks that share a few buckets are prefetched in
the scheduler's order. A block that is needed soon evicts the one that is needed last; buckets beyond those that prefetching
uses keep blocks from sweep to sweep. Changed bytes are dropped and recomputed by replaying updates, or written back every
few versions.

Optimizer states that are stored with a block are read with it only while updates need them.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import torch

from zo2core.errors import ClosedError, OptionError
from zo2core.io.direct_file import whole_pages
from zo2core.profiling import Timeline
from zo2core.protocols import TensorReader
from zo2core.ranges import require_whole
from zo2core.sources.loader import BaseDigests, Loading, SegmentLoader, portions
from zo2core.sources.slot_file import SlotFile
from zo2core.types import BlockLayout, Bucket, Lane

READ_AHEAD = 2  # blocks: one is ready while the next one is read. More would evict blocks that are kept for later
NEVER = sys.maxsize  # rank of a segment that is not needed


class ReadingOrder:
    """A cyclic order of segments, from the one that is needed next to the one that is needed last."""

    def __init__(self, layouts: Sequence[BlockLayout]) -> None:
        self._layouts = layouts
        self._ranks: dict[int, int] = {}  # segment to rank, in ascending order of ranks
        self._end = 0  # the rank after the last one

    def follow(self, order: Sequence[int]) -> None:
        """Replace the order."""
        self._ranks = dict(zip(order, range(len(order)), strict=True))
        self._end = len(order)

    def acquired(self, segment: int) -> None:
        """Move a segment to the end of the order: it is needed again after all others."""
        if self._ranks.pop(segment, None) is not None:
            self._ranks[segment] = self._end
            self._end += 1

    def rank(self, segment: int) -> int:
        """A number that is higher the later a segment is needed, or ``NEVER``."""
        return self._ranks.get(segment, NEVER)

    def ahead(self) -> Iterator[int]:
        """Yield the segments to prefetch: the next blocks, and embedding and head where they stand among them."""
        blocks = 0
        for segment in self._ranks:
            blocks += not self._layouts[segment].resident
            if blocks > READ_AHEAD:
                return
            yield segment


class WriteBack:
    """A thread that writes segments every few versions."""

    def __init__(
        self, layouts: Sequence[BlockLayout], scratch: SlotFile | None, every: int | None, timeline: Timeline
    ) -> None:
        if every is not None and (every < 1 or scratch is None):
            raise OptionError(
                "write_back_every",
                found=f"{every!r}, {'no ' if scratch is None else ''}scratch directory",
                expected="at least 1 and a directory to write to, or None to write nothing",
                remedy="pass scratch=DIRECTORY, or leave `write_back_every` out",
            )
        self._layouts = layouts
        self._scratch = scratch
        self.every = every
        self._timeline = timeline
        self._writes: dict[int, Future[None]] = {}
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zo2-write")

    def start_if_due(self, segment: int, pages: torch.Tensor, version: int, then: Callable[[], None]) -> None:
        """Start writing a segment if it is far enough ahead of its bytes on disk, and return at once."""
        scratch = self._scratch
        if scratch is None or self.every is None or version - scratch.version(segment) < self.every:
            return
        future = self._pool.submit(self._write, scratch, segment, pages, version)
        self._writes[segment] = future
        future.add_done_callback(lambda _: then())

    def _write(self, scratch: SlotFile, segment: int, pages: torch.Tensor, version: int) -> None:
        with self._timeline.noted(Lane.WRITE, self._layouts[segment].name, pages.nbytes):
            scratch.write(segment, pages, version)

    def busy(self, segment: int) -> bool:
        """Whether a segment is being written."""
        future = self._writes.get(segment)
        return future is not None and not future.done()

    def wait(self, segment: int) -> None:
        """Wait until a segment is no longer being written, so that its memory may change."""
        future = self._writes.get(segment)
        if future is not None:
            self._failure = future.exception() or self._failure
            self._writes.pop(segment, None)  # only now: until here ``busy`` has to be true for other threads

    def check(self) -> None:
        """Report a write that failed, once."""
        for segment in [segment for segment, future in self._writes.items() if future.done()]:
            self.wait(segment)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for writes in flight. May be called twice."""
        self._pool.shutdown()
        if self._scratch is not None:
            self._scratch.close()


_NO_READS = Loading((), version=0)


class _Empty(NamedTuple):
    """The memory holds no usable segment."""

    reads: Loading  # abandoned reads that may still be in flight


class _Ahead(NamedTuple):
    """A segment is being prefetched, or has been, and is not acquired."""

    segment: int
    loading: Loading


class _Acquired(NamedTuple):
    """The segment is acquired, or a caller waits for its reads."""

    segment: int


class _Kept(NamedTuple):
    """A segment was released and kept; it may be being written back."""

    segment: int
    version: int


_State: TypeAlias = _Empty | _Ahead | _Acquired | _Kept


class _BucketMemory:
    """Memory for one segment, and its state."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages
        self.state: _State = _Empty(_NO_READS)
        self.states: Loading | None = _NO_READS  # later reads of optimizer states; None: they have not started
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    def views(self, segment: int, layout: BlockLayout) -> tuple[torch.Tensor, ...]:
        """Views of a segment's parameters, cached."""
        if segment not in self._views:
            self._views[segment] = layout.views(self.pages)
        return self._views[segment]


class SegmentStore:
    """Segments on disk, and buckets in host memory, page-locked where the device needs that for fast copies.

    Args:
        weights: The base checkpoint, which is only read. Belongs to the caller.
        layouts: Segments in visiting order.
        host_memory: Allocates the arena, of exact size: ``Device.host_memory``.
        buckets: Number of buckets that blocks share, at least 1; embedding and head have one more each. 3 buckets are enough
            to prefetch; more buckets keep blocks in memory from sweep to sweep. None: each segment has a bucket of its own,
            and is read once.
        scratch: Files of written-back segments. They belong to this source.
        write_back_every: A segment is written back once it is this many versions ahead of its bytes on disk, which limits
            the updates that are replayed when it is read again. None never writes.
        base_digests: Expected digests of the base's segments; None does not check them.
        timeline: Records every read and write.

    Raises:
        OptionError: if an option is out of its range.
    """

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        host_memory: Callable[[int], torch.Tensor],
        *,
        buckets: int | None = None,
        scratch: SlotFile | None = None,
        write_back_every: int | None = None,
        base_digests: BaseDigests | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if buckets is not None:
            require_whole("buckets", buckets, 1)
        self.layouts = tuple(layouts)
        timeline = timeline or Timeline()
        self._write_back = WriteBack(self.layouts, scratch, write_back_every, timeline)
        self._order = ReadingOrder(self.layouts)
        self._loader: SegmentLoader | None = SegmentLoader(weights, self.layouts, scratch, base_digests, timeline)
        self._lock = threading.RLock()
        self._nbytes = [layout.nbytes for layout in self.layouts]  # it takes a while to add up
        own = [index for index, layout in enumerate(self.layouts) if buckets is None or layout.resident]
        shared = [whole_pages(nbytes) for index, nbytes in enumerate(self._nbytes) if index not in own]
        sizes = [whole_pages(self._nbytes[index]) for index in own]
        sizes += [max(shared, default=0)] * min(buckets or 0, len(shared))
        memory = iter(portions(host_memory(sum(sizes)), sizes))
        self._own = {index: _BucketMemory(next(memory)) for index in own}  # of one segment each
        self._ring = [_BucketMemory(pages) for pages in memory]  # of all other segments
        self._holding: dict[int, _BucketMemory] = {}  # segment to the memory that holds it or that it is read into
        self._pinned: frozenset[int] = frozenset()  # segments that stay in memory, and are not written
        self._needs_states = False  # whether segments are read with their optimizer states

    @property
    def capacity(self) -> int:
        """The number of buckets that blocks share, or of all segments."""
        return len(self._ring) or len(self._own)

    @property
    def write_back_every(self) -> int | None:
        """Versions that a segment may be ahead of its bytes on disk; None: segments are never written."""
        return self._write_back.every

    def prefetch(self, order: Sequence[int]) -> int:
        """Read ahead along this order from now on. See the contract."""
        with self._lock:
            self._open_loader()
            self._order.follow(order)
            self._read_ahead()
            return sum(1 for _ in itertools.takewhile(self._is_ready, self._order.ahead()))

    def close(self) -> None:
        """Wait for reads and writes in flight and free the memory."""
        with self._lock:
            loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()
            for memory in (self._ring, self._own, self._holding):
                memory.clear()
        self._write_back.close()

    def acquire(self, index: int) -> Bucket:
        """Wait until a segment is read. See the contract."""
        self._write_back.wait(index)
        with self._lock:
            self._open_loader()
            self._write_back.check()
            memory = self._holding.get(index) or self._memory_for(index)
            assert memory is not None, "not all buckets are acquired"
            before = memory.state
            assert not isinstance(before, _Acquired), "a segment is acquired once at a time"
            self._change(memory, _Acquired(index))  # keeps prefetching from the segment and this memory
            self._order.acquired(index)
        # The lock is not held while this thread waits: the writing thread takes it between two writes.
        if isinstance(before, _Kept) and before.segment == index:
            self._read_ahead()
            version = before.version
        elif isinstance(before, _Ahead) and before.segment == index:
            version = self._wait_for_reads(index, memory, before.loading)
        else:
            self._evict(memory, before)
            version = self._wait_for_reads(index, memory, None)
        if self._needs_states:
            self._start_states(index, memory)
        return Bucket(index, memory.pages[: self._nbytes[index]], memory.views(index, self.layouts[index]), version)

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Release a bucket: it is written back if due, and kept until it is reused. See the contract."""
        memory = self._holding[bucket.segment]
        if version is not None and version != bucket.version:
            self._wait_for_states(bucket.segment, memory)  # a changed segment is written whole
        elif memory.states is not None:
            memory.states.failure()
        with self._lock:
            if version is None:
                self._change(memory, _Empty(_NO_READS))
            else:
                self._change(memory, _Kept(bucket.segment, version))
                if bucket.segment not in self._pinned:
                    pages = self._pages(bucket.segment, memory)
                    self._write_back.start_if_due(bucket.segment, pages, version, then=self._read_ahead)
            self._read_ahead()

    def pin(self, segments: Collection[int]) -> None:
        """Keep segments in memory however often they change, and write them only in ``write_kept``.

        Args:
            segments: Fewer blocks than there are buckets. Segments that were pinned until now have to be written.
        """
        with self._lock:
            self._open_loader()
            blocks = sum(not self.layouts[segment].resident for segment in segments)
            assert blocks < len(self._ring), "other blocks need a bucket"
            self._pinned = frozenset(segments)

    def read_states(self, segment: int) -> None:
        """Wait until an acquired segment has its optimizer states. Until ``skip_states``, segments are read with theirs.

        Raises:
            ScratchError: if they cannot be read.
        """
        self._needs_states = True
        self._wait_for_states(segment, self._holding[segment])

    def skip_states(self) -> None:
        """Read segments without their optimizer states from now on."""
        self._needs_states = False

    def write_kept(self) -> None:
        """Write all segments in memory that are newer than their bytes on disk, and wait for all writes.

        No segment may be acquired.

        Raises:
            ScratchError: if a segment cannot be written.
        """
        with self._lock:
            self._open_loader()
            for segment, memory in list(self._holding.items()):
                if isinstance(memory.state, _Kept) and not self._write_back.busy(segment):
                    version = memory.state.version
                    self._write_back.start_if_due(segment, self._pages(segment, memory), version, then=self._read_ahead)
        for segment in range(len(self.layouts)):
            self._write_back.wait(segment)
        self._write_back.check()

    def _pages(self, segment: int, memory: _BucketMemory) -> torch.Tensor:
        return memory.pages[: whole_pages(self._nbytes[segment])]

    def _change(self, memory: _BucketMemory, state: _State) -> None:
        """Change a memory's state, and with it the index of segments."""
        with self._lock:
            before, memory.state = memory.state, state
            if not isinstance(before, _Empty) and self._holding.get(before.segment) is memory:
                del self._holding[before.segment]
            if not isinstance(state, _Empty):
                self._holding[state.segment] = memory

    def _read_ahead(self) -> None:
        """Start reading the next segments, as far as that evicts only segments that are needed later."""
        with self._lock:
            if self._loader is None:
                return
            for segment in self._order.ahead():
                if segment not in self._holding and (memory := self._memory_for(segment, idle=True)) is not None:
                    self._change(memory, _Ahead(segment, self._load(segment, memory)))

    def _is_ready(self, segment: int) -> bool:
        memory = self._holding.get(segment)
        return memory is not None and not self._is_in_flight(memory.state)

    def _memory_for(self, segment: int, *, idle: bool = False) -> _BucketMemory | None:
        """The memory for a resident segment, or that of the block that is needed last and is neither acquired nor pinned.

        Args:
            segment: The segment to read.
            idle: Whether the memory must have no reads or writes in flight, and its block must be needed later.
        """

        def rank(memory: _BucketMemory) -> int:
            return NEVER + 1 if isinstance(memory.state, _Empty) else self._order.rank(memory.state.segment)

        memories = [self._own[segment]] if segment in self._own else self._ring
        free = (m for m in memories if not self._stays(m.state) and not (idle and self._is_in_flight(m.state)))
        last = max(free, key=rank, default=None)
        return None if idle and last is not None and rank(last) <= self._order.rank(segment) else last

    def _stays(self, state: _State) -> bool:
        """Whether a memory may not be given to another segment."""
        return isinstance(state, _Acquired) or (not isinstance(state, _Empty) and state.segment in self._pinned)

    def _is_in_flight(self, state: _State) -> bool:
        """Whether a memory's bytes are being read or written."""
        if isinstance(state, _Empty):
            return not state.reads.done()
        is_read = isinstance(state, _Ahead) and not state.loading.done()
        return is_read or self._write_back.busy(state.segment)

    def _evict(self, memory: _BucketMemory, before: _State) -> None:
        """Wait until reads into memory and writes from it have ended, dropping its content."""
        try:
            if isinstance(before, _Empty):
                before.reads.failure()
            elif isinstance(before, _Ahead):
                before.loading.failure()
            else:
                self._write_back.wait(before.segment)
        except BaseException:
            self._change(memory, before)  # the wait was interrupted: a write may still be in flight
            raise

    def _wait_for_reads(self, segment: int, memory: _BucketMemory, ahead: Loading | None) -> int:
        """Wait until an acquired segment is read; returns the version of its bytes."""
        reads = _NO_READS if ahead is None else ahead

        def load() -> Loading:
            nonlocal reads
            reads = self._load(segment, memory)
            return reads

        try:
            first = load() if ahead is None else ahead
            self._read_ahead()
            if ahead is not None and ahead.failure() is not None:  # reads ahead that failed are repeated once
                first = load()
            if not first.wait():  # the written-back bytes are damaged: read the base, from which updates are replayed
                first = load()
                first.wait()
            return first.version
        except BaseException:
            self._change(memory, _Empty(reads))  # reads may still be in flight if the wait was interrupted
            raise

    def _load(self, segment: int, memory: _BucketMemory) -> Loading:
        layout = self.layouts[segment]
        with self._lock:
            views, with_states = memory.views(segment, layout), self._needs_states or segment in self._own
            loading = self._open_loader().load(segment, memory.pages, views, with_states=with_states)
            memory.states = _NO_READS if loading.has_states else None
            return loading

    def _start_states(self, segment: int, memory: _BucketMemory) -> Loading:
        """Start reading the optimizer states of an acquired segment, if it was read without them."""
        if memory.states is None:
            with self._lock:
                memory.states = self._open_loader().load_states(segment, memory.pages)
        return memory.states

    def _wait_for_states(self, segment: int, memory: _BucketMemory) -> None:
        loading = self._start_states(segment, memory)
        if loading.failure() is not None:
            memory.states = None
        loading.wait()

    def _open_loader(self) -> SegmentLoader:
        """The reading threads of a source that is open."""
        if self._loader is None:
            raise ClosedError("SegmentStore", found="a closed source", expected="an open one", remedy="open it again")
        return self._loader
