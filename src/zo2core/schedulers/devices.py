"""Compute devices: the CPU, which computes in the buckets, and a CUDA GPU; and their streams.

No other module uses CUDA streams and events.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil
import torch

from zo2core.errors import DeviceError
from zo2core.io.direct_file import anonymous_memory
from zo2core.protocols import Device, Transfer, Wait
from zo2core.ranges import require_device_name
from zo2core.schedulers.profiling import PastEvent, now
from zo2core.types import Event, Lane


class HostStreams:
    """``Streams`` of the host, which does all work at once: nothing is ever in flight."""

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]
    ) -> Transfer:
        """Copy now."""
        start = now()
        target.copy_(source)
        return Transfer(target, source, start, now())

    def mark(self) -> Event:
        """Return the present moment: all compute issued so far is done."""
        return PastEvent(time.perf_counter())

    def order(self, event: Event, why: Wait) -> None:
        """Do nothing: events have passed when they are made."""

    def wait(self, event: Event, why: Wait) -> None:
        """Do nothing: events have passed when they are made."""


# size of one copy, after which a copy engine may serve another queue: a few milliseconds
_COPY_BYTES = 64 << 20


class _Clock:
    """Converts times of GPU events to the host's clock; the two clocks are compared once."""

    def __init__(self) -> None:
        self.origin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.origin.record()
        self.origin.synchronize()
        self.seconds = time.perf_counter()


class CudaEvent:
    """A point in a stream."""

    def __init__(self, clock: _Clock, stream: Any) -> None:
        self._clock = clock
        self.recorded: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.recorded.record(stream)

    @property
    def passed(self) -> bool:
        """Whether the stream has reached this point. Does not block."""
        return bool(self.recorded.query())

    @property
    def seconds(self) -> float:
        """The time at which the stream reached it, on the clock of ``time.perf_counter``."""
        # from milliseconds
        return self._clock.seconds + float(self._clock.origin.elapsed_time(self.recorded)) / 1e3


class CudaStreams:
    """``Streams`` of one GPU: one a lane for copies, besides the stream that torch computes in."""

    def __init__(self, index: int) -> None:
        self._index = index
        with torch.cuda.device(index):
            # One copy engine uploads while kernels run, a second one offloads. Activations have
            # their own streams, so that they need not wait for a whole block.
            lanes = (Lane.UPLOAD, Lane.OFFLOAD, Lane.ACTIVATIONS_IN, Lane.ACTIVATIONS_OUT)
            self._lanes: dict[Lane, Any] = {
                lane: torch.cuda.Stream()  # type: ignore[no-untyped-call]
                for lane in lanes
            }
            self._clock = _Clock()

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]
    ) -> Transfer:
        """Start a copy between page-locked memory and the GPU, after events."""
        stream = self._lanes[lane]
        for event in after.values():
            stream.wait_event(_cuda_event(event))
        start = CudaEvent(self._clock, stream)
        with torch.cuda.stream(stream):
            for to, origin in zip(
                torch.split(target, _COPY_BYTES), torch.split(source, _COPY_BYTES), strict=True
            ):
                to.copy_(origin, non_blocking=True)
        return Transfer(target, source, start, CudaEvent(self._clock, stream))

    def mark(self) -> Event:
        """Record an event in the stream that torch computes in."""
        return CudaEvent(self._clock, torch.cuda.current_stream(self._index))

    def order(self, event: Event, why: Wait) -> None:
        """Let the stream that torch computes in wait for an event; the host does not wait."""
        torch.cuda.current_stream(self._index).wait_event(_cuda_event(event))

    def wait(self, event: Event, why: Wait) -> None:
        """Block the host until an event has passed."""
        _cuda_event(event).synchronize()

    def drain(self) -> None:
        """Wait for all work of the GPU."""
        torch.cuda.synchronize(self._index)


def _cuda_event(event: Event) -> Any:
    assert isinstance(event, CudaEvent), "events of one device order the work of that device"
    return event.recorded


class HostDevice:
    """Computes in the buckets' memory."""

    torch_device = torch.device("cpu")
    in_place = True
    streams = HostStreams()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-aligned memory of exactly this size.

        Pages take memory once they are touched.
        """
        return torch.frombuffer(anonymous_memory(nbytes), dtype=torch.uint8)[:nbytes]

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory, which is also the device's."""
        return self.host_memory(nbytes)

    def free_memory(self) -> int:
        """Return the system's available memory, in bytes."""
        return psutil.virtual_memory().available

    def close(self) -> None:
        """Do nothing: memory is freed with its tensors."""


class CudaDevice:
    """Memory and queues of one GPU.

    Args:
        index: Number of the GPU.

    Raises:
        DeviceError: if there is no such GPU.
    """

    in_place = False  # kernels do not access host memory

    def __init__(self, index: int = 0) -> None:
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise DeviceError(
                f"cuda:{index}",
                found=f"{count} CUDA device(s)",
                expected="that GPU and a torch built for CUDA",
                remedy="leave `device` out to compute on the CPU, or install torch for CUDA",
            )
        self.torch_device = torch.device("cuda", index)
        self.streams = CudaStreams(index)
        self._locked: list[torch.Tensor] = []
        # Locking fails at an address that was unmapped and mapped again while CUDA still takes it
        # for locked. So a device that was not closed also unlocks its memory before it is freed.
        self._unlock = weakref.finalize(self, _unlock, self.streams, self._locked)
        self._unlock.atexit = False

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked memory of exactly this size.

        torch's own allocator would round up to a power of two (pytorch issue 150517): 576 GiB
        instead of 324 for the blocks of OPT-175B.

        Raises:
            DeviceError: if the memory cannot be locked.
        """
        arena = torch.frombuffer(anonymous_memory(nbytes), dtype=torch.uint8)
        with torch.cuda.device(self.torch_device):
            code = _cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0)
        if int(code) != 0:
            _clear_error(self.torch_device)
            raise DeviceError(
                str(self.torch_device),
                found=f"cudaHostRegister failed with code {int(code)} for {nbytes} bytes",
                expected="enough host memory that may be locked",
                remedy="free memory, or raise the limit that `ulimit -l` shows",
            )
        self._locked.append(arena)
        return arena[:nbytes]

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate uninitialised memory on the GPU."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free_memory(self) -> int:
        """Return the driver's free memory and torch's unused cache, in bytes."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(
            self.torch_device
        )
        return free + cached

    def close(self) -> None:
        """Wait for the GPU and unlock all memory."""
        _unlock(self.streams, self._locked)


def _unlock(streams: CudaStreams, locked: list[torch.Tensor]) -> None:
    if locked:
        streams.drain()
    while locked:
        arena = locked.pop()  # mapped until it is unlocked
        _cudart().cudaHostUnregister(arena.data_ptr())


def _clear_error(device: torch.device) -> None:
    """Launch a kernel that takes CUDA's last error, which the next launch would raise otherwise."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def choose_device(device: Device | str) -> Device:
    """Make the device with a name: "cpu", "cuda" or "cuda:N". A device is returned unchanged."""
    if not isinstance(device, str):
        return device
    if device == "cpu":
        return HostDevice()
    require_device_name(device)
    return CudaDevice(int(device.partition(":")[2] or 0))
