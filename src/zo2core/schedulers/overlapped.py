"""The overlapped scheduler: uploads, compute and offloads at the same time. Its bits are those of
the serial scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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


_Held: TypeAlias = _InBucket | _Uploaded | _InSlot | _Returned


@dataclass
class _Arrival:
    """A segment on the device, or being uploaded."""

    index: int
    # version of the bytes in the store; None: a replay failed half-way and they are lost
    version: int | None
    store: Store
    arrived: Event
    held: _Held = field(repr=False)


class _Leaving(NamedTuple):
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
        staying = {index for index, layout in enumerate(self._layouts) if layout.resident} | spread(
            blocks, kept
        )
        self._free: deque[_Slot] = deque()  # free slots of blocks that do not stay
        self._own: dict[int, _Slot] = {}  # slots of segments that stay
        if not device.in_place:
            moving = [
                layout.nbytes for index, layout in enumerate(self._layouts) if index not in staying
            ]
            self._free.extend(_Slot(device.empty(max(moving))) for _ in moving[:SLOTS])
            self._own = {
                index: _Slot(device.empty(self._layouts[index].nbytes)) for index in sorted(staying)
            }
        self._on_device: dict[int, _Arrival] = {}  # segments that stay, with their bytes
        self._ahead: dict[int, _Arrival] = {}  # uploaded early, for a later visit
        self._leaving: deque[_Leaving] = deque()
        self._out = 0  # blocks' buckets acquired and not released

    def sweep(self, visit: VisitSegment, order: Sequence[int]) -> None:
        """Visit the segments in this order. See the contract."""
        # residents computed in their buckets: released at the end
        residents: dict[int, _Arrival] = {}
        arrival: _Arrival | None = None
        try:
            self._source.prefetch(self._missing(upcoming(order, 0)))
            has_revisits = len(set(order)) < len(order)
            for position, index in enumerate(order):
                arrival = residents.pop(index, None) or self._arrival(index)
                coming: list[int] = []
                ready = started = 0
                if not self._device.in_place:
                    later = (
                        upcoming(order, position + 1)
                        if self._across_sweeps
                        else dict.fromkeys(order[position + 1 :])
                    )
                    coming = self._missing(list(later))
                    ready = min(self._source.prefetch(coming), AHEAD)
                    if index in coming:  # it cannot be uploaded before it is offloaded
                        coming = coming[: coming.index(index)]
                        ready = min(ready, len(coming))
                elif has_revisits:  # otherwise the order passed at the beginning still holds
                    self._source.prefetch(upcoming(order, position + 1))
                while started < ready and self._bring_ahead(coming[started]):
                    # in the order in which they are needed
                    started += 1
                self._visit(visit, arrival)
                visited, arrival = arrival, None
                if isinstance(visited.held, _InBucket) and self._layouts[index].resident:
                    residents[index] = visited
                else:
                    self._let_go(visited)
                self._release_arrived()
                if started < min(len(coming), AHEAD):
                    # the host may wait for the disk, while the device computes
                    self._bring_ahead(coming[started])
            if self._across_sweeps:
                self._prefetch_next_sweep(order)
        finally:
            if arrival is not None:
                residents[arrival.index] = arrival
            for resident in residents.values():
                self._let_go(resident)
            self._release_all()

    @contextmanager
    def replayed(self, replay: ReplaySegment, index: int) -> Iterator[Bucket]:
        """Bring one segment to the present version, and its bytes to its bucket.

        See the contract.
        """
        self._source.prefetch([*range(index, len(self._layouts)), *range(index)])
        arrival = self._arrival(index)
        try:
            before = self._begin(arrival)
            arrival.version = replay(index, arrival.store, before)
            yield (
                arrival.held
                if isinstance(arrival.held, _InBucket)
                else self._return(arrival, arrival.held)
            ).bucket
        finally:
            self._let_go(arrival)
            self._release_all()

    def release_all(self) -> None:
        """Release segments uploaded early, and offload segments that stay. See the contract."""
        for arrival in self._ahead.values():
            self._let_go(arrival)
        self._ahead.clear()
        self._release_all()
        self._source.prefetch([*self._on_device, *self._missing(range(len(self._layouts)))])
        for index, arrival in self._on_device.items():
            assert arrival.version is not None
            bucket = self._acquire(index)
            if bucket.version < arrival.version:
                self._send_back(self._own[index], bucket, arrival.version)
                self._release_all()
            else:
                self._release(bucket, bucket.version)

    def _arrival(self, index: int) -> _Arrival:
        """A segment on the device; starts its upload if it is not there."""
        return self._ahead.pop(index, None) or self._on_device.get(index) or self._bring(index)

    def _begin(self, arrival: _Arrival) -> int:
        """Order a segment's compute after its upload.

        Returns its version, which is unknown until the compute is issued.
        """
        before, arrival.version = arrival.version, None
        assert before is not None
        self._device.streams.order(arrival.arrived, Wait.UPLOADED)
        return before

    def _visit(self, visit: VisitSegment, arrival: _Arrival) -> None:
        before = self._begin(arrival)
        visit(arrival.index, arrival.store, before, partial(self._commit, arrival, before))
        if arrival.version is None:
            arrival.version = before  # nothing was committed, so nothing was changed

    def _commit(self, arrival: _Arrival, before: int, version: int) -> None:
        """Start the offload of a segment whose bytes are final for this sweep, if they changed."""
        arrival.version, held = version, arrival.held
        if isinstance(held, _Uploaded) and version != before:
            self._send_back(held.slot, held.bucket, version)
            arrival.held = _InSlot(held.slot)

    def _return(self, arrival: _Arrival, held: _Uploaded | _InSlot | _Returned) -> _Returned:
        """Copy a slot's bytes to the segment's bucket, and wait for the copy."""
        replayed = self._device.streams.mark()
        self._release_all()  # its own bucket may still be in a copy
        bucket = self._acquire(arrival.index) if isinstance(held, _InSlot) else held.bucket
        version, arrival.version = arrival.version, None  # until the bucket has the slot's bytes
        arrival.held = returned = _Returned(held.slot, bucket)
        transfer = self._offload(held.slot, bucket, replayed)
        self._device.streams.wait(transfer.done, Wait.RETURNED)
        arrival.version = version
        return returned

    def _missing(self, order: Sequence[int]) -> list[int]:
        """The segments of an order that must be uploaded."""
        return [
            index for index in order if index not in self._on_device and index not in self._ahead
        ]

    def _prefetch_next_sweep(self, order: Sequence[int]) -> None:
        """Upload the first blocks of the next sweep; the host waits until their offloads are
        done.
        """
        coming = self._missing(upcoming(order, 0))
        for position in range(min(len(coming), AHEAD)) if self._free else ():
            index = coming[position]
            while any(leaving.bucket.segment == index for leaving in self._leaving):
                self._release_one()
            if not (self._source.prefetch(coming[position:]) and self._bring_ahead(index)):
                return

    def _bring_ahead(self, index: int) -> bool:
        """Start a segment's upload, if a slot and a bucket are free and its bucket is not in a
        copy.
        """
        if self._device.in_place or any(
            leaving.bucket.segment == index for leaving in self._leaving
        ):
            return False
        if not self._layouts[index].resident and self._out >= self._source.capacity:
            return False
        stays = index in self._own
        if not (stays or self._free):
            return False
        arrival = self._bring(index)
        if not stays:
            self._ahead[index] = arrival
        return True

    def _acquire(self, index: int) -> Bucket:
        """Acquire a segment's bucket, and before that release others if need be."""
        block = not self._layouts[index].resident
        while any(leaving.bucket.segment == index for leaving in self._leaving):
            self._release_one()
        while block and self._out >= self._source.capacity and (self._leaving or self._ahead):
            if not self._leaving:
                self._let_go(self._ahead.popitem()[1])
            self._release_one()
        bucket = self._source.acquire(index)
        self._out += block
        return bucket

    def _bring(self, index: int) -> _Arrival:
        """Acquire a segment and start its upload."""
        bucket = self._acquire(index)
        if self._device.in_place:
            return _Arrival(index, bucket.version, bucket.views, now(), _InBucket(bucket))
        stays = index in self._own
        if not (stays or self._free):
            self._let_go(self._ahead.popitem()[1])  # it was for another sweep
        slot = self._own[index] if stays else self._free.popleft()
        memory = slot.memory[: len(bucket.data)]
        try:
            transfer = self._copy(Lane.UPLOAD, index, memory, bucket.data, slot.last_uses)
        except BaseException:
            if not stays:
                self._free.append(slot)
            self._release(bucket, bucket.version)
            raise
        slot.last_uses = {}
        store = self._layouts[index].views(memory)
        if not stays:
            return _Arrival(
                index, bucket.version, store, transfer.done, _Uploaded(slot, bucket, transfer)
            )
        self._leaving.append(_Leaving(transfer, Wait.SENT, bucket, bucket.version))
        arrival = self._on_device[index] = _Arrival(
            index, bucket.version, store, transfer.done, _InSlot(slot)
        )
        return arrival

    def _send_back(self, slot: _Slot, bucket: Bucket, version: int) -> None:
        """Start the offload of a slot's bytes, which are final; the bucket is released when it is
        done.
        """
        transfer = self._offload(slot, bucket, self._device.streams.mark())
        slot.last_uses[Wait.OFFLOADED] = transfer.done
        self._leaving.append(_Leaving(transfer, Wait.RETURNED, bucket, version))

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

    def _let_go(self, arrival: _Arrival) -> None:
        """Free a segment's slot, and its bucket if it still has one."""
        held = arrival.held
        if isinstance(held, _InBucket):
            self._release(held.bucket, arrival.version)
            return
        arrival.held = _InSlot(held.slot)
        held.slot.last_uses[Wait.EVALUATED] = self._device.streams.mark()
        if arrival.index not in self._own:
            self._free.append(held.slot)
        elif arrival.version is None:
            # a failed replay: the bucket's bytes are older, but sound
            del self._on_device[arrival.index]
        if isinstance(held, _Uploaded):
            self._leaving.append(
                _Leaving(held.transfer, Wait.SENT, held.bucket, held.bucket.version)
            )
        elif isinstance(held, _Returned):
            self._release(held.bucket, arrival.version)

    def _release_arrived(self) -> None:
        while self._leaving and self._leaving[0].transfer.done.passed:
            self._release_one()

    def _release_all(self) -> None:
        with ExitStack() as releases:  # each is released even if others fail
            for _ in self._leaving:
                releases.callback(self._release_one)

    def _release_one(self) -> None:
        """Wait for the oldest copy and release its bucket."""
        transfer, why, bucket, version = self._leaving.popleft()
        arrived: int | None = None if why is Wait.RETURNED else version
        try:
            self._device.streams.wait(transfer.done, why)
            arrived = version
        finally:
            self._release(bucket, arrived)

    def _release(self, bucket: Bucket, version: int | None) -> None:
        self._out -= not self._layouts[bucket.segment].resident
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
