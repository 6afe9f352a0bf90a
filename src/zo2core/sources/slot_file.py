"""A file of slots for segments that have changed, and a manifest that records which slot holds
which segment.

The user's checkpoint is never written. A segment's new bytes go to a free slot, so its old bytes
stay valid until the manifest names the new ones. A record has the journal's checksum at the version
of the bytes, so that bytes of another run are ignored, and a checksum of the bytes, which is
checked when they are first read after opening. Later reads are not checked: this process holds a
lock on the file and is the only one that writes it, and disks report bad sectors themselves.

Written-back segments of zeroth-order runs: each is durable by itself, and replaying the journal
brings it up to date.

One spare slot for all blocks suffices. What a crash leaves is never wrong, at worst old.
Write-ahead: bytes of version v are written only once the journal's records up to v are durable.
Bytes that do not match their record, as in a copy of a run that was being written, are dropped.

Generations of changed segments: the weights and optimizer states of one step, and those that are
being written.

A step that changes weights cannot be replayed from the journal. So what a run resumes from has to
be the segments of one step, all together: a generation. Segments of the next generation go to other
slots than those of the present one. Once all are durable, one record in the manifest names them,
which is the commit; the slots of the generation before are free from then on. Whatever moment a
process is killed at, the last whole record names a whole generation.

A segment may be written several times before it is committed, each time into the same slot.

Write-ahead: the generation of step v is committed only once the journal's records up to v are
durable.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zo2core.errors import ScratchError, reason, system_error
from zo2core.io.direct_file import (
    RangedFile,
    byte_view,
    chunk_checksum,
    combined_checksum,
    whole_pages,
)
from zo2core.io.durable import (
    DamagedRecordError,
    LockedFileError,
    Record,
    RecordFile,
    make_directory,
    read_regular,
    replace_file,
    to_line,
)
from zo2core.types import BlockLayout, shown_bytes

DATA = "scratch.bin"
MANIFEST = "scratch.jsonl"
ONLY_COPY = b'{"format":3,'  # begin of a manifest of generations, which nothing can make again
# bytes with a checksum of their own; a record's checksum combines those of its slot
PIECE = 4 << 20

_MOST_STEPS = 1 << 40  # higher versions are taken for damage


class SlotContent(NamedTuple):
    """The written bytes of one segment."""

    slot: int  # slot of the file
    version: int  # version of the bytes
    chain: int  # the journal's checksum at that version, or at that of the generation
    xxh3: str  # checksum of segment, version, chain and bytes
    is_checked: bool  # whether this process wrote the bytes, or compared them with their checksum

    def record(self, segment: int) -> dict[str, Any]:
        """The manifest's values."""
        return {
            "segment": segment,
            "slot": self.slot,
            "version": self.version,
            "chain": self.chain,
            "xxh3": self.xxh3,
        }


class SlotFile(ABC):
    """Segments on disk at later versions than the base. Its files are locked until ``close``."""

    def __init__(
        self,
        directory: Path,
        layouts: Sequence[BlockLayout],
        chain: Callable[[int], int | None],
        require_version: Callable[[int, str], object] = lambda version, where: None,
        *,
        spare: int = 1,
    ) -> None:
        self.directory = directory
        self._chain = chain
        self._require_version = require_version
        self._sizes = [whole_pages(layout.nbytes) for layout in layouts]
        self._names = [layout.name for layout in layouts]
        self._layout = [
            None if layout.offsets is None else list(layout.offsets) for layout in layouts
        ]
        # Byte offset of each slot, and each segment's slots.
        (*self._offsets, self.nbytes), self._slots = _slots(layouts, spare)
        # Segment to its valid bytes. One thread reads while another one writes, but never the same
        # segment, and each changes the dictionary by single operations.
        self._written: dict[int, SlotContent] = {}
        with self._typed_failures():
            make_directory(directory)
            # before the manifest: its lock covers both
            self._data = RangedFile(directory / DATA, writable=True)
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="zo2-checksum")
        try:
            with self._typed_failures():
                self._manifest = self._open_manifest()
        except BaseException:
            self._hashing.shutdown()
            self._data.close()
            raise

    @abstractmethod
    def write(self, segment: int, data: torch.Tensor, version: int) -> None:
        """Write a segment."""

    @abstractmethod
    def _header(self) -> Record:
        """The manifest's first record."""

    @abstractmethod
    def _load(self, records: Sequence[Record], where: str) -> bool:
        """Take the records of an earlier process where they are plausible; bytes are checked when
        they are first read. Returns whether there are such records.
        """

    @abstractmethod
    def _valid_records(self) -> Sequence[Record]:
        """The records that count."""

    @abstractmethod
    def _treat_mismatch(self, segment: int) -> bool:
        """Treat a segment that does not match its record; returns False if its bytes are
        dropped.
        """

    def version(self, segment: int) -> int:
        """Version of a segment's written bytes; 0 if there are none."""
        written = self._written.get(segment)
        return 0 if written is None else written.version

    def is_unchecked(self, segment: int) -> bool:
        """Whether a segment's bytes come from an earlier process and have not been compared with
        their checksum.
        """
        return not self._written[segment].is_checked

    def confirm(self, segment: int, checksums: Sequence[int]) -> bool:
        """Compare bytes that were read with their record."""
        written = self._written[segment]
        if written.xxh3 == combined_checksum([segment, written.version, written.chain, *checksums]):
            self._written[segment] = written._replace(is_checked=True)
            return True
        return self._treat_mismatch(segment)

    def read(self, segment: int, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of a segment's bytes. May be called from several threads."""
        with self._typed_failures():
            self._data.read_into(self._offsets[self._written[segment].slot] + start, byte_view(out))

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._hashing.shutdown()
        self._data.close()
        self._manifest.close()

    def _write_slot(
        self, segment: int, data: torch.Tensor, version: int, slot: int, chain: int, *, sync: bool
    ) -> SlotContent:
        """Write a segment's bytes into a slot, and compute their checksum meanwhile."""
        view = byte_view(data)
        starts = range(0, len(view), PIECE)
        hashing = self._hashing.submit(
            lambda: [chunk_checksum(view[start : start + PIECE]) for start in starts]
        )
        try:
            self._data.write(self._offsets[slot], view)
            if sync:
                self._data.sync()
            checksum = combined_checksum([segment, version, chain, *hashing.result()])
            return SlotContent(slot, version, chain, checksum, is_checked=True)
        finally:
            wait([hashing])  # the memory may change once this returns

    def _open_manifest(self) -> RecordFile:
        """Load the records of this run, and rewrite the manifest without others."""
        path = self.directory / MANIFEST
        header = self._header()
        try:
            loaded = RecordFile(path).loaded
        except DamagedRecordError:
            loaded = []
        is_of_run = self._load(loaded[1:] if loaded[:1] == [header] else (), str(path))
        if (
            loaded != [header]
            and not is_of_run
            and path.exists()
            and read_regular(path).startswith(ONLY_COPY)
        ):
            raise ScratchError(
                path,
                found="weights of another run, or damaged records or bytes of this run's",
                expected=(
                    "no file, or the manifest of this run: weights that gradients have changed "
                    "cannot be replayed"
                ),
                remedy="choose another directory, or restore this one from a backup",
            )
        # Durable before any slot is written: an older manifest would name slots that then hold
        # other bytes.
        replace_file(path, b"".join(to_line(record) for record in [header, *self._valid_records()]))
        manifest = RecordFile(path)
        manifest.lock()
        return manifest

    def _parse_segment(self, record: Any) -> tuple[int | None, SlotContent | None]:
        """A record's segment and content; None where they are not valid."""
        keys = "segment", "slot", "version", "chain", "xxh3"
        values: list[Any] = (
            [record.get(key) for key in keys] if isinstance(record, dict) else [None] * len(keys)
        )
        segment, slot, version, chain, xxh3 = values
        if type(segment) is not int or not 0 <= segment < len(self._sizes):
            return None, None
        is_valid = type(slot) is type(version) is type(chain) is int and isinstance(xxh3, str)
        is_valid = is_valid and slot in self._slots[segment] and 0 < version < _MOST_STEPS
        if not is_valid:
            return segment, None
        return segment, SlotContent(slot, version, chain, xxh3, is_checked=False)

    def _are_in_file(self, written: Mapping[int, SlotContent]) -> bool:
        """Whether the data file is long enough for segments' bytes."""
        data = self.directory / DATA
        size = data.stat().st_size if data.exists() else 0
        return all(
            self._offsets[slot_record.slot] + self._sizes[segment] <= size
            for segment, slot_record in written.items()
        )

    def _is_of_run(self, version: int, chain: object, where: str) -> bool:
        """Whether the journal has this checksum at a version.

        One that is shorter has lost steps, which is an error.
        """
        known = self._chain(version)
        if known is None:
            self._require_version(version, where)
        return known == chain

    @contextlib.contextmanager
    def _typed_failures(self) -> Iterator[None]:
        try:
            yield
        except LockedFileError as error:
            raise ScratchError(
                error.filename,
                found=reason(error),
                expected="a directory for written-back blocks that no other engine uses",
                remedy="close that engine, wait until its process has ended, or choose another "
                "directory",
            ) from error
        except (OSError, EOFError) as error:
            raise system_error(
                ScratchError,
                getattr(error, "filename", None) or self.directory / DATA,
                error,
                expected=f"a regular file on a disk that holds {shown_bytes(self.nbytes)} of "
                "written-back blocks",
                remedy="check the path and its disk",
                afterwards="resume the run then; nothing is lost, the journal is complete",
            ) from error


def _slots(layouts: Sequence[BlockLayout], spare: int) -> tuple[list[int], list[frozenset[int]]]:
    """Offsets of slots, with the file's largest size at the end, and each segment's slots.

    Blocks share one slot each and the spare ones, a resident segment has two of its own.
    """
    blocks = [whole_pages(layout.nbytes) for layout in layouts if not layout.resident]
    lengths = [max(blocks, default=0)] * (len(blocks) + spare)
    shared = frozenset(range(len(lengths)))
    slots = list[frozenset[int]]()
    for layout in layouts:
        slots.append(frozenset((len(lengths), len(lengths) + 1)) if layout.resident else shared)
        lengths += [whole_pages(layout.nbytes)] * 2 if layout.resident else []
    return [0, *accumulate(lengths)], slots


def slot_bytes(layouts: Sequence[BlockLayout], spare: int = 1) -> int:
    """Largest size of the file: a slot per block and the spare ones, two for each resident
    segment.
    """
    return _slots(layouts, spare)[0][-1]


SCRATCH_FORMAT = 2  # of a manifest of single segments


class Scratch(SlotFile):
    """Segments on disk, each at a version of its own. See ``SlotFile``."""

    def write(self, segment: int, data: torch.Tensor, version: int) -> None:
        """Write a segment back.

        On return its bytes are durable; if it fails, the bytes written before stay valid.
        """
        chain = self._chain(version)
        assert chain is not None, "bytes are written after the journal's records"
        slot = min(
            self._slots[segment].difference(
                written.slot for written in list(self._written.values())
            )
        )
        with self._typed_failures():
            # a record that was written but not synced may name this slot for other bytes
            self._manifest.retract()
            written = self._write_slot(segment, data, version, slot, chain, sync=True)
            count = partial(self._written.update, {segment: written})
            self._manifest.append(
                written.record(segment), count, lambda: self._written.get(segment) is written
            )

    def _treat_mismatch(self, segment: int) -> bool:
        """Drop the bytes: replaying from the base gives them again."""
        del self._written[segment]
        return False

    def _header(self) -> Record:
        return {
            "format": SCRATCH_FORMAT,
            "sizes": self._sizes,
            "offsets": self._layout,
            "chain": self._chain(0),
        }

    def _load(self, records: Sequence[Record], where: str) -> bool:
        """Load the last record of each segment where it is plausible."""
        last = {
            segment: written
            for segment, written in map(self._parse_segment, records)
            if segment is not None
        }
        users = Counter(written.slot for written in last.values() if written is not None)
        for segment, written in last.items():
            if written is None or not self._is_of_run(written.version, written.chain, where):
                continue
            if users[written.slot] == 1 and self._are_in_file({segment: written}):
                self._written[segment] = written
        return bool(self._written)

    def _valid_records(self) -> Sequence[Record]:
        return [self._written[segment].record(segment) for segment in sorted(self._written)]


# of a manifest of generations, as in ``ONLY_COPY``
GENERATIONS_FORMAT = 3
# Records of a manifest that is opened again, beside the last one. Of the last two, one is opened;
# the one before it says that the earlier of them is not the first.
_GENERATIONS_KEPT = 2


class Generations(SlotFile):
    """Segments on disk, of which those of one step are committed together. See ``SlotFile``.

    Args:
        directory: Directory of the files.
        layouts: The segments.
        chain: The journal's checksum at a version.
        require_version: Refuses a version that the journal has lost.
        spare: Slots of blocks beside one for each.
        choose: Chooses the generation to open, given the steps of the last two: all of the earlier
            one is still there until the next generation is written.

    Attributes:
        step: The number of steps taken in the present generation; 0 is the base.
        values: Further values of the present generation, as JSON.
    """

    step: int
    values: Mapping[str, Any]
    _committed: dict[int, SlotContent]  # by segment
    _pending: dict[int, int]  # segment to the slot that holds its next bytes

    def __init__(
        self,
        directory: Path,
        layouts: Sequence[BlockLayout],
        chain: Callable[[int], int | None],
        require_version: Callable[[int, str], object] = lambda version, where: None,
        *,
        spare: int = 1,
        choose: Callable[[Sequence[int]], int] = max,
    ) -> None:
        self._choose = choose
        super().__init__(directory, layouts, chain, require_version, spare=spare)

    def write(self, segment: int, data: torch.Tensor, version: int) -> None:
        """Write a segment of the next generation. Its bytes are durable once that is committed."""
        if segment not in self._pending:
            committed = {written.slot for written in self._committed.values()}
            self._pending[segment] = min(
                self._slots[segment] - committed - set(self._pending.values())
            )
        with self._typed_failures():
            # The checksum of a later generation's bytes is part of its record, which has the
            # journal's.
            self._written[segment] = self._write_slot(
                segment, data, version, self._pending[segment], 0, sync=False
            )

    def commit(self, step: int, values: Mapping[str, Any]) -> None:
        """Make the next generation the present one. On return it is durable."""
        record = self._record(step, values, self._written)
        assert record["chain"] is not None, "a generation is committed after the journal's records"
        with self._typed_failures():
            self._data.sync()
            self._manifest.append(record)
        self.step, self.values = step, values
        self._committed = dict(self._written)
        self._pending = {}

    def _record(
        self, step: int, values: Mapping[str, Any], written: Mapping[int, SlotContent]
    ) -> Record:
        segments = [written[segment].record(segment) for segment in sorted(written)]
        return {
            "step": step,
            "chain": self._chain(step),
            "values": dict(values),
            "segments": segments,
        }

    def _treat_mismatch(self, segment: int) -> bool:
        raise ScratchError(
            self.directory,
            found=(
                f"damaged bytes of {self._names[segment]} at step {self._written[segment].version}"
            ),
            expected=(
                f"the bytes that were written: they are part of step {self.step}, which cannot be "
                "replayed"
            ),
            remedy="restore the run's directory from a backup, or begin the run anew",
        )

    def _header(self) -> Record:
        slots = {"slots": len(self._offsets), "chain": self._chain(0)}
        return {
            "format": GENERATIONS_FORMAT,
            "sizes": self._sizes,
            "offsets": self._layout,
            **slots,
        }

    def _load(self, records: Sequence[Record], where: str) -> bool:
        """Load the chosen one of the last two records that are plausible."""
        self.step = 0
        self.values = {}
        self._committed = {}
        self._pending = {}
        self._loaded: list[Record] = []
        plausible: dict[int, tuple[Record, dict[int, SlotContent]]] = {}
        for record in reversed(records):
            written = self._parse_generation(record, where)
            if written is not None:
                plausible.setdefault(record["step"], (record, written))
            if len(plausible) > _GENERATIONS_KEPT:
                break
        steps = sorted({0, *plausible})
        self.step = self._choose(steps[-2:])
        if self.step:
            record, self._written = plausible[self.step]
            self._committed = dict(self._written)
            self.values = record["values"]
            self._loaded = [plausible[step][0] for step in steps if 0 < step <= self.step]
        return bool(plausible)

    def _parse_generation(self, record: Record, where: str) -> dict[int, SlotContent] | None:
        """The segments of a record; None if it is not plausible."""
        step = record.get("step")
        if type(step) is not int or step < 1 or not isinstance(record.get("values"), dict):
            return None
        is_of_run = self._is_of_run(step, record.get("chain"), where)
        written = self._parse_segments(step, record.get("segments"))
        if is_of_run and written is not None and self._are_in_file(written):
            return written
        return None

    def _parse_segments(self, step: int, segments: object) -> dict[int, SlotContent] | None:
        """The segments of a record; None if they are not plausible at this step."""
        if not isinstance(segments, list):
            return None
        parsed = [self._parse_segment(segment) for segment in segments]
        written = {
            segment: entry for segment, entry in parsed if segment is not None and entry is not None
        }
        slots = {entry.slot for entry in written.values() if entry.version <= step}
        return written if len(parsed) == len(written) == len(slots) else None

    def _valid_records(self) -> Sequence[Record]:
        return self._loaded
