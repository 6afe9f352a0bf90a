"""Lightning's Trainer with steps that an engine takes."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import assert_equal, weights
from models import make_batch, small_config
from peft_models import monolithic
from transformers import AutoModelForCausalLM
from whole_loops import WholeModel, torch_loop

from zo2adapters import (
    Adapter,
    LightningArguments,
    StreamedLightningModule,
    open_checkpoint,
)
from zo2adapters.models.peft_adapter import is_of_adapter
from zo2core import (
    LOMO,
    Distribution,
    Engine,
    FirstOrder,
    Guarded,
    MeZOSGD,
    PhiloxNoise,
    TorchOptimizer,
    ZerothOrder,
)
from zo2core.errors import CheckpointError, JournalError, OptionError, ZO2Warning
from zo2core.optimizers.adapter_and_base import AdapterAndBase

lightning = pytest.importorskip("lightning.pytorch")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")

# what Lightning says about loaders' threads and its own dependencies
pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES = [make_batch(small_config("llama").vocab_size, [5, 4], seed=seed) for seed in range(8)]


class ResumableLoader:
    """Gives the batches in order; its place is part of a checkpoint, as Lightning asks of
    loaders.
    """

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.place < len(BATCHES):
            self.place += 1
            yield BATCHES[self.place - 1]

    def __len__(self) -> int:
        return len(BATCHES)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def halving(step: int) -> float:
    return float(0.5**step)


ZEROTH_ORDER = LightningArguments(method="zeroth-order", lr=1e-2, seed=3)


def module(base: Path) -> StreamedLightningModule:
    return StreamedLightningModule(open_checkpoint(base), ZEROTH_ORDER, lr_lambda=halving)


HELD_OUT: Any = torch.utils.data.DataLoader(BATCHES[6:], batch_size=None)  # type: ignore[arg-type]


def trainer(directory: Path, steps: int, **options: Any) -> Any:
    keeping = callbacks.ModelCheckpoint(
        dirpath=directory / "kept", every_n_train_steps=3, save_top_k=-1
    )
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    given = {
        "max_steps": steps,
        "accelerator": "cpu",
        "default_root_dir": directory,
        "callbacks": [keeping],
    }
    return lightning.Trainer(**given, **quiet, **options)


def plain_loop(base: Path, steps: Iterable[Any]) -> Engine:
    """What the module is held against: the same steps without Lightning."""
    mezo = MeZOSGD(lr=lambda step: 1e-2 * halving(step), zo_eps=1e-3, perturb_in_place=False)
    noise = PhiloxNoise(Distribution.RADEMACHER)
    engine = Engine(
        open_checkpoint(base), ZerothOrder(Guarded(estimator=mezo), noise=noise, seed=3)
    )
    for batch in steps:
        engine.step(batch)
    return engine


def test_the_trajectory_is_that_of_a_plain_loop(base: Path, tmp_path: Path) -> None:
    ours = module(base)
    fitted = trainer(tmp_path, 6, val_check_interval=2)
    fitted.fit(ours, ResumableLoader(), HELD_OUT)
    with plain_loop(base, BATCHES[:5]) as engine:
        result = engine.step(BATCHES[5])
        assert ours.engine.journal.updates == engine.journal.updates
        assert fitted.callback_metrics["val_loss"] == torch.tensor(
            engine.evaluate(BATCHES[6:]).loss
        )
        assert fitted.callback_metrics["train_loss"] == torch.tensor(result.loss)
        assert fitted.global_step == 6
        ours.export(tmp_path / "out")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert_equal(weights(engine), dict(exported.named_parameters()))


def test_a_module_that_a_second_trainer_trains_is_resumed_at_all_of_its_steps(
    base: Path, tmp_path: Path
) -> None:
    twice, resumed = module(base), module(base)
    trainer(tmp_path / "first", 3).fit(twice, ResumableLoader())
    trainer(tmp_path / "second", 3).fit(twice, ResumableLoader())
    [path] = (tmp_path / "second" / "kept").glob("*step=3.ckpt")
    trainer(tmp_path / "third", 3).fit(resumed, ResumableLoader(), ckpt_path=path)
    assert resumed.engine.version == 6
    assert resumed.engine.journal.updates == twice.engine.journal.updates


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (
            module,
            {"precision": "bf16-mixed"},
            r"Trainer\(precision\): found bf16-mixed; expected 32-true",
        ),
        (
            module,
            {"accumulate_grad_batches": 2},
            r"Trainer\(accumulate_grad_batches\): found 2; expected 1.*lists of",
        ),
        (
            module,
            {"gradient_clip_val": 0.5},
            r"Trainer\(gradient_clip_val\): found 0.5; expected None.*clip_grad=",
        ),
        (
            lambda base: first_order(base),
            {"accumulate_grad_batches": 2},
            "have the loader give lists of batches",
        ),
        (
            lambda base: full_module(base),
            {"gradient_clip_val": 1.0},
            r"gradient_clip_val.*max_grad_norm=\.\.\.",
        ),
    ],
)
def test_what_cannot_be_heeded_is_refused(
    base: Path, tmp_path: Path, make: Callable[[Path], Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        trainer(tmp_path, 1, **options).fit(make(base), ResumableLoader())


class OwnEvaluation(StreamedLightningModule):
    """Evaluates each batch by itself, or as all modules do; may fail at the second one."""

    by_itself, fails = True, False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.fails:
            self.fails = False
            raise RuntimeError("broken off")
        if self.by_itself:
            self.log(f"loss_{batch_idx}", self.engine.evaluate([batch]).loss)
        else:
            super().validation_step(batch, batch_idx)


def test_a_module_may_evaluate_by_itself_and_a_failed_validation_does_not_count_later(
    base: Path, tmp_path: Path
) -> None:
    ours = OwnEvaluation(open_checkpoint(base), ZEROTH_ORDER)
    fitted = trainer(tmp_path, 2, val_check_interval=2)
    fitted.fit(ours, ResumableLoader(), HELD_OUT)
    assert {"loss_0", "loss_1"} <= fitted.callback_metrics.keys()
    assert "val_loss" not in fitted.callback_metrics
    ours.by_itself, ours.fails = False, True
    with pytest.raises(RuntimeError, match="broken off"):
        trainer(tmp_path, 1).validate(ours, HELD_OUT)
    again = trainer(tmp_path, 1)
    again.validate(ours, HELD_OUT)
    assert again.callback_metrics["val_loss"] == torch.tensor(
        ours.engine.evaluate(BATCHES[6:]).loss
    )


class Endless(torch.utils.data.IterableDataset[Any]):
    """The batches, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)


@pytest.mark.parametrize("data", [BATCHES, Endless()], ids=["of a length", "without one"])
def test_a_loader_that_repeats_batches_of_a_resumed_epoch_is_said(
    base: Path, tmp_path: Path, data: Any
) -> None:
    def resume(name: str, loader: Any) -> list[str]:
        directory = tmp_path / name
        trainer(directory, 3).fit(module(base), loader)
        [path] = (directory / "kept").glob("*step=3.ckpt")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(directory, 4).fit(module(base), loader, ckpt_path=path)
        return [str(warning.message) for warning in caught if warning.category is ZO2Warning]

    plain: Any = torch.utils.data.DataLoader(data, batch_size=None)
    [said] = resume("plain", plain)
    assert "saved after 3 batches of an epoch" in said
    assert "StatefulDataLoader" in said
    assert resume("resumable", ResumableLoader()) == []
    if data is BATCHES:
        three: Any = BATCHES[:3]
        whole: Any = torch.utils.data.DataLoader(three, batch_size=None)
        assert resume("whole epoch", whole) == [], (
            "at the end of an epoch there is nothing to repeat"
        )


LORA: Any = {"r": 2, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


FIRST_ORDER = LightningArguments(lr=1e-2, weight_decay=0.01)  # by AdamW, the method's default


def first_order(base: Path, **options: Any) -> StreamedLightningModule:
    peft: Any = pytest.importorskip("peft")
    model = open_checkpoint(base, adapter=Adapter(config=peft.LoraConfig(**LORA), seed=1))
    return StreamedLightningModule(model, FIRST_ORDER, lr_lambda=halving, **options)


def test_gradients_train_as_a_plain_loop_over_the_whole_model(base: Path, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    ours = first_order(base)
    first = {name: value.detach().clone() for name, value in ours.engine.parameters.items()}
    whole = WholeModel(monolithic(base, peft.LoraConfig(**LORA), first))
    losses, take = [], torch_loop(whole, ADAMW, None, 0.5)
    for step, batch in enumerate(BATCHES[:6]):
        losses.append(whole.backward([batch]))
        take(1e-2 * halving(step))
    with patch.object(ours, "log", wraps=ours.log) as log:
        trainer(tmp_path, 6, val_check_interval=2, gradient_clip_val=0.5).fit(
            ours, ResumableLoader(), HELD_OUT
        )
    assert [call.args[1] for call in log.call_args_list if call.args[0] == "train_loss"] == losses
    assert_equal(ours.engine.parameters, {name: whole.parameters[name] for name in first})
    expected = tuple(whole.backward([batch]) for batch in BATCHES[6:])
    assert ours.engine.evaluate(BATCHES[6:]).losses == expected
    ours.export(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_a_list_of_batches_is_one_step_and_one_pass(base: Path, tmp_path: Path) -> None:
    zeroth = module(base)
    pairs: Any = [BATCHES[:2], BATCHES[2:4]]
    trainer(tmp_path / "zeroth", 2).fit(zeroth, torch.utils.data.DataLoader(pairs, batch_size=None))
    with plain_loop(base, pairs) as engine:
        assert zeroth.engine.journal.updates == engine.journal.updates
    ours = first_order(base)
    lists: Any = [BATCHES[:2], BATCHES[2:5]]
    trainer(tmp_path, 2).fit(ours, torch.utils.data.DataLoader(lists, batch_size=None))
    with first_order(base).engine as engine:
        optimizer = ADAMW(list(engine.parameters.values()))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
        for batches in (BATCHES[:2], BATCHES[2:5]):
            engine.gradients(batches)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert_equal(engine.parameters, ours.engine.parameters)


def full_module(base: Path) -> StreamedLightningModule:
    given = LightningArguments(method="adamw", lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    return StreamedLightningModule(open_checkpoint(base), given, lr_lambda=halving)


def test_an_optimizer_takes_the_place_of_the_methods_and_what_has_no_effect_is_refused(
    base: Path,
) -> None:
    update = TorchOptimizer(partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1))
    given = LightningArguments(method="adamw", lr=1e-2)
    own = StreamedLightningModule(open_checkpoint(base), given, optimizer=update)
    usual = StreamedLightningModule(open_checkpoint(base), given)
    for module_of, is_own in ((own, True), (usual, False)):
        with patch.object(LightningArguments, "open_first_order") as opened:
            module_of._open()
        assert (opened.call_args.args[1] is update) == is_own
    adapted = StreamedLightningModule(
        first_order(base).block_model,
        replace(FIRST_ORDER, weight_decay=0.0),
        optimizer=partial(torch.optim.RAdam, lr=1e-3),
    )
    assert isinstance(adapted._made_optimizer(), torch.optim.RAdam)
    for arguments, options, told in (
        (ZEROTH_ORDER, {"optimizer": update}, "optimizer: found one; expected no such option"),
        (ZEROTH_ORDER, {"forward": lambda model, batch: 0}, "forward: found one"),
        (given, {"optimizer": torch.optim.AdamW}, "optimizer: found a type; expected a BlockUpd"),
        (replace(given, weight_decay=0.1), {"optimizer": update}, "weight_decay: found 0.1; expec"),
    ):
        with pytest.raises(OptionError, match=told):
            StreamedLightningModule(open_checkpoint(base), arguments, **options)
    with pytest.raises(OptionError, match=r"max_grad_norm: .*gradient_clip_val"):
        StreamedLightningModule(adapted.block_model, LightningArguments(max_grad_norm=1.0))
    with pytest.raises(OptionError, match="lr: found nothing"):
        LightningArguments(method="adamw")
    assert LightningArguments().lr == 2e-4


def test_all_parameters_have_the_bits_of_a_plain_loop(base: Path, tmp_path: Path) -> None:
    ours, whole = full_module(base), WholeModel(base)
    fitted = trainer(tmp_path, 6, val_check_interval=2)
    fitted.fit(ours, ResumableLoader(), HELD_OUT)
    take = torch_loop(whole, partial(torch.optim.AdamW, weight_decay=0.1, fused=True), None, 0.5)
    for step, batch in enumerate(BATCHES[:6]):
        whole.backward([batch])
        take(1e-2 * halving(step))
    assert_equal(weights(ours.engine), whole.parameters)
    assert fitted.callback_metrics["val_loss"] == torch.tensor(
        ours.engine.evaluate(BATCHES[6:]).loss
    )
    ours.export(tmp_path / "out")
    assert_equal(
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters()),
        whole.parameters,
    )


def both_module(base: Path) -> StreamedLightningModule:
    """An adapter and the base under it."""
    peft: Any = pytest.importorskip("peft")
    adapter = Adapter(config=peft.LoraConfig(**LORA), seed=1, trains_base=True)
    given = LightningArguments(
        method="lora+lomo", base_lr=5e-2, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5
    )
    return StreamedLightningModule(open_checkpoint(base, adapter=adapter), given, lr_lambda=halving)


def test_an_adapter_and_its_base_have_the_bits_of_the_engines_own_steps(
    base: Path, tmp_path: Path
) -> None:
    ours, model = both_module(base), both_module(base).block_model
    trainer(tmp_path, 6).fit(ours, ResumableLoader())
    update = AdapterAndBase(
        TorchOptimizer(partial(torch.optim.AdamW, weight_decay=0.1)),
        LOMO(weight_decay=0.1),
        base_lr=lambda step: 5e-2 * halving(step),
        is_of_adapter=is_of_adapter,
    )
    method = FirstOrder(update, lr=lambda step: 1e-2 * halving(step), clip=0.5)
    with Engine(model, method) as engine:
        for batch in BATCHES[:6]:
            engine.step(batch)
        assert_equal(weights(ours.engine), weights(engine))
    with pytest.raises(OptionError, match=r"optimizer: found one; expected none with lora\+lomo"):
        StreamedLightningModule(ours.block_model, ours.arguments, optimizer=update)
    with pytest.raises(OptionError, match="model: found no adapter"):
        StreamedLightningModule(open_checkpoint(base), ours.arguments)
    with pytest.raises(OptionError, match="base_lr: found nothing"):
        StreamedLightningModule(model, LightningArguments(method="lora+lomo"))


@pytest.mark.parametrize("make", [module, first_order, full_module, both_module])
def test_a_resumed_run_is_the_one_that_was_not_interrupted(
    make: Callable[[Path], Any], base: Path, tmp_path: Path
) -> None:
    whole, resumed = make(base), make(base)
    trainer(tmp_path, 6).fit(whole, ResumableLoader())
    [middle] = (tmp_path / "kept").glob("*step=3.ckpt")
    # the checkpoint is Lightning's own
    own: dict[str, Any] = {"weights_only": False} if make is first_order else {}
    trainer(tmp_path, 6).fit(resumed, ResumableLoader(), ckpt_path=middle, **own)
    assert_equal(weights(resumed.engine), weights(whole.engine))
    if make is first_order:
        return
    assert resumed.engine.version == 6
    checkpoint = torch.load(middle, weights_only=True)
    if make is module:
        assert middle.stat().st_size < 30_000, "a journal, no weights"
        assert resumed.engine.journal.updates == whole.engine.journal.updates
        checkpoint["journal.jsonl"] = checkpoint["journal.jsonl"].replace('"step":1', '"step":7')
        told = r"journal\.jsonl in the checkpoint, line .: found a damaged"
    else:
        del checkpoint["full_backprop_engine"]
        told = "no weights and optimizer states"
    torch.save(checkpoint, middle)
    with pytest.raises(JournalError if make is module else CheckpointError, match=told):
        trainer(tmp_path, 6).fit(make(base), ResumableLoader(), ckpt_path=middle)
