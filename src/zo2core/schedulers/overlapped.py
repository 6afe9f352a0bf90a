"""The overlapped scheduler: uploads, compute and offloads at the same time. Its bits are those of
the serial scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from zo2core.protocols import (
    BlockSource,
    Device,
    ReplaySegment,
    Scheduler,
    Store,
    Transfer,
    VisitSegment,
    Wait,
)
from zo2core.ranges import require_whole
from zo2core.schedulers.profiling import Timeline, now
from zo2core.schedulers.serial import SerialScheduler, upcoming
from zo2core.types import Bucket, Event, Lane

SLOTS = 2
AHEAD = 2  # blocks uploaded early; as many slots are free while embedding and head are computed


class _Slot:
    """Device memory for one segment at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.last_uses: dict[Wait, Event] = {}  # must have passed before the memory is overwritten


class _InBucket(NamedTuple):
    """The segment is computed in its bucket."""

    bucket: Bucket


class _Uploaded(NamedTuple):
    """The segment is in a slot, or being uploaded. Its bucket has the uploaded bytes."""

    slot: _Slot
    bucket: Bucket
    transfer: Transfer


class _InSlot(NamedTuple):
    """The segment is in a slot.

    Its bucket is released, or will be once a copy to or from it is done.
    """

    slot: _Slot


class _Returned(NamedTuple):
    """The segment is in a slot. Its bucket is acquired and has the slot's bytes."""

    slot: _Slot
    bucket: Bucket


_Place: TypeAlias = _InBucket | _Uploaded | _InSlot | _Returned


@dataclass
class _DeviceSegment:
    """A segment on the device, or being uploaded."""

    index: int
    # version of the bytes in the store; None: a replay failed half-way and they are lost
    version: int | None
    store: Store
    arrived: Event
    place: _Place = field(repr=False)


class _PendingRelease(NamedTuple):
    """A bucket that is released once a copy is done."""

    transfer: Transfer
    why: Wait
    bucket: Bucket
    version: int


def spread(blocks: Sequence[int], kept: int) -> set[int]:
    """Choose the blocks that stay on a device, evenly spread, so that transfers have time in
    between.
    """
    return {blocks[i * len(blocks) // kept] for i in range(kept)}


class OverlappedScheduler:
    """Computes block i while block i+1 is uploaded and block i-1 is offloaded (ZO2, arXiv
    2503.12668, sections 5.2 to 5.4).

    Two slots on the device alternate. While the device computes in one of them, the other one's
    block is offloaded and the next block is uploaded. A block's bytes are final once it is
    replayed, so its offload overlaps its forwards. Embedding, head and blocks that are kept have
    permanent slots. The next sweep's first block is uploaded while the head is computed. Events
    order the queues; each wait has a reason (``Wait``).

    Where segments are computed in their buckets there are no transfers: only the source's own work
    overlaps with compute.

    Args:
        source: Source of the segments. The caller closes it.
        device: Compute device. The caller closes it.
        kept: Number of blocks that stay on the device, spread evenly over the sweep, and need no
            transfers.
        across_sweeps: Whether the next sweep's first blocks are uploaded while this one ends. Must
            be false if the source itself brings blocks to the present version, which is newer in
            the next sweep.
        timeline: Records every transfer.

    Raises:
        OptionError: if ``kept`` is negative or more than the model's blocks.
    """

    def __init__(
        self,
        source: BlockSource,
        device: Device,
        *,
        kept: int = 0,
        across_sweeps: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._across_sweeps = across_sweeps
        self._timeline = Timeline() if timeline is None else timeline
        self._layouts = source.layouts
        blocks = [index for index, layout in enumerate(self._layouts) if not layout.resident]
        require_whole("kept", kept, 0, len(blocks))
        residents = {index for index, layout in enumerate(self._layouts) if layout.resident}
        staying = residents | spread(blocks, kept)
        self._free_slots: deque[_Slot] = deque()  # free slots of blocks that do not stay
        self._permanent_slots: dict[int, _Slot] = {}  # slots of segments that stay
        if not device.in_place:
            moving = [
                layout.nbytes for index, layout in enumerate(self._layouts) if index not in staying
            ]
            self._free_slots.extend(_Slot(device.empty(max(moving))) for _ in moving[:SLOTS])
            self._permanent_slots = {
                index: _Slot(device.empty(self._layouts[index].nbytes)) for index in sorted(staying)
            }
        self._on_device: dict[int, _DeviceSegment] = {}  # segments that stay, with their bytes
        self._uploaded_early: dict[int, _DeviceSegment] = {}  # uploaded early, for a later visit
        self._pending: deque[_PendingRelease] = deque()
        self._blocks = len(blocks)
        self._acquired_blocks = 0  # blocks' buckets acquired and not released

    def sweep(self, visit: VisitSegment, order: Sequence[int]) -> None:
        """Visit the segments in this order, with transfers beside the visits."""
        # residents computed in their buckets: released at the end
        residents: dict[int, _DeviceSegment] = {}
        segment: _DeviceSegment | None = None
        try:
            self._source.prefetch(self._not_on_device(upcoming(order, 0)))
            # not if blocks are visited once, or all of them stay in memory
            changes_order = len(set(order)) < len(order) and self._source.capacity < self._blocks
            for position, index in enumerate(order):
                segment = residents.pop(index, None) or self._take_segment(index)
                coming: list[int] = []
                if not self._device.in_place:
                    coming = self._upload_ready(order, position)
                elif changes_order:
                    self._source.prefetch(upcoming(order, position + 1))
                self._visit(visit, segment)
                visited, segment = segment, None
                if isinstance(visited.place, _InBucket) and self._layouts[index].resident:
                    residents[index] = visited
                else:
                    self._release_segment(visited)
                self._release_copied()
                if coming:  # the host may wait for the disk, while the device computes
                    self._upload_early(coming[0])
            if self._across_sweeps:
                self._prefetch_next_sweep(order)
        finally:
            if segment is not None:
                residents[segment.index] = segment
            for resident in residents.values():
                self._release_segment(resident)
            self._release_all()

    def _upload_ready(self, order: Sequence[int], position: int) -> list[int]:
        """Start the uploads of the next segments whose bytes are in their buckets, in the order in
        which they are needed; returns those of the next ones that were not started.
        """
        later: Iterable[int] = dict.fromkeys(order[position + 1 :])
        if self._across_sweeps:
            later = upcoming(order, position + 1)
        coming = self._not_on_device(later)
        ready = self._source.prefetch(coming)
        index = order[position]
        if index in coming:  # it cannot be uploaded before it is offloaded
            coming = coming[: coming.index(index)]
        coming = coming[:AHEAD]
        for started, next_index in enumerate(coming[:ready]):
            if not self._upload_early(next_index):
                return coming[started:]
        return coming[ready:]

    @contextmanager
    def replayed(self, replay: ReplaySegment, index: int) -> Iterator[Bucket]:
        """Bring one segment to the present version, and its bytes to its bucket, which is released
        at the end.
        """
        self._source.prefetch([*range(index, len(self._layouts)), *range(index)])
        segment = self._take_segment(index)
        try:
            version = self._order_after_upload(segment)
            segment.version = replay(index, segment.store, version)
            place = segment.place
            if not isinstance(place, _InBucket):
                place = self._return(segment, place)
            yield place.bucket
        finally:
            self._release_segment(segment)
            self._release_all()

    def release_all(self) -> None:
        """Release segments uploaded early, and offload newer bytes of segments that stay."""
        for segment in self._uploaded_early.values():
            self._release_segment(segment)
        self._uploaded_early.clear()
        self._release_all()
        self._source.prefetch([*self._on_device, *self._not_on_device(range(len(self._layouts)))])
        for index, segment in self._on_device.items():
            assert segment.version is not None
            bucket = self._acquire(index)
            if bucket.version < segment.version:
                self._offload_and_release(self._permanent_slots[index], bucket, segment.version)
                self._release_all()
            else:
                self._release(bucket, bucket.version)

    def _take_segment(self, index: int) -> _DeviceSegment:
        """A segment on the device; starts its upload if it is not there."""
        return (
            self._uploaded_early.pop(index, None)
            or self._on_device.get(index)
            or self._upload(index)
        )

    def _order_after_upload(self, segment: _DeviceSegment) -> int:
        """Order a segment's compute after its upload.

        Returns its version, which is unknown until the compute is issued.
        """
        version = segment.version
        assert version is not None, "bytes of a failed replay are not visited"
        segment.version = None
        self._device.streams.order(segment.arrived, Wait.UPLOADED)
        return version

    def _visit(self, visit: VisitSegment, segment: _DeviceSegment) -> None:
        version = self._order_after_upload(segment)
        visit(segment.index, segment.store, version, partial(self._commit, segment, version))
        if segment.version is None:
            segment.version = version  # nothing was committed, so nothing was changed

    def _commit(self, segment: _DeviceSegment, visited_version: int, version: int) -> None:
        """Start the offload of a segment whose bytes are final for this sweep, if they changed."""
        segment.version = version
        place = segment.place
        if isinstance(place, _Uploaded) and version != visited_version:
            self._offload_and_release(place.slot, place.bucket, version)
            segment.place = _InSlot(place.slot)

    def _return(self, segment: _DeviceSegment, place: _Uploaded | _InSlot | _Returned) -> _Returned:
        """Copy a slot's bytes to the segment's bucket, and wait for the copy."""
        replayed = self._device.streams.mark()
        self._release_all()  # its own bucket may still be in a copy
        bucket = self._acquire(segment.index) if isinstance(place, _InSlot) else place.bucket
        version = segment.version
        segment.version = None  # until the bucket has the slot's bytes
        segment.place = returned = _Returned(place.slot, bucket)
        transfer = self._offload(place.slot, bucket, replayed)
        self._device.streams.wait(transfer.done, Wait.RETURNED)
        segment.version = version
        return returned

    def _not_on_device(self, order: Iterable[int]) -> list[int]:
        """The segments of an order that must be uploaded."""
        return [
            index
            for index in order
            if index not in self._on_device and index not in self._uploaded_early
        ]

    def _prefetch_next_sweep(self, order: Sequence[int]) -> None:
        """Upload the first blocks of the next sweep; the host waits until their offloads are
        done.
        """
        coming = self._not_on_device(upcoming(order, 0))
        for position in range(min(len(coming), AHEAD)) if self._free_slots else ():
            index = coming[position]
            while self._is_in_copy(index):
                self._release_one()
            if not (self._source.prefetch(coming[position:]) and self._upload_early(index)):
                return

    def _upload_early(self, index: int) -> bool:
        """Start a segment's upload, if a slot and a bucket are free and its bucket is not in a
        copy.
        """
        if self._device.in_place or self._is_in_copy(index):
            return False
        if not self._layouts[index].resident and self._acquired_blocks >= self._source.capacity:
            return False
        stays = index in self._permanent_slots
        if not (stays or self._free_slots):
            return False
        segment = self._upload(index)
        if not stays:
            self._uploaded_early[index] = segment
        return True

    def _is_in_copy(self, index: int) -> bool:
        """Whether a segment's bucket waits for a copy to be released."""
        return any(leaving.bucket.segment == index for leaving in self._pending)

    def _acquire(self, index: int) -> Bucket:
        """Acquire a segment's bucket, and before that release others if need be."""
        block = not self._layouts[index].resident
        while self._is_in_copy(index):
            self._release_one()
        while (
            block
            and self._acquired_blocks >= self._source.capacity
            and (self._pending or self._uploaded_early)
        ):
            if not self._pending:
                self._release_segment(self._uploaded_early.popitem()[1])
            self._release_one()
        bucket = self._source.acquire(index)
        self._acquired_blocks += block
        return bucket

    def _upload(self, index: int) -> _DeviceSegment:
        """Acquire a segment and start its upload."""
        bucket = self._acquire(index)
        if self._device.in_place:
            return _DeviceSegment(index, bucket.version, bucket.views, now(), _InBucket(bucket))
        stays = index in self._permanent_slots
        if not (stays or self._free_slots):
            self._release_segment(self._uploaded_early.popitem()[1])  # it was for another sweep
        slot = self._permanent_slots[index] if stays else self._free_slots.popleft()
        memory = slot.memory[: len(bucket.data)]
        try:
            transfer = self._copy(Lane.UPLOAD, index, memory, bucket.data, slot.last_uses)
        except BaseException:
            if not stays:
                self._free_slots.append(slot)
            self._release(bucket, bucket.version)
            raise
        slot.last_uses = {}
        store = self._layouts[index].views(memory)
        if not stays:
            return _DeviceSegment(
                index, bucket.version, store, transfer.done, _Uploaded(slot, bucket, transfer)
            )
        self._pending.append(_PendingRelease(transfer, Wait.SENT, bucket, bucket.version))
        segment = self._on_device[index] = _DeviceSegment(
            index, bucket.version, store, transfer.done, _InSlot(slot)
        )
        return segment

    def _offload_and_release(self, slot: _Slot, bucket: Bucket, version: int) -> None:
        """Start the offload of a slot's bytes, which are final; the bucket is released when it is
        done.
        """
        transfer = self._offload(slot, bucket, self._device.streams.mark())
        slot.last_uses[Wait.OFFLOADED] = transfer.done
        self._pending.append(_PendingRelease(transfer, Wait.RETURNED, bucket, version))

    def _offload(self, slot: _Slot, bucket: Bucket, replayed: Event) -> Transfer:
        memory = slot.memory[: len(bucket.data)]
        return self._copy(
            Lane.OFFLOAD, bucket.segment, bucket.data, memory, {Wait.REPLAYED: replayed}
        )

    def _copy(
        self,
        lane: Lane,
        index: int,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Mapping[Wait, Event],
    ) -> Transfer:
        transfer = self._device.streams.copy(lane, target, source, after)
        self._timeline.note(
            lane, self._layouts[index].name, transfer.started, transfer.done, source.numel()
        )
        return transfer

    def _release_segment(self, segment: _DeviceSegment) -> None:
        """Free a segment's slot, and its bucket if it still has one."""
        place = segment.place
        if isinstance(place, _InBucket):
            self._release(place.bucket, segment.version)
            return
        segment.place = _InSlot(place.slot)
        place.slot.last_uses[Wait.EVALUATED] = self._device.streams.mark()
        if segment.index not in self._permanent_slots:
            self._free_slots.append(place.slot)
        elif segment.version is None:
            # a failed replay: the bucket's bytes are older, but sound
            del self._on_device[segment.index]
        if isinstance(place, _Uploaded):
            self._pending.append(
                _PendingRelease(place.transfer, Wait.SENT, place.bucket, place.bucket.version)
            )
        elif isinstance(place, _Returned):
            self._release(place.bucket, segment.version)

    def _release_copied(self) -> None:
        while self._pending and self._pending[0].transfer.done.passed:
            self._release_one()

    def _release_all(self) -> None:
        with ExitStack() as releases:  # each is released even if others fail
            for _ in self._pending:
                releases.callback(self._release_one)

    def _release_one(self) -> None:
        """Wait for the oldest copy and release its bucket."""
        transfer, why, bucket, version = self._pending.popleft()
        arrived: int | None = None if why is Wait.RETURNED else version
        try:
            self._device.streams.wait(transfer.done, why)
            arrived = version
        finally:
            self._release(bucket, arrived)

    def _release(self, bucket: Bucket, version: int | None) -> None:
        self._acquired_blocks -= not self._layouts[bucket.segment].resident
        self._source.release(bucket, version)


def open_scheduler(
    source: BlockSource,
    device: Device,
    timeline: Timeline,
    *,
    overlap: bool,
    kept: int = 0,
    across_sweeps: bool = True,
) -> Scheduler:
    """Make the overlapped scheduler, or its serial twin."""
    if not overlap:
        return SerialScheduler(source, device, timeline=timeline)
    return OverlappedScheduler(
        source, device, kept=kept, across_sweeps=across_sweeps, timeline=timeline
    )
