"""Quantise the matrices of a checkpoint's layers to 8 or 4 bits, one tensor at a time.

The formats are those of ``quantized.py``; transformers loads them, too, with bitsandbytes for int8 and nf4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zo2adapters.models.checkpoint import json_object, open_checkpoint
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.quantized import INT8_FORMAT, MATRIX, NF4_STATE, SUFFIXES
from zo2core import ParameterSpec
from zo2core.checkpoint.shards import require_unused, write_checkpoint
from zo2core.encodings import Float8Blocks, Int8Rows, MatrixEncoding, NF4Blocks
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError
from zo2core.kernels.encoding import encode
from zo2core.types import SavedForm, SavedPart

METHODS = ("int8", "nf4", "fp8")
_MAX_BLOCK = 128  # rows and columns of fp8's blocks, as in released checkpoints
_STATE_BYTES = 512  # of nf4's JSON object, padded with spaces, since headers are written before its values are known


def quantize(
    model: Path | str, directory: Path, method: str, *, progress: Callable[[int, int], object] = lambda done, total: None
) -> Quantized:
    """Write a model directory in which the layers' linear weights are encoded, and all else is copied.

    One matrix at a time is in memory.
    """
    if method not in METHODS:
        raise OptionError("quantize", found=method, expected=f"one of {', '.join(METHODS)}", remedy="pass one of these")
    require_unused(directory)
    opened = open_checkpoint(model)
    with closing(opened.weights):
        chosen = _linear_weights(opened, Path(model))
        parameters = [spec for layout in opened.layouts for spec in layout.parameters]
        encoding = _encoding(method, [matrix.shape for matrices in chosen.values() for matrix in matrices])
        specs = [part for spec in parameters for part in _specs(spec, chosen.get(spec.name, ()), encoding)]
        kept = {name: parts for name, parts in opened.saved_form.parts.items() if name not in chosen}
        config = json_object(opened.companions["config.json"])
        config["quantization_config"] = _description(encoding, config["dtype"])
        companions = {**opened.companions, "config.json": json.dumps(config, indent=2).encode() + b"\n"}
        form = SavedForm(kept, opened.saved_form.constants)
        write_checkpoint(directory, specs, _tensors(opened, chosen, encoding, progress), companions, form=form)
    in_layers = [spec for layout in opened.layouts if not layout.resident for spec in layout.parameters]
    left = [spec for spec in in_layers if spec.name not in chosen and len(spec.shape) > 1]
    return Quantized(sum(spec.nbytes for spec in parameters), sum(spec.nbytes for spec in specs), left)


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
                found, remedy = f"{spec.name} in {spec.encoding.name}", "use it as it is, or quantise the original"
                raise UnsupportedModelError(where, found=found, expected="unquantised weights", remedy=remedy)
            (_, module, leaf), *_ = model.places_of(spec.name)
            parts, is_linear = model.saved_form.parts_of(spec), leaf == "weight" and type(module) is nn.Linear
            is_of_experts = ".experts." in spec.name or "Experts" in type(module).__name__  # a matrix for each
            is_stack = len(spec.shape) == 3 and (len(parts) > 1 or is_of_experts)
            if layout.resident or not (is_stack or is_linear):
                continue
            columns = spec.shape[-1]
            if is_stack and parts == (SavedPart(parts[0].tensor, spec.shape, 0, spec.numel),):
                experts, rows, columns = spec.shape
                layers = [f"{parts[0].tensor}{MATRIX}{number}" for number in range(experts)]
                chosen[spec.name] = tuple(_Matrix(layer, (rows, columns)) for layer in layers)
                continue
            shapes = [(part.numel // columns, columns) for part in parts]
            if all(
                part == SavedPart(part.tensor, shape, 0, math.prod(shape)) and part.tensor.endswith(".weight")
                for part, shape in zip(parts, shapes, strict=True)
            ):
                layers = [part.tensor.removesuffix(".weight") for part in parts]
                chosen[spec.name] = tuple(map(_Matrix, layers, shapes))
    if not chosen:
        raise UnsupportedModelError(
            where,
            found="no linear layer with its own tensor",
            expected="linear layers to encode",
            remedy="use the model as it is",
        )
    return chosen


def _specs(spec: ParameterSpec, matrices: Sequence[_Matrix], encoding: MatrixEncoding) -> Iterator[ParameterSpec]:
    """The specs of the tensors that hold a parameter."""
    if not matrices:
        yield spec
    is_nf4 = isinstance(encoding, NF4Blocks)
    for layer, shape in matrices:
        for part in encoding.parts(shape):
            own = (*part.shape, 1) if is_nf4 and part.role == "codes" else part.shape
            yield ParameterSpec(f"{layer}{SUFFIXES[encoding.name][part.role]}", own, part.dtype, spec.index, decays=False)
        if is_nf4:
            yield ParameterSpec(f"{layer}{NF4_STATE}", (_STATE_BYTES,), torch.uint8, spec.index, decays=False)
        if isinstance(encoding, Int8Rows):
            yield ParameterSpec(f"{layer}{INT8_FORMAT}", (), torch.uint8, spec.index, decays=False)


def _tensors(
    model: HFBlockModel,
    chosen: Mapping[str, Sequence[_Matrix]],
    encoding: MatrixEncoding,
    progress: Callable[[int, int], object],
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, with their names from ``_specs``."""
    done, total = 0, sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
    for layout in model.layouts:
        for spec in layout.parameters:
            progress(done, total)
            done += spec.nbytes
            if spec.name not in chosen:
                yield spec.name, _read(model, spec, 0, spec.numel)
                continue
            first = 0
            for layer, shape in chosen[spec.name]:  # of a stack one matrix at a time is in memory
                weights = _read(model, spec, first, math.prod(shape)).view(shape)
                first += weights.numel()
                if not bool(weights.isfinite().all()):
                    raise CheckpointError(
                        f"{model.weights.origin(spec.name)}: {spec.name}",
                        found="a number that is not finite",
                        expected="finite weights",
                        remedy="get the checkpoint again, or choose another dtype",
                    )
                fitted, parts = encode(weights, encoding)
                for role, tensor in parts.items():
                    yield f"{layer}{SUFFIXES[encoding.name][role]}", tensor.contiguous()
                if isinstance(fitted, NF4Blocks):
                    yield f"{layer}{NF4_STATE}", _state(fitted, shape, spec.dtype)
                if isinstance(encoding, Int8Rows):
                    yield f"{layer}{INT8_FORMAT}", torch.zeros((), dtype=torch.uint8)
    progress(done, total)


def _read(model: HFBlockModel, spec: ParameterSpec, start: int, numel: int) -> torch.Tensor:
    """Elements of a parameter."""
    weights = torch.empty(numel, dtype=spec.dtype)
    model.weights.read_into(spec.name, weights, start)
    return weights


def _state(encoding: NF4Blocks, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Describe a matrix as bitsandbytes does: a JSON object, as bytes."""
    values = {"quant_type": "nf4", "blocksize": encoding.block, "dtype": str(dtype).removeprefix("torch.")}
    values |= {"shape": list(shape), "nested_blocksize": encoding.nested_block, "nested_dtype": "float32"}
    values["nested_offset"] = encoding.offset
    return torch.tensor(list(json.dumps(values).encode().ljust(_STATE_BYTES)), dtype=torch.uint8)


def _description(encoding: MatrixEncoding, dtype: str) -> dict[str, Any]:
    """The ``quantization_config`` of ``config.json``."""
    if isinstance(encoding, Float8Blocks):
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(encoding.block)}
    nf4 = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
    }
    return {"quant_method": "bitsandbytes", **({"load_in_8bit": True} if isinstance(encoding, Int8Rows) else nf4)}
