"""Fill buckets in the background, from the base checkpoint or from what was written back: submit, then wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from zo2core.io.checksum import piece_checksum
from zo2core.io.direct_file import PAGE, byte_view, whole_pages
from zo2core.profiling.timeline import Gathered, Timeline
from zo2core.protocols import TensorReader
from zo2core.sources.base_digests import BaseDigests, SegmentDigest
from zo2core.sources.scratch import PIECE, Scratch
from zo2core.types import BlockLayout, Lane, aligned

_Read: TypeAlias = tuple[int, Callable[[], None]]  # bytes, and what brings them

READERS = 4  # threads; one buffered reader does not reach a disk's rate
CHUNK = PIECE  # bytes read at a time, so that all threads work on the segment that is needed first


def portions(memory: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Cut memory into pieces, one after the other."""
    ends = list(accumulate(sizes))
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def laid_out_as_on_disk(layouts: Sequence[BlockLayout], weights: TensorReader) -> tuple[BlockLayout, ...]:
    """Give each parameter the place in its bucket at which pages of the disk can be read without a copy.

    A parameter begins as far from a page's start as it does in its file. Tensors that follow each other there do so here.
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
    """Reads under way.

    Args:
        futures: Futures of the reads.
        version: Version of the bytes that come.
        check: Says, once all have come, whether they count; it may raise CheckpointError.
    """

    def __init__(self, futures: Sequence[Future[None]], version: int, check: Callable[[], bool] = lambda: True) -> None:
        self._futures = futures
        self._check = check
        self.version = version

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

    def wait(self) -> bool:
        """Wait for all reads to end, then report the first failure: none may write into the memory later.

        Returns:
            Whether the bytes count. If not, what was written back is damaged and given up: the next load brings the base.

        Raises:
            CheckpointError: if a read of the base failed, or the base is another than it was.
            ScratchError: if a read of written-back bytes failed.
        """
        failures = [future.exception() for future in self._futures]
        for failure in failures:
            if failure is not None:
                raise failure
        return self._check()


class SegmentLoader:
    """Threads that read segments.

    Args:
        weights: The base checkpoint. Belongs to the caller.
        layouts: Segments in visiting order.
        scratch: Where written-back segments are; belongs to the caller.
        base_digests: What the base's segments have to be; None does not look.
        timeline: Takes down every segment's reads.
    """

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        scratch: Scratch | None = None,
        base_digests: BaseDigests | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._weights = weights
        self._layouts = layouts
        self._scratch = scratch
        self._base_digests = base_digests
        self._timeline = Timeline() if timeline is None else timeline
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="zo2-read")
        self._closed = False

    def load(self, segment: int, pages: torch.Tensor, views: Sequence[torch.Tensor]) -> Loading:
        """Start filling a segment's memory and return at once.

        Args:
            segment: Which one.
            pages: uint8, its memory in whole pages.
            views: Views of its parameters in that memory.
        """
        if self._scratch is not None and self._scratch.version(segment) > 0:
            return self._load_written(self._scratch, segment, pages[: whole_pages(self._layouts[segment].nbytes)])
        return self._load_base(segment, views)

    def _load_written(self, scratch: Scratch, segment: int, pages: torch.Tensor) -> Loading:
        starts = range(0, len(pages), CHUNK)
        version, checksums = scratch.version(segment), [0] * len(starts)
        is_unchecked = scratch.is_unchecked(segment)

        def read(place: int, out: torch.Tensor) -> None:
            scratch.read(segment, out, starts[place])
            if is_unchecked:
                checksums[place] = piece_checksum(byte_view(out))  # while the bytes are in a cache

        def check() -> bool:
            return not is_unchecked or scratch.confirm(segment, checksums)

        pieces = [pages[start : start + CHUNK] for start in starts]
        reads: list[_Read] = [(out.nbytes, partial(read, place, out)) for place, out in enumerate(pieces)]
        return Loading(self._submit(segment, reads), version, check)

    def _load_base(self, segment: int, views: Sequence[torch.Tensor]) -> Loading:
        layout, digests = self._layouts[segment], self._base_digests
        digest = SegmentDigest(views) if digests is not None and digests.wants(layout) else None

        def read(parameter: int, start: int, stop: int) -> None:
            self._weights.read_into(layout.parameters[parameter].name, views[parameter][start:stop], start)
            if digest is not None:
                digest.add(parameter, start, stop)

        def check() -> bool:
            if digest is not None and digests is not None:
                digests.check(layout, digest.value(), self._weights)
            return True

        reads: list[_Read] = []
        for parameter, (spec, view) in enumerate(zip(layout.parameters, views, strict=True)):
            step, past = CHUNK // view.itemsize, view.data_ptr() % PAGE // view.itemsize
            cuts = [0, *range(step - past, view.numel(), step), view.numel()]  # where pages begin
            itemsize = self._weights.itemsize(spec.name)
            reads += [((stop - start) * itemsize, partial(read, parameter, start, stop)) for start, stop in pairwise(cuts)]
        return Loading(self._submit(segment, reads), 0, check)

    def _submit(self, segment: int, reads: Sequence[_Read]) -> list[Future[None]]:
        """Have every thread take one read after the other: to submit each would take the caller 40 us."""
        gathered = Gathered(self._timeline, Lane.READ, self._layouts[segment].name, len(reads))
        left = deque(reads)

        def take() -> None:
            while True:
                try:
                    nbytes, read = left.popleft()
                except IndexError:  # the other threads have what was left
                    return
                if self._closed:
                    raise CancelledError
                with gathered.part(nbytes):
                    read()

        return [self._pool.submit(take) for _ in range(min(READERS, len(reads)))]

    def close(self) -> None:
        """Drop reads that have not begun, and wait for the others."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
