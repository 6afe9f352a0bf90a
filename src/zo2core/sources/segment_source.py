"""The base class of the sources: reading threads, prefetch order, write-back, closing."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from zo2core.errors import ClosedError
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import TensorReader
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.loader import Loading, SegmentLoader
from zo2core.sources.reading_order import ReadingOrder
from zo2core.sources.slot_file import SlotFile
from zo2core.sources.writeback import WriteBack
from zo2core.types import BlockLayout


class SegmentSource(ABC):
    """The base class of the sources; subclasses manage the memory of the segments."""

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        *,
        scratch: SlotFile | None = None,
        write_back_every: int | None = None,
        base_digests: BaseDigests | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._layouts = tuple(layouts)
        self._write_back = WriteBack(self._layouts, scratch, write_back_every, timeline)
        self._order = ReadingOrder(self._layouts)
        self._loader: SegmentLoader | None = SegmentLoader(weights, self._layouts, scratch, base_digests, timeline)
        self._lock = threading.RLock()

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order."""
        return self._layouts

    @property
    def capacity(self) -> int:
        """Number of segments."""
        return len(self._layouts)

    @property
    def write_back_every(self) -> int | None:
        """Versions that a segment may be ahead of its bytes on disk; None: segments are never written."""
        return self._write_back.every

    def prefetch(self, order: Sequence[int]) -> int:
        """Read ahead along this order from now on. See the contract."""
        with self._lock:
            self._require_open()
            self._order.follow(order)
            self._read_ahead()
            ready = 0
            for segment in self._order.ahead():
                if not self._is_ready(segment):
                    break
                ready += 1
            return ready

    def close(self) -> None:
        """Wait for reads and writes in flight and free the memory."""
        with self._lock:
            loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()
            self._free_memory()
        self._write_back.close()

    @abstractmethod
    def _read_ahead(self) -> None:
        """Start reading the next segments. Takes the lock, which the caller may hold."""

    @abstractmethod
    def _is_ready(self, segment: int) -> bool:
        """Whether a segment could be acquired without waiting for the disk. The caller holds the lock."""

    @abstractmethod
    def _free_memory(self) -> None:
        """Free the memory, which no read writes into any more."""

    def _loaded(self, loading: Loading, load: Callable[[], Loading], *, ahead: bool) -> Loading:
        """Wait until a segment is read and its bytes are valid."""
        if ahead and loading.failed():
            loading = load()
        if not loading.wait():  # the written-back bytes are damaged: read the base, from which updates are replayed
            loading = load()
            loading.wait()
        return loading

    def _open_loader(self) -> SegmentLoader:
        """The reading threads."""
        self._require_open()
        assert self._loader is not None
        return self._loader

    def _require_open(self) -> None:
        if self._loader is None:
            name = type(self).__name__
            raise ClosedError(name, found="a closed source", expected="an open one", remedy="open it again")
