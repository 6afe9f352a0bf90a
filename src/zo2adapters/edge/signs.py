"""Directions of random signs, computed from a seed inside an exported program.

ExecuTorch's kernels have no generator that can be seeded: ``rand`` and ``randn`` use the system's. So P-RGE keeps both
perturbed copies of B, whose difference is the noise, and adds an operator to the runtime. Counter-based noise needs neither.
The numbers are those of ``PhiloxNoise(Distribution.RADEMACHER)``, bit for bit, so that an engine that replays a program's
losses gets the program's adapter.

Note: Operations. The runtime's portable kernels have neither shifts nor unsigned 64-bit integers. Words are int64 below
2**32, multipliers are split into halves of 16 bits so that no product reaches 2**63, and words are shifted by division. Two
words of a counter that need the same operations share a tensor: each operation adds to the time of lowering a program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

GROUP = 1024  # signs from eight calls of Philox
_CALLS = 8  # calls per group
_BITS = 32  # bits of a word; each gives a sign
_WORD = (1 << _BITS) - 1
_HALF = 1 << 16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Philox4x32's multipliers of the counter's words 0 and 2
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the key's words after each round
_ROUNDS = 10


class Signs(nn.Module):
    """Draws z of several parameters at once: each number is +1 or -1, by Philox4x32-10."""

    block: torch.Tensor
    parameter: torch.Tensor
    high_multipliers: torch.Tensor
    low_multipliers: torch.Tensor
    key_steps: torch.Tensor
    masks: torch.Tensor

    def __init__(self, indices: Sequence[int], sizes: Sequence[int]) -> None:
        super().__init__()
        calls = [_CALLS * groups_of(size) for size in sizes]
        parameters = [torch.full((count,), index) for index, count in zip(indices, calls, strict=True)]
        multipliers = torch.tensor(_MULTIPLIERS).view(2, 1)
        constants = {
            "block": torch.cat([torch.arange(count) for count in calls]),  # int64 (calls,): the counter's words 0 and 1
            "parameter": torch.cat(parameters),  # int64 (calls,): its word 2
            "high_multipliers": multipliers >> 16,  # int64 (2, 1)
            "low_multipliers": multipliers & (_HALF - 1),  # int64 (2, 1)
            "key_steps": torch.tensor(_KEY_STEPS).view(2, 1),  # int64
            "masks": (1 << torch.arange(_BITS)).view(1, _BITS, 1),  # int64, of each bit
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, seed: torch.Tensor) -> torch.Tensor:
        """Draw z of all parameters."""
        groups = len(self.block) // _CALLS
        words = self._words(seed).view(4, groups, _CALLS).transpose(0, 1).reshape(groups, 1, 4 * _CALLS)
        is_positive = (words & self.masks) == 0
        return (is_positive.to(torch.float32) * 2 - 1).reshape(-1)

    def _words(self, seed: torch.Tensor) -> torch.Tensor:
        """Four words of each call: int64 (4, calls)."""
        even = torch.stack((self.block & _WORD, self.parameter))  # words 0 and 2 of the counters
        odd = torch.stack((self.block // (_WORD + 1), torch.zeros_like(self.parameter)))  # words 1 and 3
        key = torch.stack((seed & _WORD, seed // (_WORD + 1))).view(2, 1)
        for _ in range(_ROUNDS):
            high, low = even * self.high_multipliers, even * self.low_multipliers  # each product is high * 2**16 + low
            upper = (high + low // _HALF) // _HALF
            lower = ((high & (_HALF - 1)) * _HALF + low) & _WORD
            even, odd = upper.flip(0) ^ odd ^ key, lower.flip(0)
            key = (key + self.key_steps) & _WORD
        return torch.stack((even[0], odd[0], even[1], odd[1]))


def groups_of(size: int) -> int:
    """Number of groups for this number of elements."""
    return math.ceil(size / GROUP)
