"""Other heads than a causal language model's, and encoders: MeZO bit for bit, evaluation and micro-batches among it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import zeroth_order
from models import LONGEST, make_batch, random_model, small_config
from parity import assert_same_weights
from transformers import (
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    PretrainedConfig,
    RobertaConfig,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from zo2adapters import MonolithicMeZO, ZOArguments, ZOTrainerMixin, generate, open_checkpoint, score
from zo2adapters.models.heads import HEADS
from zo2core import Engine, MeZOSGD, ZerothOrder
from zo2core.errors import BatchError, CheckpointError, JournalError, OptionError, UnsupportedModelError

ENCODER: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
}
# Which evaluation, and so MeZO, leaves out.
DROPOUTS: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
CONFIGS: dict[str, PretrainedConfig] = {
    "bert": BertConfig(**ENCODER, **DROPOUTS, max_position_embeddings=LONGEST),
    "roberta": RobertaConfig(**ENCODER, **DROPOUTS, max_position_embeddings=LONGEST + 2),
    "modernbert": ModernBertConfig(**ENCODER, max_position_embeddings=LONGEST, pad_token_id=0),
    "electra": ElectraConfig(**ENCODER, **DROPOUTS, max_position_embeddings=LONGEST, embedding_size=8),
    "distilbert": DistilBertConfig(
        vocab_size=40, dim=12, n_layers=2, n_heads=3, hidden_dim=20, max_position_embeddings=LONGEST
    ),
    "llama": small_config("llama", pad_token_id=0),
    "opt": small_config("opt"),
    "qwen3": small_config("qwen3", pad_token_id=0),
}
ENCODERS = ("bert", "roberta", "modernbert", "electra", "distilbert")
CASES = [
    (family, head)
    for family in CONFIGS
    for head in HEADS
    if head != "causal-lm"
    and (head != "masked-lm" or family in ENCODERS)
    and (family, head) not in {("opt", "token-classification")}
]


def saved(directory: Path, family: str, head: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint with every parameter random."""
    config = type(CONFIGS[family])(
        **{**CONFIGS[family].to_dict(), "num_labels": 2 if head == "question-answering" else 3, **changes}
    )
    random_model(config, dtype, auto_class=HEADS[head].auto_class).save_pretrained(directory)
    return directory


def labelled(head: str, lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    batch = make_batch(39, lengths, seed=seed)
    batch["input_ids"] = (batch["input_ids"] + 1) * batch["attention_mask"]  # 0 is padding
    rows, generator = len(lengths), torch.Generator().manual_seed(seed)
    labels = batch.pop("labels")
    if head == "masked-lm":
        return {**batch, "labels": labels}
    if head == "token-classification":
        return {**batch, "labels": torch.where(labels == -100, labels, labels % 3)}
    if head == "question-answering":
        start = torch.randint(min(lengths), (rows,), generator=generator)
        return {**batch, "start_positions": start, "end_positions": torch.full((rows,), min(lengths) - 1)}
    return {**batch, "labels": torch.randint(3, (rows,), generator=generator)}


def whole_model(base: Path, head: str, dtype: torch.dtype) -> Any:
    model = HEADS[head].auto_class.from_pretrained(base, dtype=dtype)
    model.config.use_cache = False
    return model.eval()


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "head"), CASES, ids=str)
def test_it_is_monolithic_mezo(tmp_path: Path, family: str, head: str, dtype: torch.dtype) -> None:
    base = saved(tmp_path / "base", family, head, dtype)
    numbers: dict[str, Any] = {"lr": 1e-2, "zo_eps": 1e-2}
    whole = whole_model(base, head, dtype)
    literal = MonolithicMeZO(whole, **numbers)
    with zeroth_order(open_checkpoint(base, head=head), MeZOSGD(**numbers)) as engine:
        for seed, lengths in enumerate([[6, 4, 5], [5]]):
            batch = labelled(head, lengths, seed)
            result = engine.step(batch)
            step = literal.step(batch, *result.seeds)
            assert result.losses == step.losses
            assert result.projected_grads == step.projected_grads
        assert engine.evaluate([batch]).loss == literal.loss(batch).item()
        assert_same_weights(engine.parameters_now(), whole.named_parameters())
        engine.export(tmp_path / "out")
    again = whole_model(tmp_path / "out", head, dtype)
    for parameter in again.parameters():  # at addresses as even as the other's: sums of one row depend on that
        parameter.data = parameter.data.clone()
    with torch.inference_mode():
        assert torch.equal(again(**batch).loss, whole(**batch).loss)


@pytest.mark.few(2)
@pytest.mark.parametrize("head", [head for head in HEADS if head != "causal-lm"])
def test_micro_batches_and_batches_join_as_one(tmp_path: Path, head: str) -> None:
    base = saved(tmp_path / "base", "bert", head)
    batches = [labelled(head, [6, 4, 5, 6, 3], 1), labelled(head, [4, 6], 2)]
    model = open_checkpoint(base, head=head)
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-9, zo_eps=1e-2))) as engine:
        whole, together = engine.evaluate(batches), engine.step(batches).losses
    with Engine(open_checkpoint(base, head=head), ZerothOrder(MeZOSGD(lr=1e-9, zo_eps=1e-2)), micro_batch_size=2) as engine:
        assert engine.evaluate(batches).loss == pytest.approx(whole.loss, rel=1e-5)
        assert engine.step(batches).losses == pytest.approx(together, rel=1e-5)
    with torch.inference_mode():
        hf = whole_model(base, head, torch.float32)
        losses = [hf(**batch).loss.item() for batch in batches]
        counts = [HEADS[head].count(batch) for batch in batches]
    assert whole.losses == tuple(losses)
    assert whole.loss == pytest.approx(sum(a * b for a, b in zip(losses, counts, strict=True)) / sum(counts), rel=1e-6)


def test_a_batch_without_a_label_that_counts_is_left_out_beside_others(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "bert", "masked-lm")
    good = labelled("masked-lm", [6, 4])
    silent = {**good, "labels": torch.full_like(good["labels"], -100)}
    with Engine(open_checkpoint(base, head="masked-lm"), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2))) as engine:
        with pytest.raises(BatchError, match="which is not counted"):
            engine.step(silent)
        both = engine.step([good, silent], seed=3)
    with Engine(open_checkpoint(base, head="masked-lm"), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2))) as engine:
        assert engine.step(good, seed=3).losses == both.losses


def test_a_head_that_reads_the_padding_notes_it(tmp_path: Path) -> None:
    base, head = saved(tmp_path / "base", "llama", "sequence-classification"), "sequence-classification"
    journal = tmp_path / "journal.jsonl"
    with Engine(open_checkpoint(base, head=head), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2)), journal=journal) as engine:
        engine.step(labelled(head, [6, 4]))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "pad_token_id": 9}))
    with pytest.raises(JournalError, match="pad"):
        Engine(open_checkpoint(base, head=head), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2)), journal=journal)


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0])),
        ({"problem_type": "regression"}, torch.tensor([[0.5, -1.0, 2.0]] * 3)),
        ({"problem_type": "multi_label_classification"}, torch.tensor([[1.0, 0.0, 1.0]] * 3)),
    ],
    ids=["regression", "regression of three", "several classes a row"],
)
@pytest.mark.parametrize("family", ["roberta", "llama"])
def test_labels_may_be_numbers(tmp_path: Path, family: str, changes: dict[str, Any], labels: torch.Tensor) -> None:
    head = "sequence-classification"
    base = saved(tmp_path / "base", family, head, **changes)
    batch = {**labelled(head, [6, 4, 5]), "labels": labels}
    literal = MonolithicMeZO(whole_model(base, head, torch.float32), lr=1e-2, zo_eps=1e-2)
    with Engine(open_checkpoint(base, head=head), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))) as engine:
        result = engine.step(batch)
        assert result.losses == literal.step(batch, *result.seeds).losses
        with pytest.raises(BatchError, match=r"batch\['labels'\]: found"):
            engine.step({**batch, "labels": torch.tensor([1, 0, 2])})
        assert engine.version == 1


@pytest.mark.parametrize("bf16", [False, True])
def test_a_stock_trainer_trains_a_classifier(tmp_path: Path, bf16: bool) -> None:
    class ZOTrainer(ZOTrainerMixin, Trainer):
        pass

    head = "sequence-classification"
    base = saved(tmp_path / "base", "roberta", head)
    batch = labelled(head, [6] * 6)
    rows: Any = [{key: value[row] for key, value in batch.items()} for row in range(6)]
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "bf16": bf16}
    common: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    args = TrainingArguments(output_dir=str(tmp_path / "run"), max_steps=3, learning_rate=1e-2, **options, **common)

    def metrics(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    precision = "mixed" if bf16 else "exact"
    model = open_checkpoint(base, head=head, precision=precision, dtype="bfloat16" if bf16 else "auto")
    zo = ZOArguments(guard=False)
    trainer: Any = ZOTrainer(model=model, args=args, zo=zo, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics)
    trainer.train()
    assert trainer.engine.version == 3
    ours = trainer.evaluate()
    trainer.save_model(tmp_path / "saved")
    stock = Trainer(
        model=whole_model(tmp_path / "saved", head, torch.float32), args=args, eval_dataset=rows, compute_metrics=metrics
    )
    if not bf16:
        assert {key: stock.evaluate()[key] for key in ("eval_loss", "eval_accuracy")} == {
            key: ours[key] for key in ("eval_loss", "eval_accuracy")
        }


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    head = "sequence-classification"
    base = saved(tmp_path / "base", "bert", head)
    with pytest.raises(OptionError, match="head: found 'regression'; expected one of causal-lm, masked-lm"):
        open_checkpoint(base, head="regression")
    with pytest.raises(OptionError, match="loss_chunk: found 4 for sequence-classification"):
        open_checkpoint(base, head=head, loss_chunk=4)
    with pytest.raises(CheckpointError, match="found"):
        open_checkpoint(base, head="masked-lm")
    with pytest.raises(CheckpointError, match="open them with their head"):
        open_checkpoint(base)  # BERT that predicts next tokens is not what the checkpoint holds
    model, batch = open_checkpoint(base, head=head), labelled(head, [6, 4])
    bad: list[dict[str, Any]] = [
        {**batch, "labels": torch.tensor([0, 3])},
        {**batch, "labels": torch.tensor([-100, -100])},
        {**batch, "labels": torch.tensor([0])},
        {**batch, "labels": torch.tensor([0.0, 1.0])},
        {key: value for key, value in batch.items() if key != "labels"},
        {**batch, "input_ids": torch.zeros(2, LONGEST + 1, dtype=torch.int64)},
    ]
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
        for wrong in bad:
            with pytest.raises(BatchError, match="batch"):
                engine.step(wrong)
            with pytest.raises(BatchError, match="batch"):
                engine.evaluate([wrong])
        assert engine.version == 0
        with pytest.raises(UnsupportedModelError, match="found a forward without a cache"):
            list(generate(engine, model, [[3, 4]], max_new_tokens=2))
        with pytest.raises((UnsupportedModelError, BatchError)):
            score(engine, model, [[3, 4]], [[[5], [6]]])
    spans = open_checkpoint(saved(tmp_path / "spans", "bert", "question-answering"), head="question-answering")
    batch = labelled("question-answering", [6, 4])
    with (
        Engine(spans, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine,
        pytest.raises(BatchError, match=r"batch\['end_positions'\]: found positions 3 to 6; expected 0 to 5"),
    ):
        engine.step({**batch, "end_positions": torch.tensor([3, 6])})


def test_rows_are_as_long_as_positions_behind_the_paddings_allow(tmp_path: Path) -> None:
    """RoBERTa counts positions from 2: a table of 14 takes rows of 12 tokens."""
    model = open_checkpoint(saved(tmp_path / "base", "roberta", "masked-lm"), head="masked-lm")
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2))) as engine:
        engine.step(labelled("masked-lm", [LONGEST]))
        with pytest.raises(BatchError, match=f"found {LONGEST + 1} tokens; expected at most {LONGEST}"):
            engine.step(labelled("masked-lm", [LONGEST + 1]))


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(vocab_size=40, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    for head in HEADS:
        with pytest.raises(UnsupportedModelError, match=r"t5|config\.json"):
            open_checkpoint(tmp_path, head=head)
