"""The memory that a visit works in, allocated once: the work buffer, the noise buffer and cache-sized scratch.

The work buffer's views are the model's parameters for good. Segments share its memory, one after the other; weights that
two segments use (tied ones) have a place of their own, so that their noise, once drawn, serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zo2core.protocols import Device, NoiseGenerator
from zo2core.types import BlockLayout, ParameterSpec, aligned, flat_views


class Cell(NamedTuple):
    """One parameter as one segment sees it."""

    spec: ParameterSpec
    owner: int  # segment whose store holds the weight
    position: int  # in that store
    work: torch.Tensor  # flat view of the work buffer: the perturbed weight
    z: torch.Tensor  # flat view of the noise buffer
    pieces: list[tuple[int, int]]  # (start, stop) in which z is drawn
    tied: bool  # used by more than one segment


class Workspace:
    """Work, noise and scratch memory for segments of these layouts.

    Args:
        layouts: Segments in visiting order.
        device: Allocates.
        noise: Says into which pieces a parameter is cut.
    """

    def __init__(self, layouts: Sequence[BlockLayout], device: Device, noise: NoiseGenerator) -> None:
        tied = list({spec.name: spec for layout in layouts for spec in layout.borrowed}.values())
        tied_names = {spec.name for spec in tied}
        own = [[spec for spec in layout.parameters if spec.name not in tied_names] for layout in layouts]
        tied_bytes = sum(aligned(spec.nbytes) for spec in tied)
        nbytes = tied_bytes + max(sum(aligned(spec.nbytes) for spec in specs) for specs in own)
        work, z = device.empty(nbytes), device.empty(nbytes)
        self.nbytes = 2 * nbytes

        pairs = zip(flat_views(tied, work), flat_views(tied, z), strict=True)
        tied_views = {spec.name: pair for spec, pair in zip(tied, pairs, strict=True)}
        places = {
            spec.name: (index, position)
            for index, layout in enumerate(layouts)
            for position, spec in enumerate(layout.parameters)
        }
        self.segments: list[tuple[Cell, ...]] = []  # per segment, in drawing order
        for layout, specs in zip(layouts, own, strict=True):
            views = dict(tied_views)
            own_views = zip(flat_views(specs, work[tied_bytes:]), flat_views(specs, z[tied_bytes:]), strict=True)
            views.update(zip((spec.name for spec in specs), own_views, strict=True))
            used = sorted((*layout.parameters, *layout.borrowed), key=lambda spec: spec.index)
            self.segments.append(
                tuple(
                    Cell(spec, *places[spec.name], *views[spec.name], noise.pieces(spec), spec.name in tied_names)
                    for spec in used
                )
            )
        self._torch_device = device.torch_device
        self.elements = [sum(cell.spec.numel for cell in cells) for cells in self.segments]
        self._scratch: dict[tuple[torch.dtype, str], torch.Tensor] = {}
        self._piece = max(
            (stop - start for cells in self.segments for cell in cells for start, stop in cell.pieces), default=0
        )

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter's shaped view of the work buffer, by name."""
        return {cell.spec.name: cell.work.view(cell.spec.shape) for cells in self.segments for cell in cells}

    def scratch(self, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """Memory for one piece: one buffer a dtype and purpose, kept."""
        key = (dtype, purpose)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(self._piece, dtype=dtype, device=self._torch_device)
        return self._scratch[key]
