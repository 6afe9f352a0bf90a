"""The memory that a visit works in, allocated once: the work buffer, the noise buffer and cache-sized scratch.

The work buffer's views are the model's parameters for good. Segments share its memory, one after the other; weights that
two segments use (tied ones) have a place of their own, so that their noise, once drawn, serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zo2core.protocols import CounterNoise, Device, NoiseGenerator
from zo2core.types import BlockLayout, ParameterSpec, aligned, flat_views


class Cell(NamedTuple):
    """One parameter as one segment sees it."""

    spec: ParameterSpec
    owner: int  # segment whose store holds the weight
    position: int  # in that store
    work: torch.Tensor  # flat view of the work buffer: the perturbed weight
    z: torch.Tensor | None  # flat view of the noise buffer; None where noise is not kept
    pieces: list[tuple[int, int]]  # (start, stop) in which z is drawn
    tied: bool  # used by more than one segment


def work_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of the work buffer, and of the noise buffer, for segments of these layouts."""
    tied, own = _divide(layouts)
    return _nbytes(tied) + max(_nbytes(specs) for specs in own)


def _divide(layouts: Sequence[BlockLayout]) -> tuple[list[ParameterSpec], list[list[ParameterSpec]]]:
    """The tied parameters, and each segment's own."""
    tied = {spec.name: spec for layout in layouts for spec in layout.borrowed}
    return list(tied.values()), [[spec for spec in layout.parameters if spec.name not in tied] for layout in layouts]


def _nbytes(specs: Sequence[ParameterSpec]) -> int:
    return sum(aligned(spec.nbytes) for spec in specs)


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
        tied, own = _divide(layouts)
        tied_names = {spec.name for spec in tied}
        tied_bytes, nbytes = _nbytes(tied), work_bytes(layouts)
        work = device.empty(nbytes)
        self.keeps_noise = keep_noise and not isinstance(noise, CounterNoise)
        z = device.empty(nbytes) if self.keeps_noise else None

        def place(specs: Sequence[ParameterSpec], start: int) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
            zs = [None] * len(specs) if z is None else flat_views(specs, z[start:])
            return {spec.name: (w, each) for spec, w, each in zip(specs, flat_views(specs, work[start:]), zs, strict=True)}

        tied_views = place(tied, 0)
        places = {
            spec.name: (index, position)
            for index, layout in enumerate(layouts)
            for position, spec in enumerate(layout.parameters)
        }
        self.segments: list[tuple[Cell, ...]] = []  # per segment, in drawing order
        for layout, specs in zip(layouts, own, strict=True):
            views = tied_views | place(specs, tied_bytes)
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
