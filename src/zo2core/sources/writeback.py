"""Write segments back in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zo2core.errors import OptionError
from zo2core.profiling.timeline import Timeline
from zo2core.sources.slot_file import SlotFile
from zo2core.types import BlockLayout, Lane


class WriteBack:
    """A thread that writes segments every few versions."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        scratch: SlotFile | None,
        every: int | None,
        timeline: Timeline | None = None,
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
        self._timeline = Timeline() if timeline is None else timeline
        self._writes: dict[int, Future[None]] = {}
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zo2-write")

    def start_if_due(self, segment: int, pages: torch.Tensor, version: int, then: Callable[[], None]) -> None:
        """Start writing a segment if it is far enough ahead of its bytes on disk, and return at once."""
        if self.every is None or version - self.version(segment) < self.every:
            return
        self.start(segment, pages, version, then)

    def version(self, segment: int) -> int:
        """Version of a segment's bytes on disk; 0 if it was not written."""
        return 0 if self._scratch is None else self._scratch.version(segment)

    def start(self, segment: int, pages: torch.Tensor, version: int, then: Callable[[], None]) -> None:
        """Start writing a segment, and return at once. See ``start_if_due``."""
        assert self._scratch is not None, "there are files to write to"
        future = self._pool.submit(self._write, self._scratch, segment, pages, version)
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
