"""The inputs that blocks keep from their forward to their backward: in memory while there is room, elsewhere if not.

The backward pass needs the last blocks' inputs first, so those of the first blocks leave memory: once there is no room, the
oldest go. They go behind the forwards that follow, and come back ahead of the backward that needs them.

Note: Freed storages. An input leaves memory by its storage, which is resized to nothing, and filled again before the
backward. All tensors on it stay as they are: leaves of graphs, outputs of the block before, arguments of a forward that
runs again. Between forward and backward none of them is read but by the block whose input it is: the block before restores
its graph from its own input, and autograd reads no values of the tensors that it begins from. A block that keeps its graph
reads its input in its own backward alone, too.

Inputs of blocks in a temporary file, by a thread of its own.

Inputs of blocks in host memory, for a device with memory of its own; on disk once that is full.

A second ``KeptInputs`` keeps the copies in host memory, as the first one keeps the inputs in device memory.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from zo2core.errors import ScratchError, reason
from zo2core.io.direct_file import RangedFile, anonymous_memory, view_of, whole_pages
from zo2core.profiling import Timeline
from zo2core.protocols import Device, Streams, Transfer, Wait
from zo2core.types import Lane, shown_bytes

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


_STAGING = 4 << 20  # bytes of page-aligned memory: what lies elsewhere would pass the page cache


class _Range(NamedTuple):
    """Where a storage's bytes are in the file."""

    storage: Storage
    offset: int
    nbytes: int


class InputFile:
    """Writes inputs to a file without a name, and reads them back, in the order of the calls.

    The file is made with the first input, in whole pages, past the page cache where the file system allows. It goes with
    the process.
    """

    def __init__(self, directory: Path, timeline: Timeline) -> None:
        self._directory = directory
        self._timeline = timeline
        self._file: RangedFile | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._staging = memoryview(anonymous_memory(_STAGING))  # pages take memory once they are touched
        self._ranges: dict[InputKey, list[_Range]] = {}
        self._end = 0
        self._started: list[Future[None]] = []

    def send(self, key: InputKey, storages: Sequence[Storage]) -> Future[None]:
        """Write storages behind the caller, and free them. See the contract."""
        ranges = []
        for storage in storages:
            ranges.append(_Range(storage, self._end, storage.nbytes()))
            self._end += whole_pages(storage.nbytes())
        self._ranges[key] = ranges
        return self._submit(key, ranges, write=True)

    def bring(self, key: InputKey) -> Future[None]:
        """Read storages ahead of the caller. See the contract."""
        return self._submit(key, self._ranges.pop(key), write=False)

    def clear(self) -> None:
        """Forget all inputs. After a failed write the file is closed, which frees its space on the disk."""
        for future in self._started:
            future.cancel()
        wait(self._started)
        if any(not future.cancelled() and future.exception() is not None for future in self._started):
            self._close_file()
        self._started.clear()
        self._ranges.clear()
        self._end = 0

    def close(self) -> None:
        """Close the file. May be called twice."""
        self.clear()
        self._close_file()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _submit(self, key: InputKey, ranges: Sequence[_Range], *, write: bool) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zo2-inputs")
        future = self._thread.submit(self._write if write else self._read, str(key), ranges)
        self._started.append(future)
        return future

    def _write(self, name: str, ranges: Sequence[_Range]) -> None:
        try:
            if self._file is None:
                self._file = RangedFile.unnamed(self._directory)
            staging = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._staging))
            with self._timeline.noted(Lane.WRITE, name, sum(part.nbytes for part in ranges)):
                for storage, offset, nbytes in ranges:
                    for start in range(0, nbytes, _STAGING):
                        count = min(_STAGING, nbytes - start)
                        ctypes.memmove(staging, storage.data_ptr() + start, count)  # releases the GIL
                        self._file.write(offset + start, self._staging[: whole_pages(count)])
                    storage.resize_(0)
        except OSError as error:
            raise ScratchError(
                self._directory,
                found=f"{reason(error)}, for the temporary file of the inputs of blocks",
                expected=f"a disk with {shown_bytes(self._end)} of free space, or more memory",
                remedy="free space there, allow more memory, or take smaller batches; the step was not taken",
            ) from error

    def _read(self, name: str, ranges: Sequence[_Range]) -> None:
        assert self._file is not None, "what is read was written"
        try:
            with self._timeline.noted(Lane.READ, name, sum(part.nbytes for part in ranges)):
                for storage, offset, nbytes in ranges:
                    storage.resize_(nbytes)
                    self._file.read_into(offset, view_of(storage.data_ptr(), nbytes))
        except (OSError, EOFError) as error:
            raise ScratchError(
                self._directory,
                found=f"{reason(error)}, for the temporary file of the inputs of blocks",
                expected="the inputs that were written there",
                remedy="repair the disk, allow more memory, or take smaller batches",
            ) from error

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


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


class _Copying(NamedTuple):
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
        self._departing: deque[_Copying] = deque()  # whose copies ``_on_host`` does not have yet
        self._arriving: deque[_Copying] = deque()
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
        self._departing.append(_Copying(key, departure, copies))
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
        self._arriving.append(_Copying(key, transit, copies))
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

    def _ended(self, moving: deque[_Copying], nbytes: int, why: Wait) -> Iterator[_Copying]:
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
