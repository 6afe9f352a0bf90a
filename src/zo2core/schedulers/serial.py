"""The serial scheduler: one thing after the other. It is the oracle of every other one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from zo2core.protocols import (
    BlockSource,
    Device,
    ReplaySegment,
    Store,
    VisitSegment,
    Wait,
)
from zo2core.schedulers.profiling import Timeline
from zo2core.types import Bucket, Lane


class SerialScheduler:
    """Uploads, replays, offloads and evaluates segment by segment, and waits for each.

    Args:
        source: Source of the segments. The caller closes it.
        device: Compute device. The caller closes it.
        timeline: Records every transfer.
    """

    def __init__(
        self, source: BlockSource, device: Device, *, timeline: Timeline | None = None
    ) -> None:
        self._source = source
        self._device = device
        self._timeline = Timeline() if timeline is None else timeline
        self._layouts = source.layouts
        blocks = max((layout.nbytes for layout in self._layouts if not layout.resident), default=0)
        self._slot = None if device.in_place else device.empty(blocks)
        self._residents = {
            index: device.empty(layout.nbytes)
            for index, layout in enumerate(self._layouts)
            if layout.resident and not device.in_place
        }

    def sweep(self, visit: VisitSegment, order: Sequence[int]) -> None:
        """Visit the segments in this order, one thing after the other."""
        held: dict[int, Bucket] = {}  # resident segments stay acquired until the sweep has ended
        has_revisits = len(set(order)) < len(order)
        self._source.prefetch(upcoming(order, 0))
        try:
            for position, index in enumerate(order):
                is_held = index in held
                bucket = held[index] if is_held else self._source.acquire(index)
                # None: the visit failed before its bytes were final, and they are lost
                version: int | None = bucket.version

                def commit(committed: int, bucket: Bucket = bucket) -> None:
                    nonlocal version
                    if committed != bucket.version:
                        self._copy(Lane.OFFLOAD, bucket, Wait.RETURNED)
                    version = committed

                try:
                    if has_revisits:  # acquired blocks are needed again, before others
                        self._source.prefetch(upcoming(order, position + 1))
                    version = None
                    visit(
                        index,
                        self._store(bucket) if is_held else self._upload(bucket),
                        bucket.version,
                        commit,
                    )
                    version = bucket.version if version is None else version
                finally:
                    if self._layouts[index].resident and version is not None:
                        held[index] = bucket._replace(version=version)
                    else:
                        held.pop(index, None)
                        self._source.release(bucket, version)
        finally:
            for bucket in held.values():
                self._source.release(bucket, bucket.version)

    @contextmanager
    def replayed(self, replay: ReplaySegment, index: int) -> Iterator[Bucket]:
        """Bring one segment to the present version, and its bytes to its bucket, which is released
        at the end.
        """
        self._source.prefetch([*range(index, len(self._layouts)), *range(index)])
        bucket = self._source.acquire(index)
        version = None
        try:
            replayed = replay(index, self._upload(bucket), bucket.version)
            if replayed != bucket.version:
                self._copy(Lane.OFFLOAD, bucket, Wait.RETURNED)
            version = replayed
            yield bucket
        finally:
            self._source.release(bucket, version)

    def release_all(self) -> None:
        """Do nothing, since no bucket is held between sweeps and nothing newer is on the device."""

    def _upload(self, bucket: Bucket) -> Store:
        self._copy(Lane.UPLOAD, bucket, Wait.UPLOADED)
        return self._store(bucket)

    def _store(self, bucket: Bucket) -> Store:
        if self._device.in_place:
            return bucket.views
        return self._layouts[bucket.segment].views(self._memory(bucket))

    def _copy(self, lane: Lane, bucket: Bucket, why: Wait) -> None:
        if self._device.in_place:
            return
        on_host = bucket.data
        on_device = self._memory(bucket)
        target, origin = (on_device, on_host) if lane is Lane.UPLOAD else (on_host, on_device)
        streams = self._device.streams
        transfer = streams.copy(lane, target, origin, {Wait.REPLAYED: streams.mark()})
        name = self._layouts[bucket.segment].name
        self._timeline.note(lane, name, transfer.started, transfer.done, origin.numel())
        streams.wait(transfer.done, why)

    def _memory(self, bucket: Bucket) -> torch.Tensor:
        memory = self._residents.get(bucket.segment, self._slot)
        assert memory is not None
        return memory[: len(bucket.data)]


def upcoming(order: Sequence[int], position: int) -> list[int]:
    """List each segment once, in the order of its next use; the next sweep has the same order."""
    return list(dict.fromkeys([*order[position:], *order[:position]]))
