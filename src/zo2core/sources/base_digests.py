"""Digests of the base checkpoint's segments: computed with the first reads, kept in the journal, compared by later runs.

The fingerprint in a journal's header samples each tensor; a digest covers every byte. A segment's digest is computed from
its parameters' bytes as they are loaded, in the run's dtype, in chunks that start at fixed elements of each parameter. It
depends neither on the parameter's offset in a file nor on its offset in a bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from zo2core.errors import CheckpointError
from zo2core.io.direct_file import PAGE, anonymous_memory, byte_view, chunk_checksum, combined_checksum
from zo2core.journal import Journal
from zo2core.protocols import BlockModel, TensorReader
from zo2core.types import BlockLayout, ParameterSpec

CHUNK_BYTES = 1 << 20  # bytes of a chunk: each has a checksum of its own

_CHUNKS_PER_READ = 4  # chunks per read in ``verify_base``
_READERS = 4  # threads


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
            raise _changed(layout, digest, expected, weights)
        self._checked.add(layout.name)

    def known(self, layout: BlockLayout) -> str:
        """The digest of a segment that was read; empty if none was computed."""
        return self._expected.get(layout.name, "")

    def note(self, journal: Journal) -> None:
        """Write the digests that a journal lacks to it."""
        unknown = self._expected.keys() - journal.base_digests.keys()
        if unknown:  # sorted, since workers may read segments in different orders and their journals have to be equal
            journal.note_base({name: self._expected[name] for name in sorted(unknown)})


def verify_base(model: BlockModel, journal: Journal, progress: Callable[[int], object] | None = None) -> Mapping[str, str]:
    """Read every byte of a model's base and compare it with the digests in a journal."""
    kept, unknown, memory = journal.base_digests, dict[str, str](), threading.local()

    def checksums(spec: ParameterSpec, start: int) -> tuple[int, list[int]]:
        """Read the next few chunks of a parameter into a small buffer of the thread; returns their bytes and checksums."""
        if not hasattr(memory, "pages"):
            memory.pages = torch.frombuffer(anonymous_memory(_CHUNKS_PER_READ * CHUNK_BYTES + PAGE), dtype=torch.uint8)
        dtype = spec.stored_dtype
        length = _chunk_length(dtype)
        count = min(_CHUNKS_PER_READ * length, spec.stored_numel - start)
        offset = model.weights.page_offset(spec) or 0  # the offset on disk, so that most bytes are read without a copy
        chunks = memory.pages[offset : offset + count * dtype.itemsize].view(dtype)
        model.weights.read_into(spec.name, chunks, start)
        return chunks.nbytes, [chunk_checksum(byte_view(chunk)) for chunk in torch.split(chunks, length)]

    with ThreadPoolExecutor(_READERS, thread_name_prefix="zo2-verify") as pool:
        for layout in model.layouts:
            reads = [
                (spec, start)
                for spec in layout.parameters
                for start in range(0, spec.stored_numel, _CHUNKS_PER_READ * _chunk_length(spec.stored_dtype))
            ]
            of_segment: list[int] = []
            for nbytes, of_chunks in pool.map(checksums, *zip(*reads, strict=True)):
                of_segment += of_chunks
                if progress is not None:
                    progress(nbytes)
            digest = combined_checksum(of_segment)
            if kept.get(layout.name, digest) != digest:
                raise _changed(layout, digest, kept[layout.name], model.weights)
            if layout.name not in kept:
                unknown[layout.name] = digest
    return unknown


def _chunk_length(dtype: torch.dtype) -> int:
    """Elements of a chunk."""
    return CHUNK_BYTES // dtype.itemsize


def _changed(layout: BlockLayout, digest: str, expected: str, weights: TensorReader) -> CheckpointError:
    files = sorted({weights.origin(spec.name) for spec in layout.parameters})
    return CheckpointError(
        f"{', '.join(files)}: {layout.name}",
        found=f"content of digest {digest}",
        expected=f"digest {expected}, of the base that the run was started with",
        remedy="download the file again: the run's weights depend on its original bytes",
    )
