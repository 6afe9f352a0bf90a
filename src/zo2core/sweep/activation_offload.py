"""What the streams of a sweep hold between segments: on the device while its memory lasts, the others' in host memory.

While the device computes the forward of one stream, the next one's activations come in and the last one's go out. Two rooms
on the device take turns: activations arrive in one, the forward reads them there, its result is put in their place and goes
out from there. Once the rooms are as large as the largest stream, nothing is allocated but what the forward itself
allocates, and the host does not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zo2core.profiling.timeline import Timeline
from zo2core.protocols import Activations, Device, Transfer, Wait
from zo2core.types import Event, Lane, aligned

ROOMS = 2


def storage_bytes(activations: Activations) -> int:
    """Return the bytes that a batch's activations take between segments: each storage that tensors in them use, once.

    Args:
        activations: Tensors, nested in tuples, lists and dicts at will; whatever else is in there takes nothing.
    """
    values, _ = flattened(activations)
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def flattened(activations: Activations) -> tuple[list[Any], TreeSpec]:
    """The values of nested activations in a row, and how they are nested."""
    return tree_flatten(activations, is_leaf=_is_foreign)


def _is_foreign(value: object) -> bool:
    """Whether a value is handed through as it is.

    Other libraries may have told torch how to take their own containers apart. Whether they can be put together again
    around other tensors is not known here.
    """
    return not isinstance(value, tuple | list | dict)


class _PlacedTensor(NamedTuple):
    """A tensor whose elements are in a room."""

    start: int  # of its first element, in bytes from the room's beginning
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self, room: torch.Tensor) -> torch.Tensor:
        whole = (len(room) - self.start) // self.dtype.itemsize * self.dtype.itemsize
        return room[self.start : self.start + whole].view(self.dtype).as_strided(self.size, self.stride)


class _Extent(NamedTuple):
    """Bytes of a room that were one storage."""

    start: int
    nbytes: int


class _Form(NamedTuple):
    """How activations are put together again from the bytes in a room."""

    values: Sequence[Any]  # a ``_PlacedTensor`` for each tensor on the device
    nesting: TreeSpec
    extents: Sequence[_Extent]

    @property
    def nbytes(self) -> int:
        return _end(self.extents)

    def activations(self, room: torch.Tensor) -> Activations:
        values = [value.tensor(room) if isinstance(value, _PlacedTensor) else value for value in self.values]
        return tree_unflatten(values, self.nesting)


@dataclass(eq=False)
class _Room:
    """Device memory for the activations of one stream at a time."""

    memory: torch.Tensor
    last_uses: dict[Wait, Event] = field(default_factory=dict)  # to be over before the memory is overwritten


class _OnHost(NamedTuple):
    """A stream's activations are in host memory, or on their way there."""

    memory: torch.Tensor  # the stream's host memory for this sweep
    form: _Form
    arrived: Event


class _InRoom(NamedTuple):
    """A stream's activations are in a room, or on their way there."""

    memory: torch.Tensor
    form: _Form
    room: _Room
    transfer: Transfer


_Waiting: TypeAlias = _OnHost | _InRoom


class ActivationOffload:
    """Holds the activations of a sweep's streams; one sweep at a time uses it.

    Args:
        device: Where forwards run.
        allowed: Bytes of the device for activations, forwards included. What does not fit waits in host memory; one forward
            and two rooms are taken in any case. None: everything stays. Without effect where the device computes in host
            memory.
        host_bytes: Expected to wait at a time. More is allocated if need be.
        timeline: Every transfer is noted there.
    """

    def __init__(
        self, device: Device, allowed: int | None, host_bytes: int = 0, *, timeline: Timeline | None = None
    ) -> None:
        self._device = device
        self._timeline = Timeline() if timeline is None else timeline
        self._allowed = None if device.in_place else allowed
        self._staying: dict[int, Activations] = {}  # streams whose activations are on the device
        self._waiting: dict[int, _Waiting] = {}  # streams whose activations are in host memory between forwards
        rooms = 0 if self._allowed is None else ROOMS
        self._rooms = tuple(_Room(device.empty(0)) for _ in range(rooms))
        self._free: deque[_Room] = deque()
        self._host = torch.empty(0, dtype=torch.uint8)  # given out from the beginning, anew in each sweep
        self._host_bytes = host_bytes
        self._used = 0  # bytes of the host's memory that were given out
        self._may_wait = False
        self._expected = 0  # streams still to come
        self._held = 0  # bytes of the streams that stay

    @property
    def room_bytes(self) -> int:
        """Bytes of the device that the rooms take by now."""
        return sum(len(room.memory) for room in self._rooms)

    def begin(self, streams: int, *, may_wait: bool = True) -> None:
        """Forget the last sweep, however it ended.

        Args:
            streams: Number of streams in the sweep that begins.
            may_wait: Whether activations may have to wait. False where it is known that all fit.
        """
        for waiting in self._waiting.values():
            if isinstance(waiting, _InRoom):  # of a sweep that failed
                self._device.streams.wait(waiting.transfer.done, Wait.CAME)
        held = [room for room in self._rooms if room not in self._free]
        for room in held:
            room.last_uses[Wait.READ] = self._device.streams.mark()
        self._free.extend(held)
        self._waiting.clear()
        self._staying.clear()
        self._used, self._held, self._expected = 0, 0, streams
        self._may_wait = may_wait and self._allowed is not None

    def admit(self, stream: int, activations: Activations, running: Callable[[], int]) -> None:
        """Keep what a stream's first forward gave, and decide where its activations are from now on.

        Args:
            stream: The stream's number.
            activations: What its forward gave, on the device.
            running: Gives the bytes that its forwards take.
        """
        if self._may_wait and not self._stays(activations, running()):
            room, empty = self._free[0], self._host[:0]
            self._send_out(stream, activations, room, (), empty)
            self._free.rotate(-1)  # to the end: its memory is in use for longest
        else:
            self._staying[stream] = activations

    def prefetch(self, stream: int) -> None:
        """Start bringing a stream's activations in, if they wait in host memory and there is a free room."""
        waiting = self._waiting.get(stream)
        if isinstance(waiting, _OnHost) and self._free:
            self._bring_in(stream, waiting)

    def take(self, stream: int) -> Activations:
        """A stream's activations, on the device, for its next forward; ``put`` or ``drop`` follows."""
        waiting = self._waiting.get(stream)
        if waiting is None:
            return self._staying.pop(stream)
        if isinstance(waiting, _OnHost):
            assert self._free, "one stream runs and one comes: there are two rooms"
            waiting = self._bring_in(stream, waiting)
        self._device.streams.order(waiting.transfer.done, Wait.CAME)
        return waiting.form.activations(waiting.room.memory)

    def put(self, stream: int, activations: Activations) -> None:
        """Keep what a stream's forward gave."""
        waiting = self._waiting.get(stream)
        if waiting is None:
            self._staying[stream] = activations
            return
        assert isinstance(waiting, _InRoom), "activations are put after they were taken"
        self._send_out(stream, activations, waiting.room, waiting.form.extents, waiting.memory)
        self._free.append(waiting.room)

    def drop(self, stream: int) -> None:
        """Forget a stream's activations: its last forward was issued."""
        waiting = self._waiting.pop(stream, None)
        if isinstance(waiting, _InRoom):
            waiting.room.last_uses = {Wait.READ: self._device.streams.mark()}
            self._free.append(waiting.room)

    def _bring_in(self, stream: int, waiting: _OnHost) -> _InRoom:
        """Start bringing activations into a free room."""
        room, nbytes = self._free[0], waiting.form.nbytes
        self._grow(room, nbytes)
        after = {Wait.AWAY: waiting.arrived, **room.last_uses}
        transfer = self._copy(Lane.ACTIVATIONS_IN, stream, room.memory[:nbytes], waiting.memory[:nbytes], after)
        self._free.popleft()
        room.last_uses = {}
        self._waiting[stream] = in_room = _InRoom(waiting.memory, waiting.form, room, transfer)
        return in_room

    def _send_out(
        self, stream: int, activations: Activations, room: _Room, extents: Sequence[_Extent], memory: torch.Tensor
    ) -> None:
        """Put activations into a room and start bringing them to the host; the room may be used again after that.

        Args:
            stream: The stream's number.
            activations: On the device; parts of them may be in the room.
            room: Where they go first.
            extents: Extents of the activations in the room.
            memory: The stream's host memory. If it is too small another one is taken.
        """
        streams = self._device.streams
        form, sources = self._laid_out(activations, room, extents)
        nbytes = form.nbytes
        if len(memory) < nbytes:
            memory = self._host_memory(nbytes)
        self._grow(room, nbytes)
        for why, event in room.last_uses.items():
            streams.order(event, why)
        self._fill(room.memory, form.extents, sources)
        after = {Wait.MADE: streams.mark()}
        transfer = self._copy(Lane.ACTIVATIONS_OUT, stream, memory[:nbytes], room.memory[:nbytes], after)
        room.last_uses = {Wait.LEFT: transfer.done}
        self._waiting[stream] = _OnHost(memory, form, transfer.done)

    def _stays(self, activations: Activations, running: int) -> bool:
        """Whether a new stream's activations stay on the device: those to come are taken to be as large."""
        assert self._allowed is not None
        own, expected = storage_bytes(activations), self._expected
        self._expected -= 1
        allowed = self._allowed - self._held - running - self.room_bytes
        rooms = max(ROOMS * own - self.room_bytes, 0)
        stays = streams_that_stay(expected, own, allowed, rooms=rooms, some_wait=bool(self._waiting)) > 0
        self._held += own if stays else 0
        return stays

    def _laid_out(
        self, activations: Activations, room: _Room, extents: Sequence[_Extent]
    ) -> tuple[_Form, list[torch.Tensor]]:
        """Give each storage an extent of a room: how the activations lie there then, and each extent's bytes now."""
        laid: dict[int, tuple[_Extent, torch.Tensor]] = {}  # address of a storage's bytes now to extent and bytes

        def placed(tensor: torch.Tensor) -> _PlacedTensor:
            source = _bytes_of(tensor, room, extents)
            begin = source.data_ptr()
            if begin not in laid:
                laid[begin] = (_Extent(_end([extent for extent, _ in laid.values()]), len(source)), source)
            start = laid[begin][0].start + tensor.data_ptr() - begin
            return _PlacedTensor(start, tensor.dtype, tensor.size(), tensor.stride())

        values, nesting = flattened(activations)
        values = [placed(value) if self._is_on_device(value) else value for value in values]
        return _Form(values, nesting, [extent for extent, _ in laid.values()]), [source for _, source in laid.values()]

    def _is_on_device(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.device == self._device.torch_device and value.numel() > 0

    def _fill(self, memory: torch.Tensor, extents: Sequence[_Extent], sources: Sequence[torch.Tensor]) -> None:
        """Issue what brings all bytes to their extents; some are there already."""
        targets = [memory[extent.start : extent.start + extent.nbytes] for extent in extents]
        moves = [(to, source) for to, source in zip(targets, sources, strict=True) if to.data_ptr() != source.data_ptr()]
        inside = memory.untyped_storage().data_ptr()
        moves = [(to, src.clone() if src.untyped_storage().data_ptr() == inside else src) for to, src in moves]
        for to, source in moves:
            to.copy_(source)

    def _grow(self, room: _Room, nbytes: int) -> None:
        if len(room.memory) >= nbytes:
            return
        for why, event in room.last_uses.items():  # before its memory may become something else's
            self._device.streams.wait(event, why)
        with torch.inference_mode(mode=False):  # copies may be done by other threads
            room.memory = self._device.empty(nbytes)
        # What is allocated may have been freed by the host while compute issued before is still at work in it.
        room.last_uses = {Wait.READ: self._device.streams.mark()}

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory that nothing else uses in this sweep."""
        if self._used + nbytes > len(self._host):
            with torch.inference_mode(mode=False):
                self._host = self._device.host_memory(max(self._host_bytes, 2 * len(self._host), nbytes))
            self._used = 0
        self._used += nbytes
        return self._host[self._used - nbytes : self._used]

    def _copy(
        self, lane: Lane, stream: int, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]
    ) -> Transfer:
        transfer = self._device.streams.copy(lane, target, source, after)
        self._timeline.note(lane, f"stream {stream}", transfer.started, transfer.done, source.numel())
        return transfer


def streams_that_stay(streams: int, own: int, allowed: int, *, rooms: int, some_wait: bool = False) -> int:
    """How many streams' activations stay on a device, so that as few as possible wait.

    Args:
        streams: Number of streams that are to come.
        own: Bytes of each stream.
        allowed: Bytes of the device that are allowed, without those of a forward.
        rooms: Bytes that the two rooms take as soon as one stream waits.
        some_wait: Whether a stream waits already.
    """
    if not some_wait and streams * own <= allowed:
        return streams
    return max(min((allowed - rooms) // own, streams), 0) if own else streams


def _bytes_of(tensor: torch.Tensor, room: _Room, extents: Sequence[_Extent]) -> torch.Tensor:
    """The storage that a tensor is part of, as uint8; of a tensor in the room, the extent that was one storage."""
    storage = tensor.untyped_storage()
    if extents and storage.data_ptr() == room.memory.untyped_storage().data_ptr():
        at = tensor.data_ptr() - room.memory.data_ptr()
        extent = next(extent for extent in extents if extent.start <= at < extent.start + extent.nbytes)
        return room.memory[extent.start : extent.start + extent.nbytes]
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _end(extents: Sequence[_Extent]) -> int:
    return max((aligned(extent.start + extent.nbytes) for extent in extents), default=0)
