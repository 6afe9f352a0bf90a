"""Counter-based noise: every number is a function of seed, parameter and element, and of nothing else.

Trade-off: not MeZO's numbers, but as good ones, and so cheap that they are drawn again wherever they are used instead of
being kept; any thread and any device draws any range.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from zo2core.kernels import fill
from zo2core.types import Distribution, ParameterSpec

_CHUNK = 32768  # elements: a multiple of what is drawn together


class PhiloxNoise:
    """z by Philox4x32-10. ``kernels/philox.py`` says which number is which.

    Args:
        distribution: Distribution of the numbers.
    """

    def __init__(self, distribution: Distribution = Distribution.GAUSSIAN) -> None:
        self._distribution = distribution
        self._chunks: dict[int, list[tuple[int, int]]] = {}  # by number of elements: equal parameters share their list

    @property
    def name(self) -> str:
        """What z is; the same on every machine."""
        return f"philox4x32-10-{self._distribution.value}"

    @property
    def distribution(self) -> Distribution:
        """Of the numbers."""
        return self._distribution

    def chunks(self, parameter: ParameterSpec) -> list[tuple[int, int]]:
        """Cut a parameter into cache-sized chunks. Any other chunks would do."""
        numel = parameter.numel
        if numel not in self._chunks:
            self._chunks[numel] = [(start, min(start + _CHUNK, numel)) for start in range(0, max(numel, 1), _CHUNK)]
        return self._chunks[numel]

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Write any range of one parameter's z."""
        fill(out, self._distribution, seed, parameter.index, start)

    def retain(self, seeds: Collection[int]) -> None:
        """Nothing is kept."""
