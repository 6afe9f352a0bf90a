"""Memory that is allocated once and used in every visit: work buffer, noise buffer and cache-sized scratch.

The work buffer's views are the model's parameters; segments use its memory in turn. Frozen weights that a forward can read
in their stored dtype are not copied: during a visit the segment's modules read them from the store. In the noise buffer
tied weights, which two segments use, have their own memory, so that their noise is drawn once for both.

If the forward computes in another dtype than the stored one, the work buffer holds the rounded weights. If evaluations are
perturbed in place, each from the one before, the unrounded weights have memory of their own. Weights that are transferred
to a device in fewer bits are converted back there before they are perturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import torch

from zo2core.kernels import encoding
from zo2core.kernels.low_bit import decode, encode, low_bit_bytes, round_low_bit, scales_positions
from zo2core.noise import SCRATCH, noise_bytes
from zo2core.protocols import CounterNoise, Device, NoiseGenerator, Store, Stores
from zo2core.types import (
    BlockLayout,
    ParameterSpec,
    divide_tied,
    flat_views,
    keeps_unrounded,
    packed_bytes,
    unrounded_bytes,
    work_bytes,
)

# Products of float32 vectors round differently if a matrix is not aligned to this. Tensors in a file may not be.
_READ_ALIGNMENT = 16  # bytes


class ParameterView(NamedTuple):
    """One parameter in one segment: the memory of its stored weight, its perturbed weight and its noise."""

    spec: ParameterSpec
    owner: int  # segment whose store holds the weight
    position: int  # position of the weight in that store
    scales: int | None  # position of the scales in a store of 8-bit weights; None for other weights
    work: torch.Tensor  # flat view of the work buffer: the perturbed weight, in the forward's dtype
    unrounded: torch.Tensor | None  # the perturbed weight in its stored dtype; None: it is perturbed in the work buffer
    z: torch.Tensor | None  # flat view of the noise buffer; None if noise is not kept
    chunks: list[tuple[int, int]]  # (start, stop) of the chunks in which z is drawn

    def stored(self, stores: Stores) -> torch.Tensor:
        """The weight in its store."""
        return stores[self.owner][self.position]

    def is_encoded(self, stored: torch.Tensor) -> bool:
        """Whether a store has the codes of the weight; a shared base hands out decoded weights."""
        return self.spec.encoding is not None and stored.dtype is self.spec.stored_dtype

    def load(self, stores: Stores, helper: Executor | None = None) -> None:
        """Copy or decode the weight to the memory where it is perturbed or read."""
        stored, (target, _) = self.stored(stores), self.targets()
        if self.is_encoded(stored):
            encoding.decode(self.spec, stored, target, helper)
        else:
            target.copy_(stored)

    def readable(self, stores: Stores, helper: Executor | None = None) -> torch.Tensor:
        """Return the memory from which modules read the weight: its store if that gives the same bits, else the buffer."""
        stored = self.stored(stores)
        if stored.dtype is self.spec.in_forward().dtype and stored.data_ptr() % _READ_ALIGNMENT == 0:
            return stored.view(self.spec.shape)
        self.load(stores, helper)
        return self.work.view(self.spec.shape)

    def targets(self, start: int = 0, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the memory of a range's perturbed weights: unrounded, and rounded for the forward; None if not rounded."""
        if self.unrounded is None:
            return self.work[start:stop], None
        return self.unrounded[start:stop], self.work[start:stop]


class WorkBuffer:
    """Work, noise and scratch memory for segments of these layouts."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        device: Device,
        noise: NoiseGenerator,
        *,
        keep_noise: bool = True,
        perturbs_in_place: bool = True,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        tied, untied = divide_tied(layouts)
        work = (device.empty if allocate is None else allocate)(work_bytes(layouts))
        unrounded_memory = device.empty(unrounded_bytes(layouts, perturbs_in_place=perturbs_in_place))
        self._low_bit = device.empty(low_bit_bytes(layouts))  # in which parameters are rounded
        self.keeps_noise = keep_noise and not isinstance(noise, CounterNoise)
        z = device.empty(noise_bytes(layouts)) if self.keeps_noise else None
        tied_noise = {} if z is None else named_views(tied, z)  # the same memory for all segments that use a weight
        locations = {
            spec.name: (index, position, scales)
            for index, layout in enumerate(layouts)
            for position, (spec, scales) in enumerate(zip(layout.parameters, scales_positions(layout), strict=True))
        }
        self.segments: list[tuple[ParameterView, ...]] = []  # for each segment, trained parameters in drawing order
        self._frozen: list[tuple[ParameterView, ...]] = []  # for each segment, frozen parameters
        for layout, untied_specs in zip(layouts, untied, strict=True):
            used = {spec.name: spec for spec in layout.used}
            kept_noise = {} if z is None else tied_noise | named_views(untied_specs, z[packed_bytes(tied) :])
            works = named_views([spec.in_forward() for spec in used.values()], work)
            unrounded = named_views(
                [spec for spec in used.values() if keeps_unrounded(spec, perturbs_in_place=perturbs_in_place)],
                unrounded_memory,
            )
            views = [
                ParameterView(
                    spec,
                    *locations[name],
                    works[name],
                    unrounded.get(name),
                    kept_noise.get(name),
                    [] if spec.frozen else noise.chunks(spec),
                )
                for name, spec in used.items()
            ]
            views.sort(key=lambda view: view.spec.index)
            self.segments.append(tuple(view for view in views if not view.spec.frozen))
            self._frozen.append(tuple(view for view in views if view.spec.frozen))
        self._device = device
        self.transfers_back = [
            any(spec.is_low_bit and spec.transfer_back for spec in layout.parameters) for layout in layouts
        ]
        self.is_low_bit = [any(spec.is_low_bit for spec in layout.used) for layout in layouts]
        self.elements = [sum(view.spec.numel for view in views) for views in self.segments]
        self._scratch: dict[tuple[torch.dtype, str], torch.Tensor] = {}
        self._chunk = max(
            (stop - start for views in self.segments for view in views for start, stop in view.chunks), default=0
        )

    def bind(self, bind: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """Make the buffer's views the parameters of a model's modules."""
        self._bind = bind
        self.bound: list[dict[str, torch.Tensor]] = [  # each segment's weights since its last visit, by name
            {view.spec.name: view.work.view(view.spec.shape) for view in self.views(index)}
            for index in range(len(self.segments))
        ]
        self._reads_stores = False
        for index, parameters in enumerate(self.bound):
            bind(index, parameters)

    def views(self, index: int) -> tuple[ParameterView, ...]:
        """All parameters of a segment."""
        return (*self.segments[index], *self._frozen[index])

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let a segment's modules read frozen weights, from the store or else decoded or rounded into the buffer."""
        frozen = {view.spec.name: view.readable(stores) for view in self._frozen[index]}
        self._reads_stores |= any(frozen[view.spec.name].data_ptr() != view.work.data_ptr() for view in self._frozen[index])
        if self._reads_stores and frozen:  # segments share modules, which may still read another segment's store
            self.bound[index].update(frozen)
            self._bind(index, frozen)

    def load(self, index: int, stores: Stores) -> None:
        """Copy a segment's weights from the stores to the buffer, low-bit ones with the rounding of their transfer."""
        self.load_low_bit(index, stores)
        for view in self.segments[index]:
            target, rounded = view.targets()
            if not view.spec.is_low_bit:
                view.load(stores)
            if rounded is not None:
                rounded.copy_(target)

    def load_low_bit(self, index: int, stores: Stores) -> None:
        """Convert a segment's low-bit weights to where they are perturbed, with the rounding of their transfer."""
        for view in self.segments[index]:
            if view.spec.is_low_bit:
                stored, (target, _) = view.stored(stores), view.targets()
                if stored.dtype is view.spec.dtype:
                    round_low_bit(view.spec, stored, target, self._low_bit)
                else:
                    decode(stored, None if view.scales is None else stores[view.owner][view.scales], target)

    def round_to_transfer_dtype(self, index: int, store: Store) -> None:
        """Round a segment's weights to their transfer dtype, if they are transferred back from the device."""
        for view in self.segments[index]:
            if view.owner == index and view.spec.is_low_bit and view.spec.transfer_back:
                theta = store[view.position]
                if theta.dtype is view.spec.dtype:
                    round_low_bit(view.spec, theta, theta, self._low_bit)
                    continue
                scales, (target, _) = None if view.scales is None else store[view.scales], view.targets()
                encode(target, theta, scales)
                decode(theta, scales, target)

    def drawing(self, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """Return memory for a chunk of z: one buffer for each dtype and purpose, kept."""
        return self._memory(dtype, purpose, self._chunk)

    def scratch(self, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """Return memory for arithmetic on a chunk or a part of one: one buffer for each dtype and purpose, kept."""
        return self._memory(dtype, purpose, min(self._chunk, SCRATCH))

    def _memory(self, dtype: torch.dtype, purpose: str, length: int) -> torch.Tensor:
        key = (dtype, purpose)
        if key not in self._scratch:
            nbytes = length * dtype.itemsize
            self._scratch[key] = self._device.empty(nbytes)[:nbytes].view(dtype)
        return self._scratch[key]


def named_views(specs: Sequence[ParameterSpec], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Flat typed views of packed parameters, by name."""
    return dict(zip((spec.name for spec in specs), flat_views(specs, memory), strict=True))
