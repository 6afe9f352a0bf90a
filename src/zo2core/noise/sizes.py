"""Sizes of the memory in which noise is drawn, for work buffers and plans."""

from __future__ import annotations

from collections.abc import Sequence

from zo2core.protocols import NoiseGenerator
from zo2core.types import BlockLayout, divide_tied, packed_bytes

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
