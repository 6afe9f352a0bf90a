"""Layers of the base that peft's modules wrap, names of their parameters, and an adapter's files in peft's format."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.models.hf import HFBlockModel
from zo2core import ParameterSpec
from zo2core.checkpoint.writer import new_directory, write_companions
from zo2core.errors import OptionError
from zo2core.kernels.encoding import decoded
from zo2core.protocols import TensorReader

ADAPTER_NAME = "default"  # the adapter's name in the model, peft's default
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."  # prefix of the names of layers' parameters
AUTO, EXPERTS = "auto", "experts"  # among ``target_modules``: linear layers outside experts, and stacks of experts
_WRAPPED = re.compile(r"(\.(base_layer|original_module))+\.")  # part of the names of a wrapped module's parameters
SAVED = f".modules_to_save.{ADAPTER_NAME}."  # part of the names of parameters in a module's trained copy


def wrap_layers(skeleton: PreTrainedModel, config: Any, layers: tuple[type[nn.Module], ...] = (nn.Linear,)) -> list[str]:
    """Let peft wrap layers of a skeleton."""
    import peft

    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # peft draws weights that are not used
            warnings.filterwarnings("ignore", "fan_in_fan_out is set")  # it corrects this option for each layer
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern .*gate_up_proj")  # of a mixture: its own
            peft.inject_adapter_in_model(config, skeleton, adapter_name=ADAPTER_NAME)
    except Exception as error:  # any: an invalid config leads to errors inside peft
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise OptionError(
            "adapter.target_modules" if "arget modules" in found or "arget_modules" in found else "adapter",
            found=found,
            expected="a config that peft can put into this model, with names of its linear layers",
            remedy="name layers that the model has, such as q_proj, or all-linear",
        ) from error
    output: Any = skeleton.get_output_embeddings
    for path, module in wrapped_layers(skeleton):
        wrapped = module.base_layer
        if not (wraps_parameter(module) or _is_linear(wrapped, layers)) or module is output():
            raise OptionError(
                "adapter.target_modules",
                found=f"{path}, {'the head' if module is output() else type(wrapped).__name__}",
                expected="linear layers before the head",
                remedy=f"name such layers, as q_proj, or {AUTO} for all of them outside experts and routers",
            )
    _require_copies(skeleton, config)
    skeleton.train(mode=False)
    return [name for name, _ in skeleton.named_parameters() if f".{ADAPTER_NAME}." in f"{name}."]


def name_targets(skeleton: PreTrainedModel, config: Any, layers: tuple[type[nn.Module], ...]) -> None:
    """Replace ``auto`` and ``experts`` among a config's targets by names of this model."""
    targets = {config.target_modules} if isinstance(config.target_modules, str) else {*(config.target_modules or ())}
    if EXPERTS in targets:
        stacks = _stacked_experts(skeleton)
        if not stacks:
            found, remedy = f"{EXPERTS}, which {skeleton.config.model_type} does not have as stacks", "leave it out"
            raise OptionError("adapter.target_modules", found=found, expected="layers of this model", remedy=remedy)
        config.target_parameters = sorted({*(config.target_parameters or ()), *stacks})
        config.target_modules = targets = targets - {EXPERTS}
    if AUTO in targets:
        config.target_modules = targets - {AUTO} | _linear_layers(skeleton, layers)


def _stacked_experts(skeleton: nn.Module) -> set[str]:
    """The ends of names of parameters that are one matrix for each expert."""
    experts = (module for path, module in skeleton.named_modules() if path.endswith(f".{EXPERTS}"))
    parameters = (it for module in experts for it in module.named_parameters(recurse=False))
    return {f"{EXPERTS}.{name}" for name, parameter in parameters if parameter.ndim == 3}


def _linear_layers(skeleton: PreTrainedModel, layers: tuple[type[nn.Module], ...]) -> set[str]:
    """The paths of linear layers before the head: of a mixture, those outside its experts and routers.

    Dense layers stay out whose names peft takes for those of experts, as ``gate_proj`` in DeepSeek's first layers.
    """
    whole: Any = skeleton
    head = whole.get_output_embeddings()
    paths = [path for path, module in skeleton.named_modules() if module is not head and _is_linear(module, layers)]
    of_experts = {leaf for leaf in {path.rpartition(".")[2] for path in paths} if _names_experts(skeleton, leaf)}
    return {path for path in paths if path.rpartition(".")[2] not in of_experts}


def _is_linear(module: nn.Module, layers: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is a linear layer, and no router that only inherits from one."""
    if type(module) in layers or not isinstance(module, nn.Linear):
        return type(module) in layers
    values = module.weight.new_empty(1, module.in_features)
    try:
        with torch.no_grad():
            output = module(values)
    except Exception:  # any: a class of transformers that takes more than one tensor
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, module.out_features)


def _names_experts(skeleton: PreTrainedModel, leaf: str) -> bool:
    """Whether peft takes a layer's name for a projection of this model's experts, which are one stacked parameter."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(config, skeleton, None)
    except ValueError:  # a projection is stacked with another one
        return True
    return bool(config.target_parameters)


def wraps_parameter(module: nn.Module) -> bool:
    """Whether a module of peft adapts a parameter of the module that it wraps, such as a stack of experts."""
    return hasattr(module, "parameter_name")


def _require_copies(skeleton: PreTrainedModel, config: Any) -> None:
    """Refuse ``modules_to_save`` that match no module, or modules whose copies cannot be trained."""
    wanted = list(config.modules_to_save or ())
    paths = [name[: name.index(SAVED)] for name, _ in skeleton.named_parameters() if SAVED in name]
    whole: Any = skeleton
    ends = (whole.get_input_embeddings(), whole.get_output_embeddings())
    wrong = [name for name in wanted if not any(path.endswith(name) for path in paths)]
    wrong += [path for path in dict.fromkeys(paths) if skeleton.get_submodule(path) in ends or _has_parts(skeleton, path)]
    if wrong:
        raise OptionError(
            "adapter.modules_to_save",
            found=wrong[0],
            expected="modules with parameters of their own, such as norms, other than the embedding and the output layer",
            remedy="name such modules, or leave it out",
        )


def _has_parts(skeleton: nn.Module, path: str) -> bool:
    return any(True for _ in skeleton.get_submodule(path + SAVED.rstrip(".")).children())


def wrapped_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path of each wrapped layer, and peft's module around it."""
    for path, module in model.named_modules():
        if getattr(module, "base_layer", None) is not None:
            yield path, module


def base_form(name: str) -> str:
    """The name in the base of a parameter of the model with an adapter; a trained copy has the name of its original."""
    return _WRAPPED.sub(".", name).replace(SAVED, ".")


def file_name(name: str) -> str:
    """The name of an adapter's parameter in peft's files."""
    name = name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name  # saved without its module's name
    return FILE_PREFIX + re.sub(rf"\.{ADAPTER_NAME}(?=\.|$)", "", name.replace(SAVED, "."))


def read_weight(weights: TensorReader, spec: ParameterSpec) -> torch.Tensor:
    """Read a parameter of the base, decoded, in its shape."""
    stored = torch.empty(spec.stored_numel, dtype=spec.stored_dtype)
    weights.read_into(spec.name, stored)
    return (stored if spec.encoding is None else decoded(spec, stored)).view(spec.shape)


def base_values(base: HFBlockModel, names: Iterable[str]) -> Iterator[tuple[ParameterSpec, torch.Tensor]]:
    """Read parameters of a base one after the other, decoded."""
    specs = {spec.name: spec for layout in base.layouts for spec in layout.parameters}
    with closing(base.weights) as weights:
        for name in names:
            yield specs[name], read_weight(weights, specs[name])


def put_value(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Set the parameter of this name to a tensor."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = nn.Parameter(value)


def write_adapter(
    directory: Path,
    config: Mapping[str, Any],
    values: dict[str, torch.Tensor],
    files: Mapping[str, Path | bytes] = MappingProxyType({}),
) -> None:
    """Write an adapter."""
    with new_directory(directory) as partial:
        (partial / WEIGHTS_FILE).write_bytes(save(values, {"format": "pt"}))
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_companions(partial, files)


def plain_config(config: Any) -> dict[str, Any]:
    """Peft's config as JSON values, as peft saves it."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=_listed))
    return {**values, "inference_mode": True}


def _listed(value: object) -> object:
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)
