"""``zo2 merge``: the weights of peft's ``merge_and_unload``, bit for bit, for each kind of adapter
and for runs.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done, make_place, refusal
from engines import assert_equal
from families import small_config as family_config
from families import small_model
from models import save_model, small_config
from runs import weights_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from zo2adapters.models.peft_model import write_adapter
from zo2core.errors import CheckpointError
from zo2core.planning.memory import HostPlan, plan_host

peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it


def save_adapter(base: Path, config: Any, directory: Path) -> None:
    """An adapter as peft saves it, with random values."""
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), config)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(
                parameter.dtype
            )
    model.save_pretrained(directory)


def merged_by_peft(base: Path, adapter: Path, directory: Path) -> dict[str, torch.Tensor]:
    """What peft makes of the whole model."""
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    peft.PeftModel.from_pretrained(whole, adapter).merge_and_unload().save_pretrained(directory)
    return weights_of(directory)


def test_lora_of_conv1d_layers_is_merged_as_peft_merges_it(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("gpt2"), torch.bfloat16)
    save_adapter(
        base,
        peft.LoraConfig(r=3, target_modules="all-linear", fan_in_fan_out=True),
        tmp_path / "adapter",
    )
    expected = merged_by_peft(base, tmp_path / "adapter", tmp_path / "peft")
    done(
        "merge", "--model", base, "--adapter", tmp_path / "adapter", "--output", tmp_path / "merged"
    )
    assert_equal(weights_of(tmp_path / "merged"), expected)


@pytest.mark.parametrize(
    ("option", "shared"),
    [
        ({"target_modules": ["k_proj"]}, "self_attn.k_proj.weight"),
        (
            {"target_modules": ["in_proj"], "modules_to_save": ["input_layernorm"]},
            "input_layernorm.weight",
        ),
        ({"target_modules": ["in_proj"]}, None),
    ],
    ids=["a matrix", "a copy", "none"],
)
def test_changes_that_layers_make_to_a_weight_that_they_share_are_not_merged(
    option: dict[str, Any], shared: str | None, tmp_path: Path
) -> None:
    """Peft adds them up, and every layer of the merged model has the changes of all."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    small_model(family_config("zamba2")).save_pretrained(base)
    save_adapter(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **option), adapter)
    command = ("merge", "--model", base, "--adapter", adapter, "--output", tmp_path / "merged")
    if shared is None:
        done(*command)
        expected = merged_by_peft(base, adapter, tmp_path / "peft")
        assert_equal(weights_of(tmp_path / "merged"), expected)
    else:
        paths = [f"model.layers.{layer}.shared_transformer.{shared}" for layer in (0, 3)]
        assert f"{' and of '.join(paths)}, which are one weight" in refusal(*command)
        assert not (tmp_path / "merged").exists()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, rows, and runs that have trained an adapter by either method."""
    folder = make_place(tmp_path_factory.mktemp("merge"), layers=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        common = (
            "--model",
            "base",
            "--data",
            "rows.jsonl",
            "--steps",
            4,
            "--lr",
            1e-2,
            "--batch-size",
            3,
        )
        done("train", "--method", "zeroth-order", *common, "--lora-rank", 2, "--output", "zeroth")
        done(
            "train",
            *common,
            "--lora-rank",
            2,
            "--output",
            "first",
            "--method",
            "adamw",
            "--snapshot-every",
            2,
        )
        done("train", "--method", "zeroth-order", *common, "--output", "all")
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize("run", ["zeroth", "first"])
def test_a_run_is_merged_at_any_of_its_steps(run: str, here: Path) -> None:
    for step in (2, 4):
        done("export", "--run", run, "--at", step, "--output", f"adapter-{step}")
        expected = merged_by_peft(here / "base", here / f"adapter-{step}", here / f"peft-{step}")
        told = done("merge", "--run", run, "--at", step, "--output", f"merged-{step}").out
        assert told == f"merged-{step}: the model after {step} steps\n"
        assert_equal(weights_of(f"merged-{step}"), expected)
    of_run = done("evaluate", "--run", run, "--data", "rows.jsonl", "--no-base").out.split(",")[0]
    merged = done("evaluate", "--model", "merged-4", "--data", "rows.jsonl").out.split(",")[0]
    assert float(merged.split()[1]) == pytest.approx(float(of_run.split()[1]), abs=1e-4)


def test_streamed_blocks_are_merged_to_the_same_weights(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done("merge", "--run", "first", "--output", "resident")

    def planned(*args: Any, **kwargs: Any) -> HostPlan:
        return replace(plan_host(*args, **kwargs), buckets=1)

    monkeypatch.setattr("zo2core.planning.memory.plan_host", planned)
    done("merge", "--run", "first", "--output", "streamed")
    assert_equal(weights_of("streamed"), weights_of("resident"))


def test_a_merge_has_tokenizer_and_card_and_the_base_may_be_the_one_that_the_adapter_names(
    here: Path,
) -> None:
    done("merge", "--run", "all", "--output", "all-merged")
    assert_equal(weights_of("all-merged"), weights_of("all/model"))
    done("merge", "--model", "base", "--adapter", "first/model", "--output", "merged")
    names = {path.name for path in Path("merged").iterdir()}
    assert {"config.json", "tokenizer.json", "README.md", "model.safetensors"} <= names
    assert "with the adapter `first` merged into them" in Path("merged/README.md").read_text()
    done("merge", "--run", "first", "--output", "of-run")
    card = Path("of-run/README.md").read_text()
    assert "after 4 first-order steps, block by block (adamw)" in card
    assert '"name": "adamw"' in card
    assert "an adapter, which is merged into these weights" in card
    assert "library_name: transformers" in card
    done("merge", "--adapter", "first/model", "--output", "named")
    assert_equal(weights_of("named"), weights_of("merged"))
    config = Path("first/model/adapter_config.json")
    config.write_text(
        json.dumps({**json.loads(config.read_bytes()), "base_model_name_or_path": None})
    )
    assert "--model" in refusal("merge", "--adapter", "first/model", "--output", "other")


def test_a_quantised_base_is_merged_into_the_weights_that_it_decodes_to(here: Path) -> None:
    done("convert", "--model", "base", "--output", "nf4", "--quantize", "nf4")
    done("export", "--model", "nf4", "--output", "decoded")
    done("merge", "--model", "nf4", "--adapter", "first/model", "--output", "merged")
    assert_equal(
        weights_of("merged"),
        merged_by_peft(here / "decoded", here / "first" / "model", here / "peft"),
    )


def test_an_adapter_that_was_trained_with_dropout_is_read(here: Path) -> None:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    save_adapter(here / "base", config, here / "dropped")
    done("merge", "--model", "base", "--adapter", "dropped", "--output", "merged")
    assert_equal(
        weights_of("merged"), merged_by_peft(here / "base", here / "dropped", here / "peft")
    )
    losses = [
        done("evaluate", *model, "--data", "rows.jsonl", "--no-base").out.split()[1]
        for model in (("--model", "base", "--adapter", "dropped"), ("--model", "merged"))
    ]
    assert float(losses[0].strip(",")) == pytest.approx(float(losses[1].strip(",")), abs=1e-5)
    told = refusal(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--adapter",
        "dropped",
        "--data",
        "rows.jsonl",
        "--output",
        "run",
    )
    assert "adapter.lora_dropout: found 0.1" in told


def test_what_cannot_be_merged_is_refused_and_nothing_is_written(here: Path) -> None:
    peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM").save_pretrained("config")
    common = ("--model", "base", "--data", "rows.jsonl", "--steps", 1, "--sequence-length", 8)
    done(
        "train",
        "--method",
        "zeroth-order",
        *common,
        "--adapter",
        "config/adapter_config.json",
        "--output",
        "prefix",
    )
    assert "prefix, which no weight can contain" in refusal(
        "merge", "--run", "prefix", "--output", "merged"
    )
    assert "--adapter: found none" in refusal("merge", "--model", "base", "--output", "merged")
    assert "something at this path" in refusal("merge", "--run", "first", "--output", "zeroth")
    for command, name in (
        ("merge", "merged.gguf"),
        ("export", "x.gguf"),
        ("export", "model.safetensors"),
    ):
        told = refusal(command, "--run", "first", "--output", name)
        assert f"{name}: found the name of a file; expected a directory" in told
        assert (name.endswith(".gguf")) == ("--format gguf" in told)
        assert f"pass --output {name.partition('.')[0]}, a directory" in told
        assert not Path(name).exists()
    assert not Path("merged").exists()


def spoil(path: Path, part: str, value: float) -> None:
    """Put a number into a tensor whose name has this part."""
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if part in name)
    tensors[name].view(-1)[3] = value
    save_file(tensors, path, {"format": "pt"})


def change_alpha(alpha: float) -> None:
    path = Path("first/model/adapter_config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": alpha}))


def absurd_sum() -> None:
    change_alpha(3e38)
    for part in ("lora_A", "lora_B"):
        spoil(ADAPTER, part, 1e9)


BASE, ADAPTER = Path("base/model.safetensors"), Path("first/model/adapter_model.safetensors")
EXPORT = ("export", "--model", "base", "--output", "out")
MERGE = ("merge", "--model", "base", "--adapter", "first/model", "--output", "out")
NUMBERS: dict[str, tuple[Callable[[], object], tuple[str, ...], str]] = {
    "a base": (
        lambda: spoil(BASE, "model.norm", math.nan),
        EXPORT,
        "base/model.safetensors: model.norm.weight: found nan; expected finite weights",
    ),
    "a base that is merged": (
        lambda: spoil(BASE, "0.self_attn.q_proj", math.inf),
        MERGE,
        "base/model.safetensors: model.layers.0.self_attn.q_proj.weight: found inf",
    ),
    "a base that is quantised": (
        lambda: spoil(BASE, "model.norm", math.nan),
        ("convert", "--model", "base", "--output", "out", "--quantize", "nf4"),
        "base/model.safetensors: model.norm.weight: found nan",
    ),
    "a number too large": (
        lambda: spoil(BASE, "mlp.down_proj", 1e6),
        (*EXPORT, "--output-dtype", "float16"),
        "down_proj.weight: found 1e+06, which float16 cannot hold; expected numbers in float16's "
        "range. What to do: choose a dtype with a larger range.",
    ),
    "an adapter": (
        lambda: spoil(ADAPTER, "lora_A", math.nan),
        MERGE,
        "first/model/adapter_model.safetensors: base_model.model.model.layers.0.",
    ),
    "an adapter that is evaluated": (
        lambda: spoil(ADAPTER, "lora_B", math.inf),
        ("evaluate", "--model", "base", "--adapter", "first/model", "--data", "rows.jsonl"),
        "first/model/adapter_model.safetensors: base_model.model.model.layers.0.",
    ),
    "an absurd scale": (lambda: change_alpha(1e300), MERGE, "adapter.lora_alpha: found 1e+300"),
    "a scale that is no number": (
        lambda: change_alpha(math.nan),
        MERGE,
        "adapter.lora_alpha: found nan",
    ),
    "a sum too large": (
        absurd_sum,
        MERGE,
        "first/model/adapter_model.safetensors, merged into model.layers.0.",
    ),
}


@pytest.mark.parametrize(("spoiling", "command", "told"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_are_not_finite_are_written_by_no_command_and_blamed_on_their_file(
    spoiling: Callable[[], object], command: tuple[str, ...], told: str, here: Path
) -> None:
    spoiling()
    assert told in refusal(*command)
    assert not Path("out").exists()


def test_an_adapter_with_numbers_that_are_not_finite_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the adapter: lora_B: found inf; expected finite"):
        write_adapter(tmp_path / "out", {}, {"lora_B": torch.tensor([1.0, math.inf])})
    assert not list(tmp_path.iterdir())
