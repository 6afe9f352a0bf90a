"""A memory plan: its parts in bytes and its budget; the properties of a machine on which it depends.

Free host memory is that of the system and of the control groups that limit this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from zo2core.errors import MemoryBudgetError
from zo2core.io.process_memory import resident_memory as resident_memory
from zo2core.protocols import Device
from zo2core.sources.segment_store import READ_AHEAD
from zo2core.types import shown_bytes

MOST_USEFUL_BUCKETS = 1 + READ_AHEAD  # further buckets only keep blocks from sweep to sweep
_ENOUGH = 1.01  # times the smallest plan


@dataclass(frozen=True)
class MemoryPart:
    """One line of a plan."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Parts of a run in a memory, and the budget that they have to fit into."""

    parts: tuple[MemoryPart, ...]
    budget: int  # bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self.parts)

    @property
    def spare(self) -> int:
        """Unused bytes of the budget."""
        return self.budget - self.nbytes

    def table(self) -> str:
        """The parts, one a line, their sum and the budget."""
        rows = [*self.parts, MemoryPart("together", self.nbytes), MemoryPart("allowed", self.budget)]
        width = max(len(row.name) for row in rows)
        return "\n".join(f"{row.name:{width}s} {shown_bytes(row.nbytes):>10s}" for row in rows)

    def too_large(self, option: str, remedy: str) -> MemoryBudgetError:
        """The error for a smallest plan that does not fit.

        The least that it tells is a little more: the text is rounded, and a process has not the same size every time.
        """
        parts = ", ".join(f"{part.name} {shown_bytes(part.nbytes)}" for part in self.parts)
        return MemoryBudgetError(
            option,
            found=shown_bytes(self.budget),
            expected=f"at least {shown_bytes(_ENOUGH * self.nbytes)}, a little more than the smallest plan: {parts}",
            remedy=remedy,
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of the machine on which a plan depends.

    Args:
        in_place: Whether segments are computed on in their buckets, in host memory.
        on_host: Whether the device's memory is host memory: on the CPU, also with simulated copies.
        device_free: Returns the free device memory in bytes.
        neighbours: Number of workers on this host, which divide the free memory.
    """

    in_place: bool = True
    on_host: bool = True
    device_free: Callable[[], int] = lambda: 0
    neighbours: int = 1

    @classmethod
    def of(cls, device: Device, neighbours: int = 1) -> Self:
        """The machine of a device."""
        on_host, free = device.torch_device.type == "cpu", device.free_memory
        return cls(in_place=device.in_place, on_host=on_host, device_free=free, neighbours=neighbours)


@dataclass(frozen=True)
class HostPlan(MemoryPlan):
    """How a run uses host memory; the sum of its parts is the expected peak of the process's resident bytes."""

    buckets: int | None  # number of buckets that blocks share; None: every block has one of its own
    keep_noise: bool  # z stays in memory from one evaluation to the next


@dataclass(frozen=True)
class DevicePlan(MemoryPlan):
    """How a run uses a device's memory."""

    kept: int  # blocks that stay; the others pass through two slots
    activation_bytes: int  # for forwards and activations; activations that do not fit wait in host memory


def free_memory(*, root: Path = Path("/")) -> int:
    """Bytes of host memory that this process can still allocate without being killed or swapped."""
    return min([psutil.virtual_memory().available, *_control_groups_free(root)])


def _control_groups_free(root: Path) -> Iterator[int]:
    """Yield the bytes left by each limit on this process; the kernel frees page cache first, so it counts as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            yield from _group_free(
                root / "sys/fs/cgroup", path, "memory.max", "memory.current", ("inactive_file", "active_file")
            )
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _group_free(root / "sys/fs/cgroup/memory", path, *names, ("total_inactive_file", "total_active_file"))


def _group_free(top: Path, path: str, limit_name: str, usage_name: str, cache_names: tuple[str, ...]) -> Iterator[int]:
    """Yield the bytes left in this group and those above it; in the top one if a container hides the path."""
    group = top / path.lstrip("/")
    groups = [group, *group.parents] if group.is_dir() else [top]
    for nested in groups:
        if nested != top and top not in nested.parents:
            return
        try:
            limit = int((nested / limit_name).read_text())
            usage = int((nested / usage_name).read_text())
            stat = dict(line.split() for line in (nested / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # "max", or no limit at this level
        cache = sum(int(stat.get(name, 0)) for name in cache_names)
        yield max(limit - usage + cache, 0)
