"""The schedulers of the variants in the ablation, and the noises to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from paper_tables import Variant

from zo2core import Distribution, OverlappedScheduler, PhiloxNoise, SequentialNoise, SerialScheduler
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockSource, Device, NoiseGenerator, Scheduler
from zo2core.types import BlockLayout

Noise = Callable[[Sequence[BlockLayout], torch.device], NoiseGenerator]
NOISES: dict[str, Noise] = {
    "sequential": SequentialNoise,
    "philox-gaussian": lambda layouts, device: PhiloxNoise(Distribution.GAUSSIAN),
    "philox-rademacher": lambda layouts, device: PhiloxNoise(Distribution.RADEMACHER),
}


class AllocatingScheduler(OverlappedScheduler):
    """Allocates device memory for each block that arrives, and frees it when the block has left.

    Freeing waits for all uses of the memory, as ``cudaFree`` does. On a GPU torch's whole cache is emptied, so that the
    memory returns to the driver.
    """

    def _bring(self, index: int) -> Any:
        if not self._device.in_place and index not in self._own:
            slot, nothing = self._free[0], torch.empty(0, dtype=torch.uint8)
            for why, event in slot.last_uses.items():
                self._device.streams.wait(event, why)
            self._release_arrived()
            nbytes, slot.memory, slot.last_uses = len(slot.memory), nothing, {}
            if self._device.torch_device.type == "cuda":
                torch.cuda.empty_cache()
            slot.memory = self._device.empty(nbytes)
        return super()._bring(index)


def _all_kept(source: BlockSource, device: Device, timeline: Timeline) -> OverlappedScheduler:
    blocks = sum(not layout.resident for layout in source.layouts)
    return OverlappedScheduler(source, device, kept=blocks, timeline=timeline)


def _overlapped(source: BlockSource, device: Device, timeline: Timeline) -> OverlappedScheduler:
    return OverlappedScheduler(source, device, timeline=timeline)


SCHEDULERS: dict[Variant, Callable[[BlockSource, Device, Timeline], Scheduler]] = {
    Variant.FULL: _overlapped,  # keeps no block on the device, like the paper's
    Variant.SERIAL: lambda source, device, timeline: SerialScheduler(source, device, timeline=timeline),
    Variant.ALLOCATING: lambda source, device, timeline: AllocatingScheduler(source, device, timeline=timeline),
    Variant.EAGER: _overlapped,
    Variant.RESIDENT: _all_kept,
}
