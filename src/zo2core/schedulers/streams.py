"""Queues of work: of the CPU, where nothing is in flight, and the streams of a CUDA GPU.

No other module uses CUDA streams and events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from zo2core.protocols import Transfer, Wait
from zo2core.schedulers.profiling import now
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
        return now()

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
            self._lanes: dict[Lane, Any] = {lane: torch.cuda.Stream() for lane in lanes}  # type: ignore[no-untyped-call]
            self._clock = _Clock()

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]
    ) -> Transfer:
        """Start a copy between page-locked memory and the GPU, after events."""
        stream = self._lanes[lane]
        for event in after.values():
            stream.wait_event(_recorded(event))
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
        torch.cuda.current_stream(self._index).wait_event(_recorded(event))

    def wait(self, event: Event, why: Wait) -> None:
        """Block the host until an event has passed."""
        _recorded(event).synchronize()

    def drain(self) -> None:
        """Wait for all work of the GPU."""
        torch.cuda.synchronize(self._index)


def _recorded(event: Event) -> Any:
    assert isinstance(event, CudaEvent), "events of one device order the work of that device"
    return event.recorded
