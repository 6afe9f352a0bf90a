"""Host memory plan: the parts of a run in host memory and their sizes, decided before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zo2core.io.direct_file import STAGING, whole_pages
from zo2core.io.process_memory import memory_in_use
from zo2core.kernels.low_bit import low_bit_bytes
from zo2core.noise.sizes import noise_bytes
from zo2core.planning.host_budget import free_memory, parse_size
from zo2core.planning.machine import Machine
from zo2core.planning.memory_plan import MemoryPart, MemoryPlan
from zo2core.sources.loader import READERS
from zo2core.sources.reading_order import READ_AHEAD
from zo2core.types import BlockLayout, unrounded_bytes, work_bytes

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
    machine: Machine = Machine(),  # noqa: B008 - frozen
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
