"""Sequential generators of normal numbers: torch's own, and a compiled one that gives the same bits on the CPU.

torch promises no particular numbers: they have changed between versions, and depend on the processor. So the compiled
generator is used only where it has just been compared with this torch on this machine.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Collection
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from zo2core.kernels import native

_SEEDS = (0, 1, 2**31 + 5, 2**63 - 1)
_SIZES = (*range(1, 100), 1023, 1024, 1025, 7, 4096 + 9)  # compared one after the other
_BITS = {2: torch.int16, 4: torch.int32}


class TorchGenerator:
    """torch's generator of standard normal numbers.

    Args:
        seed: Seed of 64 bits.
        device: Device that draws.
    """

    __slots__ = ("_generator",)

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def fill(self, out: Tensor) -> None:
        """Write the next numbers to a contiguous tensor."""
        out.normal_(generator=self._generator)

    def skip(self, count: int, dtype: torch.dtype) -> None:
        """Advance as ``fill`` would with a tensor of ``count`` elements."""
        self.fill(torch.empty(count, dtype=dtype, device=self._generator.device))

    def copy(self) -> TorchGenerator:
        """Return a generator that continues with the same numbers."""
        other = object.__new__(TorchGenerator)
        other._generator = self._generator.clone_state()
        return other


class CompiledGenerator:
    """torch's CPU generator, compiled, for numbers of 32 and 16 bits. ``agrees`` says whether it may be used.

    Args:
        seed: Seed of 64 bits.
    """

    __slots__ = ("_library", "_state")

    def __init__(self, seed: int) -> None:
        self._library = native.functions()
        self._state = ctypes.create_string_buffer(self._library.zo2core_twister_size())
        self._library.zo2core_twister_seed(self._state, seed)

    def fill(self, out: Tensor) -> None:
        """Write the next numbers to a contiguous tensor."""
        self._library.zo2core_twister_fill(self._state, native.DTYPES[out.dtype], out.data_ptr(), out.numel())

    def skip(self, count: int, dtype: torch.dtype) -> None:
        """Advance as ``fill`` would with a tensor of ``count`` elements."""
        self._library.zo2core_twister_skip(self._state, native.DTYPES[dtype], count)

    def copy(self) -> CompiledGenerator:
        """Return a generator that continues with the same numbers."""
        other = object.__new__(CompiledGenerator)
        other._library = self._library
        other._state = type(self._state).from_buffer_copy(self._state)
        return other


Generator: TypeAlias = TorchGenerator | CompiledGenerator


def seeded(seed: int, device: torch.device, dtypes: Collection[torch.dtype]) -> Generator:
    """The fastest generator that draws a device's numbers in these dtypes."""
    if device.type == "cpu" and all(agrees(dtype) for dtype in dtypes):
        return CompiledGenerator(seed)
    return TorchGenerator(seed, device)


@cache
def agrees(dtype: torch.dtype) -> bool:
    """Whether the compiled generator is installed and gives torch's bits in a dtype on this machine. Compared once."""
    if native.library() is None or dtype not in native.DTYPES:
        return False
    for seed in _SEEDS:
        reference, compiled = TorchGenerator(seed, torch.device("cpu")), CompiledGenerator(seed)
        for size in _SIZES:
            expected, drawn = torch.empty(2, size, dtype=dtype)
            reference.fill(expected)
            compiled.fill(drawn)
            bits = _BITS[dtype.itemsize]
            if not torch.equal(drawn.view(bits), expected.view(bits)):
                return False
    return True


@cache
def numbers_drawn(device: torch.device) -> dict[str, str]:
    """Version of torch, and a checksum of what it draws on a device: other versions or processors may draw other numbers."""
    checksum = 0
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        drawn = torch.empty(1 << 16, dtype=dtype, device=device)
        TorchGenerator(0, device).fill(drawn)
        checksum = zlib.crc32(drawn.view(bits).cpu().numpy().tobytes(), checksum)
    return {"torch": torch.__version__, "crc32": f"{checksum:08x}"}
