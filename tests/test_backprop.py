"""First-order steps over the stream: losses, gradients and adapters equal the whole model's under autograd, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, batches, make_batch, save_model, small_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from zo2adapters import Adapter, open_checkpoint
from zo2core import (
    BackpropEngine,
    CheckpointError,
    HostPlan,
    Lane,
    MemoryPolicy,
    NonFiniteLossError,
    OptionError,
)

peft: Any = pytest.importorskip("peft")
PROFILE = settings.default
assert PROFILE is not None
TARGETS = {"opt": ["q_proj", "fc1"], "llama": ["q_proj", "down_proj"], "qwen2": ["v_proj", "gate_proj"], "qwen3": ["k_proj"]}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
}


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"], **changes})


def memory(buckets: int | None) -> MemoryPolicy:
    return MemoryPolicy(host=HostPlan((), 1 << 40, buckets, keep_noise=False))


def first_values(model: Any) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = {}
    for layout in model.layouts:
        for spec in layout.parameters:
            if not spec.frozen:
                values[spec.name] = torch.empty(spec.shape, dtype=spec.dtype)
                model.weights.read_into(spec.name, values[spec.name].view(-1))
    return values


class Resident:
    """transformers, peft and torch.optim on the whole model: the oracle."""

    def __init__(self, base: Path, config: Any, values: Mapping[str, torch.Tensor], make: Any) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()
        peft.inject_adapter_in_model(config, self.model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad = name in values
            if name in values:
                parameter.data = values[name].clone()
        self.trained = {name: p for name, p in self.model.named_parameters() if name in values}
        self.optimizer = make(list(self.trained.values()))

    def step(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], clip: float | None) -> float:
        self.optimizer.zero_grad()
        tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches]
        total = 0.0
        for batch, count in zip(micro_batches, tokens, strict=True):
            loss = self.model(**batch, use_cache=False).loss
            if len(micro_batches) > 1:
                total += loss.double().item() * count
                (loss * (count / sum(tokens))).backward()
            else:
                total = loss.item() * count
                loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.trained.values()), clip)
        self.optimizer.step()
        return total / sum(tokens)


def assert_equal(engine: BackpropEngine, resident: Resident) -> None:
    for name, value in engine.parameters_now():
        if name in resident.trained:
            assert torch.equal(value, resident.trained[name].detach()), name


@pytest.mark.parametrize("model_type", CONFIGS)
@settings(max_examples=PROFILE.max_examples // 3)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    clip=st.sampled_from([None, 0.05]),
    buckets=st.sampled_from([None, 1, 2]),
    overlap=st.booleans(),
    accumulated=st.integers(1, 3),
    options=st.sampled_from([{}, {"use_rslora": True}, {"init_lora_weights": False}, {"use_dora": True}]),
)
def test_a_step_is_that_of_the_resident_model(
    model_type: str,
    data: st.DataObject,
    dtype: torch.dtype,
    optimizer: str,
    clip: float | None,
    buckets: int | None,
    overlap: bool,
    accumulated: int,
    options: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp = tmp_path_factory.mktemp("backprop")
    config = data.draw(CONFIGS[model_type])
    micro_batches = [data.draw(batches(config.vocab_size)) for _ in range(accumulated)]
    base = save_model(tmp / "base", config, dtype)
    adapter = Adapter(config=lora(target_modules=TARGETS[model_type], **options), seed=1)
    model = open_checkpoint(base, adapter=adapter)
    resident = Resident(base, adapter.config, first_values(model), OPTIMIZERS[optimizer])
    with BackpropEngine(model, OPTIMIZERS[optimizer], clip=clip, memory=memory(buckets), overlap=overlap) as engine:
        for _ in range(3):
            expected = resident.step(micro_batches, clip)
            assert engine.step(micro_batches).loss == pytest.approx(expected, rel=1e-6)
            assert_equal(engine, resident)
