"""A ring of a few buckets over a checkpoint on disk: a model of any size in bounded memory.

Blocks are read ahead along the sweep's order, which goes round: after the last block comes the first one of the next sweep.
A bucket is reused for the block that is needed soonest, in place of the one that is needed latest; buckets beyond what
reading ahead takes so come to keep blocks from sweep to sweep. Changed bytes are dropped and made again by replay, or
written back once they lag. Embedding and head stay in buckets of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from zo2core.errors import ClosedError, OptionError
from zo2core.io.direct_file import whole_pages
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import TensorReader
from zo2core.sources.loader import Loading, SegmentLoader, portions
from zo2core.sources.scratch import Scratch
from zo2core.sources.writeback import WriteBack
from zo2core.types import BlockLayout, Bucket

READ_AHEAD = 2  # blocks: one is ready while the next one comes


class _Slot:
    """Memory for one block, and what is in it."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages
        self.segment: int | None = None  # None: nothing of use
        self.version = 0
        self.loading: Loading | None = None
        self.held = False  # by whoever acquired it
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    def views(self, segment: int, layout: BlockLayout) -> tuple[torch.Tensor, ...]:
        """Views of a segment's parameters, made once."""
        if segment not in self._views:
            self._views[segment] = layout.views(self.pages)
        return self._views[segment]


class StreamedSource:
    """Segments on disk, and a few buckets.

    Args:
        weights: The base checkpoint; only ever read. Belongs to the caller.
        layouts: Segments in visiting order.
        host_memory: Allocates the arena: ``Device.host_memory``.
        buckets: For blocks, at least 1; embedding and head have one each besides. 3 read ahead as far as it helps; more
            keep blocks in memory from sweep to sweep.
        scratch: Where blocks were written back to, and are again; belongs to this source.
        write_back_every: A block is written back once it is this many versions ahead of its bytes on disk; in between it is
            read again and replayed. None never writes.
        timeline: Takes down every read and write: ``Device.timeline``.

    Raises:
        OptionError: if an option is out of its range.
    """

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        host_memory: Callable[[int], torch.Tensor],
        *,
        buckets: int = 1 + READ_AHEAD,
        scratch: Scratch | None = None,
        write_back_every: int | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if buckets < 1:
            raise OptionError("buckets", found=repr(buckets), expected="at least 1", remedy="leave it at its default")
        self._layouts = tuple(layouts)
        self._write_back = WriteBack(self._layouts, scratch, write_back_every, timeline)
        self._blocks = [index for index, layout in enumerate(self._layouts) if not layout.resident]
        sizes = [whole_pages(layout.nbytes) for layout in self._layouts if layout.resident]
        largest = max((whole_pages(self._layouts[index].nbytes) for index in self._blocks), default=0)
        count = min(buckets, len(self._blocks))
        sizes += [largest] * count
        memory = iter(portions(host_memory(sum(sizes)), sizes))
        self._resident = {index: _Slot(next(memory)) for index, layout in enumerate(self._layouts) if layout.resident}
        self._ring = [_Slot(pages) for pages in memory]
        self._at = 0  # position among the blocks of the one acquired last
        self._loader: SegmentLoader | None = SegmentLoader(weights, self._layouts, scratch, timeline)
        self._lock = threading.RLock()

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order."""
        return self._layouts

    @property
    def capacity(self) -> int:
        """As many blocks at a time as there are buckets for them."""
        return len(self._ring)

    @property
    def write_back_every(self) -> int | None:
        """Versions that a segment may be ahead of its bytes on disk; None: it is never written."""
        return self._write_back.every

    def prefetch(self, index: int) -> bool:
        """Start reading a segment if that costs none that is needed sooner. See the contract."""
        with self._lock:
            self._require_open()
            slot = self._find(index)
            if slot is None:
                slot = self._resident.get(index) or self._reusable(sooner_than=self._distance(index))
                if slot is not None:
                    self._load(index, slot)
            there = slot is not None and (slot.loading is None or slot.loading.done())
        return there and not self._write_back.busy(index)

    def acquire(self, index: int) -> Bucket:
        """Wait until a segment is read. See the contract."""
        self._write_back.wait(index)
        with self._lock:
            self._require_open()
            self._write_back.check()
            slot = self._find(index)
            assert slot is None or not slot.held, "a segment is acquired once at a time"
            if index not in self._resident:
                self._at = self._blocks.index(index)
            if slot is not None:
                slot.held = True
        ahead = slot is not None
        slot = self._emptied(index) if slot is None else slot
        try:
            with self._lock:
                self._require_open()
                if not ahead:
                    self._load(index, slot)
            self._read_ahead()
            if slot.loading is not None:
                if ahead and slot.loading.failed():  # then, when nobody needed it; what counts is whether it fails now
                    with self._lock:
                        self._require_open()
                        self._load(index, slot)
                slot.loading.wait()
        except BaseException:
            slot.segment, slot.held = None, False  # reads may go on if the wait was interrupted: whoever reuses it waits
            raise
        if slot.loading is not None:
            slot.version, slot.loading = slot.loading.version, None
        layout = self._layouts[index]
        return Bucket(index, slot.pages[: layout.nbytes], slot.views(index, layout), slot.version)

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Give a bucket back: to be written, kept for a while, or reused."""
        with self._lock:
            slot = self._find(bucket.segment)
            assert slot is not None, "released what was not acquired"
            slot.held = False
            if version is None:
                slot.segment = None
            else:
                slot.version = version
                pages = slot.pages[: whole_pages(self._layouts[bucket.segment].nbytes)]
                self._write_back.start_if_due(bucket.segment, pages, version, then=self._read_ahead)
            self._read_ahead()

    def close(self) -> None:
        """Wait for reads and writes under way and give the arena back."""
        with self._lock:
            loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()
        self._write_back.close()
        self._ring.clear()
        self._resident.clear()

    def _find(self, index: int) -> _Slot | None:
        slots = [self._resident[index]] if index in self._resident else self._ring
        return next((slot for slot in slots if slot.segment == index), None)

    def _distance(self, index: int) -> int:
        """How many visits until a block is needed, from the one acquired last."""
        return (self._blocks.index(index) - self._at) % len(self._blocks)

    def _lateness(self, slot: _Slot) -> int:
        """How many visits until a bucket's bytes are needed again; more than all if they are of no use."""
        if slot.segment is None:
            return len(self._blocks) + 1
        # The block acquired last, once released, is the one needed last: a whole sweep from now.
        return self._distance(slot.segment) or len(self._blocks)

    def _read_ahead(self) -> None:
        with self._lock:
            if self._loader is None:
                return
            for ahead in range(1, 1 + READ_AHEAD):
                self.prefetch(self._blocks[(self._at + ahead) % len(self._blocks)])

    def _reusable(self, sooner_than: int) -> _Slot | None:
        """The bucket whose block is needed last, if that is later than a given one and nothing is going on in it."""
        best, latest = None, sooner_than
        for slot in self._ring:
            if slot.held or (slot.loading is not None and not slot.loading.done()):
                continue
            if slot.segment is None:
                return slot
            lateness = self._lateness(slot)
            if lateness > latest and not self._write_back.busy(slot.segment):
                best, latest = slot, lateness
        return best

    def _emptied(self, index: int) -> _Slot:
        """A bucket for a segment that is needed now, taken: whatever went on in it has ended."""
        with self._lock:
            slot = self._resident.get(index) or max((each for each in self._ring if not each.held), key=self._lateness)
            displaced, slot.segment, slot.held = slot.segment, index, True  # nobody loads it into another one meanwhile
        # The lock is free while waiting: the writing thread takes it between two writes.
        try:
            if slot.loading is not None:
                slot.loading.settle()
            if displaced is not None:
                self._write_back.wait(displaced)
        except BaseException:
            slot.segment, slot.held = displaced, False  # interrupted: its bytes may still be on their way to the disk
            raise
        return slot

    def _load(self, index: int, slot: _Slot) -> None:
        assert self._loader is not None
        slot.segment = index
        slot.loading = self._loader.load(index, slot.pages, slot.views(index, self._layouts[index]))

    def _require_open(self) -> None:
        if self._loader is None:
            raise ClosedError("StreamedSource", found="a closed source", expected="an open one", remedy="open it again")
