"""Inputs of blocks in host memory, for a device with memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zo2core.io.direct_file import whole_pages
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import Device, Streams, Transfer, Wait
from zo2core.types import Lane


class _Copy(NamedTuple):
    """Where a storage's bytes are on the host."""

    storage: torch.UntypedStorage
    host: torch.Tensor


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


class InputOffload:
    """Copies inputs to the host's memory and back, while the device computes.

    Device memory is freed and taken in the order of compute: what is freed is used only by compute that is issued later, and
    what is taken may still be read by compute that was issued before.

    Args:
        device: Where forwards run. Its memory on the host is kept for later sweeps, and given back with the device.
        timeline: Records every copy.
    """

    def __init__(self, device: Device, timeline: Timeline) -> None:
        self.device = device
        self._timeline = timeline
        self._copies: dict[str, list[_Copy]] = {}
        self._transfers: list[Transfer] = []
        self._free: list[torch.Tensor] = []  # host memory that no input has
        self._used: list[torch.Tensor] = []

    def send(self, name: str, storages: Sequence[torch.UntypedStorage]) -> _Departure:
        """Start copying storages to the host. See the contract."""
        self._copies[name] = [_Copy(storage, self._host_memory(storage.nbytes())) for storage in storages]
        made = {Wait.COMPUTED: self.device.streams.mark()}
        copies = self._copies[name]
        transfers = [
            self.device.streams.copy(Lane.ACTIVATIONS_OUT, host, self._bytes_of(storage), made) for storage, host in copies
        ]
        return _Departure(self, self._noted(Lane.ACTIVATIONS_OUT, name, transfers), copies)

    def bring(self, name: str) -> _Transit:
        """Start copying back. See the contract."""
        copies = self._copies.pop(name)
        for storage, host in copies:
            self.resize(storage, len(host))
        # The storage's memory may have been freed while compute issued before is still at work in it. The copies to the host
        # are over by then as well: compute waits for them.
        read = {Wait.STAGING_READ: self.device.streams.mark()}
        transfers = [
            self.device.streams.copy(Lane.ACTIVATIONS_IN, self._bytes_of(storage), host, read) for storage, host in copies
        ]
        return _Transit(self.device.streams, self._noted(Lane.ACTIVATIONS_IN, name, transfers), Wait.ACTIVATIONS_UPLOADED)

    def clear(self) -> None:
        """Forget all inputs, after all copies. See the contract."""
        for transfer in self._transfers:
            self.device.streams.wait(transfer.done, Wait.ACTIVATIONS_UPLOADED)
        self._transfers.clear()
        self._copies.clear()
        self._free += self._used
        self._used.clear()

    def close(self) -> None:
        """Forget all memory. May be called twice."""
        self.clear()
        self._free.clear()

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free a storage's memory, or take some again."""
        storage.resize_(nbytes)

    def _bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory that no other input of this sweep has."""
        fitting = [number for number, memory in enumerate(self._free) if len(memory) >= nbytes]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda number: len(self._free[number])))
        else:
            memory = self.device.host_memory(whole_pages(nbytes))
        self._used.append(memory)
        return memory[:nbytes]

    def _noted(self, lane: Lane, name: str, transfers: Sequence[Transfer]) -> Sequence[Transfer]:
        self._transfers += transfers
        for transfer in transfers:
            self._timeline.note(lane, name, transfer.started, transfer.done, transfer.source.numel())
        return transfers
