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
from typing import Any, NamedTuple

import torch

from zo2core.protocols import Activations, Device, Transfer, Wait
from zo2core.types import Event, Lane, aligned

ROOMS = 2


def held_bytes(activations: Activations) -> int:
    """Bytes that a batch's activations take between segments: every storage that tensors in them use, once.

    Args:
        activations: Tensors, nested in tuples, lists and dicts at will; whatever else is in there takes nothing.
    """
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    _replaced(activations, torch.Tensor, note)
    return sum(storages.values())


def _replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """The same structure with each value of a kind replaced; other values that are no containers stay as they are."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_replaced(each, kind, replace) for each in value)
    if isinstance(value, tuple | list):
        return type(value)(_replaced(each, kind, replace) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, kind, replace) for key, each in value.items()}
    return value


class _Leaf(NamedTuple):
    """A tensor in a room."""

    start: int  # of its first element, in bytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self, room: torch.Tensor) -> torch.Tensor:
        whole = (len(room) - self.start) // self.dtype.itemsize * self.dtype.itemsize
        return room[self.start : self.start + whole].view(self.dtype).as_strided(self.size, self.stride)


class _Place(NamedTuple):
    """Bytes of a room that were one storage."""

    start: int
    nbytes: int


@dataclass(eq=False)
class _Room:
    """Device memory for the activations of one stream at a time."""

    memory: torch.Tensor
    places: Sequence[_Place] = ()  # of what is in there
    last_uses: dict[Wait, Event] = field(default_factory=dict)  # to be over before it is overwritten


@dataclass
class _Waiting:
    """A stream whose activations are in host memory between its forwards."""

    memory: torch.Tensor | None = None  # of the host
    form: Activations = None  # with a leaf for each tensor
    places: Sequence[_Place] = ()
    left: Event | None = None  # they are in host memory
    room: _Room | None = None  # where they are now, or come to
    coming: Transfer | None = None


class ActivationMemory:
    """Holds the activations of a sweep's streams; one sweep at a time uses it.

    Args:
        device: Where forwards run.
        allowed: Bytes of the device for activations, forwards included. What does not fit waits in host memory; one forward
            and two rooms are taken in any case. None: everything stays. Without effect where the device computes in host
            memory.
        host_bytes: Expected to wait at a time. More is allocated if need be.
    """

    def __init__(self, device: Device, allowed: int | None, host_bytes: int = 0) -> None:
        self._device = device
        self._allowed = None if device.in_place else allowed
        self._staying: dict[int, Activations] = {}  # streams whose activations are on the device
        self._waiting: dict[int, _Waiting] = {}
        rooms = 0 if self._allowed is None else ROOMS
        self._rooms = tuple(_Room(device.empty(0)) for _ in range(rooms))
        self._free: deque[_Room] = deque()
        self._host = torch.empty(0, dtype=torch.uint8)  # given out from the beginning, anew in each sweep
        self._host_bytes = host_bytes
        self._used = 0  # of the host's
        self._may_wait = False
        self._expected = 0  # streams still to come
        self._held = 0  # bytes of those that stay

    @property
    def room_bytes(self) -> int:
        """What the rooms take of the device's memory by now."""
        return sum(len(room.memory) for room in self._rooms)

    def begin(self, streams: int, *, may_wait: bool = True) -> None:
        """Forget the last sweep, however it ended.

        Args:
            streams: Of the sweep that begins.
            may_wait: Their activations may have to wait; else it is known that all fit.
        """
        for waiting in self._waiting.values():
            if waiting.coming is not None:  # of a sweep that failed
                self._device.streams.wait(waiting.coming.done, Wait.CAME)
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
            stream: Whose.
            activations: On the device.
            running: Gives the bytes that its forwards take.
        """
        if self._may_wait and not self._stays(activations, running()):
            self._waiting[stream] = _Waiting()
        self.put(stream, activations)

    def prefetch(self, stream: int) -> None:
        """Start bringing a stream's activations in, if they wait in host memory and there is a free room."""
        waiting = self._waiting.get(stream)
        if waiting is None or waiting.room is not None or not self._free:
            return
        assert waiting.left is not None
        assert waiting.memory is not None
        nbytes = _end(waiting.places)
        room = self._free[0]
        self._grow(room, nbytes)
        after = {Wait.AWAY: waiting.left, **room.last_uses}
        target, source = room.memory[:nbytes], waiting.memory[:nbytes]
        waiting.coming = self._copy(Lane.ACTIVATIONS_IN, stream, target, source, after)
        waiting.room, room.places, room.last_uses = self._free.popleft(), waiting.places, {}

    def take(self, stream: int) -> Activations:
        """A stream's activations, on the device, for its next forward; ``put`` or ``drop`` follows."""
        waiting = self._waiting.get(stream)
        if waiting is None:
            return self._staying.pop(stream)
        self.prefetch(stream)
        assert waiting.room is not None, "one stream runs and one comes: there are two rooms"
        assert waiting.coming is not None
        self._device.streams.order(waiting.coming.done, Wait.CAME)
        memory = waiting.room.memory
        return _replaced(waiting.form, _Leaf, lambda leaf: leaf.tensor(memory))

    def put(self, stream: int, activations: Activations) -> None:
        """Keep what a stream's forward gave."""
        waiting = self._waiting.get(stream)
        if waiting is None:
            self._staying[stream] = activations
            return
        streams = self._device.streams
        form, places, sources = self._laid_out(activations, waiting.room)
        nbytes = _end(places)
        if waiting.memory is None or len(waiting.memory) < nbytes:
            waiting.memory = self._host_memory(nbytes)
        room = waiting.room or self._free[0]
        self._grow(room, nbytes)
        for why, event in room.last_uses.items():
            streams.order(event, why)
        self._fill(room.memory, places, sources)
        target, source = waiting.memory[:nbytes], room.memory[:nbytes]
        transfer = self._copy(Lane.ACTIVATIONS_OUT, stream, target, source, {Wait.MADE: streams.mark()})
        if waiting.room is None:
            self._free.popleft()
        room.last_uses = {Wait.LEFT: transfer.done}
        self._free.append(room)
        waiting.form, waiting.places, waiting.left = form, places, transfer.done
        waiting.room = waiting.coming = None

    def drop(self, stream: int) -> None:
        """Forget a stream's activations: its last forward was issued."""
        waiting = self._waiting.get(stream)
        if waiting is not None and waiting.room is not None:
            waiting.room.last_uses = {Wait.READ: self._device.streams.mark()}
            self._free.append(waiting.room)
            waiting.room = waiting.coming = None

    def _stays(self, activations: Activations, running: int) -> bool:
        """Whether a new stream's activations stay on the device: those to come are taken to be as large."""
        assert self._allowed is not None
        own, expected = held_bytes(activations), self._expected
        self._expected -= 1
        allowed = self._allowed - self._held - running - self.room_bytes
        rooms = max(ROOMS * own - self.room_bytes, 0)
        stays = streams_that_stay(expected, own, allowed, rooms=rooms, some_wait=bool(self._waiting)) > 0
        self._held += own if stays else 0
        return stays

    def _laid_out(
        self, activations: Activations, room: _Room | None
    ) -> tuple[Activations, list[_Place], list[torch.Tensor]]:
        """Give each storage a place in a room: the activations' form, the places, and each one's bytes now."""
        found: dict[int, tuple[_Place, torch.Tensor]] = {}  # address of its bytes now -> place and bytes

        def lay(tensor: torch.Tensor) -> torch.Tensor | _Leaf:
            if tensor.device != self._device.torch_device or tensor.numel() == 0:
                return tensor
            source = _bytes_of(tensor, room)
            begin = source.data_ptr()
            if begin not in found:
                end = _end([place for place, _ in found.values()])
                found[begin] = (_Place(end, len(source)), source)
            start = found[begin][0].start + tensor.data_ptr() - begin
            return _Leaf(start, tensor.dtype, tensor.size(), tensor.stride())

        form = _replaced(activations, torch.Tensor, lay)
        return form, [place for place, _ in found.values()], [source for _, source in found.values()]

    def _fill(self, memory: torch.Tensor, places: Sequence[_Place], sources: Sequence[torch.Tensor]) -> None:
        """Issue what brings all bytes to their places; some are there."""
        targets = [memory[place.start : place.start + place.nbytes] for place in places]
        moves = [(to, source) for to, source in zip(targets, sources, strict=True) if to.data_ptr() != source.data_ptr()]
        inside = memory.untyped_storage().data_ptr()
        moves = [(to, each.clone() if each.untyped_storage().data_ptr() == inside else each) for to, each in moves]
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
        """Host memory that nobody else uses in this sweep."""
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
        self._device.timeline.note(lane, f"stream {stream}", transfer.begun, transfer.done, source.numel())
        return transfer


def streams_that_stay(streams: int, own: int, allowed: int, *, rooms: int, some_wait: bool = False) -> int:
    """How many streams' activations stay on a device, so that as few as possible wait.

    Args:
        streams: All that are to come.
        own: Bytes of each.
        allowed: Bytes of the device, beside a forward's.
        rooms: Bytes that the two rooms take as soon as one stream waits.
        some_wait: One does.
    """
    if not some_wait and streams * own <= allowed:
        return streams
    return max(min((allowed - rooms) // own, streams), 0) if own else streams


def _bytes_of(tensor: torch.Tensor, room: _Room | None) -> torch.Tensor:
    """The storage that a tensor is part of, as uint8; of one in a room, the place."""
    storage = tensor.untyped_storage()
    if room is not None and storage.data_ptr() == room.memory.untyped_storage().data_ptr():
        at = tensor.data_ptr() - room.memory.data_ptr()
        place = next(place for place in room.places if place.start <= at < place.start + place.nbytes)
        return room.memory[place.start : place.start + place.nbytes]
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _end(places: Sequence[_Place]) -> int:
    return max((aligned(place.start + place.nbytes) for place in places), default=0)
