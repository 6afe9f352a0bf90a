"""Low-bit transfer: blocks are encoded on the host before they are copied to a device, and decoded
if they are copied back.

Where the host replays updates, a block is updated before it is encoded and is not copied back. One
thread does all this, ahead of the sweep; no other thread uses the wrapped source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch

from zo2core.io.direct_file import whole_pages
from zo2core.kernels.low_bit import decode, encode, low_bit_layout, scales_positions
from zo2core.protocols import BlockSource, ReplaySegment, Scheduler, VisitSegment
from zo2core.schedulers.profiling import Timeline
from zo2core.sources.segment_store import portions
from zo2core.types import BlockLayout, Bucket, Lane

STAGES = 3  # encoded blocks: one is being copied, one is ready, one is being encoded


class _Stage(NamedTuple):
    """An encoded block, in memory of its own."""

    memory: torch.Tensor
    encoded: Bucket
    # the block that was encoded, held until it is decoded; None: it is not copied back
    stored: Bucket | None


def staging_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of host memory of the encoded blocks of these layouts."""
    blocks = [
        whole_pages(low_bit_layout(layout).nbytes) for layout in layouts if not layout.resident
    ]
    return min(STAGES, len(blocks)) * max(blocks, default=0)


class LowBitSource:
    """A ``BlockSource`` for a device with memory of its own, around the source of stored blocks."""

    def __init__(
        self,
        source: BlockSource,
        staying: Collection[int],
        host_memory: Callable[[int], torch.Tensor],
        replay: ReplaySegment,
        *,
        comes_back: bool,
        timeline: Timeline | None = None,
    ) -> None:
        self._source = source
        self.capacity = min(STAGES, source.capacity)
        self.write_back_every = source.write_back_every
        self._stored = source.layouts
        self._replay = replay
        self._comes_back = comes_back
        self._timeline = timeline or Timeline()
        self.low_bit_segments = frozenset(
            i for i, layout in enumerate(self._stored) if not (layout.resident or i in staying)
        )
        self.layouts = tuple(  # segments in visiting order, as they are transferred
            low_bit_layout(layout) if i in self.low_bit_segments else layout
            for i, layout in enumerate(self._stored)
        )
        sizes = [whole_pages(self.layouts[index].nbytes) for index in self.low_bit_segments]
        pages = [max(sizes, default=0)] * min(
            STAGES, len(sizes), source.capacity if comes_back else STAGES
        )
        self._scales = [scales_positions(layout) for layout in self._stored]
        # (address, segment) -> views
        self._views: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._free = deque(portions(host_memory(sum(pages)), pages))
        # Blocks that are encoded or being encoded, not acquired, in the order of requests.
        self._prefetched: dict[int, Future[_Stage]] = {}
        self._acquired: dict[int, _Stage] = {}
        self._plain = 0  # acquired blocks that are not encoded
        self._order: Sequence[int] = ()
        self._prefetches = True
        self._returning: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zo2-low-bit")

    @contextmanager
    def without_prefetch(self) -> Iterator[None]:
        """Context without prefetching; drops the blocks that were prefetched."""
        for index in list(self._prefetched):
            self._discard(index)
        self._prefetches, prefetched = False, self._prefetches
        try:
            yield
        finally:
            self._prefetches = prefetched

    def prefetch(self, order: Sequence[int]) -> int:
        """Encode blocks in this order, and have the source read them. Returns at once."""
        if list(order) != list(self._order[len(self._order) - len(order) :]):
            self._order = tuple(order)
            self._thread.submit(self._source.prefetch, self._order)
        ready = 0
        for index in order if self._prefetches else ():
            if (
                index not in self.low_bit_segments
                or index in self._acquired
                or not self._start(index)
            ):
                break
        for index in order:
            if index not in self._prefetched or not self._prefetched[index].done():
                break
            ready += 1
        return ready

    def acquire(self, index: int) -> Bucket:
        """Wait until a block is ready to be copied."""
        while self._returning and self._returning[0].done():
            self._returning.popleft().result()
        if index not in self.low_bit_segments:
            bucket = self._thread.submit(self._source.acquire, index).result()
            self._plain += not self._stored[index].resident
            return bucket
        if index in self._prefetched and self._prefetched[index].exception() is not None:
            del self._prefetched[index]  # the prefetch failed: try again
        while not self._start(index):
            if self._prefetched:
                self._discard(next(reversed(self._prefetched)))
            else:
                self._returning.popleft().result()
        stage = self._acquired[index] = self._prefetched.pop(index).result()
        return stage.encoded

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Release a block, decoding it if it was copied back."""
        index = bucket.segment
        if index not in self.low_bit_segments:
            self._thread.submit(self._source.release, bucket, version).result()
            self._plain -= not self._stored[index].resident
            return
        stage = self._acquired.pop(index)
        if stage.stored is None:
            self._free.append(stage.memory)
        else:
            self._returning.append(self._thread.submit(self._decode, stage, stage.stored, version))

    @contextmanager
    def stored(self, index: int) -> Iterator[Bucket]:
        """Context with a block of ``low_bit_segments`` at the present version, in its stored
        dtypes.
        """
        bucket = self._thread.submit(self._replayed, index).result()
        try:
            yield bucket
        finally:
            self._thread.submit(self._source.release, bucket, bucket.version).result()

    def close(self) -> None:
        """Stop all work. May be called twice. The caller closes the source afterwards."""
        self._thread.shutdown(cancel_futures=True)
        self._prefetched.clear()
        self._free.clear()
        self._views.clear()

    def _start(self, index: int) -> bool:
        """Start encoding a block unless that has been started; returns False if there is no memory
        for it.
        """
        if index in self._prefetched:
            return True
        # buckets of the source that are in use; encoding without decoding uses one more for a while
        held = self._plain
        if self._comes_back:
            held += len(self._acquired) + len(self._prefetched)
        if not self._free or held >= self._source.capacity:
            return False
        self._prefetched[index] = self._thread.submit(self._encode, index, self._free.popleft())
        return True

    def _discard(self, index: int) -> None:
        """Free a prefetched block, also if its prefetch failed."""
        future = self._prefetched.pop(index)
        if future.exception() is not None:
            return
        stage = future.result()
        if stage.stored is not None:
            self._thread.submit(self._source.release, stage.stored, stage.stored.version).result()
        self._free.append(stage.memory)

    def _encode(self, index: int, memory: torch.Tensor) -> _Stage:
        """On the thread: encode a block."""
        try:
            bucket = self._source.acquire(index) if self._comes_back else self._replayed(index)
            layout = self.layouts[index]
            data = memory[: layout.nbytes]
            key = (memory.data_ptr(), index)
            views = self._views[key] = self._views.get(key) or layout.views(data)
            with (
                self._timeline.noted(Lane.HOST, layout.name, layout.nbytes),
                torch.inference_mode(),
            ):
                for position, scales in enumerate(self._scales[index]):
                    encode(
                        bucket.views[position],
                        views[position],
                        None if scales is None else views[scales],
                    )
            if not self._comes_back:
                self._source.release(bucket, bucket.version)
        except BaseException:
            self._free.append(memory)
            raise
        encoded = Bucket(index, data, views, bucket.version)
        return _Stage(memory, encoded, bucket if self._comes_back else None)

    def _replayed(self, index: int) -> Bucket:
        """On the thread: acquire a block and replay its missing updates."""
        bucket = self._source.acquire(index)
        try:
            with self._timeline.noted(Lane.HOST, self.layouts[index].name):
                version = self._replay(index, bucket.views, bucket.version)
        except BaseException:
            self._source.release(bucket, None)
            raise
        return bucket._replace(version=version)

    def _decode(self, stage: _Stage, stored: Bucket, version: int | None) -> None:
        """On the thread: decode a block into the source's bucket if the device changed it, and
        release the bucket.
        """
        # version of the bucket; None while its bytes are changing
        decoded: int | None = stored.version
        try:
            if version is not None and version != stored.version:
                decoded = None
                views, index = stage.encoded.views, stored.segment
                with self._timeline.noted(
                    Lane.HOST, self.layouts[index].name, len(stage.encoded.data)
                ):
                    for position, scales in enumerate(self._scales[index]):
                        decode(
                            views[position],
                            None if scales is None else views[scales],
                            stored.views[position],
                        )
                decoded = version
        finally:
            self._free.append(stage.memory)
            self._source.release(stored, decoded)


class LowBitScheduler:
    """A scheduler whose source prepares the blocks again for each sweep, at their present
    version.
    """

    def __init__(self, scheduler: Scheduler, source: LowBitSource) -> None:
        self._scheduler, self._source = scheduler, source
        # whether the last sweep failed: the scheduler may then hold buckets of it
        self._interrupted = False

    def sweep(self, visit: VisitSegment, order: Sequence[int]) -> None:
        """Visit the segments in this order."""
        self._interrupted = True
        self._scheduler.sweep(visit, order)
        self._interrupted = False

    def release_all(self) -> None:
        """Give back all buckets."""
        with self._source.without_prefetch():
            self._scheduler.release_all()
        self._interrupted = False

    @contextmanager
    def replayed(self, replay: ReplaySegment, index: int) -> Iterator[Bucket]:
        """Bring one segment to the present version, in its stored dtype."""
        if self._interrupted:
            self.release_all()
        with self._source.without_prefetch():
            if index in self._source.low_bit_segments:
                with self._source.stored(index) as bucket:
                    yield bucket
            else:
                with self._scheduler.replayed(replay, index) as bucket:
                    yield bucket
