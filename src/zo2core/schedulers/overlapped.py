"""Compute block i while i+1 comes in and i-1 goes out (ZO2, arXiv 2503.12668, sections 5.2 to 5.4).

Two slots on the device take turns. While the device computes in one of them, the other one's block goes back and the next
comes in. A block's bytes are final once it is replayed, so it goes back beside its own forwards. Embedding, head and blocks
that are kept have places of their own, and stay. The sweep goes round: the next one's first block comes in while the head
is computed. All order between the queues is by events; each wait bears its reason (``Wait``).

Where segments are computed on in their buckets there is nothing to move: what overlaps then is the source's own work, told
early enough what comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zo2core.errors import OptionError
from zo2core.profiling.timeline import now
from zo2core.protocols import BlockSource, Device, Store, Transfer, Visitor, Wait
from zo2core.types import Bucket, Event, Lane

SLOTS = 2
AHEAD = 2  # blocks the source is told of; as many slots are free while embedding and head are computed


class _Place:
    """Device memory for one segment at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.last_uses: dict[Wait, Event] = {}  # to be over before it is overwritten


@dataclass
class _Arrival:
    """A segment on the device, or on its way there."""

    index: int
    version: int | None  # of the bytes in the store; None: lost
    store: Store
    arrived: Event
    place: _Place | None  # None: the store is the bucket
    bucket: Bucket | None = field(repr=False)  # still to be released; None where the device's bytes are all that is held
    coming: Transfer | None = field(repr=False)  # into the place; None once the bucket has the place's bytes


class _Leaving(NamedTuple):
    """A bucket that is released once a copy is done."""

    transfer: Transfer
    why: Wait
    bucket: Bucket
    version: int


class OverlappedScheduler:
    """Transfers beside compute.

    Args:
        source: Where segments come from. Belongs to the caller.
        device: Where they are computed on. Belongs to the caller.
        kept: Blocks that stay on the device, spread evenly over the sweep: they are visited without transfers.

    Raises:
        OptionError: if ``kept`` is not a number of blocks.
    """

    def __init__(self, source: BlockSource, device: Device, *, kept: int = 0) -> None:
        self._source = source
        self._device = device
        self._layouts = source.layouts
        blocks = [index for index, layout in enumerate(self._layouts) if not layout.resident]
        if not 0 <= kept <= len(blocks):
            raise OptionError("kept", found=repr(kept), expected=f"0 to {len(blocks)} blocks", remedy="choose such a number")
        staying = {index for index, layout in enumerate(self._layouts) if layout.resident}
        staying |= {blocks[i * len(blocks) // kept] for i in range(kept)}
        self._free: deque[_Place] = deque()  # slots
        self._own: dict[int, _Place] = {}  # places of segments that stay
        if not device.in_place:
            moving = [layout.nbytes for index, layout in enumerate(self._layouts) if index not in staying]
            self._free.extend(_Place(device.empty(max(moving))) for _ in moving[:SLOTS])
            self._own = {index: _Place(device.empty(self._layouts[index].nbytes)) for index in sorted(staying)}
        self._on_device: dict[int, _Arrival] = {}  # segments that stay, with their bytes
        self._ahead: dict[int, _Arrival] = {}  # on their way for a later visit
        self._leaving: deque[_Leaving] = deque()
        self._out = 0  # blocks' buckets acquired and not released

    def sweep(self, visitor: Visitor, order: Sequence[int]) -> None:
        """Visit the segments in this order. See the contract."""
        reached: list[_Arrival] = []  # to be released at the end: residents' buckets, where they are computed on in place
        arrival: _Arrival | None = None
        try:
            for position, index in enumerate(order):
                arrival = self._ahead.pop(index, None) or self._on_device.get(index) or self._bring(index)
                coming = list(self._following(order, position))[:AHEAD]
                there = [self._source.prefetch(each) for each in coming]
                while there and there.pop(0) and self._bring_ahead(coming[0]):  # in order: slots go to what is needed first
                    del coming[0]
                self._visit(visitor, arrival)
                if arrival.bucket is not None and self._layouts[index].resident:
                    reached.append(arrival)
                else:
                    self._let_go(arrival)
                arrival = None
                self._release_arrived()
                for late in coming[:1]:  # the host waits for the disk now, while the device computes
                    self._bring_ahead(late)
            self._go_round(order)
        finally:
            if arrival is not None:
                reached.append(arrival)
            for each in reached:
                self._let_go(each)
            self._release_all()

    @contextmanager
    def replayed(self, visitor: Visitor, index: int) -> Iterator[Bucket]:
        """Bring one segment to the present version, and its bytes to its bucket. See the contract."""
        arrival = self._ahead.pop(index, None) or self._on_device.get(index) or self._bring(index)
        try:
            replayed = self._replay(visitor, arrival)
            if arrival.place is not None:
                self._release_all()  # its own bucket may be on the way
                bucket = self._acquire(index) if arrival.bucket is None else arrival.bucket
                memory = arrival.place.memory[: len(bucket.data)]
                version, arrival.version = arrival.version, None  # until the bucket has the place's bytes
                arrival.bucket, arrival.coming = bucket, None
                transfer = self._copy(Lane.OFFLOAD, index, bucket.data, memory, {Wait.REPLAYED: replayed})
                self._device.streams.wait(transfer.done, Wait.RETURNED)
                arrival.version = version
            assert arrival.bucket is not None
            yield arrival.bucket
        finally:
            self._let_go(arrival)
            self._release_all()

    def settle(self) -> None:
        """Give back what was brought in ahead, and bring segments that stay back to their buckets. See the contract."""
        for arrival in self._ahead.values():
            self._let_go(arrival)
        self._ahead.clear()
        self._release_all()
        for index, arrival in self._on_device.items():
            assert arrival.place is not None
            assert arrival.version is not None
            bucket = self._acquire(index)
            if bucket.version < arrival.version:
                self._send_back(arrival.place, bucket, arrival.version, self._device.streams.mark())
                self._release_all()
            else:
                self._release(bucket, bucket.version)

    def _replay(self, visitor: Visitor, arrival: _Arrival) -> Event:
        """Bring a segment to the present version; return when its bytes are final."""
        before, arrival.version = arrival.version, None
        assert before is not None
        self._device.streams.order(arrival.arrived, Wait.UPLOADED)
        arrival.version = visitor.replay(arrival.index, arrival.store, before)
        return self._device.streams.mark()

    def _visit(self, visitor: Visitor, arrival: _Arrival) -> None:
        before, place, bucket = arrival.version, arrival.place, arrival.bucket
        replayed = self._replay(visitor, arrival)
        if place is not None and bucket is not None and arrival.version != before:
            assert arrival.version is not None
            self._send_back(place, bucket, arrival.version, replayed)
            arrival.bucket = None
        visitor.evaluate(arrival.index, arrival.store)

    def _following(self, order: Sequence[int], position: int) -> Iterator[int]:
        """What has to be brought in next, in the order of visits; after the last comes the first of the next sweep."""
        for index in [*order[position + 1 :], *order[:position]]:
            if index not in self._on_device and index not in self._ahead:
                yield index

    def _go_round(self, order: Sequence[int]) -> None:
        """Bring in what the next sweep needs first; the host, which ran ahead, waits until that has gone back."""
        missing = [index for index in order if index not in self._on_device and index not in self._ahead]
        for index in missing[:AHEAD] if self._free else ():
            while any(leaving.bucket.segment == index for leaving in self._leaving):
                self._release_one()
            if not (self._source.prefetch(index) and self._bring_ahead(index)):
                return

    def _bring_ahead(self, index: int) -> bool:
        """Start bringing a segment in, if there is room on both sides and its bucket is not still on its way back."""
        if self._device.in_place or any(leaving.bucket.segment == index for leaving in self._leaving):
            return False
        stays = index in self._own
        if not stays and not (self._free and self._out < self._source.capacity):
            return False
        arrival = self._bring(index)
        if not stays:
            self._ahead[index] = arrival
        return True

    def _acquire(self, index: int) -> Bucket:
        """Acquire a segment, after what has to be released before."""
        block = not self._layouts[index].resident
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
            return _Arrival(index, bucket.version, bucket.views, now(), None, bucket, None)
        stays = index in self._own
        if not (stays or self._free):
            self._let_go(self._ahead.popitem()[1])  # for a sweep that is not this one's
        place = self._own[index] if stays else self._free.popleft()
        memory = place.memory[: len(bucket.data)]
        try:
            transfer = self._copy(Lane.UPLOAD, index, memory, bucket.data, place.last_uses)
        except BaseException:
            if not stays:
                self._free.append(place)
            self._release(bucket, bucket.version)
            raise
        place.last_uses = {}
        store = self._layouts[index].views(memory)
        arrival = _Arrival(index, bucket.version, store, transfer.done, place, bucket, transfer)
        if stays:
            self._leaving.append(_Leaving(transfer, Wait.SENT, bucket, bucket.version))
            arrival.bucket = None
            self._on_device[index] = arrival
        return arrival

    def _send_back(self, place: _Place, bucket: Bucket, version: int, replayed: Event) -> None:
        """Start the offload of a place's bytes; the bucket is released when it is done."""
        memory = place.memory[: len(bucket.data)]
        transfer = self._copy(Lane.OFFLOAD, bucket.segment, bucket.data, memory, {Wait.REPLAYED: replayed})
        place.last_uses[Wait.OFFLOADED] = transfer.done
        self._leaving.append(_Leaving(transfer, Wait.RETURNED, bucket, version))

    def _copy(
        self, lane: Lane, index: int, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]
    ) -> Transfer:
        transfer = self._device.streams.copy(lane, target, source, after)
        self._device.timeline.note(lane, self._layouts[index].name, transfer.begun, transfer.done, source.numel())
        return transfer

    def _let_go(self, arrival: _Arrival) -> None:
        """Free a segment's slot, and its bucket if it still has one."""
        place, bucket, arrival.bucket = arrival.place, arrival.bucket, None
        if place is None or arrival.coming is None:  # the bucket's bytes are the store's
            if bucket is not None:
                self._release(bucket, arrival.version)
        elif bucket is not None:  # they are what was uploaded
            self._leaving.append(_Leaving(arrival.coming, Wait.SENT, bucket, bucket.version))
        if place is None:
            return
        place.last_uses[Wait.EVALUATED] = self._device.streams.mark()
        if arrival.index not in self._own:
            self._free.append(place)
        elif arrival.version is None:
            del self._on_device[arrival.index]  # a failed replay: the bucket's bytes are older, but sound

    def _release_arrived(self) -> None:
        while self._leaving and self._leaving[0].transfer.done.passed:
            self._release_one()

    def _release_all(self) -> None:
        with ExitStack() as every:  # each is released whatever became of the others
            for _ in self._leaving:
                every.callback(self._release_one)

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
