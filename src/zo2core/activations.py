"""What the streams of a sweep hold between segments: on the device while its memory lasts, the others' in host memory.

While the device computes the forward of one stream, the next one's activations come in and the last one's go out. Two rooms
on the device take turns: activations arrive in one, the forward reads them there, its result is put in their place and goes
out from there. So nothing is allocated but what the forward itself allocates, and the host waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from zo2core.protocols import Activations, Device, Transfer, Wait
from zo2core.timeline import Event, Lane
from zo2core.types import aligned

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


@dataclass
class _Room:
    """Device memory for the activations of one stream at a time."""

    memory: torch.Tensor
    places: Sequence[_Place] = ()  # of what is in there
    last_uses: dict[Wait, Event] = field(default_factory=dict)  # to be over before it is overwritten


@dataclass
class _Waiting:
    """A stream whose activations are in host memory between its forwards."""

    memory: torch.Tensor  # of the host
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
    """

    def __init__(self, device: Device, allowed: int | None) -> None:
        self._device = device
        self._allowed = None if device.in_place else allowed
        self._staying: dict[int, Activations] = {}  # streams whose activations are on the device
        self._waiting: dict[int, _Waiting] = {}
        self._rooms: deque[_Room] = deque()  # free ones
        self._host: list[torch.Tensor] = []  # free memory
        self._expected = 0  # streams still to come
        self._held = 0  # bytes of those that stay
        if self._allowed is not None:
            self._rooms.extend(_Room(device.empty(0)) for _ in range(ROOMS))

    def begin(self, streams: int) -> None:
        """Forget the last sweep, however it ended, and expect so many streams."""
        for stream, waiting in self._waiting.items():
            if waiting.coming is not None:  # of a sweep that failed
                self._device.streams.wait(waiting.coming.done, Wait.CAME)
            self.drop(stream)
            self._host.append(waiting.memory)
        self._waiting.clear()
        self._staying.clear()
        self._expected, self._held = streams, 0

    def admit(self, stream: int, activations: Activations, running: int) -> None:
        """Keep what a stream's first forward gave, and decide where its activations are from now on.

        Args:
            stream: Whose.
            activations: On the device.
            running: Bytes that its forwards take.
        """
        if not self._stays(activations, running):
            self._waiting[stream] = _Waiting(self._host.pop() if self._host else torch.empty(0, dtype=torch.uint8))
        self.put(stream, activations)

    def prefetch(self, stream: int) -> None:
        """Start bringing a stream's activations in, if they wait in host memory and there is a free room."""
        waiting = self._waiting.get(stream)
        if waiting is None or waiting.room is not None or not self._rooms:
            return
        assert waiting.left is not None
        nbytes = _end(waiting.places)
        room = waiting.room = self._of_size(self._rooms.popleft(), nbytes)
        after = {Wait.AWAY: waiting.left, **room.last_uses}
        waiting.coming = self._copy(Lane.UPLOAD, stream, room.memory[:nbytes], waiting.memory[:nbytes], after)
        room.places, room.last_uses = waiting.places, {}

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
        streams, room = self._device.streams, waiting.room
        waiting.form, places, sources = self._laid_out(activations, room)
        nbytes = _end(places)
        if room is None:
            room = self._rooms.popleft()
            for why, event in room.last_uses.items():
                streams.order(event, why)
        room = self._of_size(room, nbytes)
        if len(waiting.memory) < nbytes:  # in powers of two: all that was outgrown is less than what there is in the end
            waiting.memory = _allocated(self._device.host_memory, 1 << (nbytes - 1).bit_length())
        self._fill(room.memory, places, sources)
        transfer = self._copy(
            Lane.OFFLOAD, stream, waiting.memory[:nbytes], room.memory[:nbytes], {Wait.MADE: streams.mark()}
        )
        waiting.places, waiting.left, waiting.room, waiting.coming = places, transfer.done, None, None
        room.last_uses = {Wait.LEFT: transfer.done}
        self._rooms.append(room)

    def drop(self, stream: int) -> None:
        """Forget a stream's activations: its last forward was issued."""
        waiting = self._waiting.get(stream)
        if waiting is not None and waiting.room is not None:
            waiting.room.last_uses = {Wait.READ: self._device.streams.mark()}
            self._rooms.append(waiting.room)
            waiting.room = waiting.coming = None

    def _stays(self, activations: Activations, running: int) -> bool:
        """Whether a new stream's activations stay on the device: those to come are taken to be as large."""
        if self._allowed is None:
            return True
        own, left = held_bytes(activations), self._allowed - self._held - running
        all_stay = not self._waiting and own * self._expected <= left
        needed = own if all_stay else (1 + ROOMS) * own
        self._expected -= 1
        if needed > left:
            return False
        self._held += own
        return True

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

    def _of_size(self, room: _Room, nbytes: int) -> _Room:
        """A room, or a larger one in its stead."""
        if len(room.memory) >= nbytes:
            return room
        for why, event in room.last_uses.items():  # before its memory may become something else's
            self._device.streams.wait(event, why)
        return _Room(_allocated(self._device.empty, nbytes))

    def _copy(
        self, lane: Lane, stream: int, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]
    ) -> Transfer:
        transfer = self._device.streams.copy(lane, target, source, after)
        self._device.timeline.note(lane, f"activations {stream}", transfer.begun, transfer.done, source.numel())
        return transfer


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


def _allocated(allocate: Callable[[int], torch.Tensor], nbytes: int) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # copies may be done by other threads
        return allocate(nbytes)
