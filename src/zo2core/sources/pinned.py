"""Every segment resident in host memory, in one exact-size arena, filled straight from the checkpoint on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from zo2core.errors import ClosedError
from zo2core.io.direct_file import whole_pages
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import TensorReader
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.loader import Loading, SegmentLoader, portions
from zo2core.sources.reading_order import ReadingOrder
from zo2core.sources.scratch import Scratch
from zo2core.sources.writeback import WriteBack
from zo2core.types import BlockLayout, Bucket


class PinnedSource:
    """Host memory for the whole model, page-locked where the device needs that for fast copies.

    Nothing is read until a segment is first asked for; no tensor is held twice.

    Args:
        weights: The base checkpoint. Belongs to the caller.
        layouts: Segments in visiting order.
        host_memory: Allocates the arena: ``Device.host_memory``.
        scratch: Files that segments were written back to, and are again. They belong to this source.
        write_back_every: A segment is written back once it is this many versions ahead of its bytes on disk: a snapshot
            that bounds what a resumed run has to replay. None never writes.
        base_digests: What the base's segments have to be; None does not look.
        timeline: Every read and write is noted there.

    Raises:
        OptionError: if ``write_back_every`` is out of its range.
    """

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        host_memory: Callable[[int], torch.Tensor],
        *,
        scratch: Scratch | None = None,
        write_back_every: int | None = None,
        base_digests: BaseDigests | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._layouts = tuple(layouts)
        self._write_back = WriteBack(self._layouts, scratch, write_back_every, timeline)
        sizes = [whole_pages(layout.nbytes) for layout in self._layouts]
        self._pages = portions(host_memory(sum(sizes)), sizes)
        self._buckets: list[Bucket] = []
        for index, layout in enumerate(self._layouts):
            data = self._pages[index][: layout.nbytes]
            self._buckets.append(Bucket(index, data, layout.views(data), version=0))
        self._loader: SegmentLoader | None = SegmentLoader(weights, self._layouts, scratch, base_digests, timeline)
        self._loading: dict[int, Loading] = {}
        self._filled: set[int] = set()
        self._order = ReadingOrder(self._layouts)
        self._lock = threading.Lock()

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order."""
        return self._layouts

    @property
    def capacity(self) -> int:
        """All blocks, and embedding and head besides."""
        return len(self._layouts)

    @property
    def write_back_every(self) -> int | None:
        """Versions that a segment may be ahead of its bytes on disk. None: it is never written."""
        return self._write_back.every

    def prefetch(self, order: Sequence[int]) -> int:
        """Read ahead along this order from now on, where segments were not read yet. See the contract."""
        with self._lock:
            self._require_open()
            self._order.follow(order)
            self._read_ahead()
            ready = 0
            for segment in self._order.ahead():
                is_read = segment in self._filled or self._loading[segment].done()
                if not is_read or self._write_back.busy(segment):
                    break
                ready += 1
            return ready

    def acquire(self, index: int) -> Bucket:
        """Wait until a segment is read. See the contract."""
        with self._lock:
            self._require_open()
            ahead = index in self._loading
            self._start_reading(index)
            self._order.acquired(index)
            self._read_ahead()
        self._write_back.wait(index)
        self._write_back.check()
        if index in self._loading:
            loading = self._loading.pop(index)
            if ahead and loading.failed():  # nobody needed it then; what counts is whether it fails now
                loading = self._read_again(index)
            if not loading.wait():  # what was written back is damaged: the base, then, and what it lacks is replayed
                loading = self._read_again(index)
                loading.wait()
            self._filled.add(index)
            self._buckets[index] = self._buckets[index]._replace(version=loading.version)
        return self._buckets[index]

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Note the version of the bytes. Bytes that are lost are read anew."""
        index = bucket.segment
        if version is None:
            self._filled.discard(index)
            return
        self._buckets[index] = bucket._replace(version=version)
        self._write_back.start_if_due(index, self._pages[index], version, then=lambda: None)

    def close(self) -> None:
        """Wait for reads and writes under way and give the arena back."""
        with self._lock:
            loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()
        self._write_back.close()
        self._loading.clear()
        self._buckets.clear()
        self._pages.clear()

    def _read_again(self, segment: int) -> Loading:
        with self._lock:
            self._require_open()
            self._start_reading(segment)
        return self._loading.pop(segment)

    def _read_ahead(self) -> None:
        for segment in self._order.ahead():
            self._start_reading(segment)

    def _start_reading(self, segment: int) -> None:
        assert self._loader is not None
        if segment not in self._filled and segment not in self._loading:
            self._loading[segment] = self._loader.load(segment, self._pages[segment], self._buckets[segment].views)

    def _require_open(self) -> None:
        if self._loader is None:
            raise ClosedError("PinnedSource", found="a closed source", expected="an open one", remedy="open it again")
