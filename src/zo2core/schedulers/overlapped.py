"""Compute block i while i+1 comes in and i-1 goes out (ZO2, arXiv 2503.12668, sections 5.2 to 5.4).

Two slots on the device take turns. While the device computes in one of them, the other one's block goes back and the next
block comes in. A block's bytes are final once it is replayed, so it goes back beside its own forwards. Embedding, head and
blocks that are kept have slots of their own, and stay. The sweep goes round: the next sweep's first block comes in while the
head is computed. All order between the queues is by events; each wait bears its reason (``Wait``).

Where segments are computed on in their buckets there is nothing to move. What overlaps then is the source's own work: it is
told early enough what comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from zo2core.errors import OptionError
from zo2core.profiling.timeline import Timeline, now
from zo2core.protocols import BlockSource, Device, Store, Transfer, Visitor, Wait
from zo2core.schedulers.upcoming import upcoming
from zo2core.types import Bucket, Event, Lane

SLOTS = 2
AHEAD = 2  # blocks brought in early; as many slots are free while embedding and head are computed


class _Slot:
    """Device memory for one segment at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.last_uses: dict[Wait, Event] = {}  # to be over before the memory is overwritten


class _InBucket(NamedTuple):
    """The segment is computed on in its bucket."""

    bucket: Bucket


class _Uploaded(NamedTuple):
    """The segment is in a slot, or on its way there. Its bucket has what was uploaded."""

    slot: _Slot
    bucket: Bucket
    transfer: Transfer


class _InSlot(NamedTuple):
    """The segment is in a slot. Its bucket is released, or will be when the copy to it or from it is done."""

    slot: _Slot


class _Returned(NamedTuple):
    """The segment is in a slot. Its bucket is acquired and has the slot's bytes."""

    slot: _Slot
    bucket: Bucket


_Held: TypeAlias = _InBucket | _Uploaded | _InSlot | _Returned


@dataclass
class _Arrival:
    """A segment on the device, or on its way there."""

    index: int
    version: int | None  # of the bytes in the store; None: a replay failed half-way and they are lost
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
    """The blocks that stay on a device, evenly spread, so that transfers have time in between."""
    return {blocks[i * len(blocks) // kept] for i in range(kept)}


class OverlappedScheduler:
    """Transfers beside compute.

    Args:
        source: Where segments come from. Belongs to the caller.
        device: Where they are computed on. Belongs to the caller.
        kept: Number of blocks that stay on the device, spread evenly over the sweep: they are visited without transfers.
        goes_round: Whether the next sweep's first blocks come in while this one ends; not where the source brings blocks to
            the present version, which is another one then.
        timeline: Every transfer is noted there.

    Raises:
        OptionError: if ``kept`` is not a number of blocks.
    """

    def __init__(
        self,
        source: BlockSource,
        device: Device,
        *,
        kept: int = 0,
        goes_round: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._goes_round = goes_round
        self._timeline = Timeline() if timeline is None else timeline
        self._layouts = source.layouts
        blocks = [index for index, layout in enumerate(self._layouts) if not layout.resident]
        if not 0 <= kept <= len(blocks):
            raise OptionError("kept", found=repr(kept), expected=f"0 to {len(blocks)} blocks", remedy="choose such a number")
        staying = {index for index, layout in enumerate(self._layouts) if layout.resident} | spread(blocks, kept)
        self._free: deque[_Slot] = deque()  # slots that blocks take in turn
        self._own: dict[int, _Slot] = {}  # slots of segments that stay
        if not device.in_place:
            moving = [layout.nbytes for index, layout in enumerate(self._layouts) if index not in staying]
            self._free.extend(_Slot(device.empty(max(moving))) for _ in moving[:SLOTS])
            self._own = {index: _Slot(device.empty(self._layouts[index].nbytes)) for index in sorted(staying)}
        self._on_device: dict[int, _Arrival] = {}  # segments that stay, with their bytes
        self._ahead: dict[int, _Arrival] = {}  # on their way for a later visit
        self._leaving: deque[_Leaving] = deque()
        self._out = 0  # blocks' buckets acquired and not released

    def sweep(self, visitor: Visitor, order: Sequence[int]) -> None:
        """Visit the segments in this order. See the contract."""
        reached: list[_Arrival] = []  # residents that are computed on in their buckets: released at the end
        arrival: _Arrival | None = None
        try:
            self._source.prefetch(self._missing(upcoming(order, 0)))
            returns = len(set(order)) < len(order)  # to blocks that it has visited
            for position, index in enumerate(order):
                arrival = self._arrival(index)
                coming: list[int] = []
                ready = brought = 0
                if not self._device.in_place:
                    following = upcoming(order, position + 1) if self._goes_round else dict.fromkeys(order[position + 1 :])
                    coming = self._missing(list(following))
                    ready = min(self._source.prefetch(coming), AHEAD)
                    if index in coming:  # it cannot come before it has left
                        coming = coming[: coming.index(index)]
                        ready = min(ready, len(coming))
                elif returns:  # else the source keeps to the order that it was told at the beginning
                    self._source.prefetch(upcoming(order, position + 1))
                while brought < ready and self._bring_ahead(coming[brought]):  # slots go to what is needed first
                    brought += 1
                self._visit(visitor, arrival)
                visited, arrival = arrival, None
                if isinstance(visited.held, _InBucket) and self._layouts[index].resident:
                    reached.append(visited)
                else:
                    self._let_go(visited)
                self._release_arrived()
                if brought < min(len(coming), AHEAD):  # the host waits for the disk now, while the device computes
                    self._bring_ahead(coming[brought])
            if self._goes_round:
                self._prefetch_next_sweep(order)
        finally:
            if arrival is not None:
                reached.append(arrival)
            for resident in reached:
                self._let_go(resident)
            self._release_all()

    @contextmanager
    def replayed(self, visitor: Visitor, index: int) -> Iterator[Bucket]:
        """Bring one segment to the present version, and its bytes to its bucket. See the contract."""
        self._source.prefetch([*range(index, len(self._layouts)), *range(index)])
        arrival = self._arrival(index)
        try:
            replayed = self._replay(visitor, arrival)
            held = arrival.held if isinstance(arrival.held, _InBucket) else self._return(arrival, arrival.held, replayed)
            yield held.bucket
        finally:
            self._let_go(arrival)
            self._release_all()

    def settle(self) -> None:
        """Give back what was brought in ahead, and bring segments that stay back to their buckets. See the contract."""
        for arrival in self._ahead.values():
            self._let_go(arrival)
        self._ahead.clear()
        self._release_all()
        self._source.prefetch([*self._on_device, *self._missing(range(len(self._layouts)))])
        for index, arrival in self._on_device.items():
            assert arrival.version is not None
            bucket = self._acquire(index)
            if bucket.version < arrival.version:
                self._send_back(self._own[index], bucket, arrival.version, self._device.streams.mark())
                self._release_all()
            else:
                self._release(bucket, bucket.version)

    def _arrival(self, index: int) -> _Arrival:
        """A segment that is on the device, or else begins to come now."""
        return self._ahead.pop(index, None) or self._on_device.get(index) or self._bring(index)

    def _replay(self, visitor: Visitor, arrival: _Arrival) -> Event:
        """Bring a segment to the present version; return when its bytes are final."""
        before, arrival.version = arrival.version, None
        assert before is not None
        self._device.streams.order(arrival.arrived, Wait.UPLOADED)
        arrival.version = visitor.replay(arrival.index, arrival.store, before)
        return self._device.streams.mark()

    def _visit(self, visitor: Visitor, arrival: _Arrival) -> None:
        before, arrival.version = arrival.version, None
        assert before is not None
        self._device.streams.order(arrival.arrived, Wait.UPLOADED)
        visitor.visit(arrival.index, arrival.store, before, partial(self._commit, arrival, before))
        if arrival.version is None:
            arrival.version = before  # nothing was committed, so nothing was changed

    def _commit(self, arrival: _Arrival, before: int, version: int) -> None:
        """The bytes of a segment are final for this sweep: those in a slot that changed begin their way back."""
        arrival.version, held = version, arrival.held
        if isinstance(held, _Uploaded) and version != before:
            self._send_back(held.slot, held.bucket, version, self._device.streams.mark())
            arrival.held = _InSlot(held.slot)

    def _return(self, arrival: _Arrival, held: _Uploaded | _InSlot | _Returned, replayed: Event) -> _Returned:
        """Bring a slot's bytes to the segment's bucket, and wait until they are there."""
        self._release_all()  # its own bucket may be on the way
        bucket = self._acquire(arrival.index) if isinstance(held, _InSlot) else held.bucket
        version, arrival.version = arrival.version, None  # until the bucket has the slot's bytes
        arrival.held = returned = _Returned(held.slot, bucket)
        memory = held.slot.memory[: len(bucket.data)]
        transfer = self._copy(Lane.OFFLOAD, arrival.index, bucket.data, memory, {Wait.REPLAYED: replayed})
        self._device.streams.wait(transfer.done, Wait.RETURNED)
        arrival.version = version
        return returned

    def _missing(self, order: Sequence[int]) -> list[int]:
        """The segments of an order that have to be brought in."""
        return [index for index in order if index not in self._on_device and index not in self._ahead]

    def _prefetch_next_sweep(self, order: Sequence[int]) -> None:
        """Bring in what the next sweep needs first; the host, which ran ahead, waits until that has gone back."""
        coming = self._missing(upcoming(order, 0))
        for position in range(min(len(coming), AHEAD)) if self._free else ():
            index = coming[position]
            while any(leaving.bucket.segment == index for leaving in self._leaving):
                self._release_one()
            if not (self._source.prefetch(coming[position:]) and self._bring_ahead(index)):
                return

    def _bring_ahead(self, index: int) -> bool:
        """Start bringing a segment in, if there is room on both sides and its bucket is not still on its way back."""
        if self._device.in_place or any(leaving.bucket.segment == index for leaving in self._leaving):
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
        """Acquire a segment, after what has to be released before."""
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
            self._let_go(self._ahead.popitem()[1])  # for a sweep that is not this one's
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
            return _Arrival(index, bucket.version, store, transfer.done, _Uploaded(slot, bucket, transfer))
        self._leaving.append(_Leaving(transfer, Wait.SENT, bucket, bucket.version))
        arrival = self._on_device[index] = _Arrival(index, bucket.version, store, transfer.done, _InSlot(slot))
        return arrival

    def _send_back(self, slot: _Slot, bucket: Bucket, version: int, replayed: Event) -> None:
        """Start the offload of a slot's bytes; the bucket is released when it is done."""
        memory = slot.memory[: len(bucket.data)]
        transfer = self._copy(Lane.OFFLOAD, bucket.segment, bucket.data, memory, {Wait.REPLAYED: replayed})
        slot.last_uses[Wait.OFFLOADED] = transfer.done
        self._leaving.append(_Leaving(transfer, Wait.RETURNED, bucket, version))

    def _copy(
        self, lane: Lane, index: int, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]
    ) -> Transfer:
        transfer = self._device.streams.copy(lane, target, source, after)
        self._timeline.note(lane, self._layouts[index].name, transfer.begun, transfer.done, source.numel())
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
            del self._on_device[arrival.index]  # a failed replay: the bucket's bytes are older, but sound
        if isinstance(held, _Uploaded):
            self._leaving.append(_Leaving(held.transfer, Wait.SENT, held.bucket, held.bucket.version))
        elif isinstance(held, _Returned):
            self._release(held.bucket, arrival.version)

    def _release_arrived(self) -> None:
        while self._leaving and self._leaving[0].transfer.done.passed:
            self._release_one()

    def _release_all(self) -> None:
        with ExitStack() as releases:  # each is released whatever became of the others
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
