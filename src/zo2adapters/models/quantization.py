"""How a checkpoint is quantised: what ``config.json`` says, compared with the tensors.

Formats, as transformers reads them: bitsandbytes of 8 bits (``weight`` in int8, ``SCB`` beside it)
and 4 bits (nf4: ``weight`` with ``weight.absmax``, ``weight.quant_map``, a JSON object in bytes,
and nested ones where scales are quantised, too), fine-grained FP8 (``weight`` in e4m3,
``weight_scale_inv``), MXFP4 of gpt-oss's experts (``_blocks`` and ``_scales``), GPTQ and AWQ of 4
bits, and compressed-tensors' packed integers of 4 bits, NVFP4, and its FP8 and integers of 8 bits
with ``weight_scale`` by channel or by tensor, which fbgemm's and ModelOpt's FP8 are, too.

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
    MXFP4_BLOCK,
    Float8Blocks,
    FourBitGroups,
    Int8Rows,
    MatrixStack,
    MXFP4Stack,
    NF4Blocks,
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
    },
    "scaled fp8": _SCALED,
    "scaled int8": _SCALED,
    "mxfp4": {"codes": "_blocks", "scales": "_scales"},
    "gptq": _INTEGERS,
    "gptq_v2": _INTEGERS,
    "awq": _INTEGERS,
    "int4": {
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
}
# between the name of a tensor of three axes and the number of one of its matrices; of this package
MATRIX = ".matrices."
# of compressed-tensors, beside what is decoded
_UNUSED = (".weight_shape", ".input_global_scale", ".input_scale")
# suffixes that encoded layers alone have
_MARKS = {name: roles["codes"] for name, roles in SUFFIXES.items()}
_MARKS |= dict.fromkeys(("scaled fp8", "scaled int8"), ".weight_scale")
_MARKS |= {"int8": ".SCB", "fp8": ".weight_scale_inv", "nf4": SUFFIXES["nf4"]["state"]}
_FP4 = ".quant_state.bitsandbytes__fp4"
_MAX_BLOCK = 4096  # weights or scales that share a scale, bitsandbytes' limit
_MAX_OFFSET = torch.finfo(torch.float32).max
_MAX_STATE_BYTES = 4096

_GROUP = 128  # weights that share a scale, unless the config says otherwise
_SYMMETRIC = {"gptq": b"\x77", "gptq_v2": b"\x88"}  # two zeros of symmetric matrices, as stored
_WHOLE_BYTES = (
    "nf4",
    "nvfp4",
    "scaled fp8",
    "scaled int8",
)  # encodings whose parts have various shapes and dtypes
# compressed-tensors' names for schemes of weights
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "W4A16": {"num_bits": 4, "group_size": 128},
    "W4A16_ASYM": {"num_bits": 4, "group_size": 128, "symmetric": False},
    "NVFP4": {"num_bits": 4, "group_size": 16},
    "NVFP4A16": {"num_bits": 4, "group_size": 16},
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
# compressed-tensors' formats of codes that fill a byte
_WHOLE_CODES = ("float-quantized", "int-quantized", "naive-quantized")

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

    def require_number(self, number: int, *names: str, default: int | None) -> None:
        """Refuse any other number."""
        value = self.value(*names, default=default)
        if type(value) is not int or value != number:
            raise self.refused(str(number), *names)

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

    @classmethod
    def of(cls, where: Path, config: Any) -> Quantization:
        """Read a config's ``quantization_config``."""
        fields = _Fields(f"{where}: {_FIELD}", config if isinstance(config, Mapping) else {})
        if not isinstance(config, Mapping):
            found = repr(config)[:80]
            raise UnsupportedModelError(f"{where}: {_FIELD}", found, "an object", _REMEDY)
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
        mark = _MARKS[self.method]
        leaf = "" if self.method == "mxfp4" else ".weight"
        layers = sorted(name.removesuffix(mark) for name in entries if name.endswith(mark))
        if self.method == "nf4":
            _refuse_fp4(entries)
        if not layers:
            raise UnsupportedModelError(
                self.where,
                f"{_FIELD} of {self.method}, and no tensor of it",
                f"the tensors that belong to this config, whose names end in {mark}",
                f"take {_FIELD} out of config.json if the weights are not quantised",
            )
        suffixes = *SUFFIXES[self.method].values(), *_UNUSED
        parts = {f"{layer}{suffix}" for layer in layers for suffix in suffixes}
        plain = {name: entry for name, entry in entries.items() if name not in parts}
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

        A file cannot say of which version of GPTQ it is, but the zeros of symmetric matrices are 8
        in every quantiser, which the first version stores as 7.
        """
        zeros = entries.get(f"{layer}{SUFFIXES[self.method].get('zeros')}")
        is_checked = self.method not in ("awq",) and self.is_symmetric is not False
        if zeros is None or not is_checked:
            return
        samples = b"".join(reader.samples(zeros))
        if self.method not in _SYMMETRIC:
            if any(samples):
                raise self._contradicted(zeros, "symmetric", "true", "zeros that are not 0")
            return
        symmetric_zeros = _SYMMETRIC[self.method]
        [(name, other)] = [pair for pair in _SYMMETRIC.items() if pair[0] != self.method]
        if samples and not samples.strip(other):
            found = f"zeros stored as {other[0] & 15} throughout, which are those of {name}"
            raise self._contradicted(zeros, "checkpoint_format", self.method, found)
        if self.is_symmetric and samples.strip(symmetric_zeros):
            found = f"zeros that are not stored as {symmetric_zeros[0] & 15}"
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
        if self.method not in ("gptq", "gptq_v2", "awq", "int4"):
            return ""
        return f" with group_size {-1 if self.group is None else self.group}"

    def _encoding(
        self, entries: Mapping[str, TensorEntry], layer: str
    ) -> tuple[Encoding, tuple[int, ...]]:
        """The encoding and the shape of a layer's matrix."""
        if self.method == "nf4":
            return _nf4(self._entry(entries, layer, "state"))
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

    def _groups(
        self, entries: Mapping[str, TensorEntry], layer: str, first: int, second: int
    ) -> tuple[FourBitGroups, tuple[int, int]]:
        """The encoding and the shape of a matrix of 4 bits a weight, whose codes have this
        shape.
        """
        shapes = {
            "awq": (8 * second, first),
            "int4": (first, 8 * second),
            "nvfp4": (first, 2 * second),
        }
        rows, columns = shapes.get(self.method, (second, 8 * first))
        stated = _stated_shape(entries.get(f"{layer}.weight_shape"))
        if stated is not None and stated[0] == rows and columns - 8 < stated[1] <= columns:
            columns = stated[1]
        group = min(self.group or columns, max(columns, 1))
        scales = self._entry(entries, layer, "scales").torch_dtype or torch.float16
        suffix = SUFFIXES[self.method].get("order")
        order = None if suffix is None else entries.get(f"{layer}{suffix}")
        is_ordered = order is not None and self._is_ordered(order, columns, group)
        has_zeros = self.method not in ("int4", "nvfp4") or self.is_symmetric is False
        encoding = FourBitGroups(self.method, group, scales, has_zeros, is_ordered)
        return encoding, (rows, columns)

    def _is_ordered(self, order: TensorEntry, columns: int, group: int) -> bool:
        """Whether columns of a group are not neighbours."""
        content = bytearray(_read(order, max(4 * columns, 1), "I32"))
        groups = torch.frombuffer(content, dtype=torch.int32)
        least = int(groups.min())
        most = int(groups.max())
        if self.method == "int4" and least == -1:  # compressed-tensors' mark for no order
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
    """Int8 or nf4. The type of 4 bits is read from the tensors, as in transformers."""
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
    fields.require_number(4, "bits", default=None)
    method = fields.text(*form, default="gptq")
    if method not in _SYMMETRIC:
        raise fields.refused("gptq or gptq_v2", *form)
    if fields.value("is_marlin_format"):
        raise fields.refused("false", "is_marlin_format")
    dynamic = fields.inner("dynamic")
    for pattern in dynamic.values:
        if not pattern.startswith("-:"):  # which leaves layers as they are
            raise dynamic.refused("no other settings for some layers", pattern)
    return Quantization(
        where,
        method,
        group=fields.group("group_size", default=_GROUP),
        is_symmetric=fields.flag("sym", default=None),
    )


def _awq(where: Path, fields: _Fields) -> Quantization:
    form = ("checkpoint_format", "version", "format")
    fields.require_number(4, "bits", "w_bit", default=4)
    if fields.text(*form, default="gemm") != "gemm":
        raise fields.refused("gemm", *form)
    if fields.value("backend") == "llm-awq":
        raise fields.refused("a backend for the layout gemm", "backend")
    if fields.flag("zero_point", default=True) is not True:
        raise fields.refused("true", "zero_point")
    group = fields.group("group_size", "q_group_size", default=_GROUP)
    return Quantization(where, "awq", group=group)


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
    weights.require_number(4, "num_bits", default=8)
    if form == "nvfp4-pack-quantized":
        weights.require_number(16, "group_size", default=16)
        return Quantization(where, "nvfp4", group=16)
    if weights.text("type", default="int") != "int":
        raise weights.refused("int", "type")
    fields.text("quantization_status")
    symmetric = weights.flag("symmetric", default=True)
    return Quantization(where, "int4", group=_group(weights), is_symmetric=symmetric)


def _of_whole_codes(where: Path, weights: _Fields) -> Quantization:
    """Compressed-tensors' FP8, and integers of 8 bits."""
    weights.require_number(8, "num_bits", default=8)
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
    """ModelOpt's FP8, which has a scale for each tensor."""
    if fields.text("quant_algo").upper() != "FP8":
        raise fields.refused("FP8", "quant_algo")
    return Quantization(where, "scaled fp8", block=(0, 0))


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
    known = ("pack-quantized", "nvfp4-pack-quantized", *_WHOLE_CODES)
    if form not in known:
        raise of_group.refused(f"one of {', '.join(known)}", "format")
    return form, weights


def _refuse_fp4(entries: Mapping[str, TensorEntry]) -> None:
    for name, entry in entries.items():
        if name.endswith(_FP4):
            remedy = "quantise the original again with bnb_4bit_quant_type nf4, or use that"
            raise UnsupportedModelError(
                f"{entry.path}: {name}", "4 bits of bitsandbytes as fp4", "nf4", remedy
            )


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


def _nf4(entry: TensorEntry) -> tuple[NF4Blocks, tuple[int, ...]]:
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
    if state.get("quant_type") != "nf4" or block % 2 or not abs(offset) <= _MAX_OFFSET:
        raise malformed_tensor(
            entry, f"type {state.get('quant_type')}, blocks of {block}, an offset of {offset}"
        )
    return NF4Blocks(block, nested, offset), shape


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
