"""Export the updates of a low-rank run as an adapter of peft.

The updates of a matrix sum up to ``A V^T`` with a few columns a period, which is a LoRA adapter with A as its ``lora_B`` and
V^T as its ``lora_A``. Parameters without such a form (norms, biases, tables of positions) are written whole.

A model with its adapter merged into the weights, as peft's ``merge_and_unload`` makes it, one matrix in memory at a time.

Each layer is merged by peft's own code: a copy of peft's module gets the values of one layer, and nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from zo2adapters.models.hf import HFBlockModel, HFHeadModel
from zo2adapters.models.peft_kinds import PeftBlockModel
from zo2adapters.models.peft_layers import (
    ADAPTER_NAME,
    FILE_PREFIX,
    SAVED,
    base_form,
    plain_config,
    put_value,
    write_adapter,
)
from zo2adapters.optional_package import optional_package
from zo2core import Engine, ParameterSpec
from zo2core.checkpoint import require_unused, write_checkpoint
from zo2core.errors import OptionError, UnsupportedModelError

_FLOAT32_MATRICES = 4
_LAYER, _TABLE = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")


def export_adapter(
    replayer: Engine,
    model: HFBlockModel,
    directory: Path | str,
    *,
    base: str,
    files: Mapping[str, Path | bytes] = MappingProxyType({}),
) -> None:
    """Write a run's updates as an adapter, which ``PeftModel.from_pretrained`` loads on the base.

    The loss is that of the exported model, except for the order of sums and the dtype in which peft adds them.
    """
    peft = optional_package("peft", install="zo2core[peft]")
    require_unused(Path(directory))
    if isinstance(model, PeftBlockModel):
        found, expected = "a run that trains an adapter", "a run that trains all weights"
        raise OptionError("as_adapter", found=found, expected=expected, remedy="leave it out: an adapter is exported anyway")
    tensors: dict[str, torch.Tensor] = {}
    targets: list[str] = []
    saved: dict[str, None] = {}  # modules that are written whole
    rank, bias, is_transposed = 0, "none", False
    with closing(replayer.learned()) as learned:
        for name, value in learned:
            for path, module, leaf in model.places_of(name):
                forward, prefix = type(module).forward, f"{FILE_PREFIX}{path}"
                if forward not in (nn.Linear.forward, nn.Embedding.forward, Conv1D.forward):
                    saved[path], tensors[f"{prefix}.{leaf}"] = None, value.present().clone()
                elif value.factors is None:
                    bias, tensors[f"{prefix}.base_layer.{leaf}"] = "all", value.present().clone()
                else:
                    targets.append(path)
                    is_transposed |= forward is Conv1D.forward
                    rank = value.factors.left.shape[1]
                    factors = value.factors if forward is not nn.Linear.forward else value.factors[::-1]
                    names = _TABLE if forward is nn.Embedding.forward else _LAYER
                    tensors |= {
                        f"{prefix}.{name}": factor for name, factor in zip(names, _lora(path, *factors), strict=True)
                    }
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=targets,
        modules_to_save=list(saved) or None,
        bias=bias,
        fan_in_fan_out=is_transposed,
        base_model_name_or_path=base,
        task_type=None if isinstance(model, HFHeadModel) else "CAUSAL_LM",  # peft's task types of other heads add a head
        inference_mode=True,
    )
    write_adapter(Path(directory), plain_config(config), tensors, {**model.tokenizer_files, **files})


def _lora(path: str, inputs: torch.Tensor, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices A and B of a LoRA adapter, from a matrix's factors of (inputs, columns) and (outputs, columns)."""
    columns, smaller = inputs.shape[1], min(len(inputs), len(outputs))
    if columns > smaller:
        raise OptionError(
            "as_adapter",
            found=f"{columns} columns of all periods",
            expected=f"at most {smaller}, for {path} of {len(inputs)} x {len(outputs)}",
            remedy="leave it out: a merged model is smaller",
        )
    return inputs.float().cpu().t().contiguous(), outputs.float().cpu().contiguous()


_BASE = ".base_layer."  # within the name of a parameter that peft has wrapped


def export_merged(
    runner: Engine,
    model: PeftBlockModel,
    directory: Path,
    *,
    files: Mapping[str, Path | bytes] = MappingProxyType({}),
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write the base with the adapter merged into its weights, as ``from_pretrained`` loads it."""
    require_mergeable(model)
    require_unused(directory)
    with closing(merged_parameters(runner, model, progress)) as tensors:
        companions, specs = {**model.companions, **files}, merged_specs(model)
        write_checkpoint(directory, specs, tensors, companions, dtype=model.export_dtype, form=model.saved_form)


def merged_specs(model: PeftBlockModel) -> list[ParameterSpec]:
    """The parameters of the base by their names in it, decoded."""
    specs = [spec for layout in model.layouts for spec in layout.parameters if spec.name not in model.exported_parameters]
    return [replace(spec.decoded, name=base_form(spec.name)) for spec in specs]


def adapter_values(runner: Engine, model: PeftBlockModel) -> dict[str, torch.Tensor]:
    """The adapter's parameters, which are all in memory."""
    names, values = model.exported_parameters, dict[str, torch.Tensor]()
    with closing(runner.parameters_now()) as parameters:
        for name, tensor in parameters:
            if name in names:
                values[name] = tensor.clone()
            if len(values) == len(names):
                break
    return values


def merging_bytes(model: HFBlockModel) -> int:
    """Bytes that merging takes beside the weights: peft's code has several float32 matrices of a layer at a time."""
    return _FLOAT32_MATRICES * 4 * max(spec.numel for layout in model.layouts for spec in layout.parameters)


def require_mergeable(model: PeftBlockModel) -> None:
    """Refuse an adapter that is no change of weights."""
    if model.adapter.inserted.wrapper is not None:
        raise UnsupportedModelError(
            "adapter",
            found=f"{model.adapter.kind.title}, which no weight can contain",
            expected="an adapter of linear layers, such as LoRA",
            remedy="load it beside the base with peft",
        )


def merged_parameters(
    runner: Engine, model: PeftBlockModel, progress: Callable[[int], object] | None = None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the parameters of the base by their names in it, with the adapter merged into them."""
    values = adapter_values(runner, model)
    copies = {base_form(name): value for name, value in values.items() if SAVED in name}
    with closing(runner.parameters_now()) as parameters:
        for name, tensor in parameters:
            if name in values:
                continue
            base = base_form(name)
            if base in copies:
                yield base, copies[base].to(tensor.dtype)
            elif _BASE in name:
                yield base, merged_parameter(model, name, tensor, values)
            else:
                yield base, tensor
            if progress is not None:
                progress(tensor.nbytes)


def merged_parameter(
    model: PeftBlockModel, name: str, tensor: torch.Tensor, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Merge the adapter into one parameter of a layer, by peft's own code."""
    path, _, leaf = name.rpartition(_BASE)
    while getattr(model.modules[path], "parameter_name", leaf) != leaf:  # peft nests modules that adapt one parameter each
        if not path.endswith(_BASE[:-1]):
            return tensor
        path = path.removesuffix(_BASE[:-1])
    original = model.modules[path]
    shared = {id(parameter): parameter for parameter in original.parameters()}  # which are replaced below, not copied
    layer: Any = deepcopy(original, shared)
    for own, _ in original.named_parameters():
        if f"{path}.{own}" in values:
            put_value(layer, own, values[f"{path}.{own}"])
    base = layer.get_base_layer()
    for other, parameter in list(base.named_parameters()):
        put_value(base, other, tensor.clone() if other == leaf else torch.zeros(parameter.shape, dtype=tensor.dtype))
    with torch.no_grad():
        layer.merge(safe_merge=False, adapter_names=[ADAPTER_NAME])
    merged: torch.Tensor = getattr(base, leaf).detach()
    return merged.contiguous()
