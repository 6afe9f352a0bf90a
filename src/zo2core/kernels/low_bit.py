"""What a weight is carried in: rounded to 16 bits, or to 8 bits with a scale for each output row.

A device with memory of its own may be given less than is stored (ZO2, arXiv 2503.12668, section 5.5). Its weights are then
what is carried, widened again. Both ways are elementwise arithmetic in one order, so every machine gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from zo2core.kernels import native
from zo2core.types import BlockLayout, ParameterSpec, aligned

FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = torch.finfo(FP8).max
_LEAST_SCALE = 2.0**-100  # rows this small, and those of zeros, become zeros
_PIECE = 1 << 18  # elements that are scaled at a time, so that they stay in a cache


def low_bit_layout(layout: BlockLayout) -> BlockLayout:
    """How a segment's parameters lie while it is carried: packed, each in its dtype, and the rows' scales after them."""
    encoded = tuple(replace(spec, dtype=spec.transfer_dtype or spec.dtype) for spec in layout.parameters)
    scales = tuple(_scales(spec) for spec in layout.parameters if spec.transfer_dtype is FP8)
    return replace(layout, parameters=(*encoded, *scales), offsets=None)


def scales_places(layout: BlockLayout) -> list[int | None]:
    """For each parameter of a segment, which of the carried layout's parameters has its scales; None: it has none."""
    places = iter(range(len(layout.parameters), 2 * len(layout.parameters)))
    return [next(places) if spec.transfer_dtype is FP8 else None for spec in layout.parameters]


def low_bit_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of ``CarryingMemory``, in which weights that need not travel are rounded as if they did."""
    encoded = [spec for layout in layouts for spec in layout.parameters if spec.is_low_bit]
    return max((_low_bit_bytes(spec) + aligned(_scales(spec).nbytes) for spec in encoded), default=0)


def encode(theta: torch.Tensor, encoded: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Round a weight to what is carried of it.

    Args:
        theta: 1-D, as it is stored.
        encoded: 1-D, as long, of the carried dtype.
        scales: 1-D float32, one a row, for 8 bits: the smallest power of 2 at which the row's largest magnitude is one of
            the dtype's. Multiplying by it is exact, so what was carried once stays the same however often it is again.
    """
    if scales is None:
        encoded.copy_(theta)
        return
    if native.encode_float8(theta, encoded, scales, largest_code=_LARGEST_FP8, least_scale=_LEAST_SCALE):
        return
    rows = theta.view(len(scales), -1)
    torch.linalg.vector_norm(rows, ord=torch.inf, dim=1, out=scales)
    half_to_one, exponent = torch.frexp(scales.div_(_LARGEST_FP8).clamp_(min=_LEAST_SCALE))
    torch.ldexp(torch.ones_like(scales), exponent - (half_to_one == 0.5).int(), out=scales)
    step = max(1, _PIECE // max(rows.shape[1], 1))
    into = encoded.view(rows.shape)
    for row in range(0, len(scales), step):
        into[row : row + step].copy_(rows[row : row + step] / scales[row : row + step, None])


def decode(encoded: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
    """Widen what was carried.

    Args:
        encoded: As ``encode`` left it.
        scales: As there.
        out: 1-D, as long, in the dtype in which the weight is stored.
    """
    if scales is not None and native.decodes(encoded, out):
        native.decode_float8(out.view(len(scales), -1), encoded, scales, 0, (1, max(out.numel() // len(scales), 1)))
        return
    out.copy_(encoded)
    if scales is not None:
        out.view(len(scales), -1).mul_(scales[:, None])


class LowBitMemory:
    """Memory for one parameter at a time, as it is carried.

    Args:
        memory: uint8, ``carrying_bytes`` long.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def round(self, spec: ParameterSpec, theta: torch.Tensor, out: torch.Tensor) -> None:
        """Write a weight as it would arrive: rounded to what is carried, and widened again.

        Args:
            spec: The parameter.
            theta: 1-D, as it is stored.
            out: As ``theta``; may be ``theta``.
        """
        assert spec.transfer_dtype is not None
        nbytes, at = spec.numel * spec.transfer_dtype.itemsize, _low_bit_bytes(spec)
        encoded = self._memory[:nbytes].view(spec.transfer_dtype)
        scales = self._memory[at : at + _scales(spec).nbytes].view(torch.float32) if spec.transfer_dtype is FP8 else None
        encode(theta, encoded, scales)
        decode(encoded, scales, out)


def _low_bit_bytes(spec: ParameterSpec) -> int:
    return aligned(spec.numel * (spec.transfer_dtype or spec.dtype).itemsize)


def _scales(spec: ParameterSpec) -> ParameterSpec:
    """One float32 an output row; a vector is one row."""
    rows = spec.shape[0] if len(spec.shape) > 1 else 1
    return ParameterSpec(f"{spec.name}: scales", (rows,), torch.float32, spec.index, decays=False)
