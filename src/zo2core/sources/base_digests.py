"""Digests of the base checkpoint's segments: made beside the first reads, kept by the journal, compared ever after.

The fingerprint in a journal's header samples each tensor; a digest covers every byte. A segment's digest is made of its
parameters' bytes as they are loaded, in the run's dtype. It is cut at fixed elements of each parameter, so it depends
neither on where the parameter lies in a file nor on where it lies in a bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from zo2core.errors import CheckpointError
from zo2core.io.checksum import combined_checksum, piece_checksum
from zo2core.io.direct_file import PAGE, byte_view
from zo2core.io.page_memory import anonymous_memory
from zo2core.journal import Journal
from zo2core.protocols import BlockModel, TensorReader
from zo2core.types import BlockLayout, ParameterSpec

CUT = 1 << 20  # bytes of a parameter that are digested at a time

_CUTS = 4  # read at a time where nothing is kept
_READERS = 4  # threads


class SegmentDigest:
    """The digest of a segment whose bytes come in pieces, in any order and from several threads.

    Pieces end where pages of the disk end, not where cuts do. Whoever brings a cut's last bytes digests it, so that all of
    them are still in a cache, and no thread reads the segment once more.

    Args:
        views: Views of the segment's parameters, flat, in layout order.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self._lengths = [_cut_length(view.dtype) for view in views]  # elements of a cut
        self._missing = [
            [min(length, view.numel() - first) for first in range(0, view.numel(), length)]
            for view, length in zip(views, self._lengths, strict=True)
        ]
        self._checksums = [[0] * len(missing) for missing in self._missing]
        self._lock = threading.Lock()

    def add(self, parameter: int, start: int, stop: int) -> None:
        """Take in elements of a parameter that are in memory now, each once.

        Args:
            parameter: Index of the parameter in the segment's layout.
            start: First element.
            stop: The element after the last one.
        """
        view, length, missing = self._views[parameter], self._lengths[parameter], self._missing[parameter]
        whole: list[int] = []
        with self._lock:
            for cut in range(start // length, -(-stop // length)):
                missing[cut] -= min(stop, (cut + 1) * length) - max(start, cut * length)
                if missing[cut] == 0:
                    whole.append(cut)
        for cut in whole:
            piece = view[cut * length : (cut + 1) * length]
            self._checksums[parameter][cut] = piece_checksum(byte_view(piece))

    def value(self) -> str:
        """The digest, once all elements were added."""
        return combined_checksum(checksum for checksums in self._checksums for checksum in checksums)


class BaseDigests:
    """What is known of the base's content.

    Each segment is looked at when it is first read from the base. Later reads by the same process are not: a disk protects
    what it stores by codes of its own, and files are exchanged between processes, not under one.

    Args:
        kept: Segment name to digest, as a journal has them.
        learns: Whether segments without a kept digest get one.
    """

    def __init__(self, kept: Mapping[str, str], *, learns: bool) -> None:
        self._expected = dict(kept)
        self._learns = learns
        self._checked: set[str] = set()
        self._is_news = False

    def wants(self, layout: BlockLayout) -> bool:
        """Whether the next read of a segment is to be digested."""
        return layout.name not in self._checked and (self._learns or layout.name in self._expected)

    def check(self, layout: BlockLayout, digest: str, weights: TensorReader) -> None:
        """Compare the digest of bytes that were read from the base, or take it down if there is none yet.

        Raises:
            CheckpointError: if the bytes are others than those of the run.
        """
        expected = self._expected.setdefault(layout.name, digest)
        if expected != digest:
            raise _changed(layout, digest, expected, weights)
        self._checked.add(layout.name)
        self._is_news = True

    def known(self, layout: BlockLayout) -> str:
        """The digest of a segment that was read; empty if nobody wants one."""
        return self._expected.get(layout.name, "")

    def note(self, journal: Journal) -> None:
        """Hand a journal the digests that it has not; mostly there are none, and nothing is done.

        Raises:
            JournalError: if it cannot be written.
        """
        if self._is_news:
            kept = journal.base_digests
            # Sorted: of several workers each may have read them in another order, and their journals are to be equal.
            unknown = {name: digest for name, digest in sorted(self._expected.items()) if name not in kept}
            if unknown:
                journal.note_base(unknown)
            self._is_news = False


def verify_base(model: BlockModel, journal: Journal, progress: Callable[[int], object] | None = None) -> Mapping[str, str]:
    """Read every byte of a model's base at once, and compare it with what a journal keeps of it.

    Args:
        model: Its checkpoint is read; nothing of it stays in memory.
        journal: Journal of a run on this base.
        progress: Told how many more bytes were read.

    Returns:
        Digests that the journal has not, by segment: to be noted there.

    Raises:
        CheckpointError: if the bytes are others than those of the run, or cannot be read.
    """
    kept, unknown = journal.base_digests, dict[str, str]()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="zo2-verify") as pool:
        reader = _CutReader(model.weights)
        for layout in model.layouts:
            digest = reader.digest(layout, pool, progress)
            if kept.get(layout.name, digest) != digest:
                raise _changed(layout, digest, kept[layout.name], model.weights)
            if layout.name not in kept:
                unknown[layout.name] = digest
    return unknown


class _CutReader:
    """Reads segments a few cuts at a time, into a small buffer of each thread."""

    def __init__(self, weights: TensorReader) -> None:
        self._weights = weights
        self._memory = threading.local()

    def digest(self, layout: BlockLayout, pool: ThreadPoolExecutor, progress: Callable[[int], object] | None) -> str:
        """Read a segment; as ``SegmentDigest`` has it."""
        reads = [
            (pool.submit(self._checksums, spec, start), min(_CUTS * CUT, spec.nbytes - start * spec.stored_dtype.itemsize))
            for spec in layout.parameters
            for start in range(0, spec.stored_numel, _CUTS * _cut_length(spec.stored_dtype))
        ]
        checksums: list[int] = []
        try:
            for future, nbytes in reads:
                checksums += future.result()
                if progress is not None:
                    progress(nbytes)
        finally:
            for future, _ in reads:
                future.cancel()
        return combined_checksum(checksums)

    def _checksums(self, spec: ParameterSpec, start: int) -> list[int]:
        """Read the next few cuts of a parameter; return their checksums."""
        if not hasattr(self._memory, "pages"):
            self._memory.pages = torch.frombuffer(anonymous_memory(_CUTS * CUT + PAGE), dtype=torch.uint8)
        dtype = spec.stored_dtype
        length = _cut_length(dtype)
        count = min(_CUTS * length, spec.stored_numel - start)
        askew = self._weights.page_offset(spec) or 0  # as on disk: most bytes are then read in place
        piece = self._memory.pages[askew : askew + count * dtype.itemsize].view(dtype)
        self._weights.read_into(spec.name, piece, start)
        return [piece_checksum(byte_view(piece[first : first + length])) for first in range(0, count, length)]


def _cut_length(dtype: torch.dtype) -> int:
    """Elements of a cut."""
    return CUT // dtype.itemsize


def _changed(layout: BlockLayout, digest: str, expected: str, weights: TensorReader) -> CheckpointError:
    files = sorted({weights.origin(spec.name) for spec in layout.parameters})
    return CheckpointError(
        f"{', '.join(files)}: {layout.name}",
        found=f"content of digest {digest}",
        expected=f"digest {expected}, of the base that the run was begun with",
        remedy="get the file again; weights of the run are made from the bytes it had",
    )
