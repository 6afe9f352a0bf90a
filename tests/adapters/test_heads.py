"""Other heads than a causal language model's, and encoders: MeZO bit for bit, evaluation and
micro-batches among it.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done, refusal, run_here, write_rows
from engines import zeroth_order
from models import LONGEST, WORDS, make_batch, save_model, save_tokenizer, small_config
from parity import assert_same_bits, assert_steps_alike
from profiles import each_choice
from trainers import trainer_options
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
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

from zo2adapters import (
    MonolithicMeZO,
    StreamedArguments,
    ZOTrainerMixin,
    generate,
    open_checkpoint,
    score,
)
from zo2adapters.models.batches import HEADS
from zo2adapters.tasks.rows import RowReader, collate, training_batches
from zo2core import Engine, Journal, MeZOSGD, ZerothOrder
from zo2core.errors import (
    BatchError,
    CheckpointError,
    JournalError,
    OptionError,
    UnsupportedModelError,
)

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
    "electra": ElectraConfig(
        **ENCODER, **DROPOUTS, max_position_embeddings=LONGEST, embedding_size=8
    ),
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


def saved(
    directory: Path, family: str, head: str, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    given = {"num_labels": 2 if head == "question-answering" else 3, **changes}
    config = type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), **given})
    return save_model(directory, config, dtype, auto_class=HEADS[head].auto_class)


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
        return {
            **batch,
            "start_positions": start,
            "end_positions": torch.full((rows,), min(lengths) - 1),
        }
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
        first, batch = labelled(head, [6, 4, 5], 0), labelled(head, [5], 1)
        assert_steps_alike(engine, literal, [first, batch])
        assert engine.evaluate([batch]).loss == literal.loss(batch).item()
        engine.export(tmp_path / "out")
    again = whole_model(tmp_path / "out", head, dtype)
    for parameter in again.parameters():
        # at addresses as even as the other's: sums of one row depend on that
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
    with Engine(
        open_checkpoint(base, head=head),
        ZerothOrder(MeZOSGD(lr=1e-9, zo_eps=1e-2)),
        micro_batch_size=2,
    ) as engine:
        assert engine.evaluate(batches).loss == pytest.approx(whole.loss, rel=1e-5)
        assert engine.step(batches).losses == pytest.approx(together, rel=1e-5)
    with torch.inference_mode():
        hf = whole_model(base, head, torch.float32)
        losses = [hf(**batch).loss.item() for batch in batches]
        counts = [HEADS[head].count(batch) for batch in batches]
    assert whole.losses == tuple(losses)
    assert whole.loss == pytest.approx(
        sum(a * b for a, b in zip(losses, counts, strict=True)) / sum(counts), rel=1e-6
    )


def test_a_head_that_reads_the_padding_notes_it_and_a_journal_goes_on_with_a_model_that_has_run(
    tmp_path: Path,
) -> None:
    base, head = (
        saved(tmp_path / "base", "llama", "sequence-classification"),
        "sequence-classification",
    )
    journal, method = tmp_path / "journal.jsonl", ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2))
    model = open_checkpoint(base, head=head)
    for step in range(2):  # the first forward writes the kind of problem into the config
        with Engine(model, method, journal=journal) as engine:
            assert engine.version == step
            engine.step(labelled(head, [6, 4]))
        model.config.pad_token_id = 9  # by a trainer
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "pad_token_id": 9}))
    with pytest.raises(JournalError, match="pad"):
        Engine(open_checkpoint(base, head=head), method, journal=journal)


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
def test_labels_may_be_numbers(
    tmp_path: Path, family: str, changes: dict[str, Any], labels: torch.Tensor
) -> None:
    head = "sequence-classification"
    base = saved(tmp_path / "base", family, head, **changes)
    batch = {**labelled(head, [6, 4, 5]), "labels": labels}
    literal = MonolithicMeZO(whole_model(base, head, torch.float32), lr=1e-2, zo_eps=1e-2)
    with Engine(
        open_checkpoint(base, head=head), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))
    ) as engine:
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
    args = TrainingArguments(
        **trainer_options(tmp_path / "run", max_steps=3, per_device_eval_batch_size=4, bf16=bf16)
    )

    def metrics(prediction: Any) -> dict[str, float]:
        return {
            "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
        }

    precision = "mixed" if bf16 else "exact"
    model = open_checkpoint(
        base, head=head, precision=precision, dtype="bfloat16" if bf16 else "auto"
    )
    given = StreamedArguments(method="zeroth-order", guard=False)
    trainer: Any = ZOTrainer(
        model=model,
        args=args,
        streamed=given,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=metrics,
    )
    trainer.train()
    assert trainer.engine.version == 3
    ours = trainer.evaluate()
    trainer.save_model(tmp_path / "saved")
    whole: Any = whole_model(tmp_path / "saved", head, torch.float32)
    theirs = Trainer(model=whole, args=args, eval_dataset=rows, compute_metrics=metrics).evaluate()
    for key in () if bf16 else ("eval_loss", "eval_accuracy"):
        assert ours[key] == theirs[key]


def test_what_does_not_fit_is_refused_and_a_batch_without_a_label_that_counts_left_out(
    tmp_path: Path,
) -> None:
    model, good = (
        open_checkpoint(saved(tmp_path / "mlm", "bert", "masked-lm"), head="masked-lm"),
        labelled("masked-lm", [6, 4]),
    )
    silent, losses = {**good, "labels": torch.full_like(good["labels"], -100)}, []
    for batch in ([good, silent], good):
        with Engine(model, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2))) as engine:
            with pytest.raises(BatchError, match="which is not counted"):
                engine.step(silent)
            losses.append(engine.step(batch, seed=3).losses)
    assert losses[0] == losses[1]
    head = "sequence-classification"
    base = saved(tmp_path / "base", "bert", head)
    with pytest.raises(
        OptionError, match="head: found 'regression'; expected one of causal-lm, masked-lm"
    ):
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
        with pytest.raises(
            BatchError,
            match=r"found classes 0 to 3; expected 0 to 2\. .*, and -100 where none counts",
        ):
            engine.step(bad[0])
        assert engine.version == 0
        with pytest.raises(UnsupportedModelError, match="found a forward without a cache"):
            list(generate(engine, model, [[3, 4]], max_new_tokens=2))
        with pytest.raises((UnsupportedModelError, BatchError)):
            score(engine, model, [[3, 4]], [[[5], [6]]])
    spans = open_checkpoint(
        saved(tmp_path / "spans", "bert", "question-answering"), head="question-answering"
    )
    batch = labelled("question-answering", [6, 4])
    with (
        Engine(spans, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine,
        pytest.raises(
            BatchError, match=r"batch\['end_positions'\]: found positions 3 to 6; expected 0 to 5"
        ),
    ):
        engine.step({**batch, "end_positions": torch.tensor([3, 6])})


def test_rows_are_as_long_as_positions_behind_the_paddings_allow_and_encoder_decoders_are_refused(
    tmp_path: Path,
) -> None:
    """RoBERTa counts positions from 2: a table of 14 takes rows of 12 tokens."""
    model = open_checkpoint(saved(tmp_path / "base", "roberta", "masked-lm"), head="masked-lm")
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2))) as engine:
        engine.step(labelled("masked-lm", [LONGEST]))
        with pytest.raises(
            BatchError, match=f"found {LONGEST + 1} tokens; expected at most {LONGEST}"
        ):
            engine.step(labelled("masked-lm", [LONGEST + 1]))
    config = T5Config(vocab_size=40, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    for head in HEADS:
        with pytest.raises(UnsupportedModelError, match=r"t5|config\.json"):
            open_checkpoint(tmp_path / "t5", head=head)


# ``--head sequence-classification``: texts with labels


NOUNS = WORDS[3:]
BERT = BertConfig(
    vocab_size=len(WORDS),
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=20,
    pad_token_id=0,
)
SIZES = {"bert": BERT, "llama": small_config("llama", vocab_size=len(WORDS), pad_token_id=0)}


def made(folder: Path, family: str, rows: list[Any], **changes: Any) -> Any:
    """A checkpoint with a tokenizer, and a file of rows, in a folder; its config."""
    given = {"num_labels": 3, **changes}
    config: PretrainedConfig = type(SIZES[family])(**{**SIZES[family].to_dict(), **given})
    save_tokenizer(
        save_model(folder / "model", config, auto_class=AutoModelForSequenceClassification)
    )
    write_rows(folder / "rows.jsonl", rows)
    return config


def classes(count: int = 12) -> list[dict[str, Any]]:
    return [
        {"text": f"{NOUNS[i % 8]} {NOUNS[i % 5]}"[: 4 + 2 * i], "label": i % 3}
        for i in range(count)
    ]


def asked(folder: Path, *more: object, output: str = "run") -> list[object]:
    common = [
        "--model",
        folder / "model",
        "--data",
        folder / "rows.jsonl",
        "--output",
        folder / output,
        "--steps",
        4,
    ]
    return [
        "train",
        *common,
        "--batch-size",
        4,
        "--lr",
        1e-2,
        "--method",
        "mezo",
        "--no-guard",
        *more,
    ]


def whole(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()


ONE_OR_NONE = {"num_labels": 1, "problem_type": "multi_label_classification"}
HEAD = ("--head", "sequence-classification")
LABELLED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "classes": (classes(), {}),
    "pairs": ([{**row, "text_pair": NOUNS[place % 4]} for place, row in enumerate(classes())], {}),
    "one number": (
        [{"text": row["text"], "label": row["label"] / 2} for row in classes()],
        {"num_labels": 1},
    ),
    "a number for each class": (
        [{"text": row["text"], "label": [row["label"] / 2, 1, 0.5]} for row in classes()],
        {"problem_type": "regression"},
    ),
    "one class or none": (
        [{"text": row["text"], "label": [row["label"] % 2]} for row in classes()],
        ONE_OR_NONE,
    ),
    "several classes": (
        [{"text": row["text"], "label": [row["label"] % 2, 1, 0]} for row in classes()],
        {"problem_type": "multi_label_classification"},
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "case"), each_choice(list(SIZES), list(LABELLED)))
def test_a_run_with_labels_is_monolithic_mezo(tmp_path: Path, family: str, case: str) -> None:
    rows, changes = LABELLED[case]
    config = made(tmp_path, family, rows, **changes)
    assert run_here(*asked(tmp_path, *HEAD, "--evaluation", tmp_path / "rows.jsonl")).status == 0
    assert run_here("train", "--resume", tmp_path / "run", "--steps", 6).status == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    read = RowReader(tokenizer, 64, labelled_for=config).read(tmp_path / "rows.jsonl")
    model = whole(tmp_path)
    literal = MonolithicMeZO(model, lr=1e-2, zo_eps=1e-3)
    updates = Journal(tmp_path / "run" / "journal.jsonl").updates
    assert len(updates) == 6
    for update, batch_rows in zip(
        updates, itertools.islice(training_batches(read, batch_size=4, seed=0), 6), strict=True
    ):
        batch = collate(batch_rows, pad_token_id=0)
        assert literal.step(batch, *update.seeds).losses == update.losses
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    own = dict(model.named_parameters())
    for name, value in trained.named_parameters():
        assert_same_bits(name, value.data, own[name].data)
    everything = collate(list(read), pad_token_id=0)
    with torch.inference_mode():
        output = trained(**everything)
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    last = [row for row in metrics if "evaluation_loss" in row][-1]
    assert last["evaluation_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    said = run_here(
        "evaluate", "--run", tmp_path / "run", "--data", tmp_path / "rows.jsonl", "--no-base"
    ).out
    if case in ("classes", "pairs"):
        right = (output.logits.argmax(-1) == everything["labels"]).double().mean().item()
        assert last["evaluation_accuracy"] == pytest.approx(right)
        assert f"accuracy {right:.1%}, 12 rows" in said
    else:
        assert "evaluation_accuracy" not in last
        assert "12 rows" in said
        assert "accuracy" not in said
    verified = run_here("verify", "--model", tmp_path / "model", *HEAD, "--tokens", 8)
    assert verified.status == 0, verified.err
    assert (
        run_here(
            "plan",
            "--method",
            "zeroth-order",
            "--model",
            tmp_path / "model",
            *HEAD,
            "--batch-size",
            2,
        ).status
        == 0
    )
    again = run_here(
        "evaluate", "--model", tmp_path / "run" / "model", *HEAD, "--data", tmp_path / "rows.jsonl"
    ).out
    assert again == said


def test_classes_have_names_long_texts_lose_their_end_and_two_are_told_apart(
    tmp_path: Path,
) -> None:
    names = {
        "label2id": {"bad": 0, "fair": 1, "good": 2},
        "id2label": {0: "bad", 1: "fair", 2: "good"},
    }
    rows = [{"text": " ".join(NOUNS), "label": "good"}, {"text": NOUNS[0], "label": 0}]
    config = made(tmp_path, "bert", rows, **names)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    read = RowReader(tokenizer, 4, labelled_for=config).read(tmp_path / "rows.jsonl")
    assert [row.label for row in read] == [2, 0]
    assert (read.truncated, read.longest) == (1, 4)
    write_rows(
        tmp_path / "two.jsonl",
        [{"text": "the cat", "text_pair": "dog", "label": 1}, {"text": "dog", "label": 0}],
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    read = RowReader(tokenizer, 8, labelled_for=config).read(tmp_path / "two.jsonl")
    batch = collate(list(read), pad_token_id=0)
    assert batch["token_type_ids"].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_rows_are_padded_as_the_models_config_says_or_refused(tmp_path: Path) -> None:
    """A decoder finds the end of a row by its config's padding, whatever the tokenizer pads
    with.
    """
    config = made(tmp_path, "llama", classes(), pad_token_id=5)
    assert run_here(*asked(tmp_path, *HEAD)).status == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    read = RowReader(tokenizer, 64, labelled_for=config).read(tmp_path / "rows.jsonl")
    update = Journal(tmp_path / "run" / "journal.jsonl").updates[0]
    batch = collate(next(training_batches(read, batch_size=4, seed=0)), pad_token_id=5)
    assert (
        MonolithicMeZO(whole(tmp_path), lr=1e-2, zo_eps=1e-3).step(batch, *update.seeds).losses
        == update.losses
    )
    of_run = ("--run", tmp_path / "run")
    assert "causal language model" in refusal(
        "generate", *of_run, "--prompt", "the cat", "--max-new-tokens", 2
    )
    assert "head" in refusal(
        "evaluate", *of_run, "--data", tmp_path / "rows.jsonl", "--head", "masked-lm"
    )
    text = json.loads((tmp_path / "model" / "config.json").read_text())
    for pad in (None, -1):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**text, "pad_token_id": pad}))
        assert "pad_token_id" in refusal(*asked(tmp_path, *HEAD, output="unpadded"))
        assert not (tmp_path / "unpadded").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("family", sorted(SIZES))
def test_an_adapter_beside_a_classifier_is_trained_by_gradients(
    tmp_path: Path, family: str
) -> None:
    made(tmp_path, family, classes())
    targets = ["query", "dense"] if family == "bert" else ["q_proj", "up_proj"]
    config = tmp_path / "lora.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": targets}))
    adapter = ("--method", "adamw", "--adapter", config)
    verified = run_here("verify", "--model", tmp_path / "model", *HEAD, *adapter, "--tokens", 8)
    assert verified.out.startswith("EQUAL over 3 steps, bit for bit"), verified.err
    common = ("--model", tmp_path / "model", "--data", tmp_path / "rows.jsonl", *HEAD)
    done(
        "train",
        "--method",
        "zeroth-order",
        *common,
        *adapter,
        "--output",
        tmp_path / "run",
        "--steps",
        20,
        "--batch-size",
        4,
        "--lr",
        1e-2,
    )
    trained = ("--adapter", tmp_path / "run" / "model", "--no-base")
    evaluated = [done("evaluate", *common, *more) for more in ((), trained)]
    before, after = (float(re.search(r"loss ([\d.]+)", ended.out).group(1)) for ended in evaluated)  # type: ignore[union-attr]
    assert after < before
