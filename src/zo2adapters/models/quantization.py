"""How a checkpoint is quantised: what ``config.json`` says, compared with the tensors.

Formats, as transformers reads them: bitsandbytes of 8 bits (``weight`` in int8, ``SCB`` beside it)
and 4 bits (nf4 and fp4: ``weight`` with ``weight.absmax``, ``weight.quant_map``, a JSON object in
bytes, and nested ones where scales are quantised, too), fine-grained FP8 (``weight`` in e4m3,
``weight_scale_inv``), MXFP4 of gpt-oss's experts (``_blocks`` and ``_scales``), GPTQ of 2, 3, 4 and
8 bits, AWQ of 4, compressed-tensors' packed integers of 4 and 8 bits, NVFP4 (ModelOpt's, too) and
MXFP4, and its FP8 and integers of 8 bits with ``weight_scale`` by channel or by tensor, which
fbgemm's and ModelOpt's FP8 are, too.

A field of ``quantization_config`` that does not fit is refused by its name and value. Its synonyms
and defaults are those of transformers.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zo2core.checkpoint.shards import DTYPE_NAMES, DTYPES, SafetensorsReader, TensorEntry
from zo2core.encodings.forms import (
    FLOAT_GROUPS,
    MXFP4_BLOCK,
    Float4Groups,
    Float8Blocks,
    Int8Rows,
    MatrixStack,
    MXFP4Stack,
    NF4Blocks,
    PackedGroups,
)
from zo2core.errors import CheckpointError, UnsupportedModelError
from zo2core.types import Encoding

_INTEGERS = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros", "order": ".g_idx"}
_SCALED = {"codes": ".weight", "scales": ".weight_scale", "zeros": ".weight_zero_point"}
SUFFIXES = {  # suffixes of a layer's tensors, by the encoding's name and the part's role
    # the last is 0: codes row by row
    "int8": {"codes": ".weight", "scales": ".SCB", "format": ".weight_format"},
    "fp8": {"codes": ".weight", "scales": ".weight_scale_inv"},
    "nf4": {
        "codes": ".weight",
        "scales": ".weight.absmax",
        "table": ".weight.quant_map",
        "nested scales": ".weight.nested_absmax",
        "nested table": ".weight.nested_quant_map",
        "state": ".weight.quant_state.bitsandbytes__nf4",
        "fp4 state": ".weight.quant_state.bitsandbytes__fp4",
    },
    "scaled fp8": _SCALED,
    "scaled int8": _SCALED,
    "mxfp4": {"codes": "_blocks", "scales": "_scales"},
    "gptq": _INTEGERS,
    "gptq_v2": _INTEGERS,
    "awq": _INTEGERS,
    "awq_gemv": _INTEGERS,
    "pack-quantized": {
        "codes": ".weight_packed",
        "scales": ".weight_scale",
        "zeros": ".weight_zero_point",
        "order": ".weight_g_idx",
    },
    "nvfp4": {
        "codes": ".weight_packed",
        "scales": ".weight_scale",
        "global": ".weight_global_scale",
    },
    "modelopt nvfp4": {
        "codes": ".weight",
        "scales": ".weight_scale",
        "global": ".weight_scale_2",
    },
    "mxfp4-pack-quantized": {"codes": ".weight_packed", "scales": ".weight_scale"},
}
# between the name of a tensor of three axes and the number of one of its matrices; of this package
MATRIX = ".matrices."
# of compressed-tensors, beside what is decoded
_UNUSED = (".weight_shape", ".input_global_scale", ".input_scale")
# scales of an 8-bit cache of keys and values
_CACHE_SCALES = (".k_scale", ".v_scale")
# suffixes that encoded layers alone have
_MARKS: dict[str, tuple[str, ...]] = {name: (roles["codes"],) for name, roles in SUFFIXES.items()}
_MARKS |= dict.fromkeys(("scaled fp8", "scaled int8"), (".weight_scale",))
_MARKS |= {"int8": (".SCB",), "fp8": (".weight_scale_inv",)}
_MARKS |= {"modelopt nvfp4": (".weight_scale_2",)}
_MARKS |= {"nf4": (SUFFIXES["nf4"]["state"], SUFFIXES["nf4"]["fp4 state"])}
_MAX_BLOCK = 4096  # weights or scales that share a scale, bitsandbytes' limit
_MAX_OFFSET = torch.finfo(torch.float32).max
_MAX_STATE_BYTES = 4096

_GROUP = 128  # weights that share a scale, unless the config says otherwise
_LESS = {"gptq": 1, "gptq_v2": 0}  # what zeros are stored less
# encodings whose parts have various shapes and dtypes
_WHOLE_BYTES = ("nf4", "scaled fp8", "scaled int8", *FLOAT_GROUPS)
_GPTQ_BITS = (2, 3, 4, 8)
# what entries of GPTQ's ``dynamic`` may say of layers without saying more of their tensors' layout
_OF_LAYERS = (
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "act_group_aware",
    "static_groups",
    "damp_percent",
    "damp_auto_increment",
    "mse",
)
# compressed-tensors' names for schemes of weights
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "W4A16": {"num_bits": 4, "group_size": 128},
    "W4A16_ASYM": {"num_bits": 4, "group_size": 128, "symmetric": False},
    "NVFP4": {"num_bits": 4, "group_size": 16},
    "NVFP4A16": {"num_bits": 4, "group_size": 16},
    "MXFP4": {"num_bits": 4, "group_size": 32},
    "MXFP4A16": {"num_bits": 4, "group_size": 32},
    "W8A16": {"num_bits": 8, "strategy": "channel"},
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "FP8_DYNAMIC": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "FP8_BLOCK": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
    },
    "W8A8": {"num_bits": 8, "strategy": "channel"},
}
# compressed-tensors' formats of 4-bit floats, by their names here
_FLOAT_FORMATS = {
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4-pack-quantized",
}
# compressed-tensors' formats of codes that fill a byte
_WHOLE_CODES = ("float-quantized", "int-quantized", "naive-quantized")

# ModelOpt's names for FP8, with the rows and columns that share a scale, and for NVFP4
_MODELOPT_FP8 = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0)}
_MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")

_FIELD = "quantization_config"
_REMEDY = (
    "correct it if the tensors are otherwise, or use the unquantised checkpoint, which zo2 convert "
    "--quantize int8|nf4|fp8 quantises"
)


class EncodedTensor(NamedTuple):
    """A matrix of a checkpoint that is stored in several tensors."""

    encoding: Encoding
    shape: tuple[int, ...]  # of the matrix
    parts: tuple[TensorEntry, ...]  # in the encoding's order


class _Fields(NamedTuple):
    """The fields of an object in ``config.json``. Null is as good as absent."""

    where: str
    values: Mapping[str, Any]

    def value(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these synonyms that has one."""
        return next((v for name in names if (v := self.values.get(name)) is not None), default)

    def text(self, *names: str, default: str = "") -> str:
        """A text, in lower case."""
        value = self.value(*names, default=default)
        if not isinstance(value, str):
            raise self.refused("a text", *names)
        return value.lower()

    def inner(self, name: str) -> _Fields:
        """An object; an empty one if there is none."""
        value = self.value(name, default={})
        if not isinstance(value, Mapping):
            raise self.refused("an object", name)
        return _Fields(f"{self.where}.{name}", value)

    def flag(self, *names: str, default: bool | None) -> bool | None:
        """True or false."""
        value = self.value(*names, default=default)
        if value is None or type(value) is bool:
            return value
        raise self.refused("true or false", *names)

    def number(self, *names: str, allowed: Sequence[int], default: int | None) -> int:
        """One of these numbers."""
        value = self.value(*names, default=default)
        if type(value) is not int or value not in allowed:
            raise self.refused(" or ".join(map(str, allowed)), *names)
        return value

    def group(self, *names: str, default: int | None) -> int | None:
        """Weights of a row that share a scale; None is the whole row, which is -1 in the file."""
        size = self.value(*names, default=default)
        if size is None or (type(size) is int and size == -1):
            return None
        if type(size) is not int or size < 1:
            raise self.refused("a number of weights, or -1 for whole rows", *names)
        return size

    def refused(self, expected: str, *names: str) -> UnsupportedModelError:
        """The error for the first of these synonyms that has a value."""
        name = next((name for name in names if self.value(name) is not None), names[0])
        found = repr(self.values[name])[:80] if name in self.values else "no such field"
        return UnsupportedModelError(f"{self.where}.{name}", found, expected, _REMEDY)


@dataclass(frozen=True)
class Quantization:
    """How ``config.json`` says that a checkpoint is quantised."""

    where: Path
    method: str
    # rows and columns that share a scale in formats of 8 bits; 0: all of them
    block: tuple[int, int] = (128, 128)
    group: int | None = None  # weights of a row that share a scale; None: all
    is_symmetric: bool | None = None  # whether all zeros are the same; None: it is not said
    bits: int = 4  # of a packed integer
    # bits and groups of other layers, which their tensors tell
    of_layers: tuple[tuple[int, int | None], ...] = ()

    @classmethod
    def of(cls, where: Path, config: Any, field: str = _FIELD) -> Quantization:
        """Read a config's ``quantization_config``, or the field of this name."""
        fields = _Fields(f"{where}: {field}", config if isinstance(config, Mapping) else {})
        if not isinstance(config, Mapping):
            found = repr(config)[:80]
            raise UnsupportedModelError(f"{where}: {field}", found, "an object", _REMEDY)
        if fields.value("load_in_8bit") or fields.value("load_in_4bit"):  # of old checkpoints alone
            return cls(where, _bitsandbytes(fields))
        method = fields.value("quant_method")
        if method == "fp8":
            return cls(where, "fp8", block=_block(fields))
        if method == "mxfp4":
            return cls(where, "mxfp4")
        if method == "gptq":
            return _gptq(where, fields)
        if method == "awq":
            return _awq(where, fields)
        if method == "compressed-tensors":
            return _compressed_tensors(where, fields)
        if method == "fbgemm_fp8":
            return cls(where, "scaled fp8", block=(1, 0))
        if method == "modelopt":
            return _modelopt(where, fields)
        if method == "bitsandbytes":
            raise fields.refused("true, or load_in_8bit: true", "load_in_4bit")
        raise fields.refused(
            "one of bitsandbytes, fp8, fbgemm_fp8, mxfp4, gptq, awq, compressed-tensors, modelopt",
            "quant_method",
        )

    def split(
        self, entries: Mapping[str, TensorEntry], dtype: torch.dtype
    ) -> tuple[dict[str, TensorEntry], dict[str, EncodedTensor]]:
        """A checkpoint's tensors as if none were encoded, and the encoded ones, by the parameters'
        names.
        """
        marks = _MARKS[self.method]
        leaf = "" if self.method == "mxfp4" else ".weight"
        layers = sorted(
            name.removesuffix(mark) for mark in marks for name in entries if name.endswith(mark)
        )
        if not layers:
            raise UnsupportedModelError(
                self.where,
                f"{_FIELD} of {self.method}, and no tensor of it",
                f"the tensors that belong to this config, whose names end in {' or '.join(marks)}",
                f"take {_FIELD} out of config.json if the weights are not quantised",
            )
        suffixes = *SUFFIXES[self.method].values(), *_UNUSED
        parts = {f"{layer}{suffix}" for layer in layers for suffix in suffixes}
        plain = {
            name: entry
            for name, entry in entries.items()
            if name not in parts and not name.endswith(_CACHE_SCALES)
        }
        with contextlib.closing(SafetensorsReader({})) as reader:
            for layer in layers:
                self._require_zeros(entries, layer, reader)
        encoded = _with_stacks({f"{layer}{leaf}": self._tensor(entries, layer) for layer in layers})
        for name, (_, shape, (codes, *_)) in encoded.items():
            plain[name] = codes._replace(name=name, dtype=DTYPE_NAMES[dtype], shape=shape)
        return plain, encoded

    def _require_zeros(
        self, entries: Mapping[str, TensorEntry], layer: str, reader: SafetensorsReader
    ) -> None:
        """Compare what the config says of zeros with samples of them.

        A file cannot say of which version of GPTQ it is, but the zeros of symmetric matrices are
        half of the codes' number in every quantiser (8 of 4 bits), which the first version stores
        less 1.
        """
        zeros = entries.get(f"{layer}{SUFFIXES[self.method].get('zeros')}")
        is_checked = self.method not in ("awq", "awq_gemv") and self.is_symmetric is not False
        if zeros is None or not is_checked:
            return
        samples = b"".join(reader.samples(zeros))
        if self.method not in _LESS:
            if any(samples):
                raise self._contradicted(zeros, "symmetric", "true", "zeros that are not 0")
            return
        bits, _ = self._bits_and_group(entries, layer)
        half = 1 << bits - 1
        stored = half - _LESS[self.method]
        [name] = (name for name in _LESS if name != self.method)
        other = half - _LESS[name]
        if samples and not samples.strip(_repeated(other, bits)):
            found = f"zeros stored as {other} throughout, which are those of {name}"
            raise self._contradicted(zeros, "checkpoint_format", self.method, found)
        if self.is_symmetric and samples.strip(_repeated(stored, bits)):
            found = f"zeros that are not stored as {stored}"
            raise self._contradicted(zeros, "sym", "true", found)

    def _contradicted(
        self, entry: TensorEntry, field: str, value: str, found: str
    ) -> CheckpointError:
        """The error for tensors that contradict a field."""
        expected = f"those of {_FIELD}.{field}: {value}, as config.json says or leaves out"
        return malformed_tensor(entry, found, expected, f"correct {field}, or get all files again")

    def _tensor(self, entries: Mapping[str, TensorEntry], layer: str) -> EncodedTensor:
        encoding, shape = self._encoding(entries, layer)
        parts: list[TensorEntry] = []
        for part in encoding.parts(shape):
            entry = self._entry(entries, layer, part.role)
            fits = entry.shape == part.shape
            if self.method in _WHOLE_BYTES:
                fits = entry.nbytes == part.nbytes
            is_storage = self.method == "nf4" and part.role == "codes"  # bnb_4bit_quant_storage
            if not fits or not (is_storage or entry.dtype == DTYPE_NAMES[part.dtype]):
                expected = f"{DTYPE_NAMES[part.dtype]} of shape {list(part.shape)}, for {layer} in "
                expected += encoding.name + self._in_groups
                found = f"{entry.dtype} of shape {list(entry.shape)}"
                raise malformed_tensor(entry, found, expected)
            parts.append(entry)
        return EncodedTensor(encoding, shape, tuple(parts))

    @property
    def _in_groups(self) -> str:
        """The config's fields that decide the parts' shapes, for messages."""
        if self.method in ("scaled fp8", "scaled int8"):
            words = {(0, 0): "each matrix", (1, 0): "each row"}
            blocks = f"{self.block[0]} x {self.block[1]} weights"
            return f" with a scale for {words.get(self.block, blocks)}"
        if self.method == "fp8":
            return f" with weight_block_size {list(self.block)}"
        if self.method not in ("gptq", "gptq_v2", "awq", "awq_gemv", "pack-quantized"):
            return ""
        forms = ((self.bits, self.group), *self.of_layers)
        told = (f"{bits} bits with group_size {group or -1}" for bits, group in forms)
        return f" of {' or '.join(told)}"

    def _encoding(
        self, entries: Mapping[str, TensorEntry], layer: str
    ) -> tuple[Encoding, tuple[int, ...]]:
        """The encoding and the shape of a layer's matrix."""
        if self.method == "nf4":
            return self._nf4(entries, layer)
        codes = self._entry(entries, layer, "codes")
        if self.method == "mxfp4" and len(codes.shape) == 4:
            *stack, outputs, blocks, _ = codes.shape
            return MXFP4Stack(), (*stack, blocks * MXFP4_BLOCK, outputs)
        if self.method == "mxfp4" or len(codes.shape) != 2:
            kind = "stacks of matrices" if self.method == "mxfp4" else "a matrix"
            found = f"shape {list(codes.shape)}"
            raise malformed_tensor(codes, found, f"{kind} in {self.method}")
        if self.method == "fp8":
            stored = self._entry(entries, layer, "scales").dtype
            scales = DTYPES[stored if stored in ("BF16", "F8_E8M0") else "F32"]
            return Float8Blocks(self.block, scales), codes.shape
        if self.method in ("scaled fp8", "scaled int8"):
            return self._scaled(entries, layer, *codes.shape)
        if self.method != "int8":
            return self._groups(entries, layer, *codes.shape)
        order = entries.get(f"{layer}{SUFFIXES['int8']['format']}")
        if order is not None and (order.nbytes != 1 or any(_read(order))):
            remedy = "quantise the model again with a recent bitsandbytes, or use the unquantised "
            remedy += "checkpoint"
            expected = "0, the layout row by row"
            raise malformed_tensor(order, "codes in another layout", expected, remedy)
        return Int8Rows(), codes.shape

    def _scaled(
        self, entries: Mapping[str, TensorEntry], layer: str, rows: int, columns: int
    ) -> tuple[Encoding, tuple[int, int]]:
        """The encoding and the shape of a matrix of 8 bits a weight, with a scale for each row or
        for all.
        """
        stored = self._entry(entries, layer, "scales").dtype
        scales = DTYPES[stored if stored in ("BF16", "F16") else "F32"]
        if self.method == "scaled int8":
            return Int8Rows(scales, unit=1.0, shares_scale=self.block[0] == 0), (rows, columns)
        block = self.block[0] or max(rows, 1), self.block[1] or max(columns, 1)
        return Float8Blocks(block, scales), (rows, columns)

    def _nf4(
        self, entries: Mapping[str, TensorEntry], layer: str
    ) -> tuple[NF4Blocks, tuple[int, ...]]:
        """The encoding and the shape of a matrix of bitsandbytes' 4 bits, whose type the name of
        its state says.
        """
        suffixes = SUFFIXES["nf4"]
        states = {"nf4": suffixes["state"], "fp4": suffixes["fp4 state"]}
        kind = next(kind for kind, suffix in states.items() if f"{layer}{suffix}" in entries)
        return _four_bit_blocks(entries[f"{layer}{states[kind]}"], kind)

    def _groups(
        self, entries: Mapping[str, TensorEntry], layer: str, first: int, second: int
    ) -> tuple[PackedGroups | Float4Groups, tuple[int, int]]:
        """The encoding and the shape of a matrix of 8 bits a weight or fewer with a scale for each
        group of a row's weights, whose codes have this shape.
        """
        if self.method in FLOAT_GROUPS:
            return Float4Groups(self.method), (first, 2 * second)
        bits, group = self._bits_and_group(entries, layer)
        rows, columns = self._matrix_shape(bits, first, second)
        stated = _stated_shape(entries.get(f"{layer}.weight_shape"))
        if stated is not None and stated[0] == rows and 0 <= columns - stated[1] < 32 // bits:
            columns = stated[1]
        group = min(group or columns, max(columns, 1))
        scales = self._entry(entries, layer, "scales").torch_dtype or torch.float16
        suffix = SUFFIXES[self.method].get("order")
        order = None if suffix is None else entries.get(f"{layer}{suffix}")
        is_ordered = order is not None and self._is_ordered(order, columns, group)
        has_zeros = self.method != "pack-quantized" or self.is_symmetric is False
        encoding = PackedGroups(self.method, group, scales, has_zeros, is_ordered, bits)
        return encoding, (rows, columns)

    def _matrix_shape(self, bits: int, first: int, second: int) -> tuple[int, int]:
        """The rows and columns of a matrix whose codes have this shape, several in a word."""
        if self.method == "awq":
            return 8 * second, first
        if self.method in ("pack-quantized", "awq_gemv"):
            return first, 32 * second // bits
        return second, 32 * first // bits

    def _bits_and_group(
        self, entries: Mapping[str, TensorEntry], layer: str
    ) -> tuple[int, int | None]:
        """The bits of a layer's codes, and the weights that share a scale: those of the config, or
        of its entries for some layers those that fit the layer's tensors.
        """
        if not self.of_layers:
            return self.bits, self.group
        codes = self._entry(entries, layer, "codes")
        scales = self._entry(entries, layer, "scales")
        (columns, *_) = self._entry(entries, layer, "order").shape or (0,)
        forms = ((self.bits, self.group), *self.of_layers)
        for bits, group in forms:
            groups = -(-columns // group) if group else 1
            if codes.shape[:1] == (columns * bits // 32,) and scales.shape[:1] == (groups,):
                return bits, group
        found = f"{codes.dtype} of shape {list(codes.shape)}, and scales of {list(scales.shape)}"
        raise malformed_tensor(codes, found, f"{columns} columns in {self.method}{self._in_groups}")

    def _is_ordered(self, order: TensorEntry, columns: int, group: int) -> bool:
        """Whether columns of a group are not neighbours."""
        content = bytearray(_read(order, max(4 * columns, 1), "I32"))
        groups = torch.frombuffer(content, dtype=torch.int32)
        least = int(groups.min())
        most = int(groups.max())
        if self.method == "pack-quantized" and least == -1:  # compressed-tensors' mark for no order
            return False
        count = -(-columns // group)
        if len(groups) != columns or not 0 <= least <= most < count:
            found = f"{len(groups)} columns in groups from {least} to {most}"
            expected = f"{columns} columns in {count} groups, for {self.method}{self._in_groups}"
            raise malformed_tensor(order, found, expected)
        return not torch.equal(groups, torch.arange(columns, dtype=torch.int32) // group)

    def _entry(self, entries: Mapping[str, TensorEntry], layer: str, role: str) -> TensorEntry:
        name = f"{layer}{SUFFIXES[self.method][role]}"
        if name not in entries:
            expected = f"all tensors of a matrix in {self.method}, as config.json says"
            remedy = "get all shards, and the config.json that belongs to them"
            raise CheckpointError(self.where.parent, f"no tensor {name}", expected, remedy)
        return entries[name]


def _bitsandbytes(fields: _Fields) -> str:
    """Int8 or 4 bits. The type of 4 bits is read from the tensors, as in transformers."""
    is_int8 = fields.flag("load_in_8bit", default=False)
    is_nf4 = fields.flag("load_in_4bit", default=False)
    fields.text("bnb_4bit_quant_type")
    if is_int8 and is_nf4:
        raise fields.refused("false, since load_in_8bit is true", "load_in_4bit")
    return "int8" if is_int8 else "nf4"


def _block(fields: _Fields) -> tuple[int, int]:
    """The rows and columns of FP8's blocks."""
    sizes = fields.values.get("weight_block_size", (128, 128))  # null: one scale a matrix
    if not isinstance(sizes, (list, tuple)) or not _are_sizes(sizes):
        raise fields.refused("the rows and columns of a block", "weight_block_size")
    if fields.text("expert_dtype", default="fp8") != "fp8":
        raise fields.refused("fp8", "expert_dtype")
    return sizes[0], sizes[1]


def _gptq(where: Path, fields: _Fields) -> Quantization:
    form = ("checkpoint_format", "format")  # the second is its later name; the first counts
    bits = fields.number("bits", allowed=_GPTQ_BITS, default=None)
    method = fields.text(*form, default="gptq")
    if method not in _LESS:
        raise fields.refused("gptq or gptq_v2", *form)
    if fields.value("is_marlin_format"):
        raise fields.refused("false", "is_marlin_format")
    if fields.text("pack_dtype", default="int32") != "int32":
        raise fields.refused("int32", "pack_dtype")
    group = fields.group("group_size", default=_GROUP)
    symmetric = fields.flag("sym", default=None)
    of_layers: list[tuple[int, int | None]] = []
    dynamic = fields.inner("dynamic")
    for pattern in dynamic.values:
        if pattern.startswith("-:"):  # which leaves layers as they are
            continue
        entry = dynamic.inner(pattern)
        for name in entry.values:
            if name not in _OF_LAYERS:
                raise entry.refused(f"only {', '.join(_OF_LAYERS)}", name)
        other = entry.number("bits", allowed=_GPTQ_BITS, default=bits)
        of_layers.append((other, entry.group("group_size", default=group or -1)))
        if entry.flag("sym", default=symmetric) != symmetric:
            symmetric = None
    return Quantization(
        where, method, group=group, is_symmetric=symmetric, bits=bits, of_layers=tuple(of_layers)
    )


def _awq(where: Path, fields: _Fields) -> Quantization:
    form = ("checkpoint_format", "version", "format")
    fields.number("bits", "w_bit", allowed=(4,), default=4)
    methods = {"gemm": "awq", "gemv": "awq_gemv"}
    layout = fields.text(*form, default="gemm")
    if layout not in methods:
        raise fields.refused(" or ".join(methods), *form)
    if fields.value("backend") == "llm-awq":
        raise fields.refused("a backend for the layouts gemm and gemv", "backend")
    if fields.flag("zero_point", default=True) is not True:
        raise fields.refused("true", "zero_point")
    group = fields.group("group_size", "q_group_size", default=_GROUP)
    return Quantization(where, methods[layout], group=group)


def _compressed_tensors(where: Path, fields: _Fields) -> Quantization:
    if "quantization_config" in fields.values:
        fields = fields.inner("quantization_config")
    sparsity = fields.inner("sparsity_config")
    if sparsity.text("format", default="dense") != "dense":
        raise sparsity.refused("dense", "format")
    if fields.value("transform_config"):
        raise fields.refused("none", "transform_config")
    form, weights = _scheme(fields)
    if form in _WHOLE_CODES:
        return _of_whole_codes(where, weights)
    if form in _FLOAT_FORMATS:
        method = _FLOAT_FORMATS[form]
        size = FLOAT_GROUPS[method].weights
        weights.number("num_bits", allowed=(4,), default=8)
        weights.number("group_size", allowed=(size,), default=size)
        if weights.flag("symmetric", default=True) is not True:
            raise weights.refused("true", "symmetric")
        return Quantization(where, method)
    bits = weights.number("num_bits", allowed=(4, 8), default=8)
    if weights.text("type", default="int") != "int":
        raise weights.refused("int", "type")
    fields.text("quantization_status")
    symmetric = weights.flag("symmetric", default=True)
    return Quantization(where, form, group=_group(weights), is_symmetric=symmetric, bits=bits)


def _of_whole_codes(where: Path, weights: _Fields) -> Quantization:
    """Compressed-tensors' FP8, and integers of 8 bits."""
    weights.number("num_bits", allowed=(8,), default=8)
    kind = weights.text("type", default="int")
    if kind not in ("int", "float"):
        raise weights.refused("int or float", "type")
    if weights.flag("symmetric", default=True) is not True:
        raise weights.refused("true", "symmetric")
    strategy = weights.text("strategy", default="tensor")
    blocks = {"tensor": (0, 0), "channel": (1, 0)}
    if strategy == "block" and kind == "float":
        sizes = weights.value("block_structure")
        if not isinstance(sizes, (list, tuple)) or not _are_sizes(sizes):
            raise weights.refused("the rows and columns of a block", "block_structure")
        blocks["block"] = (sizes[0], sizes[1])
    if strategy not in blocks:
        raise weights.refused(f"one of {', '.join(blocks)}", "strategy")
    method = "scaled int8" if kind == "int" else "scaled fp8"
    return Quantization(where, method, block=blocks[strategy], is_symmetric=True)


def _modelopt(where: Path, fields: _Fields) -> Quantization:
    """ModelOpt's FP8, with a scale for each tensor or row, and its NVFP4."""
    algorithm = fields.text("quant_algo").upper()
    if algorithm in _MODELOPT_FP8:
        return Quantization(where, "scaled fp8", block=_MODELOPT_FP8[algorithm])
    if algorithm not in _MODELOPT_NVFP4:
        known = ", ".join((*_MODELOPT_FP8, *_MODELOPT_NVFP4))
        raise fields.refused(f"one of {known}", "quant_algo")
    fields.number("group_size", allowed=(16,), default=16)
    return Quantization(where, "modelopt nvfp4")


def _group(weights: _Fields) -> int | None:
    """The weights that share a scale, as compressed-tensors derives its strategy from the size."""
    size = weights.group("group_size", default=None)
    by_size = "channel" if size is None else "group"
    is_given = weights.value("group_size") is not None
    strategy = weights.text("strategy", default=by_size if is_given else "tensor")
    if strategy == "channel":
        return None
    if strategy != "group":
        raise weights.refused("group or channel", "strategy")
    if size is None:
        raise weights.refused("a number of weights, for the strategy group", "group_size")
    return size


def _scheme(fields: _Fields) -> tuple[str, _Fields]:
    """The format of the only group of layers, and how its weights are quantised."""
    groups = fields.inner("config_groups")
    if len(groups.values) != 1:
        raise fields.refused("one group of layers", "config_groups")
    [name] = groups.values
    if isinstance(groups.values[name], list):  # the layers of a scheme that the name says
        if name.upper() not in _PRESETS:
            raise groups.refused(f"the layers of {' or '.join(_PRESETS)}", name)
        scheme = _Fields(groups.where, {})
        weights = _Fields(f"{groups.where}.{name}", _PRESETS[name.upper()])
    else:
        scheme = groups.inner(name)
        weights = scheme.inner("weights")
    of_group = fields if scheme.value("format") is None else scheme
    form = of_group.text("format", default="dense")
    known = ("pack-quantized", *_FLOAT_FORMATS, *_WHOLE_CODES)
    if form not in known:
        raise of_group.refused(f"one of {', '.join(known)}", "format")
    return form, weights


def _repeated(code: int, bits: int) -> bytes:
    """The bytes of words that are full of one code."""
    return sum(code << place for place in range(0, 8 * bits, bits)).to_bytes(bits, "little")


def _stated_shape(entry: TensorEntry | None) -> tuple[int, int] | None:
    """The rows and columns in a small tensor of int64 or int32; None if there is no such tensor."""
    if entry is None or entry.nbytes not in (8, 16):
        return None
    rows, columns = struct.unpack("<2q" if entry.nbytes == 16 else "<2i", entry.read())
    return rows, columns


def _with_stacks(encoded: Mapping[str, EncodedTensor]) -> dict[str, EncodedTensor]:
    """Unite the matrices that this package wrote for a tensor of three axes; the others stay as
    they are.
    """
    united: dict[str, EncodedTensor] = {}
    stacks: dict[str, dict[int, EncodedTensor]] = {}
    for name, matrix in encoded.items():
        stack, _, number = name.removesuffix(".weight").partition(MATRIX)
        if number.isdecimal():
            stacks.setdefault(stack, {})[int(number)] = matrix
        else:
            united[name] = matrix
    for name, by_number in stacks.items():
        matrices = [by_number[number] for number in sorted(by_number)]
        entry = matrices[0].parts[0]
        shapes = sorted({matrix.shape for matrix in matrices})
        if len(shapes) > 1 or max(by_number) != len(matrices) - 1:
            raise malformed_tensor(
                entry,
                f"{len(matrices)} matrices of {name}, up to number {max(by_number)}, of shapes "
                f"{shapes}",
            )
        stack_of = MatrixStack(tuple((matrix.encoding, matrix.shape[0]) for matrix in matrices))  # type: ignore[misc]
        parts = tuple(part for matrix in matrices for part in matrix.parts)
        united[name] = EncodedTensor(stack_of, (len(matrices), *shapes[0]), parts)
    return united


def _four_bit_blocks(entry: TensorEntry, kind: str) -> tuple[NF4Blocks, tuple[int, ...]]:
    """Read encoding and shape from the JSON object beside a matrix."""
    try:
        state = json.loads(_read(entry))
        shape = tuple(state["shape"])
        block = state["blocksize"]
        nested = state.get("nested_blocksize")
        offset = float(state["nested_offset"]) if nested is not None else 0.0
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise malformed_tensor(entry, f"an invalid state ({type(error).__name__})") from error
    sizes = block, 2 if nested is None else nested
    if not (_are_sizes(shape) and _are_sizes(sizes) and max(sizes) <= _MAX_BLOCK):
        raise malformed_tensor(entry, f"shape {shape}, blocks of {block} and {nested}")
    if state.get("quant_type") != kind or block % 2 or not abs(offset) <= _MAX_OFFSET:
        raise malformed_tensor(
            entry, f"type {state.get('quant_type')}, blocks of {block}, an offset of {offset}"
        )
    return NF4Blocks(block, nested, offset, kind), shape


def _read(entry: TensorEntry, most: int = _MAX_STATE_BYTES, dtype: str = "U8") -> bytes:
    """The bytes of a small tensor."""
    if not 0 < entry.nbytes <= most or entry.dtype != dtype:
        raise malformed_tensor(entry, f"{entry.dtype} of {entry.nbytes} bytes")
    return entry.read()


def _are_sizes(values: Sequence[object]) -> bool:
    return len(values) == 2 and all(type(value) is int and 0 < value < 2**31 for value in values)


_DESCRIPTION = "the description of a matrix in the format that config.json names"
_OF_SHARDS = "use the config.json that belongs to these shards, or get all files again"


def malformed_tensor(
    entry: TensorEntry, found: str, expected: str = _DESCRIPTION, remedy: str = _OF_SHARDS
) -> CheckpointError:
    """The error for a tensor that does not fit the config."""
    return CheckpointError(f"{entry.path}: {entry.name}", found, expected, remedy)
