"""LoRA and DoRA: two thin matrices in addition to a linear layer's matrix, for DoRA also a vector of magnitudes.

A stack of experts gets a pair of matrices for each expert (``target_parameters``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds.block_model import WITH_ADAPTER
from zo2adapters.models.peft_kinds.kind import ADAPTER_NAME, AdapterKind, FirstValues, Inserted, OpenBase
from zo2adapters.models.peft_kinds.wrapped_layers import (
    base_name,
    file_name,
    is_rank,
    name_targets,
    put_value,
    read_weight,
    wrap_layers,
    wrapped_layers,
    wraps_parameter,
)

_INITIALISATIONS = (True, False, "gaussian")  # values of ``init_lora_weights`` that do not depend on the base's weights
_MATRICES_OF_DORA = 4  # float32 matrices of a layer's shape that exist at a time: both products, the weights, their sum


class _Magnitude(NamedTuple):
    """DoRA's magnitudes of one layer, and what their initial values depend on."""

    name: str  # name of the parameter
    weight: str  # name of the layer's matrix in the base
    factors: tuple[str, str]  # names of the parameters A and B
    scaling: float  # scale of their product
    module: Any  # peft's class of the magnitudes


class LoRAKind(AdapterKind):
    """``peft.LoraConfig``."""

    peft_type = "LORA"
    title = "LoRA"
    config_class = "LoraConfig"
    decisive = frozenset(
        {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern", "alpha_pattern"}
        | {"layers_to_transform", "layers_pattern", "fan_in_fan_out", "modules_to_save", "target_parameters"}
    )
    supported = frozenset({"init_lora_weights", "use_dora"})
    accepted = (
        "LoRA of linear layers, GPT-2's Conv1D and stacked experts, or DoRA of linear layers, without dropout, whose "
        "initial values do not depend on the base's weights"
    )
    part_of_names = "lora_A"
    model_classes: ClassVar[Mapping[type[HFBlockModel], Callable[..., HFBlockModel]]] = WITH_ADAPTER

    def unused_options(self, config: Any) -> list[str]:
        """See the contract."""
        refused = [] if config.init_lora_weights in _INITIALISATIONS else ["init_lora_weights"]
        return refused if is_rank(config.r) else [*refused, "r"]

    def why_not_stacked(self, config: Any) -> str | None:
        """DoRA is refused: its forward divides by norms of the perturbed matrix, which differ for each direction."""
        return "DoRA" if config.use_dora else "LoRA of experts" if config.target_parameters else None

    def why_not_mixed(self, config: Any) -> str | None:
        """DoRA takes norms of matrices, and experts' matrices are added to the base's, before autocast casts them."""
        return "DoRA" if config.use_dora else "LoRA of experts" if config.target_parameters else None

    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """See the contract."""
        layers: tuple[type[nn.Module], ...] = (nn.Linear,) if config.use_dora else (nn.Linear, Conv1D)
        name_targets(skeleton, config, layers)
        names = wrap_layers(skeleton, config, layers)
        wrapped = [layer for _, layer in wrapped_layers(skeleton)]
        if any(type(layer.base_layer) is Conv1D for layer in wrapped):
            config.fan_in_fan_out = True  # as peft sets it for each such layer, with a warning if the config says otherwise
        forward_bytes = 0
        if config.use_dora:
            forward_bytes = (
                _MATRICES_OF_DORA * torch.float32.itemsize * max(layer.base_layer.weight.numel() for layer in wrapped)
            )
        sums = Counter[nn.Module]()  # bytes of adapted stacks, which exist beside the base's while their module runs
        for layer in wrapped:
            if wraps_parameter(layer):
                sums[layer.get_base_layer()] += layer.get_param().nbytes
        return Inserted(
            {name: file_name(_file_form(name)) for name in names},
            forward_bytes=max([forward_bytes, *sums.values()]),
        )

    def first_values(self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase) -> FirstValues:
        """Matrices from peft's initialisation; DoRA's magnitudes from peft's too, which reads each layer's weights."""
        names = [name for path, _ in wrapped_layers(skeleton) for name in _matrices(path)]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # without seeding devices
            for name in names:
                put_value(skeleton, name, torch.zeros(skeleton.get_parameter(name).shape, dtype=torch.float32))
                linear = skeleton.get_submodule(name.rpartition(".")[0])
                assert isinstance(linear, nn.Linear), "other layers were refused"
                linear.reset_parameters()  # as when the layer is built
            for _, layer in wrapped_layers(skeleton):
                layer.reset_lora_parameters(ADAPTER_NAME, config.init_lora_weights)
        values = {name: skeleton.get_parameter(name).detach() for name in names}
        if not config.use_dora:
            return lambda: values
        magnitudes = [_magnitude(skeleton, path, layer) for path, layer in wrapped_layers(skeleton)]
        return lambda: {**values, **_norms(magnitudes, values, base())}


def _matrices(path: str) -> tuple[str, str]:
    """The names of a layer's two matrices, in the order in which they are drawn."""
    return f"{path}.lora_A.{ADAPTER_NAME}.weight", f"{path}.lora_B.{ADAPTER_NAME}.weight"


def _file_form(name: str) -> str:
    """The name from which ``file_name`` makes the name in files: magnitudes are saved without their module's name."""
    return name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name


def _magnitude(skeleton: nn.Module, path: str, layer: Any) -> _Magnitude:
    return _Magnitude(
        name=f"{path}.lora_magnitude_vector.{ADAPTER_NAME}.weight",
        weight=base_name(skeleton, layer.base_layer.weight),
        factors=_matrices(path),
        scaling=layer.scaling[ADAPTER_NAME],
        module=type(layer.lora_magnitude_vector[ADAPTER_NAME]),
    )


def _norms(magnitudes: list[_Magnitude], values: Mapping[str, torch.Tensor], base: HFBlockModel) -> dict[str, torch.Tensor]:
    """Initial magnitudes, computed by peft with one matrix of the base in memory at a time."""
    specs = {spec.name: spec for layout in base.layouts for spec in layout.parameters}
    norms: dict[str, torch.Tensor] = {}
    with closing(base.weights) as weights:
        for magnitude in magnitudes:
            spec = specs[magnitude.weight]
            layer = nn.Linear(1, 1, bias=False, device="meta")
            layer.weight = nn.Parameter(read_weight(weights, spec), requires_grad=False)
            module = magnitude.module(fan_in_fan_out=False)
            # In the weights' dtype, as in peft, which converts its matrices to float32 only after computing the norms.
            a, b = (values[name].to(spec.dtype) for name in magnitude.factors)
            with torch.no_grad():
                module.update_layer(base_layer=layer, lora_A=a, lora_B=b, scaling=magnitude.scaling)
            norms[magnitude.name] = module.weight.detach().float()
    return norms
