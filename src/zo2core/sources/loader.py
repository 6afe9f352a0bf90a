"""Fill buckets in the background from the base checkpoint or from written-back files: submit, then wait.

Digests of the base's segments are computed with the first reads, kept in the journal, and compared by later runs. The
fingerprint in a journal's header samples each tensor; a digest covers every byte. It is computed from a segment's parameters
as they are loaded, in the run's dtype, in chunks that start at fixed elements of each parameter. It depends neither on the
parameter's offset in a file nor on its offset in a bucket.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from zo2core.errors import CheckpointError
from zo2core.io.direct_file import PAGE, anonymous_memory, byte_view, chunk_checksum, combined_checksum, whole_pages
from zo2core.journal import Journal
from zo2core.profiling import Gathered, Timeline
from zo2core.protocols import BlockModel, TensorReader
from zo2core.sources.slot_file import PIECE, SlotFile
from zo2core.types import BlockLayout, Lane, ParameterSpec, aligned

_Read: TypeAlias = tuple[int, Callable[[], object]]  # bytes, and the function that reads them

READERS = 4  # threads; one buffered reader does not reach a disk's rate
CHUNK = PIECE  # bytes of a read: small enough for all threads to work on the segment that is needed first
DIGEST_CHUNK = 1 << 20  # bytes of a digest's chunk: each has a checksum of its own


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


class SegmentDigest:
    """The digest of a segment that several threads read in parts, in any order.

    Parts end at page boundaries of the disk, not at those of chunks. The thread that reads a chunk's last bytes computes its
    checksum while the chunk is in a cache, so the segment is not read a second time.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self._lengths = [_chunk_length(view.dtype) for view in views]  # elements of a chunk
        self._missing = [
            [min(length, view.numel() - first) for first in range(0, view.numel(), length)]
            for view, length in zip(views, self._lengths, strict=True)
        ]
        self._checksums = [[0] * len(missing) for missing in self._missing]
        self._lock = threading.Lock()

    def add(self, parameter: int, start: int, stop: int) -> None:
        """Add elements of a parameter that have been read, each once."""
        view, length, missing = self._views[parameter], self._lengths[parameter], self._missing[parameter]
        complete: list[int] = []
        with self._lock:
            for chunk in range(start // length, -(-stop // length)):
                missing[chunk] -= min(stop, (chunk + 1) * length) - max(start, chunk * length)
                if missing[chunk] == 0:
                    complete.append(chunk)
        for chunk in complete:
            self._checksums[parameter][chunk] = chunk_checksum(byte_view(view[chunk * length : (chunk + 1) * length]))

    def value(self) -> str:
        """The digest, once all elements were added."""
        return combined_checksum(checksum for checksums in self._checksums for checksum in checksums)


class BaseDigests:
    """Expected digests of the base's segments.

    A segment is checked when a process first reads it from the base, not at later reads: disks have error-correcting codes,
    and files are replaced between processes, not while one has them open.
    """

    def __init__(self, kept: Mapping[str, str], *, learns: bool) -> None:
        self._expected = dict(kept)
        self._learns = learns
        self._checked: set[str] = set()

    def wants(self, layout: BlockLayout) -> bool:
        """Whether the next read of a segment needs a digest."""
        return layout.name not in self._checked and (self._learns or layout.name in self._expected)

    def check(self, layout: BlockLayout, digest: str, weights: TensorReader) -> None:
        """Compare the digest of bytes that were read from the base, or keep it if there is none yet."""
        expected = self._expected.setdefault(layout.name, digest)
        if expected != digest:
            files = sorted({weights.origin(spec.name) for spec in layout.parameters})
            raise CheckpointError(
                f"{', '.join(files)}: {layout.name}",
                found=f"content of digest {digest}",
                expected=f"digest {expected}, of the base that the run was started with",
                remedy="download the file again: the run's weights depend on its original bytes",
            )
        self._checked.add(layout.name)

    def known(self, layout: BlockLayout) -> str:
        """The digest of a segment that was read; empty if none was computed."""
        return self._expected.get(layout.name, "")

    def unknown_to(self, journal: Journal) -> Mapping[str, str]:
        """The digests that a journal lacks, sorted: workers may read segments in different orders."""
        return {name: digest for name, digest in sorted(self._expected.items()) if name not in journal.base_digests}

    def note(self, journal: Journal) -> None:
        """Write the digests that a journal lacks to it."""
        if unknown := self.unknown_to(journal):
            journal.note_base(unknown)


def verify_base(model: BlockModel, journal: Journal, progress: Callable[[int], object] | None = None) -> Mapping[str, str]:
    """Read every byte of a model's base and compare it with the digests in a journal; returns those that it lacks."""
    digests, memory = BaseDigests(journal.base_digests, learns=True), threading.local()

    def checksums(spec: ParameterSpec, start: int) -> tuple[int, list[int]]:
        """Read the next few chunks of a parameter into a small buffer of the thread; returns their bytes and checksums."""
        if not hasattr(memory, "pages"):
            memory.pages = torch.frombuffer(anonymous_memory(CHUNK + PAGE), dtype=torch.uint8)
        dtype = spec.stored_dtype
        count = min(CHUNK // dtype.itemsize, spec.stored_numel - start)
        offset = model.weights.page_offset(spec) or 0  # the offset on disk, so that most bytes are read without a copy
        chunks = memory.pages[offset : offset + count * dtype.itemsize].view(dtype)
        model.weights.read_into(spec.name, chunks, start)
        return chunks.nbytes, [chunk_checksum(byte_view(chunk)) for chunk in torch.split(chunks, _chunk_length(dtype))]

    with ThreadPoolExecutor(READERS, thread_name_prefix="zo2-verify") as pool:
        for layout in model.layouts:
            reads = [
                (spec, start)
                for spec in layout.parameters
                for start in range(0, spec.stored_numel, CHUNK // spec.stored_dtype.itemsize)
            ]
            of_segment: list[int] = []
            for nbytes, of_chunks in pool.map(checksums, *zip(*reads, strict=True)):
                of_segment += of_chunks
                if progress is not None:
                    progress(nbytes)
            digests.check(layout, combined_checksum(of_segment), model.weights)
    return digests.unknown_to(journal)


def _chunk_length(dtype: torch.dtype) -> int:
    """Elements of a chunk."""
    return DIGEST_CHUNK // dtype.itemsize


@dataclass(frozen=True, eq=False)
class Loading:
    """Reads of a segment that are in flight."""

    futures: Sequence[Future[None]]
    version: int  # of the bytes
    check: Callable[[], bool] = lambda: True  # once all are read: False if the bytes do not match their record
    has_states: bool = True

    def done(self) -> bool:
        """Whether all reads have ended."""
        return all(future.done() for future in self.futures)

    def failure(self) -> BaseException | None:
        """Wait for all reads to end, so that none writes into the memory later; returns the first failure."""
        wait(self.futures)
        failures = (CancelledError() if future.cancelled() else future.exception() for future in self.futures)
        return next((failure for failure in failures if failure is not None), None)

    def wait(self) -> bool:
        """Wait for all reads to end, and report the first failure; returns False if the bytes do not match their record."""
        failure = self.failure()
        if failure is not None:
            raise failure
        return self.check()


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

    def load(
        self, segment: int, pages: torch.Tensor, views: Sequence[torch.Tensor], *, weights: bool = True, states: bool = True
    ) -> Loading:
        """Start filling a segment's memory and return at once.

        Args:
            segment: The segment.
            pages: Its memory.
            views: Views of its parameters and states in the memory.
            weights: Whether its parameters are read; they may be left out where its states follow them.
            states: Whether its optimizer's states are read, if the segment was written. They are always read with bytes
                that have not been compared with their checksum.
        """
        scratch, layout = self._scratch, self._layouts[segment]
        if scratch is None or scratch.version(segment) == 0:
            assert weights, "states are left out where they are written"
            return self._load_base(segment, views)
        is_unchecked = scratch.is_unchecked(segment)
        states = states or not layout.states or is_unchecked
        end = whole_pages(layout.nbytes) if states else layout.weight_bytes
        starts = range(0 if weights else layout.weight_bytes, end, CHUNK)
        version, checksums = scratch.version(segment), [0] * len(starts)

        def read(index: int, out: torch.Tensor) -> None:
            scratch.read(segment, out, starts[index])
            if is_unchecked:
                checksums[index] = chunk_checksum(byte_view(out))  # while the bytes are in a cache

        def check() -> bool:
            return not is_unchecked or scratch.confirm(segment, checksums)

        chunks = [pages[start : min(start + CHUNK, end)] for start in starts]
        reads: list[_Read] = [(out.nbytes, partial(read, index, out)) for index, out in enumerate(chunks)]
        return Loading(self._submit(segment, reads), version, check, has_states=states)

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
