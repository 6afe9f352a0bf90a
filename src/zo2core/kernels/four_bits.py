"""Matrices of 4 bits a weight with a scale, and mostly a zero, for each group of a row's weights.

GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) store the matrix with inputs first, compressed-tensors and NVFP4 by rows.
A weight is ``(value of its code - zero) * scale`` in float32, rounded once. The zeros and scales of a matrix are unpacked
here, with torch; the codes by a compiled kernel, or by ``decode``, which is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from zo2core.encodings import FourBitGroups

FP4_TABLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # values of e2m1 codes
_PLACES = {"awq": (0, 4, 1, 5, 2, 6, 3, 7)}  # where the codes of 8 neighbours are in a word, if not in their order
_SYMMETRIC = 8.0  # the zero of formats that store none
_V1 = 0x11111111  # files of GPTQ's first version store each zero less 1


class Groups(NamedTuple):
    """What the codes of a matrix are worth, by groups of a row's weights."""

    scales: torch.Tensor  # float32 (rows, groups)
    zeros: torch.Tensor | None  # the same; None: zero
    order: torch.Tensor | None  # int32 (columns,), the group of each column; None: neighbours form groups


def groups_of(encoding: FourBitGroups, parts: Mapping[str, torch.Tensor]) -> Groups:
    """Unpack a matrix's scales and zeros from its parts."""
    scales, zeros = parts["scales"].float(), parts.get("zeros")
    if encoding.name == "nvfp4":
        return Groups((scales / parts["global"]).contiguous(), None, None)
    if encoding.inputs_first:
        assert zeros is not None
        zeros = _unpacked(zeros + _V1 if encoding.name == "gptq" else zeros, encoding.name).t()
        scales = scales.t()
    elif zeros is not None:
        zeros = _unpacked(zeros.t(), encoding.name)[:, : len(scales)].t()
    zeros = torch.full_like(scales, _SYMMETRIC) if zeros is None else zeros.float()
    order = parts.get("order")
    if order is not None:
        order = order.clamp(0, scales.shape[1] - 1).contiguous()  # a damaged one must not lead out of the memory
    return Groups(scales.contiguous(), zeros.contiguous(), order)


def decode(encoding: FourBitGroups, codes: torch.Tensor, groups: Groups, matrix: torch.Tensor) -> None:
    """Write the weights of a matrix, (rows, columns)."""
    rows, columns = matrix.shape
    if encoding.name == "nvfp4":
        table = torch.tensor(FP4_TABLE, device=matrix.device)
        weights = table[torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, -1).long()]
    elif encoding.name == "awq":
        weights = _unpacked(codes, encoding.name).t().float()
    else:
        weights = _unpacked(codes.t() if encoding.inputs_first else codes, encoding.name)[:, :columns].float()
    column = torch.arange(columns, device=matrix.device)
    group = column // encoding.group if groups.order is None else groups.order.long()
    if groups.zeros is not None:
        weights = weights - groups.zeros[:, group]
    matrix.copy_(weights * groups.scales[:, group])


def _unpacked(words: torch.Tensor, name: str) -> torch.Tensor:
    """The codes in words of 32 bits, as int32: 8 times as many columns."""
    places = torch.tensor(_PLACES.get(name, range(8)), dtype=torch.int32, device=words.device)
    return ((words.contiguous()[..., None] >> 4 * places) & 15).view(len(words), -1)
