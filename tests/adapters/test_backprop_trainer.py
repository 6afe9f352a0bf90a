"""``transformers.Trainer`` and TRL's with first-order steps: the bits are those of the trainer alone on peft's model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WORDS
from peft_models import lora, monolithic, values_of
from profiles import each_choice
from trainers import OF_TRL, ROWS, Smoothed, trainer_options
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from zo2adapters import Adapter, BackpropTrainerMixin, open_checkpoint
from zo2core import HostPlan, MemoryPolicy
from zo2core.errors import OptionError

datasets = pytest.importorskip("datasets")
peft: Any = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

pytestmark = OF_TRL

ONE_BLOCK = MemoryPolicy(host=HostPlan((), 1 << 40, 1, keep_noise=False))  # the others are read from disk in each sweep
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
