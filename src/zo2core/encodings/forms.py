"""Encodings of matrices with 8 bits a weight or fewer: the order of their parts in memory.

``encodings/decoding.py`` decodes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from zo2core.kernels.low_bit import FP8
from zo2core.types import EncodedPart

MXFP4_BLOCK = 32  # weights that share a scale
# value of code 1 at a scale of 1: 1 / 127, as bitsandbytes writes it
INT8_UNIT = 7.874015718698502e-3


@dataclass(frozen=True)
class Int8Rows:
    """A signed byte per weight, and a scale per row: ``code * scale / 127`` (arXiv 2208.07339,
    without outliers), or ``code * scale``, as compressed-tensors has it.

    Args:
        scale_dtype: Dtype of the scales: float32, bfloat16 or float16.
        unit: What the product is multiplied with: 1 / 127 in float32, or 1.
        shares_scale: Whether all rows have the same scale, which is stored once.
    """

    scale_dtype: torch.dtype = torch.float32
    unit: float = INT8_UNIT
    shares_scale: bool = False
    name: str = field(default="int8", init=False)

    def parts(self, shape: Sequence[int]) -> tuple[EncodedPart, ...]:
        """Parts of a matrix of shape (rows, columns)."""
        rows, columns = shape
        scales = 1 if self.shares_scale else rows
        return EncodedPart("codes", torch.int8, (rows, columns)), EncodedPart(
            "scales", self.scale_dtype, (scales,)
        )


@dataclass(frozen=True)
class Float8Blocks:
    """An e4m3 number per weight and a scale per block: ``code * scale``, as in released FP8
    checkpoints.

    Args:
        block: Rows and columns of a block; blocks at the edges may have fewer.
        scale_dtype: Dtype of the scales: float32, bfloat16, float16, or float8_e8m0fnu, which are
            powers of 2.
    """

    block: tuple[int, int] = (128, 128)
    scale_dtype: torch.dtype = torch.float32
    name: str = field(default="fp8", init=False)

    def parts(self, shape: Sequence[int]) -> tuple[EncodedPart, ...]:
        """Parts of a matrix of shape (rows, columns)."""
        rows, columns = shape
        blocks = -(-rows // self.block[0]), -(-columns // self.block[1])
        return EncodedPart("codes", FP8, (rows, columns)), EncodedPart(
            "scales", self.scale_dtype, blocks
        )


@dataclass(frozen=True)
class NF4Blocks:
    """Four bits per weight, the first of two in the higher bits, and a scale per block (QLoRA,
    arXiv 2305.14314): bitsandbytes' nf4, and its fp4, which has another table.

    A weight is ``table[code] * scale``. A double quantised scale is ``nested_table[code] *
    nested_scale + offset``.

    Args:
        block: Number of weights of the flattened matrix that share a scale.
        nested_block: Number of scales that share a nested scale; None: scales are float32.
        offset: Added to every double quantised scale.
        name: ``nf4`` or ``fp4``.
    """

    block: int = 64
    nested_block: int | None = 256
    offset: float = 0.0
    name: str = "nf4"

    def parts(self, shape: Sequence[int]) -> tuple[EncodedPart, ...]:
        """Parts of a matrix of shape (rows, columns)."""
        numel = math.prod(shape)
        blocks = -(-numel // self.block)
        codes = EncodedPart("codes", torch.uint8, (-(-numel // 2),))
        table = EncodedPart("table", torch.float32, (16,))
        if self.nested_block is None:
            return codes, EncodedPart("scales", torch.float32, (blocks,)), table
        nested = EncodedPart("nested scales", torch.float32, (-(-blocks // self.nested_block),))
        nested_table = EncodedPart("nested table", torch.float32, (256,))
        return codes, EncodedPart("scales", torch.uint8, (blocks,)), table, nested, nested_table


class GGUFBlock(NamedTuple):
    """Some weights of a row that are coded together."""

    number: int  # of the type, in files
    weights: int
    nbytes: int


# by the names of ggml's types, in the order of gguf.c's enum
GGUF_BLOCKS: Mapping[str, GGUFBlock] = {
    "F32": GGUFBlock(0, 1, 4),
    "F16": GGUFBlock(1, 1, 2),
    "BF16": GGUFBlock(30, 1, 2),
    "Q4_0": GGUFBlock(2, 32, 18),
    "Q4_1": GGUFBlock(3, 32, 20),
    "Q5_0": GGUFBlock(6, 32, 22),
    "Q5_1": GGUFBlock(7, 32, 24),
    "Q8_0": GGUFBlock(8, 32, 34),
    "Q2_K": GGUFBlock(10, 256, 84),
    "Q3_K": GGUFBlock(11, 256, 110),
    "Q4_K": GGUFBlock(12, 256, 144),
    "Q5_K": GGUFBlock(13, 256, 176),
    "Q6_K": GGUFBlock(14, 256, 210),
    "IQ4_NL": GGUFBlock(20, 32, 18),
    "IQ4_XS": GGUFBlock(23, 256, 136),
    "MXFP4": GGUFBlock(39, 32, 17),
    "TQ1_0": GGUFBlock(34, 256, 54),
    "TQ2_0": GGUFBlock(35, 256, 66),
    "IQ1_S": GGUFBlock(19, 256, 50),
    "IQ1_M": GGUFBlock(29, 256, 56),
    "IQ2_XXS": GGUFBlock(16, 256, 66),
    "IQ2_XS": GGUFBlock(17, 256, 74),
    "IQ2_S": GGUFBlock(22, 256, 82),
    "IQ3_XXS": GGUFBlock(18, 256, 98),
    "IQ3_S": GGUFBlock(21, 256, 110),
}


@dataclass(frozen=True)
class GGUFRows:
    """Rows of blocks as llama.cpp's GGUF files have them, each block with its scales.

    Args:
        name: The type of ggml, one of ``GGUF_BLOCKS``.
        heads: Attention heads whose rows are stored in pairs, as llama.cpp rotates them: stored row
            2 i + j of a head is row j * half + i of the weight, where half is half of the head's
            rows. 0: rows are stored in the weight's order.
    """

    name: str
    heads: int = 0

    def parts(self, shape: Sequence[int]) -> tuple[EncodedPart, ...]:
        """What a matrix of (rows, columns) is stored as."""
        rows, columns = shape
        block = GGUF_BLOCKS[self.name]
        return (EncodedPart("codes", torch.uint8, (rows, columns // block.weights * block.nbytes)),)


@dataclass(frozen=True)
class PackedGroups:
    """Integers of a few bits, packed into words of 32, and a scale and mostly a zero for a group of
    a row's weights.

    Args:
        name: ``gptq``, ``gptq_v2`` (whose zeros are not stored less 1) or ``awq``, which store
            inputs first, ``awq_gemv``, or ``pack-quantized`` of compressed-tensors.
        group: Weights of a row that share a scale.
        scale_dtype: Dtype of the scales.
        has_zeros: Whether zeros are stored; without, the zero is half of the codes' number. Of
            ``pack-quantized`` only.
        is_ordered: Whether each column's group is stored; without, neighbours form groups.
        bits: Bits of a code: 4, in all but AWQ also 8, and in GPTQ also 2 and 3. Codes of 3 bits
            may continue in the next word.
    """

    name: str
    group: int
    scale_dtype: torch.dtype = torch.float16
    has_zeros: bool = True
    is_ordered: bool = False
    bits: int = 4

    @property
    def inputs_first(self) -> bool:
        """Whether the matrix is stored as (columns, rows)."""
        return self.name in ("gptq", "gptq_v2", "awq")

    def words(self, codes: int) -> int:
        """Words that so many codes take."""
        return -(-codes * self.bits // 32)

    def parts(self, shape: Sequence[int]) -> tuple[EncodedPart, ...]:
        """Parts of a matrix of shape (rows, columns)."""
        rows, columns = shape
        groups = -(-columns // self.group)
        packed = rows, self.words(columns)
        scaled = rows, groups
        zeros = self.words(rows), groups
        if self.inputs_first:
            packed = (columns, rows // 8) if self.name == "awq" else (self.words(columns), rows)
            scaled = groups, rows
            zeros = groups, self.words(rows)
        elif self.name == "awq_gemv":
            zeros = rows, self._padded_words(groups)
            scaled = rows, 8 * zeros[1]
        parts = [
            EncodedPart("codes", torch.int32, packed),
            EncodedPart("scales", self.scale_dtype, scaled),
        ]
        parts += [EncodedPart("zeros", torch.int32, zeros)] if self.has_zeros else []
        parts += [EncodedPart("order", torch.int32, (columns,))] if self.is_ordered else []
        return tuple(parts)

    def _padded_words(self, groups: int) -> int:
        """Words of a row's zeros in AWQ's gemv, as its kernel loads them: ``calculate_zeros_width``
        of AutoAWQ.
        """
        multiple = {64: 2, 32: 4}.get(self.group, 1)
        return -(-self.words(groups) // multiple) * multiple


class FloatGroup(NamedTuple):
    """Weights of a row in 4-bit floats that share a scale."""

    weights: int
    scale_dtype: torch.dtype
    has_global: bool  # whether the matrix has a scale, too


# by the names of formats
FLOAT_GROUPS: Mapping[str, FloatGroup] = {
    "nvfp4": FloatGroup(16, FP8, has_global=True),  # the matrix's scale divides
    "modelopt nvfp4": FloatGroup(16, FP8, has_global=True),  # it multiplies
    "mxfp4-pack-quantized": FloatGroup(MXFP4_BLOCK, torch.uint8, has_global=False),
}


@dataclass(frozen=True)
class Float4Groups:
    """A 4-bit float (e2m1) per weight, the first of two in the lower bits, and a scale for a group
    of a row's weights.

    Args:
        name: ``nvfp4`` of compressed-tensors, whose scales are e4m3 numbers with a common divisor;
            ``modelopt nvfp4``, with a common factor; or ``mxfp4-pack-quantized``, whose scales are
            exponents of 2 (e8m0).
    """

    name: str

    @property
    def group(self) -> int:
        """Weights of a row that share a scale."""
        return FLOAT_GROUPS[self.name].weights

    def parts(self, shape: Sequence[int]) -> tuple[EncodedPart, ...]:
        """Parts of a matrix of shape (rows, columns)."""
        rows, columns = shape
        group = FLOAT_GROUPS[self.name]
        parts = [
            EncodedPart("codes", torch.uint8, (rows, columns // 2)),
            EncodedPart("scales", group.scale_dtype, (rows, -(-columns // group.weights))),
        ]
        parts += [EncodedPart("global", torch.float32, (1,))] if group.has_global else []
        return tuple(parts)


@dataclass(frozen=True)
class MXFP4Stack:
    """A 4-bit float (e2m1) per weight, the first of two in the lower bits, and a power of 2 (e8m0)
    for each 32 (OCP MX 1.0).

    A weight is (..., inputs, outputs); its codes are stored with inputs last, as gpt-oss has its
    experts.
    """

    name: str = field(default="mxfp4", init=False)

    def parts(self, shape: Sequence[int]) -> tuple[EncodedPart, ...]:
        """Parts of a stack of matrices of shape (..., inputs, outputs)."""
        *stack, inputs, outputs = shape
        rows = (*stack, outputs, inputs // MXFP4_BLOCK)
        return EncodedPart("codes", torch.uint8, (*rows, MXFP4_BLOCK // 2)), EncodedPart(
            "scales", torch.uint8, rows
        )


@dataclass(frozen=True)
class MatrixStack:
    """Matrices that are encoded each for itself and stacked by rows, such as the experts of a
    mixture.

    Args:
        matrices: The encoding of each matrix, and its number of rows.
    """

    matrices: tuple[tuple[MatrixEncoding, int], ...]

    @property
    def name(self) -> str:
        """Name of the matrices' encoding."""
        return self.matrices[0][0].name

    def parts(self, shape: Sequence[int]) -> tuple[EncodedPart, ...]:
        """Parts of all matrices, one matrix after the other."""
        return tuple(
            part for encoding, rows in self.matrices for part in encoding.parts((rows, shape[-1]))
        )


MatrixEncoding: TypeAlias = (
    Int8Rows | Float8Blocks | NF4Blocks | PackedGroups | Float4Groups | GGUFRows
)
