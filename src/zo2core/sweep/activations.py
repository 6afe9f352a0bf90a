"""Activations that wait for their use: in memory while there is room, elsewhere if not.

A zeroth-order sweep keeps the activations of its streams from segment to segment. A first-order one
keeps the input of each block from its forward to its backward. What is needed last leaves memory
first, behind the forwards that follow, and comes back ahead of its use: from a device to the host's
memory, and from there, once that is full, to a temporary file.

Note: Freed storages. Activations leave memory by their storages. A first-order sweep's storages are
resized to nothing, and filled again before the backward. All tensors on them stay as they are:
leaves of graphs, outputs of the block before, arguments of a forward that runs again. Between
forward and backward none of them is read but by the block whose input it is: the block before
restores its graph from its own input, and autograd reads no values of the tensors that it begins
from. A block that keeps its graph reads its input in its own backward alone, too. A zeroth-order
sweep's storages are forgotten, since others may have the same ones, and the activations are built
again on new storages.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zo2core.errors import ScratchError, system_errors_as
from zo2core.io.direct_file import RangedFile, anonymous_memory, view_of, whole_pages
from zo2core.protocols import Activations, Device, Streams, Transfer, Wait
from zo2core.schedulers.profiling import Timeline
from zo2core.types import Event, Lane, shown_bytes

# streams whose activations leave, or come back, at a time, so that transfers overlap with compute
USES_AHEAD = 2
# streams on a device that offloads them: one is read, one leaves, and one comes
IN_TRANSIT = USES_AHEAD + 1


class Use(NamedTuple):
    """The use for which activations are kept: the smallest comes first.

    As a string: the name of transfers in traces.
    """

    # index of the segment that reads them; negative in a backward pass, where the last segment is
    # the first
    segment: int
    stream: int  # index of the stream in the sweep

    def __str__(self) -> str:
        return f"input of segment {abs(self.segment)}, stream {self.stream}"


class ResizableMemory(Protocol):
    """Memory that can be freed and taken again under the same object, as of a
    ``torch.UntypedStorage``.
    """

    def nbytes(self) -> int:
        """Present size in bytes."""

    def data_ptr(self) -> int:
        """Address of its first byte."""

    def resize_(self, size: int, /) -> object:
        """Free its memory (size 0), or take so many bytes, whose values are undefined."""


MemoryT = TypeVar("MemoryT", bound=ResizableMemory)


class Transit(Protocol):
    """A move of activations that was started."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""

    def result(self) -> object:
        """Complete the move: the memory is free, or its bytes are there."""


class OffloadTarget(Protocol[MemoryT]):
    """Memory or a file that holds activations for which the first memory has no room."""

    def send(self, use: Use, storages: list[MemoryT]) -> Transit:
        """Start moving bytes out of storages, and free these.

        The list is changed in place: once the transit's ``result`` was called, it holds the
        storages that ``bring`` fills, which may be new ones.
        """

    def bring(self, use: Use) -> Transit:
        """Start bringing back what was sent."""

    def clear(self) -> None:
        """Forget everything, once no transfer uses its memory any more."""

    def close(self) -> None:
        """Give back all memory and files. May be called twice."""


class KeptActivations(Generic[MemoryT]):
    """The activations of one sweep at a time: in memory up to ``room`` bytes, the others in an
    ``OffloadTarget``.

    Uses are taken in their order. Of the activations that are away, those of the first use come
    back next; where room is short, those of the last use leave memory.
    """

    def __init__(self, target: OffloadTarget[MemoryT]) -> None:
        self.room = 0  # bytes
        self._target = target
        self._nbytes = 0  # in memory, with what is on its way
        self._sizes: dict[Use, int] = {}  # bytes of each use's activations, wherever they are
        self._present: dict[Use, list[MemoryT]] = {}
        self._leaving: dict[Use, Transit] = {}  # oldest first
        self._away: set[Use] = set()
        self._coming: dict[Use, Transit] = {}

    def put(self, use: Use, storages: list[MemoryT]) -> None:
        """Keep the output of a forward, or an input that only the backward reads again.

        Starts moving activations away until so much is free that the next ones have room; waits
        for those that leave only where memory is full.
        """
        nbytes = sum(storage.nbytes() for storage in storages)
        if not nbytes:
            return
        self._present[use] = storages
        self._sizes[use] = nbytes
        self._nbytes += nbytes
        while self._leaving and next(iter(self._leaving.values())).done():
            self._end_departure()
        staying = self._nbytes - sum(self._sizes[leaving] for leaving in self._leaving)
        while self._present and staying > self.room - USES_AHEAD * nbytes:
            last = max(self._present)
            staying -= self._sizes[last]
            self._leaving[last] = self._target.send(last, self._present.pop(last))
        while self._leaving and self._nbytes > self.room:
            self._end_departure()

    def end_departures(self) -> None:
        """Wait for all activations that are leaving, before a backward pass, which may write the
        memory that they are copied from.
        """
        while self._leaving:
            self._end_departure()

    def take(self, use: Use) -> None:
        """Bring activations into memory, hand them to the caller, and start bringing those that
        are used next.

        Uses have to be taken in their order.
        """
        while use in self._leaving:
            self._end_departure()
        while self._away and (len(self._coming) < USES_AHEAD or min(self._away) == use):
            coming = min(self._away)
            nbytes = self._nbytes + self._sizes[coming]
            while self._leaving and nbytes > self.room:
                nbytes -= self._end_departure()
            if coming != use and nbytes > self.room:
                break
            self._away.remove(coming)
            self._nbytes = nbytes
            self._coming[coming] = self._target.bring(coming)
        if use in self._coming:
            self._coming.pop(use).result()
        self._present.pop(use, None)
        self._nbytes -= self._sizes.pop(use, 0)

    def clear(self) -> None:
        """Forget everything, however the sweep ended."""
        self._target.clear()
        for uses in (self._sizes, self._present, self._leaving, self._away, self._coming):
            uses.clear()
        self._nbytes = 0

    def close(self) -> None:
        """Give back all memory and files. May be called twice."""
        self._target.close()

    def _end_departure(self) -> int:
        """Wait until what began to leave first has left; returns the bytes that it had."""
        left = next(iter(self._leaving))
        self._leaving.pop(left).result()
        self._nbytes -= self._sizes[left]
        self._away.add(left)
        return self._sizes[left]


_STAGING = 4 << 20  # bytes of page-aligned memory: what lies elsewhere would pass the page cache


class _Range(NamedTuple):
    """Where a storage's bytes are in the file."""

    storage: ResizableMemory
    offset: int
    nbytes: int


class ActivationFile:
    """Writes activations to a file without a name, and reads them back, in the order of the calls.

    The file is made with the first ones, in whole pages, past the page cache where the file system
    allows. It goes with the process.
    """

    def __init__(self, directory: Path, timeline: Timeline) -> None:
        self._directory = directory
        self._timeline = timeline
        self._file: RangedFile | None = None
        # starts with its first work
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zo2-activations")
        # pages take memory once they are touched
        self._staging = memoryview(anonymous_memory(_STAGING))
        self._ranges: dict[Use, list[_Range]] = {}
        self._end = 0  # offset of the next activations; it returns to 0 when all are forgotten
        self._has_failed = False  # a write: the disk may be full

    def send(self, use: Use, storages: Sequence[ResizableMemory]) -> Future[None]:
        """Write storages behind the caller, and free them."""
        ranges = []
        for storage in storages:
            ranges.append(_Range(storage, self._end, storage.nbytes()))
            self._end += whole_pages(storage.nbytes())
        self._ranges[use] = ranges
        return self._thread.submit(self._write, str(use), ranges)

    def bring(self, use: Use) -> Future[None]:
        """Read storages ahead of the caller."""
        return self._thread.submit(self._read, str(use), self._ranges.pop(use))

    def clear(self) -> None:
        """Forget everything, once the present transfer is over.

        After a failed write, free the file's space on the disk.
        """
        self._thread.shutdown(cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zo2-activations")
        if self._has_failed:
            self._close_file()
        self._ranges.clear()
        self._end = 0

    def close(self) -> None:
        """Close the file. May be called twice."""
        self.clear()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        self._has_failed = False

    def _write(self, name: str, ranges: Sequence[_Range]) -> None:
        expected = (
            f"{shown_bytes(self._end)} of free disk space for the inputs of blocks, or more memory"
        )
        remedy = "free space there, allow more memory, or take smaller batches"
        afterwards = "the step was not taken"
        staging_address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._staging))
        # waits until the device has filled each storage
        origins = [part.storage.data_ptr() for part in ranges]
        with system_errors_as(
            ScratchError,
            self._directory,
            expected=expected,
            remedy=remedy,
            afterwards=afterwards,
        ):
            try:
                if self._file is None:
                    self._file = RangedFile.unnamed(self._directory)
                with self._timeline.noted(Lane.WRITE, name, sum(part.nbytes for part in ranges)):
                    for origin, (storage, offset, nbytes) in zip(origins, ranges, strict=True):
                        for start in range(0, nbytes, _STAGING):
                            count = min(_STAGING, nbytes - start)
                            ctypes.memmove(
                                staging_address, origin + start, count
                            )  # releases the GIL
                            self._file.write(offset + start, self._staging[: whole_pages(count)])
                        storage.resize_(0)
            except OSError:
                self._has_failed = True  # the file is closed once the writes that follow have ended
                raise

    def _read(self, name: str, ranges: Sequence[_Range]) -> None:
        assert self._file is not None, "what is read was written"
        for storage, _, nbytes in ranges:
            storage.resize_(nbytes)
        expected = "the inputs of blocks that were written there"
        remedy = "repair the disk, allow more memory, or take smaller batches"
        with (
            system_errors_as(ScratchError, self._directory, expected=expected, remedy=remedy),
            self._timeline.noted(Lane.READ, name, sum(part.nbytes for part in ranges)),
        ):
            for storage, offset, nbytes in ranges:
                self._file.read_into(offset, view_of(storage.data_ptr(), nbytes))


class _HostPart(NamedTuple):
    """A part of the host's memory, of whole pages."""

    memory: torch.Tensor
    read: Event | None = None  # passes when the last copy from it to the device is done


class _HostMemory:
    """Page-locked memory that activations have in turn. It is kept for later sweeps.

    It grows as it is needed, or the planned memory is taken ``at_once`` where all of it is needed:
    parts of memory that was taken in several goes can be too small for what comes next, and then
    it grows beyond the plan.
    """

    def __init__(self, device: Device, planned: int, *, at_once: bool) -> None:
        self._device = device
        self._planned = planned
        self._at_once = at_once
        self._lock = Lock()  # the thread that writes and reads the file frees and takes memory, too
        self._all: list[torch.Tensor] = []
        self._free: list[_HostPart] = []

    def take(self, nbytes: int) -> _HostPart:
        """Take the smallest part that has so many bytes."""
        nbytes = whole_pages(nbytes)
        with self._lock:
            fitting = [
                number for number, piece in enumerate(self._free) if len(piece.memory) >= nbytes
            ]
            if not fitting:
                total = sum(map(len, self._all))
                left = self._planned - total
                self._all.append(
                    self._device.host_memory(
                        max(nbytes, left if self._at_once else min(total, left))
                    )
                )
                fitting = [len(self._free)]
                self._free.append(_HostPart(self._all[-1]))
            memory, read = self._free.pop(
                min(fitting, key=lambda number: len(self._free[number].memory))
            )
            if len(memory) > nbytes:
                self._free.append(_HostPart(memory[nbytes:], read))
            return _HostPart(memory[:nbytes], read)

    def give(self, piece: _HostPart) -> None:
        """Give back a part that was taken."""
        with self._lock:
            self._free.append(piece)

    def take_back(self) -> None:
        """Take back all memory, which nothing uses any more."""
        with self._lock:
            self._free = [_HostPart(memory) for memory in self._all]

    def clear(self) -> None:
        """Forget all memory."""
        with self._lock:
            self._all.clear()
            self._free.clear()


class _HostStorage:
    """Host memory of a storage's bytes, which others may have while these are on disk.

    Copies to and from the device are in order. Only what the host itself does with the memory waits
    for them here.
    """

    def __init__(self, memory: _HostMemory, streams: Streams, nbytes: int) -> None:
        self._memory = memory
        self._streams = streams
        self._nbytes = nbytes
        self._piece = memory.take(nbytes)
        self.filled: Event | None = None  # passes when the copy from the device is done

    @property
    def content(self) -> torch.Tensor:
        """The bytes (uint8)."""
        return self._piece.memory[: self._nbytes]

    def nbytes(self) -> int:
        """Present size in bytes."""
        return self._nbytes

    def data_ptr(self) -> int:
        """Address of the bytes, once the device has copied them there."""
        if self.filled is not None:
            self._streams.wait(self.filled, Wait.INPUT_OFFLOADED)
        return self.content.data_ptr()

    def resize_(self, size: int, /) -> None:
        """Give the memory back (size 0), or take some that the device does not read any more."""
        if not size:
            self.give_back(None)
            return
        self._piece = self._memory.take(size)
        self._nbytes = size
        if self._piece.read is not None:
            self._streams.wait(self._piece.read, Wait.INPUT_UPLOADED)

    def give_back(self, read: Event | None) -> None:
        """Give the memory back, which a copy to the device may still read."""
        self._memory.give(self._piece._replace(read=read))
        self._nbytes = 0


class _Copies(NamedTuple):
    """Copies that were started, and for which compute has to wait."""

    streams: Streams
    transfers: Sequence[Transfer]
    why: Wait
    # gives back the memory that was copied from, once compute is ordered after the copies
    release: Callable[[], None]

    def done(self) -> bool:
        """Whether all copies are done."""
        return all(transfer.done.passed for transfer in self.transfers)

    def result(self) -> None:
        """Let compute that is issued from now on wait for them, and give back the memory that
        was copied from; the host does not wait.
        """
        for transfer in self.transfers:
            self.streams.order(transfer.done, self.why)
        self.release()


class ActivationOffload:
    """Copies activations to the host's memory and back, while the device computes.

    Device memory is freed and taken in the order of compute: what is freed is used only by compute
    that is issued later, and what is taken may still be read by compute that was issued before.
    While host memory has room, the host never waits for the device. Once it has none, what is
    needed last is written to disk.

    Args:
        device: Device of the activations.
        timeline: Records every transfer.
        file: Takes the activations that have no room in host memory; None: host memory has room
            for all.
        planned: Bytes of host memory.
        forgets: Whether storages that are sent are forgotten, and replaced by others, because not
            all tensors on them are known.
    """

    def __init__(
        self,
        device: Device,
        timeline: Timeline,
        file: ActivationFile | None,
        planned: int,
        *,
        forgets: bool = False,
    ) -> None:
        self._device = device
        self._timeline = timeline
        self._forgets = forgets
        self._memory = _HostMemory(device, planned, at_once=file is None)
        self._on_host: KeptActivations[_HostStorage] | None = None
        if file is not None:
            self._on_host = KeptActivations(file)
            self._on_host.room = planned
        self._sent: dict[Use, tuple[list[torch.UntypedStorage], list[_HostStorage]]] = {}
        self._last: dict[Lane, Event] = {}  # the event of each lane's last copy

    @torch.inference_mode(mode=False)  # copies may be done by other threads
    def send(self, use: Use, storages: list[torch.UntypedStorage]) -> _Copies:
        """Start copying storages to the host."""
        streams = self._device.streams
        computed = {Wait.COMPUTED: streams.mark()}
        hosts = [_HostStorage(self._memory, streams, storage.nbytes()) for storage in storages]
        transfers = []
        for storage, host in zip(storages, hosts, strict=True):
            transfers.append(
                self._copy(Lane.ACTIVATIONS_OUT, use, host.content, _bytes_of(storage), computed)
            )
            host.filled = transfers[-1].done
        self._sent[use] = storages, hosts
        if self._on_host is not None:
            self._on_host.put(use, hosts)

        def free() -> None:
            storages[:] = map(self._free_storage, storages)

        return _Copies(streams, transfers, Wait.STAGING_OFFLOADED, free)

    @torch.inference_mode(mode=False)
    def bring(self, use: Use) -> _Copies:
        """Start copying back, once the bytes are in host memory."""
        streams = self._device.streams
        (storages, hosts) = self._sent.pop(use)
        if self._on_host is not None:
            self._on_host.take(use)
        for storage, host in zip(storages, hosts, strict=True):
            self.resize(storage, host.nbytes())
        # The storage's memory may have been freed while compute issued before is still at work in
        # it. The copies to the host are over by then as well: compute waits for them.
        read = {Wait.STAGING_READ: streams.mark()}
        transfers = [
            self._copy(Lane.ACTIVATIONS_IN, use, _bytes_of(storage), host.content, read)
            for storage, host in zip(storages, hosts, strict=True)
        ]

        def give_back() -> None:
            for host, transfer in zip(hosts, transfers, strict=True):
                host.give_back(transfer.done)

        return _Copies(streams, transfers, Wait.ACTIVATIONS_UPLOADED, give_back)

    def clear(self) -> None:
        """Forget everything, after all copies."""
        for event in self._last.values():
            self._device.streams.wait(event, Wait.ACTIVATIONS_UPLOADED)
        self._last.clear()
        if self._on_host is not None:
            self._on_host.clear()
        self._sent.clear()
        self._memory.take_back()

    def close(self) -> None:
        """Forget all memory."""
        self.clear()
        if self._on_host is not None:
            self._on_host.close()
        self._memory.clear()

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free a storage's memory, or take some again."""
        storage.resize_(nbytes)

    def _free_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Free a storage's memory; returns the storage into which its bytes come back."""
        if self._forgets:
            return torch.empty(0, dtype=torch.uint8, device=storage.device).untyped_storage()
        self.resize(storage, 0)
        return storage

    def _copy(
        self,
        lane: Lane,
        use: Use,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Mapping[Wait, Event],
    ) -> Transfer:
        transfer = self._device.streams.copy(lane, target, source, after)
        self._last[lane] = transfer.done
        self._timeline.note(lane, str(use), transfer.started, transfer.done, source.numel())
        return transfer


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage (uint8)."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _take_apart(
    activations: Activations, device: torch.device
) -> tuple[list[torch.UntypedStorage], Callable[[], Activations]]:
    """The storages of the tensors on a device, and a function that builds the activations again on
    the storages that the list holds when it is called.

    The function keeps no tensor alive.
    """

    def is_on_device(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.device == device and value.numel() > 0

    def builder(value: Any) -> Callable[[], Any]:
        if not is_on_device(value):
            return lambda: value
        number = numbers[value.untyped_storage().data_ptr()]
        dtype = value.dtype
        place = value.storage_offset(), value.size(), value.stride()
        return lambda: torch.empty(0, dtype=dtype, device=device).set_(storages[number], *place)

    values, nesting = flattened(activations)
    by_address = storages_of(filter(is_on_device, values))
    storages = list(by_address.values())
    numbers = {address: number for number, address in enumerate(by_address)}
    builders = [builder(value) for value in values]
    return storages, lambda: tree_unflatten([build() for build in builders], nesting)


class StreamActivations:
    """The activations of a zeroth-order sweep's streams, from segment to segment; one sweep at a
    time uses it.

    As many of the first streams as have room stay on the device for the whole sweep.

    Args:
        device: Device of the activations.
        allowed: Bytes of device memory for activations and forwards; None: all streams stay.
        host_bytes: Bytes of host memory that are planned for the other streams.
        timeline: Records every transfer.
    """

    def __init__(
        self,
        device: Device,
        allowed: int | None,
        host_bytes: int = 0,
        *,
        timeline: Timeline | None = None,
    ) -> None:
        timeline = Timeline() if timeline is None else timeline
        self._kept = KeptActivations(
            ActivationOffload(device, timeline, None, host_bytes, forgets=True)
        )
        self._device = device.torch_device
        self._allowed = None if device.in_place else allowed
        self._may_offload = False
        self._expected = 0  # streams that have not been added
        self._on_device: dict[int, Activations] = {}  # of the streams that stay
        self._staying_bytes = 0
        self._offloaded: set[int] = set()  # the other streams
        # of the activations of offloaded streams
        self._builders: dict[int, Callable[[], Activations]] = {}

    def begin(self, streams: int, *, may_offload: bool = True) -> None:
        """Forget all activations of the last sweep, however it ended."""
        self._kept.clear()
        self._kept.room = self._staying_bytes = 0
        for streams_of_last_sweep in (self._on_device, self._offloaded, self._builders):
            streams_of_last_sweep.clear()
        self._expected = streams
        self._may_offload = may_offload and self._allowed is not None

    def add(self, stream: int, activations: Activations, forward_bytes: int) -> None:
        """Keep the output of a stream's first forward, and decide whether the stream stays on the
        device.
        """
        if self._may_offload and not self._place(storage_bytes(activations), forward_bytes):
            self._offloaded.add(stream)
        self.put(1, stream, activations)

    def put(self, segment: int, stream: int, activations: Activations) -> None:
        """Keep the input of a stream's forward in a segment."""
        if stream not in self._offloaded:
            self._on_device[stream] = activations
            return
        storages, self._builders[stream] = _take_apart(activations, self._device)
        self._kept.room = max(
            self._kept.room, IN_TRANSIT * sum(storage.nbytes() for storage in storages)
        )
        self._kept.put(Use(segment, stream), storages)

    def take(self, segment: int, stream: int) -> Activations:
        """Return the input of a stream's forward in a segment, on the device, and forget it."""
        if stream not in self._offloaded:
            return self._on_device.pop(stream)
        self._kept.take(Use(segment, stream))
        return self._builders.pop(stream)()

    def _place(self, nbytes: int, forward_bytes: int) -> bool:
        """Decide whether the next stream stays on the device, as if all later ones were as large,
        and count it.
        """
        assert self._allowed is not None
        expected = self._expected
        allowed = self._allowed - self._staying_bytes - forward_bytes
        self._expected -= 1
        staging = max(self._kept.room, IN_TRANSIT * nbytes)
        stays = (
            streams_on_device(
                expected, nbytes, allowed, staging=staging, some_offloaded=bool(self._offloaded)
            )
            > 0
        )
        self._staying_bytes += nbytes if stays else 0
        return stays


def streams_on_device(
    streams: int, nbytes: int, allowed: int, *, staging: int, some_offloaded: bool = False
) -> int:
    """Return how many streams' activations stay on a device if as few as possible are offloaded."""
    if not some_offloaded and streams * nbytes <= allowed:
        return streams
    return max(min((allowed - staging) // nbytes, streams), 0) if nbytes else streams


def storage_bytes(activations: Activations) -> int:
    """Return the bytes that a batch's activations take between segments.

    Shared storages count once.
    """
    return sum(storage.nbytes() for storage in storages_of(flattened(activations)[0]).values())


def storages_of(values: Iterable[object]) -> dict[int, torch.UntypedStorage]:
    """The storages that are not empty of the tensors among some values, by address."""
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def flattened(activations: Activations) -> tuple[list[Any], TreeSpec]:
    """Flatten nested activations to their values and the structure of the nesting.

    Tuples, lists and dicts are opened, and their subclasses, which torch builds again if they are
    registered. Any other container is passed on unchanged, since it is unknown whether it can be
    built again with other tensors.
    """
    return tree_flatten(
        activations, is_leaf=lambda value: not isinstance(value, tuple | list | dict)
    )
