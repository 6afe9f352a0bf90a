"""Matrices of 8 bits a weight and less: decoded into the memory a forward reads, and encoded for a
checkpoint.

A weight is decoded by float32 operations, in the order of bitsandbytes, of transformers and of
llama.cpp's gguf package, and rounded once: a model whose weights were decoded beforehand computes
the same bits. Encoded weights are never trained: they are encoded once, when a checkpoint is made.
Those of GGUF files are only decoded.

GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) store a matrix with inputs first,
compressed-tensors and NVFP4 by rows. A weight is ``(value of its code - zero) * scale``, with a
scale and mostly a zero for each group of a row's weights. Zeros and scales are unpacked here, with
torch; codes by a compiled kernel, or by the reference.

The blocks of GGUF files are decoded by the operations of llama.cpp's gguf package, in their order,
so the bits are equal. NaNs may have another payload.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

import zo2core.encodings as encodings
from zo2core.errors import OptionError
from zo2core.kernels import dispatch
from zo2core.types import ParameterSpec

_ENCODED_AT_ONCE = 1 << 15  # elements; with so few torch uses one thread, and waits for no other
# value of code 1 at a scale of 1: 1 / 127, as bitsandbytes writes it
INT8_UNIT = 7.874015718698502e-3
# Values of the 4-bit codes: QLoRA's NormalFloat, quantiles of N(0, 1) scaled to [-1, 1] (arXiv
# 2305.14314, E).
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# values of e2m1 codes
FP4_TABLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# where the codes of 8 neighbours are in a word, if not in their order
_PLACES = {"awq": (0, 4, 1, 5, 2, 6, 3, 7)}
_SYMMETRIC = 8.0  # the zero of formats that store none
_V1 = 0x11111111  # files of GPTQ's first version store each zero less 1
# the order of gguf.c's enum
_GGUF_KINDS = {name: number for number, name in enumerate(encodings.GGUF_BLOCKS)}
_NF4_ROLES = ("codes", "scales", "table", "nested scales", "nested table")
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_TWO_THREADS = 1 << 18  # weights of a matrix from which a second thread pays
_DECODED_AT_ONCE = 1 << 20  # weights that the reference decodes at a time


def decode(
    spec: ParameterSpec, stored: Tensor, out: Tensor, helper: Executor | None = None
) -> None:
    """Write a matrix's weights, rounded once.

    Args:
        spec: An encoded parameter.
        stored: The parameter's bytes, uint8, 1-D: the encoding's parts, one after the other.
        out: Memory for the weights, 1-D or of the parameter's shape, contiguous, floating-point, on
            the same device.
        helper: Runs half of the work in parallel if compiled kernels do it.
    """
    assert spec.encoding is not None, "only encoded parameters are decoded"
    whole, first, begin = out.view(-1, spec.shape[-1]), 0, 0
    of_all = (
        spec.encoding.matrices
        if isinstance(spec.encoding, encodings.MatrixStack)
        else ((spec.encoding, len(whole)),)
    )
    for encoding, rows in of_all:
        matrix = whole[first : first + rows]
        shape = spec.shape if isinstance(encoding, encodings.MXFP4Stack) else tuple(matrix.shape)
        parts = _Parts(encoding.parts(shape), stored[begin:])
        first, begin = first + rows, begin + encodings.encoded_bytes(encoding, shape)
        if not dispatch.decodes(stored, out):
            _decode(encoding, parts, matrix)
            continue
        units, run = _compiled(encoding, parts, matrix, shape)
        splits_block = (
            isinstance(encoding, encodings.NF4Blocks)
            and units // 2 * matrix.shape[1] % encoding.block
        )
        dispatch.run_in_halves(
            run, units, None if matrix.numel() < _TWO_THREADS or splits_block else helper
        )


def _compiled(
    encoding: encodings.MatrixEncoding | encodings.MXFP4Stack,
    parts: _Parts,
    matrix: Tensor,
    shape: Sequence[int],
) -> tuple[int, Callable[[int, int], None]]:
    """The compiled kernel: number of units of work, and a function that does those from a first one
    to a last one.
    """
    compiled, (rows, columns), stored = dispatch.functions(), matrix.shape, parts.bytes
    memory = dispatch.DTYPES[matrix.dtype], matrix.data_ptr(), stored["codes"].data_ptr()
    if isinstance(encoding, encodings.MXFP4Stack):
        *stack, inputs, outputs = shape
        sizes = inputs, outputs
        powers = stored["scales"].data_ptr()
        return math.prod(stack), lambda first, last: compiled.zo2core_decode_mxfp4(
            *memory, powers, first, last, *sizes
        )
    if isinstance(encoding, encodings.GGUFRows):
        grid = grid_of(encoding.name)
        # kept by the module
        table = _GGUF_KINDS[encoding.name], None if grid is None else grid.data_ptr()
        of_rows = *table, encoding.heads, rows, columns, stored["codes"].numel() // rows
        return rows, lambda first, last: compiled.zo2core_decode_gguf(
            *memory, *of_rows, first, last
        )
    if isinstance(encoding, encodings.FourBitGroups):
        groups = _groups(encoding, parts)
        # the order of decode.c's enum
        layout = 2 if not encoding.inputs_first else 1 if encoding.name == "awq" else 0

        def run_eights(first: int, last: int) -> None:
            addresses = (None if tensor is None else tensor.data_ptr() for tensor in groups)
            ends = 8 * first, min(8 * last, rows)
            sizes = encoding.name == "nvfp4", layout, rows, columns, encoding.group, *ends
            compiled.zo2core_decode_four_bits(*memory, *addresses, *sizes)

        return -(-rows // 8), run_eights
    if isinstance(encoding, encodings.NF4Blocks):
        addresses = [stored[role].data_ptr() if role in stored else None for role in _NF4_ROLES]
        blocks = encoding.nested_block or 0, encoding.offset, encoding.block

        def run_blocks(first: int, last: int) -> None:
            # blocks ignore rows: the first row has to begin one
            out = matrix[first:last]
            compiled.zo2core_decode_nf4(
                memory[0], out.data_ptr(), *addresses, *blocks, first * columns, out.numel()
            )

        return rows, run_blocks
    scales = parts["scales"].float()

    def run_rows(first: int, last: int) -> None:
        out, codes = matrix[first:last], stored["codes"][first * columns :].data_ptr()
        if isinstance(encoding, encodings.Int8Rows):
            scaled = scales[first:].data_ptr(), INT8_UNIT, *out.shape
            compiled.zo2core_decode_int8(memory[0], out.data_ptr(), codes, *scaled)
        else:
            blocks = first, *out.shape, *encoding.block
            compiled.zo2core_decode_float8(
                memory[0], out.data_ptr(), codes, scales.data_ptr(), *blocks
            )

    return rows, run_rows


def _decode(
    encoding: encodings.MatrixEncoding | encodings.MXFP4Stack, parts: _Parts, matrix: Tensor
) -> None:
    """Decode a matrix with torch operations: the reference."""
    if isinstance(encoding, encodings.MXFP4Stack):
        _decode_mxfp4(parts["codes"], parts["scales"], matrix)
        return
    if isinstance(encoding, encodings.FourBitGroups):
        _decode_four_bits(encoding, parts, matrix)
        return
    if isinstance(encoding, encodings.NF4Blocks):
        _decode_nf4(encoding, parts, matrix.view(-1))
        return
    codes, (rows, columns) = parts["codes"], matrix.shape
    step = max(1, _DECODED_AT_ONCE // max(columns, 1))
    if isinstance(encoding, encodings.GGUFRows):
        order = row_order(encoding, rows, matrix.device)
        for first in range(0, rows, step):
            blocks = codes[first : first + step].reshape(
                -1, encodings.GGUF_BLOCKS[encoding.name].nbytes
            )
            weights = _GGUF_DECODERS[encoding.name](blocks).view(-1, columns)
            matrix[order[first : first + step]] = weights.to(matrix.dtype)
        return
    scales = parts["scales"].float()
    for first in range(0, rows, step):
        last = min(first + step, rows)
        if isinstance(encoding, encodings.Int8Rows):
            matrix[first:last] = codes[first:last] * scales[first:last, None] * INT8_UNIT
        else:
            matrix[first:last] = codes[first:last].float() * _scales_of_rows(
                scales, encoding.block, first, last, columns
            )


def _decode_mxfp4(codes: Tensor, scales: Tensor, matrix: Tensor) -> None:
    """Decode the matrices of a stack one by one, and exchange their axes."""
    *_, outputs, blocks, _ = codes.shape
    codes, scales = (
        codes.view(-1, outputs, blocks, encodings.MXFP4_BLOCK // 2),
        scales.view(-1, outputs, blocks),
    )
    table = torch.tensor(FP4_TABLE, device=codes.device)
    for of_one, packed, powers in zip(
        matrix.view(len(codes), -1, outputs), codes.int(), scales.int(), strict=True
    ):
        numbers = table[torch.stack([packed & 15, packed >> 4], dim=-1)].view(
            outputs, blocks, encodings.MXFP4_BLOCK
        )
        of_one.copy_(torch.ldexp(numbers, powers[..., None] - 127).view(outputs, -1).t())


def decoded(spec: ParameterSpec, stored: Tensor) -> Tensor:
    """A matrix's decoded weights in its dtype: 1-D, on the device of ``stored``."""
    out = torch.empty(spec.numel, dtype=spec.dtype, device=stored.device)
    decode(spec, stored, out)
    return out


def encode(
    weights: Tensor, encoding: encodings.MatrixEncoding
) -> tuple[encodings.MatrixEncoding, Mapping[str, Tensor]]:
    """Encode a matrix.

    Args:
        weights: (rows, columns), finite, of a floating-point dtype.
        encoding: ``Int8Rows``, ``Float8Blocks`` or ``NF4Blocks``. The offset of double-quantised
            ``NF4Blocks`` is computed from the matrix.

    Returns:
        The encoding, and its parts by role.
    """
    assert not isinstance(encoding, encodings.GGUFRows | encodings.FourBitGroups), (
        "such matrices are only decoded"
    )
    exact = weights.float()
    if isinstance(encoding, encodings.Int8Rows):
        scales = exact.abs().amax(dim=1)
        codes = torch.round(
            exact / torch.where(scales == 0, torch.ones_like(scales), scales)[:, None] * 127.0
        )
        return encoding, {"codes": codes.clamp_(-127, 127).to(torch.int8), "scales": scales}
    if isinstance(encoding, encodings.Float8Blocks):
        return encoding, _encode_float8(exact, encoding)
    return _encode_nf4(exact.reshape(-1), encoding)


class _Parts:
    """Views of the parts of an encoded matrix in its bytes."""

    def __init__(self, parts: Sequence[encodings.EncodedPart], stored: Tensor) -> None:
        self._parts = {part.role: part for part in parts}
        ends = list(accumulate(part.nbytes for part in parts))
        self.bytes = {
            part.role: stored[end - part.nbytes : end]
            for part, end in zip(parts, ends, strict=True)
        }

    def get(self, role: str) -> Tensor | None:
        """A part that may be missing."""
        return self[role] if role in self._parts else None

    def __getitem__(self, role: str) -> Tensor:
        """A part in its dtype and shape.

        A part at an address not aligned to its dtype is copied: it is small.
        """
        part, raw = self._parts[role], self.bytes[role]
        if raw.data_ptr() % part.dtype.itemsize or raw.storage_offset() % part.dtype.itemsize:
            raw = raw.clone()
        return raw.view(part.dtype).view(part.shape)


class _Groups(NamedTuple):
    """What the codes of a matrix are worth, by groups of a row's weights."""

    scales: Tensor  # float32 (rows, groups)
    zeros: Tensor | None  # the same; None: zero
    order: Tensor | None  # int32 (columns,), the group of each column; None: neighbours form groups


def _groups(encoding: encodings.FourBitGroups, parts: _Parts) -> _Groups:
    """Unpack a matrix's scales and zeros from its parts."""
    scales, zeros = parts["scales"].float(), parts.get("zeros")
    if encoding.name == "nvfp4":
        return _Groups((scales / parts["global"]).contiguous(), None, None)
    if encoding.inputs_first:
        assert zeros is not None
        zeros = _unpacked(zeros + _V1 if encoding.name == "gptq" else zeros, encoding.name).t()
        scales = scales.t()
    elif zeros is not None:
        zeros = _unpacked(zeros.t(), encoding.name)[:, : len(scales)].t()
    zeros = torch.full_like(scales, _SYMMETRIC) if zeros is None else zeros.float()
    order = parts.get("order")
    if order is not None:
        # a damaged one must not lead out of the memory
        order = order.clamp(0, scales.shape[1] - 1).contiguous()
    return _Groups(scales.contiguous(), zeros.contiguous(), order)


def _decode_four_bits(encoding: encodings.FourBitGroups, parts: _Parts, matrix: Tensor) -> None:
    codes, groups, (rows, columns) = parts["codes"], _groups(encoding, parts), matrix.shape
    if encoding.name == "nvfp4":
        table = torch.tensor(FP4_TABLE, device=matrix.device)
        weights = table[torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, -1).long()]
    elif encoding.name == "awq":
        weights = _unpacked(codes, encoding.name).t().float()
    else:
        weights = _unpacked(codes.t() if encoding.inputs_first else codes, encoding.name)[
            :, :columns
        ].float()
    column = torch.arange(columns, device=matrix.device)
    group = column // encoding.group if groups.order is None else groups.order.long()
    if groups.zeros is not None:
        weights = weights - groups.zeros[:, group]
    matrix.copy_(weights * groups.scales[:, group])


def _unpacked(words: Tensor, name: str) -> Tensor:
    """The codes in words of 32 bits, as int32: 8 times as many columns."""
    places = torch.tensor(_PLACES.get(name, range(8)), dtype=torch.int32, device=words.device)
    return ((words.contiguous()[..., None] >> 4 * places) & 15).view(len(words), -1)


def _block_scales(encoding: encodings.NF4Blocks, parts: _Parts) -> Tensor:
    """The scale of each block, float32."""
    scales = parts["scales"]
    if encoding.nested_block is None:
        return scales.contiguous()
    nested = parts["nested scales"].repeat_interleave(encoding.nested_block)[: len(scales)]
    return parts["nested table"][scales.int()] * nested + encoding.offset


def _decode_nf4(encoding: encodings.NF4Blocks, parts: _Parts, out: Tensor) -> None:
    table, codes, scales = parts["table"], parts["codes"], _block_scales(encoding, parts)
    length = _DECODED_AT_ONCE // encoding.block * encoding.block
    for first in range(0, len(out), length):
        memory = out[first : first + length]
        pairs = codes[first // 2 : (first + len(memory) + 1) // 2].int()
        decoded = table[torch.stack([pairs >> 4, pairs & 15], dim=1).view(-1)[: len(memory)]]
        block_scales = scales[first // encoding.block :].repeat_interleave(encoding.block)[
            : len(memory)
        ]
        memory.copy_(decoded.mul_(block_scales))


def _scales_of_rows(
    scales: Tensor, block: tuple[int, int], first: int, last: int, columns: int
) -> Tensor:
    """Repeat the scales of blocks for each weight of some rows."""
    rows = torch.arange(first, last, device=scales.device) // block[0]
    return scales[rows].repeat_interleave(block[1], dim=1)[:, :columns]


def _encode_float8(exact: Tensor, encoding: encodings.Float8Blocks) -> Mapping[str, Tensor]:
    """Scale each block so that its largest magnitude becomes the largest number of the dtype."""
    (rows, columns), (high, wide) = exact.shape, encoding.block
    padded = torch.nn.functional.pad(exact, (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scales = (blocks.abs().amax(dim=(1, 3)) / _LARGEST_FP8).to(encoding.scale_dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = exact / _scales_of_rows(scales.float(), encoding.block, 0, rows, columns)
    return {
        "codes": codes.clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn),
        "scales": scales,
    }


def _encode_nf4(
    exact: Tensor, encoding: encodings.NF4Blocks
) -> tuple[encodings.NF4Blocks, Mapping[str, Tensor]]:
    """Scale each block so that its largest magnitude is 1, and take the nearest numbers of the
    table.
    """
    numel, table = len(exact), torch.tensor(NF4_TABLE)
    blocks = torch.nn.functional.pad(exact, (0, -numel % encoding.block)).view(-1, encoding.block)
    scales = blocks.abs().amax(dim=1)
    relative = blocks / torch.where(scales == 0, torch.ones_like(scales), scales)[:, None]
    codes = torch.nn.functional.pad(
        _nearest(relative.view(-1)[:numel], table), (0, numel % 2), value=NF4_TABLE.index(0.0)
    )
    parts = {"codes": codes[::2] << 4 | codes[1::2], "table": table}
    if encoding.nested_block is None:
        return encoding, {**parts, "scales": scales}
    offset = float(scales.mean())
    parts |= _encode_scales(scales - offset, encoding.nested_block)
    return replace(encoding, offset=offset), parts


def _nearest(numbers: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest entry of an ascending table, uint8; of two equally near ones the lower.

    The index is the number of midpoints below: counting them in a cache takes a third of the time
    of ``torch.bucketize``.
    """
    nearest = torch.zeros(numbers.numel(), dtype=torch.uint8)
    for chunk, counts in zip(
        torch.split(numbers, _ENCODED_AT_ONCE), torch.split(nearest, _ENCODED_AT_ONCE), strict=True
    ):
        for midpoint in ((table[1:] + table[:-1]) / 2).tolist():
            counts += chunk > midpoint
    return nearest


def _encode_scales(around_zero: Tensor, nested_block: int) -> dict[str, Tensor]:
    """Encode the scales of blocks in 8 bits, evenly spaced between plus and minus a nested block's
    largest magnitude.
    """
    padded = torch.nn.functional.pad(around_zero, (0, -len(around_zero) % nested_block)).view(
        -1, nested_block
    )
    nested = padded.abs().amax(dim=1)
    relative = padded / torch.where(nested == 0, torch.ones_like(nested), nested)[:, None]
    codes = (torch.round(relative * 127) + 128).view(-1)[: len(around_zero)].to(torch.uint8)
    table = torch.linspace(-128 / 127, 1, 256)
    table[128] = 0.0  # exactly
    return {"scales": codes, "nested scales": nested, "nested table": table}


# values of IQ4's codes
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def row_order(encoding: encodings.GGUFRows, rows: int, device: torch.device) -> Tensor:
    """For each stored row, its index in the matrix: int64, (rows,)."""
    order = torch.arange(rows, device=device)
    return (
        order
        if encoding.heads == 0
        else order.view(encoding.heads, 2, -1).transpose(1, 2).reshape(-1)
    )


def _numbers(blocks: Tensor, start: int, stop: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Bytes of each block as numbers, in float32."""
    return blocks[:, start:stop].clone(memory_format=torch.contiguous_format).view(dtype).float()


def _shifted(codes: Tensor, bits: int, group: int) -> Tensor:
    """Unpack codes of some bits, (blocks, codes): from each group of bytes first the lowest bits of
    all, then the next.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    parts = codes.reshape(len(codes), -1, 1, group) >> shifts[:, None]
    return (parts & ((1 << bits) - 1)).reshape(len(codes), -1)


def _scaled(scales: Tensor, codes: Tensor, least: Tensor | None = None) -> Tensor:
    """Multiply each group of a block's codes by its scale, and subtract its minimum."""
    weights = scales[:, :, None] * codes.view(*scales.shape, -1).float()
    return (weights if least is None else weights - least[:, :, None]).view(len(codes), -1)


def _five_bits(blocks: Tensor, start: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, start : start + 4, None] >> shifts & 1).reshape(len(blocks), 32)
    return _shifted(blocks[:, start + 4 :], 4, 16) | high << 4


def _q2_k(blocks: Tensor) -> Tensor:
    scales = _numbers(blocks, 80, 82) * (blocks[:, :16] & 15).float()
    least = _numbers(blocks, 82, 84) * (blocks[:, :16] >> 4).float()
    return _scaled(scales, _shifted(blocks[:, 16:80], 2, 32), least)


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = _shifted(blocks[:, 96:104], 4, 8), _shifted(blocks[:, 104:108], 2, 4)
    scales = _numbers(blocks, 108, 110) * ((low | high << 4).to(torch.int8) - 32).float()
    missing = (_shifted(blocks[:, :32], 1, 32) ^ 1) << 2  # 4 is subtracted where the bit is not set
    return _scaled(
        scales, _shifted(blocks[:, 32:96], 2, 32).to(torch.int8) - missing.to(torch.int8)
    )


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and the minima of the groups of 32 codes, 6 bits each."""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    codes = torch.cat([first & 63, (both & 15) | (first >> 2 & 48)], dim=1)
    least = torch.cat([second & 63, (both >> 4) | (second >> 2 & 48)], dim=1)
    return _numbers(blocks, 0, 2) * codes.float(), _numbers(blocks, 2, 4) * least.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, least = _six_bit_scales(blocks)
    return _scaled(scales, _shifted(blocks[:, 16:], 4, 32), least)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, least = _six_bit_scales(blocks)
    return _scaled(
        scales, _shifted(blocks[:, 48:], 4, 32) | _shifted(blocks[:, 16:48], 1, 32) << 4, least
    )


def _q6_k(blocks: Tensor) -> Tensor:
    scales = _numbers(blocks, 208, 210) * blocks[:, 192:208].view(torch.int8).float()
    codes = _shifted(blocks[:, :128], 4, 64) | _shifted(blocks[:, 128:192], 2, 32) << 4
    return _scaled(scales, codes.to(torch.int8) - 32)


def _looked_up(codes: Tensor, table: Sequence[int]) -> Tensor:
    """The values that codes of 4 bits stand for, float32."""
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.long()]


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).view(len(blocks), 8)
    scales = (
        _numbers(blocks, 0, 2)
        * ((low | _shifted(blocks[:, 2:4], 2, 1) << 4).to(torch.int8) - 32).float()
    )
    return _scaled(scales, _looked_up(_shifted(blocks[:, 8:], 4, 16), UNEVEN))


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int()
    halves = torch.where(
        exponents < 2, 0x00200000 << exponents.clamp(max=1), exponents - 1 << 23
    ).view(torch.float32)
    return halves * _looked_up(_shifted(blocks[:, 1:], 4, 16), TWICE_E2M1)


def _tq1_0(blocks: Tensor) -> Tensor:
    parts = []
    for first, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        # each byte has digits to the base of 3
        powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.uint8, device=blocks.device)
        parts.append((blocks[:, None, first:stop] * powers[:, None]).reshape(len(blocks), -1))
    digits = (torch.cat(parts, dim=1).int() * 3 >> 8) - 1
    return _numbers(blocks, 52, 54) * digits.float()


@cache
def grid_of(name: str) -> Tensor | None:
    """The rows of values that the codes of a type stand for, (rows, 4 or 8), int8; None for types
    that have none.

    Raises:
        OptionError: if the gguf package, which has these tables, is not installed.
    """
    if not name.startswith(("IQ1", "IQ2", "IQ3")):
        return None
    try:
        table = getattr(importlib.import_module("gguf.quants"), name)
    except ImportError as error:
        found, expected = (
            f"weights of the type {name}",
            "the package gguf, which has the values of its codes",
        )
        raise OptionError("the model's file", found, expected, "pip install gguf") from error
    table.init_grid()
    return torch.tensor(table.grid).view(-1, table.grid.shape[-1]).to(torch.int8)


def _on_grid(name: str, rows: Tensor, device: torch.device) -> Tensor:
    """The values of rows of a type's grid, (blocks, weights), int8."""
    grid = grid_of(name)
    assert grid is not None, "the type has a grid"
    return grid.to(device)[rows.reshape(len(rows), -1).long()].view(len(rows), -1)


def _signed(values: Tensor, signs: Tensor) -> Tensor:
    """Negate values where their bit is set; each byte has those of 8 neighbours."""
    return values * (1 - 2 * _shifted(signs.to(torch.uint8), 1, 1).to(torch.int8))


def _even(words: Tensor) -> Tensor:
    """Four times 7 signs of each word, and for each an eighth one that makes their number even:
    (blocks, 4 words).
    """
    signs = words[:, :, None] >> torch.arange(0, 28, 7, device=words.device) & 127
    return _with_parity(signs.reshape(len(words), -1))


def _with_parity(signs: Tensor) -> Tensor:
    folded = signs ^ signs >> 4
    folded = folded ^ folded >> 2
    return signs | (folded ^ folded >> 1) << 7 & 128


def _integers(blocks: Tensor, start: int, stop: int, nbytes: int) -> Tensor:
    """Bytes of each block as integers without sign, int64."""
    parts = blocks[:, start:stop].reshape(len(blocks), -1, nbytes).long()
    return (parts << 8 * torch.arange(nbytes, device=blocks.device)).sum(dim=2)


def _threes(codes: Tensor) -> Tensor:
    """Four codes of 3 bits of each integer."""
    return (codes[:, :, None] >> torch.arange(0, 12, 3, device=codes.device) & 7).reshape(
        len(codes), -1
    )


def _quarters(blocks: Tensor, codes: Tensor) -> Tensor:
    return _numbers(blocks, 0, 2) * (0.5 + codes.float()) * 0.25


def _iq1_s(blocks: Tensor) -> Tensor:
    high = _integers(blocks, 34, 50, 2)
    scales = _numbers(blocks, 0, 2) * (2 * (high >> 12 & 7) + 1).float()
    values = _on_grid("IQ1_S", blocks[:, 2:34] | _threes(high) << 8, blocks.device).view(
        *high.shape, -1
    )
    return _scaled(
        scales,
        (values + torch.where(high >> 15 == 0, 0.125, -0.125)[:, :, None]).view(len(blocks), -1),
    )


def _iq1_m(blocks: Tensor) -> Tensor:
    parts, high = _integers(blocks, 48, 56, 2), _shifted(blocks[:, 32:48], 4, 1)
    whole = (parts >> 12 << torch.arange(0, 16, 4, device=blocks.device)).sum(dim=1, keepdim=True)
    whole = (
        torch.where(whole < 1 << 15, whole, whole - (1 << 16))
        .to(torch.int16)
        .view(torch.float16)
        .float()
    )
    values = _on_grid("IQ1_M", blocks[:, :32] | (high & 7).long() << 8, blocks.device).view(
        *high.shape, -1
    )
    values = values + torch.where(high & 8 == 0, 0.125, -0.125)[:, :, None]
    return _scaled(whole * (2 * _threes(parts) + 1).float(), values.view(len(blocks), -1))


def _iq2_xxs(blocks: Tensor) -> Tensor:
    groups = blocks[:, 2:].reshape(-1, 8)
    words = _integers(groups, 4, 8, 4).view(len(blocks), 8)
    values = _on_grid("IQ2_XXS", groups[:, :4].reshape(len(blocks), -1), blocks.device)
    return _scaled(_quarters(blocks, words >> 28), _signed(values, _even(words)))


def _iq2_xs(blocks: Tensor) -> Tensor:
    codes = _integers(blocks, 2, 66, 2)
    values = _signed(_on_grid("IQ2_XS", codes & 511, blocks.device), _with_parity(codes >> 9))
    return _scaled(_quarters(blocks, _shifted(blocks[:, 66:74], 4, 1)), values)


def _iq2_s(blocks: Tensor) -> Tensor:
    values = _on_grid(
        "IQ2_S", blocks[:, 2:34] | _shifted(blocks[:, 66:74], 2, 1).long() << 8, blocks.device
    )
    return _scaled(
        _quarters(blocks, _shifted(blocks[:, 74:82], 4, 1)), _signed(values, blocks[:, 34:66])
    )


def _iq3_xxs(blocks: Tensor) -> Tensor:
    words = _integers(blocks, 66, 98, 4)
    scales = _numbers(blocks, 0, 2) * (0.5 + (words >> 28).float()) * 0.5
    return _scaled(
        scales, _signed(_on_grid("IQ3_XXS", blocks[:, 2:66], blocks.device), _even(words))
    )


def _iq3_s(blocks: Tensor) -> Tensor:
    rows = blocks[:, 2:66] | _shifted(blocks[:, 66:74], 1, 1).long() << 8
    scales = _numbers(blocks, 0, 2) * (1 + 2 * _shifted(blocks[:, 106:110], 4, 1)).float()
    return _scaled(scales, _signed(_on_grid("IQ3_S", rows, blocks.device), blocks[:, 74:106]))


_GGUF_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda blocks: _numbers(blocks, 0, 4, torch.float32),
    "F16": lambda blocks: _numbers(blocks, 0, 2),
    "BF16": lambda blocks: _numbers(blocks, 0, 2, torch.bfloat16),
    "Q4_0": lambda blocks: (
        _numbers(blocks, 0, 2) * (_shifted(blocks[:, 2:], 4, 16).to(torch.int8) - 8).float()
    ),
    "Q4_1": lambda blocks: (
        _numbers(blocks, 0, 2) * _shifted(blocks[:, 4:], 4, 16).float() + _numbers(blocks, 2, 4)
    ),
    "Q5_0": lambda blocks: (
        _numbers(blocks, 0, 2) * (_five_bits(blocks, 2).to(torch.int8) - 16).float()
    ),
    "Q5_1": lambda blocks: (
        _numbers(blocks, 0, 2) * _five_bits(blocks, 4).float() + _numbers(blocks, 2, 4)
    ),
    "Q8_0": lambda blocks: blocks[:, 2:].view(torch.int8).float() * _numbers(blocks, 0, 2),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda blocks: (
        _numbers(blocks, 0, 2) * _looked_up(_shifted(blocks[:, 2:], 4, 16), UNEVEN)
    ),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": lambda blocks: (
        _numbers(blocks, 64, 66) * (_shifted(blocks[:, :64], 2, 32).to(torch.int8) - 1).float()
    ),
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
