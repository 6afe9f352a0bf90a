"""Weights that are transferred to a device in fewer bits, where they are perturbed.

What is perturbed has the rounding of the transfer wherever it comes from: a store in the stored
dtype, or one in the transfer dtype, whose weights are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zo2core.kernels.low_bit import decode, encode, round_low_bit
from zo2core.protocols import Store, Stores
from zo2core.types import ParameterSpec


class LowBitWeight(NamedTuple):
    """A trained weight that is transferred in fewer bits."""

    spec: ParameterSpec
    owner: int  # segment whose store has it
    position: int  # in that store
    scales: int | None  # position of the scales of 8-bit rows, in a store in the transfer dtype
    target: torch.Tensor  # flat, in the stored dtype: where it is perturbed


class LowBitWeights:
    """The trained weights of one segment that are transferred in fewer bits.

    Args:
        segment: The segment.
        weights: Weights that the segment owns or borrows.
        memory: Memory in which a weight is rounded, uint8, ``low_bit_bytes`` long.
    """

    def __init__(self, segment: int, weights: Sequence[LowBitWeight], memory: torch.Tensor) -> None:
        self._weights = weights
        # whose updates are rounded to the transfer dtype
        self._transferred_back = [
            weight for weight in weights if weight.owner == segment and weight.spec.transfer_back
        ]
        self._memory = memory

    @property
    def transfers_back(self) -> bool:
        """Whether updates are rounded to the transfer dtype."""
        return bool(self._transferred_back)

    def load(self, stores: Stores) -> None:
        """Convert the weights to where they are perturbed."""
        for weight in self._weights:
            store = stores[weight.owner]
            stored = store[weight.position]
            if stored.dtype is weight.spec.dtype:
                round_low_bit(weight.spec, stored, weight.target, self._memory)
            else:
                decode(stored, _scales(weight, store), weight.target)

    def round(self, store: Store) -> None:
        """Round the segment's updated weights to the transfer dtype, as their way back does: those
        in the store, or those that an update has changed where they are perturbed.
        """
        for weight in self._transferred_back:
            stored = store[weight.position]
            if stored.dtype is weight.spec.dtype:
                round_low_bit(weight.spec, stored, stored, self._memory)
            else:
                scales = _scales(weight, store)
                encode(weight.target, stored, scales)
                decode(stored, scales, weight.target)


def _scales(weight: LowBitWeight, store: Store) -> torch.Tensor | None:
    return None if weight.scales is None else store[weight.scales]
