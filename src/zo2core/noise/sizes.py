"""How much memory noise takes while it is drawn: what work buffers allocate, and plans count."""

from __future__ import annotations

from collections.abc import Sequence

from zo2core.protocols import NoiseGenerator
from zo2core.types import BlockLayout, divide_tied, packed_bytes

SCRATCH = 1 << 24  # elements of a scratch buffer, where chunks are longer: launches cost little then


def drawn_bytes(layouts: Sequence[BlockLayout], noise: NoiseGenerator) -> int:
    """Bytes of the longest chunk in which a parameter's z is drawn."""
    specs = {(spec.numel, spec.dtype): spec for layout in layouts for spec in layout.parameters if not spec.frozen}
    longest = (max(stop - start for start, stop in noise.chunks(spec)) * spec.dtype.itemsize for spec in specs.values())
    return max(longest, default=0)


def noise_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of a noise buffer for segments of these layouts: tied weights' noise stays in it from visit to visit."""
    tied, own = divide_tied(layouts)
    return packed_bytes(tied) + max(packed_bytes(specs) for specs in own)
