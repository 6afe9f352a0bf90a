"""What a run may take of memory and disks (the caller's policies), and plans of memory: parts in bytes and a budget.

Free host memory is that of the system and of the control groups that limit this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import psutil

from zo2core.errors import MemoryBudgetError
from zo2core.io.process_memory import resident_memory as resident_memory
from zo2core.protocols import Device
from zo2core.ranges import parse_size, require_number, require_whole
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


ACTIVATIONS = 256 << 20  # bytes reserved for activations by default


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """How much memory a run may take.

    Args:
        host: Total host memory of the process, in bytes or as a size ("6GiB"); "auto" uses the free memory. A ``HostPlan``
            is used as it is.
        device: Device memory of the run, in bytes or as a size; "auto" uses the free memory. A ``DevicePlan`` is used as it
            is.
        activations: Memory reserved for activations and logits, in host memory on the CPU and in device memory on a GPU. It
            limits how many batches of an evaluation run in one sweep.
        least_activations: Memory for activations if ``activations`` does not fit: on a device with memory of its own enough
            for the running streams, while those of the others wait in host memory; on the CPU, for first-order steps alone,
            enough for what is not written to disk. First-order steps also use it for what waits in host memory, if there is
            no room for more. None: all activations stay where forwards run.

    Raises:
        OptionError: if a value is not a size.
    """

    host: int | str | HostPlan = "auto"
    device: int | str | DevicePlan = "auto"
    activations: int | str = ACTIVATIONS
    least_activations: int | str | None = None

    def __post_init__(self) -> None:
        for option, size in (("memory.host", self.host), ("memory.device", self.device)):
            if isinstance(size, (int, str)) and size != "auto":
                parse_size(size, option=option)
        self.activation_bytes, self.least_activation_bytes  # noqa: B018 - raise OptionError now

    @property
    def activation_bytes(self) -> int:
        """Bytes reserved for activations."""
        return parse_size(self.activations, option="memory.activations")

    @property
    def least_activation_bytes(self) -> int | None:
        """Least device memory for activations in bytes; None: all of ``activation_bytes``."""
        least = self.least_activations
        return None if least is None else parse_size(least, option="memory.least_activations")


@dataclass(frozen=True, kw_only=True)
class WriteBackPolicy:
    """Whether and when changed segments are written to disk. The base checkpoint is never written.

    Args:
        directory: Directory of the scratch file or, with low-rank perturbations, of the factors of ended periods. A later
            engine resumes from it and the journal.
        every: A segment is written once it is this many steps ahead of its bytes on disk; "auto" measures noise and disk,
            and writes as seldom as costs at most a tenth of a step; None reads earlier files, and writes only as often as
            ``snapshot_every`` asks.
        snapshot_every: Most steps between two writes of a segment, which limits the replay of a resumed run.
        terabytes_per_1000_steps: Limit of writes in 1,000 steps, in units of 10^12 bytes: "auto" stays below it, and numbers
            above that exceed it are refused. None: no limit.

    Raises:
        OptionError: if a number is out of its range.
    """

    directory: Path | str
    every: int | Literal["auto"] | None = "auto"
    snapshot_every: int | None = None
    terabytes_per_1000_steps: float | None = None

    @property
    def is_automatic(self) -> bool:
        """Whether the caller set no interval: then writing may be left out."""
        return self.every in ("auto", None) and self.snapshot_every is None

    @property
    def bytes_a_step(self) -> float | None:
        """Most bytes a step that may be written without an explicit interval; None: no limit."""
        if self.every is None:
            return 0.0
        return None if self.terabytes_per_1000_steps is None else self.terabytes_per_1000_steps * 1e9

    def __post_init__(self) -> None:
        limit, remedy = self.terabytes_per_1000_steps, "pass a limit above 0; every=None writes nothing"
        if limit is not None:
            require_number("write_back.terabytes_per_1000_steps", limit, above=0, remedy=remedy)
        if self.every not in (None, "auto"):
            require_whole("write_back.every", self.every, 1, otherwise=", 'auto' or None")
        if self.snapshot_every is not None:
            require_whole("write_back.snapshot_every", self.snapshot_every, 1, otherwise=", or None")
