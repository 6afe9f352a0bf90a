"""What of a config decides a model's forwards, for the journal."""

from __future__ import annotations

import json
import math
from typing import Any

from transformers import PretrainedConfig

_NEUTRAL = {  # keys that no forward of a causal language model reads, or that parameters and batches say
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"),
    *("id2label", "label2id", "num_labels", "problem_type", "use_cache", "initializer_range", "init_std"),
    *("return_dict", "output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id"),
}


def decisive_config(config: PretrainedConfig) -> dict[str, Any]:
    """The values of a config that decide the forwards, with transformers' defaults, and the attention that it chose."""
    values = json.loads(config.to_json_string(use_diff=False))
    decisive = {key: _finite(value) for key, value in values.items() if key not in _NEUTRAL and value is not None}
    return {**decisive, "attention": config._attn_implementation}


def _finite(value: Any) -> Any:
    """A JSON value in which infinity and NaN, which JSON lacks, are words."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
