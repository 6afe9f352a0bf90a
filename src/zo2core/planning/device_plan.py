"""Which blocks stay on the device: as many as its memory holds beside what every sweep needs.

Activations come first. A block that stays saves one way there and back a sweep; activations save that at every block.
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

AUTO_SHARE = 0.95  # of the free memory; the rest is the allocator's
_SCRATCHES = 3  # replay, decay, move


@dataclass(frozen=True)
class DevicePlan(MemoryPlan):
    """A way to use a device's memory."""

    kept: int  # blocks that stay; the others pass through two slots
    activation_bytes: int  # for forwards and activations; what does not fit waits in host memory


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
    factors: int = 0,
    trained: int = 0,
) -> DevicePlan:
    """Keep as many blocks on the device as fit.

    Args:
        layouts: Segments in visiting order.
        noise: Says how much of z is drawn at a time.
        memory: Bytes of the device that may be used, or a size ("8GiB"); "auto" takes what is free.
        free: Bytes of the device that are free.
        activation_bytes: Bytes that activations and logits take; reserved if they fit.
        least_activation_bytes: Bytes that they take if all but the streams at work wait in host memory; None: they cannot.
        perturbs_in_place: Whether evaluations walk from one to the next, which takes memory where the forward's weights
            are rounded.
        probes: Directions of an update: their z are held together while it is replayed.
        is_low_bit: Whether blocks that pass through are in the slots as they are carried, and not as they are stored.
        factors: Bytes of the factors of directions beside the activations.
        trained: Bytes of trained parameters, their gradients and their optimizer's state.

    Raises:
        MemoryBudgetError: if the device is too small for any plan; it adds up what the smallest needs.
        OptionError: if ``memory`` is no size.
    """
    budget = int(AUTO_SHARE * free) if memory == "auto" else parse_size(memory, option="device_memory")
    blocks = [layout.nbytes for layout in layouts if not layout.resident]
    largest = max(blocks, default=0)
    passing = [low_bit_layout(layout) if is_low_bit else layout for layout in layouts if not layout.resident]
    slot = max((layout.nbytes for layout in passing), default=0)
    drawn = 0 if isinstance(noise, CounterNoise) else drawn_bytes(layouts, noise)
    itemsize = max(spec.dtype.itemsize for layout in layouts for spec in layout.parameters)
    scratch = 0 if isinstance(noise, CounterNoise) else _SCRATCHES * min(SCRATCH * itemsize, drawn)
    least = activation_bytes if least_activation_bytes is None else min(least_activation_bytes, activation_bytes)

    def counted(kept: int, activations: int) -> DevicePlan:
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
            *([MemoryPart("factors of directions", factors)] if factors else []),
            *([MemoryPart("trained parameters, gradients, optimizer", trained)] if trained else []),
            MemoryPart("activations, reserved", activations),
        )
        return DevicePlan(parts, budget, kept, activations)

    for kept in range(len(blocks), -1, -1):
        if (plan := counted(kept, activation_bytes)).nbytes <= budget:
            return plan
    smallest = counted(0, least)
    if smallest.nbytes <= budget:
        return counted(0, least + budget - smallest.nbytes)
    raise smallest.too_large("device_memory", "use a larger device, smaller batches, a loss in chunks, or a 16-bit dtype")
