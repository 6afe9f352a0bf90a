"""Written-back segments: a file of slots, and a manifest that records each segment's slot and version.

The user's checkpoint is never written. A segment's new bytes go to a free slot; its old bytes stay valid until the new ones
and their manifest record are durable. So a segment is never lost, and one spare slot for all blocks suffices. What a crash
leaves is never wrong, at worst old: replaying the journal brings it up to date.

Write-ahead: bytes of version v are written only once the journal's records up to v are durable. Every manifest record
has the journal's checksum at its version, so bytes of another run are ignored, and a checksum of the bytes, which is
checked when they are first read after opening. Bytes that do not match their record, as in a copy of a run that was being
written, are dropped. Later reads are not checked: this process holds a lock on the file and is the only one that writes it,
and disks report bad sectors themselves.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch

from zo2core.errors import ScratchError, reason
from zo2core.io.checksum import chunk_checksum, combined_checksum
from zo2core.io.direct_file import RangedFile, byte_view, whole_pages
from zo2core.io.durable import LockedFileError, make_directory, replace_file
from zo2core.io.record_log import DamagedRecordError, Record, RecordFile, to_line
from zo2core.types import BlockLayout, shown_bytes

DATA = "scratch.bin"
MANIFEST = "scratch.jsonl"
FORMAT = 2  # format of the manifest; records of format 1 had no checksum of the bytes
PIECE = 4 << 20  # bytes with a checksum of their own; a record's checksum combines those of its slot

_MOST_STEPS = 1 << 40  # higher versions are taken for damage


class _Written(NamedTuple):
    """The written-back bytes of one segment."""

    slot: int  # slot of the file
    version: int  # version of the bytes
    chain: int  # the journal's checksum at that version
    checksum: str  # checksum of segment, version, chain and bytes
    is_checked: bool  # whether this process wrote the bytes, or compared them with their checksum

    def record(self, segment: int) -> Record:
        """The manifest's record."""
        return {
            "segment": segment,
            "slot": self.slot,
            "version": self.version,
            "chain": self.chain,
            "xxh3": self.checksum,
        }


class Scratch:
    """Segments on disk at later versions than the base. Its files are locked until ``close``.

    Args:
        directory: Directory of the run; valid files of an earlier process are used.
        layouts: Segments in visiting order.
        chain: Version to the journal's checksum; None where the journal is not durable that far.
        require_version: Called with every version in the manifest beyond the journal's end, and the manifest's path: the
            journal has lost records, since bytes are written after them. None ignores such bytes.

    Raises:
        ScratchError: if the files cannot be opened, or another engine has them open.
        JournalError: if the journal cannot be made durable, or has lost records.
    """

    def __init__(
        self,
        directory: Path,
        layouts: Sequence[BlockLayout],
        chain: Callable[[int], int | None],
        require_version: Callable[[int, str], object] | None = None,
    ) -> None:
        self.directory = directory
        self._chain = chain
        self._require_version = require_version
        self._sizes = [whole_pages(layout.nbytes) for layout in layouts]
        self._layout = [None if layout.offsets is None else list(layout.offsets) for layout in layouts]
        self._offsets: list[int] = []  # slot -> byte offset
        self._slots: list[frozenset[int]] = []  # segment -> all slots it may use; all blocks have the same slots
        self._assign_slots(layouts)
        self.nbytes = scratch_bytes(layouts)
        # Segment to its valid bytes; all other slots are free. One thread reads while another one writes, but never the
        # same segment, and each changes the dictionary by single operations.
        self._written: dict[int, _Written] = {}
        try:
            make_directory(directory)
            self._data = RangedFile(directory / DATA, writable=True)  # before the manifest: its lock covers both
        except OSError as error:
            raise self._failed(error) from error
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="zo2-checksum")
        try:
            self._manifest = self._open_manifest()
        except BaseException as error:
            self._hashing.shutdown()
            self._data.close()
            if isinstance(error, OSError):
                raise self._failed(error) from error
            raise

    def version(self, segment: int) -> int:
        """Version of a segment's written-back bytes; 0 if there are none."""
        written = self._written.get(segment)
        return 0 if written is None else written.version

    def is_unchecked(self, segment: int) -> bool:
        """Whether a segment's bytes come from an earlier process and have not been compared with their checksum."""
        return not self._written[segment].is_checked

    def confirm(self, segment: int, checksums: Sequence[int]) -> bool:
        """Compare bytes that were read with their record; if they differ, the segment is dropped.

        Args:
            segment: Index of the segment.
            checksums: Checksums of each ``PIECE`` bytes, in order.

        Returns:
            Whether the bytes match.
        """
        written = self._written[segment]
        if written.checksum == combined_checksum([segment, written.version, written.chain, *checksums]):
            self._written[segment] = written._replace(is_checked=True)
            return True
        del self._written[segment]
        return False

    def read(self, segment: int, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of a segment's bytes. May be called from several threads.

        Args:
            segment: Index of a segment with a version above 0.
            out: uint8; whole pages are fastest.
            start: First byte of the range.

        Raises:
            ScratchError: if the bytes cannot be read.
        """
        try:
            self._data.read_into(self._offsets[self._written[segment].slot] + start, byte_view(out))
        except (OSError, EOFError) as error:
            raise self._failed(error) from error

    def write(self, segment: int, data: torch.Tensor, version: int) -> None:
        """Write a segment back. On return its bytes are durable.

        Args:
            segment: Index of the segment.
            data: uint8, the segment's bucket, up to whole pages.
            version: Version of the bytes.

        Raises:
            ScratchError: if the write failed; the bytes written before stay valid.
        """
        chain = self._chain(version)
        assert chain is not None, "bytes are written after the journal's records"
        slot = min(self._slots[segment].difference(written.slot for written in list(self._written.values())))
        view = byte_view(data)
        starts = range(0, len(view), PIECE)
        hashing = self._hashing.submit(lambda: [chunk_checksum(view[start : start + PIECE]) for start in starts])
        try:
            self._manifest.retract()  # a record that was written but not synced may name this slot for other bytes
            end = self._manifest.end
            self._data.write(self._offsets[slot], view)
            self._data.sync()
            written = _Written(
                slot, version, chain, combined_checksum([segment, version, chain, *hashing.result()]), is_checked=True
            )
            try:
                self._manifest.append(written.record(segment))
                self._written[segment] = written
            except BaseException:  # also an interrupt: manifest and memory have to agree on the segment's slot
                if segment not in self._written or self._written[segment].slot != slot:
                    with contextlib.suppress(OSError):
                        self._manifest.retract(end)
                raise
        except OSError as error:
            raise self._failed(error) from error
        finally:
            wait([hashing])  # the memory may change once this returns

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._hashing.shutdown()
        self._data.close()
        self._manifest.close()

    def _assign_slots(self, layouts: Sequence[BlockLayout]) -> None:
        """Assign slots: blocks share one slot each and a spare one, a resident segment has two of its own."""
        end = 0

        def slots(count: int, size: int) -> frozenset[int]:
            nonlocal end
            first = len(self._offsets)
            self._offsets += [end + i * size for i in range(count)]
            end += count * size
            return frozenset(range(first, first + count))

        blocks = [size for size, layout in zip(self._sizes, layouts, strict=True) if not layout.resident]
        shared = slots(len(blocks) + 1, max(blocks, default=0))
        for size, layout in zip(self._sizes, layouts, strict=True):
            self._slots.append(slots(2, size) if layout.resident else shared)

    def _open_manifest(self) -> RecordFile:
        """Load the records of this run, and rewrite the manifest without others."""
        path = self.directory / MANIFEST
        header: Record = {"format": FORMAT, "sizes": self._sizes, "offsets": self._layout, "chain": self._chain(0)}
        try:
            loaded = RecordFile(path).loaded
        except DamagedRecordError:
            loaded = []  # only time is lost: replaying the journal gives every version again
        if loaded and loaded[0] == header:
            self._load(loaded[1:], str(path))
        live = [self._written[segment].record(segment) for segment in sorted(self._written)]
        # Durable before any slot is written: an older manifest would name slots that then hold other bytes.
        replace_file(path, b"".join(to_line(record) for record in [header, *live]))
        manifest = RecordFile(path)
        manifest.lock()
        return manifest

    def _load(self, records: Sequence[Record], where: str) -> None:
        """Load the last record of each segment where it is plausible; its bytes are checked when they are read."""
        data = self.directory / DATA
        size = data.stat().st_size if data.exists() else 0
        last: dict[int, _Written] = {}
        for record in records:
            segment, written = self._parsed(record)
            if segment is not None:
                last.pop(segment, None)
            if segment is not None and written is not None:
                last[segment] = written
        users = Counter(written.slot for written in last.values())
        for segment, written in last.items():
            if self._require_version is not None and self._chain(written.version) is None:
                self._require_version(written.version, where)
            is_in_file = self._offsets[written.slot] + self._sizes[segment] <= size
            if is_in_file and users[written.slot] == 1 and self._chain(written.version) == written.chain:
                self._written[segment] = written

    def _parsed(self, record: Record) -> tuple[int | None, _Written | None]:
        """A record's segment and content; None where they are not valid."""
        segment, slot, version = (record.get(key) for key in ("segment", "slot", "version"))
        chain, checksum = record.get("chain"), record.get("xxh3")
        if type(segment) is not int or not 0 <= segment < len(self._sizes):
            return None, None
        if type(slot) is not int or slot not in self._slots[segment]:
            return segment, None
        if type(version) is not int or not 0 < version < _MOST_STEPS or type(chain) is not int:
            return segment, None
        if not isinstance(checksum, str):
            return segment, None
        return segment, _Written(slot, version, chain, checksum, is_checked=False)

    def _failed(self, error: OSError | EOFError) -> ScratchError:
        if isinstance(error, LockedFileError):
            return ScratchError(
                error.filename,
                found=reason(error),
                expected="a directory for written-back blocks that no other engine uses",
                remedy="close that engine, wait until its process has ended, or choose another directory",
            )
        return ScratchError(
            getattr(error, "filename", None) or self.directory / DATA,
            found=reason(error),
            expected=f"a regular file on a disk that holds {shown_bytes(self.nbytes)} of written-back blocks",
            remedy="free space or repair the disk and resume the run; nothing is lost, the journal is complete",
        )


def scratch_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Largest size of the scratch file: a slot per block and a spare one, two for each resident segment."""
    blocks = [whole_pages(layout.nbytes) for layout in layouts if not layout.resident]
    resident = sum(whole_pages(layout.nbytes) for layout in layouts if layout.resident)
    return (len(blocks) + 1) * max(blocks, default=0) + 2 * resident
