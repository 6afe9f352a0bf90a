"""Small models with peft adapters: whole, and streamed."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from engines import zeroth_order
from models import make_batch
from transformers import AutoModelForCausalLM, PreTrainedModel

from zo2core import Distribution, MeZOSGD, PhiloxNoise

peft: Any = pytest.importorskip("peft")

TARGETS = {
    "opt": ["q_proj", "fc1"],
    "llama": ["q_proj", "down_proj"],
    "qwen2": ["v_proj", "gate_proj"],
    "qwen3": ["k_proj"],
}


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 3, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], **changes}
    )


def on_targets(kind: str, model_type: str, **changes: Any) -> Any:
    return getattr(peft, kind)(**{"target_modules": TARGETS[model_type], **changes})


in_lora = partial(on_targets, "LoraConfig", r=3, lora_alpha=16)
dora = partial(in_lora, use_dora=True)
rslora = partial(in_lora, use_rslora=True, init_lora_weights=False)
loha = partial(on_targets, "LoHaConfig", r=3, alpha=16, init_weights=False)
lokr = partial(on_targets, "LoKrConfig", r=3, alpha=16, init_weights=False)
hra = partial(on_targets, "HRAConfig", r=4, init_weights=False)
miss = partial(on_targets, "MissConfig", r=2, init_weights=False)


vera = partial(on_targets, "VeraConfig", r=5, init_weights=False)


def prefix(model_type: str, **changes: Any) -> Any:
    return peft.PrefixTuningConfig(**{"num_virtual_tokens": 3, "task_type": "CAUSAL_LM", **changes})


def ia3(model_type: str, **changes: Any) -> Any:
    own = {"feedforward_modules": TARGETS[model_type][1:], "init_ia3_weights": False}
    return on_targets("IA3Config", model_type, **{**own, **changes})


def modules_to_save(model_type: str, **changes: Any) -> Any:
    modules = {"opt": ["final_layer_norm", "fc2"], "llama": ["norm", "input_layernorm", "v_proj"]}[
        model_type
    ]
    return in_lora(model_type, **{"modules_to_save": modules, **changes})


def ends(model_type: str, **changes: Any) -> Any:
    """LoRA on the embedding and the head, too."""
    targets = [*TARGETS[model_type], "embed_tokens", "lm_head"]
    return in_lora(model_type, **{"target_modules": targets, **changes})


def copies_of_ends(model_type: str, **changes: Any) -> Any:
    return in_lora(model_type, **{"modules_to_save": ["embed_tokens", "lm_head"], **changes})


def tokens(model_type: str, **changes: Any) -> Any:
    """LoRA, and rows of the embedding."""
    return in_lora(model_type, **{"trainable_token_indices": [5, 8, 7], **changes})


def tokens_alone(model_type: str, **changes: Any) -> Any:
    return peft.TrainableTokensConfig(**{"token_indices": [8, 5], **changes})


KIND_CONFIGS: dict[str, Callable[..., Any]] = {
    "lora": in_lora,
    "rslora": rslora,
    "dora": dora,
    "prefix": prefix,
    "ia3": ia3,
    "loha": loha,
    "modules_to_save": modules_to_save,
    "ends": ends,
    "copies-of-ends": copies_of_ends,
    "tokens": tokens,
    "tokens-alone": tokens_alone,
    "lokr": lokr,
    "hra": hra,
    "miss": miss,
    "vera": vera,
}


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """An adapter's first values, as the model has them."""
    values: dict[str, torch.Tensor] = {}
    for layout in model.layouts:
        for spec in layout.parameters:
            if not spec.frozen or ".default." in spec.name:
                values[spec.name] = torch.empty(spec.shape, dtype=spec.dtype)
                model.weights.read_into(spec.name, values[spec.name].view(-1))
    return values


def monolithic(
    base: Path,
    config: Any,
    values: Mapping[str, torch.Tensor],
    frozen: tuple[str, ...] = (),
    auto_class: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """The whole model with peft's modules in it."""
    whole: PreTrainedModel = auto_class.from_pretrained(base, dtype="auto")
    if config.peft_type == "VERA":  # whose projections peft keeps at its model around the base
        peft.get_peft_model(cast("Any", whole), config)
    else:
        peft.inject_adapter_in_model(config, whole)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = name in values and not any(part in name for part in frozen)
        # What was mapped from a file lies where no allocator puts it, and products round otherwise
        # there.
        parameter.data = values.get(name, parameter.data).clone()
    whole.config.use_cache = False
    return whole


def steps(model: Any, count: int = 3, **options: Any) -> list[float]:
    batch = make_batch(40, [7, 5])
    noise = PhiloxNoise(Distribution.RADEMACHER)
    with zeroth_order(
        model, MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False), noise=noise, **options
    ) as engine:
        return [loss for _ in range(count) for loss in engine.step(batch).losses]
