"""``transformers.Trainer`` and TRL's with first-order steps: the bits are those of the trainer
alone on peft's model.
"""

import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from engines import assert_equal, memory
from models import WORDS, save_classifier, save_model, save_tokenizer, small_config
from peft_models import lora, monolithic, values_of
from profiles import each_choice
from trainers import OF_TRL, ROWS, Smoothed, trainer_options
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from whole_loops import adalomo_loop, lomo_loop

from zo2adapters import (
    Adapter,
    FullBackpropTrainerMixin,
    StreamedArguments,
    StreamedGRPOMixin,
    StreamedTrainerMixin,
    open_checkpoint,
)
from zo2adapters.models.peft_adapter import is_of_adapter
from zo2adapters.tasks.generation import Generation, Sampling
from zo2core import LOMO, Engine, FirstOrder, HostPlan, MemoryPolicy, TorchOptimizer
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError
from zo2core.optimizers.adapter_and_base import AdapterAndBase

datasets = pytest.importorskip("datasets")
peft: Any = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

pytestmark = OF_TRL

ONE_BLOCK = memory(1)  # the others are read from disk in each sweep
NOUNS = WORDS[3:]
PREFERENCES = [
    {
        "prompt": " ".join(NOUNS[i % 5 : i % 5 + 3]),
        "chosen": f" {NOUNS[i % 4]}",
        "rejected": f" {NOUNS[(i * 5 + 1) % 7]}",
    }
    for i in range(12)
]


@dataclass(frozen=True, kw_only=True)
class WithPolicy(StreamedArguments):
    """Arguments with a plan in place of limits of memory."""

    policy: MemoryPolicy

    def memory_policy(self) -> MemoryPolicy:
        return self.policy


def mixed_in(trainer: Any, mixin: type[Any] = StreamedTrainerMixin) -> Any:
    return type(f"FirstOrder{trainer.__name__}", (mixin, trainer), {})


class SmoothedTrainer(Smoothed, Trainer):
    pass


FirstOrderTrainer = mixed_in(Trainer)


def opened(base: Path) -> Any:
    return open_checkpoint(base, adapter=Adapter(config=lora(), seed=5))


def whole(base: Path) -> Any:
    return monolithic(base, lora(), values_of(opened(base)), ())


def made(kind: type[Any], model: Any, output: Path, **changes: Any) -> Any:
    given = (
        {"streamed": WithPolicy(policy=ONE_BLOCK)} if issubclass(kind, StreamedTrainerMixin) else {}
    )
    return kind(
        model=model,
        args=TrainingArguments(**trainer_options(output, **changes)),
        train_dataset=ROWS,
        eval_dataset=ROWS[:5],
        **given,
    )


def values_now(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.engine.parameters_now()}


def assert_alike(ours: Any, stock: Any) -> None:
    """Hold parameters, logged losses, norms and learning rates against each other."""
    trained = dict(stock.model.named_parameters())
    for name, value in ours.engine.parameters_now():
        same = trained[name if name in trained else f"base_model.model.{name}"]
        assert torch.equal(value, same), name
    rows = [
        [row for row in trainer.state.log_history if "loss" in row] for trainer in (ours, stock)
    ]
    for key in ("loss", "grad_norm", "learning_rate"):
        expected = [row.get(key) for row in rows[1]]
        if None not in expected:  # loops that are written out log no norms
            assert [row[key] for row in rows[0]] == pytest.approx(expected, rel=1e-6), key


CHANGES: list[dict[str, Any]] = [
    {},
    {"optim": "sgd", "max_grad_norm": 0.05},
    {"gradient_accumulation_steps": 3, "max_steps": 3, "lr_scheduler_type": "cosine"},
    {"optim": "adafactor", "max_grad_norm": 0.0},
]


@pytest.mark.parametrize(("kind", "changes"), each_choice([Trainer, SmoothedTrainer], CHANGES))
def test_a_run_is_that_of_the_trainer_alone(
    base: Path, tmp_path: Path, kind: type[Any], changes: dict[str, Any]
) -> None:
    ours = made(mixed_in(kind), opened(base), tmp_path / "run", **changes)
    stock = made(kind, whole(base), tmp_path / "stock", **changes)
    ours.train()
    stock.train()
    assert_alike(ours, stock)
    assert ours.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]


COMPLETIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PREFERENCES]
TRL: dict[str, tuple[Any, Any, list[Any]]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, COMPLETIONS),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, PREFERENCES),
    "reward": (trl.RewardTrainer, trl.RewardConfig, PREFERENCES),
}


def of_trl(
    name: str, model: Any, output: Path, *, mixin: type[Any] | None = None, **changes: Any
) -> Any:
    """One of TRL's trainers, as it is or with a mixin; changes are of its arguments, but for
    the adapter's config.
    """
    kind, config, rows = TRL[name]
    given = {key: changes.pop(key) for key in ("peft_config",) if key in changes}
    args = config(**trainer_options(output, max_length=16, **changes))
    made = kind if mixin is None else mixed_in(kind, mixin)
    return made(model=model, args=args, train_dataset=datasets.Dataset.from_list(rows), **given)


@pytest.fixture(scope="module")
def rewarding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("rewarding") / "base", labels=1)


@pytest.mark.parametrize(
    ("name", "bf16"), [("sft", False), ("sft", True), ("dpo", False), ("reward", False)]
)
def test_a_run_from_one_seed_is_that_of_trls_trainer_as_it_is(
    name: str, bf16: bool, base: Path, rewarding: Path, tmp_path: Path
) -> None:
    """First values and the order of rows follow from the seed. With TRL's default bf16=True the
    weights are float32, and autocast computes in bfloat16.
    """
    path, changes = str(rewarding if name == "reward" else base), dict[str, Any](bf16=bf16)
    changes |= {"train_sampling_strategy": "random", "seed": 3, "max_steps": 4}
    changes |= {"peft_config": lora()}
    ours, stock = (
        of_trl(name, path, tmp_path / str(mixin), mixin=mixin, **changes)
        for mixin in (StreamedTrainerMixin, None)
    )
    ours.train()
    stock.train()
    assert_alike(ours, stock)


def test_a_path_is_opened_in_the_dtype_in_which_trl_opens_it(tmp_path: Path) -> None:
    """By default in float32, whatever the checkpoint is in."""
    base = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16)
    save_tokenizer(base)
    for given in (None, {"dtype": "auto", "trust_remote_code": False}):
        changes = dict[str, Any](model_init_kwargs=given, max_steps=2, peft_config=lora())
        ours, stock = (
            of_trl("sft", str(base), tmp_path / str(mixin), mixin=mixin, **changes)
            for mixin in (StreamedTrainerMixin, None)
        )
        ours.train()
        stock.train()
        assert_alike(ours, stock)


def test_dpo_is_evaluated_on_other_rows_after_training(base: Path, tmp_path: Path) -> None:
    rows, results = datasets.Dataset.from_list(PREFERENCES[:5]), []
    for mixin in (StreamedTrainerMixin, None):
        trainer = of_trl(
            "dpo", str(base), tmp_path / str(mixin), mixin=mixin, max_steps=2, peft_config=lora()
        )
        trainer.train()
        results.append(trainer.evaluate(rows))
    for name in ("eval_loss", "eval_rewards/margins", "eval_logps/chosen"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5), name


def test_rows_that_need_a_lost_reference_and_rows_with_images_are_refused(
    base: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"optim": "sgd", "max_steps": 1, "mixin": FullBackpropTrainerMixin}
    trainer = of_trl("dpo", str(base), tmp_path / "run", **options)
    assert trainer.args.precompute_ref_log_probs
    trainer.train()
    with pytest.raises(OptionError, match="pass these rows as eval_dataset"):
        trainer.evaluate(datasets.Dataset.from_list(PREFERENCES[:5]))
    args = trl.DPOConfig(**trainer_options(tmp_path))
    rows = datasets.Dataset.from_list([{**row, "images": []} for row in PREFERENCES])
    with pytest.raises(OptionError, match="train_dataset: found rows with images"):
        mixed_in(trl.DPOTrainer)(str(base), args=args, train_dataset=rows, peft_config=lora())
    rows = rows.remove_columns("images")
    mixed_in(trl.DPOTrainer)(str(base), args=args, train_dataset=rows, peft_config=lora())
    assert not args.precompute_ref_log_probs, "the caller's arguments stay as they are"


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_arguments_may_be_left_out_as_in_trl(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, config, rows = TRL[name]

    class OnCPU(config):  # type: ignore[misc, valid-type]
        def __init__(self, output_dir: str) -> None:
            super().__init__(output_dir, use_cpu=True, bf16=False, report_to="none")

    monkeypatch.setattr(sys.modules[kind.__module__], config.__name__, OnCPU)
    monkeypatch.chdir(tmp_path)
    made = [
        each(str(base), train_dataset=datasets.Dataset.from_list(rows), peft_config=lora())
        for each in (mixed_in(kind), kind)
    ]
    assert made[0].args.output_dir == made[1].args.output_dir == f"base-{name.upper()}"
    assert type(made[0].args) is type(made[1].args)
    stock = dict(made[1].model.named_parameters())
    for parameter, value in made[0].engine.parameters.items():
        assert torch.equal(value, stock[f"base_model.model.{parameter}"]), parameter


def test_a_file_with_a_chat_template_is_taken_and_another_tokenizers_is_refused(
    base: Path, tmp_path: Path
) -> None:
    template = tmp_path / "short.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    given: dict[str, Any] = {"mixin": StreamedTrainerMixin, "peft_config": lora()}
    made = of_trl("sft", str(base), tmp_path / "run", chat_template_path=str(template), **given)
    assert made.processing_class.chat_template == template.read_text()
    with pytest.raises(OptionError, match=r"chat_template_path: .* ends in \.jinja or \.j2"):
        of_trl("sft", str(base), tmp_path / "run", chat_template_path=str(base), **given)


@pytest.mark.parametrize(
    ("given", "bf16", "told"),
    [
        ({"attn_implementation": "eager"}, False, r"model_init_kwargs\['attn_implementation'\]"),
        ({"trust_remote_code": True}, False, r"model_init_kwargs\['trust_remote_code'\]"),
        ({"dtype": "bfloat16"}, True, r"model_init_kwargs\['dtype'\]: .* bf16=False"),
        ({"dtype": "float3"}, False, "dtype: found 'float3'"),
    ],
)
def test_other_options_of_loading_a_model_are_refused_by_name(
    given: dict[str, Any], bf16: bool, told: str, base: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"model_init_kwargs": given, "bf16": bf16, "peft_config": lora()}
    with pytest.raises(OptionError, match=told):
        of_trl("sft", str(base), tmp_path / "run", mixin=StreamedTrainerMixin, **asked)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Two mixtures with the same weights, by whether the config asks for the routers' loss."""
    folder, found = tmp_path_factory.mktemp("mixtures"), dict[bool, Path]()
    for asks in (False, True):
        config: Any = families.small_config("qwen3_moe")
        config.output_router_logits, config.router_aux_loss_coef = asks, 0.5
        found[asks] = folder / str(asks)
        families.small_model(config).save_pretrained(found[asks])
        save_tokenizer(found[asks])
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "asks", "coefficient"), each_choice(["sft", "dpo"], [False, True], [None, 0.0, 0.1])
)
def test_the_trainers_coefficient_decides_about_the_loss_of_routers(
    name: str, asks: bool, coefficient: float | None, mixtures: dict[bool, Path], tmp_path: Path
) -> None:
    changes = dict[str, Any](router_aux_loss_coef=coefficient, max_steps=2)
    changes |= {"peft_config": peft.LoraConfig(r=2, target_modules=["o_proj"])}
    ours, stock = (
        of_trl(name, str(mixtures[asks]), tmp_path / str(mixin), mixin=mixin, **changes)
        for mixin in (StreamedTrainerMixin, None)
    )
    ours.train()
    stock.train()
    assert_alike(ours, stock)
    logged = [trainer.state.log_history[0].get("aux_loss", 0.0) for trainer in (ours, stock)]
    assert logged[0] == pytest.approx(logged[1], rel=1e-6)
    assert bool(logged[1]) == (coefficient != 0.0)


def test_a_loss_of_routers_that_a_model_has_not_is_refused_when_the_trainer_is_made(
    tmp_path: Path,
) -> None:
    config: Any = families.small_config("deepseek_v3")
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    families.small_model(config).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    told = r"router_aux_loss_coef: found 0\.5, .*deepseek_v3.* pass router_aux_loss_coef=0\.0"
    given: dict[str, Any] = {
        "mixin": StreamedTrainerMixin,
        "peft_config": lora(target_modules=["o_proj"]),
    }
    with pytest.raises(UnsupportedModelError, match=told):
        of_trl("dpo", str(tmp_path / "base"), tmp_path / "run", **given)


IN_MEMORY = WithPolicy(policy=memory(), method="adamw")


FullTrainer = mixed_in(Trainer, FullBackpropTrainerMixin)
FAMILIES = ["llama", "opt"]


@pytest.fixture(scope="module", params=FAMILIES)
def of_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(
        tmp_path_factory.mktemp("trainer") / "of_family", small_config(request.param)
    )
    save_tokenizer(directory)
    return directory


def options(output: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**trainer_options(output, **changes))


def full(of_family: Path, output: Path, **changes: Any) -> Any:
    args = options(output, **changes)
    return FullTrainer(
        model=of_family, args=args, train_dataset=ROWS, eval_dataset=ROWS[:5], streamed=IN_MEMORY
    )


def whole_stock(of_family: Path, output: Path, **changes: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(of_family)
    model.eval()
    for parameter in model.parameters():
        # what is mapped from a file may lie unaligned, and round otherwise
        parameter.data = parameter.data.clone()

    class Plain(Trainer):
        def training_step(self, model: Any, *given: Any, **named: Any) -> Any:
            real, model.train = model.train, lambda *_: model  # no dropout
            try:
                return super().training_step(model, *given, **named)
            finally:
                model.train = real

    return Plain(
        model=model, args=options(output, **changes), train_dataset=ROWS, eval_dataset=ROWS[:5]
    )


FULL_CHANGES: list[dict[str, Any]] = [
    {},
    {"optim": "adamw_torch", "max_grad_norm": 0.05},
    {"optim": "sgd", "max_grad_norm": 0.0, "gradient_accumulation_steps": 3, "max_steps": 3},
    {"optim": "adamw_torch_fused", "adam_beta2": 0.95, "lr_scheduler_type": "cosine"},
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("of_family", "changes"), each_choice(FAMILIES, FULL_CHANGES), indirect=["of_family"], ids=str
)
def test_all_parameters_are_those_of_the_trainer_alone(
    of_family: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer, other = (
        full(of_family, tmp_path / "run", **changes),
        whole_stock(of_family, tmp_path / "whole_stock", **changes),
    )
    trainer.train()
    other.train()
    assert_alike(trainer, other)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(other.evaluate()["eval_loss"], rel=1e-6)
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in trainer.engine.parameters_now())


LOOPS = {"lomo": lomo_loop, "adalomo": adalomo_loop}


@pytest.mark.parametrize(
    ("of_family", "optim"), each_choice(FAMILIES, list(LOOPS)), indirect=["of_family"]
)
def test_fused_optimizers_have_the_bits_of_their_loops(
    of_family: Path, optim: str, tmp_path: Path
) -> None:
    trainer = full(of_family, tmp_path / "run", optim=optim, max_grad_norm=0.5)
    other = whole_stock(of_family, tmp_path / "whole_stock", max_grad_norm=0.0)

    class Whole:
        """The parameters of the trainer's model, as the written-out loops want them."""

        def __init__(self) -> None:
            self.parameters = dict(other.model.named_parameters())

        def gradients(self) -> dict[str, torch.Tensor]:
            return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    written_out = LOOPS[optim](Whole(), 0.1, None, 0.5)  # type: ignore[arg-type]

    class Written(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            written_out(self.param_groups[0]["lr"])

    other.optimizer = Written(list(other.model.parameters()), lr=1e-2)
    trainer.train()
    other.train()
    assert_alike(trainer, other)


def of_adapter(base: Path, output: Path, **changes: Any) -> Any:
    return made(FirstOrderTrainer, opened(base), output, **changes)


BASE_LR = 5e-2


def of_both(base: Path, output: Path, **changes: Any) -> Any:
    """An adapter and the base under it."""
    return FirstOrderTrainer(
        model=base,
        args=options(output, **changes),
        train_dataset=ROWS,
        eval_dataset=ROWS[:5],
        peft_config=lora(),
        streamed=WithPolicy(policy=memory(), method="lora+lomo", base_lr=BASE_LR),
    )


def test_an_adapter_and_its_base_have_the_bits_of_the_engines_own_steps(
    base: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"optim": "adamw_torch", "adam_beta2": 0.95, "max_grad_norm": 0.05}
    trainer = of_both(base, tmp_path / "run", **given)
    trainer.train()
    # a warm-up of two steps, then linear to 0 at step 6
    factors = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    update = AdapterAndBase(
        TorchOptimizer(partial(torch.optim.AdamW, weight_decay=0.1, betas=(0.9, 0.95))),
        LOMO(weight_decay=0.1),
        base_lr=lambda step: BASE_LR * factors[step],
        is_of_adapter=is_of_adapter,
    )
    method = FirstOrder(update, lr=lambda step: 1e-2 * factors[step], clip=0.05)
    adapter = Adapter(config=lora(), seed=42, trains_base=True)
    with Engine(open_checkpoint(base, adapter=adapter), method) as engine:
        for start in range(0, 12, 2):
            batch = {key: torch.stack([row[key] for row in ROWS[start:][:2]]) for key in ROWS[0]}
            engine.step(batch)
        for _ in range(2):  # the second time files are replaced
            trainer.save_model(tmp_path / "saved")
        expected = {name: value.clone() for name, value in engine.parameters_now()}
    assert_equal(values_now(trainer), expected)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "base")
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "saved" / "adapter")
    saved = {
        name.removeprefix("base_model.model."): value for name, value in loaded.named_parameters()
    }
    assert_equal({name: saved[name] for name in expected}, expected)
    of_base = loaded.peft_config["default"].base_model_name_or_path
    assert of_base == str(tmp_path / "saved" / "base")


EACH = pytest.mark.parametrize("make", [of_adapter, full, of_both])


@EACH
def test_a_resumed_run_is_the_one_that_was_not_interrupted(
    make: Any, base: Path, tmp_path: Path
) -> None:
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole, again = (make(base, tmp_path / "run", **saved) for _ in range(2))
    middle = tmp_path / "run" / "checkpoint-4"
    whole.train()
    again.train(resume_from_checkpoint=str(middle))
    assert again.state.global_step == 6
    expected = values_now(whole)
    assert all(torch.equal(value, expected[name]) for name, value in values_now(again).items())
    if make is not of_adapter:
        assert again.engine.version == 6
        (snapshot,) = middle.glob("snapshot-*.safetensors")
        snapshot.unlink()
        with pytest.raises(CheckpointError):
            make(base, tmp_path / "run", **saved).train(resume_from_checkpoint=str(middle))


@EACH
def test_the_best_model_is_loaded_at_the_end_and_peft_loads_adapters(
    make: Any, base: Path, tmp_path: Path
) -> None:
    saved: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    ours = make(base, tmp_path / "run", **saved, load_best_model_at_end=True, learning_rate=0.5)
    ours.train()
    losses = {row["step"]: row["eval_loss"] for row in ours.state.log_history if "eval_loss" in row}
    assert ours.evaluate()["eval_loss"] == pytest.approx(min(losses.values()), rel=1e-6)
    if make is not of_adapter:
        return
    for _ in range(2):  # the second time files are replaced
        ours.save_model(tmp_path / "saved")
    for directory in (Path(ours.state.best_model_checkpoint), tmp_path / "saved"):
        loaded = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), directory
        )
        values = {
            name.removeprefix("base_model.model."): value
            for name, value in loaded.named_parameters()
        }
        for name, value in ours.engine.parameters.items():
            assert torch.equal(value, values[name]), name
    assert not (tmp_path / "saved" / "model.safetensors").exists()


def mixed(dtype: str) -> Any:
    return lambda base: open_checkpoint(
        base, adapter=Adapter(config=lora()), precision="mixed", dtype=dtype
    )


def test_models_of_the_precision_that_is_asked_for_are_taken(base: Path, tmp_path: Path) -> None:
    exact = open_checkpoint(base, adapter=Adapter(config=lora(use_dora=True)), dtype="bfloat16")
    taken = [
        (mixed("bfloat16")(base), {"bf16": True}),
        (mixed("float16")(base), {"fp16": True}),
        (exact, {}),
    ]
    for model, asked in taken:
        FirstOrderTrainer(model=model, args=options(tmp_path, **asked))
    trainer = made(FirstOrderTrainer, open_checkpoint(base), tmp_path)
    with pytest.raises(OptionError, match="a trained parameter of a block"):
        trainer.train()


OF_ZEROTH_ORDER = re.compile(r"estimator|MeZO|projected|all parameters")
REFUSED: list[tuple[type[Any], Any, dict[str, Any], str]] = [
    (
        FirstOrderTrainer,
        opened,
        {"bf16": True},
        r"bf16=False, fp16=False, or .*precision='mixed', dtype='bfloat16'",
    ),
    (
        FirstOrderTrainer,
        mixed("float16"),
        {"bf16": True},
        r"bf16=False, fp16=True, or .*='mixed', dtype='bfloat16'",
    ),
    (FirstOrderTrainer, mixed("bfloat16"), {}, r"bf16=True, fp16=False, or .*precision='exact'"),
    (
        FirstOrderTrainer,
        str,
        {"bf16": True, "peft_config": lora(use_dora=True)},
        r"bf16, fp16: found mixed with DoRA; .*bf16=False, fp16=False.*dtype='bfloat16'",
    ),
    (FirstOrderTrainer, opened, {"auto_find_batch_size": True}, ""),
    (FirstOrderTrainer, opened, {"optim_target_modules": "all-linear"}, ""),
    (FirstOrderTrainer, opened, {"deepspeed": {}, "fsdp": "full_shard"}, ""),
    (FirstOrderTrainer, opened, {"optimizers": (object(), None)}, ""),
    (FirstOrderTrainer, opened, {"torch_compile": True}, "torch_compile"),
    (
        FirstOrderTrainer,
        opened,
        {"peft_config": lora()},
        "peft_config: found one with an opened PeftBlockModel",
    ),
    (FirstOrderTrainer, str, {}, "peft_config: found none"),
    (FullTrainer, str, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    (FullTrainer, str, {"torch_compile": True}, "torch_compile"),
    (
        FullTrainer,
        str,
        {"peft_config": lora(), "streamed": StreamedArguments(method="lomo")},
        "method: found lomo; expected lora, or adamw or sgd, for an adapter",
    ),
    (FullTrainer, str, {"optimizers": (object(), None)}, "optim names the optimizer"),
    (
        FirstOrderTrainer,
        opened,
        {"streamed": StreamedArguments(method="lora+lomo", base_lr=1e-3)},
        r"model: found a base that is only read; .*trains_base=True",
    ),
    (
        FirstOrderTrainer,
        open_checkpoint,
        {"streamed": StreamedArguments(method="lora+lomo", base_lr=1e-3)},
        r"model: found no adapter; .*trains_base=True",
    ),
    (
        FirstOrderTrainer,
        lambda base: open_checkpoint(base, adapter=Adapter(config=lora(), trains_base=True)),
        {},
        r"model: found a base that is trained beside its adapter; .*method='lora\+lomo'",
    ),
    (
        FirstOrderTrainer,
        lambda base: open_checkpoint(base, adapter=Adapter(config=lora(), trains_base=True)),
        {"streamed": StreamedArguments(method="zeroth-order")},
        r"model: found a base that is trained beside its adapter; .*method='lora\+lomo'",
    ),
    (FullTrainer, str, {"optimizer_cls_and_kwargs": (object, {})}, "optim names the optimizer"),
]


@pytest.mark.parametrize(
    ("kind", "model", "given", "told"), REFUSED, ids=map(str, range(len(REFUSED)))
)
def test_what_cannot_be_heeded_is_refused_with_what_applies(
    kind: type[Any], model: Any, given: dict[str, Any], told: str, base: Path, tmp_path: Path
) -> None:
    args = options(tmp_path)
    for name in given.keys() & vars(args).keys():
        # some alone are refused by the constructor of these
        setattr(args, name, given[name])
    of_trainer = {name: value for name, value in given.items() if name not in vars(args)}
    with pytest.raises(OptionError, match=told) as refused:
        kind(model=model(base), args=args, train_dataset=ROWS, **of_trainer)
    assert told or not OF_ZEROTH_ORDER.search(str(refused.value)), (
        "remedies name what a first-order trainer has"
    )


# GRPO, with the completions that the trainer has generated


WITH_ACTIVATIONS = MemoryPolicy(
    host=HostPlan((), 1 << 40, 1, keep_noise=False), activations="16MiB"
)
PROMPTS = [{"prompt": " ".join(NOUNS[i % 5 : i % 5 + 1 + i % 3])} for i in range(8)]


FirstOrderGRPOTrainer = mixed_in(trl.GRPOTrainer, StreamedGRPOMixin)


def cats(completions: list[str], **_: Any) -> list[float]:
    return [float(text.split().count("cat")) - 0.1 * len(text) for text in completions]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(
        tmp_path_factory.mktemp("grpo") / "vocabulary", small_config("llama", vocab_size=len(WORDS))
    )
    save_tokenizer(directory)
    return directory


def made_grpo(kind: type[Any], model: Any, output: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 5,
        "max_steps": 4,
        "learning_rate": 3e-2,
        "gradient_checkpointing": False,
        "temperature": 1.5,
        **changes,
    }
    options = (
        {"streamed": WithPolicy(policy=WITH_ACTIVATIONS)}
        if issubclass(kind, StreamedTrainerMixin)
        else {}
    )
    rows = datasets.Dataset.from_list(PROMPTS)
    args = trl.GRPOConfig(**trainer_options(output, **given))
    return kind(
        model=model,
        args=args,
        reward_funcs=cats,
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        **options,
    )


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2, "loss_type": "grpo"}], ids=str
)
def test_grpo_on_the_same_completions_has_trls_bits(
    vocabulary: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    ours = made_grpo(FirstOrderGRPOTrainer, opened(vocabulary), tmp_path / "run", **changes)
    written: list[list[list[int]]] = []
    own = ours._generate_single_turn

    def kept(*arguments: Any, **options: Any) -> Any:
        completions, rest = own(*arguments, **options)
        written.append(completions)
        return completions, rest

    ours._generate_single_turn = kept
    ours.train()
    resident = monolithic(vocabulary, lora(), values_of(opened(vocabulary)), ())
    resident.train(mode=False)
    stock = made_grpo(trl.GRPOTrainer, resident, tmp_path / "stock", **changes)
    replayed = iter(written)
    stock._generate_single_turn = lambda *_, **__: (next(replayed), None)
    stock.train()
    trained = dict(stock.model.named_parameters())
    for name, value in ours.engine.parameters.items():
        same = trained[name if name in trained else f"base_model.model.{name}"]
        assert torch.equal(value, same), name
    rows = [
        [row for row in trainer.state.log_history if "loss" in row] for trainer in (ours, stock)
    ]
    assert len(rows[0]) == 4
    assert len({row["reward"] for row in rows[0]}) > 1
    for key in (
        "loss",
        "grad_norm",
        "reward",
        "reward_std",
        "entropy",
        "completions/mean_length",
        "num_tokens",
    ):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]], key
    assert any(row["grad_norm"] for row in rows[0])


def test_completions_are_those_of_the_present_adapter(vocabulary: Path, tmp_path: Path) -> None:
    trainer = made_grpo(
        FirstOrderGRPOTrainer,
        opened(vocabulary),
        tmp_path / "run",
        max_steps=2,
        per_device_eval_batch_size=4,
    )
    assert {"eval_loss", "eval_reward"} <= trainer.evaluate().keys(), (
        "evaluation generates for each batch"
    )
    trainer.train()
    prompts = [[3, 4], [5]]
    written, _ = trainer._generate_single_turn(prompts, None, {}, 2)
    trainer.save_model(tmp_path / "saved")
    model = open_checkpoint(vocabulary, adapter=Adapter(config=tmp_path / "saved"))
    with Engine(model, FirstOrder(None)) as engine:
        sampling = Sampling(temperature=1.5, seed=trainer.args.seed + 2)
        again = Generation(
            engine,
            model,
            max_new_tokens=5,
            sampling=sampling,
            eos_token_ids=trainer.eos_token_ids,
            pad_token_id=0,
        ).continuations(prompts)
    assert [written] == again


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_vllm": True}, "use_vllm"),
        ({"beta": 0.1}, "beta"),
        ({"num_iterations": 2}, "num_iterations"),
        ({"steps_per_generation": 4}, "steps_per_generation"),
        ({"top_k": 5}, "top_k"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_what_needs_a_whole_model_is_refused(
    vocabulary: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(OptionError, match=f"^{named}: "):
        made_grpo(FirstOrderGRPOTrainer, opened(vocabulary), tmp_path / "run", **changes)


def test_the_other_mixins_name_the_one_for_grpo(vocabulary: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="StreamedGRPOMixin"):
        made_grpo(mixed_in(trl.GRPOTrainer), opened(vocabulary), tmp_path / "run")
    misplaced, args = (
        mixed_in(trl.SFTTrainer, StreamedGRPOMixin),
        trl.SFTConfig(**trainer_options(tmp_path)),
    )
    with pytest.raises(OptionError, match="one of TRL's GRPOTrainer"):
        misplaced(model=opened(vocabulary), args=args)
