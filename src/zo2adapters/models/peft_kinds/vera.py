"""VeRA: two random matrices that all layers share, and that stay, and two trained vectors for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import skip_init
from transformers import PreTrainedModel

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds.block_model import PeftBlockModel
from zo2adapters.models.peft_kinds.kind import ADAPTER_NAME, AdapterKind, FirstValues, Inserted, OpenBase
from zo2adapters.models.peft_kinds.wrapped_layers import file_name, is_rank, put_value, wrap_layers, wrapped_layers

_PROJECTIONS = ("vera_A", "vera_B")
_FILE_PREFIX = "base_model."  # of their names in peft's files


class VeRAKind(AdapterKind):
    """``peft.VeraConfig``."""

    peft_type = "VERA"
    title = "VeRA"
    config_class = "VeraConfig"
    decisive = frozenset(
        {"r", "target_modules", "projection_prng_key", "layers_to_transform", "layers_pattern", "fan_in_fan_out"}
    )
    heeded = frozenset({"d_initial", "init_weights", "save_projection"})
    accepted = "VeRA of linear layers alone, without dropout"
    part_of_names = "vera_lambda_d"
    model_class: ClassVar[Callable[..., HFBlockModel]] = PeftBlockModel

    def unheeded(self, config: Any) -> list[str]:
        """See the contract."""
        return [] if is_rank(config.r) else ["r"]

    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """See the contract. The projections follow from the config; a file that has them has the last word."""
        import peft

        names = wrap_layers(skeleton, partial(peft.VeraModel, skeleton, config, ADAPTER_NAME))
        layers = [layer for _, layer in wrapped_layers(skeleton)]
        projections = _projections(config, layers)
        for layer in layers:
            for name, projection in projections.items():
                getattr(layer, name)[ADAPTER_NAME] = projection
        return Inserted(
            {name: file_name(name) for name in names},
            constants={_FILE_PREFIX + name: projection for name, projection in projections.items()},
            keeps_constants=config.save_projection,
        )

    def first_values(self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase) -> FirstValues:
        """The vectors by peft's own initialisation."""
        names: list[str] = []
        generator = torch.Generator().manual_seed(seed)
        for path, layer in wrapped_layers(skeleton):
            start = {"b": torch.ones(layer.out_features), "d": torch.randn(config.r, generator=generator)}
            for vector, value in start.items():
                names.append(f"{path}.vera_lambda_{vector}.{ADAPTER_NAME}")
                put_value(skeleton, names[-1], value)
            if config.init_weights:
                layer.reset_vera_parameters(ADAPTER_NAME, d_initial=config.d_initial)
        values = {name: skeleton.get_parameter(name).detach() for name in names}
        return lambda: values


def _projections(config: Any, layers: list[Any]) -> Mapping[str, torch.Tensor]:
    """Peft's projections, by its own code, which draws them for the largest layer and rounds them as layers' weights are.

    Returns:
        By attribute of a layer: float32.
    """
    import peft

    rows, columns = (max(getattr(layer, size) for layer in layers) for size in ("out_features", "in_features"))
    dtypes = dict.fromkeys(layer.base_layer.weight.dtype for layer in layers)
    untouched: Any = skip_init  # it is untyped
    probe = nn.ModuleDict()  # layers of the same size and dtypes, with memory that nobody writes
    for number, dtype in enumerate(dtypes):
        probe[f"layer{number}"] = untouched(nn.Linear, columns, rows, bias=False, dtype=dtype)
    own = peft.VeraConfig(r=config.r, target_modules=list(probe), projection_prng_key=config.projection_prng_key)
    with torch.random.fork_rng(devices=[]):
        layer = peft.VeraModel(probe, own, ADAPTER_NAME).model.layer0
    return {name: getattr(layer, name)[ADAPTER_NAME].detach().float() for name in _PROJECTIONS}
