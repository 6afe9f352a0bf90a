"""``transformers.Trainer`` and TRL's with first-order steps: the bits are those of the trainer alone on peft's model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import memory
from full_loops import adalomo_loop, lomo_loop
from models import WORDS, save_model, save_tokenizer, small_config
from peft_models import lora, monolithic, values_of
from profiles import each_choice
from trainers import OF_TRL, ROWS, Smoothed, trainer_options
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from zo2adapters import Adapter, BackpropGRPOMixin, BackpropTrainerMixin, FullBackpropTrainerMixin, open_checkpoint
from zo2adapters.tasks.generation import Generation, Sampling
from zo2core import Engine, FirstOrder, HostPlan, MemoryPolicy
from zo2core.errors import CheckpointError, OptionError

datasets = pytest.importorskip("datasets")
peft: Any = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

pytestmark = OF_TRL

ONE_BLOCK = memory(1)  # the others are read from disk in each sweep
NOUNS = WORDS[3:]
PREFERENCES = [
    {"prompt": " ".join(NOUNS[i % 5 : i % 5 + 3]), "chosen": f" {NOUNS[i % 4]}", "rejected": f" {NOUNS[(i * 5 + 1) % 7]}"}
    for i in range(12)
]


class FirstOrderTrainer(BackpropTrainerMixin, Trainer):
    pass


class FirstOrderSFTTrainer(BackpropTrainerMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    pass


class FirstOrderDPOTrainer(BackpropTrainerMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    pass


class SmoothedTrainer(Smoothed, Trainer):
    pass


class FirstOrderSmoothedTrainer(BackpropTrainerMixin, SmoothedTrainer):
    pass


def opened(base: Path) -> Any:
    return open_checkpoint(base, adapter=Adapter(config=lora(), seed=5))


def whole(base: Path) -> Any:
    """The model in memory, with the same adapter."""
    return monolithic(base, lora(), values_of(opened(base)), ())


def made(kind: type[Any], model: Any, output: Path, **changes: Any) -> Any:
    given = {"memory": ONE_BLOCK} if issubclass(kind, BackpropTrainerMixin) else {}
    return kind(
        model=model,
        args=TrainingArguments(**trainer_options(output, **changes)),
        train_dataset=ROWS,
        eval_dataset=ROWS[:5],
        **given,
    )


def assert_alike(ours: Any, stock: Any) -> None:
    """Hold adapters, logged losses, norms and learning rates against each other."""
    trained = dict(stock.model.named_parameters())
    for name, value in ours.engine.parameters.items():
        same = trained[name if name in trained else f"base_model.model.{name}"]
        assert torch.equal(value, same), name
    rows = [[row for row in trainer.state.log_history if "loss" in row] for trainer in (ours, stock)]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [row[key] for row in rows[0]] == pytest.approx([row[key] for row in rows[1]], rel=1e-6), key


CHANGES: list[dict[str, Any]] = [
    {},
    {"optim": "sgd", "max_grad_norm": 0.05},
    {"gradient_accumulation_steps": 3, "max_steps": 3, "lr_scheduler_type": "cosine"},
    {"optim": "adafactor", "max_grad_norm": 0.0},
]


@pytest.mark.parametrize(("kind", "changes"), each_choice([FirstOrderTrainer, FirstOrderSmoothedTrainer], CHANGES))
def test_a_run_is_that_of_the_trainer_alone(base: Path, tmp_path: Path, kind: type[Any], changes: dict[str, Any]) -> None:
    ours = made(kind, opened(base), tmp_path / "run", **changes)
    alone = SmoothedTrainer if kind is FirstOrderSmoothedTrainer else Trainer
    stock = made(alone, whole(base), tmp_path / "stock", **changes)
    ours.train()
    stock.train()
    assert_alike(ours, stock)
    assert ours.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]


def test_a_run_resumed_in_the_middle_is_the_one_that_was_not_interrupted(base: Path, tmp_path: Path) -> None:
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    ours = made(FirstOrderTrainer, opened(base), tmp_path / "run", **saved)
    ours.train()
    expected = {name: value.detach().clone() for name, value in ours.engine.parameters.items()}
    again = made(FirstOrderTrainer, opened(base), tmp_path / "run", **saved)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert again.state.global_step == 6
    for name, value in again.engine.parameters.items():
        assert torch.equal(value, expected[name]), name


def test_checkpoints_and_the_best_model_are_adapters_that_peft_loads(base: Path, tmp_path: Path) -> None:
    ours = made(
        FirstOrderTrainer,
        opened(base),
        tmp_path / "run",
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    ours.train()
    best = Path(ours.state.best_model_checkpoint)
    ours.save_model(tmp_path / "saved")
    ours.save_model(tmp_path / "saved")  # again: files are replaced
    for directory in (best, tmp_path / "saved"):
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
        values = {name.removeprefix("base_model.model."): value for name, value in loaded.named_parameters()}
        for name, value in ours.engine.parameters.items():
            assert torch.equal(value, values[name]), name
    assert not (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize("bf16", [False, True])
def test_sft_with_a_peft_config_is_trls_own(base: Path, tmp_path: Path, bf16: bool) -> None:
    """Also with TRL's default bf16=True: the weights are float32, and autocast computes in bfloat16."""
    rows = datasets.Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in PREFERENCES])

    def sft(kind: type[Any], model: Any, output: Path, **given: Any) -> Any:
        args = trl.SFTConfig(**trainer_options(output, max_length=16, bf16=bf16))
        return kind(model=model, args=args, train_dataset=rows, **given)

    ours = sft(FirstOrderSFTTrainer, str(base), tmp_path / "run", peft_config=lora())
    before = {name: value.detach().clone() for name, value in ours.engine.parameters.items()}
    stock = sft(trl.SFTTrainer, monolithic(base, lora(), before, ()), tmp_path / "stock")
    ours.train()
    stock.train()
    assert_alike(ours, stock)


def test_dpo_prefers_against_the_adapter_as_it_began(base: Path, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(PREFERENCES)

    def dpo(kind: type[Any], model: Any, output: Path, **given: Any) -> Any:
        args = trl.DPOConfig(**trainer_options(output, max_length=16, precompute_ref_log_probs=True))
        return kind(model=model, args=args, train_dataset=rows, **given)

    ours = dpo(FirstOrderDPOTrainer, opened(base), tmp_path / "run")
    resident = AutoModelForCausalLM.from_pretrained(base)
    stock = dpo(trl.DPOTrainer, resident, tmp_path / "stock", peft_config=lora())
    with torch.no_grad():
        own = dict(stock.model.named_parameters())
        for name, value in values_of(opened(base)).items():
            own[f"base_model.model.{name}"].copy_(value)
    ours.train()
    stock.train()
    assert_alike(ours, stock)


def test_a_model_in_another_precision_is_refused_with_what_mends_it(base: Path, tmp_path: Path) -> None:
    def trainer(model: Any, **given: Any) -> Any:
        asked = {"bf16": True, **{key: given.pop(key) for key in ("bf16", "fp16") if key in given}}
        return FirstOrderTrainer(model=model, args=TrainingArguments(**trainer_options(tmp_path, **asked)), **given)

    def mixed(dtype: str) -> Any:
        return open_checkpoint(base, adapter=Adapter(config=lora()), precision="mixed", dtype=dtype)

    with pytest.raises(OptionError, match=r"bf16=False, fp16=False, or .*precision='mixed', dtype='bfloat16'"):
        trainer(opened(base))
    with pytest.raises(OptionError, match=r"bf16=False, fp16=True, or .*precision='mixed', dtype='bfloat16'"):
        trainer(mixed("float16"))
    with pytest.raises(OptionError, match=r"bf16=True, fp16=False, or .*precision='exact'"):
        trainer(mixed("bfloat16"), bf16=False)
    with pytest.raises(OptionError, match=r"bf16, fp16: found mixed with DoRA; .*bf16=False, fp16=False.*dtype='bfloat16'"):
        trainer(str(base), peft_config=lora(use_dora=True))
    trainer(mixed("bfloat16"))
    trainer(mixed("float16"), bf16=False, fp16=True)
    trainer(open_checkpoint(base, adapter=Adapter(config=lora(use_dora=True)), dtype="bfloat16"), bf16=False)


OF_ZEROTH_ORDER = re.compile(r"ZOArguments|estimator|MeZO|projected|all parameters")


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"auto_find_batch_size": True}, {}),
        ({"optim_target_modules": "all-linear"}, {}),
        ({"deepspeed": {}, "fsdp": "full_shard"}, {}),
        ({}, {"optimizers": (object(), None)}),
    ],
    ids=["batch size", "target modules", "launchers", "optimizers"],
)
def test_remedies_name_what_a_first_order_trainer_has(
    base: Path, tmp_path: Path, changes: dict[str, Any], given: dict[str, Any]
) -> None:
    args = TrainingArguments(**trainer_options(tmp_path))
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(OptionError) as refused:
        FirstOrderTrainer(model=opened(base), args=args, **given)
    assert not OF_ZEROTH_ORDER.search(str(refused.value))


def test_what_has_no_adapter_or_two_is_refused(base: Path, tmp_path: Path) -> None:
    args = TrainingArguments(**trainer_options(tmp_path))
    with pytest.raises(OptionError, match="peft_config: found none"):
        FirstOrderTrainer(model=str(base), args=args)
    with pytest.raises(OptionError, match="peft_config: found one with an opened PeftBlockModel"):
        FirstOrderTrainer(model=opened(base), args=args, peft_config=lora())
    with pytest.raises(OptionError, match="torch_compile"):
        FirstOrderTrainer(model=opened(base), args=TrainingArguments(**trainer_options(tmp_path, torch_compile=True)))
    trainer = FirstOrderTrainer(model=open_checkpoint(base), args=args, train_dataset=ROWS)
    with pytest.raises(OptionError, match="a trained parameter of a block"):
        trainer.train()


# All parameters, block by block


IN_MEMORY = memory()


class FullTrainer(FullBackpropTrainerMixin, Trainer):
    pass


FAMILIES = ["llama", "opt"]


@pytest.fixture(scope="module", params=FAMILIES)
def of_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("trainer") / "of_family", small_config(request.param))
    save_tokenizer(directory)
    return directory


def options(output: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**trainer_options(output, **changes))


def full(of_family: Path, output: Path, **changes: Any) -> Any:
    args = options(output, **changes)
    return FullTrainer(model=of_family, args=args, train_dataset=ROWS, eval_dataset=ROWS[:5], memory=IN_MEMORY)


def whole_stock(of_family: Path, output: Path, **changes: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(of_family)
    model.eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # what is mapped from a file may lie unaligned, and round otherwise

    class Plain(Trainer):
        def training_step(self, model: Any, *given: Any, **named: Any) -> Any:
            real, model.train = model.train, lambda *_: model  # no dropout
            try:
                return super().training_step(model, *given, **named)
            finally:
                model.train = real

    return Plain(model=model, args=options(output, **changes), train_dataset=ROWS, eval_dataset=ROWS[:5])


def assert_same_weights_and_logs(trainer: Any, other: Any) -> None:
    trained = dict(other.model.named_parameters())
    for name, value in trainer.engine.parameters_now():
        assert torch.equal(value, trained[name].detach()), name
    rows = [[row for row in one.state.log_history if "loss" in row] for one in (trainer, other)]
    for key in ("loss", "learning_rate", "grad_norm"):
        expected = [row.get(key) for row in rows[1]]
        if None not in expected:
            assert [row[key] for row in rows[0]] == pytest.approx(expected, rel=1e-6), key


FULL_CHANGES: list[dict[str, Any]] = [
    {},
    {"optim": "adamw_torch", "max_grad_norm": 0.05},
    {"optim": "sgd", "max_grad_norm": 0.0, "gradient_accumulation_steps": 3, "max_steps": 3},
    {"optim": "adamw_torch_fused", "adam_beta2": 0.95, "lr_scheduler_type": "cosine"},
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("of_family", "changes"), each_choice(FAMILIES, FULL_CHANGES), indirect=["of_family"], ids=str)
def test_all_parameters_are_those_of_the_trainer_alone(of_family: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer, other = (
        full(of_family, tmp_path / "run", **changes),
        whole_stock(of_family, tmp_path / "whole_stock", **changes),
    )
    trainer.train()
    other.train()
    assert_same_weights_and_logs(trainer, other)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(other.evaluate()["eval_loss"], rel=1e-6)
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in trainer.engine.parameters_now())


LOOPS = {"lomo": lomo_loop, "adalomo": adalomo_loop}


@pytest.mark.parametrize(("of_family", "optim"), each_choice(FAMILIES, list(LOOPS)), indirect=["of_family"])
def test_fused_optimizers_have_the_bits_of_their_loops(of_family: Path, optim: str, tmp_path: Path) -> None:
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
    assert_same_weights_and_logs(trainer, other)


@pytest.mark.few(1)
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(of_family: Path, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    trainer = full(of_family, tmp_path / "run", **saving)
    trainer.train()
    expected = {name: value.clone() for name, value in trainer.engine.parameters_now()}
    other = full(of_family, tmp_path / "run", **saving)
    other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert other.engine.version == 6
    assert all(torch.equal(value, expected[name]) for name, value in other.engine.parameters_now())
    (snapshot,) = (tmp_path / "run" / "checkpoint-4").glob("snapshot-*.safetensors")
    snapshot.unlink()
    with pytest.raises(CheckpointError):
        full(of_family, tmp_path / "run", **saving).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))


@pytest.mark.few(1)
def test_the_best_model_is_loaded_at_the_end(of_family: Path, tmp_path: Path) -> None:
    changes = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.5,
    }
    trainer = full(of_family, tmp_path / "run", **changes)
    trainer.train()
    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses.values()), rel=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("changes", "told"), [({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"), ({"torch_compile": True}, "torch_compile")]
)
def test_what_needs_the_whole_model_is_refused(changes: dict[str, Any], told: str, of_family: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=told):
        full(of_family, tmp_path / "run", **changes)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"peft_config": object()}, "BackpropTrainerMixin trains an adapter"),
        ({"optimizers": (object(), None)}, "optim names the optimizer"),
        ({"optimizer_cls_and_kwargs": (object, {})}, "optim names the optimizer"),
    ],
)
def test_options_of_the_constructor_are_refused_with_what_applies(
    given: dict[str, Any], remedy: str, of_family: Path, tmp_path: Path
) -> None:
    make: Any = FullTrainer
    with pytest.raises(OptionError, match=remedy):
        make(model=str(of_family), args=options(tmp_path), train_dataset=ROWS, **given)


# GRPO, with the completions that the trainer has generated


WITH_ACTIVATIONS = MemoryPolicy(host=HostPlan((), 1 << 40, 1, keep_noise=False), activations="16MiB")
PROMPTS = [{"prompt": " ".join(NOUNS[i % 5 : i % 5 + 1 + i % 3])} for i in range(8)]


class FirstOrderGRPOTrainer(BackpropGRPOMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
    pass


def cats(completions: list[str], **_: Any) -> list[float]:
    return [float(text.split().count("cat")) - 0.1 * len(text) for text in completions]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("grpo") / "vocabulary", small_config("llama", vocab_size=len(WORDS)))
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
    options = {"memory": WITH_ACTIVATIONS} if issubclass(kind, BackpropTrainerMixin) else {}
    rows = datasets.Dataset.from_list(PROMPTS)
    args = trl.GRPOConfig(**trainer_options(output, **given))
    return kind(model=model, args=args, reward_funcs=cats, train_dataset=rows, eval_dataset=rows.select(range(4)), **options)


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "loss_type": "grpo"}], ids=str)
def test_grpo_with_the_same_completions_has_the_bits_of_trls_trainer(
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
    rows = [[row for row in trainer.state.log_history if "loss" in row] for trainer in (ours, stock)]
    assert len(rows[0]) == 4
    assert len({row["reward"] for row in rows[0]}) > 1
    for key in ("loss", "grad_norm", "reward", "reward_std", "entropy", "completions/mean_length", "num_tokens"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]], key
    assert any(row["grad_norm"] for row in rows[0])


def test_completions_are_those_of_the_present_adapter(vocabulary: Path, tmp_path: Path) -> None:
    trainer = made_grpo(FirstOrderGRPOTrainer, opened(vocabulary), tmp_path / "run", max_steps=2)
    trainer.train()
    prompts = [[3, 4], [5]]
    written, _ = trainer._generate_single_turn(prompts, None, {}, 2)
    trainer.save_model(tmp_path / "saved")
    model = open_checkpoint(vocabulary, adapter=Adapter(config=tmp_path / "saved"))
    with Engine(model, FirstOrder(None)) as engine:
        sampling = Sampling(temperature=1.5, seed=trainer.args.seed + 2)
        again = Generation(
            engine, model, max_new_tokens=5, sampling=sampling, eos_token_ids=trainer.eos_token_ids, pad_token_id=0
        ).continuations(prompts)
    assert [written] == again


def test_evaluation_generates_for_each_batch(vocabulary: Path, tmp_path: Path) -> None:
    trainer = made_grpo(FirstOrderGRPOTrainer, opened(vocabulary), tmp_path / "run", per_device_eval_batch_size=4)
    result = trainer.evaluate()
    assert {"eval_loss", "eval_reward"} <= result.keys()


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
def test_what_needs_the_whole_model_is_refused_by_name(
    vocabulary: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(OptionError, match=f"^{named}: "):
        made_grpo(FirstOrderGRPOTrainer, opened(vocabulary), tmp_path / "run", **changes)


def test_the_other_mixins_name_the_one_for_grpo(vocabulary: Path, tmp_path: Path) -> None:
    class Plain(BackpropTrainerMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        pass

    class Misplaced(BackpropGRPOMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        pass

    with pytest.raises(OptionError, match="BackpropGRPOMixin"):
        made_grpo(Plain, opened(vocabulary), tmp_path / "run")
    with pytest.raises(OptionError, match="one of TRL's GRPOTrainer"):
        Misplaced(model=opened(vocabulary), args=trl.SFTConfig(output_dir=str(tmp_path), bf16=False, report_to=[]))
