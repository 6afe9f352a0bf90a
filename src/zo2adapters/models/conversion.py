"""Convert checkpoints: from pickles to safetensors, and from 16 or 32 bits to 8 or 4 bits.

The formats of 8 and 4 bits are those of ``quantization.py``. Transformers loads them, too: int8
and nf4 with bitsandbytes.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zo2adapters.limited_process import LimitedProcess
from zo2adapters.models.checkpoint import (
    json_object,
    open_checkpoint,
    portable_companions,
    remote_code_note,
    require_no_adapter,
)
from zo2adapters.models.hf import Files, HFBlockModel
from zo2adapters.models.pickled import new_reader, write_as_safetensors
from zo2adapters.models.quantization import MATRIX, SUFFIXES
from zo2core import ParameterSpec
from zo2core.checkpoint.export import (
    is_finite,
    new_directory,
    not_finite,
    require_unused,
    shard_names,
    write_checkpoint,
    write_companions,
    write_index,
)
from zo2core.checkpoint.shards import choose_weights, malformed, parse_index, require_own_file
from zo2core.encodings.decoding import encode
from zo2core.encodings.forms import Float8Blocks, Int8Rows, MatrixEncoding, NF4Blocks
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError
from zo2core.types import EncodedPart, SavedForm, SavedPart

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"


def convert(
    source: Path,
    destination: Path,
    *,
    report: Callable[[str], object] = lambda line: None,
    reader: LimitedProcess | None = None,
) -> Path:
    """Convert a model directory from pickled weights to safetensors.

    Memory: one shard, in a child process.
    """
    require_unused(destination)
    require_no_adapter(source, None)
    expected = _find_shards(source)
    companions, rewritten = portable_companions(source)
    names = shard_names(len(expected))
    weight_map: dict[str, str] = {}
    total_size = 0
    reading = new_reader() if reader is None else contextlib.nullcontext(reader)
    with new_directory(destination) as partial, reading as child:
        write_companions(partial, companions)
        if rewritten:
            report(remote_code_note(rewritten))
        for number, (shard, target) in enumerate(zip(expected, names, strict=True), start=1):
            report(f"{shard} ({number} of {len(expected)})")
            sizes = write_as_safetensors(child, source / shard, partial / target)
            # Of a tensor in several shards the last one counts, as in transformers.
            weight_map |= dict.fromkeys(sizes, target)
            for name in expected[shard]:
                if name not in sizes:
                    raise malformed(
                        source / shard, f"no tensor {name}", f"the tensor, as {INDEX_FILE} says"
                    )
            total_size += sum(sizes.values())
        if not weight_map:
            raise malformed(source, "no tensors", "a model's weights")
        write_index(partial, weight_map, total_size=total_size)
    return destination


def _find_shards(directory: Path) -> dict[str, list[str]]:
    """The tensors that the index expects in each shard, by the shard's file name; a single file has
    no index, and is preferred to one, as in transformers.
    """
    chosen = choose_weights(directory, (SINGLE_FILE, INDEX_FILE))
    preferred = choose_weights(directory)
    expected = f"{SINGLE_FILE} or {INDEX_FILE}"
    if chosen is None and preferred is None:
        remedy = "pass a directory that holds a model in the Hugging Face layout"
        raise CheckpointError(directory, "no pickled weights", expected, remedy)
    if chosen is None:
        remedy = "use this directory as it is; there is nothing to convert"
        raise CheckpointError(directory, "safetensors weights only", expected, remedy)
    if preferred is not None:
        found = f"{preferred.name} as well, which transformers loads instead"
        remedy = "use this directory as it is, or convert a copy without the safetensors"
        raise CheckpointError(directory, found, f"{chosen.name} alone", remedy)
    require_own_file(chosen, directory)
    names: dict[str, list[str]] = {}
    if chosen.name == SINGLE_FILE:
        names[SINGLE_FILE] = []
    else:
        for name, shard in sorted(parse_index(chosen, suffix=".bin").items()):
            names.setdefault(shard, []).append(name)
    if not names:
        raise malformed(chosen, "an empty weight_map", "the model's tensors")
    for shard in names:
        require_own_file(directory / shard, directory)
    return dict(sorted(names.items()))


METHODS = ("int8", "nf4", "fp8")
_MAX_BLOCK = 128  # rows and columns of fp8's blocks, as in released checkpoints
# of nf4's JSON object, padded with spaces, since headers are written before its values are known
_STATE_BYTES = 512


def quantize(
    model: Path | str,
    directory: Path,
    method: str,
    *,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Quantized:
    """Write a model directory in which the layers' linear weights are encoded, and all else is
    copied.

    One matrix at a time is in memory.
    """
    if method not in METHODS:
        raise OptionError("quantize", method, f"one of {', '.join(METHODS)}", "pass one of these")
    require_unused(directory)
    opened = open_checkpoint(model)
    with contextlib.closing(opened.weights):
        chosen = _linear_weights(opened, Path(model))
        parameters = [spec for layout in opened.layouts for spec in layout.parameters]
        encoding = _encoding(
            method, [matrix.shape for matrices in chosen.values() for matrix in matrices]
        )
        specs = [
            part
            for spec in parameters
            for part in _specs(spec, chosen.get(spec.name, ()), encoding)
        ]
        origins = {spec.name: opened.weights.origin(spec.name) for spec in parameters}
        write_checkpoint(
            directory,
            specs,
            _tensors(opened, parameters, chosen, encoding, progress),
            _described_companions(opened, encoding),
            form=_form_without(opened.saved_form, chosen),
            origin=lambda name: origins.get(name, str(model)),
        )
    return Quantized(
        before=sum(spec.nbytes for spec in parameters),
        after=sum(spec.nbytes for spec in specs),
        left=_unencoded_matrices(opened, chosen),
    )


def _described_companions(model: HFBlockModel, encoding: MatrixEncoding) -> Files:
    """The files beside the weights, with a config that describes the encoding."""
    config = json_object(model.companions["config.json"])
    config["quantization_config"] = _description(encoding, config["dtype"])
    text = json.dumps(config, indent=2) + "\n"
    return {**model.companions, "config.json": text.encode()}


def _form_without(form: SavedForm, encoded: Collection[str]) -> SavedForm:
    """How a checkpoint stores the parameters that are not encoded."""
    unencoded = {name: parts for name, parts in form.parts.items() if name not in encoded}
    return replace(form, parts=unencoded)


def _unencoded_matrices(model: HFBlockModel, encoded: Collection[str]) -> list[ParameterSpec]:
    """The layers' matrices that are not encoded."""
    layers = [layout for layout in model.layouts if not layout.resident]
    matrices = [spec for layout in layers for spec in layout.parameters if len(spec.shape) > 1]
    return [spec for spec in matrices if spec.name not in encoded]


class Quantized(NamedTuple):
    """What was written."""

    before: int  # bytes of the model's tensors
    after: int  # bytes of those that were written
    left: list[ParameterSpec]  # the layers' matrices that are not encoded


class _Matrix(NamedTuple):
    """A matrix to encode, which is a parameter or one of a stack."""

    layer: str  # name of its layer in the checkpoint
    shape: tuple[int, int]


def _encoding(method: str, shapes: Sequence[tuple[int, int]]) -> MatrixEncoding:
    """The encoding for matrices of these shapes; fp8's block divides all of them.

    With partial blocks, kernels and transformers would not agree where blocks begin.
    """
    if method == "fp8":
        rows, columns = (math.gcd(_MAX_BLOCK, *sizes) for sizes in zip(*shapes, strict=True))
        return Float8Blocks((rows, columns))
    return Int8Rows() if method == "int8" else NF4Blocks()


def _linear_weights(model: HFBlockModel, where: Path) -> dict[str, tuple[_Matrix, ...]]:
    """The parameters to encode: layers' linear weights, and stacks of experts."""
    chosen: dict[str, tuple[_Matrix, ...]] = {}
    for layout in model.layouts:
        for spec in layout.parameters:
            if spec.encoding is not None:
                found = f"{spec.name} in {spec.encoding.name}"
                raise UnsupportedModelError(
                    where, found, "unquantised weights", "use it as it is, or quantise the original"
                )
            matrices = () if layout.resident else _matrices(model, spec)
            if matrices:
                chosen[spec.name] = matrices
    if not chosen:
        found = "no linear layer with its own tensor"
        raise UnsupportedModelError(
            where, found, "linear layers to encode", "use the model as it is"
        )
    return chosen


def _matrices(model: HFBlockModel, spec: ParameterSpec) -> tuple[_Matrix, ...]:
    """The matrices to encode of a layer's parameter; none if it is neither a linear weight nor a
    stack of experts, or if its matrices have no tensors of their own.
    """
    (_, module, leaf), *_ = model.places_of(spec.name)
    parts = model.saved_form.parts_of(spec)
    is_linear = leaf == "weight" and type(module) is nn.Linear
    # a matrix for each
    is_of_experts = ".experts." in spec.name or "Experts" in type(module).__name__
    is_stack = len(spec.shape) == 3 and (len(parts) > 1 or is_of_experts)
    if not (is_stack or is_linear):
        return ()
    *stack, rows, columns = spec.shape
    if is_stack and parts == (SavedPart(parts[0].tensor, spec.shape, 0, spec.numel),):
        layers = [f"{parts[0].tensor}{MATRIX}{number}" for number in range(*stack)]
        return tuple(_Matrix(layer, (rows, columns)) for layer in layers)
    matrices = tuple(
        _Matrix(part.tensor.removesuffix(".weight"), (part.numel // columns, columns))
        for part in parts
    )
    whole = tuple(
        SavedPart(f"{layer}.weight", shape, 0, math.prod(shape)) for layer, shape in matrices
    )
    return matrices if tuple(parts) == whole else ()


def _specs(
    spec: ParameterSpec, matrices: Sequence[_Matrix], encoding: MatrixEncoding
) -> list[ParameterSpec]:
    """The specs of the tensors that hold a parameter."""
    suffixes = SUFFIXES[encoding.name]
    return [
        ParameterSpec(
            f"{layer}{suffixes[part.role]}", part.shape, part.dtype, spec.index, decays=False
        )
        for layer, shape in matrices
        for part in _saved_parts(encoding, shape)
    ] or [spec]


def _saved_parts(encoding: MatrixEncoding, shape: tuple[int, int]) -> list[EncodedPart]:
    """The tensors in which bitsandbytes and transformers save a matrix."""
    parts = list(encoding.parts(shape))
    if isinstance(encoding, NF4Blocks):
        parts[0] = parts[0]._replace(shape=(*parts[0].shape, 1))
        parts.append(EncodedPart("state", torch.uint8, (_STATE_BYTES,)))
    if isinstance(encoding, Int8Rows):
        parts.append(EncodedPart("format", torch.uint8, ()))
    return parts


def _tensors(
    model: HFBlockModel,
    parameters: Sequence[ParameterSpec],
    chosen: Mapping[str, Sequence[_Matrix]],
    encoding: MatrixEncoding,
    progress: Callable[[int, int], object],
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, with their names from ``_specs``."""
    done = 0
    total = sum(spec.nbytes for spec in parameters)
    suffixes = SUFFIXES[encoding.name]
    for spec in parameters:
        progress(done, total)
        done += spec.nbytes
        if spec.name not in chosen:
            yield spec.name, _read(model, spec, 0, spec.numel)
            continue
        first = 0
        for layer, shape in chosen[spec.name]:  # of a stack one matrix at a time is in memory
            weights = _read(model, spec, first, math.prod(shape)).view(shape)
            first += weights.numel()
            if not is_finite(weights):
                where = f"{model.weights.origin(spec.name)}: {spec.name}"
                raise not_finite(where, weights, weights)
            fitted, parts = encode(weights, encoding)
            saved = dict(parts)
            if isinstance(fitted, NF4Blocks):
                saved["state"] = _state(fitted, shape, spec.dtype)
            if isinstance(encoding, Int8Rows):
                saved["format"] = torch.zeros((), dtype=torch.uint8)
            for role, tensor in saved.items():
                yield f"{layer}{suffixes[role]}", tensor.contiguous()
    progress(done, total)


def _read(model: HFBlockModel, spec: ParameterSpec, start: int, numel: int) -> torch.Tensor:
    """Elements of a parameter."""
    weights = torch.empty(numel, dtype=spec.dtype)
    model.weights.read_into(spec.name, weights, start)
    return weights


def _state(encoding: NF4Blocks, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Describe a matrix as bitsandbytes does: a JSON object, as bytes."""
    values = {
        "quant_type": "nf4",
        "blocksize": encoding.block,
        "dtype": str(dtype).removeprefix("torch."),
    }
    values |= {
        "shape": list(shape),
        "nested_blocksize": encoding.nested_block,
        "nested_dtype": "float32",
    }
    values["nested_offset"] = encoding.offset
    return torch.tensor(list(json.dumps(values).encode().ljust(_STATE_BYTES)), dtype=torch.uint8)


def _description(encoding: MatrixEncoding, dtype: str) -> dict[str, Any]:
    """The ``quantization_config`` of ``config.json``."""
    if isinstance(encoding, Float8Blocks):
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(encoding.block),
        }
    nf4 = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
    }
    return {
        "quant_method": "bitsandbytes",
        **({"load_in_8bit": True} if isinstance(encoding, Int8Rows) else nf4),
    }
