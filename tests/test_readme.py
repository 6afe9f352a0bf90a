"""Every command and every example of the README runs as printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from models import WORDS, save_model, save_tokenizer, small_config
from safetensors.torch import load_file
from transformers import MistralConfig

from zo2adapters.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the models and files that the README speaks of, to run in."""
    save_tokenizer(save_model(tmp_path / "model", small_config("llama", vocab_size=len(WORDS), max_position_embeddings=64)))
    mistral = MistralConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    save_model(tmp_path / "mistral", mistral)
    (tmp_path / "pickled").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "pickled")
    torch.save(load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "pickled" / "pytorch_model.bin")
    rows = "\n".join(json.dumps({"prompt": "a b", "completion": f" c {word}"}) for word in WORDS[2:6])
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text(rows + "\n")
    question = {"prompt": "the cat is", "candidates": [" yes", " no"], "answer": " no"}
    (tmp_path / "choices.jsonl").write_text(json.dumps(question) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_commands_are_targets_of_the_makefile() -> None:
    commands = blocks("sh")[0].split("\n")[:-1]
    assert README.index("make demo") < 1200, "in the first screen"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert commands == ["make demo", "make test"]
    assert {command.removeprefix("make ") for command in commands} <= set(targets)


@pytest.mark.usefixtures("here")
def test_commands_run_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for block in blocks("sh")[1:] for line in block.splitlines()]
    assert {shlex.split(command)[1] for command in commands} >= {
        "verify",
        "train",
        "evaluate",
        "generate",
        "export",
        "plan",
        "journal",
        "convert",
        "timeline",
    }
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "zo2"
        main(arguments)
        assert capsys.readouterr().out


@pytest.mark.parametrize("example", blocks("python"))
def test_examples_run_as_printed(example: str, here: Path) -> None:
    exec(compile(example, "README.md", "exec"), {})
    assert ("mistral" in example) or (here / "out" / "config.json").exists()


def test_mistral_takes_at_most_15_lines() -> None:
    example = next(block for block in blocks("python") if "MISTRAL" in block)
    assert len(example.splitlines()) <= 15
