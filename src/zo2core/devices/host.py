"""The CPU as compute device: segments are computed on where they lie, nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch

from zo2core.io.page_memory import anonymous_memory
from zo2core.profiling.timeline import Timeline, now
from zo2core.protocols import Transfer, Wait
from zo2core.types import Event, Lane


class HostStreams:
    """The host does everything itself, at once: nothing is ever in flight."""

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]) -> Transfer:
        """Copy. See the contract."""
        begun = now()
        target.copy_(source)
        return Transfer(target, source, begun, now())

    def mark(self) -> Event:
        """The present moment."""
        return now()

    def order(self, event: Event, why: Wait) -> None:
        """Nothing: events have passed when they are made."""

    def wait(self, event: Event, why: Wait) -> None:
        """Nothing: events have passed when they are made."""


class HostDevice:
    """Computes on the buckets' own memory."""

    def __init__(self) -> None:
        self._timeline = Timeline()
        self._streams = HostStreams()

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def in_place(self) -> bool:
        """Always."""
        return True

    @property
    def timeline(self) -> Timeline:
        """What was done when."""
        return self._timeline

    @property
    def streams(self) -> HostStreams:
        """The host's own order of work."""
        return self._streams

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate anonymous memory of exactly this size, page-aligned. Pages take room once they are touched."""
        return torch.frombuffer(anonymous_memory(nbytes), dtype=torch.uint8)[:nbytes]

    def empty(self, nbytes: int) -> torch.Tensor:
        """The same as host memory: here they are one."""
        return self.host_memory(nbytes)

    def free_memory(self) -> int:
        """What the system has."""
        return psutil.virtual_memory().available

    def close(self) -> None:
        """Nothing: memory goes with its tensors."""
