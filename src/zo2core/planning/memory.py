"""A memory plan: its parts in bytes and its budget.

The properties of a machine on which a plan depends.

Free host memory, from the system and from the control groups that limit this process.

Host memory plan: the parts of a run in host memory and their sizes, decided before anything is allocated.

Device memory plan: as many blocks stay on the device as fit beside what every sweep needs.

Activations come first. A block that stays saves one upload and offload a sweep; activations that stay save them at each
block.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from zo2core.errors import MemoryBudgetError, OptionError
from zo2core.io.direct_file import STAGING, whole_pages
from zo2core.io.process_memory import memory_in_use
from zo2core.io.process_memory import resident_memory as resident_memory
from zo2core.kernels.low_bit import low_bit_bytes, low_bit_layout
from zo2core.noise.choice import SCRATCH, drawn_bytes, noise_bytes
from zo2core.protocols import CounterNoise, NoiseGenerator
from zo2core.schedulers.overlapped import SLOTS
from zo2core.sources.loader import READERS
from zo2core.sources.segment_store import READ_AHEAD
from zo2core.types import BlockLayout, shown_bytes, unrounded_bytes, work_bytes

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


_UNITS = {"": 1, "B": 1} | {f"{prefix}{unit}": base ** (i + 1) for i, prefix in enumerate("KMGT") for unit, base in (
    ("B", 1000), ("iB", 1024), ("", 1024)
)}  # fmt: skip
_MOST = float(2**63)  # bytes, the size of the address space


def parse_size(size: int | str, *, option: str = "memory") -> int:
    """Parse a size such as ``6GiB``, ``500MB``, ``1.5 GiB`` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", str(size).strip())
    nbytes = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0.0
    if not 1 <= nbytes < _MOST:
        raise OptionError(
            option,
            found=reprlib.repr(size),
            expected="a size such as 6GiB or 500MB, or 'auto' for memory",
            remedy="pass a number of bytes, or one with a unit such as GiB",
        )
    return int(nbytes)


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


# Note: Headroom. The allocators of Python and torch keep more memory than is counted here, and other programs may allocate
# some meanwhile.
AUTO_SHARE = 0.9  # of the free memory

MOST_USEFUL_BUCKETS = 1 + READ_AHEAD  # further buckets only keep blocks from sweep to sweep


@dataclass(frozen=True)
class HostPlan(MemoryPlan):
    """How a run uses host memory; the sum of its parts is the expected peak of the process's resident bytes."""

    buckets: int | None  # number of buckets that blocks share; None: every block has one of its own
    keep_noise: bool  # z stays in memory from one evaluation to the next


def plan_host(
    layouts: Sequence[BlockLayout],
    streamed: Sequence[BlockLayout],
    machine: Machine = Machine(),
    *,
    memory: int | str = "auto",
    activation_bytes: int,
    may_keep_noise: bool = True,
    perturbs_in_place: bool = True,
    further: Sequence[MemoryPart] = (),
    stays_in_memory: bool = False,
    most_buckets: int | None = None,
    streams: bool = False,
) -> HostPlan:
    """Choose the fastest plan that fits: all blocks resident, else as many buckets as fit; z stays in memory if it fits."""
    process = memory_in_use()
    budget = process + int(AUTO_SHARE * free_memory() / machine.neighbours) if memory == "auto" else parse_size(memory)
    blocks = sum(not layout.resident for layout in layouts)
    work, noise = (work_bytes(layouts), noise_bytes(layouts)) if machine.on_host else (0, 0)
    work += unrounded_bytes(layouts, perturbs_in_place=perturbs_in_place) + low_bit_bytes(layouts) if machine.on_host else 0

    def plan_with(buckets: int | None, *, keep_noise: bool) -> HostPlan:
        used = layouts if buckets is None else streamed
        sizes = [whole_pages(layout.nbytes) for layout in used if not layout.resident]
        resident = sum(whole_pages(layout.nbytes) for layout in used if layout.resident)
        in_buckets = sum(sizes) if buckets is None else buckets * max(sizes, default=0)
        noise_buffer = [MemoryPart("noise buffer", noise)] if keep_noise else []
        if may_keep_noise and not keep_noise:
            noise_buffer = [MemoryPart("no noise buffer: z is drawn again", 0)]
        parts = (
            MemoryPart("this process at present", process),
            MemoryPart("activations, reserved", activation_bytes),
            MemoryPart("embedding and head", resident),
            MemoryPart(f"{blocks if buckets is None else buckets} of {blocks} blocks", in_buckets),
            MemoryPart("work buffer", work),
            *noise_buffer,
            *(part for part in further if part.nbytes),
            MemoryPart("reading buffers", READERS * STAGING),
        )
        return HostPlan(parts, budget, buckets, keep_noise)

    choices: list[tuple[int | None, bool]] = [(None, True), (None, False)]
    choices += [(buckets, True) for buckets in range(blocks - 1, 1, -1)]
    choices += [(buckets, False) for buckets in range(min(MOST_USEFUL_BUCKETS, blocks - 1), 0, -1)]
    if not may_keep_noise:
        choices = [(buckets, False) for buckets in (None, *range(blocks - 1, 0, -1))]
    if stays_in_memory:
        choices = [choice for choice in choices if choice[0] is None]
    if most_buckets is not None:
        choices = [choice for choice in choices if choice[0] is None or choice[0] <= most_buckets]
    if streams:
        choices = [choice for choice in choices if choice[0] is not None and choice[0] > 1] or [(min(2, blocks), False)]
    for buckets, keep_noise in choices:
        plan = plan_with(buckets, keep_noise=keep_noise)
        if plan.nbytes <= budget:
            return plan
    raise plan.too_large("memory", "free memory, allow more, or take smaller batches or a 16-bit dtype")


DEVICE_SHARE = 0.95  # of the free memory; the rest is left to the allocator
_SCRATCHES = 3  # buffers: replay, weight decay, perturbation


@dataclass(frozen=True)
class DevicePlan(MemoryPlan):
    """How a run uses a device's memory."""

    kept: int  # blocks that stay; the others pass through two slots
    activation_bytes: int  # for forwards and activations; activations that do not fit wait in host memory


def plan_device_memory(
    layouts: Sequence[BlockLayout],
    noise: NoiseGenerator,
    *,
    memory: int | str = "auto",
    free: int,
    activation_bytes: int,
    least_activation_bytes: int | None = None,
    perturbs_in_place: bool = True,
    probes: int = 1,
    is_low_bit: bool = False,
    further: Sequence[MemoryPart] = (),
) -> DevicePlan:
    """Keep as many blocks on the device as fit."""
    budget = int(DEVICE_SHARE * free) if memory == "auto" else parse_size(memory, option="device_memory")
    blocks = [layout.nbytes for layout in layouts if not layout.resident]
    largest = max(blocks, default=0)
    transferred = [low_bit_layout(layout) if is_low_bit else layout for layout in layouts if not layout.resident]
    slot = max((layout.nbytes for layout in transferred), default=0)
    drawn = 0 if isinstance(noise, CounterNoise) else drawn_bytes(layouts, noise)
    itemsize = max(spec.dtype.itemsize for layout in layouts for spec in layout.parameters)
    scratch = 0 if isinstance(noise, CounterNoise) else _SCRATCHES * min(SCRATCH * itemsize, drawn)
    least = activation_bytes if least_activation_bytes is None else min(least_activation_bytes, activation_bytes)

    def plan_with(kept: int, activations: int) -> DevicePlan:
        moving = len(blocks) - kept
        slots = min(SLOTS, moving)
        parts = (
            MemoryPart("embedding and head", sum(layout.nbytes for layout in layouts if layout.resident)),
            MemoryPart(f"{slots} slots for {moving} blocks", slots * slot),
            MemoryPart(f"{kept} blocks that stay", kept * largest),
            MemoryPart(
                "work buffer",
                work_bytes(layouts) + unrounded_bytes(layouts, perturbs_in_place=perturbs_in_place) + low_bit_bytes(layouts),
            ),
            MemoryPart("noise as it is drawn", (probes + 1) * drawn + scratch),
            *(part for part in further if part.nbytes),
            MemoryPart("activations, reserved", activations),
        )
        return DevicePlan(parts, budget, kept, activations)

    for kept in range(len(blocks), -1, -1):
        if (plan := plan_with(kept, activation_bytes)).nbytes <= budget:
            return plan
    smallest = plan_with(0, least)
    if smallest.nbytes <= budget:
        return plan_with(0, least + budget - smallest.nbytes)
    raise smallest.too_large("device_memory", "use a larger device, smaller batches, a loss in chunks, or a 16-bit dtype")
