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
from typing import NamedTuple, Protocol

import torch

AHEAD = 2  # inputs that leave, and that come back, at a time: transfers overlap with compute


class Transit(Protocol):
    """A transfer of an input's bytes that was started."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""

    def result(self) -> object:
        """Complete the transfer: the memory is free, or its bytes are there.

        Raises:
            ZO2Error: if it failed.
        """


class InputStore(Protocol):
    """Where inputs are that have no room in the memory in which forwards run."""

    def send(self, name: str, storages: Sequence[torch.UntypedStorage]) -> Transit:
        """Start moving bytes out of storages, and free these.

        Args:
            name: Name of the transfer in traces; of one input at a time.
            storages: The storages. They must not be used until ``bring`` has brought them back.
        """

    def bring(self, name: str) -> Transit:
        """Start bringing back what was sent under a name, into the same storages."""

    def clear(self) -> None:
        """Forget all inputs, once no transfer uses their memory any more."""

    def close(self) -> None:
        """Give back all memory and files. May be called twice."""


class _Input(NamedTuple):
    """The part of a block's input, for one stream, that only this block needs until its backward."""

    block: int
    stream: int
    storages: Sequence[torch.UntypedStorage]
    nbytes: int


class _Moving(NamedTuple):
    """An input on its way."""

    input: _Input
    transit: Transit


class KeptInputs:
    """The inputs of the blocks of one sweep at a time.

    Args:
        store: Takes the inputs that have no room.
    """

    def __init__(self, store: InputStore) -> None:
        self._store = store
        self._room = 0
        self._nbytes = 0  # in memory, with what is on its way
        self._present: deque[_Input] = deque()  # oldest first
        self._leaving: deque[_Moving] = deque()
        self._away: list[_Input] = []  # in the order in which they were put
        self._coming: dict[tuple[int, int], _Moving] = {}  # by block and stream

    def begin(self, nbytes: int) -> None:
        """Begin a sweep.

        Args:
            nbytes: Bytes that inputs may take in memory. At least one at a time is in it.
        """
        self._room = nbytes

    def put(self, block: int, stream: int, storages: Sequence[torch.UntypedStorage]) -> None:
        """Keep the input of a block whose forward was issued. Blocks come in order.

        Args:
            block: Index of the block's segment.
            stream: Index of the stream.
            storages: The storages that nothing else needs until the block's backward.

        Raises:
            ScratchError: if an input that has no room cannot be written.
        """
        nbytes = sum(storage.nbytes() for storage in storages)
        self._present.append(_Input(block, stream, storages, nbytes))
        self._nbytes += nbytes
        while self._leaving and self._leaving[0].transit.done():
            self._end_departure()
        staying = self._nbytes - sum(moving.input.nbytes for moving in self._leaving)
        while self._present and staying > self._room - AHEAD * nbytes:
            leaving = self._present.popleft()
            staying -= leaving.nbytes
            if leaving.storages:
                self._leaving.append(_Moving(leaving, self._store.send(_name(leaving), leaving.storages)))
        while self._leaving and self._nbytes > self._room:
            self._end_departure()

    def end_departures(self) -> None:
        """Wait for all inputs that are leaving, before the backward pass: weights may change in it.

        Raises:
            ScratchError: if one cannot be written.
        """
        while self._leaving:
            self._end_departure()

    def take(self, block: int, stream: int) -> None:
        """Have an input in memory, for its block's backward, and start bringing those that are needed next.

        All departures have ended before.

        Args:
            block: Index of the block's segment. Blocks come in reverse order, and the streams of a block in order.
            stream: Index of the stream.

        Raises:
            ScratchError: if it cannot be read.
        """
        key = (block, stream)
        while self._away and (len(self._coming) < AHEAD or _key(self._next_away()) == key):
            coming = self._next_away()
            if _key(coming) != key and self._nbytes + coming.nbytes > self._room:
                break
            self._away.remove(coming)
            self._nbytes += coming.nbytes
            self._coming[_key(coming)] = _Moving(coming, self._store.bring(_name(coming)))
        if key in self._coming:
            moving = self._coming.pop(key)
            moving.transit.result()
            self._nbytes -= moving.input.nbytes
            return
        for kept in [kept for kept in self._present if _key(kept) == key]:
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

    def _next_away(self) -> _Input:
        """The input that the backward pass needs next of those that are away."""
        return max(self._away, key=lambda kept: (kept.block, -kept.stream))


def _key(kept: _Input) -> tuple[int, int]:
    return kept.block, kept.stream


def _name(kept: _Input) -> str:
    return f"input of block {kept.block}, micro-batch {kept.stream}"
