"""Checkpoints whose matrices are stored in 8 or 4 bits, as transformers writes them.

Formats: bitsandbytes of 8 bits (``weight`` in int8, ``SCB`` beside it) and 4 bits (nf4: ``weight`` with ``weight.absmax``,
``weight.quant_map``, a JSON object in bytes, and nested ones where scales are quantised, too), fine-grained FP8 (``weight``
in e4m3, ``weight_scale_inv``), and MXFP4 of gpt-oss's experts (``_blocks`` and ``_scales``). ``config.json`` is checked
against the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zo2core.checkpoint import Piece, TensorEntry
from zo2core.errors import CheckpointError, UnsupportedModelError
from zo2core.types import MXFP4_BLOCK, Encoding, Float8Blocks, Int8Rows, MatrixStack, MXFP4Stack, NF4Blocks

NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"
SUFFIXES = {  # suffixes of a layer's tensors, by the encoding's name and the part's role
    "int8": {"codes": ".weight", "scales": ".SCB"},
    "fp8": {"codes": ".weight", "scales": ".weight_scale_inv"},
    "nf4": {
        "codes": ".weight",
        "scales": ".weight.absmax",
        "table": ".weight.quant_map",
        "nested scales": ".weight.nested_absmax",
        "nested table": ".weight.nested_quant_map",
    },
    "mxfp4": {"codes": "_blocks", "scales": "_scales"},
}
INT8_FORMAT = ".weight_format"  # bitsandbytes' layout of codes: 0 is row by row
_MARKS = {
    "int8": ".SCB",
    "fp8": ".weight_scale_inv",
    "nf4": NF4_STATE,
    "mxfp4": "_blocks",
}  # suffixes of encoded layers alone
_DTYPES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
}
_SCALES = {"BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}  # other dtypes of fp8's scales than float32
_PLAIN_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
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
    block: tuple[int, int] = (128, 128)

    @classmethod
    def of(cls, where: Path, config: Any) -> Quantization:
        """Read a config's ``quantization_config``."""
        values = config if isinstance(config, Mapping) else config.to_dict()
        method = values.get("quant_method")
        if method == "bitsandbytes" and values.get("load_in_8bit"):
            return cls(where, "int8")
        if method == "bitsandbytes" and values.get("bnb_4bit_quant_type") == "nf4":
            return cls(where, "nf4")
        block: Any = values.get("weight_block_size")
        if method == "fp8" and _is_block(block):
            return cls(where, "fp8", tuple(block))
        if method == "mxfp4":
            return cls(where, "mxfp4")
        kind = f" of type {values.get('bnb_4bit_quant_type')}" if method == "bitsandbytes" else ""
        kind += f" in blocks of {block}" if method == "fp8" else ""
        raise UnsupportedModelError(
            where,
            found=f"quantization_config: {method}{kind}",
            expected="bitsandbytes of 8 bits or of 4 bits as nf4, fp8 in blocks, or mxfp4",
            remedy="use the unquantised checkpoint, or quantise it: zo2 convert --quantize int8|nf4|fp8",
        )

    def encoded(self, entries: Mapping[str, TensorEntry]) -> dict[str, EncodedTensor]:
        """Find the encoded parameters, by their names."""
        mark, own = _MARKS[self.method], "" if self.method == "mxfp4" else ".weight"
        layers = [name.removesuffix(mark) for name in entries if name.endswith(mark)]
        return {f"{layer}{own}": self._tensor(entries, layer) for layer in sorted(layers)}

    def parts(self, parameter: str) -> set[str]:
        """The names of all tensors that an encoded parameter may have."""
        layer = parameter.removesuffix(".weight")
        return {f"{layer}{suffix}" for suffix in (*SUFFIXES[self.method].values(), INT8_FORMAT, NF4_STATE)}

    def _tensor(self, entries: Mapping[str, TensorEntry], layer: str) -> EncodedTensor:
        encoding, shape = self._encoding(entries, layer)
        suffixes = SUFFIXES[self.method]
        parts: list[TensorEntry] = []
        for part in encoding.parts(shape):
            entry = self._entry(entries, f"{layer}{suffixes[part.role]}")
            fits = entry.nbytes == part.nbytes if self.method == "nf4" else entry.shape == part.shape
            if not fits or entry.dtype != _DTYPES[part.dtype]:
                raise CheckpointError(
                    f"{entry.path}: {entry.name}",
                    found=f"{entry.dtype} of shape {list(entry.shape)}",
                    expected=f"{_DTYPES[part.dtype]} of shape {list(part.shape)}, for {layer} in {encoding.name}",
                    remedy="get the checkpoint's files again",
                )
            parts.append(entry)
        return EncodedTensor(encoding, shape, tuple(parts))

    def _encoding(self, entries: Mapping[str, TensorEntry], layer: str) -> tuple[Encoding, tuple[int, ...]]:
        """The encoding and the shape of a layer's matrix."""
        if self.method == "nf4":
            return _nf4(self._entry(entries, f"{layer}{NF4_STATE}"))
        codes = self._entry(entries, f"{layer}{SUFFIXES[self.method]['codes']}")
        if self.method == "mxfp4" and len(codes.shape) == 4:
            *stack, outputs, blocks, _ = codes.shape
            return MXFP4Stack(), (*stack, blocks * MXFP4_BLOCK, outputs)
        if len(codes.shape) != 2:
            raise CheckpointError(
                f"{codes.path}: {codes.name}",
                found=f"shape {list(codes.shape)}",
                expected=f"{'stacks of matrices' if self.method == 'mxfp4' else 'a matrix'} in {self.method}",
                remedy="get the checkpoint's files again",
            )
        if self.method == "fp8":
            scales = self._entry(entries, f"{layer}.weight_scale_inv")
            return Float8Blocks(self.block, _SCALES.get(scales.dtype, torch.float32)), codes.shape
        order = entries.get(f"{layer}{INT8_FORMAT}")
        if order is not None and (order.nbytes != 1 or any(_read(order))):
            raise CheckpointError(
                f"{order.path}: {order.name}",
                found="codes in another layout",
                expected="0, the layout row by row",
                remedy="quantise the model again with a recent bitsandbytes, or use the unquantised checkpoint",
            )
        return Int8Rows(), codes.shape

    def _entry(self, entries: Mapping[str, TensorEntry], name: str) -> TensorEntry:
        if name not in entries:
            raise CheckpointError(
                self.where.parent,
                found=f"no tensor {name}",
                expected=f"all tensors of a matrix in {self.method}, as config.json says",
                remedy="get all shards, and the config.json that belongs to them",
            )
        return entries[name]


def without_encodings(
    entries: Mapping[str, TensorEntry], quantization: Quantization, dtype: torch.dtype
) -> tuple[dict[str, TensorEntry], dict[str, EncodedTensor]]:
    """A checkpoint's tensors as if none were encoded, and the encoded ones."""
    encoded = quantization.encoded(entries)
    if not encoded:
        raise UnsupportedModelError(
            quantization.where,
            found=f"quantization_config of {quantization.method}, and no tensor of it",
            expected="the tensors that belong to this config",
            remedy="take quantization_config out of config.json if the weights are not quantised",
        )
    parts = {part for name in encoded for part in quantization.parts(name)}
    plain = {name: entry for name, entry in entries.items() if name not in parts}
    for name, (_, shape, (codes, *_)) in encoded.items():
        plain[name] = codes._replace(name=name, dtype=_PLAIN_DTYPES[dtype], shape=shape)
    return plain, encoded


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


def _read(entry: TensorEntry) -> bytes:
    """The bytes of a small tensor."""
    if entry.nbytes > _MAX_STATE_BYTES or entry.dtype != "U8":
        raise _malformed(entry, f"{entry.dtype} of {entry.nbytes} bytes")
    return entry.read()


def _malformed(entry: TensorEntry, found: str) -> CheckpointError:
    expected = "bitsandbytes' description of a matrix in nf4 or int8"
    return CheckpointError(f"{entry.path}: {entry.name}", found=found, expected=expected, remedy="get the shard again")


def _are_sizes(values: Sequence[object], count: int) -> bool:
    return len(values) == count and all(type(value) is int and 0 < value < 2**31 for value in values)


def _is_block(block: object) -> bool:
    return isinstance(block, (list, tuple)) and _are_sizes(block, 2)
