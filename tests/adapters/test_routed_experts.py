"""Experts that are read when tokens are routed to them: the bits of reading all, and what such a model refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import refusal
from families import small_config, small_model
from formats import written
from models import save_tokenizer
from profiles import each_choice
from safetensors.torch import load_file, save_file

from zo2adapters import open_checkpoint
from zo2adapters.commands.at_step import AtStep
from zo2adapters.models.routed_experts import expected_share
from zo2adapters.tasks.generation import generate
from zo2adapters.trainers.probes import evenly_routed, measured_forward_seconds
from zo2adapters.trainers.run_inputs import BatchShape
from zo2core import Engine, MeZOSGD, ZerothOrder
from zo2core.errors import CheckpointError, OptionError

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "granitemoe", "qwen3_next"]
FORMATS = ["bfloat16", "nf4", "fp8", "awq"]


def save(family: str, form: str, folder: Path) -> Path:
    path = written(family, form, folder)
    assert path is not None, "the family has this format"
    return path


def outcome(path: Path, capacity: int | None) -> tuple[list[Any], float]:
    model = open_checkpoint(path)
    experts = None if capacity is None else model.route(tokens=1)
    if experts is not None:
        experts.capacity = capacity or 0
        for buffer in experts.buffers.values():
            buffer.fill_(float("nan"))  # of experts that nobody has read
    ids = torch.tensor([[5, 6, 7, 9, 11]])
    with Engine(model) as engine:
        tokens = list(generate(engine, model, [[5, 6, 7], [3, 4]], max_new_tokens=4))
        loss = engine.evaluate([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}]).loss
    assert experts is None or experts.kept_bytes <= experts.capacity
    return tokens, loss


@pytest.mark.parametrize(
    ("family", "form"), [*each_choice(FAMILIES, FORMATS), ("gpt_oss", "mxfp4"), ("gpt_oss", "bfloat16"), ("gpt_oss", "nf4")]
)
def test_bits_are_those_of_reading_all_experts(family: str, form: str, tmp_path: Path) -> None:
    path = save(family, form, tmp_path)
    expected = outcome(path, None)
    assert [outcome(path, capacity) for capacity in (0, 20_000, 1 << 30)] == [expected] * 3


def test_what_was_used_last_stays_and_is_not_read_again(tmp_path: Path) -> None:
    model = open_checkpoint(save("qwen3_moe", "bfloat16", tmp_path))
    experts = model.route(tokens=1)
    assert experts is not None
    experts.capacity = 1 << 30
    whole = sum(spec.nbytes for spec in small_specs(tmp_path / "plain") if len(spec.shape) == 3)
    with Engine(model) as engine:
        list(generate(engine, model, [[5]], max_new_tokens=2))
        after_two = experts.read_bytes
        assert 0 < after_two < whole
        list(generate(engine, model, [[5]], max_new_tokens=2))
    assert experts.read_bytes == after_two


def small_specs(path: Path) -> list[Any]:
    return [spec for layout in open_checkpoint(path).layouts for spec in layout.parameters]


def test_steps_journals_and_exports_are_refused(tmp_path: Path) -> None:
    path = save("qwen3_moe", "bfloat16", tmp_path)

    def routed() -> Any:
        model = open_checkpoint(path)
        assert model.route(tokens=1) is not None
        return model

    with pytest.raises(OptionError, match="all parameters in its segments"):
        Engine(routed(), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3)))
    with pytest.raises(OptionError, match="all parameters in its segments"):
        Engine(routed(), journal=tmp_path / "journal.jsonl")
    with Engine(routed()) as engine, pytest.raises(OptionError, match="all parameters in its segments"):
        engine.export(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_models_without_routed_experts_are_left_as_they_are(tmp_path: Path) -> None:
    for family in ("llama", "llama4_text"):  # a dense one, and one whose experts see all tokens
        model: Any = small_model(small_config(family))
        model.save_pretrained(tmp_path / family)
        opened = open_checkpoint(tmp_path / family)
        layouts = opened.layouts
        assert opened.route(tokens=1) is None
        assert opened.layouts == layouts


def test_commands_that_generate_keep_experts_in_the_memory_that_is_left(tmp_path: Path) -> None:
    at = AtStep(model=str(save("qwen3_moe", "bfloat16", tmp_path))).resolved()
    for tokens, is_routed in ((1, True), (64, False), (None, False)):
        model = at.open_model()
        with at.engine(model, tokens=tokens) as engine:
            assert (model.experts is not None) == is_routed
            if model.experts is not None:
                assert engine.host_plan is not None
                assert model.experts.capacity == engine.host_plan.spare > 0


def test_an_expert_that_is_not_finite_is_named(tmp_path: Path) -> None:
    path = save("qwen3_moe", "bfloat16", tmp_path)
    save_tokenizer(path)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if ".experts." in name)
    broken = {key: torch.full_like(value, torch.nan) if ".experts." in key else value for key, value in tensors.items()}
    save_file(broken, path / "model.safetensors", {"format": "pt"})
    assert name.rsplit(".experts.")[0] in refusal("generate", "--model", str(path), "--prompt", "the cat")


def test_many_tokens_read_all_experts_ahead(tmp_path: Path) -> None:
    path = save("qwen3_moe", "bfloat16", tmp_path)  # 2 of 4 experts a token
    assert open_checkpoint(path).route(tokens=1) is not None
    assert open_checkpoint(path).route(tokens=2) is None
    assert expected_share(128, 8, 1) == 8 / 128
    assert 0.98 < expected_share(128, 8, 64) < 0.99


def test_an_expert_that_ends_early_is_named(tmp_path: Path) -> None:
    path = save("qwen3_moe", "bfloat16", tmp_path)
    model = open_checkpoint(path)
    assert model.route(tokens=1) is not None
    with Engine(model) as engine:
        shard = path / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-20_000])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            list(generate(engine, model, [[5, 6, 7]], max_new_tokens=2))


def test_probes_route_tokens_to_all_experts(tmp_path: Path) -> None:
    model = open_checkpoint(save("qwen3_moe", "bfloat16", tmp_path))
    chosen: list[int] = []
    with evenly_routed(model):
        (experts,) = {
            module
            for spec in model.layouts[1].parameters
            for _, module, _ in model.places_of(spec.name)[:1]
            if len(spec.shape) == 3
        }
        experts.register_forward_pre_hook(lambda module, arguments: chosen.extend(arguments[1].unique().tolist()))
        assert measured_forward_seconds(model, BatchShape(2, 4, 8)) > 0
    assert set(chosen) == {0, 1, 2, 3}
