"""LoRA, with DoRA's magnitudes or without: two thin matrices beside a linear layer's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds.block_model import WITH_ADAPTER
from zo2adapters.models.peft_kinds.kind import ADAPTER_NAME, AdapterKind, FirstValues, Inserted, OpenBase
from zo2adapters.models.peft_kinds.wrapped_layers import (
    base_name,
    file_name,
    is_rank,
    put_value,
    wrap_layers,
    wrapped_layers,
)
from zo2core.kernels.encoding import decoded

_KNOWN_STARTS = (True, False, "gaussian")  # of matrices that need no weights of the base
_MATRICES_OF_DORA = 4  # float32 ones that its forward has at a time: both products, the weights, and their sum


class _Magnitude(NamedTuple):
    """DoRA's vector of one layer, for whoever computes what it begins with."""

    name: str  # of the parameter
    weight: str  # of the layer's matrix, in the base
    factors: tuple[str, str]  # the parameters A and B
    scaling: float  # of their product
    module: Any  # peft's class


class LoRAKind(AdapterKind):
    """``peft.LoraConfig``."""

    peft_type = "LORA"
    title = "LoRA"
    config_class = "LoraConfig"
    decisive = frozenset(
        {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern", "alpha_pattern"}
        | {"layers_to_transform", "layers_pattern", "fan_in_fan_out", "modules_to_save"}
    )
    supported = frozenset({"init_lora_weights", "use_dora"})
    accepted = "LoRA or DoRA of linear layers alone, without dropout, whose matrices begin without weights of the base"
    part_of_names = "lora_A"
    model_classes: ClassVar[Mapping[type[HFBlockModel], Callable[..., HFBlockModel]]] = WITH_ADAPTER

    def unused_options(self, config: Any) -> list[str]:
        """See the contract."""
        refused = [] if config.init_lora_weights in _KNOWN_STARTS else ["init_lora_weights"]
        return refused if is_rank(config.r) else [*refused, "r"]

    def why_not_stacked(self, config: Any) -> str | None:
        """DoRA's forward divides by norms of the whole matrix, which each direction would have its own of."""
        return "DoRA" if config.use_dora else None

    def why_not_mixed(self, config: Any) -> str | None:
        """DoRA's norms are of matrices before autocast casts them."""
        return "DoRA" if config.use_dora else None

    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """See the contract."""
        names = wrap_layers(skeleton, config)
        largest = 0
        if config.use_dora:
            largest = max(layer.base_layer.weight.numel() for _, layer in wrapped_layers(skeleton))
        return Inserted(
            {name: file_name(_file_form(name)) for name in names},
            forward_bytes=_MATRICES_OF_DORA * largest * torch.float32.itemsize,
        )

    def first_values(self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase) -> FirstValues:
        """Matrices by peft's own initialisation; DoRA's magnitudes by its own, from each layer's weights in turn."""
        names = [name for path, layer in wrapped_layers(skeleton) for name in _matrices(path)]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # and no device's
            for name in names:
                put_value(skeleton, name, torch.zeros(skeleton.get_parameter(name).shape, dtype=torch.float32))
                linear = skeleton.get_submodule(name.rpartition(".")[0])
                assert isinstance(linear, nn.Linear), "other layers were refused"
                linear.reset_parameters()  # with which it would have been built
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
    """Magnitudes are saved without the name of the module that holds them."""
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
    """Magnitudes by peft's own code, one matrix of the base in memory at a time.

    Raises:
        CheckpointError: if one cannot be read.
    """
    specs = {spec.name: spec for layout in base.layouts for spec in layout.parameters}
    norms: dict[str, torch.Tensor] = {}
    with closing(base.weights) as weights:
        for magnitude in magnitudes:
            spec = specs[magnitude.weight]
            stored = torch.empty(spec.stored_numel, dtype=spec.stored_dtype)
            weights.read_into(spec.name, stored)
            weight = (stored if spec.encoding is None else decoded(spec, stored)).view(spec.shape)
            layer = nn.Linear(1, 1, bias=False, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)
            module = magnitude.module(fan_in_fan_out=False)
            # In the weights' dtype, as peft has its matrices when it computes norms: only then are they made float32.
            a, b = (values[name].to(spec.dtype) for name in magnitude.factors)
            with torch.no_grad():
                module.update_layer(base_layer=layer, lora_A=a, lora_B=b, scaling=magnitude.scaling)
            norms[magnitude.name] = module.weight.detach().float()
    return norms
