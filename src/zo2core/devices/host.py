"""The CPU as compute device: segments are computed in their buckets, without copies."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch

from zo2core.io.direct_file import anonymous_memory
from zo2core.profiling.timeline import now
from zo2core.protocols import Transfer, Wait
from zo2core.types import Event, Lane


class HostStreams:
    """Does all work at once, so that nothing is ever in flight."""

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]) -> Transfer:
        """Copy now. See the contract."""
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


class HostDevice:
    """Computes in the buckets' memory."""

    def __init__(self) -> None:
        self._streams = HostStreams()

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def in_place(self) -> bool:
        """Always true."""
        return True

    @property
    def streams(self) -> HostStreams:
        """Streams that do all work at once."""
        return self._streams

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-aligned memory of exactly this size. Pages take memory once they are touched."""
        return torch.frombuffer(anonymous_memory(nbytes), dtype=torch.uint8)[:nbytes]

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory, which is also the device's."""
        return self.host_memory(nbytes)

    def free_memory(self) -> int:
        """Return the system's available memory, in bytes."""
        return psutil.virtual_memory().available

    def close(self) -> None:
        """Do nothing: memory is freed with its tensors."""
