"""``--head sequence-classification``: texts with labels, against MeZO's loop over a whole model."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import refusal, run_here
from models import WORDS, save_tokenizer, small_config
from parity import assert_same_bits
from profiles import each_choice
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, PretrainedConfig

from zo2adapters import MonolithicMeZO
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import collate, training_batches
from zo2core import Journal

NOUNS = WORDS[3:]
BERT = BertConfig(
    vocab_size=len(WORDS), hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, pad_token_id=0
)
SIZES = {"bert": BERT, "llama": small_config("llama", vocab_size=len(WORDS), pad_token_id=0)}


def made(folder: Path, family: str, rows: list[Any], **changes: Any) -> Any:
    """A checkpoint with a tokenizer, and a file of rows, in a folder; its config."""
    given = {"num_labels": 3, **changes}
    config: PretrainedConfig = type(SIZES[family])(**{**SIZES[family].to_dict(), **given})
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model.config


def classes(count: int = 12) -> list[dict[str, Any]]:
    return [{"text": f"{NOUNS[i % 8]} {NOUNS[i % 5]}"[: 4 + 2 * i], "label": i % 3} for i in range(count)]


def asked(folder: Path, *more: object, output: str = "run") -> list[object]:
    common = ["--model", folder / "model", "--data", folder / "rows.jsonl", "--output", folder / output, "--steps", 4]
    return ["train", *common, "--batch-size", 4, "--lr", 1e-2, "--estimator", "mezo:exact", "--no-guard", *more]


def whole(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()


ONE_OR_NONE = {"num_labels": 1, "problem_type": "multi_label_classification"}
HEAD = ("--head", "sequence-classification")
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "classes": (classes(), {}),
    "pairs": ([{**row, "text_pair": NOUNS[place % 4]} for place, row in enumerate(classes())], {}),
    "one number": ([{"text": row["text"], "label": row["label"] / 2} for row in classes()], {"num_labels": 1}),
    "a number for each class": (
        [{"text": row["text"], "label": [row["label"] / 2, 1, 0.5]} for row in classes()],
        {"problem_type": "regression"},
    ),
    "one class or none": ([{"text": row["text"], "label": [row["label"] % 2]} for row in classes()], ONE_OR_NONE),
    "several classes": (
        [{"text": row["text"], "label": [row["label"] % 2, 1, 0]} for row in classes()],
        {"problem_type": "multi_label_classification"},
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "case"), each_choice(list(SIZES), list(CASES)))
def test_a_run_is_monolithic_mezo(tmp_path: Path, family: str, case: str) -> None:
    rows, changes = CASES[case]
    config = made(tmp_path, family, rows, **changes)
    assert run_here(*asked(tmp_path, *HEAD, "--evaluation", tmp_path / "rows.jsonl")).status == 0
    assert run_here("train", "--resume", tmp_path / "run", "--steps", 6).status == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    read = RowReader(tokenizer, 64, labelled_for=config).read(tmp_path / "rows.jsonl")
    model = whole(tmp_path)
    literal = MonolithicMeZO(model, lr=1e-2, zo_eps=1e-3)
    updates = Journal(tmp_path / "run" / "journal.jsonl").updates
    assert len(updates) == 6
    for update, batch_rows in zip(updates, itertools.islice(training_batches(read, batch_size=4, seed=0), 6), strict=True):
        batch = collate(batch_rows, pad_token_id=0)
        assert literal.step(batch, *update.seeds).losses == update.losses
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    own = dict(model.named_parameters())
    for name, value in trained.named_parameters():
        assert_same_bits(name, value.data, own[name].data)
    everything = collate(list(read), pad_token_id=0)
    with torch.inference_mode():
        output = trained(**everything)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in metrics if "evaluation_loss" in row][-1]
    assert last["evaluation_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    said = run_here("evaluate", "--run", tmp_path / "run", "--data", tmp_path / "rows.jsonl", "--no-base").out
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
    assert run_here("plan", "--model", tmp_path / "model", *HEAD, "--batch-size", 2).status == 0
    again = run_here("evaluate", "--model", tmp_path / "run" / "model", *HEAD, "--data", tmp_path / "rows.jsonl").out
    assert again == said


def test_classes_have_names_and_long_texts_lose_their_end(tmp_path: Path) -> None:
    names = {"label2id": {"bad": 0, "fair": 1, "good": 2}, "id2label": {0: "bad", 1: "fair", 2: "good"}}
    rows = [{"text": " ".join(NOUNS), "label": "good"}, {"text": NOUNS[0], "label": 0}]
    config = made(tmp_path, "bert", [*rows], **names)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    read = RowReader(tokenizer, 4, labelled_for=config).read(tmp_path / "rows.jsonl")
    assert [row.label for row in read] == [2, 0]
    assert (read.truncated, read.longest) == (1, 4)


def test_two_texts_are_told_apart_where_the_tokenizer_does(tmp_path: Path) -> None:
    config = made(tmp_path, "bert", [{"text": "the cat", "text_pair": "dog", "label": 1}, {"text": "dog", "label": 0}])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    read = RowReader(tokenizer, 8, labelled_for=config).read(tmp_path / "rows.jsonl")
    batch = collate(list(read), pad_token_id=0)
    assert batch["token_type_ids"].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("row", "changes", "said"),
    [
        ({"text": "the cat", "label": 3}, {}, "a class from 0 to 2"),
        ({"text": "the cat", "label": "worst"}, {}, "a class from 0 to 2"),
        ({"text": "the cat", "label": True}, {}, "a class from 0 to 2"),
        ({"text": "the cat"}, {}, "found null as 'label'"),
        ({"prompt": "the cat", "completion": "sat"}, {}, "a text 'text'"),
        ({"text": "the cat", "text_pair": 3, "label": 1}, {}, "a text 'text'"),
        ({"text": "the cat", "label": "x"}, {"num_labels": 1}, "a number"),
        ({"text": " ", "label": 1}, {}, "a text of no tokens"),
        ({"text": "the cat", "label": 1}, ONE_OR_NONE, "a list of 1 numbers"),
        ({"text": "the cat", "label": [1, 0]}, {"problem_type": "regression"}, "a list of 3 numbers"),
    ],
    ids=str,
)
def test_a_row_without_a_label_for_the_model_is_refused_by_its_line(
    tmp_path: Path, row: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    made(tmp_path, "bert", [row], **changes)
    line = refusal(*asked(tmp_path, *HEAD))
    assert "rows.jsonl, line 1" in line
    assert said in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((*HEAD, "--objective", "accuracy"), "--objective: found accuracy with --head"),
        ((*HEAD, "--loss-chunk", 3), "loss-chunk"),
        (("--head", "question-answering"), "sequence-classification"),
    ],
    ids=str,
)
def test_what_no_such_head_can_heed_is_refused(tmp_path: Path, more: tuple[object, ...], said: str) -> None:
    made(tmp_path, "llama", classes())
    assert said in refusal(*asked(tmp_path, *more))
    assert not (tmp_path / "run").exists()


def test_a_run_with_a_head_generates_nothing(tmp_path: Path) -> None:
    made(tmp_path, "llama", classes())
    assert run_here(*asked(tmp_path, *HEAD)).status == 0
    assert "causal language model" in refusal(
        "generate", "--run", tmp_path / "run", "--prompt", "the cat", "--max-new-tokens", 2
    )
    evaluating = ["evaluate", "--run", tmp_path / "run", "--data", tmp_path / "rows.jsonl"]
    assert "head" in refusal(*evaluating, "--head", "masked-lm")


def test_rows_are_padded_as_the_models_config_says_or_refused(tmp_path: Path) -> None:
    """A decoder finds the end of a row by its config's padding, whatever the tokenizer pads with."""
    config = made(tmp_path, "llama", classes(), pad_token_id=5)
    assert run_here(*asked(tmp_path, *HEAD)).status == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    read = RowReader(tokenizer, 64, labelled_for=config).read(tmp_path / "rows.jsonl")
    update = Journal(tmp_path / "run" / "journal.jsonl").updates[0]
    batch = collate(next(training_batches(read, batch_size=4, seed=0)), pad_token_id=5)
    assert MonolithicMeZO(whole(tmp_path), lr=1e-2, zo_eps=1e-3).step(batch, *update.seeds).losses == update.losses
    text = json.loads((tmp_path / "model" / "config.json").read_text())
    for pad in (None, -1):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**text, "pad_token_id": pad}))
        assert "pad_token_id" in refusal(*asked(tmp_path, *HEAD, output="unpadded"))
        assert not (tmp_path / "unpadded").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("family", sorted(SIZES))
def test_an_adapter_beside_a_classifier_is_trained_by_gradients(tmp_path: Path, family: str) -> None:
    made(tmp_path, family, classes())
    targets = ["query", "dense"] if family == "bert" else ["q_proj", "up_proj"]
    config = tmp_path / "lora.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": targets}))
    adapter = ("--method", "adamw", "--adapter", config)
    verified = run_here("verify", "--model", tmp_path / "model", *HEAD, *adapter, "--tokens", 8)
    assert verified.out.startswith("EQUAL over 3 steps, bit for bit"), verified.err
    common = ("--model", tmp_path / "model", "--data", tmp_path / "rows.jsonl", *HEAD)
    training = run_here(
        "train", *common, *adapter, "--output", tmp_path / "run", "--steps", 20, "--batch-size", 4, "--lr", 1e-2
    )
    assert training.status == 0, training.err
    evaluated = [
        run_here("evaluate", *common, *more) for more in ((), ("--adapter", tmp_path / "run" / "model", "--no-base"))
    ]
    before, after = (float(re.search(r"loss ([\d.]+)", ended.out).group(1)) for ended in evaluated)  # type: ignore[union-attr]
    assert after < before
