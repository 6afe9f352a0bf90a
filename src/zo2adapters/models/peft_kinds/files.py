"""An adapter's files in peft's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save

from zo2core.checkpoint.writer import new_directory, write_companions

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."  # prefix of the names of layers' parameters


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
