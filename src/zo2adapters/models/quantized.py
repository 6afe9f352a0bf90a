"""Checkpoints whose matrices are stored in 8 or 4 bits, as transformers writes them.

Formats: bitsandbytes of 8 bits (``weight`` in int8, ``SCB`` beside it) and 4 bits (nf4: ``weight`` with ``weight.absmax``,
``weight.quant_map``, a JSON object in bytes, and nested ones where scales are quantised, too), fine-grained FP8 (``weight``
in e4m3, ``weight_scale_inv``), MXFP4 of gpt-oss's experts (``_blocks`` and ``_scales``), GPTQ and AWQ of 4 bits, and
compressed-tensors' packed integers of 4 bits and NVFP4. ``config.json`` is checked against the tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zo2core.checkpoint.shards import DTYPE_NAMES, DTYPES, Piece, TensorEntry
from zo2core.encodings import (
    MXFP4_BLOCK,
    Encoding,
    Float8Blocks,
    FourBitGroups,
    Int8Rows,
    MatrixStack,
    MXFP4Stack,
    NF4Blocks,
)
from zo2core.errors import CheckpointError, UnsupportedModelError

_INTEGERS = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros", "order": ".g_idx"}
SUFFIXES = {  # suffixes of a layer's tensors, by the encoding's name and the part's role
    "int8": {"codes": ".weight", "scales": ".SCB", "format": ".weight_format"},  # the last is 0: codes row by row
    "fp8": {"codes": ".weight", "scales": ".weight_scale_inv"},
    "nf4": {
        "codes": ".weight",
        "scales": ".weight.absmax",
        "table": ".weight.quant_map",
        "nested scales": ".weight.nested_absmax",
        "nested table": ".weight.nested_quant_map",
        "state": ".weight.quant_state.bitsandbytes__nf4",
    },
    "mxfp4": {"codes": "_blocks", "scales": "_scales"},
    "gptq": _INTEGERS,
    "gptq_v2": _INTEGERS,
    "awq": _INTEGERS,
    "int4": {"codes": ".weight_packed", "scales": ".weight_scale", "zeros": ".weight_zero_point", "order": ".weight_g_idx"},
    "nvfp4": {"codes": ".weight_packed", "scales": ".weight_scale", "global": ".weight_global_scale"},
}
MATRIX = ".matrices."  # between the name of a tensor of three axes and the number of one of its matrices; of this package
_UNUSED = (".weight_shape", ".input_global_scale", ".input_scale")  # of compressed-tensors, beside what is decoded
_MARKS = {name: roles["codes"] for name, roles in SUFFIXES.items()}  # suffixes that encoded layers alone have
_MARKS |= {"int8": ".SCB", "fp8": ".weight_scale_inv", "nf4": SUFFIXES["nf4"]["state"]}
_STACKS = MXFP4Stack, MatrixStack
_MAX_BLOCK = 4096  # weights or scales that share a scale, bitsandbytes' limit
_MAX_OFFSET = torch.finfo(torch.float32).max
_MAX_STATE_BYTES = 4096


class EncodedTensor(NamedTuple):
    """A matrix of a checkpoint that is stored in several tensors."""

    encoding: Encoding
    shape: tuple[int, ...]  # of the matrix
    parts: tuple[TensorEntry, ...]  # in the encoding's order

    def pieces(self) -> tuple[Piece, ...]:
        """The pieces to read, as bytes."""
        return tuple(Piece.whole(part.as_bytes()) for part in self.parts)


@dataclass(frozen=True)
class Quantization:
    """How ``config.json`` says that a checkpoint is quantised."""

    where: Path
    method: str
    block: tuple[int, int] = (128, 128)  # rows and columns of fp8's blocks
    group: int | None = None  # weights of a row that share a scale; None: all
    is_symmetric: bool = True  # whether int4's zeros are not stored

    @classmethod
    def of(cls, where: Path, config: Any) -> Quantization:
        """Read a config's ``quantization_config``."""
        values = config if isinstance(config, Mapping) else config.to_dict()
        described = _described(values)
        if described is not None:
            return cls(where, **described)
        method = values.get("quant_method")
        kind = f" of type {values.get('bnb_4bit_quant_type')}" if method == "bitsandbytes" else ""
        kind += f" in blocks of {values.get('weight_block_size')}" if method == "fp8" else ""
        kind += f" of {values['bits']} bits" if method in ("gptq", "awq") and "bits" in values else ""
        kind += f" in format {values.get('format')}" if method == "compressed-tensors" else ""
        raise UnsupportedModelError(
            where,
            found=f"quantization_config: {method}{kind}",
            expected="bitsandbytes of 8 bits or of 4 bits as nf4, fp8 in blocks, mxfp4, GPTQ or AWQ of 4 bits everywhere, "
            "or one scheme of compressed-tensors: packed integers of 4 bits or NVFP4",
            remedy="use the unquantised checkpoint, or quantise it: zo2 convert --quantize int8|nf4|fp8",
        )

    def split(
        self, entries: Mapping[str, TensorEntry], dtype: torch.dtype
    ) -> tuple[dict[str, TensorEntry], dict[str, EncodedTensor]]:
        """A checkpoint's tensors as if none were encoded, and the encoded ones, by the parameters' names."""
        mark, own = _MARKS[self.method], "" if self.method == "mxfp4" else ".weight"
        layers = sorted(name.removesuffix(mark) for name in entries if name.endswith(mark))
        if not layers:
            raise UnsupportedModelError(
                self.where,
                found=f"quantization_config of {self.method}, and no tensor of it",
                expected="the tensors that belong to this config",
                remedy="take quantization_config out of config.json if the weights are not quantised",
            )
        suffixes = *SUFFIXES[self.method].values(), *_UNUSED
        parts = {f"{layer}{suffix}" for layer in layers for suffix in suffixes}
        plain = {name: entry for name, entry in entries.items() if name not in parts}
        encoded = _with_stacks({f"{layer}{own}": self._tensor(entries, layer) for layer in layers})
        for name, (_, shape, (codes, *_)) in encoded.items():
            plain[name] = codes._replace(name=name, dtype=DTYPE_NAMES[dtype], shape=shape)
        return plain, encoded

    def _tensor(self, entries: Mapping[str, TensorEntry], layer: str) -> EncodedTensor:
        encoding, shape = self._encoding(entries, layer)
        parts: list[TensorEntry] = []
        for part in encoding.parts(shape):
            entry = self._entry(entries, layer, part.role)
            fits = entry.nbytes == part.nbytes if self.method in ("nf4", "nvfp4") else entry.shape == part.shape
            if not fits or entry.dtype != DTYPE_NAMES[part.dtype]:
                expected = f"{DTYPE_NAMES[part.dtype]} of shape {list(part.shape)}, for {layer} in {encoding.name}"
                raise _malformed(entry, f"{entry.dtype} of shape {list(entry.shape)}", expected)
            parts.append(entry)
        return EncodedTensor(encoding, shape, tuple(parts))

    def _encoding(self, entries: Mapping[str, TensorEntry], layer: str) -> tuple[Encoding, tuple[int, ...]]:
        """The encoding and the shape of a layer's matrix."""
        if self.method == "nf4":
            return _nf4(self._entry(entries, layer, "state"))
        codes = self._entry(entries, layer, "codes")
        if self.method == "mxfp4" and len(codes.shape) == 4:
            *stack, outputs, blocks, _ = codes.shape
            return MXFP4Stack(), (*stack, blocks * MXFP4_BLOCK, outputs)
        if self.method == "mxfp4" or len(codes.shape) != 2:
            expected = f"{'stacks of matrices' if self.method == 'mxfp4' else 'a matrix'} in {self.method}"
            raise _malformed(codes, f"shape {list(codes.shape)}", expected)
        if self.method == "fp8":
            scales = self._entry(entries, layer, "scales").dtype
            return Float8Blocks(self.block, DTYPES[scales if scales in ("BF16", "F8_E8M0") else "F32"]), codes.shape
        if self.method != "int8":
            return self._groups(entries, layer, *codes.shape)
        order = entries.get(f"{layer}{SUFFIXES['int8']['format']}")
        if order is not None and (order.nbytes != 1 or any(_read(order))):
            remedy = "quantise the model again with a recent bitsandbytes, or use the unquantised checkpoint"
            raise _malformed(order, "codes in another layout", "0, the layout row by row", remedy)
        return Int8Rows(), codes.shape

    def _groups(
        self, entries: Mapping[str, TensorEntry], layer: str, first: int, second: int
    ) -> tuple[FourBitGroups, tuple[int, int]]:
        """The encoding and the shape of a matrix of 4 bits a weight, whose codes have this shape."""
        shapes = {"awq": (8 * second, first), "int4": (first, 8 * second), "nvfp4": (first, 2 * second)}
        rows, columns = shapes.get(self.method, (second, 8 * first))
        stated = entries.get(f"{layer}.weight_shape")
        if stated is not None and stated.nbytes == 16:
            true_rows, true_columns = struct.unpack("<2q", stated.read())
            if true_rows == rows and columns - 8 < true_columns <= columns:
                columns = true_columns
        group = self.group or columns
        scales = self._entry(entries, layer, "scales").torch_dtype or torch.float16
        suffixes, is_ordered = SUFFIXES[self.method], False
        order = entries.get(f"{layer}{suffixes['order']}") if "order" in suffixes else None
        if order is not None:
            groups = torch.frombuffer(bytearray(_read(order, 4 * columns, "I32")), dtype=torch.int32)
            if len(groups) != columns or not 0 <= int(groups.min()) <= int(groups.max()) < -(-columns // group):
                raise _malformed(order, f"{len(groups)} groups of columns, from {int(groups.min())} to {int(groups.max())}")
            is_ordered = not torch.equal(groups, torch.arange(columns, dtype=torch.int32) // group)  # no neighbours
        has_zeros = self.method not in ("int4", "nvfp4") or not self.is_symmetric
        return FourBitGroups(self.method, group, scales, has_zeros, is_ordered), (rows, columns)

    def _entry(self, entries: Mapping[str, TensorEntry], layer: str, role: str) -> TensorEntry:
        name = f"{layer}{SUFFIXES[self.method][role]}"
        if name not in entries:
            raise CheckpointError(
                self.where.parent,
                found=f"no tensor {name}",
                expected=f"all tensors of a matrix in {self.method}, as config.json says",
                remedy="get all shards, and the config.json that belongs to them",
            )
        return entries[name]


def _described(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Method, block, group and symmetry, by the fields of ``Quantization``; None: it is another quantisation."""
    method, weights = values.get("quant_method"), dict[str, Any]()
    if method == "bitsandbytes":
        name = "int8" if values.get("load_in_8bit") else values.get("bnb_4bit_quant_type")
        return {"method": name} if name in ("int8", "nf4") else None
    if method == "fp8":
        block: Any = values.get("weight_block_size")
        is_block = isinstance(block, (list, tuple)) and _are_sizes(block, 2)
        return {"method": "fp8", "block": tuple(block)} if is_block else None
    if method == "gptq":
        name = values.get("checkpoint_format") or "gptq"
        fits = values.get("bits") == 4 and not values.get("dynamic") and name in ("gptq", "gptq_v2")
        return {"method": name, "group": _group(values.get("group_size"))} if fits else None
    if method == "awq":
        is_gemm = values.get("version", "gemm").lower() == "gemm" and values.get("zero_point", True)
        group = values.get("group_size", values.get("q_group_size"))
        return (
            {"method": "awq", "group": _group(group)} if values.get("bits", values.get("w_bit")) == 4 and is_gemm else None
        )
    if method == "compressed-tensors":
        schemes = list((values.get("config_groups") or {}).values())
        is_dense = (values.get("sparsity_config") or {}).get("format") in ("dense", None)
        is_plain = is_dense and not values.get("transform_config") and len(schemes) == 1
        if is_plain and values.get("quantization_status") in ("compressed", None):
            weights = schemes[0].get("weights") or {}
        is_integer = weights.get("type") == "int" and weights.get("strategy") in ("group", "channel")
        if values.get("format") == "nvfp4-pack-quantized" and weights.get("num_bits") == 4:
            return {"method": "nvfp4", "group": 16}
        if values.get("format") == "pack-quantized" and weights.get("num_bits") == 4 and is_integer:
            group = _group(weights.get("group_size"))
            return {"method": "int4", "group": group, "is_symmetric": bool(weights.get("symmetric", True))}
    return {"method": "mxfp4"} if method == "mxfp4" else None


def _with_stacks(encoded: Mapping[str, EncodedTensor]) -> dict[str, EncodedTensor]:
    """Unite the matrices that this package wrote for a tensor of three axes; the others stay as they are."""
    found: dict[str, EncodedTensor] = {}
    stacks: dict[str, dict[int, EncodedTensor]] = {}
    for name, matrix in encoded.items():
        stack, _, number = name.removesuffix(".weight").partition(MATRIX)
        if number.isdecimal():
            stacks.setdefault(stack, {})[int(number)] = matrix
        else:
            found[name] = matrix
    for name, by_number in stacks.items():
        matrices = [by_number[number] for number in sorted(by_number)]
        entry, shapes = matrices[0].parts[0], sorted({matrix.shape for matrix in matrices})
        if len(shapes) > 1 or max(by_number) != len(matrices) - 1:
            raise _malformed(entry, f"{len(matrices)} matrices of {name}, up to number {max(by_number)}, of shapes {shapes}")
        stack_of = MatrixStack(tuple((matrix.encoding, matrix.shape[0]) for matrix in matrices))  # type: ignore[misc]
        parts = tuple(part for matrix in matrices for part in matrix.parts)
        found[name] = EncodedTensor(stack_of, (len(matrices), *shapes[0]), parts)
    return found


def encodings_of(
    parameters: Mapping[str, Sequence[Piece]], encoded: Mapping[str, EncodedTensor]
) -> tuple[dict[str, tuple[Piece, ...]], dict[str, Encoding]]:
    """The pieces to read for all parameters, and the encodings of encoded ones."""
    pieces, encodings = {name: tuple(of_parameter) for name, of_parameter in parameters.items()}, dict[str, Encoding]()
    for name, of_parameter in parameters.items():
        matrices = [encoded[piece.entry.name] for piece in of_parameter if piece.entry.name in encoded]
        if not matrices:
            continue
        stack = tuple((one.encoding, one.shape[0]) for one in matrices if not isinstance(one.encoding, _STACKS))
        is_whole = all(piece == Piece.whole(piece.entry) for piece in of_parameter)
        if not is_whole or len(matrices) < len(of_parameter) or (len(matrices) > 1 and len(stack) < len(matrices)):
            raise UnsupportedModelError(
                f"{of_parameter[0].entry.path}: {of_parameter[0].entry.name}",
                found=f"a quantised part of {name}",
                expected="quantised matrices that are each a parameter of the model, or all of a stack of experts",
                remedy="use the unquantised checkpoint",
            )
        encodings[name] = matrices[0].encoding if len(matrices) == 1 else MatrixStack(stack)
        pieces[name] = tuple(piece for one in matrices for piece in one.pieces())
    return pieces, encodings


def _nf4(entry: TensorEntry) -> tuple[NF4Blocks, tuple[int, ...]]:
    """Read encoding and shape from the JSON object beside a matrix."""
    try:
        state = json.loads(_read(entry))
        shape, block, nested = tuple(state["shape"]), state["blocksize"], state.get("nested_blocksize")
        offset = float(state["nested_offset"]) if nested is not None else 0.0
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise _malformed(entry, f"an invalid state ({type(error).__name__})") from error
    sizes = block, 2 if nested is None else nested
    if not (_are_sizes(shape, 2) and _are_sizes(sizes, 2) and max(sizes) <= _MAX_BLOCK):
        raise _malformed(entry, f"shape {shape}, blocks of {block} and {nested}")
    if state.get("quant_type") != "nf4" or block % 2 or not abs(offset) <= _MAX_OFFSET:
        raise _malformed(entry, f"type {state.get('quant_type')}, blocks of {block}, an offset of {offset}")
    return NF4Blocks(block, nested, offset), shape


def _read(entry: TensorEntry, most: int = _MAX_STATE_BYTES, dtype: str = "U8") -> bytes:
    """The bytes of a small tensor."""
    if not 0 < entry.nbytes <= most or entry.dtype != dtype:
        raise _malformed(entry, f"{entry.dtype} of {entry.nbytes} bytes")
    return entry.read()


def _malformed(
    entry: TensorEntry,
    found: str,
    expected: str = "the description of a matrix in the format that config.json names",
    remedy: str = "get the checkpoint's files again",
) -> CheckpointError:
    return CheckpointError(f"{entry.path}: {entry.name}", found=found, expected=expected, remedy=remedy)


def _group(size: object) -> int | None:
    return size if type(size) is int and size > 0 else None


def _are_sizes(values: Sequence[object], count: int) -> bool:
    return len(values) == count and all(type(value) is int and 0 < value < 2**31 for value in values)
