"""VeRA's two projections, which all of its layers share and nothing trains.

peft draws them from a key of the config and keeps them at its model around the base, whose layers
refer to them. So they are buffers here: they are in memory once, and exports have them beside the
trained vectors if the config says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from zo2adapters.models.adapter_files import ADAPTER_NAME
from zo2adapters.models.library_names import names_of
from zo2core.errors import OptionError
from zo2core.io.direct_file import byte_view

# names in the layers, and in peft's files
_FILE_NAMES: Mapping[str, str] = {"vera_A": "base_model.vera_A", "vera_B": "base_model.vera_B"}


def put_vera(config: Any, skeleton: PreTrainedModel) -> None:
    """Let peft put VeRA into a skeleton: by its model, since its projections belong to that."""
    with names_of("peft"):
        from peft.tuners.vera import VeraModel

    VeraModel(skeleton, config, ADAPTER_NAME)


def projections(model: nn.Module) -> dict[str, torch.Tensor]:
    """The projections of a model's layers, by their names in peft's files."""
    for module in model.modules():
        if getattr(module, "vera_A", None) is not None:
            layer: Any = module
            return {
                file_name: getattr(layer, name)[ADAPTER_NAME]
                for name, file_name in _FILE_NAMES.items()
            }
    return {}


def set_projections(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Replace the projections of all layers, which share them."""
    for module in model.modules():
        if getattr(module, "vera_A", None) is not None:
            layer: Any = module
            for name, file_name in _FILE_NAMES.items():
                getattr(layer, name)[ADAPTER_NAME] = values[file_name]
            return


def round_projections(model: nn.Module, dtypes: Collection[torch.dtype]) -> None:
    """Round the projections as peft does when it puts them beside weights of these dtypes."""
    rounded = projections(model)
    for dtype in dtypes:
        rounded = {name: value.to(dtype).float() for name, value in rounded.items()}
    set_projections(model, rounded)


def take_projections(
    model: nn.Module, config: Any, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Replace the projections by those of a file, if it has them; returns the file's other tensors.

    Raises:
        ValueError: if the file lacks them, although the config says that it has them, or has others
            than the layers need.
    """
    left = dict(state)
    drawn = projections(model)
    saved = {name: left.pop(name) for name in drawn if name in left}
    if not config.save_projection:
        return left
    for name, value in drawn.items():
        shape = None if name not in saved else tuple(saved[name].shape)
        if shape != tuple(value.shape):
            raise ValueError(f"{name} of shape {shape}, not {tuple(value.shape)}")
    set_projections(model, {name: value.float() for name, value in saved.items()})
    return left


def projections_digest(model: nn.Module) -> str:
    """SHA-256 of the projections."""
    digest = hashlib.sha256()
    for value in projections(model).values():
        digest.update(byte_view(value.contiguous().view(-1)))
    return digest.hexdigest()


def require_key(config: Any) -> None:
    """Refuse a key from which torch's generator draws nothing."""
    key = config.projection_prng_key
    if type(key) is not int:
        raise OptionError(
            "adapter.projection_prng_key", repr(key)[:40], "a whole number", "write one, such as 0"
        )
