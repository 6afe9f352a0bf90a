"""Which of the decoder families in the installed transformers work as they are: a tiny model of each, against the whole one.

    python tools/families.py --output families.json

For every model type of ``AutoModelForCausalLM`` a config with small sizes is made from its defaults; what cannot be built so
is listed with the reason. A checkpoint with random weights is saved, opened without a declaration, and steps are compared
with monolithic MeZO over the model that ``from_pretrained`` loads, without a cache of keys and values, in float32 and in
bfloat16: every loss has to be equal. So has the loss with logits in chunks, but for the order of its sum. Prints a table and
JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zo2adapters import MonolithicMeZO, open_checkpoint
from zo2adapters.trainers.verification import random_batch
from zo2core import MeZOSGD, Replayer, UnsupportedModelError, ZO2Error, ZOEngine

MOST_PARAMETERS = 3_000_000  # of a model that counts as tiny
VOCABULARY, STEPS, NUMBERS = 40, 2, {"lr": 1e-2, "zo_eps": 1e-2}
DTYPES = (torch.float32, torch.bfloat16)
SUMMED = {torch.float32: 1e-5, torch.bfloat16: 0.03}  # by how much a sum in another order may differ

# What sizes are called in configs.
SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "embed_dim", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "attention_hidden_size", "lru_width"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("head_dim", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "state_size", "mamba_d_head", "mamba_d_state", "sliding_window"), 8),
    "vocab_size": VOCABULARY,
    "mamba_n_heads": 4,
    "attention_window_size": 8,
    "global_attn_every_n_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_config(model_type: str) -> PretrainedConfig:
    """The defaults of a family, with small sizes."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    sizes = {
        name: size
        for name, size in SMALL.items()
        if hasattr(default, name) and not isinstance(getattr(default, name), (list, dict))
    }
    layer_types = getattr(default, "layer_types", None)
    if layer_types is not None:  # one of each
        sizes["layer_types"] = (list(dict.fromkeys(layer_types)) * 2)[:2]
    config: PretrainedConfig = kind(**sizes)
    return config


def small_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model with random weights, that takes the test's batch.

    Raises:
        ValueError: if it is not tiny.
    """
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in _built(config).parameters())
    if numel > MOST_PARAMETERS:
        raise ValueError(f"{numel:,} parameters with these sizes")
    with torch.random.fork_rng(devices=[]):
        model = _built(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        value = torch.empty(parameter.shape).normal_(0.0, 0.3, generator=generator)
        parameter.data.copy_(value + (1.0 if parameter.dim() == 1 else 0.0))
    model(**random_batch(VOCABULARY, 2, 6, seed=0))
    return model


def _built(config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def compare(model: PreTrainedModel, dtype: torch.dtype, directory: Path) -> dict[str, Any]:
    """Open a model's checkpoint without a declaration, and take steps beside the whole model.

    Returns:
        ``outcome``: equal, different, refused or failed; the error of the last two, and the seconds that opening took.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(directory)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    whole.config.use_cache = False
    monolithic = MonolithicMeZO(whole, lr=NUMBERS["lr"], zo_eps=NUMBERS["zo_eps"])
    batch = random_batch(VOCABULARY, 2, 6, seed=0)
    began = time.perf_counter()
    try:
        opened = open_checkpoint(directory)
        seconds = time.perf_counter() - began
        with ZOEngine(opened, MeZOSGD(lr=NUMBERS["lr"], zo_eps=NUMBERS["zo_eps"])) as engine:
            losses = [engine.step(batch, seed=step).losses for step in range(STEPS)]
    except UnsupportedModelError as error:
        return {"outcome": "refused", "error": str(error)}
    except ZO2Error as error:
        return {"outcome": "refused", "error": str(error).replace(f"{directory}/", "").replace(str(directory), "base")}
    except Exception as error:  # any: a table of what fails is what this program is for
        return {"outcome": "failed", "error": f"{type(error).__name__}: {error}"}
    whole_loss = float(monolithic.loss(batch))
    with Replayer(open_checkpoint(directory, loss_chunk=3)) as replayer:
        chunked = replayer.evaluate([batch]).loss
    equal = losses == [monolithic.step(batch, step).losses for step in range(STEPS)]
    equal = equal and math.isclose(chunked, whole_loss, rel_tol=SUMMED[dtype])
    return {"outcome": "equal" if equal else "different", "opening_seconds": seconds}


def try_family(model_type: str) -> dict[str, Any]:
    """What becomes of a family."""
    try:
        model = small_model(small_config(model_type))
    except Exception as error:  # any: what a family's own code makes of small sizes
        return {"not_built": f"{type(error).__name__}: {error}"[:200]}
    with tempfile.TemporaryDirectory() as folder:
        return {str(dtype).removeprefix("torch."): compare(model, dtype, Path(folder) / str(dtype)) for dtype in DTYPES}


def table(families: Mapping[str, dict[str, Any]]) -> str:
    """For people."""
    lines = []
    for name, family in families.items():
        if "not_built" not in family:
            outcomes = [family[str(dtype).removeprefix("torch.")] for dtype in DTYPES]
            error = next((outcome["error"] for outcome in outcomes if "error" in outcome), "")
            lines.append(f"{name:24s}" + "".join(f"{outcome['outcome']:11s}" for outcome in outcomes) + error[:110])
    return "\n".join(lines)


def counts(families: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """How many families came to what, in both dtypes or in one of them."""
    built = [family for family in families.values() if "not_built" not in family]
    outcomes = [{outcome["outcome"] for outcome in family.values()} for family in built]
    counted = {"families": len(families), "built": len(built), "equal": sum(found == {"equal"} for found in outcomes)}
    return counted | {name: sum(name in found for found in outcomes) for name in ("different", "refused", "failed")}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--output", type=Path, help="write JSON here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    families = {model_type: try_family(model_type) for model_type in options.families}
    measured = {"transformers": transformers.__version__, "counts": counts(families), "families": families}
    print(table(families))
    print(measured["counts"])
    if options.output is None:
        print(json.dumps(measured, indent=1))
    else:
        options.output.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
