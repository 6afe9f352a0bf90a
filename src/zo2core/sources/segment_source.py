"""What all sources have in common: the reading threads, the order of what is needed next, written-back files, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from zo2core.errors import ClosedError
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import TensorReader
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.loader import Loading, SegmentLoader
from zo2core.sources.reading_order import ReadingOrder
from zo2core.sources.scratch import Scratch
from zo2core.sources.writeback import WriteBack
from zo2core.types import BlockLayout


class SegmentSource:
    """The base of all sources; where segments lie in memory is what differs.

    Args:
        weights: The base checkpoint; only ever read. Belongs to the caller.
        layouts: Segments in visiting order.
        scratch: Files that segments were written back to, and are again. They belong to this source.
        write_back_every: A segment is written back once it is this many versions ahead of its bytes on disk. None never
            writes.
        base_digests: What the base's segments have to be; None does not look.
        timeline: Every read and write is noted there.

    Raises:
        OptionError: if ``write_back_every`` is out of its range.
    """

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        *,
        scratch: Scratch | None = None,
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
        """All blocks, and embedding and head besides."""
        return len(self._layouts)

    @property
    def write_back_every(self) -> int | None:
        """Versions that a segment may be ahead of its bytes on disk. None: it is never written."""
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
        """Wait for reads and writes under way and give the memory back."""
        with self._lock:
            loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()
            self._give_back()
        self._write_back.close()

    def _read_ahead(self) -> None:
        """Start reading what comes next. The lock is held, or taken."""
        raise NotImplementedError

    def _is_ready(self, segment: int) -> bool:
        """Whether a segment could be acquired without a wait for the disk. The lock is held."""
        raise NotImplementedError

    def _give_back(self) -> None:
        """Let go of the memory: nothing reads into it any more."""
        raise NotImplementedError

    def _loaded(self, loading: Loading, load: Callable[[], Loading], *, ahead: bool) -> Loading:
        """Wait until a segment's bytes are there and count.

        Args:
            loading: Reads of the segment, which have started.
            load: Begins to read it again.
            ahead: Whether they began before the segment was needed: then only a second failure counts.

        Raises:
            CheckpointError, ScratchError: if it cannot be read.
        """
        if ahead and loading.failed():  # it was not needed then; what counts is whether it fails now
            loading = load()
        if not loading.wait():  # what was written back is damaged: the base, then, and what it lacks is replayed
            loading = load()
            loading.wait()
        return loading

    def _open_loader(self) -> SegmentLoader:
        """The reading threads.

        Raises:
            ClosedError: after ``close``.
        """
        self._require_open()
        assert self._loader is not None
        return self._loader

    def _require_open(self) -> None:
        if self._loader is None:
            name = type(self).__name__
            raise ClosedError(name, found="a closed source", expected="an open one", remedy="open it again")
