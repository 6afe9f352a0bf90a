"""A model with its adapter merged into the weights, as peft's ``merge_and_unload`` makes it, one matrix in memory at a time.

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

from zo2adapters.models.peft_kinds.block_model import PeftBlockModel
from zo2adapters.models.peft_kinds.kind import ADAPTER_NAME
from zo2adapters.models.peft_kinds.wrapped_layers import SAVED, base_form, put_value
from zo2core import Engine
from zo2core.checkpoint import require_unused, write_checkpoint
from zo2core.errors import UnsupportedModelError

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
    if model.adapter.inserted.wrapper is not None:
        raise UnsupportedModelError(
            "adapter",
            found=f"{model.adapter.kind.title}, which no weight can contain",
            expected="an adapter of linear layers, such as LoRA",
            remedy="load it beside the base with peft",
        )
    require_unused(directory)
    values = _adapter_values(runner, model)
    specs = [spec.decoded for layout in model.layouts for spec in layout.parameters if spec.name not in values]
    renamed = [replace(spec, name=base_form(spec.name)) for spec in specs]
    with closing(_merged(runner, model, values, progress)) as tensors:
        companions = {**model.companions, **files}
        write_checkpoint(directory, renamed, tensors, companions, dtype=model.export_dtype, form=model.saved_form)


def _adapter_values(runner: Engine, model: PeftBlockModel) -> dict[str, torch.Tensor]:
    """The adapter's parameters, which are all in memory."""
    names, values = model.exported_parameters, dict[str, torch.Tensor]()
    with closing(runner.parameters_now()) as parameters:
        for name, tensor in parameters:
            if name in names:
                values[name] = tensor.clone()
            if len(values) == len(names):
                break
    return values


def _merged(
    runner: Engine,
    model: PeftBlockModel,
    values: Mapping[str, torch.Tensor],
    progress: Callable[[int], object] | None,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """The parameters of the base by their names in it, with the adapter merged into them."""
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
    original = model.module_at(path)
    shared = {id(parameter): parameter for parameter in original.parameters()}  # which are replaced below, not copied
    layer: Any = deepcopy(original, shared)
    for own, _ in original.named_parameters():
        if f"{path}.{own}" in values:
            put_value(layer, own, values[f"{path}.{own}"])
    for other, parameter in list(layer.base_layer.named_parameters()):
        value = tensor.clone() if other == leaf else torch.zeros(parameter.shape, dtype=tensor.dtype)
        put_value(layer.base_layer, other, value)
    with torch.no_grad():
        layer.merge(safe_merge=False, adapter_names=[ADAPTER_NAME])
    merged: torch.Tensor = getattr(layer.base_layer, leaf).detach()
    return merged.contiguous()
