"""The tensors of a checkpoint: decoded where they are quantised, and matched with the model that
its config describes.

Transformers renames and joins tensors as it loads a model. Its own rules run on row numbers in
place of rows, and their result says where each row of a parameter is stored. A parameter is read
from there straight into its memory, and written back. Rules that compute with values, or move
values within a row, are refused.

Quantised formats, as transformers writes them: bitsandbytes of 8 bits (``weight`` in int8, ``SCB``
beside it) and 4 bits (nf4: ``weight`` with ``weight.absmax``, ``weight.quant_map``, a JSON object
in bytes, and nested ones where scales are quantised, too), fine-grained FP8 (``weight`` in e4m3,
``weight_scale_inv``), MXFP4 of gpt-oss's experts (``_blocks`` and ``_scales``), GPTQ and AWQ of 4
bits, and compressed-tensors' packed integers of 4 bits and NVFP4. ``config.json`` is checked
against the tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from zo2adapters.models.architecture import Architecture, parameter_names
from zo2core import ParameterSpec
from zo2core.checkpoint.shards import (
    DTYPE_NAMES,
    DTYPES,
    Piece,
    TensorEntry,
    check_float,
    same_samples,
)
from zo2core.encodings.forms import (
    MXFP4_BLOCK,
    Float8Blocks,
    FourBitGroups,
    Int8Rows,
    MatrixEncoding,
    MatrixStack,
    MXFP4Stack,
    NF4Blocks,
)
from zo2core.errors import CheckpointError, UnsupportedModelError
from zo2core.io.direct_file import byte_view
from zo2core.protocols import TensorReader
from zo2core.types import Encoding, SavedForm, SavedPart

_INTEGERS = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros", "order": ".g_idx"}
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
_MARKS |= {"int8": ".SCB", "fp8": ".weight_scale_inv", "nf4": SUFFIXES["nf4"]["state"]}
_MAX_BLOCK = 4096  # weights or scales that share a scale, bitsandbytes' limit
_MAX_OFFSET = torch.finfo(torch.float32).max
_MAX_STATE_BYTES = 4096

# operations that only move whole rows; old versions of transformers have no Split
_ROW_OPERATIONS = {
    getattr(core_model_loading, name, None)
    for name in (
        "MergeModulelist",
        "SplitModulelist",
        "Concatenate",
        "Chunk",
        "Split",
        "Interleave",
        "Transpose",
    )
}
_MAX_ROWS = 1 << 26  # rows of one conversion; their int64 numbers take half a GiB


class EncodedTensor(NamedTuple):
    """A matrix of a checkpoint that is stored in several tensors."""

    encoding: Encoding
    shape: tuple[int, ...]  # of the matrix
    parts: tuple[TensorEntry, ...]  # in the encoding's order


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
        kind += (
            f" of {values['bits']} bits" if method in ("gptq", "awq") and "bits" in values else ""
        )
        kind += f" in format {values.get('format')}" if method == "compressed-tensors" else ""
        raise UnsupportedModelError(
            where,
            f"quantization_config: {method}{kind}",
            "bitsandbytes of 8 bits or of 4 bits as nf4, fp8 in blocks, mxfp4, GPTQ or AWQ of 4 "
            "bits everywhere, "
            "or one scheme of compressed-tensors: packed integers of 4 bits or NVFP4",
            "use the unquantised checkpoint, or quantise it: zo2 convert --quantize int8|nf4|fp8",
        )

    def split(
        self, entries: Mapping[str, TensorEntry], dtype: torch.dtype
    ) -> tuple[dict[str, TensorEntry], dict[str, EncodedTensor]]:
        """A checkpoint's tensors as if none were encoded, and the encoded ones, by the parameters'
        names.
        """
        mark, own = _MARKS[self.method], "" if self.method == "mxfp4" else ".weight"
        layers = sorted(name.removesuffix(mark) for name in entries if name.endswith(mark))
        if not layers:
            raise UnsupportedModelError(
                self.where,
                f"quantization_config of {self.method}, and no tensor of it",
                "the tensors that belong to this config",
                "take quantization_config out of config.json if the weights are not quantised",
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
            fits = (
                entry.nbytes == part.nbytes
                if self.method in ("nf4", "nvfp4")
                else entry.shape == part.shape
            )
            if not fits or entry.dtype != DTYPE_NAMES[part.dtype]:
                expected = (
                    f"{DTYPE_NAMES[part.dtype]} of shape {list(part.shape)}, for {layer} in "
                    f"{encoding.name}"
                )
                raise _malformed(entry, f"{entry.dtype} of shape {list(entry.shape)}", expected)
            parts.append(entry)
        return EncodedTensor(encoding, shape, tuple(parts))

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
            expected = (
                f"{'stacks of matrices' if self.method == 'mxfp4' else 'a matrix'} in {self.method}"
            )
            raise _malformed(codes, f"shape {list(codes.shape)}", expected)
        if self.method == "fp8":
            stored = self._entry(entries, layer, "scales").dtype
            scales = DTYPES[stored if stored in ("BF16", "F8_E8M0") else "F32"]
            return Float8Blocks(self.block, scales), codes.shape
        if self.method != "int8":
            return self._groups(entries, layer, *codes.shape)
        order = entries.get(f"{layer}{SUFFIXES['int8']['format']}")
        if order is not None and (order.nbytes != 1 or any(_read(order))):
            remedy = (
                "quantise the model again with a recent bitsandbytes, or use the unquantised "
                "checkpoint"
            )
            raise _malformed(order, "codes in another layout", "0, the layout row by row", remedy)
        return Int8Rows(), codes.shape

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
            groups = torch.frombuffer(
                bytearray(_read(order, 4 * columns, "I32")), dtype=torch.int32
            )
            if len(groups) != columns or not 0 <= int(groups.min()) <= int(groups.max()) < -(
                -columns // group
            ):
                raise _malformed(
                    order,
                    f"{len(groups)} groups of columns, from {int(groups.min())} to "
                    f"{int(groups.max())}",
                )
            # no neighbours
            is_ordered = not torch.equal(groups, torch.arange(columns, dtype=torch.int32) // group)
        has_zeros = self.method not in ("int4", "nvfp4") or not self.is_symmetric
        return FourBitGroups(self.method, group, scales, has_zeros, is_ordered), (
            rows,
            columns,
        )

    def _entry(self, entries: Mapping[str, TensorEntry], layer: str, role: str) -> TensorEntry:
        name = f"{layer}{SUFFIXES[self.method][role]}"
        if name not in entries:
            expected = f"all tensors of a matrix in {self.method}, as config.json says"
            raise _missing(
                self.where.parent,
                name,
                expected,
                "get all shards, and the config.json that belongs to them",
            )
        return entries[name]


def _described(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Method, block, group and symmetry, by the fields of ``Quantization``; None: it is another
    quantisation.
    """
    method, weights = values.get("quant_method"), dict[str, Any]()
    if method == "bitsandbytes":
        name = "int8" if values.get("load_in_8bit") else values.get("bnb_4bit_quant_type")
        return {"method": name} if name in ("int8", "nf4") else None
    if method == "fp8":
        block: Any = values.get("weight_block_size")
        is_block = isinstance(block, (list, tuple)) and _are_sizes(block)
        return {"method": "fp8", "block": tuple(block)} if is_block else None
    if method == "gptq":
        name = values.get("checkpoint_format") or "gptq"
        fits = values.get("bits") == 4 and not values.get("dynamic") and name in ("gptq", "gptq_v2")
        return {"method": name, "group": _group(values.get("group_size"))} if fits else None
    if method == "awq":
        is_gemm = values.get("version", "gemm").lower() == "gemm" and values.get("zero_point", True)
        group = values.get("group_size", values.get("q_group_size"))
        fits = values.get("bits", values.get("w_bit")) == 4 and is_gemm
        return {"method": "awq", "group": _group(group)} if fits else None
    if method == "compressed-tensors":
        schemes = list((values.get("config_groups") or {}).values())
        is_dense = (values.get("sparsity_config") or {}).get("format") in ("dense", None)
        is_plain = is_dense and not values.get("transform_config") and len(schemes) == 1
        if is_plain and values.get("quantization_status") in ("compressed", None):
            weights = schemes[0].get("weights") or {}
        is_integer = weights.get("type") == "int" and weights.get("strategy") in (
            "group",
            "channel",
        )
        if values.get("format") == "nvfp4-pack-quantized" and weights.get("num_bits") == 4:
            return {"method": "nvfp4", "group": 16}
        if values.get("format") == "pack-quantized" and weights.get("num_bits") == 4 and is_integer:
            group = _group(weights.get("group_size"))
            return {
                "method": "int4",
                "group": group,
                "is_symmetric": bool(weights.get("symmetric", True)),
            }
    return {"method": "mxfp4"} if method == "mxfp4" else None


def _with_stacks(encoded: Mapping[str, EncodedTensor]) -> dict[str, EncodedTensor]:
    """Unite the matrices that this package wrote for a tensor of three axes; the others stay as
    they are.
    """
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
            raise _malformed(
                entry,
                f"{len(matrices)} matrices of {name}, up to number {max(by_number)}, of shapes "
                f"{shapes}",
            )
        stack_of = MatrixStack(tuple((matrix.encoding, matrix.shape[0]) for matrix in matrices))  # type: ignore[misc]
        parts = tuple(part for matrix in matrices for part in matrix.parts)
        found[name] = EncodedTensor(stack_of, (len(matrices), *shapes[0]), parts)
    return found


def encodings_of(
    parameters: Mapping[str, Sequence[Piece]], encoded: Mapping[str, EncodedTensor]
) -> tuple[dict[str, tuple[Piece, ...]], dict[str, Encoding]]:
    """The pieces to read for all parameters, and the encodings of encoded ones."""
    pieces, found = (
        {name: tuple(of_parameter) for name, of_parameter in parameters.items()},
        dict[str, Encoding](),
    )
    for name, of_parameter in parameters.items():
        matrices = [
            encoded[piece.entry.name] for piece in of_parameter if piece.entry.name in encoded
        ]
        if not matrices:
            continue
        stack = tuple(
            (one.encoding, one.shape[0])
            for one in matrices
            if isinstance(one.encoding, MatrixEncoding)
        )
        is_whole = all(piece == Piece.whole(piece.entry) for piece in of_parameter)
        if (
            not is_whole
            or len(matrices) < len(of_parameter)
            or (len(matrices) > 1 and len(stack) < len(matrices))
        ):
            expected = (
                "quantised matrices that are each a parameter of the model, or all of a stack of "
                "experts"
            )
            first = of_parameter[0].entry
            raise _unsupported(
                first, f"a quantised part of {name}", expected, "use the unquantised checkpoint"
            )
        found[name] = matrices[0].encoding if len(matrices) == 1 else MatrixStack(stack)
        pieces[name] = tuple(Piece.whole(part.as_bytes()) for one in matrices for part in one.parts)
    return pieces, found


def _nf4(entry: TensorEntry) -> tuple[NF4Blocks, tuple[int, ...]]:
    """Read encoding and shape from the JSON object beside a matrix."""
    try:
        state = json.loads(_read(entry))
        shape, block, nested = (
            tuple(state["shape"]),
            state["blocksize"],
            state.get("nested_blocksize"),
        )
        offset = float(state["nested_offset"]) if nested is not None else 0.0
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise _malformed(entry, f"an invalid state ({type(error).__name__})") from error
    sizes = block, 2 if nested is None else nested
    if not (_are_sizes(shape) and _are_sizes(sizes) and max(sizes) <= _MAX_BLOCK):
        raise _malformed(entry, f"shape {shape}, blocks of {block} and {nested}")
    if state.get("quant_type") != "nf4" or block % 2 or not abs(offset) <= _MAX_OFFSET:
        raise _malformed(
            entry, f"type {state.get('quant_type')}, blocks of {block}, an offset of {offset}"
        )
    return NF4Blocks(block, nested, offset), shape


def _read(entry: TensorEntry, most: int = _MAX_STATE_BYTES, dtype: str = "U8") -> bytes:
    """The bytes of a small tensor."""
    if not 0 < entry.nbytes <= most or entry.dtype != dtype:
        raise _malformed(entry, f"{entry.dtype} of {entry.nbytes} bytes")
    return entry.read()


def _group(size: object) -> int | None:
    return size if type(size) is int and size > 0 else None


def _are_sizes(values: Sequence[object]) -> bool:
    return len(values) == 2 and all(type(value) is int and 0 < value < 2**31 for value in values)


def match_tensors(
    directory: Path,
    entries: Mapping[str, TensorEntry],
    skeleton: PreTrainedModel,
    architecture: Architecture,
) -> tuple[dict[str, tuple[Piece, ...]], SavedForm]:
    """Find the pieces of each of ``named_parameters()``, and load persistent buffers, which are few
    and small.

    Returns:
        The pieces, and how the checkpoint stores buffers and parameters that have other names or
        parts in the model.
    """
    pieces, prefix = parameter_pieces(entries, skeleton), skeleton.base_model_prefix
    state = skeleton.state_dict()
    unexpected = [
        name
        for name in pieces
        if name not in state and not _is_ignored(name, skeleton, architecture)
    ]
    if unexpected:
        found = (
            f"{len(unexpected)} tensor(s) that the model of config.json does not have, this one "
            "first"
        )
        remedy = "use the config.json that belongs to these shards, or open them with their head"
        raise _malformed(
            pieces[min(unexpected)][0].entry, found, "the parameters of the config's model", remedy
        )
    parameters: dict[str, tuple[Piece, ...]] = {}
    parts: dict[str, tuple[SavedPart, ...]] = {}
    for name, aliases in parameter_names(skeleton).items():
        copies = [pieces[alias] for alias in aliases if alias in pieces]
        if not copies:
            raise _missing(directory, name, "every parameter of the model")
        _require_equal_ties(copies, name)
        _require_one_float(copies[0], name)
        parameters[name] = (first, *others) = copies[0]
        names = {name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"}
        if others or first != Piece.whole(first.entry) or first.entry.name not in names:
            parts[name] = tuple(piece.saved_part for piece in copies[0])
    known = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    constants: dict[str, torch.Tensor] = {}
    for name in sorted(state.keys() - known):
        if name not in pieces:
            raise _missing(directory, name, "every buffer that the model's checkpoints keep")
        first, *others = pieces[name]
        if others or first != Piece.whole(first.entry):
            raise _unsupported(
                first.entry,
                f"a part of the buffer {name}",
                "buffers that are each a tensor of their own",
            )
        constants[first.entry.name] = value = read_tensor(first.entry)
        path, _, leaf = name.rpartition(".")
        skeleton.get_submodule(path)._buffers[leaf] = value.to(state[name].dtype)
    return parameters, SavedForm(parts, constants)


def require_dtype(
    parameters: Mapping[str, Sequence[Piece]], skeleton: PreTrainedModel, dtype: torch.dtype
) -> None:
    """Refuse tensors of another dtype than the config's."""
    for name, pieces in parameters.items():
        entry = pieces[0].entry
        if entry.torch_dtype not in (dtype, skeleton.get_parameter(name).dtype):
            # transformers keeps some in another dtype
            remedy = "pass a dtype, to which tensors are converted as they are read"
            raise _malformed(entry, f"dtype {entry.dtype}", f"{dtype}, as config.json says", remedy)


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """Read a small tensor of any dtype."""
    value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    byte_view(value)[:] = entry.read()
    return value


_ALL = (
    "get all shards; for a new head, load the model with transformers' class of this head, and "
    "save it"
)


def _missing(directory: Path, name: str, expected: str, remedy: str = _ALL) -> CheckpointError:
    return CheckpointError(directory, f"no tensor {name}", expected, remedy)


def _require_one_float(pieces: Sequence[Piece], name: str) -> None:
    """Refuse a parameter that is not of one floating-point dtype."""
    first = pieces[0].entry
    for entry, _, _ in pieces:
        if check_float(entry) != first.torch_dtype:
            expected = f"{first.dtype}, as in {first.name}: both are in {name}"
            raise _malformed(
                entry, f"dtype {entry.dtype}", expected, "convert the checkpoint to one dtype"
            )


def _is_ignored(name: str, skeleton: PreTrainedModel, architecture: Architecture) -> bool:
    """Whether a tensor is obsolete, as transformers or a declaration says."""
    patterns = [*(skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    return name.endswith(architecture.ignored or ("\0",)) or any(
        re.search(pattern, name) for pattern in patterns
    )


def _require_equal_ties(copies: Sequence[Sequence[Piece]], name: str) -> None:
    """Refuse a checkpoint whose copies of a tied weight differ: it was trained untied."""
    for copy in copies[1:]:
        for (first, *extent), (other, *other_extent) in zip_longest(
            copies[0], copy, fillvalue=(None, 0, 0)
        ):
            if (
                first is None
                or other is None
                or extent != other_extent
                or not same_samples(first, other)
            ):
                found, expected = (
                    f"other values than in {copies[0][0].entry.name}",
                    f"equal values: config.json ties both to {name}",
                )
                raise _malformed(
                    copy[0].entry,
                    found,
                    expected,
                    "set tie_word_embeddings to false in config.json",
                )


def parameter_pieces(
    entries: Mapping[str, TensorEntry], model: PreTrainedModel
) -> dict[str, tuple[Piece, ...]]:
    """Apply transformers' rules to the names of a checkpoint's tensors."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    prefix, state = model.base_model_prefix, model.state_dict()
    pieces: dict[str, tuple[Piece, ...]] = {}
    joined: dict[str, list[tuple[str, TensorEntry]]] = {}  # target to pattern and tensor
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        entry = entries[name]
        if pattern is not None and target in state:
            joined.setdefault(target, []).append((pattern, entry))
            continue
        if target in state and entry.shape != tuple(state[target].shape):
            expected = f"{list(state[target].shape)} for {target}, as config.json says"
            raise _malformed(entry, f"shape {list(entry.shape)}", expected)
        if target in pieces:
            raise _duplicate(entry, target, pieces[target][0].entry)
        pieces[target] = (Piece.whole(entry),)
    for target, sources in joined.items():
        for name, converted_pieces in _converted(
            model, state, target, sources, deepcopy(by_pattern[sources[0][0]])
        ).items():
            if name in pieces:
                raise _duplicate(converted_pieces[0].entry, name, pieces[name][0].entry)
            pieces[name] = converted_pieces
    return pieces


def _converted(
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    target: str,
    sources: Sequence[tuple[str, TensorEntry]],
    rule: WeightConverter,
) -> dict[str, tuple[Piece, ...]]:
    """Run one rule on row numbers, and return the pieces of every tensor of the model that it
    makes.
    """
    entries = [entry for _, entry in sources]
    for operation in rule.operations:
        if type(operation) not in _ROW_OPERATIONS:
            found = f"{operation!r}, by which transformers makes {target}"
            raise _unsupported(entries[0], found, "conversions that move whole rows")
    by_elements = any(len(entry.shape) < 2 for entry in entries)  # a vector is no row
    sizes = [1 if by_elements else entry.shape[-1] for entry in entries]
    counts = [
        math.prod(entry.shape) // max(size, 1) for entry, size in zip(entries, sizes, strict=True)
    ]
    offsets = [0, *accumulate(counts)]
    if offsets[-1] > _MAX_ROWS:
        raise _unsupported(
            entries[0], f"{offsets[-1]} rows for {target}", f"at most {_MAX_ROWS} in one conversion"
        )
    for (pattern, entry), first, count in zip(sources, offsets, counts, strict=False):
        shape = entry.shape if by_elements else (*entry.shape[:-1], 1)
        rule.add_tensor(target, entry.name, pattern, torch.arange(first, first + count).view(shape))  # type: ignore[arg-type]
    try:
        converted: dict[str, Any] = rule.convert(target, model=model, config=model.config)
    except Exception as error:
        # any: tensors that do not fit together surface inside the operations
        raise _misfit(
            entries[0],
            target,
            f"tensors that do not fit together ({type(error).__name__}: {error})",
        ) from error
    tensors = {
        name: value[0] if isinstance(value, list) else value for name, value in converted.items()
    }
    numbers = torch.cat([value.reshape(-1) for value in tensors.values()])
    if not torch.equal(numbers.sort().values, torch.arange(offsets[-1])):
        raise _misfit(entries[0], target, "rows that no parameter takes")
    result = {}
    for name, value in tensors.items():
        shape = tuple(state[name].shape) if name in state else ()
        if tuple(value.shape) != (shape if by_elements else (*shape[:-1], 1)) or (
            not by_elements and any(size != shape[-1] for size in sizes)
        ):
            raise _misfit(
                entries[0],
                name,
                f"{len(entries)} tensor(s), the first of shape {list(entries[0].shape)}",
            )
        result[name] = tuple(_pieces(value.reshape(-1), entries, offsets, sizes[0]))
    return result


def _pieces(
    numbers: torch.Tensor, entries: Sequence[TensorEntry], offsets: Sequence[int], size: int
) -> list[Piece]:
    """Join consecutive rows of one tensor into pieces."""
    begins_tensor = torch.isin(numbers, torch.tensor(offsets))
    begins_tensor[1:] |= numbers[1:] != numbers[:-1] + 1
    begins_tensor[:1] = True
    starts = [*begins_tensor.nonzero().flatten().tolist(), len(numbers)]
    pieces = []
    for start, stop in pairwise(starts):
        row = int(numbers[start])
        index = bisect_right(offsets, row) - 1
        pieces.append(Piece(entries[index], (row - offsets[index]) * size, (stop - start) * size))
    return pieces


def _duplicate(entry: TensorEntry, target: str, first: TensorEntry) -> CheckpointError:
    found = f"a second tensor for {target}, beside {first.name}"
    return _malformed(entry, found, "one tensor for each parameter", "remove one of them")


def _misfit(entry: TensorEntry, name: str, found: str) -> CheckpointError:
    return _malformed(
        entry, found, f"the tensors from which transformers makes {name}, as config.json says"
    )


_DESCRIPTION = "the description of a matrix in the format that config.json names"
_OF_SHARDS = "use the config.json that belongs to these shards, or get all files again"


def _malformed(
    entry: TensorEntry, found: str, expected: str = _DESCRIPTION, remedy: str = _OF_SHARDS
) -> CheckpointError:
    return CheckpointError(f"{entry.path}: {entry.name}", found, expected, remedy)


_SAVE_AGAIN = (
    "load the model with transformers, save it with save_original_format=False, and use that"
)


def _unsupported(
    entry: TensorEntry, found: str, expected: str, remedy: str = _SAVE_AGAIN
) -> UnsupportedModelError:
    return UnsupportedModelError(f"{entry.path}: {entry.name}", found, expected, remedy)


@dataclass(eq=False)
class OverlaidReader:
    """Reads a checkpoint, of which some parameters have values of their own, made at the first read
    and kept in memory.

    Args:
        base: Reads the other parameters.
        values: Makes the values by parameter, each with a dtype of its own.
        dtypes: The dtypes of these values.
        where: Their origin; None: that of the parameters in the base.
    """

    base: TensorReader
    values: Callable[[], Mapping[str, torch.Tensor]]
    dtypes: Mapping[str, torch.dtype]
    where: str | None = None

    def __post_init__(self) -> None:
        self._made: Mapping[str, torch.Tensor] | None = None
        self._lock = threading.Lock()  # several threads may read first
        self.close = self.base.close

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the base and, where they are not the base's, of all values."""
        if self.where is None:
            return self.base.fingerprint
        values = save(
            {name: value.contiguous() for name, value in sorted(self._flat_values().items())}
        )
        return hashlib.sha256(
            self.base.fingerprint.encode() + hashlib.sha256(values).digest()
        ).hexdigest()

    def page_offset(self, spec: ParameterSpec) -> int | None:
        """None for values in memory. See the contract."""
        return None if spec.name in self.dtypes else self.base.page_offset(spec)

    def itemsize(self, parameter: str) -> int:
        """Bytes of an element."""
        return (
            self.dtypes[parameter].itemsize
            if parameter in self.dtypes
            else self.base.itemsize(parameter)
        )

    def origin(self, parameter: str) -> str:
        """The file of a parameter, or the name of the values' origin."""
        return (
            self.where if self.where and parameter in self.dtypes else self.base.origin(parameter)
        )

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of one parameter. See the contract."""
        if parameter in self.dtypes:
            out.copy_(self._flat_values()[parameter][start : start + out.numel()])
        else:
            self.base.read_into(parameter, out, start)

    def _flat_values(self) -> Mapping[str, torch.Tensor]:
        with self._lock:
            if self._made is None:
                self._made = {name: value.view(-1) for name, value in self.values().items()}
            return self._made
