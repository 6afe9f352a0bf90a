"""Sequential generators of normal numbers: torch's own, and a compiled one that gives the same bits on the CPU.

torch promises no particular numbers: they have changed between versions, and depend on the processor. So the compiled
generator is believed only where it has just been found to agree with this torch on this machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from functools import cache
from typing import Protocol

import torch

from zo2core.kernels import native

_SEEDS = (0, 1, 2**31 + 5, 2**63 - 1)
_SIZES = (*range(1, 100), 1023, 1024, 1025, 7, 4096 + 9)  # compared one after the other
_BITS = {2: torch.int16, 4: torch.int32}


class Generator(Protocol):
    """Draws standard normal numbers, one after the other."""

    def fill(self, out: torch.Tensor) -> None:
        """Write the next numbers to a contiguous tensor."""

    def skip(self, count: int, dtype: torch.dtype) -> None:
        """Advance as ``fill`` would with a tensor of so many elements."""

    def copy(self) -> Generator:
        """Another one that stands at the same place."""


class TorchGenerator:
    """torch's generator.

    Args:
        seed: 64 bits.
        device: Whose.
    """

    __slots__ = ("_generator",)

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def fill(self, out: torch.Tensor) -> None:
        """Write the next numbers to a contiguous tensor."""
        out.normal_(generator=self._generator)

    def skip(self, count: int, dtype: torch.dtype) -> None:
        """Advance as ``fill`` would with a tensor of so many elements."""
        self.fill(torch.empty(count, dtype=dtype, device=self._generator.device))

    def copy(self) -> TorchGenerator:
        """Another one that stands at the same place."""
        other = object.__new__(TorchGenerator)
        other._generator = self._generator.clone_state()
        return other


class CompiledGenerator:
    """torch's CPU generator, compiled, for numbers of 32 and 16 bits. ``agrees`` says where it may be used.

    Args:
        seed: 64 bits.
    """

    __slots__ = ("_library", "_state")

    def __init__(self, seed: int) -> None:
        loaded = native.library()
        assert loaded is not None
        self._library = loaded
        self._state = ctypes.create_string_buffer(loaded.zo2core_twister_size())
        loaded.zo2core_twister_seed(self._state, seed)

    def fill(self, out: torch.Tensor) -> None:
        """Write the next numbers to a contiguous tensor."""
        self._library.zo2core_twister_fill(self._state, native.DTYPES[out.dtype], out.data_ptr(), out.numel())

    def skip(self, count: int, dtype: torch.dtype) -> None:
        """Advance as ``fill`` would with a tensor of so many elements."""
        self._library.zo2core_twister_skip(self._state, native.DTYPES[dtype], count)

    def copy(self) -> CompiledGenerator:
        """Another one that stands at the same place."""
        other = object.__new__(CompiledGenerator)
        other._library = self._library
        other._state = type(self._state).from_buffer_copy(self._state)
        return other


def seeded(seed: int, device: torch.device, dtypes: Collection[torch.dtype]) -> Generator:
    """The fastest generator of a device's numbers for tensors of these dtypes."""
    if device.type == "cpu" and all(agrees(dtype) for dtype in dtypes):
        return CompiledGenerator(seed)
    return TorchGenerator(seed, device)


@cache
def agrees(dtype: torch.dtype) -> bool:
    """Whether the compiled generator is there and gives torch's bits in a dtype, on this machine. Compared once."""
    if native.library() is None or dtype not in native.DTYPES:
        return False
    for seed in _SEEDS:
        theirs, ours = TorchGenerator(seed, torch.device("cpu")), CompiledGenerator(seed)
        for size in _SIZES:
            expected, drawn = torch.empty(2, size, dtype=dtype)
            theirs.fill(expected)
            ours.fill(drawn)
            bits = _BITS[dtype.itemsize]
            if not torch.equal(drawn.view(bits), expected.view(bits)):
                return False
    return True
