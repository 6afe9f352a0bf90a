"""Kinds that wrap linear layers, and whose initial values depend only on the seed and the layers' shapes.

Names, forwards and initial values are peft's. Peft draws the values for one layer at a time, in the order in which it draws
them for a whole model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds.block_model import WITH_ADAPTER
from zo2adapters.models.peft_kinds.kind import ADAPTER_NAME, AdapterKind, FirstValues, Inserted, OpenBase
from zo2adapters.models.peft_kinds.wrapped_layers import file_name, wrap_layers, wrapped_layers

_WHICH_LAYERS = frozenset({"modules_to_save", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"})
_MATRICES = 4  # float32 matrices of a layer's shape that exist at a time in a forward: products, their sum, the weights


class InjectedKind(AdapterKind):
    """A kind that needs no code of its own."""

    model_classes: ClassVar[Mapping[type[HFBlockModel], Callable[..., HFBlockModel]]] = WITH_ADAPTER

    def __init__(
        self,
        peft_type: str,
        config_class: str,
        decisive: set[str],
        initialisation: set[str],
        part_of_names: str,
        *,
        mixed: bool = True,
    ) -> None:
        self.peft_type = peft_type
        self.title = config_class.removesuffix("Config")
        self.config_class = config_class
        self.decisive = _WHICH_LAYERS | decisive
        self.supported = frozenset(initialisation)
        self.accepted = f"{self.title} of linear layers alone, without dropout"
        self.part_of_names = part_of_names
        self._mixed = mixed

    def why_not_mixed(self, config: Any) -> str | None:
        """See the contract."""
        return None if self._mixed else self.title

    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """See the contract."""
        names = wrap_layers(skeleton, config)
        largest = max(layer.base_layer.weight.numel() for _, layer in wrapped_layers(skeleton))
        return Inserted(
            {name: file_name(name) for name in names}, forward_bytes=_MATRICES * largest * torch.float32.itemsize
        )

    def first_values(self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase) -> FirstValues:
        """Values that peft draws, one linear layer after the other."""
        shapes = {path: layer.base_layer.weight.shape for path, layer in wrapped_layers(skeleton)}

        def drawn() -> Mapping[str, torch.Tensor]:
            values: dict[str, torch.Tensor] = {}
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # without seeding devices
                for path, shape in shapes.items():
                    values |= _values_of_layer(path, shape, config)
            return values

        return drawn


def _values_of_layer(path: str, shape: torch.Size, config: Any) -> dict[str, torch.Tensor]:
    """Initial values of one layer's adapter, by name in the whole model."""
    import peft

    config = deepcopy(config)
    config.modules_to_save = None
    holder = nn.Module()
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = shape
    layer.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
    *parents, leaf = path.split(".")
    parent = holder
    for name in parents:
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(leaf, layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about options that match other layers only
        peft.inject_adapter_in_model(config, holder, adapter_name=ADAPTER_NAME)
    return {
        name: parameter.detach().contiguous()
        for name, parameter in holder.named_parameters()
        if parameter is not layer.weight
    }


_FACTORED = {"r", "alpha", "rank_pattern", "alpha_pattern"}
INJECTED = (
    InjectedKind("IA3", "IA3Config", {"feedforward_modules", "fan_in_fan_out"}, {"init_ia3_weights"}, "ia3_l"),
    InjectedKind("LOHA", "LoHaConfig", _FACTORED, {"init_weights"}, "hada_w1_a", mixed=False),
    InjectedKind(
        "LOKR",
        "LoKrConfig",
        _FACTORED | {"decompose_both", "decompose_factor", "use_effective_conv2d"},
        {"init_weights"},
        "lokr_w1",
    ),
    InjectedKind("HRA", "HRAConfig", {"r", "apply_GS"}, {"init_weights"}, "hra_u"),
    InjectedKind("MISS", "MissConfig", {"r", "mini_r"}, {"init_weights"}, "miss_block"),
)
