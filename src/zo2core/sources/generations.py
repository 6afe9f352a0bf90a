"""Generations of changed segments: the weights and optimizer states of one step, and those that are being written.

A step that changes weights cannot be replayed from the journal. So what a run resumes from has to be the segments of one
step, all together: a generation. Segments of the next generation go to other slots than those of the present one. Once all
are durable, one record in the manifest names them, which is the commit; the slots of the generation before are free from
then on. Whatever moment a process is killed at, the last whole record names a whole generation.

A segment may be written several times before it is committed, each time into the same slot.

Write-ahead: the generation of step v is committed only once the journal's records up to v are durable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zo2core.errors import ScratchError
from zo2core.io.record_log import Record
from zo2core.sources.slot_file import SlotFile, Written
from zo2core.types import BlockLayout

FORMAT = 3  # format of the manifest, as in ``ONLY_COPY``; earlier ones are those of single segments


class Generations(SlotFile):
    """Segments on disk, of which those of one step are committed together. See ``SlotFile``."""

    def __init__(
        self,
        directory: Path,
        layouts: Sequence[BlockLayout],
        chain: Callable[[int], int | None],
        require_version: Callable[[int, str], object] | None = None,
        *,
        spare: int,
    ) -> None:
        self.step = 0  # of the present generation: the number of steps taken; 0 is the base
        self.values: Mapping[str, Any] = {}  # further values of the present generation, as JSON
        self._committed: dict[int, Written] = {}  # by segment
        self._pending: dict[int, int] = {}  # segment to the slot that holds its next bytes
        super().__init__(directory, layouts, chain, require_version, spare=spare)

    def write(self, segment: int, data: torch.Tensor, version: int) -> None:
        """Write a segment of the next generation. Its bytes are durable once that is committed."""
        if segment not in self._pending:
            committed = {written.slot for written in self._committed.values()}
            self._pending[segment] = min(self._slots[segment] - committed - set(self._pending.values()))
        try:
            # The checksum of a later generation's bytes is part of its record, which has the journal's.
            self._written[segment] = self._put(segment, data, version, self._pending[segment], 0, sync=False)
        except OSError as error:
            raise self._failed(error) from error

    def commit(self, step: int, values: Mapping[str, Any]) -> None:
        """Make the next generation the present one. On return it is durable."""
        chain = self._chain(step)
        assert chain is not None, "a generation is committed after the journal's records"
        record = {
            "step": step,
            "chain": chain,
            "values": dict(values),
            "segments": [self._written[segment].record(segment) for segment in sorted(self._written)],
        }
        try:
            self._data.sync()
            self._manifest.append(record)
        except OSError as error:
            raise self._failed(error) from error
        self.step, self.values = step, values
        self._committed, self._pending = dict(self._written), {}

    def _mismatched(self, segment: int) -> bool:
        written = self._written[segment]
        raise ScratchError(
            self.directory,
            found=f"damaged bytes of {self._names[segment]} at step {written.version}",
            expected=f"the bytes that were written: they are part of step {self.step}, which cannot be replayed",
            remedy="restore the run's directory from a backup, or begin the run anew",
        )

    def _header(self) -> Record:
        slots = len(self._offsets)
        return {"format": FORMAT, "sizes": self._sizes, "offsets": self._layout, "slots": slots, "chain": self._chain(0)}

    def _load(self, records: Sequence[Record], where: str) -> None:
        """Load the last record that is plausible."""
        for record in reversed(records):
            step, chain, values, segments = (record.get(key) for key in ("step", "chain", "values", "segments"))
            if type(step) is not int or step < 1 or not isinstance(values, dict) or not isinstance(segments, list):
                continue
            if self._require_version is not None and self._chain(step) is None:
                self._require_version(step, where)
            parsed = [self._parsed(one) if isinstance(one, dict) else (None, None) for one in segments]
            written = {segment: one for segment, one in parsed if segment is not None and one is not None}
            slots = {one.slot for one in written.values()}
            if len(parsed) != len(written) or len(slots) != len(written) or self._chain(step) != chain:
                continue
            if not all(self._is_in_file(segment, one) and one.version <= step for segment, one in written.items()):
                continue
            self._written, self._committed = written, dict(written)
            self.step, self.values = step, values
            return

    def _live(self) -> Sequence[Record]:
        if self.step == 0:
            return []
        segments = [self._committed[segment].record(segment) for segment in sorted(self._committed)]
        return [{"step": self.step, "chain": self._chain(self.step), "values": dict(self.values), "segments": segments}]
