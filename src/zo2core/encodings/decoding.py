"""Matrices of 8 bits a weight and less: decoded into the memory a forward reads, and encoded for a
checkpoint.

A weight is decoded by float32 operations, in the order of bitsandbytes, of transformers and of
llama.cpp's gguf package, and rounded once: a model whose weights were decoded beforehand computes
the same bits. Encoded weights are never trained: they are encoded once, when a checkpoint is made.
Those of GGUF files are only decoded.

GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) store a matrix with inputs first, AWQ's gemv,
compressed-tensors, NVFP4 and MXFP4 by rows. A weight is ``(value of its code - zero) * scale``,
with a scale and mostly a zero for each group of a row's weights. Zeros and scales are unpacked
here, with torch; codes by a compiled kernel, or by the reference.

The blocks of GGUF files are decoded by the operations of llama.cpp's gguf package, in their order,
so the bits are equal. NaNs may have another payload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from zo2core.encodings.forms import (
    GGUF_BLOCKS,
    MXFP4_BLOCK,
    Float4Groups,
    Float8Blocks,
    GGUFRows,
    Int8Rows,
    MatrixEncoding,
    MatrixStack,
    MXFP4Stack,
    NF4Blocks,
    PackedGroups,
)
from zo2core.encodings.gguf import GGUF_DECODERS, grid_of, row_order
from zo2core.kernels import dispatch, native, parallel
from zo2core.kernels.low_bit import LARGEST_FP8
from zo2core.types import EncodedPart, ParameterSpec, encoded_bytes

_ENCODED_AT_ONCE = 1 << 15  # elements; with so few torch uses one thread, and waits for no other
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
# the order of decode.c's enum; others have codes row by row
_LAYOUTS = {"gptq": 0, "gptq_v2": 0, "awq": 1}
_BY_ROWS = 2
# the order of gguf.c's enum
_GGUF_KINDS = {name: number for number, name in enumerate(GGUF_BLOCKS)}
_NF4_ROLES = ("codes", "scales", "table", "nested scales", "nested table")
_IN_A_PART = 1 << 17  # weights that a thread decodes at once, at least
_MANY = 8  # matrices from which each thread takes some of them, not some rows of each
_DECODED_AT_ONCE = 1 << 20  # weights that the reference decodes at a time


def decode(spec: ParameterSpec, stored: Tensor, out: Tensor, *, in_threads: bool = True) -> None:
    """Write a matrix's weights, rounded once.

    Args:
        spec: An encoded parameter.
        stored: The parameter's bytes, uint8, 1-D: the encoding's parts, one after the other.
        out: Memory for the weights, 1-D or of the parameter's shape, contiguous, floating-point, on
            the same device.
        in_threads: Whether torch's threads share the work if compiled kernels do it.
    """
    assert isinstance(spec.encoding, MatrixEncoding | MXFP4Stack | MatrixStack), (
        "only encoded parameters are decoded"
    )
    matrices = _matrices(spec, stored, out)
    if not dispatch.decodes(stored, out):
        for matrix in matrices:
            _decode(matrix.encoding, matrix.parts(), matrix.weights)
        return
    if in_threads and len(matrices) >= _MANY:
        decode_some = partial(_decode_matrices, matrices)
        parallel.run_in_parts(decode_some, len(matrices), out.numel() // _IN_A_PART)
        return
    for matrix in matrices:
        units, run = _compiled(matrix)
        if in_threads and matrix.begins_rows_with_blocks():
            parallel.run_in_parts(run, units, matrix.weights.numel() // _IN_A_PART)
        else:
            run(0, units)


class _EncodedMatrix(NamedTuple):
    """A matrix, or a stack that is encoded as one, and the memory for its weights."""

    encoding: MatrixEncoding | MXFP4Stack
    shape: Sequence[int]
    stored: Tensor  # its bytes
    weights: Tensor  # (rows, columns)

    def parts(self) -> _Parts:
        """The parts of the encoding."""
        return _Parts(self.encoding.parts(self.shape), self.stored)

    def begins_rows_with_blocks(self) -> bool:
        """Whether no row begins within a block of weights that share a scale."""
        if not isinstance(self.encoding, NF4Blocks):
            return True
        return self.weights.shape[1] % self.encoding.block == 0


def _matrices(spec: ParameterSpec, stored: Tensor, out: Tensor) -> list[_EncodedMatrix]:
    """The matrices of a parameter, which are encoded one after the other."""
    columns = spec.shape[-1]
    all_rows = out.view(-1, columns)
    if not isinstance(spec.encoding, MatrixStack):
        assert isinstance(spec.encoding, MatrixEncoding | MXFP4Stack)
        return [_EncodedMatrix(spec.encoding, spec.shape, stored, all_rows)]
    encodings = [encoding for encoding, _ in spec.encoding.matrices]
    shapes = [(rows, columns) for _, rows in spec.encoding.matrices]
    sizes = [encoded_bytes(*pair) for pair in zip(encodings, shapes, strict=True)]
    weights = torch.split(all_rows, [rows for rows, _ in shapes])
    return list(map(_EncodedMatrix, encodings, shapes, torch.split(stored, sizes), weights))


def _decode_matrices(matrices: Sequence[_EncodedMatrix], first: int, last: int) -> None:
    """Decode some of the matrices by the compiled kernels."""
    for matrix in matrices[first:last]:
        units, run = _compiled(matrix)
        run(0, units)


def _compiled(encoded: _EncodedMatrix) -> tuple[int, Callable[[int, int], None]]:
    """The compiled kernel: number of units of work, and a function that does those from a first one
    to a last one.
    """
    compiled = native.functions()
    encoding = encoded.encoding
    matrix = encoded.weights
    parts = encoded.parts()
    (rows, columns) = matrix.shape
    stored = parts.bytes
    memory = dispatch.DTYPES[matrix.dtype], matrix.data_ptr(), stored["codes"].data_ptr()
    if isinstance(encoding, MXFP4Stack):
        *stack, inputs, outputs = encoded.shape
        sizes = inputs, outputs
        powers = stored["scales"].data_ptr()
        return math.prod(stack), lambda first, last: compiled.zo2core_decode_mxfp4(
            *memory, powers, first, last, *sizes
        )
    if isinstance(encoding, GGUFRows):
        grid = grid_of(encoding.name)
        # kept by the module
        table = _GGUF_KINDS[encoding.name], None if grid is None else grid.data_ptr()
        of_rows = *table, encoding.heads, rows, columns, stored["codes"].numel() // rows
        return rows, lambda first, last: compiled.zo2core_decode_gguf(
            *memory, *of_rows, first, last
        )
    if isinstance(encoding, PackedGroups | Float4Groups):
        groups = _groups(encoding, parts)
        are_floats = isinstance(encoding, Float4Groups)
        bits = encoding.bits if isinstance(encoding, PackedGroups) else 4
        layout = _LAYOUTS.get(encoding.name, _BY_ROWS)

        def run_eights(first: int, last: int) -> None:
            addresses = (None if tensor is None else tensor.data_ptr() for tensor in groups)
            ends = 8 * first, min(8 * last, rows)
            sizes = are_floats, layout, bits, rows, columns, encoding.group, *ends
            compiled.zo2core_decode_groups(*memory, *addresses, *sizes)

        return -(-rows // 8), run_eights
    if isinstance(encoding, NF4Blocks):
        addresses = [stored[role].data_ptr() if role in stored else None for role in _NF4_ROLES]
        blocks = encoding.nested_block or 0, encoding.offset, encoding.block

        def run_blocks(first: int, last: int) -> None:
            # blocks ignore rows: the first row has to begin one
            out = matrix[first:last]
            compiled.zo2core_decode_nf4(
                memory[0], out.data_ptr(), *addresses, *blocks, first * columns, out.numel()
            )

        return rows, run_blocks
    scales = _row_scales(encoding, parts, rows)

    def run_rows(first: int, last: int) -> None:
        out = matrix[first:last]
        codes = stored["codes"][first * columns :].data_ptr()
        if isinstance(encoding, Int8Rows):
            scaled = scales[first:].data_ptr(), encoding.unit, *out.shape
            compiled.zo2core_decode_int8(memory[0], out.data_ptr(), codes, *scaled)
        else:
            blocks = first, *out.shape, *encoding.block
            compiled.zo2core_decode_float8(
                memory[0], out.data_ptr(), codes, scales.data_ptr(), *blocks
            )

    return rows, run_rows


def _decode(encoding: MatrixEncoding | MXFP4Stack, parts: _Parts, matrix: Tensor) -> None:
    """Decode a matrix with torch operations: the reference."""
    if isinstance(encoding, MXFP4Stack):
        _decode_mxfp4(parts["codes"], parts["scales"], matrix)
        return
    if isinstance(encoding, PackedGroups | Float4Groups):
        _decode_groups(encoding, parts, matrix)
        return
    if isinstance(encoding, NF4Blocks):
        _decode_nf4(encoding, parts, matrix.view(-1))
        return
    codes = parts["codes"]
    (rows, columns) = matrix.shape
    step = max(1, _DECODED_AT_ONCE // max(columns, 1))
    if isinstance(encoding, GGUFRows):
        order = row_order(encoding, rows, matrix.device)
        for first in range(0, rows, step):
            blocks = codes[first : first + step].reshape(-1, GGUF_BLOCKS[encoding.name].nbytes)
            weights = GGUF_DECODERS[encoding.name](blocks).view(-1, columns)
            matrix[order[first : first + step]] = weights.to(matrix.dtype)
        return
    scales = _row_scales(encoding, parts, rows)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        if isinstance(encoding, Int8Rows):
            matrix[first:last] = codes[first:last] * scales[first:last, None] * encoding.unit
        else:
            matrix[first:last] = codes[first:last].float() * _scales_of_rows(
                scales, encoding.block, first, last, columns
            )


def _row_scales(encoding: Int8Rows | Float8Blocks, parts: _Parts, rows: int) -> Tensor:
    """The scales of a matrix of 8 bits a weight, in float32; those of ``Int8Rows`` for each row."""
    scales = parts["scales"].float()
    if isinstance(encoding, Int8Rows) and encoding.shares_scale:
        return scales.expand(rows).contiguous()
    return scales


def _decode_mxfp4(codes: Tensor, scales: Tensor, matrix: Tensor) -> None:
    """Decode the matrices of a stack one by one, and exchange their axes."""
    *_, outputs, blocks, _ = codes.shape
    codes = codes.view(-1, outputs, blocks, MXFP4_BLOCK // 2)
    scales = scales.view(-1, outputs, blocks)
    table = torch.tensor(FP4_TABLE, device=codes.device)
    for of_one, packed, powers in zip(
        matrix.view(len(codes), -1, outputs), codes.int(), scales.int(), strict=True
    ):
        numbers = table[torch.stack([packed & 15, packed >> 4], dim=-1)].view(
            outputs, blocks, MXFP4_BLOCK
        )
        of_one.copy_(torch.ldexp(numbers, powers[..., None] - 127).view(outputs, -1).t())


def decoded(spec: ParameterSpec, stored: Tensor) -> Tensor:
    """A matrix's decoded weights in its dtype: 1-D, on the device of ``stored``."""
    out = torch.empty(spec.numel, dtype=spec.dtype, device=stored.device)
    decode(spec, stored, out)
    return out


def encode(
    weights: Tensor, encoding: MatrixEncoding
) -> tuple[MatrixEncoding, Mapping[str, Tensor]]:
    """Encode a matrix.

    Args:
        weights: (rows, columns), finite, of a floating-point dtype.
        encoding: ``Int8Rows``, ``Float8Blocks`` or ``NF4Blocks``. The offset of double-quantised
            ``NF4Blocks`` is computed from the matrix.

    Returns:
        The encoding, and its parts by role.
    """
    assert not isinstance(encoding, GGUFRows | PackedGroups | Float4Groups), (
        "such matrices are only decoded"
    )
    exact = weights.float()
    if isinstance(encoding, Int8Rows):
        scales = exact.abs().amax(dim=1)
        codes = torch.round(
            exact / torch.where(scales == 0, torch.ones_like(scales), scales)[:, None] * 127.0
        )
        return encoding, {"codes": codes.clamp_(-127, 127).to(torch.int8), "scales": scales}
    if isinstance(encoding, Float8Blocks):
        return encoding, _encode_float8(exact, encoding)
    return _encode_nf4(exact.reshape(-1), encoding)


class _Parts:
    """Views of the parts of an encoded matrix in its bytes."""

    def __init__(self, parts: Sequence[EncodedPart], stored: Tensor) -> None:
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
        part = self._parts[role]
        raw = self.bytes[role]
        if raw.data_ptr() % part.dtype.itemsize or raw.storage_offset() % part.dtype.itemsize:
            raw = raw.clone()
        return raw.view(part.dtype).view(part.shape)


class _CodeGroups(NamedTuple):
    """What the codes of a matrix are worth, by groups of a row's weights."""

    scales: Tensor  # float32 (rows, groups)
    zeros: Tensor | None  # the same; None: zero
    order: Tensor | None  # int32 (columns,), the group of each column; None: neighbours form groups


def _groups(encoding: PackedGroups | Float4Groups, parts: _Parts) -> _CodeGroups:
    """Unpack a matrix's scales and zeros from its parts."""
    if isinstance(encoding, Float4Groups):
        return _CodeGroups(_float_scales(encoding, parts), None, None)
    scales = parts["scales"].float()
    zeros = parts.get("zeros")
    if encoding.inputs_first:
        assert zeros is not None
        scales = scales.t()
        zeros = _input_zeros(encoding, zeros)[:, : len(scales)].t()
    elif encoding.name == "awq_gemv":
        assert zeros is not None
        columns = parts["codes"].shape[1] * 32 // encoding.bits
        groups = -(-columns // encoding.group)  # the rest is padding
        scales = scales[:, :groups]
        zeros = _unpacked(zeros, encoding)[:, :groups]
    elif zeros is not None:
        zeros = _unpacked(zeros.t(), encoding)[:, : len(scales)].t()
    half = 2.0 ** (encoding.bits - 1)  # the zero of formats that store none
    zeros = torch.full_like(scales, half) if zeros is None else zeros.float()
    order = parts.get("order")
    if order is not None:
        # a damaged one must not lead out of the memory
        order = order.clamp(0, scales.shape[1] - 1).contiguous()
    return _CodeGroups(scales.contiguous(), zeros.contiguous(), order)


def _input_zeros(encoding: PackedGroups, words: Tensor) -> Tensor:
    """The zeros (groups, rows) of a matrix with inputs first.

    Files of GPTQ's first version store each zero less 1. GPTQModel subtracts it from whole words,
    and from each of the codes that continue in the next word.
    """
    if encoding.name != "gptq":
        return _unpacked(words, encoding)
    if 32 % encoding.bits:
        return (_unpacked(words, encoding) + 1) & ((1 << encoding.bits) - 1)
    ones = sum(1 << place for place in range(0, 32, encoding.bits))
    return _unpacked(words + ones, encoding)


def _float_scales(encoding: Float4Groups, parts: _Parts) -> Tensor:
    """The scales of a matrix of 4-bit floats, float32 (rows, groups)."""
    scales = parts["scales"]
    if encoding.name == "mxfp4-pack-quantized":
        return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    if encoding.name == "nvfp4":
        return (scales.float() / parts["global"]).contiguous()
    return (scales.float() * parts["global"]).contiguous()


def _decode_groups(encoding: PackedGroups | Float4Groups, parts: _Parts, matrix: Tensor) -> None:
    codes = parts["codes"]
    groups = _groups(encoding, parts)
    (rows, columns) = matrix.shape
    if isinstance(encoding, Float4Groups):
        table = torch.tensor(FP4_TABLE, device=matrix.device)
        weights = table[torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, -1).long()]
    elif encoding.name == "awq":
        weights = _unpacked(codes, encoding).t().float()
    else:
        words = codes.t() if encoding.inputs_first else codes
        weights = _unpacked(words, encoding)[:, :columns].float()
    column = torch.arange(columns, device=matrix.device)
    group = column // encoding.group if groups.order is None else groups.order.long()
    if groups.zeros is not None:
        weights = weights - groups.zeros[:, group]
    matrix.copy_(weights * groups.scales[:, group])


def _unpacked(words: Tensor, encoding: PackedGroups) -> Tensor:
    """The codes in each row's words of 32 bits, as int32, from the lowest bits up."""
    bits = encoding.bits
    most = (1 << bits) - 1
    if 32 % bits:
        places = bits * torch.arange(words.shape[1] * 32 // bits, device=words.device)
        # with the next word, where some continue
        pairs = (words.long() & 0xFFFFFFFF) | words.long().roll(-1, dims=1) << 32
        return (pairs[:, places // 32] >> places % 32 & most).int()
    in_order = range(32 // bits)
    places = torch.tensor(
        _PLACES.get(encoding.name, in_order), dtype=torch.int32, device=words.device
    )
    return ((words.contiguous()[..., None] >> bits * places) & most).view(len(words), -1)


def _block_scales(encoding: NF4Blocks, parts: _Parts) -> Tensor:
    """The scale of each block, float32."""
    scales = parts["scales"]
    if encoding.nested_block is None:
        return scales.contiguous()
    nested = parts["nested scales"].repeat_interleave(encoding.nested_block)[: len(scales)]
    return parts["nested table"][scales.int()] * nested + encoding.offset


def _decode_nf4(encoding: NF4Blocks, parts: _Parts, out: Tensor) -> None:
    table = parts["table"]
    codes = parts["codes"]
    scales = _block_scales(encoding, parts)
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


def _encode_float8(exact: Tensor, encoding: Float8Blocks) -> Mapping[str, Tensor]:
    """Scale each block so that its largest magnitude becomes the largest number of the dtype."""
    (rows, columns), (high, wide) = exact.shape, encoding.block
    padded = torch.nn.functional.pad(exact, (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scales = (blocks.abs().amax(dim=(1, 3)) / LARGEST_FP8).to(encoding.scale_dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = exact / _scales_of_rows(scales.float(), encoding.block, 0, rows, columns)
    return {
        "codes": codes.clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn),
        "scales": scales,
    }


def _encode_nf4(exact: Tensor, encoding: NF4Blocks) -> tuple[NF4Blocks, Mapping[str, Tensor]]:
    """Scale each block so that its largest magnitude is 1, and take the nearest numbers of the
    table.
    """
    numel = len(exact)
    table = torch.tensor(NF4_TABLE)
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
