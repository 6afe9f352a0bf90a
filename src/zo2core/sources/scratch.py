"""Blocks written back: a file of regions, and a manifest whose records say which region holds which segment and version.

The user's checkpoint is never written. A segment's new bytes go to a free region; its old ones count until the new ones are
durable and the manifest says so. So there is no moment at which a segment is lost, and one spare region for all blocks of a
size suffices. What a crash leaves over is never wrong, at worst old: the journal makes up the difference.

Write-ahead: bytes of version v are written only once the journal's records up to v are durable. Every manifest record
carries the journal's checksum at its version; bytes of another run, or of updates the journal has lost, do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zo2core.errors import ScratchError, reason
from zo2core.io.direct_file import RangedFile, byte_view, whole_pages
from zo2core.io.durable import make_directory, sync_path
from zo2core.io.record_log import DamagedRecordError, Record, RecordFile, to_line
from zo2core.types import BlockLayout

DATA = "scratch.bin"
MANIFEST = "scratch.jsonl"


class _Written(NamedTuple):
    """What was written back of one segment."""

    region: int  # of the file
    version: int  # of the bytes in it


class Scratch:
    """Segments on disk at later versions than the base.

    Args:
        directory: The run's directory; what an earlier process left there is used.
        layouts: Segments in visiting order.
        chain: Gives the journal's checksum at a version, or None where the journal is not durable that far.

    Raises:
        ScratchError: if the files cannot be opened.
        JournalError: if the journal cannot be made durable.
    """

    def __init__(self, directory: Path, layouts: Sequence[BlockLayout], chain: Callable[[int], int | None]) -> None:
        self.directory = directory
        self._chain = chain
        self._sizes = [whole_pages(layout.nbytes) for layout in layouts]
        self._layout = [None if layout.offsets is None else list(layout.offsets) for layout in layouts]
        self._offsets: list[int] = []  # region -> byte offset
        self._free: list[set[int]] = []  # segment -> regions it may use next; one set for all blocks
        self._lay_out(layouts)
        self.nbytes = scratch_bytes(layouts)
        self._written: dict[int, _Written] = {}
        try:
            make_directory(directory)
            self._manifest = self._open_manifest()
            self._data = RangedFile(directory / DATA, writable=True)
        except OSError as error:
            raise self._failed(error) from error

    def version(self, segment: int) -> int:
        """Return the version of a segment's bytes in the file; 0 if it has none and the base's bytes count."""
        place = self._written.get(segment)
        return 0 if place is None else place.version

    def read(self, segment: int, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of a segment's bytes. May be called from several threads.

        Args:
            segment: A segment whose version is above 0.
            out: uint8; whole pages are the fast way.
            start: The range's first byte.

        Raises:
            ScratchError: if the bytes cannot be read.
        """
        try:
            self._data.read_into(self._offsets[self._written[segment].region] + start, byte_view(out))
        except (OSError, EOFError) as error:
            raise self._failed(error) from error

    def write(self, segment: int, data: torch.Tensor, version: int) -> None:
        """Write a bucket back. On return its bytes are durable.

        Args:
            segment: The segment that the bucket holds.
            data: uint8, the segment's bucket, up to whole pages.
            version: Version of the bytes.

        Raises:
            ScratchError: if that failed; the bytes written before still count.
        """
        chain = self._chain(version)
        assert chain is not None, "bytes are written after the journal's records"
        region = min(self._free[segment])
        record = {"segment": segment, "slot": region, "version": version, "chain": chain}
        try:
            self._manifest.retract()  # a record that was written but not synced may name this region for other bytes
            self._data.write(self._offsets[region], byte_view(data))
            self._data.sync()
            self._manifest.append(record)
        except OSError as error:
            raise self._failed(error) from error
        self._free[segment].discard(region)
        if segment in self._written:
            self._free[segment].add(self._written[segment].region)
        self._written[segment] = _Written(region, version)

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._data.close()
        self._manifest.close()

    def _lay_out(self, layouts: Sequence[BlockLayout]) -> None:
        """Place the regions: blocks share theirs and one to spare, a resident segment has two of its own."""
        end = 0

        def regions(count: int, size: int) -> set[int]:
            nonlocal end
            first = len(self._offsets)
            self._offsets += [end + i * size for i in range(count)]
            end += count * size
            return set(range(first, first + count))

        blocks = [size for size, layout in zip(self._sizes, layouts, strict=True) if not layout.resident]
        shared = regions(len(blocks) + 1, max(blocks, default=0))
        for size, layout in zip(self._sizes, layouts, strict=True):
            self._free.append(regions(2, size) if layout.resident else shared)

    def _open_manifest(self) -> RecordFile:
        """Take over the records that are of this run, and write the manifest anew without the others."""
        path = self.directory / MANIFEST
        header: Record = {"format": 1, "sizes": self._sizes, "offsets": self._layout, "chain": self._chain(0)}
        records: dict[int, Record] = {}
        try:
            loaded = RecordFile(path).loaded
        except DamagedRecordError:
            loaded = []  # nothing is lost but time: the journal makes every version again
        if loaded and loaded[0] == header:
            records = {record["segment"]: record for record in loaded[1:]}
        data = self.directory / DATA
        size = data.stat().st_size if data.exists() else 0
        for segment, record in records.items():
            is_whole = self._offsets[record["slot"]] + self._sizes[segment] <= size
            if is_whole and self._chain(record["version"]) == record["chain"]:
                self._written[segment] = _Written(record["slot"], record["version"])
                self._free[segment].discard(record["slot"])
        partial = path.with_suffix(".partial")
        live = [records[segment] for segment in sorted(self._written)]
        # Durable before any region is written: an older manifest that came back would name regions for other bytes.
        partial.write_bytes(b"".join(to_line(record) for record in [header, *live]))
        sync_path(partial)
        partial.replace(path)
        sync_path(self.directory)
        return RecordFile(path)

    def _failed(self, error: OSError | EOFError) -> ScratchError:
        return ScratchError(
            self.directory / DATA,
            found=reason(error),
            expected=f"a disk that holds {self.nbytes / 1e9:.1f} GB of written-back blocks",
            remedy="free space or mend the disk and resume the run; nothing is lost, the journal is whole",
        )


def scratch_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Return the most that a scratch file takes: a region a block and one to spare, two for each resident segment."""
    blocks = [whole_pages(layout.nbytes) for layout in layouts if not layout.resident]
    resident = sum(whole_pages(layout.nbytes) for layout in layouts if layout.resident)
    return (len(blocks) + 1) * max(blocks, default=0) + 2 * resident
