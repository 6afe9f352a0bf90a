"""``transformers.Trainer`` with zeroth-order steps: its loop, our bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import zeroth_order
from parity import assert_same_weights
from trainers import ROWS, VOCABULARY, Smoothed, trainer_options
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from zo2adapters import CalledForward, MonolithicMeZO, ZOArguments, ZOTrainerMixin, open_checkpoint
from zo2core import Distribution, Engine, Guarded, MeZOSGD, PhiloxNoise, WriteBackPolicy, ZerothOrder, branch_journal
from zo2core.errors import BatchError, JournalError, OptionError, OutputError, UnsupportedModelError

EXACT = ZOArguments(estimator=MeZOSGD, distribution=None, guard=False, zo_eps=1e-2)


class ZOTrainer(ZOTrainerMixin, Trainer):
    pass


class SmoothedTrainer(Smoothed, ZOTrainer):
    pass


def arguments(output: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(**trainer_options(output, **{"learning_rate": 1e-3, "weight_decay": 0.0, **options}))


def made(base: Any, output: Path, kind: type[Any] = ZOTrainer, zo: ZOArguments | None = None, **options: Any) -> Any:
    given = {name: options.pop(name) for name in ("callbacks", "compute_metrics") if name in options}
    data = {"train_dataset": ROWS, "eval_dataset": ROWS[:5]}
    return kind(model=base, args=arguments(output, **options), zo=zo, **data, **given)


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


BATCHES = [stacked(ROWS[start : start + 2]) for start in range(0, 12, 2)]
LRS = [0.0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4]  # a warm-up of two steps to 1e-3, then linear to 0 at step 6


def plain_loop(base: Path, steps: int = 6, precision: str = "exact", **options: Any) -> Engine:
    """What the trainer is held against: the same steps without it."""
    estimator = Guarded(estimator=MeZOSGD(lr=lambda step: LRS[step], zo_eps=1e-3, perturb_in_place=False))
    model = open_checkpoint(base, precision=precision)
    engine = zeroth_order(model, estimator, noise=PhiloxNoise(Distribution.RADEMACHER), seed=42, **options)
    for batch in BATCHES[:steps]:
        engine.step(batch)
    return engine


def same_models(one: Path, other: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(other).state_dict()
    assert_same_weights(AutoModelForCausalLM.from_pretrained(one).state_dict().items(), weights.items())


def test_the_trajectory_is_that_of_a_plain_loop(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path / "run", logging_steps=1)
    output = trainer.train()
    with plain_loop(base) as engine:
        assert trainer.engine.journal.updates == engine.journal.updates
        trainer.save_model()
        engine.export(tmp_path / "plain")
    same_models(tmp_path / "run", tmp_path / "plain")
    AutoTokenizer.from_pretrained(tmp_path / "run")
    logged = [row for row in trainer.state.log_history if "loss" in row]
    updates = trainer.engine.journal.updates
    assert [row["learning_rate"] for row in logged] == pytest.approx(LRS)
    assert [row["loss"] for row in logged] == pytest.approx([update.losses[0] for update in updates])
    assert [row["grad_norm"] for row in logged] == pytest.approx([abs(update.projected_grads[0]) for update in updates])
    assert output.global_step == 6
    parameters = sum(spec.numel for layout in trainer.block_model.layouts for spec in layout.parameters)
    assert trainer.state.total_flos == 6 * 2 * parameters * 10 * 2


@pytest.mark.parametrize("weights", [True, False])
def test_a_run_resumed_in_the_middle_is_the_one_that_was_not_interrupted(base: Path, tmp_path: Path, weights: bool) -> None:
    zo = ZOArguments(export_checkpoints=weights)
    whole = made(base, tmp_path / "run", save_strategy="steps", save_steps=2, save_total_limit=2, zo=zo)
    whole.train()
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-6"]
    assert (tmp_path / "run" / "checkpoint-4" / "model.safetensors").exists() == weights
    resumed = made(base, tmp_path / "run", save_strategy="steps", save_steps=2, zo=zo)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert resumed.engine.journal.updates == whole.engine.journal.updates
    last = made(base, tmp_path / "run", zo=zo)
    last.train(resume_from_checkpoint=True)
    assert last.engine.version == 6


def test_gradient_accumulation_is_one_step_of_several_batches(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path, gradient_accumulation_steps=4, max_steps=-1, num_train_epochs=2, warmup_steps=0)
    trainer.train()
    with plain_loop(base, steps=0) as engine:
        lrs = [update.lr for update in trainer.engine.journal.updates]
        steps: Any = engine._steps
        steps._estimator = Guarded(estimator=MeZOSGD(lr=lambda step: lrs[step], zo_eps=1e-3, perturb_in_place=False))
        for batches in [BATCHES[:4], BATCHES[4:]] * 2:
            engine.step(batches)
        assert trainer.engine.journal.updates == engine.journal.updates


def test_mixed_precision_is_the_models(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path, bf16=True)
    trainer.train()
    with plain_loop(base, precision="mixed") as engine:
        assert trainer.block_model.autocast is torch.bfloat16
        assert trainer.engine.journal.updates == engine.journal.updates


@pytest.mark.parametrize("bf16", [False, True])
def test_a_loss_of_its_own_is_monolithic_mezos(base: Path, tmp_path: Path, bf16: bool) -> None:
    trainer = made(base, tmp_path, SmoothedTrainer, zo=EXACT, bf16=bf16, lr_scheduler_type="constant", warmup_steps=0)
    trainer.train()
    whole = AutoModelForCausalLM.from_pretrained(base)

    class Literal(MonolithicMeZO):
        def loss(self, batch: Any) -> torch.Tensor:
            with torch.inference_mode():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                    outputs = self.model(**batch, use_cache=False)
                return outputs.loss.float() + 0.1 * outputs.logits.float().square().mean()  # type: ignore[no-any-return]

    literal = Literal(whole, lr=1e-3, zo_eps=1e-2)
    for batch, update in zip(BATCHES, trainer.engine.journal.updates, strict=True):
        assert literal.step(batch, update.seeds[0]).losses == update.losses
    assert_same_weights(trainer.engine.parameters_now(), whole.named_parameters())


def test_losses_of_its_own_are_averaged_over_accumulated_batches(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path, SmoothedTrainer, gradient_accumulation_steps=2, max_steps=2, warmup_steps=0)
    trainer.loss_is_scaled_for_ga = False
    losses: list[torch.Tensor] = []
    compute = trainer.compute_loss

    def noting(*arguments: Any, **options: Any) -> Any:
        losses.append(compute(*arguments, **options))
        return losses[-1]

    trainer.compute_loss = noting
    trainer.train()
    update = trainer.engine.journal.updates[0]
    pieces = [float(loss) for loss in losses[:4]]  # two batches at +eps, then two at -eps
    assert update.losses == pytest.approx([sum(pieces[:2]) / 2, sum(pieces[2:]) / 2])


def test_evaluation_is_the_stock_trainers(base: Path, tmp_path: Path) -> None:
    def metrics(prediction: Any) -> dict[str, float]:
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": float(right.mean()), "spread": float(np.std(prediction.predictions))}

    options: dict[str, Any] = {"compute_metrics": metrics}
    trainer = made(base, tmp_path / "run", **options)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    stock = Trainer(model=whole, args=arguments(tmp_path / "stock"), eval_dataset=ROWS[:5], **options)
    ours, theirs = trainer.evaluate(), stock.evaluate()
    for key in ("eval_loss", "eval_accuracy", "eval_spread"):
        assert ours[key] == theirs[key], key
    rows: Any = ROWS[5:8]
    predicted: Any = [one.predict(rows).predictions for one in (trainer, stock)]
    assert np.array_equal(predicted[0], predicted[1])
    loss, logits, labels = trainer.prediction_step(trainer.model, BATCHES[0], prediction_loss_only=False)
    assert torch.equal(logits, whole(**BATCHES[0]).logits)
    assert torch.equal(labels, BATCHES[0]["labels"])
    assert loss == trainer.engine.evaluate([BATCHES[0]]).loss


def test_the_best_model_is_kept_and_training_stops_early(base: Path, tmp_path: Path) -> None:
    class Worse(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            metrics = given["metrics"]
            metrics["eval_loss"] += state.global_step  # the first evaluation is the best one
            calls.append(state.global_step)

    calls: list[int] = []
    trainer = made(
        base,
        tmp_path / "run",
        callbacks=[Worse(), EarlyStoppingCallback(early_stopping_patience=2)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        zo=ZOArguments(export_checkpoints=False),
    )
    trainer.train()
    assert calls == [1, 2, 3]
    assert trainer.state.best_global_step == 1
    assert trainer.engine.version == 1
    trainer.save_model(tmp_path / "best")
    with plain_loop(base, steps=1) as engine:
        engine.export(tmp_path / "plain")
    same_models(tmp_path / "best", tmp_path / "plain")


def test_it_goes_on_from_any_step(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path / "run")
    trainer.train()
    updates = list(trainer.engine.journal.updates)
    trainer.rewind(trainer.engine.journal.until(2))
    assert trainer.engine.version == 2
    branch_journal(trainer.engine.journal, tmp_path / "branched.jsonl", 1)
    trainer.engine.step(BATCHES[2])
    assert trainer.engine.journal.updates[:2] == updates[:2]


def test_saving_again_replaces_what_is_there(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path / "run")
    stale = tmp_path / "run" / "model-00001-of-00002.safetensors"
    stale.write_bytes(b"of another model")
    trainer.save_model()
    trainer.train()
    trainer.save_model()
    assert not stale.exists()
    assert len((tmp_path / "run" / "journal.jsonl").read_text().splitlines()) >= 7
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="file: found"):
        trainer._save(str(tmp_path / "file"))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("optim: found", {"optim": "sgd"}),
    ("adam_beta1: found 0.0", {"adam_beta1": 0.0}),
    ("max_grad_norm: found 0.3; expected the default, 1.0.*no gradient whose norm could be clipped", {"max_grad_norm": 0.3}),
    ("neftune_noise_alpha: found 5", {"neftune_noise_alpha": 5}),
    ("auto_find_batch_size: found True", {"auto_find_batch_size": True}),
    ("bf16_full_eval: found True", {"bf16_full_eval": True}),
]


@pytest.mark.parametrize(("said", "options"), REFUSED, ids=[said.split(":")[0] for said, _ in REFUSED])
def test_what_cannot_be_heeded_is_refused(base: Path, tmp_path: Path, said: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=said):
        made(base, tmp_path / "run", **options)


@pytest.mark.parametrize("wrong", [None, MeZOSGD(lr=1e-6, zo_eps=1e-3)], ids=["none", "an estimator"])
def test_arguments_take_what_makes_an_estimator(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"estimator: found .*expected a function that makes an estimator"):
        ZOArguments(estimator=wrong)


def test_clipping_that_is_turned_off_is_not_refused(base: Path, tmp_path: Path) -> None:
    made(base, tmp_path / "run", max_grad_norm=0.0)


def test_text_that_an_evaluation_would_generate_is_refused(base: Path, tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], predict_with_generate=True)
    kind: Any = type("ZOSeq2SeqTrainer", (ZOTrainerMixin, Seq2SeqTrainer), {})
    with pytest.raises(OptionError, match="predict_with_generate: found True"):
        kind(model=base, args=args, train_dataset=ROWS)


def test_what_a_constructor_cannot_heed_is_refused(base: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path / "run")
    given = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    make: Any = ZOTrainer
    with pytest.raises(OptionError, match="args: found a NoneType"):
        make(model=base, train_dataset=ROWS)
    with pytest.raises(OptionError, match="device: found cuda, while the trainer uses cpu"):
        made(base, tmp_path / "run", zo=ZOArguments(device="cuda")).train()
    with_adapter = r"found .*open_checkpoint\(model, adapter=Adapter\(config=peft_config\)\)"
    for name, value, told in (
        ("model_init", lambda: None, "found"),
        ("optimizers", (given, None), "found"),
        ("peft_config", object(), with_adapter),
    ):
        with pytest.raises(OptionError, match=f"{name}: {told}"):
            make(model=base, args=args, train_dataset=ROWS, **{name: value})
    with pytest.raises(OptionError, match="model: found a LlamaForCausalLM"):
        make(model=AutoModelForCausalLM.from_pretrained(base), args=args)
    with pytest.raises(OptionError, match="bf16, fp16: found a model that computes in the dtype of its weights"):
        ZOTrainer(model=open_checkpoint(base), args=arguments(tmp_path / "run", bf16=True))
    with pytest.raises(OptionError, match="micro_batch_size: found 1, with a loss that the trainer computes"):
        made(base, tmp_path / "run", SmoothedTrainer, zo=ZOArguments(micro_batch_size=1)).train()
    with pytest.raises(JournalError, match=r"journal.jsonl: found no file"):
        made(base, tmp_path / "run").train(resume_from_checkpoint=str(base))


def test_a_function_that_cannot_run_in_segments_is_refused(base: Path) -> None:
    model = open_checkpoint(base)
    batch, other = BATCHES[0], BATCHES[1]

    def twice(called: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return called(**inputs).loss + called(**other).loss  # type: ignore[no-any-return]

    def again(called: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return called(inputs["input_ids"], labels=inputs["labels"]).loss + called(inputs["input_ids"]).logits.mean()  # type: ignore[no-any-return]

    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
        with pytest.raises(BatchError, match=r"batch\['input_ids'\]: found different values in a second call"):
            engine.step(batch, CalledForward(model, twice))
        with pytest.raises(UnsupportedModelError, match="returned without calling it"):
            engine.step(batch, CalledForward(model, lambda called, inputs: torch.zeros(())))
        with pytest.raises(UnsupportedModelError, match="argument output_hidden_states: found True"):
            engine.step(batch, CalledForward(model, lambda called, i: called(**i, output_hidden_states=True).loss))
        assert engine.version == 0
        engine.step(batch, CalledForward(model, again))


@pytest.mark.parametrize("kind", ["drop_last", "iterable"])
def test_incomplete_batches_count_as_in_the_stock_trainer(base: Path, tmp_path: Path, kind: str) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(ROWS[:5])

    options: dict[str, Any] = {"dataloader_drop_last": kind == "drop_last"}
    rows: Any = Stream() if kind == "iterable" else ROWS[:5]
    trainer = made(base, tmp_path / "run", **options)
    stock = Trainer(model=AutoModelForCausalLM.from_pretrained(base), args=arguments(tmp_path / "stock", **options))
    ours: Any = trainer.predict(rows)
    theirs: Any = stock.predict(rows)
    assert np.array_equal(ours.predictions, theirs.predictions)
    assert ours.metrics["test_loss"] == theirs.metrics["test_loss"]


def test_weights_that_were_written_back_are_in_nobodys_way(base: Path, tmp_path: Path) -> None:
    zo = ZOArguments(write_back=WriteBackPolicy(directory=tmp_path / "disk", every=1))
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = made(base, tmp_path / "run", zo=zo, load_best_model_at_end=True, **options)
    trainer.train()
    best = trainer.state.best_global_step
    assert trainer.engine.version == best
    resumed = made(base, tmp_path / "run", zo=zo)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    with plain_loop(base) as engine:
        assert resumed.engine.journal.updates == engine.journal.updates


def test_what_the_trainer_tells_the_config_is_saved(base: Path, tmp_path: Path) -> None:
    trainer = made(base, tmp_path / "run")
    trainer.model.config.pad_token_id, trainer.model.generation_config.eos_token_id = 7, [4, 2]
    trainer.model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.config.pad_token_id == 7
    assert saved.generation_config.eos_token_id == [4, 2]
    with pytest.raises(OptionError, match=r"model.push_to_hub"):
        trainer.model.push_to_hub("somewhere")
    with pytest.raises(UnsupportedModelError, match="a call outside of a sweep"):
        trainer.model(**BATCHES[0])
    trainer.zo = ZOArguments(export_checkpoints=False)
    trainer._write(tmp_path / "saved", is_checkpoint=True)
    assert not (tmp_path / "saved" / "model.safetensors").exists(), "of another version than the journal"


def test_a_step_that_was_broken_off_is_forgotten(base: Path, tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    trainer = made(base, tmp_path, gradient_accumulation_steps=2, callbacks=[Stop()])
    trainer.train()
    assert trainer.engine.version == 0
    trainer.pop_callback(Stop)
    trainer.train()
    with plain_loop(base, steps=0) as engine:
        first = engine.step(BATCHES[:2])
    assert trainer.engine.journal.updates[0].losses == first.losses


def test_memory_is_counted_with_the_logits(base: Path) -> None:
    model = open_checkpoint(base, precision="mixed", dtype="bfloat16", loss_chunk=1)
    seen, kept = CalledForward(model, lambda called, batch: called(**batch).loss), BATCHES[0]["input_ids"].numel()
    keeping = CalledForward(model, lambda called, batch: called(**batch).logits, keeps_logits=True)
    batch = seen.prepared(BATCHES[0])
    whole = open_checkpoint(base)
    assert seen.forward_bytes(batch) >= whole.forward_bytes(whole.prepared(BATCHES[0]))
    assert keeping.held_bytes(keeping.prepared(BATCHES[0])) == seen.held_bytes(batch) + kept * VOCABULARY * 4


def test_batches_without_labels_are_not_left_out(base: Path) -> None:
    unlabelled = {"input_ids": BATCHES[1]["input_ids"]}
    silent = {**BATCHES[1], "labels": torch.full_like(BATCHES[1]["labels"], -100)}
    with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
        wrong: Any
        for wrong in ([BATCHES[0], unlabelled], [], 5, [5]):
            with pytest.raises(BatchError, match="batch"):
                engine.step(wrong)
        assert engine.version == 0
        both, one = engine.step([BATCHES[0], silent], seed=3), None
    with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
        one = engine.step(BATCHES[0], seed=3)
    assert both.losses == one.losses
