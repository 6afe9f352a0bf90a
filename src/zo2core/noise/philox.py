"""Counter-based noise: every number is a function of seed, parameter and element alone.

Trade-off: the numbers are not MeZO's, but as good, and so cheap that they are drawn again at each use instead of being kept;
any thread and any device can draw any range.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from zo2core.kernels import fill
from zo2core.types import Distribution, ParameterSpec

_CHUNK = 32768  # elements: a multiple of Philox's groups


class PhiloxNoise:
    """z by Philox4x32-10. ``kernels/philox.py`` documents the order of the numbers.

    Args:
        distribution: Distribution of the numbers.
    """

    def __init__(self, distribution: Distribution = Distribution.GAUSSIAN) -> None:
        self._distribution = distribution
        self._chunks: dict[int, list[tuple[int, int]]] = {}  # by number of elements: parameters of equal size share a list

    @property
    def name(self) -> str:
        """Name of the generator, the same on every machine."""
        return f"philox4x32-10-{self._distribution.value}"

    @property
    def distribution(self) -> Distribution:
        """Distribution of the numbers."""
        return self._distribution

    def chunks(self, parameter: ParameterSpec) -> list[tuple[int, int]]:
        """Divide a parameter into cache-sized chunks."""
        numel = parameter.numel
        if numel not in self._chunks:
            self._chunks[numel] = [(start, min(start + _CHUNK, numel)) for start in range(0, max(numel, 1), _CHUNK)]
        return self._chunks[numel]

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Write a range of a parameter's z."""
        fill(out, self._distribution, seed, parameter.index, start)

    def retain(self, seeds: Collection[int]) -> None:
        """Do nothing: nothing is kept."""
