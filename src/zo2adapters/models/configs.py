"""Limits on the sizes in a config, checked before transformers reads it.

A size is checked under its standard name and under the config class's alias (``n_layer`` of GPT-2), also in nested configs
(``text_config``). Other sizes are bounded while the model is built: see ``Bounds`` in ``skeleton``.

The settings beside the weights that determine a model's forward, for the journal.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import CONFIG_MAPPING, PretrainedConfig

from zo2core.errors import CheckpointError, UnsupportedModelError

_LIMITS = {"num_hidden_layers": 1 << 10, "hidden_size": 1 << 20, "head_dim": 1 << 20, "num_labels": 1 << 20}


def refuse_oversized(path: Path) -> None:
    """Refuse sizes that would cost transformers excessive time or memory."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(
            path,
            found=(str(error).splitlines() or [type(error).__name__])[0][:200],
            expected="a readable JSON file",
            remedy="get config.json again",
        ) from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(
            path, found=f"a {type(config).__name__}", expected="a JSON object", remedy="get config.json again"
        )
    pending: list[tuple[str, dict[str, Any], Any]] = [("", config, _config_class(config, None))]
    while pending:  # no recursion: an untrusted file may be nested deeply
        prefix, values, config_class = pending.pop()
        limits = _limits(config_class)
        sub_configs = getattr(config_class, "sub_configs", None) or {}
        for name, value in values.items():
            if isinstance(value, dict):
                pending.append((f"{prefix}{name}.", value, _config_class(value, sub_configs.get(name))))
            elif name in limits and isinstance(value, (int, float)) and value > limits[name]:
                raise CheckpointError(
                    f"{path}: {prefix}{name}",
                    found=str(value)[:40],
                    expected=f"at most {limits[name]}",
                    remedy="get config.json again",
                )


def _config_class(values: dict[str, Any], declared: Any) -> Any:
    """The class of a nested config: by its model type, else as the enclosing config declares it."""
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    return declared


def _limits(config_class: Any) -> dict[str, int]:
    """The limits by all names that a config class has for them."""
    limits = dict(_LIMITS)
    for alias, name in (getattr(config_class, "attribute_map", None) or {}).items():
        for known, other in ((alias, name), (name, alias)):
            if known in _LIMITS:
                limits[other] = _LIMITS[known]
    return limits


_NEUTRAL = {  # keys that do not affect a causal language model's forward
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"),
    *("id2label", "label2id", "num_labels", "problem_type", "use_cache", "initializer_range", "init_std"),
    *("return_dict", "output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id"),
}


def decisive_config(
    config: PretrainedConfig, dtypes: Mapping[str, torch.dtype | None], constants: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """The config's values that determine the forward, with transformers' defaults, and the attention implementation."""
    values = json.loads(config.to_json_string(use_diff=False))
    decisive = {key: _finite(value) for key, value in values.items() if key not in _NEUTRAL and value is not None}
    named = {key: str(dtype).removeprefix("torch.") for key, dtype in dtypes.items() if dtype is not None}
    buffers = {"buffers": hashlib.sha256(save(dict(constants))).hexdigest()} if constants else {}
    return {**decisive, "attention": config._attn_implementation, **named, **buffers}


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON lacks, by strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
