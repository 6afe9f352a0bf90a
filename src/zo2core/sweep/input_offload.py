"""Inputs of blocks in host memory, for a device with memory of its own; on disk once that is full.

A second ``KeptInputs`` keeps the copies in host memory, as the first one keeps the inputs in device memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple

import torch

from zo2core.io.direct_file import whole_pages
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import Device, Streams, Transfer, Wait
from zo2core.sweep.kept_inputs import AHEAD, InputKey, InputStore, KeptInputs
from zo2core.types import Lane

_NOTHING = torch.empty(0, dtype=torch.uint8)


class _HostMemory:
    """Page-locked memory that inputs have in turn. It is kept for later sweeps."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._lock = Lock()  # the thread that writes and reads files frees and takes memory, too
        self._all: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    @property
    def used(self) -> int:
        """Bytes that inputs have."""
        with self._lock:
            return sum(map(len, self._all)) - sum(map(len, self._free))

    def take(self, nbytes: int) -> torch.Tensor:
        """Take memory of at least so many bytes."""
        with self._lock:
            fitting = [number for number, memory in enumerate(self._free) if len(memory) >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda number: len(self._free[number])))
            self._all.append(self._allocate(whole_pages(nbytes)))
            return self._all[-1]

    def give(self, memory: torch.Tensor) -> None:
        """Give back memory that was taken."""
        with self._lock:
            self._free.append(memory)

    def take_back(self) -> None:
        """Take back all memory."""
        with self._lock:
            self._free = list(self._all)

    def clear(self) -> None:
        """Forget all memory."""
        with self._lock:
            self._all.clear()
            self._free.clear()


class _HostStorage:
    """Host memory of an input, which another input may have while this one is on disk."""

    def __init__(self, pool: _HostMemory, nbytes: int) -> None:
        self._pool = pool
        self._memory = _NOTHING
        self._nbytes = 0
        self.resize_(nbytes)

    @property
    def content(self) -> torch.Tensor:
        """The input's bytes (uint8)."""
        return self._memory[: self._nbytes]

    def nbytes(self) -> int:
        """Its present size."""
        return self._nbytes

    def data_ptr(self) -> int:
        """Address of its first byte."""
        return self.content.data_ptr()

    def resize_(self, size: int, /) -> None:
        """Give its memory back (size 0), or take some."""
        if self._nbytes:
            self._pool.give(self._memory)
        self._memory = self._pool.take(size) if size else _NOTHING
        self._nbytes = size


class _Copy(NamedTuple):
    """Where a storage's bytes are on the host."""

    storage: torch.UntypedStorage
    host: _HostStorage


class _Transit:
    """Copies that were started, and what compute issued afterwards has to wait for."""

    def __init__(self, streams: Streams, transfers: Sequence[Transfer], why: Wait) -> None:
        self._streams = streams
        self.transfers = transfers
        self._why = why

    def done(self) -> bool:
        """Whether all copies are done."""
        return all(transfer.done.passed for transfer in self.transfers)

    def result(self) -> None:
        """Let compute wait for them; the host does not."""
        for transfer in self.transfers:
            self._streams.order(transfer.done, self._why)


class _Departure(_Transit):
    """Copies to the host, after which storages are freed."""

    def __init__(self, offload: InputOffload, transfers: Sequence[Transfer], copies: Sequence[_Copy]) -> None:
        super().__init__(offload.device.streams, transfers, Wait.STAGING_OFFLOADED)
        self._offload = offload
        self._copies = copies

    def result(self) -> None:
        """Free the storages for compute that is issued from now on. See the contract."""
        super().result()
        for storage, _ in self._copies:
            self._offload.resize(storage, 0)


class _Moving(NamedTuple):
    """An input whose copies were started."""

    key: InputKey
    transit: _Transit
    copies: Sequence[_Copy]


class InputOffload:
    """Copies inputs to the host's memory and back, while the device computes.

    Device memory is freed and taken in the order of compute: what is freed is used only by compute that is issued later, and
    what is taken may still be read by compute that was issued before. While host memory has room, the host never waits for
    the device. Once it has none, the oldest copies are written to disk.
    """

    def __init__(self, device: Device, timeline: Timeline, file: InputStore[_HostStorage], room: int) -> None:
        self.device = device
        self._timeline = timeline
        self._pool = _HostMemory(device.host_memory)
        self._on_host = KeptInputs(file)
        self._room = room
        self._copies: dict[InputKey, Sequence[_Copy]] = {}
        self._departing: deque[_Moving] = deque()  # whose copies ``_on_host`` does not have yet
        self._arriving: deque[_Moving] = deque()
        self._transfers: list[Transfer] = []
        self._on_host.begin(room)

    def send(self, key: InputKey, storages: Sequence[torch.UntypedStorage]) -> _Departure:
        """Start copying storages to the host. See the contract."""
        # The oldest copies leave host memory once another input has no room.
        for moved in self._ended(self._departing, sum(storage.nbytes() for storage in storages), Wait.INPUT_OFFLOADED):
            self._on_host.put(moved.key, [host for _, host in moved.copies])
        copies = [_Copy(storage, _HostStorage(self._pool, storage.nbytes())) for storage in storages]
        made = {Wait.COMPUTED: self.device.streams.mark()}
        transfers = [
            self.device.streams.copy(Lane.ACTIVATIONS_OUT, host.content, self._bytes_of(storage), made)
            for storage, host in copies
        ]
        departure = _Departure(self, self._noted(Lane.ACTIVATIONS_OUT, key, transfers), copies)
        self._copies[key] = copies
        self._departing.append(_Moving(key, departure, copies))
        return departure

    def bring(self, key: InputKey) -> _Transit:
        """Start copying back, once the input is in host memory. See the contract."""
        copies = self._copies.pop(key)
        for moved in self._ended(self._arriving, sum(host.nbytes() for _, host in copies), Wait.INPUT_UPLOADED):
            for _, host in moved.copies:
                host.resize_(0)
        self._on_host.end_departures()
        self._on_host.take(key)
        for storage, host in copies:
            self.resize(storage, host.nbytes())
        # The storage's memory may have been freed while compute issued before is still at work in it. The copies to the host
        # are over by then as well: compute waits for them.
        read = {Wait.STAGING_READ: self.device.streams.mark()}
        transfers = [
            self.device.streams.copy(Lane.ACTIVATIONS_IN, self._bytes_of(storage), host.content, read)
            for storage, host in copies
        ]
        noted = self._noted(Lane.ACTIVATIONS_IN, key, transfers)
        transit = _Transit(self.device.streams, noted, Wait.ACTIVATIONS_UPLOADED)
        self._arriving.append(_Moving(key, transit, copies))
        return transit

    def clear(self) -> None:
        """Forget all inputs, after all copies. See the contract."""
        for transfer in self._transfers:
            self.device.streams.wait(transfer.done, Wait.ACTIVATIONS_UPLOADED)
        self._transfers.clear()
        self._on_host.clear()
        self._copies.clear()
        self._departing.clear()
        self._arriving.clear()
        self._pool.take_back()
        self._on_host.begin(self._room)

    def close(self) -> None:
        """Forget all memory. May be called twice."""
        self.clear()
        self._on_host.close()
        self._pool.clear()

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free a storage's memory, or take some again."""
        storage.resize_(nbytes)

    def _ended(self, moving: deque[_Moving], nbytes: int, why: Wait) -> Iterator[_Moving]:
        """Take out the inputs whose copies are done, oldest first; wait for some if host memory has no room for more."""
        while moving:
            is_needed = len(moving) > AHEAD and self._pool.used + nbytes > self._room
            if not (is_needed or moving[0].transit.done()):
                break
            for transfer in moving[0].transit.transfers:
                self.device.streams.wait(transfer.done, why)
            yield moving.popleft()

    def _bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def _noted(self, lane: Lane, key: InputKey, transfers: Sequence[Transfer]) -> Sequence[Transfer]:
        self._transfers += transfers
        for transfer in transfers:
            self._timeline.note(lane, str(key), transfer.started, transfer.done, transfer.source.numel())
        return transfers
