"""TRL's trainers with zeroth-order steps: their data, losses and logs, our bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LONGEST, WORDS, random_model, save_model, save_tokenizer, small_config
from parity import assert_same_weights
from trainers import OF_TRL, trainer_options
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from zo2adapters import MonolithicMeZO, ZOArguments, ZOTrainerMixin, open_checkpoint
from zo2adapters.cli import main
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import training_batches
from zo2core import Distribution, Engine, Guarded, Journal, MeZOSGD, PhiloxNoise, ZerothOrder
from zo2core.errors import CheckpointError, OptionError

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

pytestmark = OF_TRL

EXACT = ZOArguments(estimator=MeZOSGD, distribution=None, guard=False, zo_eps=1e-2)
NOUNS = WORDS[3:]
PAIRS = [
    {"prompt": " ".join(NOUNS[i % 5 : i % 5 + 3]), "completion": " " + " ".join([NOUNS[i * 3 % 7]] * (1 + i % 2))}
    for i in range(12)
]
PREFERENCES = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " " + NOUNS[(i * 5 + 1) % 7]}
    for i, row in enumerate(PAIRS)
]


class ZOSFTTrainer(ZOTrainerMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    pass


class ZODPOTrainer(ZOTrainerMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    pass


def options(output: Path, **changes: Any) -> dict[str, Any]:
    constant = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.0, "warmup_steps": 0}
    return trainer_options(output, **{**constant, **changes})


def sft(base: Any, output: Path, kind: type[Any] = ZOSFTTrainer, zo: ZOArguments | None = None, **changes: Any) -> Any:
    given = {"zo": zo} if kind is ZOSFTTrainer else {}
    rows = datasets.Dataset.from_list(PAIRS)
    args = trl.SFTConfig(**options(output, **changes))
    return kind(model=base, args=args, train_dataset=rows, eval_dataset=rows.select(range(5)), **given)


def dpo(base: Any, output: Path, kind: type[Any] = ZODPOTrainer, zo: ZOArguments | None = None, **changes: Any) -> Any:
    given = {"zo": zo} if kind is ZODPOTrainer else {}
    rows = datasets.Dataset.from_list(PREFERENCES)
    args = trl.DPOConfig(**options(output, **changes))
    return kind(model=base, args=args, train_dataset=rows, eval_dataset=rows.select(range(5)), **given)


def same_as_literal(trainer: Any, stock: Any, *, bf16: bool = False) -> None:
    """Hold a trainer that has trained against MeZO's loop over the stock trainer's model and loss."""
    whole = stock.model

    class Literal(MonolithicMeZO):
        def loss(self, batch: Any) -> torch.Tensor:
            with torch.inference_mode():
                return stock.compute_loss(stock.model_wrapped, dict(batch)).detach()  # type: ignore[no-any-return]

    stock.model_wrapped = stock.accelerator.prepare_model(whole)
    literal = Literal(whole, lr=1e-3, zo_eps=1e-2)
    batches = iter(stock.get_train_dataloader())
    for update in trainer.engine.journal.updates:
        assert literal.step(next(batches), update.seeds[0]).losses == update.losses
    assert_same_weights(trainer.engine.parameters_now(), whole.named_parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("bf16", [False, True])
def test_sft_is_a_plain_loop(base: Path, tmp_path: Path, bf16: bool) -> None:
    trainer = sft(str(base), tmp_path / "run", bf16=bf16, logging_steps=1, eval_strategy="steps", eval_steps=3)
    trainer.train()
    estimator = Guarded(estimator=MeZOSGD(lr=1e-3, zo_eps=1e-3, perturb_in_place=False))
    model = open_checkpoint(base, precision="mixed" if bf16 else "exact")
    with Engine(model, ZerothOrder(estimator, noise=PhiloxNoise(Distribution.RADEMACHER), seed=42)) as engine:
        for batch in trainer.get_train_dataloader():
            engine.step({key: batch[key] for key in ("input_ids", "attention_mask", "labels")})
        assert trainer.engine.journal.updates == engine.journal.updates
        trainer.save_model(tmp_path / "saved")
        engine.export(tmp_path / "plain")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict().items(), weights.items())


@pytest.mark.few(1)
@pytest.mark.parametrize("changes", [{}, {"loss_type": "dft"}, {"bf16": True}], ids=str)
def test_sfts_own_loss_is_monolithic_mezos(base: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    zo = ZOArguments(**{**vars(EXACT), "trainer_loss": True})
    trainer = sft(base, tmp_path / "run", zo=zo, logging_steps=6, **changes)
    trainer.train()
    [logged] = [row for row in trainer.state.log_history if "loss" in row]
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= logged.keys()
    whole = AutoModelForCausalLM.from_pretrained(base)
    stock = sft(whole, tmp_path / "stock", trl.SFTTrainer, **changes)
    with torch.inference_mode():
        same_as_literal(trainer, stock, bf16=bool(changes.get("bf16")))


def test_sft_accumulates_as_the_stock_trainer_does(base: Path, tmp_path: Path) -> None:
    """A step of several batches is the mean over all their labelled tokens, with the trainer's loss and with the model's."""
    both = [
        sft(base, tmp_path / name, zo=ZOArguments(trainer_loss=own), gradient_accumulation_steps=3, max_steps=2)
        for name, own in (("own", True), ("models", False))
    ]
    for trainer in both:
        trainer.train()
    theirs, ours = ([update.losses for update in trainer.engine.journal.updates] for trainer in both)
    assert [list(losses) for losses in theirs] == [pytest.approx(losses, rel=1e-5) for losses in ours]


def test_packed_rows_run_without_padding(base: Path, tmp_path: Path) -> None:
    trainer = sft(base, tmp_path / "run", zo=EXACT, packing=True, max_length=12, max_steps=2)
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    assert "position_ids" in batch
    assert "attention_mask" not in batch
    whole = AutoModelForCausalLM.from_pretrained(base)
    literal = MonolithicMeZO(whole, lr=1e-3, zo_eps=1e-2)
    kept = {key: batch[key] for key in ("input_ids", "position_ids", "labels")}
    [first, *_] = trainer.engine.journal.updates
    whole.config.use_cache = False
    assert literal.step(kept, first.seeds[0]).losses == first.losses


@pytest.mark.few(1)
@pytest.mark.parametrize("changes", [{}, {"loss_type": "ipo"}, {"loss_type": ["sigmoid", "sft"]}, {"bf16": True}], ids=str)
def test_dpo_is_monolithic_mezos(base: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = dpo(base, tmp_path / "run", zo=EXACT, logging_steps=6, **changes)
    trainer.train()
    [logged] = [row for row in trainer.state.log_history if "loss" in row]
    assert {"rewards/accuracies", "rewards/margins", "logps/chosen"} <= logged.keys()
    whole = AutoModelForCausalLM.from_pretrained(base)
    stock = dpo(whole, tmp_path / "stock", trl.DPOTrainer, precompute_ref_log_probs=True, **changes)
    for column in ("ref_chosen_logps", "ref_rejected_logps"):
        assert trainer.train_dataset[column] == stock.train_dataset[column], column
    with torch.inference_mode():
        same_as_literal(trainer, stock)


def test_evaluation_is_the_stock_trainers(base: Path, tmp_path: Path) -> None:
    for make, kind in ((sft, trl.SFTTrainer), (dpo, trl.DPOTrainer)):
        name = kind.__name__
        trainer = make(base, tmp_path / name)
        trainer.train()
        trainer.save_model(tmp_path / name / "saved")
        ours = trainer.evaluate()
        fresh = make(str(tmp_path / name / "saved"), tmp_path / name / "fresh")
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / name / "saved")
        extra: dict[str, Any] = {"precompute_ref_log_probs": True} if make is dpo else {}
        theirs = make(whole, tmp_path / name / "stock", kind, **extra).evaluate()
        of_fresh = fresh.evaluate()
        for key in theirs.keys() - {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}:
            if not key.endswith(("_time", "num_tokens")):
                assert of_fresh[key] == theirs[key], (name, key)
        if make is sft:
            assert ours["eval_loss"] == theirs["eval_loss"]


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [sft, dpo])
def test_a_run_resumed_in_the_middle_is_the_one_that_was_not_interrupted(base: Path, tmp_path: Path, make: Any) -> None:
    whole = make(base, tmp_path / "run", save_strategy="steps", save_steps=3)
    whole.train()
    resumed = make(base, tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert resumed.engine.journal.updates == whole.engine.journal.updates
    assert resumed.state.global_step == 6


def test_what_cannot_be_heeded_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="bf16, fp16: found a model that computes in the dtype of its weights"):
        sft(open_checkpoint(base), tmp_path / "run", bf16=True)
    with pytest.raises(OptionError, match="model_init_kwargs: found"):
        sft(base, tmp_path / "run", model_init_kwargs={"dtype": "float32"})
    with pytest.raises(OptionError, match="disable_dropout: found False; expected the default, True"):
        dpo(base, tmp_path / "run", disable_dropout=False)
    with pytest.raises(OptionError, match="sync_ref_model: found True"):
        dpo(base, tmp_path / "run", sync_ref_model=True)
    args = trl.DPOConfig(**options(tmp_path / "run"))
    with pytest.raises(OptionError, match="ref_model: found a str"):
        ZODPOTrainer(model=base, args=args, ref_model="other")
    assert isinstance(args, TrainingArguments)


def test_every_trainer_of_trls_works_or_is_refused_as_it_is_made(base: Path, tmp_path: Path) -> None:
    said = {
        "GRPOTrainer": "generates text during training",
        "RLOOTrainer": "generates text during training",
        "DistillationTrainer": "generates text during training",
        "KTOTrainer": "calls the model with a second batch within one loss",
    }
    exported = {name for name in dir(trl) if name.endswith("Trainer")}
    assert exported == {*said, "SFTTrainer", "DPOTrainer", "RewardTrainer"}
    for name, why in said.items():
        kind: Any = type(f"ZO{name}", (ZOTrainerMixin, getattr(trl, name)), {})
        derived: Any = type("Derived", (kind,), {})
        for made in (kind, derived):
            with pytest.raises(OptionError, match=f"{name}: found a trainer that {why}"):
                made(model=base, args=TrainingArguments(**options(tmp_path / "run")))


def test_a_trainer_of_trls_that_was_not_tried_is_refused(base: Path, tmp_path: Path) -> None:
    new: Any = type("NewTrainer", (trl.SFTTrainer,), {"__module__": "trl.experimental.new"})
    kind: Any = type("ZONew", (ZOTrainerMixin, new), {})
    with pytest.raises(OptionError, match="NewTrainer: found a trainer that has not been tested"):
        kind(model=base, args=TrainingArguments(**options(tmp_path / "run")))


class ZORewardTrainer(ZOTrainerMixin, trl.RewardTrainer):  # type: ignore[misc, name-defined]
    pass


@pytest.mark.few(1)
@pytest.mark.parametrize("changes", [{}, {"center_rewards_coefficient": 0.1}, {"bf16": True}], ids=str)
def test_a_reward_model_is_monolithic_mezos(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = small_config("llama", pad_token_id=0, num_labels=1)
    random_model(config, torch.float32, auto_class=AutoModelForSequenceClassification).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    rows = datasets.Dataset.from_list(PREFERENCES)
    given: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows.select(range(5))}
    args = trl.RewardConfig(**options(tmp_path / "run", logging_steps=6, **changes))
    trainer = ZORewardTrainer(model=tmp_path / "base", args=args, zo=EXACT, **given)
    trainer.train()
    [logged] = [row for row in trainer.state.log_history if "loss" in row]
    assert {"accuracy", "margin", "mean_reward"} <= logged.keys()
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    stock = trl.RewardTrainer(model=whole, args=trl.RewardConfig(**options(tmp_path / "stock", **changes)), **given)
    with torch.inference_mode():
        same_as_literal(trainer, stock)
    trainer.save_model(tmp_path / "saved")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")


def test_what_is_no_reward_model_is_refused_by_its_trainer(base: Path, tmp_path: Path) -> None:
    args = trl.RewardConfig(**options(tmp_path / "run"))
    with pytest.raises(OptionError, match="model: found a LlamaForCausalLM with num_labels=2; expected a reward model"):
        ZORewardTrainer(model=open_checkpoint(base), args=args)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*AutoModelForSequenceClassification.*num_labels=1"):
        ZORewardTrainer(model=base, args=args)


def test_tpo_is_monolithic_mezos(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tpo = pytest.importorskip("trl.experimental.tpo")
    kind: Any = type("ZOTPOTrainer", (ZOTrainerMixin, tpo.TPOTrainer), {})
    rows = datasets.Dataset.from_list([{**row, "reference": row["chosen"]} for row in PREFERENCES])
    trainer = kind(model=base, args=tpo.TPOConfig(**options(tmp_path / "run")), train_dataset=rows, zo=EXACT)
    trainer.train()
    whole = AutoModelForCausalLM.from_pretrained(base)
    stock = tpo.TPOTrainer(model=whole, args=tpo.TPOConfig(**options(tmp_path / "stock")), train_dataset=rows)
    with torch.inference_mode():
        same_as_literal(trainer, stock)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zo2_train_and_sft_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The command line's run, and TRL's trainer on its rows in its order."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model", small_config("llama"), dtype)
    save_tokenizer(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    options_of_both = ["--steps", "6", "--lr", "1e-3", "--batch-size", "4", "--seed", "5"]
    if dtype is torch.bfloat16:
        options_of_both += ["--dtype", "bfloat16"]  # of the two that mixed precision may take
    main(["train", "--model", "model", "--data", "rows.jsonl", "--output", "run", *options_of_both])
    data = RowReader(AutoTokenizer.from_pretrained("model"), LONGEST).read(Path("rows.jsonl"))
    in_order = [
        row for batch, _ in zip(training_batches(data, batch_size=4, seed=5), range(6), strict=False) for row in batch
    ]
    rows = datasets.Dataset.from_list(
        [
            {
                "input_ids": list(row.input_ids),
                "labels": [-100] * row.prompt_length + list(row.input_ids[row.prompt_length :]),
            }
            for row in in_order
        ]
    )
    changes = {"bf16": dtype is torch.bfloat16, "per_device_train_batch_size": 4, "seed": 5}
    kept = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    args = trl.SFTConfig(**options(tmp_path / "sft", **changes, **kept))
    trainer = ZOSFTTrainer(model="model", args=args, train_dataset=rows)
    trainer.train()
    assert trainer.engine.journal.updates == Journal("run/journal.jsonl").updates
    trainer.save_model("saved")
    weights = AutoModelForCausalLM.from_pretrained("saved").state_dict()
    assert_same_weights(AutoModelForCausalLM.from_pretrained("run/model").state_dict().items(), weights.items())


def test_dpos_reference_stays_the_base(base: Path, tmp_path: Path) -> None:
    """Rows that are evaluated later are compared with the base, whatever steps were taken."""
    trainer = dpo(base, tmp_path / "run")
    batch = next(iter(trainer.get_train_dataloader()))
    of_base = trainer.compute_ref_log_probs(trainer.model, batch)
    trainer.train()
    version = trainer.engine.version
    later = trainer.compute_ref_log_probs(trainer.model, batch)
    assert all(torch.equal(one, other) for one, other in zip(of_base, later, strict=True))
    assert trainer.engine.version == version == 6
