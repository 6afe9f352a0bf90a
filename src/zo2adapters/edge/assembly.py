"""Build a whole Hugging Face model with dual forwards in place of peft's modules, from an open checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.edge.dual_forward import STREAMS, AdapterState, DualForwardLinear, TrainingStep
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds import LoRAKind, PeftBlockModel
from zo2adapters.models.peft_layers import read_weight
from zo2adapters.models.skeleton import Stub
from zo2core import ParameterSpec
from zo2core.errors import OptionError, UnsupportedModelError


class Assembled(NamedTuple):
    """A training step, and the names of its parameters."""

    step: TrainingStep
    trained: Mapping[str, tuple[int, int]]  # (outputs, rank) of each layer's B by name in the model, in the state's order
    frozen: Mapping[str, torch.Tensor]  # each layer's A by name in the model, in the same order; float32 (rank, inputs)


def assemble(model: HFBlockModel, *, rows: int, tokens: int, zo_eps: float, seed: int) -> Assembled:
    """Build the step of a model with an adapter, with all weights in memory."""
    if not isinstance(model, PeftBlockModel):
        raise UnsupportedModelError(
            f"model type {model.config.model_type}",
            found="a model without an adapter",
            expected="LoRA, of which lora_B is trained",
            remedy="open_checkpoint(path, adapter=Adapter(config=..., frozen=('lora_A',)))",
        )
    specs = {spec.name: spec for layout in model.layouts for spec in layout.parameters}
    _require_lora_fa(model, specs)
    values = {name: read_weight(model.weights, spec) for name, spec in specs.items()}
    whole = _whole(model, values)
    wrapped: list[tuple[str, Any]] = [
        (path, module) for path, module in whole.named_modules() if hasattr(module, "base_layer")
    ]
    trained, frozen = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for path, module in wrapped:
        [name] = module.lora_A
        a, b = f"{path}.lora_A.{name}.weight", f"{path}.lora_B.{name}.weight"
        frozen[a], trained[b] = values[a], values[b]
        batch = (STREAMS * rows, tokens)
        dual = DualForwardLinear(module.base_layer, values[a], module.scaling[name], path=path, batch=batch)
        whole.set_submodule(path, dual, strict=True)
    step = TrainingStep(
        whole,
        [path for path, _ in wrapped],
        [specs[name].index for name in trained],
        AdapterState(list(trained.values()), seed),
        zo_eps=zo_eps,
    )
    step.requires_grad_(requires_grad=False)
    step.train(mode=False)
    return Assembled(step, {name: (len(value), value.shape[1]) for name, value in trained.items()}, frozen)


def _require_lora_fa(model: PeftBlockModel, specs: Mapping[str, ParameterSpec]) -> None:
    title = model.adapter.kind.why_not_stacked(model.adapter.config)
    if title is not None or not isinstance(model.adapter.kind, LoRAKind) or model.adapter.config.modules_to_save:
        expected, remedy = "LoRA, of which lora_B is trained", "Adapter(config=LoraConfig(...), frozen=('lora_A',))"
        raise UnsupportedModelError("adapter", found=str(title), expected=expected, remedy=remedy)
    encoded = next((spec for spec in specs.values() if spec.encoding is not None), None)
    if encoded is not None:
        raise UnsupportedModelError(
            encoded.name,
            found=f"a quantised weight ({type(encoded.encoding).__name__})",
            expected="floating-point weights",
            remedy="open the unquantised checkpoint",
        )
    other = next((spec for spec in specs.values() if spec.frozen == (".lora_B." in spec.name)), None)
    if other is not None:
        raise OptionError(
            "adapter.frozen",
            found=f"{other.name}, which is {'frozen' if other.frozen else 'trained'}",
            expected="lora_B trained, in all layers, and nothing else",
            remedy="Adapter(config=..., frozen=('lora_A',))",
        )


def _whole(model: HFBlockModel, values: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """A copy of a model's skeleton with its layers in place of the stubs, and with its weights."""
    whole = deepcopy(model.skeleton)
    for module in list(whole.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Stub):
                setattr(module, name, child.layer)
    read = {parameter: nn.Parameter(values[name], requires_grad=False) for name, parameter in whole.named_parameters()}
    for name, parameter in list(whole.named_parameters(remove_duplicate=False)):  # a tied weight stays one
        path, _, leaf = name.rpartition(".")
        whole.get_submodule(path)._parameters[leaf] = read[parameter]
    return whole
