"""Written-back segments of zeroth-order runs: each is durable by itself, and replaying the journal brings it up to date.

One spare slot for all blocks suffices. What a crash leaves is never wrong, at worst old. Write-ahead: bytes of version v are
written only once the journal's records up to v are durable. Bytes that do not match their record, as in a copy of a run that
was being written, are dropped.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import torch

from zo2core.io.record_log import Record
from zo2core.sources.slot_file import SlotFile, Written

FORMAT = 2  # format of the manifest; records of format 1 had no checksum of the bytes


class Scratch(SlotFile):
    """Segments on disk, each at a version of its own. See ``SlotFile``."""

    def write(self, segment: int, data: torch.Tensor, version: int) -> None:
        """Write a segment back. On return its bytes are durable; if it fails, the bytes written before stay valid."""
        chain = self._chain(version)
        assert chain is not None, "bytes are written after the journal's records"
        slot = min(self._slots[segment].difference(written.slot for written in list(self._written.values())))
        try:
            self._manifest.retract()  # a record that was written but not synced may name this slot for other bytes
            end = self._manifest.end
            written = self._put(segment, data, version, slot, chain, sync=True)
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

    def _mismatched(self, segment: int) -> bool:
        """Drop the bytes: replaying from the base gives them again."""
        del self._written[segment]
        return False

    def _header(self) -> Record:
        return {"format": FORMAT, "sizes": self._sizes, "offsets": self._layout, "chain": self._chain(0)}

    def _load(self, records: Sequence[Record], where: str) -> None:
        """Load the last record of each segment where it is plausible."""
        last: dict[int, Written] = {}
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
            is_alone = self._is_in_file(segment, written) and users[written.slot] == 1
            if is_alone and self._chain(written.version) == written.chain:
                self._written[segment] = written

    def _live(self) -> Sequence[Record]:
        return [self._written[segment].record(segment) for segment in sorted(self._written)]
