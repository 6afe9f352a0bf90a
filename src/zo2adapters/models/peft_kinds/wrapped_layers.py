"""Adapters whose modules stand around linear layers of the base."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.models.peft_kinds.files import FILE_PREFIX
from zo2adapters.models.peft_kinds.kind import ADAPTER_NAME
from zo2core import OptionError

LARGEST_RANK = 1 << 16
WRAPPED = ".base_layer."  # within the names of a wrapped layer's own parameters


def wrap_layers(skeleton: PreTrainedModel, put: Callable[[], object]) -> list[str]:
    """Have peft put its modules around layers of a skeleton.

    Args:
        skeleton: Changed.
        put: Does it.

    Returns:
        The names of the adapter's parameters.

    Raises:
        OptionError: if peft cannot, or the layers are not linear ones before the head.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # layers are built with random weights, which go nowhere
            put()
    except Exception as error:  # any: what a config says surfaces inside peft's own code
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
        if type(wrapped) is not nn.Linear or module is output():
            raise OptionError(
                "adapter.target_modules",
                found=f"{path}, {'the head' if module is output() else type(wrapped).__name__}",
                expected="linear layers before the head",
                remedy="name such layers, as q_proj",
            )
    skeleton.train(mode=False)
    return [name for name, _ in skeleton.named_parameters() if f".{ADAPTER_NAME}." in f"{name}."]


def wrapped_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Peft's modules around layers, by the layers' paths."""
    for path, module in model.named_modules():
        if getattr(module, "base_layer", None) is not None:
            yield path, module


def base_name(model: nn.Module, weight: nn.Parameter) -> str:
    """The name that a wrapped layer's parameter has in the base."""
    [name] = [name for name, parameter in model.named_parameters() if parameter is weight]
    return name.replace(WRAPPED, ".")


def file_name(name: str) -> str:
    """The name in peft's files of a parameter in the model."""
    return FILE_PREFIX + re.sub(rf"\.{ADAPTER_NAME}(?=\.|$)", "", name)


def put_value(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Make a tensor the parameter of a name."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = nn.Parameter(value)


def is_rank(value: object) -> bool:
    """Whether a value is a rank that layers can have."""
    return type(value) is int and 1 <= value <= LARGEST_RANK
