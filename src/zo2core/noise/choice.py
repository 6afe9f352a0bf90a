"""Sizes of the memory in which noise is drawn, for work buffers and plans.

Choice of a noise generator by the name that a journal records.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zo2core.errors import OptionError
from zo2core.noise.philox import PhiloxNoise
from zo2core.noise.sequential import MEMORY, SequentialNoise
from zo2core.protocols import NoiseGenerator
from zo2core.types import BlockLayout, Distribution, divide_tied, packed_bytes

SCRATCH = 1 << 24  # elements of a scratch buffer at most: enough for launches to cost little


def drawn_bytes(layouts: Sequence[BlockLayout], noise: NoiseGenerator) -> int:
    """Bytes of the longest chunk of z."""
    specs = {(spec.numel, spec.dtype): spec for layout in layouts for spec in layout.parameters if not spec.frozen}
    longest = (max(stop - start for start, stop in noise.chunks(spec)) * spec.dtype.itemsize for spec in specs.values())
    return max(longest, default=0)


def noise_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of a noise buffer for these segments, in which the noise of tied weights stays from visit to visit."""
    tied, others = divide_tied(layouts)
    return packed_bytes(tied) + max(packed_bytes(specs) for specs in others)


def choose_noise(
    name: str | None, layouts: Sequence[BlockLayout], device: torch.device, *, memory: int = MEMORY
) -> NoiseGenerator:
    """Return the generator of a name; by default MeZO's numbers as this device draws them.

    Args:
        name: Name of a generator of this package (``NoiseGenerator.name``), or None.
        layouts: Segments in visiting order.
        device: The device that computes.
        memory: Bytes for the generators that sequential noise keeps.

    Raises:
        OptionError: for a name that no generator of this device has.
    """
    generators: list[NoiseGenerator] = [SequentialNoise(layouts, device, memory=memory), *map(PhiloxNoise, Distribution)]
    for noise in generators:
        if name in (None, noise.name):
            return noise
    raise OptionError(
        "noise",
        found=repr(name),
        expected=f"one of {', '.join(noise.name for noise in generators)}",
        remedy="use the device that the run was made on, or pass a custom generator as noise=",
    )
