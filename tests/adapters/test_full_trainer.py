"""Trainers that train all parameters block by block: the bits are those of the trainer alone on the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from full_loops import adalomo_loop, lomo_loop
from models import save_model, save_tokenizer, small_config
from profiles import each_choice
from trainers import ROWS, trainer_options
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from zo2adapters import FullBackpropTrainerMixin
from zo2core import HostPlan, MemoryPolicy
from zo2core.errors import CheckpointError, OptionError

IN_MEMORY = MemoryPolicy(host=HostPlan((), 1 << 40, None, keep_noise=False))


class FullTrainer(FullBackpropTrainerMixin, Trainer):
    pass


FAMILIES = ["llama", "opt"]


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("trainer") / "base", small_config(request.param))
    save_tokenizer(directory)
    return directory


def options(output: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**trainer_options(output, **changes))


def ours(base: Path, output: Path, **changes: Any) -> Any:
    args = options(output, **changes)
    return FullTrainer(model=base, args=args, train_dataset=ROWS, eval_dataset=ROWS[:5], memory=IN_MEMORY)


def stock(base: Path, output: Path, **changes: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base)
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


def assert_alike(trainer: Any, other: Any) -> None:
    trained = dict(other.model.named_parameters())
    for name, value in trainer.engine.parameters_now():
        assert torch.equal(value, trained[name].detach()), name
    rows = [[row for row in one.state.log_history if "loss" in row] for one in (trainer, other)]
    for key in ("loss", "learning_rate", "grad_norm"):
        expected = [row.get(key) for row in rows[1]]
        if None not in expected:
            assert [row[key] for row in rows[0]] == pytest.approx(expected, rel=1e-6), key


CHANGES: list[dict[str, Any]] = [
    {},
    {"optim": "adamw_torch", "max_grad_norm": 0.05},
    {"optim": "sgd", "max_grad_norm": 0.0, "gradient_accumulation_steps": 3, "max_steps": 3},
    {"optim": "adamw_torch_fused", "adam_beta2": 0.95, "lr_scheduler_type": "cosine"},
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("base", "changes"), each_choice(FAMILIES, CHANGES), indirect=["base"], ids=str)
def test_a_run_is_that_of_the_trainer_alone(base: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer, other = ours(base, tmp_path / "run", **changes), stock(base, tmp_path / "stock", **changes)
    trainer.train()
    other.train()
    assert_alike(trainer, other)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(other.evaluate()["eval_loss"], rel=1e-6)
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in trainer.engine.parameters_now())


LOOPS = {"lomo": lomo_loop, "adalomo": adalomo_loop}


@pytest.mark.parametrize(("base", "optim"), each_choice(FAMILIES, list(LOOPS)), indirect=["base"])
def test_fused_optimizers_have_the_bits_of_their_loops(base: Path, optim: str, tmp_path: Path) -> None:
    trainer = ours(base, tmp_path / "run", optim=optim, max_grad_norm=0.5)
    other = stock(base, tmp_path / "stock", max_grad_norm=0.0)

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


@pytest.mark.few(1)
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(base: Path, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    trainer = ours(base, tmp_path / "run", **saving)
    trainer.train()
    expected = {name: value.clone() for name, value in trainer.engine.parameters_now()}
    other = ours(base, tmp_path / "run", **saving)
    other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert other.engine.version == 6
    assert all(torch.equal(value, expected[name]) for name, value in other.engine.parameters_now())
    (snapshot,) = (tmp_path / "run" / "checkpoint-4").glob("snapshot-*.safetensors")
    snapshot.unlink()
    with pytest.raises(CheckpointError):
        ours(base, tmp_path / "run", **saving).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))


@pytest.mark.few(1)
def test_the_best_model_is_loaded_at_the_end(base: Path, tmp_path: Path) -> None:
    changes = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.5,
    }
    trainer = ours(base, tmp_path / "run", **changes)
    trainer.train()
    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses.values()), rel=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("changes", "told"), [({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"), ({"torch_compile": True}, "torch_compile")]
)
def test_what_needs_the_whole_model_is_refused(changes: dict[str, Any], told: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=told):
        ours(base, tmp_path / "run", **changes)


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
    given: dict[str, Any], remedy: str, base: Path, tmp_path: Path
) -> None:
    make: Any = FullTrainer
    with pytest.raises(OptionError, match=remedy):
        make(model=str(base), args=options(tmp_path), train_dataset=ROWS, **given)
