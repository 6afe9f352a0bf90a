"""LoRA in peft's modules: monolithic MeZO's bits on the adapter, peft's files, and a base that is
only read.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_lines import Ended, done, refusal, write_rows
from engines import memory, zeroth_order
from models import make_batch, save_classifier, save_model, small_config
from peft_models import lora, monolithic, steps, values_of
from profiles import each_choice
from runs import small_run
from safetensors.torch import load_file
from threaded_device import ThreadedDevice, ThreadedStreams
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    PretrainedConfig,
    PreTrainedModel,
)
from whole_loops import StackedLoop

from zo2adapters import Adapter, MonolithicMeZO, Precision, open_checkpoint
from zo2adapters import train as train_recipe
from zo2adapters.models.export import export_adapter
from zo2adapters.models.peft_adapter import peft_config
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import open_run
from zo2core import (
    DensePerturbation,
    Distribution,
    Engine,
    LowRankPerturbation,
    MeZOSGD,
    MultiQueryRGE,
    PhiloxNoise,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import OptionError, OutputError, ZO2Warning
from zo2core.estimators.perturbation import Perturbation
from zo2core.types import Lane

peft: Any = pytest.importorskip("peft")
LORA = {"peft_type": "LORA", "r": 2}
FA = ("lora_A",)  # LoRA-FA


class LoRALoop(StackedLoop):
    """The stacked loop over an adapter's parameters alone."""

    def __init__(self, whole: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        super().__init__(whole, *arguments, **options)
        trained = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
        self.base = {name: value for name, value in self.base.items() if name in trained}


@pytest.mark.few(3)
@pytest.mark.parametrize("frozen", [(), FA])
@pytest.mark.parametrize(("family", "buckets"), [("llama", None), ("llama", 2), ("gpt2", 2)])
def test_lora_by_low_rank_is_the_stacked_loop(
    frozen: tuple[str, ...], family: str, buckets: int | None, tmp_path: Path
) -> None:
    config = small_config(family, tie_word_embeddings=False)  # as the loop wants it
    base = save_model(tmp_path / "base", config, torch.bfloat16)
    turned = (
        {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}
        if family == "gpt2"
        else {}
    )
    adapter = Adapter(config=lora(init_lora_weights=False, **turned), frozen=frozen)
    batch = make_batch(40, [7, 5])
    model = open_checkpoint(base, adapter=adapter)
    loop = LoRALoop(
        monolithic(base, adapter.config, values_of(model), frozen),
        2,
        2,
        Distribution.GAUSSIAN,
        run_seed=5,
    )
    estimator, perturbation = (
        MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False),
        LowRankPerturbation(rank=2, period=2),
    )
    with Engine(
        model, ZerothOrder(estimator, seed=5, perturbation=perturbation), memory=memory(buckets)
    ) as engine:
        for _ in range(5):
            [seed] = {evaluation.seed for evaluation in engine.ask()}
            assert list(engine.step(batch).losses) == loop.step(batch, seed)


def test_blocks_are_brought_and_never_taken_or_written_back(tmp_path: Path) -> None:
    base, run = (
        save_model(tmp_path / "base", small_config("llama", num_hidden_layers=4)),
        tmp_path / "run",
    )
    run.mkdir()
    steps(
        open_checkpoint(base, adapter=Adapter(config=lora())),
        journal=run / "journal.jsonl",
        write_back=WriteBackPolicy(directory=run),
    )
    assert {path.name.partition(".")[0] for path in run.iterdir()} == {"journal"}
    with closing(ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 1e-4))) as device:
        model, method = (
            open_checkpoint(base, adapter=Adapter(config=lora())),
            ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2)),
        )
        with Engine(model, method, device=device, memory=memory(kept=0)) as engine:
            # What comes ahead of the second step may count for the first one.
            lanes = [engine.step(make_batch(40, [7, 5])).lanes for _ in range(2)]
    uploaded = sum(own[Lane.UPLOAD].nbytes for own in lanes)
    assert uploaded >= 2 * sum(layout.nbytes for layout in model.layouts if not layout.resident)
    assert all(own[lane].nbytes == 0 for own in lanes for lane in (Lane.OFFLOAD, Lane.WRITE))


@pytest.mark.parametrize(
    ("adapter", "option"),
    [
        ({"config": lora(target_modules=["query"])}, "adapter.target_modules"),
        ({"config": lora(lora_dropout=0.1)}, "adapter.lora_dropout"),
        ({"config": lora(bias="lora_only")}, "adapter.bias"),
        ({"config": lora(modules_to_save=["mlp"])}, "adapter.modules_to_save"),
        ({"config": lora(init_lora_weights="olora")}, "adapter.init_lora_weights"),
        (
            {"config": peft.FourierFTConfig(target_modules=["q_proj"])},
            "adapter: found FOURIERFT; expected one of LORA, ",
        ),
        ({"config": peft.PromptTuningConfig(num_virtual_tokens=3)}, "adapter: found PROMPT_TUNING"),
        ({"config": {"r": 3}}, "adapter: found dict"),
        ({"config": lora(), "frozen": ("lora_",)}, "adapter.frozen"),
        ({"config": lora(), "frozen": ("lora_C",)}, "adapter.frozen"),
        ({"config": lora(), "frozen": ("lora_A", "v_porj")}, "adapter.frozen: found .'v_porj'"),
        (
            {"config": lora(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")},
            "adapter.alora_invocation_tokens",
        ),
        (
            {"config": lora(target_modules=["embed_tokens"], use_dora=True)},
            "adapter.target_modules: found model.embed_tokens, Embedding; expected linear layers",
        ),
        ({"config": lora(target_modules="(")}, "adapter: found"),
        ({"config": lora(r="8")}, "adapter.r"),
        ({"config": lora(r=10**10)}, "adapter.r"),
        ({"config": lora(lora_alpha="x")}, "adapter.lora_alpha: found 'x'"),
    ],
)
def test_what_cannot_be_trained_so_is_refused(
    adapter: dict[str, Any], option: str, base: Path
) -> None:
    with pytest.raises(OptionError, match=f"^{option}"):
        open_checkpoint(base, adapter=Adapter(**adapter))


@pytest.mark.parametrize("seed", [-1, 2**64, None, 0.5, True])
def test_a_seed_out_of_range_is_refused(seed: Any) -> None:
    with pytest.raises(OptionError, match=r"adapter\.seed"):
        Adapter(config=lora(), seed=seed)


@pytest.mark.parametrize("buckets", [None, 1])
def test_lora_in_mixed_precision_is_mezo_under_autocast(
    buckets: int | None, tmp_path: Path
) -> None:
    base = save_model(
        tmp_path / "base", small_config("llama", tie_word_embeddings=True), torch.bfloat16
    )
    adapter = Adapter(config=lora(init_lora_weights=False), seed=1)
    model = open_checkpoint(
        base, adapter=adapter, precision="mixed", dtype="bfloat16", loss_chunk=None
    )
    whole: Any = monolithic(base, adapter.config, values_of(model), ())
    whole.float()
    loop = MonolithicMeZO(whole, lr=1e-2, zo_eps=1e-2, autocast=torch.bfloat16)
    batch = make_batch(40, [7, 5])
    with Engine(
        model, ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2)), memory=memory(buckets)
    ) as engine:
        for _ in range(3):
            [seed] = {evaluation.seed for evaluation in engine.ask()}
            assert engine.step(batch).losses == loop.step(batch, seed).losses
        trained = dict(whole.named_parameters())
        for name, value in engine.parameters_now():
            if "lora" in name:
                assert torch.equal(value, trained[name]), name


def test_what_does_not_go_with_an_adapter_or_would_write_a_frozen_base_is_refused(
    tmp_path: Path,
) -> None:
    base, adapter = (
        save_model(tmp_path / "base", small_config("llama"), torch.bfloat16),
        Adapter(config=lora()),
    )
    carried = Precision(stored=torch.float32, transfer_dtype=torch.bfloat16)
    asked: list[dict[str, Any]] = [
        {"precision": carried},
        {"transfer_dtype": "bfloat16"},
        {"export_dtype": "bfloat16"},
    ]
    for options in asked:
        for path in (base, tmp_path / "missing"):  # before anything is fetched or read
            with pytest.raises(OptionError, match="with an adapter"):
                open_checkpoint(path, adapter=adapter, **options)
    estimator = MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False)
    beside = ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2))
    with pytest.raises(OptionError, match="exact precision beside the activations"):
        Engine(open_checkpoint(base, adapter=adapter, precision="mixed"), beside)
    writing: dict[str, dict[str, Any]] = {
        "replay": {"replay": "host"},
        "write_back.every": {"write_back": WriteBackPolicy(directory=tmp_path, every=2)},
        "write_back.snapshot_every": {
            "write_back": WriteBackPolicy(directory=tmp_path, snapshot_every=2)
        },
    }
    for option, given in writing.items():
        model, noise = open_checkpoint(base, adapter=adapter), PhiloxNoise(Distribution.RADEMACHER)
        with pytest.raises(OptionError, match=f"^{option}.*frozen"):
            zeroth_order(model, MeZOSGD(lr=1e-2, zo_eps=1e-2), noise=noise, **given)


def test_a_resumed_run_reads_its_config_again_and_a_branch_goes_on_from_its_step(
    tmp_path: Path,
) -> None:
    later = tmp_path / "adapter_config.json"  # of a later peft
    later.write_text(
        json.dumps({"peft_type": "LORA", "r": 3, "target_modules": ["q_proj"], "of_tomorrow": None})
    )
    with pytest.warns(ZO2Warning, match="of_tomorrow.*are ignored"):
        assert peft_config(Adapter(config=later)).config.r == 3
    options = small_run(tmp_path)
    config, run, text = (
        tmp_path / "lora.json",
        tmp_path / "run",
        json.dumps({**LORA, "target_modules": ["q_proj"]}),
    )
    config.write_text(text)
    train = (
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--lr",
        "1e-2",
        "--adapter",
        config,
    )
    frozen = ("--adapter-frozen", "lora_A")
    done(*train, *frozen, "--output", run, "--steps", "2")
    config.write_text("{}")
    assert refusal("train", "--resume", run, "--steps", 4).startswith(
        "zo2: --adapter: found None; expected one of LORA"
    )
    config.write_text(text)
    done("train", "--resume", run, "--steps", "4")
    branch = (
        "train",
        "--resume",
        run,
        "--from-step",
        2,
        "--output",
        tmp_path / "branch",
        "--steps",
        4,
        "--lr",
        "1e-2",
    )
    done(*branch, "--adapter", config, *frozen)
    whole, again = (
        load_file(path / "model" / "adapter_model.safetensors")
        for path in (run, tmp_path / "branch")
    )
    assert all(torch.equal(again[name], whole[name]) for name in whole)


EXPORTED: dict[str, PretrainedConfig] = {
    "opt": small_config("opt"),
    "llama": small_config("llama", tie_word_embeddings=False),
    "llama, tied": small_config("llama", tie_word_embeddings=True),
    "qwen2, with biases": small_config("qwen2"),
    "gpt2": GPT2Config(
        vocab_size=40,
        n_embd=12,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def low_rank(base: Path, perturbation: Perturbation | None = None, **options: Any) -> Engine:
    estimator = MultiQueryRGE(q=2, lr=3e-2, zo_eps=1e-2, perturb_in_place=False)
    beside = LowRankPerturbation(rank=2, period=3) if perturbation is None else perturbation
    return zeroth_order(open_checkpoint(base, **options), estimator, perturbation=beside, seed=3)


def load(base: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return model


@torch.inference_mode()
def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> float:
    return float(model(**batch, use_cache=False).loss)


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.filterwarnings(
    # the head has columns of its own, beside those of the embedding
    "ignore:Model has `tie_word_embeddings=True`",
    "ignore:fan_in_fan_out is set to True",
    "ignore:`is_gradient_checkpointing` is deprecated",
)
def test_stock_peft_loads_it_to_the_exported_models_loss(tmp_path: Path, name: str) -> None:
    base, batch = save_model(tmp_path / "base", EXPORTED[name]), make_batch(40, [7, 4])
    with low_rank(base) as opened:
        for _ in range(7):  # two periods, and one that goes on: six columns
            opened.step(batch)
        export_adapter(opened, opened._run.model, tmp_path / "adapter", base=str(base))  # type: ignore[arg-type]
        opened.export(tmp_path / "merged")
    loaded = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter")
    assert loaded.peft_config["default"].r == 6
    assert loaded.peft_config["default"].bias == ("none" if name.startswith("llama") else "all"), (
        "peft saves it again whole"
    )
    merged = loss_of(load(tmp_path / "merged"), batch)
    assert loss_of(loaded, batch) == pytest.approx(merged, rel=1e-5)
    assert abs(loss_of(load(base), batch) - merged) > 1e-2, "something was learned"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_model_with_another_head_is_loaded_by_stock_peft_too(tmp_path: Path) -> None:
    base = save_classifier(tmp_path / "base", labels=3, vocab_size=40, tie_word_embeddings=False)
    auto, batch = (
        AutoModelForSequenceClassification,
        {**make_batch(39, [7, 4]), "labels": torch.tensor([2, 0])},
    )
    with low_rank(base, LowRankPerturbation(rank=1), head="sequence-classification") as opened:
        for _ in range(3):
            opened.step(batch)
        export_adapter(opened, opened._run.model, tmp_path / "adapter", base=str(base))  # type: ignore[arg-type]
        opened.export(tmp_path / "merged")
    merged = loss_of(auto.from_pretrained(tmp_path / "merged"), batch)
    loaded = peft.PeftModel.from_pretrained(auto.from_pretrained(base), tmp_path / "adapter")
    assert loss_of(loaded, batch) == pytest.approx(merged, rel=1e-5)
    assert abs(loss_of(auto.from_pretrained(base), batch) - merged) > 1e-3, "something was learned"


def test_the_command_writes_one_of_any_step_and_says_so(tmp_path: Path) -> None:
    options = small_run(
        tmp_path,
        steps=4,
        optimization=Optimization(method="zeroth-order", lr=1e-2, rank=2, period=2),
    )
    with open_run(RunStart(options)) as trainer:
        trainer.run()
    run = options.output
    exported = done(
        "export", "--run", run, "--at", "3", "--output", tmp_path / "adapter", "--as-adapter"
    )
    assert "the adapter after 3 steps" in exported.out
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert config.r == config.lora_alpha == 4
    assert Path(config.base_model_name_or_path).is_dir()
    message = refusal(
        "export",
        "--run",
        run,
        "--output",
        tmp_path / "other",
        "--as-adapter",
        "--output-dtype",
        "bfloat16",
    )
    assert "--output-dtype: found bfloat16" in message
    assert not (tmp_path / "other").exists()


def test_what_has_no_such_form_is_refused(tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama")), make_batch(40, [7, 4])
    out = tmp_path / "adapter"
    with (
        low_rank(base, DensePerturbation()) as opened,
        pytest.raises(OptionError, match="dense perturbations"),
    ):
        export_adapter(opened, opened._run.model, out, base="")  # type: ignore[arg-type]
    with low_rank(base, LowRankPerturbation(rank=5, period=1)) as opened:
        for _ in range(3):
            opened.step(batch)
        with pytest.raises(
            OptionError, match=r"found 20 columns of all periods; expected at most \d+, for model\."
        ):
            export_adapter(opened, opened._run.model, out, base="")  # type: ignore[arg-type]
    adapter = Adapter(config=peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with (
        low_rank(base, adapter=adapter) as opened,
        pytest.raises(OptionError, match="trains an adapter"),
    ):
        export_adapter(opened, opened._run.model, out, base="")  # type: ignore[arg-type]
    out.mkdir()
    (out / "mine").touch()
    with low_rank(base) as opened, pytest.raises(OutputError):
        export_adapter(opened, opened._run.model, out, base="")  # type: ignore[arg-type]
    assert [path.name for path in out.iterdir()] == ["mine"]


# ``--lora-rank``: peft's LoRA adapter without a config file, in every command


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it

METHODS = {"zeroth-order": (), "low-rank": ("--rank", 2), "adamw": ("--method", "adamw")}


def train(output: str, *more: object) -> Ended:
    common = (
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--steps",
        3,
        "--lr",
        1e-2,
        "--batch-size",
        3,
    )
    return done("train", "--method", "zeroth-order", *common, "--output", output, *more)


def files(run: str) -> tuple[bytes, bytes, dict[str, Any]]:
    """A run's journal, and the adapter that it exported: its values and its config."""
    folder = Path(run)
    config = json.loads((folder / "model" / "adapter_config.json").read_bytes())
    return (
        (folder / "journal.jsonl").read_bytes(),
        (folder / "model" / "adapter_model.safetensors").read_bytes(),
        config,
    )


ALL_LINEAR = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
OF_FILES: dict[str, tuple[dict[str, Any], tuple[object, ...]]] = {
    "defaults": (ALL_LINEAR, ("--lora-rank", 2)),
    "all-linear": (ALL_LINEAR, ("--lora-rank", 2, "--lora-targets", "all-linear")),
    "names": (
        {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]},
        ("--lora-rank", 3, "--lora-targets", "q_proj", "up_proj", "--lora-alpha", 5),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("method", "name"), each_choice(list(METHODS), list(OF_FILES)))
def test_a_run_is_that_of_the_same_config_in_a_file(method: str, name: str, here: Path) -> None:
    config, options = OF_FILES[name]
    peft.LoraConfig(**config, task_type="CAUSAL_LM").save_pretrained("lora")
    train("filed", *METHODS[method], "--adapter", "lora/adapter_config.json")
    train("named", *METHODS[method], *options)
    assert files("named") == files("filed")
    modules = {
        name.rpartition(".lora_")[0] for name in load_file("named/model/adapter_model.safetensors")
    }
    assert len(modules) == (14 if config["target_modules"] == "all-linear" else 4)


def test_a_run_its_recipe_and_its_adapter_say_what_was_left_out(here: Path) -> None:
    train("run", "--method", "adamw", "--lora-rank", 2)
    recipe = yaml.safe_load(Path("run/recipe.yaml").read_text())
    assert (recipe["lora_rank"], recipe["lora_targets"], recipe["lora_alpha"]) == (2, ["auto"], 4)
    train_recipe("run/recipe.yaml", {"output": "again"})
    assert files("again") == files("run")
    values = {
        "model": "base",
        "data": "rows.jsonl",
        "output": "mapped",
        "lr": 1e-2,
        "lora_rank": 2,
        "method": "adamw",
    }
    train_recipe({**values, "lora_targets": "all-linear", "steps": 3, "batch_size": 3})
    assert files("mapped") == files("run")
    told = refusal("evaluate", "--run", "run", "--data", "rows.jsonl", "--lora-rank", 4)
    assert "--lora-rank: found 4; expected 2, as in the run" in told
    assert "--lora-rank" in refusal("train", "--resume", "run", "--lora-rank", 4)
    assert files("run")[2]["base_model_name_or_path"] == str((here / "base").resolve())
    model = peft.AutoPeftModelForCausalLM.from_pretrained("run/model")
    assert model.peft_config["default"].r == 2


def test_a_classifier_gets_an_adapter_in_its_head_too(here: Path) -> None:
    save_classifier(Path("classifier"))
    write_rows(
        Path("labels.jsonl"), [{"text": "the cat", "label": 0}, {"text": "the dog", "label": 1}]
    )
    common = (
        "--model",
        "classifier",
        "--head",
        "sequence-classification",
        "--data",
        "labels.jsonl",
        "--batch-size",
        2,
    )
    done(
        "train",
        *common,
        "--output",
        "run",
        "--steps",
        2,
        "--lr",
        1e-2,
        "--method",
        "adamw",
        "--lora-rank",
        2,
    )
    names = load_file("run/model/adapter_model.safetensors").keys()
    assert any(".score.lora_B" in name for name in names)
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained("classifier"), "run/model"
    )
    rows = [
        AutoTokenizer.from_pretrained("classifier")(text, return_tensors="pt")
        for text in ("the cat", "the dog")
    ]
    losses = [
        loaded(**row, labels=torch.tensor([label])).loss.item() for label, row in enumerate(rows)
    ]
    told = done("evaluate", "--run", "run", "--data", "labels.jsonl", "--no-base").out
    assert float(told.split()[1].strip(",")) == pytest.approx(sum(losses) / 2, abs=1e-5)


def test_plan_counts_the_adapter_of_either_method_and_tune_tries_rates_for_it(here: Path) -> None:
    common = (
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--batch-size",
        3,
        "--learning-rates",
        1e-5,
        1e-2,
    )
    done(
        "tune",
        *common,
        "--method",
        "adamw",
        "--lora-rank",
        2,
        "--forwards",
        60,
        "--output",
        "tuned",
    )
    table = json.loads(Path("tuned/tune.json").read_bytes())
    done("train", "--resume", "tuned/lr-0.01", "--steps", table["results"][0]["steps"] + 1)
    assert len(load_file("tuned/lr-0.01/model/adapter_model.safetensors")) == 28
    command = (
        "plan",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--json",
        "--lora-rank",
        2,
    )
    zeroth_order, first_order = (
        json.loads(done(*command, *METHODS[method]).out) for method in ("zeroth-order", "adamw")
    )
    assert zeroth_order["write_back_every"] is None, "no block changes"
    assert zeroth_order["model_bytes"] == first_order["model_bytes"]
    without = json.loads(done(*command[:-2]).out)
    assert zeroth_order["model_bytes"] > without["model_bytes"]
