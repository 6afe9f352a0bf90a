"""Matrices of 8 and 4 bits a weight: decoded into the memory a forward reads, and encoded for a checkpoint.

A weight is decoded by float32 operations, in the order of bitsandbytes and of transformers, and rounded once: a model whose
weights were decoded beforehand computes the same bits. What is encoded is only read, so that encoding happens once, when a
checkpoint is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from zo2core.kernels import native
from zo2core.types import EncodedPart, Encoding, Float8Blocks, Int8Rows, NF4Blocks, ParameterSpec

_CACHED = 1 << 15  # elements that are encoded at a time: few enough for torch to start no second thread and wait for it
INT8_UNIT = 7.874015718698502e-3  # of a code at a scale of 1: 1 / 127, as bitsandbytes writes it
# What a code of four bits stands for: QLoRA's NormalFloat, quantiles of N(0, 1) scaled to [-1, 1] (arXiv 2305.14314, E).
NF4_TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_WORTH_HELP = 1 << 18  # weights of a matrix that are worth a second thread
_AT_ONCE = 1 << 20  # weights that the reference decodes at a time


def decode(spec: ParameterSpec, stored: torch.Tensor, out: torch.Tensor, helper: Executor | None = None) -> None:
    """Write a matrix's weights, rounded once.

    Args:
        spec: A parameter that is encoded.
        stored: uint8, 1-D, its bytes: the encoding's parts, one after the other.
        out: Memory for the decoded weights, 1-D or of their shape, contiguous, of any floating-point dtype, on the same
            device.
        helper: Runs a part of the work beside the caller, where compiled kernels do it.
    """
    encoding, (rows, columns) = spec.encoding, spec.shape
    assert encoding is not None, "what is not encoded is read as it is"
    parts, matrix = _Parts(encoding.parts(spec.shape), stored), out.view(rows, columns)
    if not native.decodes(stored, out):
        _decode(encoding, parts, matrix)
        return
    run = partial(_run_native, encoding, parts, matrix)
    cut = rows // 2
    if helper is None or spec.numel < _WORTH_HELP or (isinstance(encoding, NF4Blocks) and cut * columns % encoding.block):
        run(0, rows)
        return
    rest = helper.submit(run, cut, rows)
    try:
        run(0, cut)
    finally:
        rest.result()


def _run_native(encoding: Encoding, parts: _Parts, matrix: torch.Tensor, first: int, last: int) -> None:
    """Decode some rows by a compiled kernel. In blocks that run through the matrix, rows begin with one."""
    out, start, codes = matrix[first:last], first * matrix.shape[1], parts.bytes["codes"]
    if isinstance(encoding, NF4Blocks):
        native.decode_nf4(out, parts.bytes, encoding, start)
    elif isinstance(encoding, Int8Rows):
        native.decode_int8(out, codes[start:], parts["scales"].float()[first:], INT8_UNIT)
    else:
        native.decode_float8(out, codes[start:], parts["scales"].float(), first, encoding.block)


def _decode(encoding: Encoding, parts: _Parts, matrix: torch.Tensor) -> None:
    """The reference."""
    if isinstance(encoding, NF4Blocks):
        _decode_nf4(encoding, parts, matrix.view(-1))
        return
    scales = parts["scales"].float()
    codes, (rows, columns) = parts["codes"], matrix.shape
    for first, last in _runs(rows, columns):
        if isinstance(encoding, Int8Rows):
            weights = codes[first:last] * scales[first:last, None] * INT8_UNIT
        else:
            weights = codes[first:last].float() * _spread(scales, encoding.block, first, last, columns)
        matrix[first:last] = weights


def decoded(spec: ParameterSpec, stored: torch.Tensor) -> torch.Tensor:
    """A matrix's weights, as ``decode`` writes them, in its dtype: 1-D, where ``stored`` is."""
    out = torch.empty(spec.numel, dtype=spec.dtype, device=stored.device)
    decode(spec, stored, out)
    return out


def encode(weights: torch.Tensor, encoding: Encoding) -> tuple[Encoding, Mapping[str, torch.Tensor]]:
    """Encode a matrix.

    Args:
        weights: (rows, columns), finite, of a floating-point dtype.
        encoding: How. An ``NF4Blocks`` that is double quantised gets the offset that fits the matrix.

    Returns:
        The encoding, and the tensors of its parts by role.
    """
    exact = weights.float()
    if isinstance(encoding, Int8Rows):
        scales = exact.abs().amax(dim=1)
        codes = torch.round(exact / torch.where(scales == 0, torch.ones_like(scales), scales)[:, None] * 127.0)
        return encoding, {"codes": codes.clamp_(-127, 127).to(torch.int8), "scales": scales}
    if isinstance(encoding, Float8Blocks):
        return encoding, _encode_float8(exact, encoding)
    return _encode_nf4(exact.reshape(-1), encoding)


class _Parts:
    """The parts of an encoded matrix, in its bytes."""

    def __init__(self, parts: Sequence[EncodedPart], stored: torch.Tensor) -> None:
        self._parts = {part.role: part for part in parts}
        ends = list(accumulate(part.nbytes for part in parts))
        self.bytes = {part.role: stored[end - part.nbytes : end] for part, end in zip(parts, ends, strict=True)}

    def __getitem__(self, role: str) -> torch.Tensor:
        """A part in its dtype and shape. What lies at an address that its dtype cannot have is copied: it is small."""
        part, raw = self._parts[role], self.bytes[role]
        if raw.data_ptr() % part.dtype.itemsize or raw.storage_offset() % part.dtype.itemsize:
            raw = raw.clone()
        return raw.view(part.dtype).view(part.shape)


def _block_scales(encoding: NF4Blocks, parts: _Parts) -> torch.Tensor:
    """A float32 for each block."""
    scales = parts["scales"]
    if encoding.nested_block is None:
        return scales.contiguous()
    nested = parts["nested scales"].repeat_interleave(encoding.nested_block)[: len(scales)]
    return parts["nested table"][scales.int()] * nested + encoding.offset


def _decode_nf4(encoding: NF4Blocks, parts: _Parts, out: torch.Tensor) -> None:
    table, codes, scales = parts["table"], parts["codes"], _block_scales(encoding, parts)
    length = _AT_ONCE // encoding.block * encoding.block
    for first in range(0, len(out), length):
        memory = out[first : first + length]
        pairs = codes[first // 2 : (first + len(memory) + 1) // 2].int()
        decoded = table[torch.stack([pairs >> 4, pairs & 15], dim=1).view(-1)[: len(memory)]]
        of_block = scales[first // encoding.block :].repeat_interleave(encoding.block)[: len(memory)]
        memory.copy_(decoded.mul_(of_block))


def _spread(scales: torch.Tensor, block: tuple[int, int], first: int, last: int, columns: int) -> torch.Tensor:
    """Scales of blocks, one for each weight of some rows."""
    rows = torch.arange(first, last, device=scales.device) // block[0]
    return scales[rows].repeat_interleave(block[1], dim=1)[:, :columns]


def _runs(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Rows to decode at a time: first, and behind the last."""
    step = max(1, _AT_ONCE // max(columns, 1))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _encode_float8(exact: torch.Tensor, encoding: Float8Blocks) -> Mapping[str, torch.Tensor]:
    """The largest magnitude of a block becomes the largest number of the dtype."""
    (rows, columns), (high, wide) = exact.shape, encoding.block
    padded = torch.nn.functional.pad(exact, (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scales = (blocks.abs().amax(dim=(1, 3)) / _LARGEST_FP8).to(encoding.scale_dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = exact / _spread(scales.float(), encoding.block, 0, rows, columns)
    return {"codes": codes.clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn), "scales": scales}


def _encode_nf4(exact: torch.Tensor, encoding: NF4Blocks) -> tuple[NF4Blocks, Mapping[str, torch.Tensor]]:
    """The nearest of the table's numbers, once a block's largest magnitude is 1."""
    numel, table = len(exact), torch.tensor(NF4_TABLE)
    blocks = torch.nn.functional.pad(exact, (0, -numel % encoding.block)).view(-1, encoding.block)
    scales = blocks.abs().amax(dim=1)
    relative = blocks / torch.where(scales == 0, torch.ones_like(scales), scales)[:, None]
    codes = torch.nn.functional.pad(_nearest(relative.view(-1)[:numel], table), (0, numel % 2), value=NF4_TABLE.index(0.0))
    parts = {"codes": codes[::2] << 4 | codes[1::2], "table": table}
    if encoding.nested_block is None:
        return encoding, {**parts, "scales": scales}
    offset = float(scales.mean())
    parts |= _encode_scales(scales - offset, encoding.nested_block)
    return replace(encoding, offset=offset), parts


def _nearest(numbers: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The place of the nearest entry of an ascending table, uint8; of two that are as near the lower one.

    It is how many of the midpoints are below: in a cache, that takes a third of the time of ``torch.bucketize``.
    """
    places = torch.zeros(numbers.numel(), dtype=torch.uint8)
    for piece, own in zip(torch.split(numbers, _CACHED), torch.split(places, _CACHED), strict=True):
        for midpoint in ((table[1:] + table[:-1]) / 2).tolist():
            own += piece > midpoint
    return places


def _encode_scales(around_zero: torch.Tensor, nested_block: int) -> dict[str, torch.Tensor]:
    """Scales of blocks in 8 bits: evenly spaced numbers between a nested block's largest magnitude and minus that."""
    padded = torch.nn.functional.pad(around_zero, (0, -len(around_zero) % nested_block)).view(-1, nested_block)
    nested = padded.abs().amax(dim=1)
    relative = padded / torch.where(nested == 0, torch.ones_like(nested), nested)[:, None]
    codes = (torch.round(relative * 127) + 128).view(-1)[: len(around_zero)].to(torch.uint8)
    table = torch.linspace(-128 / 127, 1, 256)
    table[128] = 0.0  # exactly
    return {"scales": codes, "nested scales": nested, "nested table": table}
