"""Runs of low rank, written as peft's adapters: stock peft loads them to the exported model's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import refusal
from engines import zeroth_order
from models import make_batch, random_model, save_model, small_config
from runs import small_run
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    PretrainedConfig,
    PreTrainedModel,
)

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models.export import export_adapter
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.trainer import Trainer
from zo2core import DensePerturbation, Engine, LowRankPerturbation, MultiQueryRGE
from zo2core.errors import OptionError, OutputError
from zo2core.perturbation import Perturbation

peft: Any = pytest.importorskip("peft")
CONFIGS: dict[str, PretrainedConfig] = {
    "opt": small_config("opt"),
    "llama": small_config("llama", tie_word_embeddings=False),
    "llama, tied": small_config("llama", tie_word_embeddings=True),
    "qwen2, with biases": small_config("qwen2"),
    "gpt2": GPT2Config(vocab_size=40, n_embd=12, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2),
}


def engine(base: Path, perturbation: Perturbation | None = None, **options: Any) -> Engine:
    estimator = MultiQueryRGE(q=2, lr=3e-2, zo_eps=1e-2, perturb_in_place=False)
    beside = LowRankPerturbation(rank=2, period=3) if perturbation is None else perturbation
    return zeroth_order(open_checkpoint(base, **options), estimator, perturbation=beside, seed=3)


def load(base: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return model


@torch.inference_mode()
def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> float:
    return float(model(**batch, use_cache=False).loss)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`",  # the head has columns of its own, beside those of the embedding
    "ignore:fan_in_fan_out is set to True",
    "ignore:`is_gradient_checkpointing` is deprecated",
)
def test_stock_peft_loads_it_to_the_exported_models_loss(tmp_path: Path, name: str) -> None:
    base, batch = save_model(tmp_path / "base", CONFIGS[name]), make_batch(40, [7, 4])
    with engine(base) as opened:
        for _ in range(7):  # two periods, and one that goes on: six columns
            opened.step(batch)
        export_adapter(opened, opened._runner.model, tmp_path / "adapter", base=str(base))  # type: ignore[arg-type]
        opened.export(tmp_path / "merged")
    loaded = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter")
    assert loaded.peft_config["default"].r == 6
    assert loaded.peft_config["default"].bias == ("none" if name.startswith("llama") else "all"), "peft saves it again whole"
    merged = loss_of(load(tmp_path / "merged"), batch)
    assert loss_of(loaded, batch) == pytest.approx(merged, rel=1e-5)
    assert abs(loss_of(load(base), batch) - merged) > 1e-2, "something was learned"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_model_with_another_head_is_loaded_by_stock_peft_too(tmp_path: Path) -> None:
    config = small_config("llama", pad_token_id=0, num_labels=3, tie_word_embeddings=False)
    auto, batch = AutoModelForSequenceClassification, {**make_batch(39, [7, 4]), "labels": torch.tensor([2, 0])}
    base = tmp_path / "base"
    random_model(config, torch.float32, auto_class=auto).save_pretrained(base)
    with engine(base, LowRankPerturbation(rank=1), head="sequence-classification") as opened:
        for _ in range(3):
            opened.step(batch)
        export_adapter(opened, opened._runner.model, tmp_path / "adapter", base=str(base))  # type: ignore[arg-type]
        opened.export(tmp_path / "merged")
    merged = loss_of(auto.from_pretrained(tmp_path / "merged"), batch)
    loaded = peft.PeftModel.from_pretrained(auto.from_pretrained(base), tmp_path / "adapter")
    assert loss_of(loaded, batch) == pytest.approx(merged, rel=1e-5)
    assert abs(loss_of(auto.from_pretrained(base), batch) - merged) > 1e-3, "something was learned"


def test_the_command_writes_one_of_any_step_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = small_run(tmp_path, steps=4, optimization=Optimization(lr=1e-2, rank=2, period=2))
    with Trainer(options) as trainer:
        trainer.run()
    run = options.output
    main(["export", "--run", str(run), "--at", "3", "--output", str(tmp_path / "adapter"), "--as-adapter"])
    assert "the adapter after 3 steps" in capsys.readouterr().out
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert config.r == config.lora_alpha == 4
    assert Path(config.base_model_name_or_path).is_dir()
    message = refusal("export", "--run", run, "--output", tmp_path / "other", "--as-adapter", "--output-dtype", "bfloat16")
    assert "--output-dtype: found bfloat16" in message
    assert not (tmp_path / "other").exists()


def test_what_has_no_such_form_is_refused(tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama")), make_batch(40, [7, 4])
    out = tmp_path / "adapter"
    with engine(base, DensePerturbation()) as opened, pytest.raises(OptionError, match="dense perturbations"):
        export_adapter(opened, opened._runner.model, out, base="")  # type: ignore[arg-type]
    with engine(base, LowRankPerturbation(rank=5, period=1)) as opened:
        for _ in range(3):
            opened.step(batch)
        with pytest.raises(OptionError, match=r"found 20 columns of all periods; expected at most \d+, for model\."):
            export_adapter(opened, opened._runner.model, out, base="")  # type: ignore[arg-type]
    adapter = Adapter(config=peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with engine(base, adapter=adapter) as opened, pytest.raises(OptionError, match="trains an adapter"):
        export_adapter(opened, opened._runner.model, out, base="")  # type: ignore[arg-type]
    out.mkdir()
    (out / "mine").touch()
    with engine(base) as opened, pytest.raises(OutputError):
        export_adapter(opened, opened._runner.model, out, base="")  # type: ignore[arg-type]
    assert [path.name for path in out.iterdir()] == ["mine"]
