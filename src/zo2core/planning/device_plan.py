"""Device memory plan: as many blocks stay on the device as fit beside what every sweep needs.

Activations come first. A block that stays saves one upload and offload a sweep; activations that stay save them at each
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zo2core.kernels.low_bit import low_bit_bytes, low_bit_layout
from zo2core.noise.sizes import SCRATCH, drawn_bytes
from zo2core.planning.host_budget import parse_size
from zo2core.planning.memory_plan import MemoryPart, MemoryPlan
from zo2core.protocols import CounterNoise, NoiseGenerator
from zo2core.schedulers.overlapped import SLOTS
from zo2core.types import BlockLayout, unrounded_bytes, work_bytes

AUTO_SHARE = 0.95  # of the free memory; the rest is left to the allocator
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
    budget = int(AUTO_SHARE * free) if memory == "auto" else parse_size(memory, option="device_memory")
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
