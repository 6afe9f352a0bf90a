"""The activations of a sweep's streams between segments: on the device while its memory suffices, else in host memory.

While the device computes the forward of one stream, the next stream's activations are uploaded and the last one's are
offloaded. Two staging buffers on the device alternate: activations are uploaded into one, the forward reads them there, and
its result replaces them and is offloaded from there. Once the buffers are as large as the largest stream, only forwards
allocate memory, and the host does not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zo2core.profiling import Timeline
from zo2core.protocols import Activations, Device, Transfer, Wait
from zo2core.types import Event, Lane, aligned

STAGING_BUFFERS = 2


def storage_bytes(activations: Activations) -> int:
    """Return the bytes that a batch's activations take between segments. Shared storages count once."""
    values, _ = flattened(activations)
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def flattened(activations: Activations) -> tuple[list[Any], TreeSpec]:
    """Flatten nested activations to their values and the structure of the nesting."""
    return tree_flatten(activations, is_leaf=_is_leaf)


def _is_leaf(value: object) -> bool:
    """Whether a value is passed on unchanged.

    Other libraries may have registered their own containers with torch's pytrees. Whether such a container can be built
    again with other tensors is unknown here.
    """
    return not isinstance(value, tuple | list | dict)


class _PackedTensor(NamedTuple):
    """A tensor whose elements are in a staging buffer."""

    start: int  # offset of the first element in the buffer, in bytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self, buffer: torch.Tensor) -> torch.Tensor:
        whole = (len(buffer) - self.start) // self.dtype.itemsize * self.dtype.itemsize
        return buffer[self.start : self.start + whole].view(self.dtype).as_strided(self.size, self.stride)


class _Extent(NamedTuple):
    """The bytes of one storage in a staging buffer."""

    start: int
    nbytes: int


class _Packing(NamedTuple):
    """The structure from which activations are built again out of the bytes in a staging buffer."""

    values: Sequence[Any]  # a ``_PackedTensor`` for each tensor on the device
    nesting: TreeSpec
    extents: Sequence[_Extent]

    @property
    def nbytes(self) -> int:
        return _end(self.extents)

    def activations(self, buffer: torch.Tensor) -> Activations:
        values = [value.tensor(buffer) if isinstance(value, _PackedTensor) else value for value in self.values]
        return tree_unflatten(values, self.nesting)


@dataclass(eq=False)
class _StagingBuffer:
    """Device memory for the activations of one stream at a time."""

    memory: torch.Tensor
    last_uses: dict[Wait, Event] = field(default_factory=dict)  # have to pass before the memory is overwritten


class _OnHost(NamedTuple):
    """The state of a stream whose activations are in host memory, or are being offloaded."""

    memory: torch.Tensor  # the stream's host memory for this sweep
    packing: _Packing
    offloaded: Event


class _Staged(NamedTuple):
    """The state of a stream whose activations are in a staging buffer, or are being uploaded."""

    memory: torch.Tensor
    packing: _Packing
    buffer: _StagingBuffer
    transfer: Transfer


_Offloaded: TypeAlias = _OnHost | _Staged


class ActivationOffload:
    """Stores the activations of a sweep's streams; one sweep at a time uses it."""

    def __init__(
        self, device: Device, allowed: int | None, host_bytes: int = 0, *, timeline: Timeline | None = None
    ) -> None:
        self._device = device
        self._timeline = Timeline() if timeline is None else timeline
        self._allowed = None if device.in_place else allowed
        self._on_device: dict[int, Activations] = {}  # streams whose activations stay on the device
        self._offloaded: dict[int, _Offloaded] = {}  # streams whose activations are in host memory between forwards
        buffers = 0 if self._allowed is None else STAGING_BUFFERS
        self._buffers = tuple(_StagingBuffer(device.empty(0)) for _ in range(buffers))
        self._free: deque[_StagingBuffer] = deque()
        self._host = torch.empty(0, dtype=torch.uint8)  # allocated from the start again in each sweep
        self._host_bytes = host_bytes
        self._used = 0  # allocated bytes of the host's memory
        self._may_offload = False
        self._expected = 0  # streams that have not been added
        self._kept_bytes = 0  # of the streams that stay on the device

    @property
    def staging_bytes(self) -> int:
        """Present size of the staging buffers, in bytes of device memory."""
        return sum(len(buffer.memory) for buffer in self._buffers)

    def begin(self, streams: int, *, may_offload: bool = True) -> None:
        """Drop all activations of the last sweep, however it ended."""
        for state in self._offloaded.values():
            if isinstance(state, _Staged):  # of a sweep that failed
                self._device.streams.wait(state.transfer.done, Wait.ACTIVATIONS_UPLOADED)
        busy = [buffer for buffer in self._buffers if buffer not in self._free]
        for buffer in busy:
            buffer.last_uses[Wait.STAGING_READ] = self._device.streams.mark()
        self._free.extend(busy)
        self._offloaded.clear()
        self._on_device.clear()
        self._used, self._kept_bytes, self._expected = 0, 0, streams
        self._may_offload = may_offload and self._allowed is not None

    def add(self, stream: int, activations: Activations, forward_bytes: Callable[[], int]) -> None:
        """Store the output of a stream's first forward, and decide whether the stream is offloaded."""
        if self._may_offload and not self._stays(activations, forward_bytes()):
            buffer, empty = self._free[0], self._host[:0]
            self._offload(stream, activations, buffer, (), empty)
            self._free.rotate(-1)  # to the end: this buffer is in use for longest
        else:
            self._on_device[stream] = activations

    def prefetch(self, stream: int) -> None:
        """Start to upload a stream's activations, if they are in host memory and a staging buffer is free."""
        state = self._offloaded.get(stream)
        if isinstance(state, _OnHost) and self._free:
            self._upload(stream, state)

    def take(self, stream: int) -> Activations:
        """Return a stream's activations, on the device, for its next forward; ``put`` or ``drop`` follows."""
        state = self._offloaded.get(stream)
        if state is None:
            return self._on_device.pop(stream)
        if isinstance(state, _OnHost):
            assert self._free, "one stream runs and one is uploaded: there are two staging buffers"
            state = self._upload(stream, state)
        self._device.streams.order(state.transfer.done, Wait.ACTIVATIONS_UPLOADED)
        return state.packing.activations(state.buffer.memory)

    def put(self, stream: int, activations: Activations) -> None:
        """Store the output of a stream's forward."""
        state = self._offloaded.get(stream)
        if state is None:
            self._on_device[stream] = activations
            return
        assert isinstance(state, _Staged), "activations are put after they were taken"
        self._offload(stream, activations, state.buffer, state.packing.extents, state.memory)
        self._free.append(state.buffer)

    def drop(self, stream: int) -> None:
        """Drop a stream's activations, after its last forward was issued."""
        state = self._offloaded.pop(stream, None)
        if isinstance(state, _Staged):
            state.buffer.last_uses = {Wait.STAGING_READ: self._device.streams.mark()}
            self._free.append(state.buffer)

    def _upload(self, stream: int, state: _OnHost) -> _Staged:
        """Start to upload activations into a free staging buffer."""
        buffer, nbytes = self._free[0], state.packing.nbytes
        self._grow(buffer, nbytes)
        after = {Wait.ACTIVATIONS_OFFLOADED: state.offloaded, **buffer.last_uses}
        transfer = self._copy(Lane.ACTIVATIONS_IN, stream, buffer.memory[:nbytes], state.memory[:nbytes], after)
        self._free.popleft()
        buffer.last_uses = {}
        self._offloaded[stream] = staged = _Staged(state.memory, state.packing, buffer, transfer)
        return staged

    def _offload(
        self, stream: int, activations: Activations, buffer: _StagingBuffer, extents: Sequence[_Extent], memory: torch.Tensor
    ) -> None:
        """Pack activations into a staging buffer and start to offload them; the buffer may be used again afterwards."""
        streams = self._device.streams
        packing, sources = self._packed(activations, buffer, extents)
        nbytes = packing.nbytes
        if len(memory) < nbytes:
            memory = self._host_memory(nbytes)
        self._grow(buffer, nbytes)
        for why, event in buffer.last_uses.items():
            streams.order(event, why)
        self._fill(buffer.memory, packing.extents, sources)
        after = {Wait.COMPUTED: streams.mark()}
        transfer = self._copy(Lane.ACTIVATIONS_OUT, stream, memory[:nbytes], buffer.memory[:nbytes], after)
        buffer.last_uses = {Wait.STAGING_OFFLOADED: transfer.done}
        self._offloaded[stream] = _OnHost(memory, packing, transfer.done)

    def _stays(self, activations: Activations, forward_bytes: int) -> bool:
        """Whether a new stream stays on the device, if all later streams are as large."""
        assert self._allowed is not None
        nbytes, expected = storage_bytes(activations), self._expected
        self._expected -= 1
        allowed = self._allowed - self._kept_bytes - forward_bytes - self.staging_bytes
        staging = max(STAGING_BUFFERS * nbytes - self.staging_bytes, 0)
        stays = streams_on_device(expected, nbytes, allowed, staging=staging, some_offloaded=bool(self._offloaded)) > 0
        self._kept_bytes += nbytes if stays else 0
        return stays

    def _packed(
        self, activations: Activations, buffer: _StagingBuffer, extents: Sequence[_Extent]
    ) -> tuple[_Packing, list[torch.Tensor]]:
        """Assign each storage an extent of a staging buffer."""
        storages: dict[int, tuple[_Extent, torch.Tensor]] = {}  # new extent and present bytes, by present address

        def packed(tensor: torch.Tensor) -> _PackedTensor:
            source = _bytes_of(tensor, buffer, extents)
            address = source.data_ptr()
            if address not in storages:
                start = _end([extent for extent, _ in storages.values()])
                storages[address] = (_Extent(start, len(source)), source)
            start = storages[address][0].start + tensor.data_ptr() - address
            return _PackedTensor(start, tensor.dtype, tensor.size(), tensor.stride())

        values, nesting = flattened(activations)
        values = [packed(value) if self._is_on_device(value) else value for value in values]
        packing = _Packing(values, nesting, [extent for extent, _ in storages.values()])
        return packing, [source for _, source in storages.values()]

    def _is_on_device(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.device == self._device.torch_device and value.numel() > 0

    def _fill(self, memory: torch.Tensor, extents: Sequence[_Extent], sources: Sequence[torch.Tensor]) -> None:
        """Issue the copies of all bytes to their extents, except those that are already there."""
        targets = [memory[extent.start : extent.start + extent.nbytes] for extent in extents]
        copies = [(to, source) for to, source in zip(targets, sources, strict=True) if to.data_ptr() != source.data_ptr()]
        address = memory.untyped_storage().data_ptr()
        copies = [(to, src.clone() if src.untyped_storage().data_ptr() == address else src) for to, src in copies]
        for to, source in copies:
            to.copy_(source)

    def _grow(self, buffer: _StagingBuffer, nbytes: int) -> None:
        if len(buffer.memory) >= nbytes:
            return
        for why, event in buffer.last_uses.items():  # before the memory is freed
            self._device.streams.wait(event, why)
        with torch.inference_mode(mode=False):  # copies may be done by other threads
            buffer.memory = self._device.empty(nbytes)
        # The host may have freed this memory while compute that was issued before still uses it.
        buffer.last_uses = {Wait.STAGING_READ: self._device.streams.mark()}

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory for the rest of the sweep."""
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


def streams_on_device(streams: int, nbytes: int, allowed: int, *, staging: int, some_offloaded: bool = False) -> int:
    """Return how many streams' activations stay on a device if as few as possible are offloaded."""
    if not some_offloaded and streams * nbytes <= allowed:
        return streams
    return max(min((allowed - staging) // nbytes, streams), 0) if nbytes else streams


def _bytes_of(tensor: torch.Tensor, buffer: _StagingBuffer, extents: Sequence[_Extent]) -> torch.Tensor:
    """Return the storage of a tensor as uint8. A storage in the staging buffer is one of the extents."""
    storage = tensor.untyped_storage()
    if extents and storage.data_ptr() == buffer.memory.untyped_storage().data_ptr():
        offset = tensor.data_ptr() - buffer.memory.data_ptr()
        extent = next(extent for extent in extents if extent.start <= offset < extent.start + extent.nbytes)
        return buffer.memory[extent.start : extent.start + extent.nbytes]
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _end(extents: Sequence[_Extent]) -> int:
    return max((aligned(extent.start + extent.nbytes) for extent in extents), default=0)
