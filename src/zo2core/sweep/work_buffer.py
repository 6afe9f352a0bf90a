"""The memory that a visit works in, allocated once: the work buffer, the noise buffer and cache-sized scratch.

The work buffer's views are the model's parameters for good. Segments share its memory, one after the other. In the noise
buffer weights that two segments use (tied ones) have a place of their own, so that their noise, once drawn, serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zo2core.protocols import CounterNoise, Device, NoiseGenerator
from zo2core.types import (
    SCRATCH,
    BlockLayout,
    ParameterSpec,
    flat_views,
    noise_bytes,
    packed_bytes,
    tied_and_own,
    work_bytes,
)


class Cell(NamedTuple):
    """One parameter as one segment sees it."""

    spec: ParameterSpec
    owner: int  # segment whose store holds the weight
    position: int  # in that store
    work: torch.Tensor  # flat view of the work buffer: the perturbed weight
    z: torch.Tensor | None  # flat view of the noise buffer; None where noise is not kept
    pieces: list[tuple[int, int]]  # (start, stop) in which z is drawn
    tied: bool  # used by more than one segment


class Workspace:
    """Work, noise and scratch memory for segments of these layouts.

    Args:
        layouts: Segments in visiting order.
        device: Allocates.
        noise: Says into which pieces a parameter is cut.
        keep_noise: Hold a segment's z from one evaluation to the next; without, it is drawn again for each. Counter-based
            noise is never held.
    """

    def __init__(
        self, layouts: Sequence[BlockLayout], device: Device, noise: NoiseGenerator, *, keep_noise: bool = True
    ) -> None:
        tied, own = tied_and_own(layouts)
        tied_names = {spec.name for spec in tied}
        tied_bytes = packed_bytes(tied)
        work = device.empty(work_bytes(layouts))
        self.keeps_noise = keep_noise and not isinstance(noise, CounterNoise)
        z = device.empty(noise_bytes(layouts)) if self.keeps_noise else None

        def views(specs: Sequence[ParameterSpec], memory: torch.Tensor | None, start: int) -> list[torch.Tensor | None]:
            return [None] * len(specs) if memory is None else list(flat_views(specs, memory[start:]))

        places = {
            spec.name: (index, position)
            for index, layout in enumerate(layouts)
            for position, spec in enumerate(layout.parameters)
        }
        self.segments: list[tuple[Cell, ...]] = []  # per segment, in drawing order
        for layout, specs in zip(layouts, own, strict=True):
            shared = [spec for spec in tied if spec in (*layout.parameters, *layout.borrowed)]
            works = [*views(shared, work, 0), *views(specs, work, tied_bytes if shared else 0)]
            zs = [*views(shared, z, 0), *views(specs, z, tied_bytes)]
            cells = []
            for spec, perturbed, drawn in zip((*shared, *specs), works, zs, strict=True):
                assert perturbed is not None
                tied_here = spec.name in tied_names
                cells.append(Cell(spec, *places[spec.name], perturbed, drawn, noise.pieces(spec), tied_here))
            self.segments.append(tuple(sorted(cells, key=lambda cell: cell.spec.index)))
        self._device = device
        self.elements = [sum(cell.spec.numel for cell in cells) for cells in self.segments]
        self._scratch: dict[tuple[torch.dtype, str], torch.Tensor] = {}
        self._piece = max(
            (stop - start for cells in self.segments for cell in cells for start, stop in cell.pieces), default=0
        )

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter's shaped view of the work buffer, by name."""
        return {cell.spec.name: cell.work.view(cell.spec.shape) for cells in self.segments for cell in cells}

    def drawing(self, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """Memory for a piece of z: one buffer a dtype and purpose, kept."""
        return self._memory(dtype, purpose, self._piece)

    def scratch(self, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """Memory for arithmetic, for a piece or a part of one: one buffer a dtype and purpose, kept."""
        return self._memory(dtype, purpose, min(self._piece, SCRATCH))

    def _memory(self, dtype: torch.dtype, purpose: str, length: int) -> torch.Tensor:
        key = (dtype, purpose)
        if key not in self._scratch:
            nbytes = length * dtype.itemsize
            self._scratch[key] = self._device.empty(nbytes)[:nbytes].view(dtype)
        return self._scratch[key]
