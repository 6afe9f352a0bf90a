"""Answers that are written: F1 and exact match as SQuAD's own program counts them, over text as ``generate`` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import refusal
from models import WORDS, save_model, save_tokenizer, small_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from zo2adapters.cli import main
from zo2adapters.tasks.task import f1_of_words, normalized

NOUNS = WORDS[3:]


def test_words_are_compared_without_articles_and_punctuation() -> None:
    assert normalized("  The quick, brown Fox! ") == "quick brown fox"
    assert f1_of_words("The cat.", "a cat") == 1
    assert f1_of_words("cat and dog", "dog") == pytest.approx(0.5)  # precision 1/3, recall 1
    assert f1_of_words("cat cat", "cat") == pytest.approx(2 / 3)
    assert f1_of_words("", "cat") == f1_of_words("dog", "cat") == 0
    assert f1_of_words("no", "no answer") == 0
    assert f1_of_words("No answer.", "no answer") == 1


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "model", small_config("llama", max_position_embeddings=32, vocab_size=len(WORDS)))
    save_tokenizer(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_the_model_writes_is_compared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained("model")
    tokenizer: Any = AutoTokenizer.from_pretrained("model")
    rows, matches = [], 0
    for number in range(5):
        prompt = " ".join(NOUNS[number : number + 1 + number % 3])
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        written = model.generate(ids, eos_token_id=tokenizer.eos_token_id, **options)
        text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip()
        is_right = number % 2 == 0 and normalized(text) != ""
        matches += is_right
        rows.append({"prompt": prompt, "answers": ["xyzzy", f"the {text}"] if is_right else ["xyzzy"]})
    assert matches
    (here / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["evaluate", "--model", "model", "--data", "asked.jsonl", "--max-new-tokens", "4", "--batch-size", "2"])
    assert f"F1 {matches / 5:.1%}, exact match {matches / 5:.1%}, 5 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"prompt": "the", "answers": []}, ["--max-new-tokens", "4"], "line 1: found the keys 'prompt', 'answers'"),
        ({"prompt": "", "answers": ["cat"]}, ["--max-new-tokens", "4"], "line 1: found a prompt of 0 tokens"),
        (
            {"prompt": "the " * 30, "answers": ["cat"]},
            ["--max-new-tokens", "4"],
            "which cannot be cut; expected at most 28, so that --max-new-tokens fit, too. What to do: "
            "shorten this row or remove it, or raise --sequence-length, up to what the model takes, or lower",
        ),
        (
            {"prompt": "the", "answers": ["cat"]},
            ["--max-new-tokens", "32"],
            "--max-new-tokens: found 32, where prompt and answer together may have 32",
        ),
        ({"prompt": "the", "answers": ["cat"]}, ["--max-new-tokens", "0"], "--max-new-tokens: found 0"),
    ],
    ids=["no answer", "no prompt", "too long", "no room", "no token"],
)
def test_what_does_not_fit_is_one_line(here: Path, row: dict[str, object], options: list[str], said: str) -> None:
    (here / "asked.jsonl").write_text(json.dumps(row) + "\n")
    assert said in refusal("evaluate", "--model", "model", "--data", "asked.jsonl", *options)
