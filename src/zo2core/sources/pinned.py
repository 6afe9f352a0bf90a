"""Every segment resident in host memory, in one arena of exact size, filled from the checkpoint on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zo2core.io.direct_file import whole_pages
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import TensorReader
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.loader import Loading, portions
from zo2core.sources.segment_source import SegmentSource
from zo2core.sources.slot_file import SlotFile
from zo2core.types import BlockLayout, Bucket


class PinnedSource(SegmentSource):
    """Host memory for the whole model, page-locked where the device needs that for fast copies.

    A segment is read when it is first prefetched or acquired; no tensor is held twice.

    Args:
        weights: The base checkpoint. Belongs to the caller.
        layouts: Segments in visiting order.
        host_memory: Allocates the arena: ``Device.host_memory``.
        scratch: Files of written-back segments. They belong to this source.
        write_back_every: A segment is written back once it is this many versions ahead of its bytes on disk, which limits
            the updates that a resumed run replays. None never writes.
        base_digests: Expected digests of the base's segments; None does not check them.
        timeline: Records every read and write.

    Raises:
        OptionError: if ``write_back_every`` is out of its range.
    """

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        host_memory: Callable[[int], torch.Tensor],
        *,
        scratch: SlotFile | None = None,
        write_back_every: int | None = None,
        base_digests: BaseDigests | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(
            weights,
            layouts,
            scratch=scratch,
            write_back_every=write_back_every,
            base_digests=base_digests,
            timeline=timeline,
        )
        sizes = [whole_pages(layout.nbytes) for layout in self._layouts]
        self._pages = portions(host_memory(sum(sizes)), sizes)
        self._buckets: list[Bucket] = []
        for index, layout in enumerate(self._layouts):
            data = self._pages[index][: layout.nbytes]
            self._buckets.append(Bucket(index, data, layout.views(data), version=0))
        self._loading: dict[int, Loading] = {}
        self._filled: set[int] = set()

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
            first = self._loading.pop(index)
            loading = self._loaded(first, lambda: self._read_again(index), ahead=ahead)
            self._filled.add(index)
            self._buckets[index] = self._buckets[index]._replace(version=loading.version)
        return self._buckets[index]

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Keep the version of the bytes; lost bytes (None) are read again. See the contract."""
        index = bucket.segment
        if version is None:
            self._filled.discard(index)
            return
        self._buckets[index] = bucket._replace(version=version)
        self._write_back.start_if_due(index, self._pages[index], version, then=lambda: None)

    def _free_memory(self) -> None:
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

    def _is_ready(self, segment: int) -> bool:
        is_read = segment in self._filled or self._loading[segment].done()
        return is_read and not self._write_back.busy(segment)

    def _start_reading(self, segment: int) -> None:
        if segment not in self._filled and segment not in self._loading:
            self._loading[segment] = self._open_loader().load(segment, self._pages[segment], self._buckets[segment].views)
