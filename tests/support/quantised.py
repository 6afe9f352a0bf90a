"""Encoded matrices: their bytes, and what they decode to, weight by weight."""

from collections.abc import Mapping

import torch
from hypothesis import strategies as st

from zo2core.encodings import Float8Blocks, Int8Rows, MatrixEncoding, NF4Blocks

SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


def bytes_of(encoding: MatrixEncoding, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    return torch.cat([parts[part.role].contiguous().view(-1).view(torch.uint8) for part in encoding.parts(shape)])


def by_hand(encoding: MatrixEncoding, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """Weight by weight, in float32, as the formats' papers and libraries have it."""
    out = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            place = row * shape[1] + column
            if isinstance(encoding, Int8Rows):
                value = parts["codes"][row, column].float() * parts["scales"][row] * 7.874015718698502e-3
            elif isinstance(encoding, Float8Blocks):
                scale = parts["scales"][row // encoding.block[0], column // encoding.block[1]].float()
                value = parts["codes"][row, column].float() * scale
            else:
                assert isinstance(encoding, NF4Blocks)
                byte = int(parts["codes"][place // 2])
                scale = parts["scales"][place // encoding.block]
                if encoding.nested_block is not None:
                    nested = parts["nested scales"][place // encoding.block // encoding.nested_block]
                    scale = parts["nested table"][int(scale)] * nested + encoding.offset
                value = parts["table"][byte & 15 if place % 2 else byte >> 4] * scale
            out[row, column] = value
    return out


@st.composite
def encodings(draw: st.DrawFn) -> MatrixEncoding:
    block = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    choices: list[MatrixEncoding] = [
        Int8Rows(),
        Float8Blocks(block, draw(st.sampled_from(SCALES))),
        NF4Blocks(2 * draw(st.integers(1, 40)), draw(st.sampled_from([None, 1, 3, 256]))),
    ]
    return draw(st.sampled_from(choices))
