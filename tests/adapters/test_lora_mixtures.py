"""LoRA on mixtures of experts: by default outside the experts, in them where asked, with peft's
bits on the whole model.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done, refusal, write_rows
from engines import memory
from families import LR, batch, small_config, small_model, trained_by_peft
from formats import written
from models import save_tokenizer
from parity import assert_steps_alike
from peft_models import monolithic, values_of
from profiles import each_choice, short_first
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from zo2adapters import Adapter, MonolithicMeZO, open_checkpoint
from zo2adapters.commands.at_step import AtStep
from zo2adapters.models.export import export_merged
from zo2adapters.models.hf import CalledForward
from zo2adapters.models.peft_model import PeftBlockModel
from zo2adapters.models.routed_experts import expected_share
from zo2adapters.tasks.generation import generate
from zo2adapters.trainers.probes import (
    evenly_routed,
    measured_forward_seconds,
    measured_gradient_seconds,
)
from zo2adapters.trainers.run_inputs import BatchShape
from zo2core import Engine, FirstOrder, LowRankPerturbation, MeZOSGD, ZerothOrder
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError

peft: Any = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),  # peft asks for it
    # peft names experts in patterns of modules
    pytest.mark.filterwarnings("ignore:The following:RuntimeWarning"),
]

FAMILIES = [
    *(
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "mixtral",
        "olmoe",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
    ),
    *("minimax", "minimax_m2", "phimoe", "gpt_oss", "llama4_text"),
]
ROUTERS_OF_LINEAR = {"phimoe", "llama4_text"}  # peft would wrap routers whose output is no tensor
DTYPES = [torch.float32, torch.bfloat16]
BUCKETS = [None, 2]


def save(
    family: str, directory: Path, dtype: torch.dtype = torch.float32, *, routers: bool | None = None
) -> Path:
    """A checkpoint, whose config may ask for the routers' loss or not."""
    config = small_config(family)
    if routers is not None:
        config.output_router_logits, config.router_aux_loss_coef = routers, 0.5
    model: Any = small_model(config)
    model.to(dtype).save_pretrained(directory)
    return directory


def stacks(base: Path) -> list[str]:
    """Names of a model's stacked experts."""
    names = (name for name, _ in AutoModelForCausalLM.from_pretrained(base).named_parameters())
    return [name for name in names if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]


def config_of(targets: str, base: Path) -> Any:
    """Peft's config for a choice of layers."""
    own: dict[str, Any] = {
        "target_modules": targets if targets == "all-linear" else targets.split()
    }
    if targets == "experts":  # as one writes it for peft
        own = {
            "target_modules": ["q_proj", "q_b_proj", "qkv_proj"],
            "target_parameters": stacks(base),
        }
    return peft.LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, **own)


def opened(base: Path, targets: str, seed: int = 1) -> PeftBlockModel:
    model = open_checkpoint(base, adapter=Adapter(config=config_of(targets, base), seed=seed))
    assert isinstance(model, PeftBlockModel)
    return model


def whole_model(base: Path) -> Any:
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    for parameter in whole.parameters():
        # what is mapped from a file lies otherwise, and products round differently
        parameter.data = parameter.data.clone()
    return whole.eval()


def learned_as_by_peft(model: Any, base: Path, given: Any, buckets: int | None) -> list[str]:
    """Hold two steps against peft's on the whole model; return the names of what is trained."""
    with Engine(
        model, FirstOrder(partial(torch.optim.SGD, lr=LR)), memory=memory(buckets)
    ) as engine:
        first = {name: value.detach().clone() for name, value in engine.parameters.items()}
        losses = [engine.step(given).loss for _ in range(2)]
        learned = {name: value.clone() for name, value in engine.parameters_now() if name in first}
    expected, trained = trained_by_peft(
        whole_model(base), model.adapter.config, first, given, steps=2
    )
    assert losses == expected
    assert [name for name, value in learned.items() if not torch.equal(value, trained[name])] == []
    return list(learned)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("family", "targets", "dtype", "buckets"),
    [
        *each_choice(FAMILIES, ["auto", "experts", "auto experts", "all-linear"], DTYPES, BUCKETS),
        ("falcon", "auto", torch.float32, 2),  # its linear layers have a class of their own
    ],
)
def test_gradients_are_those_of_peft_on_the_whole_model_and_zeroth_order_steps_on_experts_mezos(
    family: str, targets: str, dtype: torch.dtype, buckets: int | None, tmp_path: Path
) -> None:
    if targets == "all-linear" and family in ROUTERS_OF_LINEAR:
        pytest.skip("peft wraps a router, which then fails")
    base = save(family, tmp_path / "base", dtype)
    names = learned_as_by_peft(opened(base, targets), base, batch(), buckets)
    if targets == "experts":
        model, method = opened(base, targets), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))
        resident = MonolithicMeZO(
            monolithic(base, model.adapter.config, values_of(model)), lr=1e-2, zo_eps=1e-2
        )
        with Engine(model, method, memory=memory(buckets)) as engine:
            for _ in range(2):
                [seed] = {evaluation.seed for evaluation in engine.ask()}
                assert list(engine.step(batch()).losses) == list(
                    resident.step(batch(), seed).losses
                )
    is_in_experts = any(".experts." in name for name in names)
    assert is_in_experts == (
        targets != "auto" and not (targets == "all-linear" and family in ("gpt_oss", "qwen2_moe"))
    )


@pytest.mark.parametrize(("family", "targets"), each_choice(FAMILIES, ["auto", "auto experts"]))
@pytest.mark.few(2)
def test_what_is_exported_loads_in_peft_and_merges_as_peft_does(
    family: str, targets: str, tmp_path: Path
) -> None:
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
    values, whole = values_of(model), AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(7)
    drawn = dict(peft.get_peft_model(whole, config).get_base_model().named_parameters())
    assert [name for name, value in values.items() if not torch.equal(value, drawn[name])] == []
    assert all(bool(value.any()) == ("lora_A" in name) for name, value in values.items())
    assert len(values) > 2 * len(stacks(base))
    with Engine(model) as adapted, Engine(open_checkpoint(base)) as plain:
        assert adapted.evaluate([batch()]).loss == plain.evaluate([batch()]).loss


def test_low_rank_mixed_precision_and_experts_that_a_model_has_not_are_refused(
    tmp_path: Path,
) -> None:
    base = save("qwen3_moe", tmp_path / "base", torch.bfloat16)
    method = ZerothOrder(
        MeZOSGD(lr=1e-2, zo_eps=1e-2), perturbation=LowRankPerturbation(rank=2, period=2)
    )
    with pytest.raises(UnsupportedModelError, match="LoRA of experts with low-rank perturbations"):
        Engine(opened(base, "experts"), method)
    for targets in ("experts", "all-linear"):
        with pytest.raises(OptionError, match="mixed with LoRA of experts"):
            open_checkpoint(
                base, adapter=Adapter(config=config_of(targets, base)), precision="mixed"
            )
    with pytest.raises(OptionError, match="llama does not have as stacks"):
        opened(save("llama", tmp_path / "llama"), "auto experts")


def test_the_command_line_says_which_layers_it_adapts(tmp_path: Path) -> None:
    base = save("deepseek_v3", tmp_path / "base")
    save_tokenizer(base)
    write_rows(tmp_path / "rows.jsonl", [{"text": "the cat sat on the mat"}, {"text": "the dog"}])
    common = (
        "--model",
        base,
        "--data",
        tmp_path / "rows.jsonl",
        "--steps",
        1,
        "--lr",
        1e-3,
        "--method",
        "adamw",
    )
    attention = "q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj"
    for targets, named in (
        ([], attention),
        (["--lora-targets", "auto", "experts"], f"{attention}, experts"),
    ):
        output = tmp_path / f"run-{len(targets)}"
        ended = done(
            "train",
            "--method",
            "zeroth-order",
            *common,
            "--lora-rank",
            2,
            *targets,
            "--output",
            output,
        )
        assert f"LoRA of {named}\n" in ended.err
        config = json.loads((output / "model" / "adapter_config.json").read_bytes())
        assert config["target_parameters"] == (
            ["experts.down_proj", "experts.gate_up_proj"] if targets else []
        )
    refused = refusal(
        "train",
        "--method",
        "zeroth-order",
        *common,
        "--lora-rank",
        2,
        "--lora-targets",
        "auto",
        "q_proj",
        "--output",
        tmp_path / "none",
    )
    assert "auto experts, or names of layers" in refused


ROUTED = [
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "olmoe",
    "minimax",
    "phimoe",
    "granitemoe",
    "qwen3_next",
    "jamba",
]


def padded_batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[3, 9, 4, 11, 5, 6], [7, 8, 10, 12, 0, 0]])
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.few(4)
@pytest.mark.parametrize(("family", "dtype", "buckets"), each_choice(ROUTED, DTYPES, BUCKETS))
def test_steps_have_the_routers_share(
    family: str, dtype: torch.dtype, buckets: int | None, tmp_path: Path
) -> None:
    base = save(family, tmp_path / "base", dtype, routers=True)
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    learned_as_by_peft(
        open_checkpoint(base, adapter=Adapter(config=config, seed=1)), base, padded_batch(), buckets
    )
    resident = MonolithicMeZO(whole_model(base), lr=1e-2, zo_eps=1e-2)
    with Engine(
        open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2)), memory=memory(buckets)
    ) as engine:
        assert_steps_alike(engine, resident, [padded_batch()] * 2)


def whole_loss(base: Path, batch: dict[str, torch.Tensor], **asked: bool) -> float:
    loss: torch.Tensor = whole_model(base)(**batch, **asked, use_cache=False).loss
    return loss.item()


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("precision", ["exact", "mixed"])
def test_an_evaluation_is_without_the_routers_share_in_batches_of_any_size(
    family: str, precision: str, tmp_path: Path
) -> None:
    base, given = save(family, tmp_path / "base", routers=True), padded_batch()
    whole = whole_loss(base, given, output_router_logits=False)
    assert whole_loss(base, given) > whole + 0.1
    rows = [{key: value[row : row + 1] for key, value in given.items()} for row in range(2)]
    with Engine(open_checkpoint(base, precision=precision)) as engine:
        evaluated = engine.evaluate([given])
        near = 1e-6 if precision == "exact" else 0.02
        assert evaluated.loss == pytest.approx(whole, rel=near)
        assert engine.evaluate(rows).loss == pytest.approx(evaluated.loss, rel=near)


def test_a_loss_without_that_of_the_routers_is_never_taken_for_it(tmp_path: Path) -> None:
    # a family that ignores the setting
    base = save("deepseek_v3", tmp_path / "ignored", routers=True)
    with Engine(open_checkpoint(base)) as engine:
        assert engine.evaluate([padded_batch()]).loss == whole_loss(base, padded_batch())
    asked, silent = (
        save("qwen3_moe", tmp_path / str(asks), routers=asks) for asks in (True, False)
    )
    assert open_checkpoint(asked).description != open_checkpoint(silent).description
    assert open_checkpoint(asked, precision="mixed").loss_chunk is None
    with pytest.raises(OptionError, match="output_router_logits is true"):
        open_checkpoint(asked, loss_chunk=4)
    low_rank = ZerothOrder(
        MeZOSGD(lr=1e-2, zo_eps=1e-2), perturbation=LowRankPerturbation(rank=2, period=2)
    )
    adapter = Adapter(config=peft.LoraConfig(r=2, target_modules=["o_proj"]), seed=1)
    with pytest.raises(OptionError, match="output_router_logits is true"):
        Engine(open_checkpoint(asked, adapter=adapter), low_rank)


UNMOVED = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-12))  # losses are those of the weights


@pytest.mark.parametrize("loss_chunk", [None, 4])
def test_a_step_has_the_routers_share_if_the_config_asks_for_it_then(
    loss_chunk: int | None, tmp_path: Path
) -> None:
    base = save("qwen3_moe", tmp_path / "base", routers=False)
    model = open_checkpoint(base, loss_chunk=loss_chunk)
    with Engine(model, UNMOVED) as engine:
        for asks in (False, True, False):
            model.config.output_router_logits = asks
            expected = whole_loss(base, padded_batch(), output_router_logits=asks)
            assert engine.step(padded_batch()).loss == pytest.approx(expected, rel=1e-6)


WITH, WITHOUT = {"output_router_logits": True}, {"output_router_logits": False}


def called_losses(model: Any, *calls: dict[str, bool]) -> list[float]:
    """The loss of a function that calls the model with each of these arguments, and adds up."""

    def loss(called: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([called(**inputs, **asked).loss for asked in calls]).sum()

    with Engine(model, UNMOVED) as engine:
        return [engine.step(padded_batch(), CalledForward(model, loss)).loss]


@pytest.mark.parametrize("routers", [True, False])
def test_a_called_model_has_the_routers_loss_that_the_call_or_else_the_config_asks_for(
    routers: bool, tmp_path: Path
) -> None:
    base = save("qwen3_moe", tmp_path / "base", routers=routers)
    for calls in ((WITH,), (WITHOUT,), ({},), (WITH, WITHOUT)):
        model = open_checkpoint(base)
        expected = sum(whole_loss(base, padded_batch(), **asked) for asked in calls)
        assert called_losses(model, *calls) == pytest.approx([expected], rel=1e-6)
        assert model._recorder.at_end is None, "the logits would stay in memory"


def test_a_function_is_evaluated_without_the_routers_loss_that_it_does_not_ask_for(
    tmp_path: Path,
) -> None:
    base, given = save("qwen3_moe", tmp_path / "base", routers=True), padded_batch()
    for asked in ({}, WITH):

        def loss(called: Any, inputs: dict[str, torch.Tensor], asked: Any = asked) -> torch.Tensor:
            value: torch.Tensor = called(**inputs, **asked).loss
            return value

        model = open_checkpoint(base)
        with Engine(model) as engine:
            [[value]] = engine.forwards([given], CalledForward(model, loss, evaluates=True))
        expected = whole_loss(base, given, **(asked or WITHOUT))
        assert value.item() == pytest.approx(expected, rel=1e-6)


def test_a_call_for_a_routers_loss_that_a_model_has_not_or_not_in_each_call_is_refused(
    tmp_path: Path,
) -> None:
    ignoring = open_checkpoint(save("deepseek_v3", tmp_path / "ignoring"))
    told = "output_router_logits: found true, for the model type deepseek_v3; .* leave it out"
    with pytest.raises(UnsupportedModelError, match=told):
        called_losses(ignoring, WITH)
    model = open_checkpoint(save("qwen3_moe", tmp_path / "base"))
    with pytest.raises(UnsupportedModelError, match="found True in a second call"):
        called_losses(model, WITHOUT, WITH)


READ = ["qwen3_moe", "mixtral", "deepseek_v3", "granitemoe", "qwen3_next"]
FORMATS = ["bfloat16", "nf4", "fp8", "awq"]


def save_in(family: str, form: str, folder: Path) -> Path:
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
        loss = engine.evaluate(
            [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}]
        ).loss
    assert experts is None or experts.kept_bytes <= experts.capacity
    return tokens, loss


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *each_choice(READ, FORMATS),
        ("gpt_oss", "mxfp4"),
        ("gpt_oss", "bfloat16"),
        ("gpt_oss", "nf4"),
    ],
)
def test_bits_are_those_of_reading_all_experts(family: str, form: str, tmp_path: Path) -> None:
    path = save_in(family, form, tmp_path)
    expected = outcome(path, None)
    assert [outcome(path, capacity) for capacity in (0, 20_000, 1 << 30)] == [expected] * 3


def test_what_was_used_last_stays_and_is_not_read_again(tmp_path: Path) -> None:
    model = open_checkpoint(save_in("qwen3_moe", "bfloat16", tmp_path))
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
    path = save_in("qwen3_moe", "bfloat16", tmp_path)

    def routed() -> Any:
        model = open_checkpoint(path)
        assert model.route(tokens=1) is not None
        return model

    with pytest.raises(OptionError, match="all parameters in its segments"):
        Engine(routed(), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3)))
    with pytest.raises(OptionError, match="all parameters in its segments"):
        Engine(routed(), journal=tmp_path / "journal.jsonl")
    with (
        Engine(routed()) as engine,
        pytest.raises(OptionError, match="all parameters in its segments"),
    ):
        engine.export(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_commands_that_generate_keep_experts_in_the_memory_that_is_left(tmp_path: Path) -> None:
    at = AtStep(model=str(save_in("qwen3_moe", "bfloat16", tmp_path))).resolved()
    for tokens, is_routed in ((1, True), (64, False), (None, False)):
        model = at.open_model()
        with at.engine(model, tokens=tokens) as engine:
            assert (model.experts is not None) == is_routed
            if model.experts is not None:
                assert engine.host_plan is not None
                assert model.experts.capacity == engine.host_plan.spare > 0


def test_many_tokens_and_models_without_routed_experts_read_all_ahead(tmp_path: Path) -> None:
    path = save_in("qwen3_moe", "bfloat16", tmp_path)  # 2 of 4 experts a token
    assert open_checkpoint(path).route(tokens=1) is not None
    assert open_checkpoint(path).route(tokens=2) is None
    assert expected_share(128, 8, 1) == 8 / 128
    assert 0.98 < expected_share(128, 8, 64) < 0.99
    for family in ("llama", "llama4_text"):  # a dense one, and one whose experts see all tokens
        opened = open_checkpoint(save(family, tmp_path / family))
        layouts = opened.layouts
        assert opened.route(tokens=1) is None
        assert opened.layouts == layouts


def test_an_expert_that_is_not_finite_or_ends_early_is_named(tmp_path: Path) -> None:
    path = save_in("qwen3_moe", "bfloat16", tmp_path)
    broken = Path(shutil.copytree(path, tmp_path / "broken"))
    save_tokenizer(broken)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if ".experts." in name)
    nan = {
        key: torch.full_like(value, torch.nan) if ".experts." in key else value
        for key, value in tensors.items()
    }
    save_file(nan, broken / "model.safetensors", {"format": "pt"})
    assert name.rsplit(".experts.")[0] in refusal(
        "generate", "--model", broken, "--prompt", "the cat"
    )
    model = open_checkpoint(path)
    assert model.route(tokens=1) is not None
    with Engine(model) as engine:
        shard = path / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-20_000])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            list(generate(engine, model, [[5, 6, 7]], max_new_tokens=2))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "olmoe", "qwen3_moe"])
def test_a_planned_run_learns_experts_in_the_first_block_by_gradients(
    family: str, tmp_path: Path
) -> None:
    save_tokenizer(save(family, tmp_path / "base"))
    write_rows(tmp_path / "rows.jsonl", [{"text": "the cat sat"}, {"text": "the dog ran is"}])
    done(
        *(
            "train",
            "--method",
            "zeroth-order",
            "--model",
            tmp_path / "base",
            "--data",
            tmp_path / "rows.jsonl",
        ),
        *("--output", tmp_path / "run", "--method", "sgd", "--lr", 1, "--steps", 2),
        *("--lora-rank", 2, "--lora-targets", "auto", "experts", "--batch-size", 2),
    )
    learned = load_file(tmp_path / "run/model/adapter_model.safetensors")
    experts = {name: value for name, value in learned.items() if "experts" in name}
    assert {int(name.split(".layers.")[1][0]) for name in experts} >= {0}
    assert [name for name, value in experts.items() if "lora_B" in name and not value.any()] == []
    model = opened(tmp_path / "base", "auto experts")
    measured = measured_gradient_seconds(model, BatchShape(2, 4, 8), running=None)
    assert 0 < measured.forward < measured.both


def test_probes_route_tokens_to_all_experts(tmp_path: Path) -> None:
    model = open_checkpoint(save_in("qwen3_moe", "bfloat16", tmp_path))
    chosen: list[int] = []
    with evenly_routed(model):
        (experts,) = {
            module
            for spec in model.layouts[1].parameters
            for _, module, _ in model.places_of(spec.name)[:1]
            if len(spec.shape) == 3
        }
        experts.register_forward_pre_hook(
            lambda module, arguments: chosen.extend(arguments[1].unique().tolist())
        )
        assert measured_forward_seconds(model, BatchShape(2, 4, 8)) > 0
    assert set(chosen) == {0, 1, 2, 3}
