"""LoRA on mixtures of experts: by default outside the experts, in them where asked, with peft's bits on the whole model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done, refusal, write_rows
from families import batch, small_config, small_model
from models import save_tokenizer
from peft_models import monolithic, values_of
from profiles import each_choice, short_first
from transformers import AutoModelForCausalLM

from zo2adapters import Adapter, MonolithicMeZO, open_checkpoint
from zo2adapters.models.export import export_merged
from zo2adapters.models.peft_kinds import PeftBlockModel
from zo2core import Engine, FirstOrder, HostPlan, LowRankPerturbation, MemoryPolicy, MeZOSGD, ZerothOrder
from zo2core.errors import OptionError, UnsupportedModelError

peft: Any = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:The following:RuntimeWarning"),  # peft names experts in patterns of modules
]

FAMILIES = [
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("minimax", "minimax_m2", "phimoe", "gpt_oss", "llama4_text"),
]
ROUTERS_OF_LINEAR = {"phimoe", "llama4_text"}  # peft would wrap routers whose output is no tensor
DTYPES = [torch.float32, torch.bfloat16]
BUCKETS = [None, 2]


def save(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    model: Any = small_model(small_config(family))
    model.to(dtype).save_pretrained(directory)
    return directory


def stacks(base: Path) -> list[str]:
    """Names of a model's stacked experts."""
    names = (name for name, _ in AutoModelForCausalLM.from_pretrained(base).named_parameters())
    return [name for name in names if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]


def config_of(targets: str, base: Path) -> Any:
    """Peft's config for a choice of layers."""
    own: dict[str, Any] = {"target_modules": targets if targets == "all-linear" else targets.split()}
    if targets == "experts":  # as one writes it for peft
        own = {"target_modules": ["q_proj", "q_b_proj", "qkv_proj"], "target_parameters": stacks(base)}
    return peft.LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, **own)


def opened(base: Path, targets: str, seed: int = 1) -> PeftBlockModel:
    model = open_checkpoint(base, adapter=Adapter(config=config_of(targets, base), seed=seed))
    assert isinstance(model, PeftBlockModel)
    return model


def memory(buckets: int | None) -> MemoryPolicy:
    return MemoryPolicy(host=HostPlan((), 1 << 40, buckets, keep_noise=False))


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("family", "targets", "dtype", "buckets"),
    [
        *each_choice(FAMILIES, ["auto", "experts", "auto experts", "all-linear"], DTYPES, BUCKETS),
        ("falcon", "auto", torch.float32, 2),  # its linear layers have a class of their own
    ],
)
def test_gradients_are_those_of_peft_on_the_whole_model(
    family: str, targets: str, dtype: torch.dtype, buckets: int | None, tmp_path: Path
) -> None:
    if targets == "all-linear" and family in ROUTERS_OF_LINEAR:
        pytest.skip("peft wraps a router, which then fails")
    base = save(family, tmp_path / "base", dtype)
    model = opened(base, targets)
    optimizer, expected = partial(torch.optim.SGD, lr=1e-2), []
    with Engine(model, FirstOrder(optimizer), memory=memory(buckets)) as engine:
        first = {name: value.detach().clone() for name, value in engine.parameters.items()}
        losses = [engine.step(batch()).loss for _ in range(2)]
        learned = {name: value.clone() for name, value in engine.parameters_now() if name in first}
    whole: Any = monolithic(base, model.adapter.config, first)
    trained = {name: value for name, value in whole.named_parameters() if name in first}
    resident = optimizer(list(trained.values()))
    for _ in range(2):
        resident.zero_grad()
        loss = whole(**batch(), use_cache=False).loss
        loss.backward()
        resident.step()
        expected.append(loss.item())
    assert losses == expected
    assert [name for name, value in learned.items() if not torch.equal(value, trained[name].detach())] == []
    is_in_experts = any(".experts." in name for name in learned)
    assert is_in_experts == (targets != "auto" and not (targets == "all-linear" and family in ("gpt_oss", "qwen2_moe")))


@pytest.mark.parametrize(("family", "dtype", "buckets"), each_choice(FAMILIES, DTYPES, BUCKETS))
@pytest.mark.few(2)
def test_zeroth_order_steps_on_experts_are_monolithic_mezo(
    family: str, dtype: torch.dtype, buckets: int | None, tmp_path: Path
) -> None:
    base = save(family, tmp_path / "base", dtype)
    model = opened(base, "experts")
    whole = monolithic(base, model.adapter.config, values_of(model))
    resident = MonolithicMeZO(whole, lr=1e-2, zo_eps=1e-2)
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2)), memory=memory(buckets)) as engine:
        for _ in range(2):
            [seed] = {evaluation.seed for evaluation in engine.ask()}
            assert list(engine.step(batch()).losses) == list(resident.step(batch(), seed).losses)


@pytest.mark.parametrize(("family", "targets"), each_choice(FAMILIES, ["auto", "auto experts"]))
@pytest.mark.few(2)
def test_what_is_exported_loads_in_peft_and_merges_as_peft_does(family: str, targets: str, tmp_path: Path) -> None:
    base = save(family, tmp_path / "base")
    model = opened(base, targets)
    with Engine(model, FirstOrder(partial(torch.optim.SGD, lr=1e-1))) as engine:
        engine.step(batch())
        loss = engine.evaluate([batch()]).loss
        engine.export(tmp_path / "adapter")
        export_merged(engine, model, tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    assert loaded(**batch(), use_cache=False).loss.item() == pytest.approx(loss, rel=1e-6)
    with Engine(open_checkpoint(base, adapter=Adapter(config=tmp_path / "adapter"))) as replayer:
        assert replayer.evaluate([batch()]).loss == loss
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    expected = loaded.merge_and_unload().state_dict()
    assert [name for name, value in expected.items() if not torch.equal(value, merged[name])] == []


@pytest.mark.parametrize("family", short_first(["qwen3_moe"], ["gpt_oss", "deepseek_v3"]))
def test_a_new_adapter_of_experts_begins_as_the_base(family: str, tmp_path: Path) -> None:
    base = save(family, tmp_path / "base")
    config = config_of("experts", base)
    config.init_lora_weights = True
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=7))
    values = values_of(model)
    assert all(bool(value.any()) == ("lora_A" in name) for name, value in values.items())
    assert len(values) > 2 * len(stacks(base))
    with Engine(model) as adapted, Engine(open_checkpoint(base)) as plain:
        assert adapted.evaluate([batch()]).loss == plain.evaluate([batch()]).loss


def test_directions_beside_the_activations_of_experts_are_refused(tmp_path: Path) -> None:
    base = save("qwen3_moe", tmp_path / "base")
    model = opened(base, "experts")
    method = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2), perturbation=LowRankPerturbation(rank=2, period=2))
    with pytest.raises(UnsupportedModelError, match="LoRA of experts with low-rank perturbations"):
        Engine(model, method)


@pytest.mark.parametrize("targets", ["experts", "all-linear"])
def test_mixed_precision_of_experts_is_refused(targets: str, tmp_path: Path) -> None:
    base = save("qwen3_moe", tmp_path / "base", torch.bfloat16)
    with pytest.raises(OptionError, match="mixed with LoRA of experts"):
        open_checkpoint(base, adapter=Adapter(config=config_of(targets, base)), precision="mixed")


def test_the_command_line_says_which_layers_it_adapts(tmp_path: Path) -> None:
    base = save("deepseek_v3", tmp_path / "base")
    save_tokenizer(base)
    write_rows(tmp_path / "rows.jsonl", [{"text": "the cat sat on the mat"}, {"text": "the dog"}])
    common = ("--model", base, "--data", tmp_path / "rows.jsonl", "--steps", 1, "--lr", 1e-3, "--method", "adamw")
    attention = "q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj"
    for targets, named in ([], attention), (["--lora-targets", "auto", "experts"], f"{attention}, experts"):
        output = tmp_path / f"run-{len(targets)}"
        ended = done("train", *common, "--lora-rank", 2, *targets, "--output", output)
        assert f"LoRA of {named}\n" in ended.err
        config = json.loads((output / "model" / "adapter_config.json").read_bytes())
        assert config["target_parameters"] == (["experts.down_proj", "experts.gate_up_proj"] if targets else [])
    refused = refusal("train", *common, "--lora-rank", 2, "--lora-targets", "auto", "q_proj", "--output", tmp_path / "none")
    assert "auto experts, or names of layers" in refused


def test_a_model_without_experts_has_none_to_adapt(tmp_path: Path) -> None:
    base = save("llama", tmp_path / "base")
    with pytest.raises(OptionError, match="llama does not have as stacks"):
        opened(base, "auto experts")
