"""The settings beside the weights that determine a model's forward, for the journal."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save
from transformers import PretrainedConfig

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
