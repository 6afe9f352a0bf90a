"""Low-bit transfer: weights rounded to 16 bits, or to 8 bits with a scale for each output row.

Weights may be sent to a device in fewer bits than they are stored in (ZO2, arXiv 2503.12668,
section 5.5). The device then computes with the decoded weights. Encoding and decoding are
elementwise, in a fixed order, with the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zo2core.kernels import dispatch, native
from zo2core.types import BlockLayout, ParameterSpec, aligned

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max
_LEAST_SCALE = 2.0**-100  # rows of smaller numbers, or of zeros, become zeros
_SCALED_AT_ONCE = 1 << 18  # elements, which stay in a cache


def low_bit_layout(layout: BlockLayout) -> BlockLayout:
    """Layout of a segment in transfer: parameters packed in their transfer dtypes, then the scales
    of their rows.
    """
    encoded = tuple(
        replace(spec, dtype=spec.transfer_dtype or spec.dtype) for spec in layout.parameters
    )
    scales = tuple(_scales(spec) for spec in layout.parameters if spec.transfer_dtype is FP8)
    return replace(layout, parameters=(*encoded, *scales), offsets=None)


def scales_positions(layout: BlockLayout) -> list[int | None]:
    """For each parameter of a segment, the position of its scales in the transfer layout; None if
    it has none.
    """
    positions = iter(range(len(layout.parameters), 2 * len(layout.parameters)))
    return [next(positions) if spec.transfer_dtype is FP8 else None for spec in layout.parameters]


def low_bit_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of memory in which ``round_low_bit`` rounds any of the parameters of these segments."""
    encoded = [spec for layout in layouts for spec in layout.parameters if spec.is_low_bit]
    return max(
        (_encoded_bytes(spec) + aligned(_scales(spec).nbytes) for spec in encoded), default=0
    )


def encode(theta: Tensor, encoded: Tensor, scales: Tensor | None) -> None:
    """Round a parameter to its transfer dtype.

    Args:
        theta: Stored weights, 1-D.
        encoded: Memory for the rounded weights, 1-D, of the transfer dtype.
        scales: Memory for the scales of 8-bit rows, 1-D float32: for each row the smallest power of
            2 that brings its largest magnitude into the dtype's range. Multiplying by it is exact,
            so encoding decoded weights is exact, too.
    """
    if scales is None:
        encoded.copy_(theta)
        return
    rows = theta.view(len(scales), -1)
    if (
        theta.dtype is torch.float32
        and dispatch.takes(theta)
        and dispatch.takes(scales)
        and encoded.is_cpu
    ):
        addresses = (tensor.data_ptr() for tensor in (encoded, scales, theta))
        if native.functions().zo2core_encode_float8(
            *addresses, LARGEST_FP8, _LEAST_SCALE, *rows.shape
        ):
            return  # else a row is not finite
    torch.linalg.vector_norm(rows, ord=torch.inf, dim=1, out=scales)
    half_to_one, exponent = torch.frexp(scales.div_(LARGEST_FP8).clamp_(min=_LEAST_SCALE))
    torch.ldexp(torch.ones_like(scales), exponent - (half_to_one == 0.5).int(), out=scales)
    step = max(1, _SCALED_AT_ONCE // max(rows.shape[1], 1))
    codes = encoded.view(rows.shape)
    for row in range(0, len(scales), step):
        codes[row : row + step].copy_(rows[row : row + step] / scales[row : row + step, None])


def decode(encoded: Tensor, scales: Tensor | None, out: Tensor) -> None:
    """Convert a parameter back to the dtype in which it is stored.

    Args:
        encoded: Rounded weights from ``encode``.
        scales: Scales from ``encode``, of 8-bit rows.
        out: Memory for the weights, 1-D, of the stored dtype.
    """
    if scales is not None and dispatch.decodes(encoded, out):
        rows = out.view(len(scales), -1)
        addresses = (tensor.data_ptr() for tensor in (out, encoded, scales))
        block = 1, max(rows.shape[1], 1)
        native.functions().zo2core_decode_float8(
            dispatch.DTYPES[out.dtype], *addresses, 0, *rows.shape, *block
        )
        return
    out.copy_(encoded)
    if scales is not None:
        out.view(len(scales), -1).mul_(scales[:, None])


def round_low_bit(spec: ParameterSpec, theta: Tensor, out: Tensor, memory: Tensor) -> None:
    """Write a parameter as it would be after a transfer: encoded and decoded again.

    Args:
        spec: The parameter.
        theta: Stored weights, 1-D.
        out: Memory of the same dtype and length; may be ``theta``.
        memory: uint8 memory to overwrite, ``low_bit_bytes`` long.
    """
    assert spec.transfer_dtype is not None
    nbytes = spec.numel * spec.transfer_dtype.itemsize
    offset = _encoded_bytes(spec)
    encoded = memory[:nbytes].view(spec.transfer_dtype)
    scales = (
        memory[offset : offset + _scales(spec).nbytes].view(torch.float32)
        if spec.transfer_dtype is FP8
        else None
    )
    encode(theta, encoded, scales)
    decode(encoded, scales, out)


def _encoded_bytes(spec: ParameterSpec) -> int:
    return aligned(spec.numel * (spec.transfer_dtype or spec.dtype).itemsize)


def _scales(spec: ParameterSpec) -> ParameterSpec:
    """The scales of a parameter: one float32 for each output row; a vector is one row."""
    rows = spec.shape[0] if len(spec.shape) > 1 else 1
    return ParameterSpec(f"{spec.name}: scales", (rows,), torch.float32, spec.index, decays=False)
