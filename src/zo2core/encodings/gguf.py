"""Decoders of GGUF's types in torch, which compiled kernels are compared with.

Each takes blocks as they are stored: uint8, (blocks, bytes of a block).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from zo2core.encodings.forms import GGUFRows
from zo2core.errors import OptionError

# values of IQ4's codes
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def row_order(encoding: GGUFRows, rows: int, device: torch.device) -> Tensor:
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
    low = _shifted(blocks[:, 96:104], 4, 8)
    high = _shifted(blocks[:, 104:108], 2, 4)
    scales = _numbers(blocks, 108, 110) * ((low | high << 4).to(torch.int8) - 32).float()
    missing = (_shifted(blocks[:, :32], 1, 32) ^ 1) << 2  # 4 is subtracted where the bit is not set
    return _scaled(
        scales, _shifted(blocks[:, 32:96], 2, 32).to(torch.int8) - missing.to(torch.int8)
    )


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and the minima of the groups of 32 codes, 6 bits each."""
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    both = blocks[:, 12:16]
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
        found = f"weights of the type {name}"
        expected = "the package gguf, which has the values of its codes"
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
    parts = _integers(blocks, 48, 56, 2)
    high = _shifted(blocks[:, 32:48], 4, 1)
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


GGUF_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
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
