"""The inputs that blocks keep from their forward to their backward: in memory while there is room, elsewhere if not.

The backward pass needs the last blocks' inputs first, so those of the first blocks leave memory: once there is no room, the
oldest go. They go behind the forwards that follow, and come back ahead of the backward that needs them.

Note: Freed storages. An input leaves memory by its storage, which is resized to nothing, and filled again before the
backward. All tensors on it stay as they are: leaves of graphs, outputs of the block before, arguments of a forward that
runs again. Between forward and backward none of them is read but by the block whose input it is: the block before restores
its graph from its own input, and autograd reads no values of the tensors that it begins from. A block that keeps its graph
reads its input in its own backward alone, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

AHEAD = 2  # inputs that leave, and that come back, at a time: transfers overlap with compute


StorageT = TypeVar("StorageT", bound="Storage")
SentT = TypeVar("SentT", bound="Storage", contravariant=True)


class Transit(Protocol):
    """A transfer of an input's bytes that was started."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""

    def result(self) -> object:
        """Complete the transfer: the memory is free, or its bytes are there."""


class Storage(Protocol):
    """Memory that can be freed and taken again under the same object, as of a ``torch.UntypedStorage``."""

    def nbytes(self) -> int:
        """Its present size."""

    def data_ptr(self) -> int:
        """Address of its first byte."""

    def resize_(self, size: int, /) -> object:
        """Free its memory (size 0), or take so many bytes, whose values are undefined."""


class InputKey(NamedTuple):
    """Names the input of a block. As a string: the name of its transfers in traces."""

    block: int  # index of the block's segment
    stream: int  # index of the micro-batch

    def __str__(self) -> str:
        return f"input of block {self.block}, micro-batch {self.stream}"


class InputStore(Protocol[SentT]):
    """Where inputs are that have no room in the memory that is used first."""

    def send(self, key: InputKey, storages: Sequence[SentT]) -> Transit:
        """Start moving bytes out of storages, and free these."""

    def bring(self, key: InputKey) -> Transit:
        """Start bringing back what was sent under a key, into the same storages.

        Inputs come back in the order in which a backward pass needs them.
        """

    def clear(self) -> None:
        """Forget all inputs, once no transfer uses their memory any more."""

    def close(self) -> None:
        """Give back all memory and files. May be called twice."""


class _Input(NamedTuple, Generic[StorageT]):
    """The part of a block's input that only this block needs until its backward."""

    key: InputKey
    storages: Sequence[StorageT]
    nbytes: int


class _Moving(NamedTuple, Generic[StorageT]):
    """An input on its way."""

    input: _Input[StorageT]
    transit: Transit


class KeptInputs(Generic[StorageT]):
    """The inputs of the blocks of one sweep at a time."""

    def __init__(self, store: InputStore[StorageT]) -> None:
        self._store = store
        self._room = 0
        self._nbytes = 0  # in memory, with what is on its way
        self._present: deque[_Input[StorageT]] = deque()  # oldest first
        self._leaving: deque[_Moving[StorageT]] = deque()
        self._away: list[_Input[StorageT]] = []  # in the order in which they were put
        self._coming: dict[InputKey, _Moving[StorageT]] = {}

    def begin(self, nbytes: int) -> None:
        """Begin a sweep."""
        self._room = nbytes

    def put(self, key: InputKey, storages: Sequence[StorageT]) -> None:
        """Keep the input of a block whose forward was issued. Blocks come in order."""
        nbytes = sum(storage.nbytes() for storage in storages)
        self._present.append(_Input(key, storages, nbytes))
        self._nbytes += nbytes
        while self._leaving and self._leaving[0].transit.done():
            self._end_departure()
        staying = self._nbytes - sum(moving.input.nbytes for moving in self._leaving)
        while self._present and staying > self._room - AHEAD * nbytes:
            leaving = self._present.popleft()
            staying -= leaving.nbytes
            if leaving.storages:
                self._leaving.append(_Moving(leaving, self._store.send(leaving.key, leaving.storages)))
        while self._leaving and self._nbytes > self._room:
            self._end_departure()

    def end_departures(self) -> None:
        """Wait for all inputs that are leaving, before the backward pass: weights may change in it."""
        while self._leaving:
            self._end_departure()

    def take(self, key: InputKey) -> None:
        """Have an input in memory, for its block's backward, and start bringing those that are needed next.

        All departures have ended before.
        """
        while self._away and (len(self._coming) < AHEAD or self._next_away().key == key):
            coming = self._next_away()
            if coming.key != key and self._nbytes + coming.nbytes > self._room:
                break
            self._away.remove(coming)
            self._nbytes += coming.nbytes
            self._coming[coming.key] = _Moving(coming, self._store.bring(coming.key))
        if key in self._coming:
            moving = self._coming.pop(key)
            moving.transit.result()
            self._nbytes -= moving.input.nbytes
            return
        for kept in [kept for kept in self._present if kept.key == key]:
            self._present.remove(kept)
            self._nbytes -= kept.nbytes

    def clear(self) -> None:
        """Forget all inputs, however the sweep ended."""
        self._store.clear()
        self._present.clear()
        self._leaving.clear()
        self._away.clear()
        self._coming.clear()
        self._nbytes = 0

    def close(self) -> None:
        """Give back the store's memory and files. May be called twice."""
        self._store.close()

    def _end_departure(self) -> None:
        """Wait until the input that began to leave first has left."""
        left = self._leaving.popleft()
        left.transit.result()
        self._nbytes -= left.input.nbytes
        self._away.append(left.input)

    def _next_away(self) -> _Input[StorageT]:
        """The input that the backward pass needs next of those that are away."""
        return max(self._away, key=lambda kept: (kept.key.block, -kept.key.stream))
