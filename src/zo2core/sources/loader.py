"""Fill buckets in the background from the base checkpoint or from written-back files: submit, then wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from zo2core.io.direct_file import PAGE, byte_view, chunk_checksum, whole_pages
from zo2core.profiling import Gathered, Timeline
from zo2core.protocols import TensorReader
from zo2core.sources.base_digests import BaseDigests, SegmentDigest
from zo2core.sources.slot_file import PIECE, SlotFile
from zo2core.types import BlockLayout, Lane, aligned

_Read: TypeAlias = tuple[int, Callable[[], object]]  # bytes, and the function that reads them

READERS = 4  # threads; one buffered reader does not reach a disk's rate
CHUNK = PIECE  # bytes of a read: small enough for all threads to work on the segment that is needed first


def portions(memory: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Split memory into consecutive slices of these sizes."""
    ends = list(accumulate(sizes))
    return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def laid_out_as_on_disk(layouts: Sequence[BlockLayout], weights: TensorReader) -> tuple[BlockLayout, ...]:
    """Give each parameter the offset in its bucket at which pages of the disk can be read without a copy.

    A parameter has the same offset within a page as in its file. Tensors that are adjacent in the file stay adjacent. States
    begin at a page, so that parameters can be read without them.
    """
    return tuple(replace(layout, offsets=_offsets(layout, weights)) for layout in layouts)


def _offsets(layout: BlockLayout, weights: TensorReader) -> tuple[int, ...]:
    offsets: list[int] = []
    end = 0
    for spec in layout.parameters:
        page_offset = weights.page_offset(spec)
        offsets.append(aligned(end) if page_offset is None else end + (page_offset - end) % PAGE)
        end = offsets[-1] + spec.nbytes
    end = whole_pages(end)
    for state in layout.states:
        offsets.append(aligned(end))
        end = offsets[-1] + state.nbytes
    return tuple(offsets)


class Loading:
    """Reads of a segment that are in flight."""

    def __init__(
        self,
        futures: Sequence[Future[None]],
        version: int,
        check: Callable[[], bool] = lambda: True,
        *,
        has_states: bool = True,
    ) -> None:
        self._futures = futures
        self._check = check
        self.version = version
        self.has_states = has_states

    def done(self) -> bool:
        """Whether all reads have ended."""
        return all(future.done() for future in self._futures)

    def failure(self) -> BaseException | None:
        """Wait for all reads to end, so that none writes into the memory later; returns the first failure."""
        wait(self._futures)
        return next((future.exception() for future in self._futures if future.exception() is not None), None)

    def wait(self) -> bool:
        """Wait for all reads to end, and report the first failure; returns False if the bytes do not match their record."""
        failure = self.failure()
        if failure is not None:
            raise failure
        return self._check()


class SegmentLoader:
    """Threads that read segments."""

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        scratch: SlotFile | None = None,
        base_digests: BaseDigests | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._weights = weights
        self._layouts = layouts
        self._scratch = scratch
        self._base_digests = base_digests
        self._timeline = timeline or Timeline()
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="zo2-read")
        self._closed = False

    def load(self, segment: int, pages: torch.Tensor, views: Sequence[torch.Tensor], *, with_states: bool = True) -> Loading:
        """Start filling a segment's memory and return at once."""
        scratch, layout = self._scratch, self._layouts[segment]
        if scratch is None or scratch.version(segment) == 0:
            return self._load_base(segment, views)
        with_states = with_states or not layout.states or scratch.is_unchecked(segment)
        end = whole_pages(layout.nbytes) if with_states else layout.weight_bytes
        return self._load_written(scratch, segment, pages, range(0, end, CHUNK), end, has_states=with_states)

    def load_states(self, segment: int, pages: torch.Tensor) -> Loading:
        """Start reading the optimizer's states of a segment whose parameters were read without them. See ``load``."""
        layout = self._layouts[segment]
        assert self._scratch is not None, "states are left out where they are written"
        end = whole_pages(layout.nbytes)
        return self._load_written(self._scratch, segment, pages, range(layout.weight_bytes, end, CHUNK), end)

    def _load_written(
        self, scratch: SlotFile, segment: int, pages: torch.Tensor, starts: range, end: int, *, has_states: bool = True
    ) -> Loading:
        version, checksums = scratch.version(segment), [0] * len(starts)
        is_unchecked = scratch.is_unchecked(segment)

        def read(index: int, out: torch.Tensor) -> None:
            scratch.read(segment, out, starts[index])
            if is_unchecked:
                checksums[index] = chunk_checksum(byte_view(out))  # while the bytes are in a cache

        def check() -> bool:
            return not is_unchecked or scratch.confirm(segment, checksums)

        chunks = [pages[start : min(start + CHUNK, end)] for start in starts]
        reads: list[_Read] = [(out.nbytes, partial(read, index, out)) for index, out in enumerate(chunks)]
        return Loading(self._submit(segment, reads), version, check, has_states=has_states)

    def _load_base(self, segment: int, views: Sequence[torch.Tensor]) -> Loading:
        layout, digests = self._layouts[segment], self._base_digests
        count = len(layout.parameters)
        views, states = views[:count], views[count:]
        digest = SegmentDigest(views) if digests is not None and digests.wants(layout) else None

        def read(parameter: int, start: int, stop: int) -> None:
            # `.data` has its own version counter. Slices of one memory share theirs, and torch.autograd refuses a graph on
            # another slice if it changes.
            self._weights.read_into(layout.parameters[parameter].name, views[parameter].data[start:stop], start)
            if digest is not None:
                digest.add(parameter, start, stop)

        def check() -> bool:
            if digest is not None and digests is not None:
                digests.check(layout, digest.value(), self._weights)
            return True

        reads: list[_Read] = []
        for parameter, (spec, view) in enumerate(zip(layout.parameters, views, strict=True)):
            step, offset = CHUNK // view.itemsize, view.data_ptr() % PAGE // view.itemsize
            bounds = [0, *range(step - offset, view.numel(), step), view.numel()]  # at page boundaries
            itemsize = self._weights.itemsize(spec.name)
            reads += [((stop - start) * itemsize, partial(read, parameter, start, stop)) for start, stop in pairwise(bounds)]
        reads += [(0, state.data.zero_) for state in states]  # of a segment without a step they are zero
        return Loading(self._submit(segment, reads), 0, check)

    def _submit(self, segment: int, reads: Sequence[_Read]) -> list[Future[None]]:
        """Start all reads as one task per thread; submitting each read would take the caller 40 us."""
        gathered = Gathered(self._timeline, Lane.READ, self._layouts[segment].name, len(reads))
        queue = deque(reads)

        def run_reads() -> None:
            while True:
                try:
                    nbytes, read = queue.popleft()
                except IndexError:
                    return
                if self._closed:
                    raise CancelledError
                with gathered.part(nbytes):
                    read()

        return [self._pool.submit(run_reads) for _ in range(min(READERS, len(reads)))]

    def close(self) -> None:
        """Drop reads that have not started, and wait for the others."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
