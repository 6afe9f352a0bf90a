"""Fill buckets in the background, from the base checkpoint or from what was written back: submit, then wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeVar

import torch

from zo2core.io.direct_file import PAGE, whole_pages
from zo2core.profiling.timeline import Gathered, Timeline
from zo2core.protocols import TensorReader
from zo2core.sources.scratch import Scratch
from zo2core.types import BlockLayout, Lane, aligned

_Key = TypeVar("_Key", int, str)  # of a segment that was written back, or of a parameter of the base

READERS = 4  # threads; one buffered reader does not reach a disk's rate
CHUNK = 4 << 20  # bytes read at a time, so that all threads work on the segment that is needed first


def portions(memory: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Cut memory into pieces, one after the other."""
    ends = list(accumulate(sizes))
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def laid_out_as_on_disk(layouts: Sequence[BlockLayout], weights: TensorReader) -> tuple[BlockLayout, ...]:
    """Give each parameter the place in its bucket at which pages of the disk can be read without a copy.

    A parameter begins as far from a page's start as it does in its file. Tensors that follow each other in a file also
    do so in the bucket.
    """
    return tuple(replace(layout, offsets=_offsets(layout, weights)) for layout in layouts)


def _offsets(layout: BlockLayout, weights: TensorReader) -> tuple[int, ...]:
    offsets: list[int] = []
    end = 0
    for spec in layout.parameters:
        wanted = weights.page_offset(spec)
        start = aligned(end) if wanted is None else end + (wanted - end) % PAGE
        offsets.append(start)
        end = start + spec.nbytes
    return tuple(offsets)


class Loading:
    """Reads under way."""

    def __init__(self, futures: Sequence[Future[None]], version: int) -> None:
        self._futures = futures
        self.version = version  # of the bytes that come

    def done(self) -> bool:
        """Whether all reads have ended."""
        return all(future.done() for future in self._futures)

    def settle(self) -> None:
        """Wait for all reads to end, whatever became of them."""
        wait(self._futures)

    def failed(self) -> bool:
        """Wait for all reads to end, and say whether one failed."""
        self.settle()
        return any(future.exception() is not None for future in self._futures)

    def wait(self) -> None:
        """Wait for all reads to end, then report the first failure: no read may write into the memory later.

        Raises:
            CheckpointError: if a read of the base failed.
            ScratchError: if a read of written-back bytes failed.
        """
        failures = [future.exception() for future in self._futures]
        for failure in failures:
            if failure is not None:
                raise failure


class SegmentLoader:
    """Threads that read segments.

    Args:
        weights: The base checkpoint. Belongs to the caller.
        layouts: Segments in visiting order.
        scratch: Files of written-back segments. They belong to the caller.
        timeline: The reads of every segment are noted there.
    """

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        scratch: Scratch | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._weights = weights
        self._layouts = layouts
        self._scratch = scratch
        self._timeline = Timeline() if timeline is None else timeline
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="zo2-read")

    def load(self, segment: int, pages: torch.Tensor, views: Sequence[torch.Tensor]) -> Loading:
        """Start filling a segment's memory and return at once.

        Args:
            segment: The segment's number.
            pages: uint8, the segment's memory in whole pages.
            views: Views of its parameters in that memory.
        """
        version = 0 if self._scratch is None else self._scratch.version(segment)
        pages = pages[: whole_pages(self._layouts[segment].nbytes)]
        if self._scratch is not None and version > 0:
            starts = range(0, len(pages), CHUNK)
            written = [(segment, pages[start : start + CHUNK], start) for start in starts]
            return Loading(self._submit(segment, self._scratch.read, written), version)
        pieces: list[tuple[str, torch.Tensor, int]] = []
        for spec, view in zip(self._layouts[segment].parameters, views, strict=True):
            step, past = CHUNK // spec.dtype.itemsize, view.data_ptr() % PAGE // spec.dtype.itemsize
            cuts = [0, *range(step - past, spec.numel, step), spec.numel]  # where pages begin
            pieces += [(spec.name, view[start:stop], start) for start, stop in pairwise(cuts)]
        return Loading(self._submit(segment, self._weights.read_into, pieces), 0)

    def _submit(
        self,
        segment: int,
        read: Callable[[_Key, torch.Tensor, int], None],
        pieces: Sequence[tuple[_Key, torch.Tensor, int]],
    ) -> list[Future[None]]:
        gathered = Gathered(self._timeline, Lane.READ, self._layouts[segment].name, len(pieces))

        def run(key: _Key, out: torch.Tensor, start: int) -> None:
            with gathered.part(out.nbytes):
                read(key, out, start)

        return [self._pool.submit(run, *piece) for piece in pieces]

    def close(self) -> None:
        """Drop reads that have not begun, and wait for the others."""
        self._pool.shutdown(cancel_futures=True)
