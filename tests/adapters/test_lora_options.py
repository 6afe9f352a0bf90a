"""``--lora-rank``: peft's LoRA adapter without a config file, in every command, bit for bit the one of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_lines import Ended, done, make_place, refusal, run_here, write_rows
from models import WORDS, save_tokenizer, small_config
from profiles import each_choice
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from zo2adapters import train as train_recipe

peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it

METHODS = {"zeroth-order": (), "low-rank": ("--rank", 2), "adamw": ("--method", "adamw")}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base and rows."""
    return make_place(tmp_path_factory.mktemp("lora"))


def train(output: str, *more: object) -> Ended:
    common = ("--model", "base", "--data", "rows.jsonl", "--steps", 3, "--lr", 1e-2, "--batch-size", 3)
    return done("train", *common, "--output", output, *more)


def files(run: str) -> tuple[bytes, bytes, dict[str, Any]]:
    """A run's journal, and the adapter that it exported: its values and its config."""
    folder = Path(run)
    config = json.loads((folder / "model" / "adapter_config.json").read_bytes())
    return (folder / "journal.jsonl").read_bytes(), (folder / "model" / "adapter_model.safetensors").read_bytes(), config


CONFIGS: dict[str, tuple[dict[str, Any], tuple[object, ...]]] = {
    "defaults": ({"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}, ("--lora-rank", 2)),
    "all-linear": (
        {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
        ("--lora-rank", 2, "--lora-targets", "all-linear"),
    ),
    "names": (
        {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]},
        ("--lora-rank", 3, "--lora-targets", "q_proj", "up_proj", "--lora-alpha", 5),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("method", "name"), each_choice(list(METHODS), list(CONFIGS)))
def test_a_run_is_that_of_the_same_config_in_a_file(method: str, name: str, here: Path) -> None:
    config, options = CONFIGS[name]
    peft.LoraConfig(**config, task_type="CAUSAL_LM").save_pretrained("lora")
    train("filed", *METHODS[method], "--adapter", "lora/adapter_config.json")
    train("named", *METHODS[method], *options)
    assert files("named") == files("filed")
    modules = {name.rpartition(".lora_")[0] for name in load_file("named/model/adapter_model.safetensors")}
    assert len(modules) == (14 if config["target_modules"] == "all-linear" else 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_resumed_exported_and_evaluated_without_the_option(method: str, here: Path) -> None:
    options = (*METHODS[method], "--lora-rank", 2, "--lora-alpha", 3)
    train("whole", *options, "--steps", 5)
    train("run", *options)
    done("train", "--resume", "run", "--steps", 5)
    assert files("run")[1:] == files("whole")[1:]
    done("export", "--run", "run", "--output", "exported")
    assert Path("exported/adapter_model.safetensors").read_bytes() == files("run")[1]
    of_run = done("evaluate", "--run", "run", "--data", "rows.jsonl", "--no-base").out
    assert of_run == done("evaluate", "--adapter", "exported", "--data", "rows.jsonl", "--no-base").out
    assert "--lora-rank: found 4; expected 2, as in the run" in refusal(
        "evaluate", "--run", "run", "--data", "rows.jsonl", "--lora-rank", 4
    )
    assert "--lora-rank" in refusal("train", "--resume", "run", "--lora-rank", 4)


def test_the_recipe_of_a_run_has_what_was_left_out(here: Path) -> None:
    train("run", "--method", "adamw", "--lora-rank", 2)
    recipe = yaml.safe_load(Path("run/recipe.yaml").read_text())
    assert (recipe["lora_rank"], recipe["lora_targets"], recipe["lora_alpha"]) == (2, ["auto"], 4)
    train_recipe("run/recipe.yaml", {"output": "again"})
    assert files("again") == files("run")
    values = {"model": "base", "data": "rows.jsonl", "output": "mapped", "lr": 1e-2, "lora_rank": 2, "method": "adamw"}
    train_recipe({**values, "lora_targets": "all-linear", "steps": 3, "batch_size": 3})
    assert files("mapped") == files("run")


def test_an_exported_adapter_names_its_base(here: Path) -> None:
    train("run", "--lora-rank", 2)
    assert files("run")[2]["base_model_name_or_path"] == str((here / "base").resolve())
    model = peft.AutoPeftModelForCausalLM.from_pretrained("run/model")
    assert model.peft_config["default"].r == 2


def test_a_classifier_gets_an_adapter_in_its_head_too(here: Path) -> None:
    config = small_config("llama", vocab_size=len(WORDS), num_labels=2, pad_token_id=0)
    made: Any = AutoModelForSequenceClassification
    made.from_config(config).save_pretrained("classifier")
    save_tokenizer(Path("classifier"))
    write_rows(Path("labels.jsonl"), [{"text": "the cat", "label": 0}, {"text": "the dog", "label": 1}])
    common = ("--model", "classifier", "--head", "sequence-classification", "--data", "labels.jsonl", "--batch-size", 2)
    done("train", *common, "--output", "run", "--steps", 2, "--lr", 1e-2, "--method", "adamw", "--lora-rank", 2)
    names = load_file("run/model/adapter_model.safetensors").keys()
    assert any(".score.lora_B" in name for name in names)
    loaded = peft.PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained("classifier"), "run/model")
    rows = [AutoTokenizer.from_pretrained("classifier")(text, return_tensors="pt") for text in ("the cat", "the dog")]
    losses = [loaded(**row, labels=torch.tensor([label])).loss.item() for label, row in enumerate(rows)]
    told = done("evaluate", "--run", "run", "--data", "labels.jsonl", "--no-base").out
    assert float(told.split()[1].strip(",")) == pytest.approx(sum(losses) / 2, abs=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["zeroth-order", "adamw"])
def test_verify_holds_the_adapter_against_the_whole_model(method: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("verify", "--model", "base", "--tokens", 6, *METHODS[method], "--lora-rank", 2)
    assert "bit for bit" in (told := done(*command).out)
    assert told.endswith("all 28 trained parameters\n")
    assert "all 8 trained" in done(*command, "--lora-targets", "q_proj", "down_proj").out
    loads = AutoModelForCausalLM.from_pretrained

    def changed(*arguments: Any, **options: Any) -> Any:
        model: Any = loads(*arguments, **options)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.01)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", changed)
    assert run_here(*command).out.startswith("DIFFERENT: ")


def test_plan_counts_the_adapter_of_either_method(here: Path) -> None:
    command = ("plan", "--model", "base", "--data", "rows.jsonl", "--json", "--lora-rank", 2)
    zeroth_order, first_order = (json.loads(done(*command, *METHODS[method]).out) for method in ("zeroth-order", "adamw"))
    assert zeroth_order["write_back_every"] is None, "no block changes"
    assert zeroth_order["model_bytes"] == first_order["model_bytes"]
    without = json.loads(done(*command[:-2]).out)
    assert zeroth_order["model_bytes"] > without["model_bytes"]


def test_tune_tries_rates_for_the_adapter(here: Path) -> None:
    common = ("--model", "base", "--data", "rows.jsonl", "--batch-size", 3, "--learning-rates", 1e-5, 1e-2)
    done("tune", *common, "--method", "adamw", "--lora-rank", 2, "--forwards", 60, "--output", "tuned")
    table = json.loads(Path("tuned/tune.json").read_bytes())
    done("train", "--resume", "tuned/lr-0.01", "--steps", table["results"][0]["steps"] + 1)
    assert len(load_file("tuned/lr-0.01/model/adapter_model.safetensors")) == 28


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--lora-rank", 2, "--adapter", "lora"), "--lora-rank: found 2 with --adapter lora"),
        (("--lora-rank", 2, "--lora-targets", "all-linear", "q_proj"), "--lora-targets: found all-linear q_proj"),
        (("--lora-rank", 2, "--lora-targets", "q_proj,up_proj"), "spaces between them. What to do: write q_proj up_proj"),
        (("--lora-rank", 2, "--lora-targets", "c_attn"), "Target modules {'c_attn'} not found"),
        (("--lora-rank", 2, "--lora-targets", "lm_head"), "adapter.target_modules: found lm_head, the head"),
        (("--lora-rank", 2, "--snapshot-every", 2), "--lora-rank: found --snapshot-every"),
        (("--lora-rank", 2, "--adapter-frozen", "lora_C"), "--adapter-frozen"),
        (("--method", "lomo", "--lora-rank", 2), "--method: found lomo with LoRA of rank 2"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(more: tuple[object, ...], told: str, here: Path) -> None:
    lr = ("--lr", 1e-2)
    assert told in refusal("train", "--model", "base", "--data", "rows.jsonl", "--output", "run", *lr, *more)
    assert not Path("run").exists()


@pytest.mark.parametrize("command", ["plan", "verify", "tune"])
def test_other_commands_refuse_the_same(command: str, here: Path) -> None:
    common = (command, "--model", "base", *(("--data", "rows.jsonl", "--output", "x") if command == "tune" else ()))
    assert "--lora-targets" in refusal(*common, "--lora-targets", "q_proj")


def test_a_new_adapter_without_a_run_is_nothing_to_evaluate(here: Path) -> None:
    told = refusal("evaluate", "--model", "base", "--data", "rows.jsonl", "--lora-rank", 2)
    assert "--lora-rank: found 2" in told
    assert "pass --run or --adapter DIR" in told


def test_the_adapter_of_a_benchmark_is_refused_by_its_option(here: Path) -> None:
    told = refusal("train", "--task", "sst2", "--model", "base", "--output", "run", "--lora-rank", 2)
    assert "--lora-rank: found LoRA of rank 2 with --task" in told
