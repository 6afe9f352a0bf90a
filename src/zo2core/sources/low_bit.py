"""Blocks as they are carried to a device: rounded on the way there, and widened on the way back, if they come back.

Where the host replays, a block is brought to its present version before it leaves, and never comes back. One thread does all
this, ahead of the sweep; the source that the blocks come from is used by that thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from zo2core.io.direct_file import whole_pages
from zo2core.kernels.low_bit import decode, encode, low_bit_layout, scales_places
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockSource, Store
from zo2core.sources.loader import portions
from zo2core.types import BlockLayout, Bucket, Lane

STAGES = 3  # blocks as they are carried: one leaves, one is ready, one is made ready

Replay: TypeAlias = Callable[[int, Store, int], int]  # segment, its parameters, their version; to the version after

_Result = TypeVar("_Result")


class _Stage(NamedTuple):
    """A block as it is carried, in memory of its own."""

    memory: torch.Tensor
    encoded: Bucket
    stored: Bucket | None  # what it was made from, held until it comes back; None: it does not come back


def staging_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Host memory of the stages for these layouts' blocks."""
    blocks = [whole_pages(low_bit_layout(layout).nbytes) for layout in layouts if not layout.resident]
    return min(STAGES, len(blocks)) * max(blocks, default=0)


class LowBitSource:
    """Wraps the source of a device with memory of its own.

    Args:
        source: Where the segments live, as they are stored. Belongs to the caller; nobody else may use it.
        staying: Blocks that are computed on as they are stored, because they stay on the device. So are embedding and head.
        host_memory: Allocates the stages: ``Device.host_memory``.
        replay: Brings a block to the present version, on the host.
        comes_back: Whether the device replays, and what is carried comes back; else the host replays.
        timeline: What the host does is noted there.
    """

    def __init__(
        self,
        source: BlockSource,
        staying: Collection[int],
        host_memory: Callable[[int], torch.Tensor],
        replay: Replay,
        *,
        comes_back: bool,
        timeline: Timeline | None = None,
    ) -> None:
        self._source = source
        self._stored = source.layouts
        self._replay = replay
        self._comes_back = comes_back
        self._timeline = Timeline() if timeline is None else timeline
        self.low_bit_segments = frozenset(
            i for i, layout in enumerate(self._stored) if not (layout.resident or i in staying)
        )
        self._layouts = tuple(
            low_bit_layout(own) if i in self.low_bit_segments else own for i, own in enumerate(self._stored)
        )
        sizes = [whole_pages(self._layouts[index].nbytes) for index in self.low_bit_segments]
        stages = min(STAGES, len(sizes), source.capacity if comes_back else STAGES)
        pages = [max(sizes, default=0)] * stages
        self._scales = [scales_places(layout) for layout in self._stored]
        self._views: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}  # of each segment in each stage, made once
        self._free = deque(portions(host_memory(sum(pages)), pages))
        self._coming: dict[int, Future[_Stage]] = {}  # not yet acquired, in the order in which they were asked for
        self._acquired: dict[int, _Stage] = {}
        self._as_stored = 0  # blocks that are acquired as they are stored
        self._told: Sequence[int] = ()
        self._ahead = True
        self._returning: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zo2-carry")

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order, as they are carried."""
        return self._layouts

    @property
    def capacity(self) -> int:
        """As many blocks as there are stages, if the source can give as many."""
        return min(STAGES, self._source.capacity)

    @property
    def write_back_every(self) -> int | None:
        """The source's."""
        return self._source.write_back_every

    @contextmanager
    def only_when_acquired(self) -> Iterator[None]:
        """Make nothing ready ahead of its need within the context, and give up what was."""
        for index in list(self._coming):
            self._give_up(index)
        self._ahead, before = False, self._ahead
        try:
            yield
        finally:
            self._ahead = before

    def prefetch(self, order: Sequence[int]) -> int:
        """Make blocks ready along this order, and have the source read it. See the contract."""
        if list(order) != list(self._told[len(self._told) - len(order) :]):
            self._told = tuple(order)
            self._thread.submit(self._source.prefetch, self._told)
        ready = 0
        for index in order if self._ahead else ():
            if index not in self.low_bit_segments or index in self._acquired or not self._begin(index):
                break
        for index in order:
            if index not in self._coming or not self._coming[index].done():
                break
            ready += 1
        return ready

    def acquire(self, index: int) -> Bucket:
        """Wait until a block is ready to leave. See the contract."""
        while self._returning and self._returning[0].done():
            self._returning.popleft().result()
        if index not in self.low_bit_segments:
            bucket = self._on_thread(lambda: self._source.acquire(index))
            self._as_stored += not self._stored[index].resident
            return bucket
        if index in self._coming and self._coming[index].exception() is not None:
            del self._coming[index]  # nobody needed it then; what counts is whether it fails now
        while not self._begin(index):
            if self._coming:
                self._give_up(next(reversed(self._coming)))
            else:
                self._returning.popleft().result()
        stage = self._acquired[index] = self._coming.pop(index).result()
        return stage.encoded

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Take a block back. See the contract."""
        index = bucket.segment
        if index not in self.low_bit_segments:
            self._on_thread(lambda: self._source.release(bucket, version))
            self._as_stored -= not self._stored[index].resident
            return
        stage = self._acquired.pop(index)
        if stage.stored is None:
            self._free.append(stage.memory)
        else:
            self._returning.append(self._thread.submit(self._take_back, stage, stage.stored, version))

    @contextmanager
    def stored(self, index: int) -> Iterator[Bucket]:
        """A carried block at the present version, as it is stored, until the context ends."""
        bucket = self._on_thread(lambda: self._replayed(index))
        try:
            yield bucket
        finally:
            self._on_thread(lambda: self._source.release(bucket, bucket.version))

    def close(self) -> None:
        """Stop all work. May be called twice. The source is the caller's to close, after this."""
        self._thread.shutdown(cancel_futures=True)
        self._coming.clear()
        self._free.clear()
        self._views.clear()

    def _begin(self, index: int) -> bool:
        """Have a block made ready, unless it is being made so; false if there is no room."""
        if index in self._coming:
            return True
        held = self._as_stored  # of the source's buckets; where nothing comes back, one more while a block is made ready
        if self._comes_back:
            held += len(self._acquired) + len(self._coming)
        if not self._free or held >= self._source.capacity:
            return False
        self._coming[index] = self._thread.submit(self._make_ready, index, self._free.popleft())
        return True

    def _give_up(self, index: int) -> None:
        """Free what was made ready for nobody, whatever became of it."""
        future = self._coming.pop(index)
        if future.exception() is not None:
            return
        stage = future.result()
        if stage.stored is not None:
            stored = stage.stored
            self._on_thread(lambda: self._source.release(stored, stored.version))
        self._free.append(stage.memory)

    def _make_ready(self, index: int, memory: torch.Tensor) -> _Stage:
        """On the thread: round a block to what is carried of it."""
        try:
            bucket = self._source.acquire(index) if self._comes_back else self._replayed(index)
            layout = self._layouts[index]
            data = memory[: layout.nbytes]
            place = memory.data_ptr(), index
            if place not in self._views:
                self._views[place] = layout.views(data)
            views = self._views[place]
            with self._timeline.noted(Lane.CARRY, layout.name, layout.nbytes), torch.inference_mode():
                for position, scales in enumerate(self._scales[index]):
                    encode(bucket.views[position], views[position], None if scales is None else views[scales])
            if not self._comes_back:
                self._source.release(bucket, bucket.version)
        except BaseException:
            self._free.append(memory)
            raise
        encoded = Bucket(index, data, views, bucket.version)
        return _Stage(memory, encoded, bucket if self._comes_back else None)

    def _replayed(self, index: int) -> Bucket:
        """On the thread: acquire a block and bring it to the present version."""
        bucket = self._source.acquire(index)
        try:
            with self._timeline.noted(Lane.CARRY, self._layouts[index].name):
                version = self._replay(index, bucket.views, bucket.version)
        except BaseException:
            self._source.release(bucket, None)
            raise
        return bucket._replace(version=version)

    def _take_back(self, stage: _Stage, stored: Bucket, version: int | None) -> None:
        """On the thread: widen what came back, if something did."""
        came: int | None = stored.version
        try:
            if version is not None and version != stored.version:
                came = None
                views, index = stage.encoded.views, stored.segment
                with self._timeline.noted(Lane.CARRY, self._layouts[index].name, len(stage.encoded.data)):
                    for position, scales in enumerate(self._scales[index]):
                        decode(views[position], None if scales is None else views[scales], stored.views[position])
                came = version
        finally:
            self._free.append(stage.memory)
            self._source.release(stored, came)

    def _on_thread(self, work: Callable[[], _Result]) -> _Result:
        return self._thread.submit(work).result()
