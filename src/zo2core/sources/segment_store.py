"""Segments of a checkpoint on disk in buckets of host memory: a bucket for each, or a few for a
model of any size.

A segment stays in a bucket of its own, as embedding and head always do. Blocks that share a few
buckets are prefetched in the scheduler's order. A block that is needed soon evicts the one that is
needed last; buckets beyond those that prefetching uses keep blocks from sweep to sweep. Changed
bytes are dropped and recomputed by replaying updates, or written back every few versions. Optimizer
states that are stored with a block are read with it only while updates need them.

Digests of the base's segments are computed with the first reads, kept in the journal, and compared
by later runs. The fingerprint in a journal's header samples each tensor; a digest covers every
byte. It is computed from a segment's parameters as they are loaded, in the run's dtype, in chunks
that start at fixed elements of each parameter. It depends neither on the parameter's offset in a
file nor on its offset in a bucket.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from zo2core.errors import CheckpointError, ClosedError, OptionError
from zo2core.io.direct_file import (
    PAGE,
    anonymous_memory,
    byte_view,
    chunk_checksum,
    combined_checksum,
    whole_pages,
)
from zo2core.journal.journal import Journal
from zo2core.protocols import BlockModel, TensorReader
from zo2core.ranges import require_whole
from zo2core.schedulers.profiling import SpanOfParts, Timeline
from zo2core.sources.slot_file import PIECE, SlotFile
from zo2core.types import BlockLayout, Bucket, Lane, ParameterSpec, aligned

_Read: TypeAlias = tuple[int, Callable[[], object]]  # bytes, and the function that reads them

READERS = 4  # threads; one buffered reader does not reach a disk's rate
# bytes of a read: small enough for all threads to work on the segment that is needed first
CHUNK = PIECE
DIGEST_CHUNK = 1 << 20  # bytes of a digest's chunk: each has a checksum of its own


def portions(memory: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Split memory into consecutive slices of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def laid_out_as_on_disk(
    layouts: Sequence[BlockLayout], weights: TensorReader
) -> tuple[BlockLayout, ...]:
    """Give each parameter the offset in its bucket at which pages of the disk can be read without a
    copy.

    A parameter has the same offset within a page as in its file. Tensors that are adjacent in the
    file stay adjacent. States begin at a page, so that parameters can be read without them.
    """
    return tuple(replace(layout, offsets=_offsets(layout, weights)) for layout in layouts)


def _offsets(layout: BlockLayout, weights: TensorReader) -> tuple[int, ...]:
    offsets: list[int] = []
    end = 0
    for spec in layout.parameters:
        page_offset = weights.page_offset(spec)
        offsets.append(aligned(end) if page_offset is None else end + (page_offset - end) % PAGE)
        end = offsets[-1] + spec.nbytes
    end = whole_pages(end)
    for state in layout.states:
        offsets.append(aligned(end))
        end = offsets[-1] + state.nbytes
    return tuple(offsets)


class SegmentDigest:
    """The digest of a segment that several threads read in parts, in any order.

    Parts end at page boundaries of the disk, not at those of chunks. The thread that reads a
    chunk's last bytes computes its checksum while the chunk is in a cache, so the segment is not
    read a second time.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self._lengths = [_chunk_length(view.dtype) for view in views]  # elements of a chunk
        self._missing = [
            [min(length, view.numel() - first) for first in range(0, view.numel(), length)]
            for view, length in zip(views, self._lengths, strict=True)
        ]
        self._checksums = [[0] * len(missing) for missing in self._missing]
        self._lock = threading.Lock()

    def add(self, parameter: int, start: int, stop: int) -> None:
        """Add elements of a parameter that have been read, each once."""
        view = self._views[parameter]
        length = self._lengths[parameter]
        missing = self._missing[parameter]
        complete: list[int] = []
        with self._lock:
            for chunk in range(start // length, -(-stop // length)):
                missing[chunk] -= min(stop, (chunk + 1) * length) - max(start, chunk * length)
                if missing[chunk] == 0:
                    complete.append(chunk)
        for chunk in complete:
            self._checksums[parameter][chunk] = chunk_checksum(
                byte_view(view[chunk * length : (chunk + 1) * length])
            )

    def value(self) -> str:
        """The digest, once all elements were added."""
        return combined_checksum(
            checksum for checksums in self._checksums for checksum in checksums
        )


class BaseDigests:
    """Expected digests of the base's segments.

    A segment is checked when a process first reads it from the base, not at later reads: disks have
    error-correcting codes, and a reader refuses files that change while it has them open.

    Args:
        recorded: Digests by segment.
        learns: Whether those that are not recorded are computed.
        read_whole: Names of the segments of which this process reads all parameters; None: of all.
    """

    def __init__(
        self,
        recorded: Mapping[str, str],
        *,
        learns: bool,
        read_whole: Collection[str] | None = None,
    ) -> None:
        self._expected = dict(recorded)
        self._read_whole = read_whole
        self._learns = learns
        self._checked: set[str] = set()

    def wants(self, layout: BlockLayout) -> bool:
        """Whether the next read of a segment needs a digest."""
        if self._read_whole is not None and layout.name not in self._read_whole:
            return False
        return layout.name not in self._checked and (self._learns or layout.name in self._expected)

    def check(self, layout: BlockLayout, digest: str, weights: TensorReader) -> None:
        """Compare the digest of bytes that were read from the base, or keep it if there is none
        yet.
        """
        expected = self._expected.setdefault(layout.name, digest)
        if expected != digest:
            files = sorted({weights.origin(spec.name) for spec in layout.parameters})
            raise CheckpointError(
                f"{', '.join(files)}: {layout.name}",
                found=f"content of digest {digest}",
                expected=f"digest {expected}, of the base that the run was started with",
                remedy="download the file again: the run's weights depend on its original bytes",
            )
        self._checked.add(layout.name)

    def known(self, layout: BlockLayout) -> str:
        """The digest of a segment that was read; empty if none was computed."""
        return self._expected.get(layout.name, "")

    def unknown_to(self, journal: Journal) -> Mapping[str, str]:
        """The digests that a journal lacks, sorted: workers may read segments in different
        orders.
        """
        return {
            name: digest
            for name, digest in sorted(self._expected.items())
            if name not in journal.base_digests
        }


def verify_base(
    model: BlockModel, journal: Journal, progress: Callable[[int], object] | None = None
) -> Mapping[str, str]:
    """Read every byte of a model's base and compare it with the digests in a journal; returns those
    that it lacks.
    """
    digests = BaseDigests(journal.base_digests, learns=True)
    check_segments(model.layouts, model.weights, digests, progress)
    return digests.unknown_to(journal)


def check_segments(
    layouts: Iterable[BlockLayout],
    weights: TensorReader,
    digests: BaseDigests,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Read every byte of segments, and compare their digests with those expected."""
    memory = threading.local()

    def checksums(spec: ParameterSpec, start: int) -> tuple[int, list[int]]:
        """Read the next few chunks of a parameter into a small buffer of the thread; returns their
        bytes and checksums.
        """
        if not hasattr(memory, "pages"):
            memory.pages = torch.frombuffer(anonymous_memory(CHUNK + PAGE), dtype=torch.uint8)
        dtype = spec.stored_dtype
        count = min(CHUNK // dtype.itemsize, spec.stored_numel - start)
        # the offset on disk, so that most bytes are read without a copy
        offset = weights.page_offset(spec) or 0
        chunks = memory.pages[offset : offset + count * dtype.itemsize].view(dtype)
        weights.read_into(spec.name, chunks, start)
        return chunks.nbytes, [
            chunk_checksum(byte_view(chunk)) for chunk in torch.split(chunks, _chunk_length(dtype))
        ]

    with ThreadPoolExecutor(READERS, thread_name_prefix="zo2-verify") as pool:
        for layout in layouts:
            reads = [
                (spec, start)
                for spec in layout.parameters
                for start in range(0, spec.stored_numel, CHUNK // spec.stored_dtype.itemsize)
            ]
            of_segment: list[int] = []
            for nbytes, of_chunks in pool.map(checksums, *zip(*reads, strict=True)):
                of_segment += of_chunks
                if progress is not None:
                    progress(nbytes)
            digests.check(layout, combined_checksum(of_segment), weights)


def _chunk_length(dtype: torch.dtype) -> int:
    """Elements of a chunk."""
    return DIGEST_CHUNK // dtype.itemsize


@dataclass(frozen=True, eq=False)
class Loading:
    """Reads of a segment that are in flight."""

    futures: Sequence[Future[None]]
    version: int  # of the bytes
    # once all are read: False if the bytes do not match their record
    check: Callable[[], bool] = lambda: True
    has_states: bool = True

    def done(self) -> bool:
        """Whether all reads have ended."""
        return all(map(Future.done, self.futures))

    def failure(self) -> BaseException | None:
        """Wait for all reads to end, so that none writes into the memory later; returns the first
        failure.
        """
        wait(self.futures)
        for future in self.futures:
            failure = CancelledError() if future.cancelled() else future.exception()
            if failure is not None:
                return failure
        return None

    def wait(self) -> bool:
        """Wait for all reads to end, and report the first failure; returns False if the bytes do
        not match their record.
        """
        failure = self.failure()
        if failure is not None:
            raise failure
        return self.check()


# blocks: one is ready while the next one is read. More would evict blocks that are kept for later
READ_AHEAD = 2
NEVER = sys.maxsize  # rank of a segment that is not needed

_NO_READS = Loading((), version=0)


class _Empty(NamedTuple):
    """The memory holds no usable segment."""

    loading: Loading  # abandoned reads that may still be in flight


class _Held(NamedTuple):
    """The memory holds a segment that is not acquired, and that may still be being read or written
    back.
    """

    segment: int
    loading: Loading  # has the bytes' version; without reads if the segment was released and kept


class _Acquired(NamedTuple):
    """The segment is acquired, or a caller waits for its reads."""

    segment: int


_State: TypeAlias = _Empty | _Held | _Acquired


class _BucketMemory:
    """Memory for one segment, and its state."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages
        self.state: _State = _Empty(_NO_READS)
        # later reads of optimizer states; None: they have not started
        self.states: Loading | None = _NO_READS
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    def views(self, segment: int, layout: BlockLayout) -> tuple[torch.Tensor, ...]:
        """Views of a segment's parameters, cached."""
        if segment not in self._views:
            self._views[segment] = layout.views(self.pages)
        return self._views[segment]


class SegmentStore:
    """Segments on disk, and buckets in host memory, page-locked where the device needs that for
    fast copies.

    Args:
        weights: The base checkpoint, which is only read. Belongs to the caller.
        layouts: Segments in visiting order.
        host_memory: Allocates the arena, of exact size: ``Device.host_memory``.
        buckets: Number of buckets that blocks share, at least 1; embedding and head have one more
            each. 3 buckets are enough to prefetch; more buckets keep blocks in memory from sweep to
            sweep. None: each segment has a bucket of its own, and is read once.
        scratch: Files of written-back segments. They belong to this source.
        write_back_every: A segment is written back once it is this many versions ahead of its bytes
            on disk, which limits the updates that are replayed when it is read again. None never
            writes.
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
        if write_back_every is not None and (write_back_every < 1 or scratch is None):
            raise OptionError(
                "write_back_every",
                found=f"{write_back_every!r}, {'no ' if scratch is None else ''}scratch directory",
                expected="at least 1 and a directory to write to, or None to write nothing",
                remedy="pass `scratch=DIRECTORY`, or leave `write_back_every` out",
            )
        self.layouts = tuple(layouts)
        self.write_back_every = write_back_every
        self._weights = weights
        self._scratch = scratch
        self._base_digests = base_digests or BaseDigests({}, learns=False)
        self._timeline = timeline or Timeline()
        self._closed = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="zo2-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="zo2-write")
        self._writes: dict[int, Future[None]] = {}
        self._failed_write: BaseException | None = None  # not reported yet
        # segments in the order in which they are needed, with ascending ranks
        self._ranks: dict[int, int] = {}
        self._next_rank = 0
        self._lock = threading.RLock()
        self._own: dict[int, _BucketMemory] = {}  # of one segment each
        self._ring: list[_BucketMemory] = []  # of all other segments
        self._take_memory(host_memory, buckets)
        # segment to the memory that holds it or that it is read into
        self._holding: dict[int, _BucketMemory] = {}
        # segments that stay in memory, and are not written
        self._pinned: frozenset[int] = frozenset()
        self._needs_states = False  # whether segments are read with their optimizer states

    def _take_memory(self, host_memory: Callable[[int], torch.Tensor], buckets: int | None) -> None:
        """Take memory for a bucket of each segment that is always there, and of those that the
        others share.
        """
        with_own_memory = [
            index for index, layout in enumerate(self.layouts) if buckets is None or layout.resident
        ]
        pages = [whole_pages(layout.nbytes) for layout in self.layouts]
        shared = [nbytes for index, nbytes in enumerate(pages) if index not in with_own_memory]
        sizes = [pages[index] for index in with_own_memory]
        if buckets is not None:
            sizes += [max(shared, default=0)] * min(buckets, len(shared))
        memory = iter(portions(host_memory(sum(sizes)), sizes))
        self._own = {index: _BucketMemory(next(memory)) for index in with_own_memory}
        self._ring = [_BucketMemory(pages) for pages in memory]

    @property
    def capacity(self) -> int:
        """The number of buckets that blocks share, or of all segments."""
        return len(self._ring) or len(self._own)

    def prefetch(self, order: Sequence[int]) -> int:
        """Read ahead along this order from now on; returns how many of the next are there."""
        with self._lock:
            self._require_open()
            self._ranks = {segment: rank for rank, segment in enumerate(order)}
            self._next_rank = len(order)
            self._read_ahead()
            ready = 0
            for segment in self._segments_ahead():
                memory = self._holding.get(segment)
                if memory is None or not self._is_idle(memory.state):
                    break
                ready += 1
            return ready

    def close(self) -> None:
        """Drop reads that have not started, wait for reads and writes in flight, and free the
        memory.
        """
        with self._lock:
            self._closed = True
        self._readers.shutdown(cancel_futures=True)
        for memory in (self._ring, self._own, self._holding):
            memory.clear()
        self._writer.shutdown()
        if self._scratch is not None:
            self._scratch.close()

    def acquire(self, index: int) -> Bucket:
        """Wait until a segment is read; its bucket belongs to the caller until it is released."""
        self._wait_for_write(index)
        with self._lock:
            self._require_open()
            self._report_failed_write()
            memory = self._holding.get(index) or self._memory_for(index)
            assert memory is not None, "not all buckets are acquired"
            state = memory.state
            assert not isinstance(state, _Acquired), "a segment is acquired once at a time"
            # keeps prefetching from the segment and this memory
            self._set_state(memory, _Acquired(index))
            if self._ranks.pop(index, None) is not None:  # it is needed again after all others
                self._ranks[index] = self._next_rank
                self._next_rank += 1
        # The lock is not held while this thread waits: the writing thread takes it between two
        # writes.
        is_held = isinstance(state, _Held) and state.segment == index
        if not is_held:
            self._evict(memory, state)
        version = self._wait_for_reads(index, memory, state.loading if is_held else None)
        if self._needs_states:
            self._start_states(index, memory)
        layout = self.layouts[index]
        return Bucket(index, memory.pages[: layout.nbytes], memory.views(index, layout), version)

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Release a bucket: it is written back if due, and kept until it is reused.

        Without a version its bytes are invalid, and are read again.
        """
        segment = bucket.segment
        memory = self._holding[bucket.segment]
        if version is not None and version != bucket.version:
            self._wait_for_states(segment, memory)  # a changed segment is written whole
        elif memory.states is not None:
            memory.states.failure()
        with self._lock:
            self._set_state(
                memory,
                _Empty(_NO_READS) if version is None else _Held(segment, Loading((), version)),
            )
            if version is not None and segment not in self._pinned:
                self._write_if_due(segment, memory, version)
            self._read_ahead()

    def pin(self, segments: Collection[int]) -> None:
        """Keep segments in memory however often they change, and write them only in ``write_kept``.

        Args:
            segments: Fewer blocks than there are buckets. Segments that were pinned until now have
                to be written.
        """
        with self._lock:
            self._require_open()
            blocks = sum(not self.layouts[segment].resident for segment in segments)
            assert blocks < len(self._ring), "other blocks need a bucket"
            self._pinned = frozenset(segments)

    def read_states(self, segment: int) -> None:
        """Wait until an acquired segment has its optimizer states.

        Until ``skip_states``, segments are read with theirs.

        Raises:
            ScratchError: if they cannot be read.
        """
        self._needs_states = True
        self._wait_for_states(segment, self._holding[segment])

    def skip_states(self) -> None:
        """Read segments without their optimizer states from now on."""
        self._needs_states = False

    def write_kept(self) -> None:
        """Write all segments in memory that are newer than their bytes on disk, and wait for all
        writes.

        No segment may be acquired.

        Raises:
            ScratchError: if a segment cannot be written.
        """
        with self._lock:
            self._require_open()
            for segment, memory in list(self._holding.items()):
                if isinstance(memory.state, _Held) and not self._is_being_written(segment):
                    self._write_if_due(segment, memory, memory.state.loading.version)
        for segment in range(len(self.layouts)):
            self._wait_for_write(segment)
        self._report_failed_write()

    def _write_if_due(self, segment: int, memory: _BucketMemory, version: int) -> None:
        """Start writing a segment if it is far enough ahead of its bytes on disk, and return at
        once.
        """
        scratch, every = self._scratch, self.write_back_every
        if scratch is None or every is None or version - scratch.version(segment) < every:
            return
        pages = memory.pages[: whole_pages(self.layouts[segment].nbytes)]

        def write() -> None:
            with self._timeline.noted(Lane.WRITE, self.layouts[segment].name, pages.nbytes):
                scratch.write(segment, pages, version)

        future = self._writes[segment] = self._writer.submit(write)
        future.add_done_callback(lambda _: self._read_ahead())

    def _is_being_written(self, segment: int) -> bool:
        future = self._writes.get(segment)
        return future is not None and not future.done()

    def _wait_for_write(self, segment: int) -> None:
        """Wait until a segment is no longer being written, so that its memory may change."""
        future = self._writes.get(segment)
        if future is not None:
            self._failed_write = future.exception() or self._failed_write
            # only now: until here other threads have to see that it is being written
            self._writes.pop(segment, None)

    def _report_failed_write(self) -> None:
        """Raise the failure of a write, once."""
        for segment in [segment for segment, future in self._writes.items() if future.done()]:
            self._wait_for_write(segment)
        failure, self._failed_write = self._failed_write, None
        if failure is not None:
            raise failure

    def _set_state(self, memory: _BucketMemory, state: _State) -> None:
        """Change a memory's state, and with it the index of segments."""
        with self._lock:
            previous, memory.state = memory.state, state
            if not isinstance(previous, _Empty) and self._holding.get(previous.segment) is memory:
                del self._holding[previous.segment]
            if not isinstance(state, _Empty):
                self._holding[state.segment] = memory

    def _segments_ahead(self) -> list[int]:
        """The segments to prefetch: the next blocks, and embedding and head where they stand among
        them.
        """
        segments: list[int] = []
        blocks = 0
        for segment in self._ranks:
            blocks += not self.layouts[segment].resident
            if blocks > READ_AHEAD:
                break
            segments.append(segment)
        return segments

    def _read_ahead(self) -> None:
        """Start reading the next segments, as far as that evicts only segments that are needed
        later.
        """
        with self._lock:
            if self._closed:
                return
            for segment in self._segments_ahead():
                if (
                    segment not in self._holding
                    and (memory := self._memory_for(segment, idle=True)) is not None
                ):
                    self._set_state(memory, _Held(segment, self._load(segment, memory)))

    def _memory_for(self, segment: int, *, idle: bool = False) -> _BucketMemory | None:
        """The memory for a resident segment, or that of the block that is needed last and is
        neither acquired nor pinned.

        Args:
            segment: The segment to read.
            idle: Whether the memory must have no reads or writes in flight, and its block must be
                needed later.
        """

        def rank(memory: _BucketMemory) -> int:
            return (
                NEVER + 1
                if isinstance(memory.state, _Empty)
                else self._ranks.get(memory.state.segment, NEVER)
            )

        def stays(state: _State) -> bool:
            return isinstance(state, _Acquired) or (
                not isinstance(state, _Empty) and state.segment in self._pinned
            )

        memories = [self._own[segment]] if segment in self._own else self._ring
        free = (
            m for m in memories if not stays(m.state) and not (idle and not self._is_idle(m.state))
        )
        last = max(free, key=rank, default=None)
        return (
            None
            if idle and last is not None and rank(last) <= self._ranks.get(segment, NEVER)
            else last
        )

    def _is_idle(self, state: _State) -> bool:
        """Whether a memory's bytes are neither being read ahead nor written."""
        is_written = not isinstance(state, _Empty) and self._is_being_written(state.segment)
        return not is_written and (isinstance(state, _Acquired) or state.loading.done())

    def _evict(self, memory: _BucketMemory, state: _Empty | _Held) -> None:
        """Wait until reads into memory and writes from it have ended, dropping its content."""
        try:
            state.loading.failure()
            if isinstance(state, _Held):
                self._wait_for_write(state.segment)
        except BaseException:
            # the wait was interrupted: a write may still be in flight
            self._set_state(memory, state)
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
            if ahead is not None and ahead.failure() is not None:
                # reads ahead that failed are repeated once
                first = load()
            if not first.wait():
                # the written-back bytes are damaged: read the base, from which updates are replayed
                first = load()
                first.wait()
            return first.version
        except BaseException:
            is_kept = reads is ahead and not reads.futures
            # Reads may still be in flight if the wait was interrupted.
            self._set_state(memory, _Held(segment, reads) if is_kept else _Empty(reads))
            raise

    def _load(self, segment: int, memory: _BucketMemory) -> Loading:
        """Start reading a segment into memory, with its optimizer states if they are needed."""
        with self._lock:
            loading = self._begin_reads(
                segment, memory, states=self._needs_states or segment in self._own
            )
            memory.states = _NO_READS if loading.has_states else None
            return loading

    def _begin_reads(
        self, segment: int, memory: _BucketMemory, *, weights: bool = True, states: bool = True
    ) -> Loading:
        """Start filling a segment's memory and return at once.

        Args:
            segment: The segment.
            memory: Its memory.
            weights: Whether its parameters are read; they may be left out where its states follow
                them.
            states: Whether its optimizer's states are read, if the segment was written. They are
                always read with bytes that have not been compared with their checksum.
        """
        self._require_open()
        scratch = self._scratch
        layout = self.layouts[segment]
        if scratch is None or scratch.version(segment) == 0:
            assert weights, "states are left out where they are written"
            return self._read_base(segment, memory.views(segment, layout))
        is_unchecked = scratch.is_unchecked(segment)
        states = states or not layout.states or is_unchecked
        end = whole_pages(layout.nbytes) if states else layout.weight_bytes
        starts = range(0 if weights else layout.weight_bytes, end, CHUNK)
        version = scratch.version(segment)
        checksums = [0] * len(starts)

        def read(index: int, out: torch.Tensor) -> None:
            scratch.read(segment, out, starts[index])
            if is_unchecked:
                checksums[index] = chunk_checksum(byte_view(out))  # while the bytes are in a cache

        def check() -> bool:
            return not is_unchecked or scratch.confirm(segment, checksums)

        chunks = [memory.pages[start : min(start + CHUNK, end)] for start in starts]
        reads: list[_Read] = [
            (out.nbytes, partial(read, index, out)) for index, out in enumerate(chunks)
        ]
        return Loading(self._submit(segment, reads), version, check, has_states=states)

    def _read_base(self, segment: int, views: Sequence[torch.Tensor]) -> Loading:
        layout = self.layouts[segment]
        digests = self._base_digests
        count = len(layout.parameters)
        states = views[count:]
        views = views[:count]
        digest = SegmentDigest(views) if digests.wants(layout) else None

        def read(parameter: int, start: int, stop: int) -> None:
            # `.data` has its own version counter. Slices of one memory share theirs, and
            # torch.autograd refuses a graph on another slice if it changes.
            self._weights.read_into(
                layout.parameters[parameter].name, views[parameter].data[start:stop], start
            )
            if digest is not None:
                digest.add(parameter, start, stop)

        def check() -> bool:
            if digest is not None:
                digests.check(layout, digest.value(), self._weights)
            return True

        reads: list[_Read] = []
        for parameter, (spec, view) in enumerate(zip(layout.parameters, views, strict=True)):
            step = CHUNK // view.itemsize
            offset = view.data_ptr() % PAGE // view.itemsize
            # at page boundaries
            bounds = [0, *range(step - offset, view.numel(), step), view.numel()]
            itemsize = self._weights.itemsize(spec.name)
            reads += [
                ((stop - start) * itemsize, partial(read, parameter, start, stop))
                for start, stop in itertools.pairwise(bounds)
            ]
        # of a segment without a step they are zero
        reads += [(0, state.data.zero_) for state in states]
        return Loading(self._submit(segment, reads), 0, check)

    def _submit(self, segment: int, reads: Sequence[_Read]) -> list[Future[None]]:
        """Start all reads as one task per thread; submitting each read would take the caller
        40 us.
        """
        gathered = SpanOfParts(self._timeline, Lane.READ, self.layouts[segment].name, len(reads))
        queue = deque(reads)

        def run_reads() -> None:
            while True:
                try:
                    nbytes, read = queue.popleft()
                except IndexError:
                    return
                if self._closed:
                    raise CancelledError
                with gathered.part(nbytes):
                    read()

        return [self._readers.submit(run_reads) for _ in range(min(READERS, len(reads)))]

    def _start_states(self, segment: int, memory: _BucketMemory) -> Loading:
        """Start reading the optimizer states of an acquired segment, if it was read without
        them.
        """
        if memory.states is None:
            with self._lock:
                memory.states = self._begin_reads(segment, memory, weights=False)
        return memory.states

    def _wait_for_states(self, segment: int, memory: _BucketMemory) -> None:
        loading = self._start_states(segment, memory)
        if loading.failure() is not None:
            memory.states = None
        loading.wait()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("SegmentStore", "a closed source", "an open one", "open it again")
