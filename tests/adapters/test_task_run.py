"""A benchmark in one command: what its parts do one after the other, and nothing left where it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_lines import refusal, run_here
from models import WORDS, save_model, save_tokenizer, small_config

from zo2adapters.commands.evaluate import Evaluate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = small_config("llama", vocab_size=len(WORDS), max_position_embeddings=64)
    save_tokenizer(save_model(tmp_path / "base", config, torch.float32))
    (tmp_path / "sst2").mkdir()
    for name in ("train", "validation"):
        rows = [{"sentence": f"the {word}", "label": number % 2} for number, word in enumerate(WORDS)]
        (tmp_path / "sst2" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_one_command_does_what_its_parts_do(folder: Path) -> None:
    options = ["--model", folder / "base", "--steps", 6, "--lr", 1e-3, "--evaluate-every", 2, "--batch-size", 2]
    ended = run_here(
        "train", "--task", "sst2", "--data", folder / "sst2", "--shots", 2, "--output", folder / "run", *options
    )
    assert ended.status == 0, ended.err
    scores = [line for line in ended.out.splitlines() if "accuracy" in line]
    assert [line.partition(":")[0] for line in scores] == ["zero-shot", "with 2 demonstrations", "fine-tuned"]
    assert (
        run_here("rows", "--task", "sst2", "--data", folder / "sst2", "--shots", 2, "--output", folder / "rows").status == 0
    )
    for name in ("train", "dev", "test", "in-context"):
        ours, theirs = (folder / where / f"{name}.jsonl" for where in ("run.rows", "rows"))
        assert ours.read_bytes() == theirs.read_bytes()
    rows = ["--data", folder / "rows" / "train.jsonl", "--evaluation", folder / "rows" / "dev.jsonl"]
    assert run_here("train", *rows, "--keep-best", "--output", folder / "parts", *options).status == 0
    ours, theirs = (folder / run / "model" / "model.safetensors" for run in ("run", "parts"))
    assert ours.read_bytes() == theirs.read_bytes()
    for model, line in ((folder / "base", scores[0]), (folder / "parts" / "model", scores[2])):
        evaluating = ["evaluate", "--model", model, "--data", folder / "rows" / "test.jsonl", "--batch-size", 2]
        assert run_here(*evaluating).out.strip() == line.partition(": ")[2]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (["--task", "sst3"], "--task"),
        (["--task", "sst2", "--lr", "0"], "--lr"),
        (["--task", "sst2", "--evaluation", "rows.jsonl"], "--evaluation"),
        (["--task", "sst2", "--adapter", "adapter.json"], "--adapter"),
        (["--task", "sst2", "--head", "sequence-classification"], "--head"),
        (["--task", "sst2", "--objective", "dpo:beta=0.3"], "beta of --objective"),
        (["--shots", "2"], "--shots"),
    ],
)
def test_what_does_not_go_with_a_task_is_refused_and_leaves_nothing(folder: Path, options: list[str], where: str) -> None:
    before = set(folder.iterdir())
    given = ["--model", folder / "base", "--data", folder / "sst2", "--output", folder / "run"]
    assert refusal("train", *given, *options).startswith(f"zo2: {where}: found")
    assert set(folder.iterdir()) == before


def test_a_task_is_refused_under_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    given = ["--model", folder / "base", "--data", folder / "sst2", "--output", folder / "run", "--task", "sst2"]
    assert "zo2 rows" in refusal("train", *given)


def test_rows_that_a_killed_process_left_are_used_again_and_others_are_refused(folder: Path) -> None:
    options = ["--model", folder / "base", "--steps", 1, "--lr", 1e-3, "--batch-size", 2]
    given = ["train", "--task", "sst2", "--data", folder / "sst2", "--output", folder / "run", *options]
    assert run_here("rows", "--task", "sst2", "--data", folder / "sst2", "--output", folder / "run.rows").status == 0
    whole = (folder / "run.rows" / "test.jsonl").read_bytes()
    (folder / "run.rows" / "test.jsonl").write_bytes(whole + b"\n")
    assert "run.rows: found something at this path" in refusal(*given)
    assert (folder / "run.rows").exists()
    (folder / "run.rows" / "test.jsonl").write_bytes(whole)
    ended = run_here(*given)
    assert ended.status == 0, ended
    assert f"{folder / 'run.rows'}: " in ended.out


def test_an_interruption_before_the_run_began_leaves_no_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluate, "run", interrupted)
    given = ["--model", folder / "base", "--data", folder / "sst2", "--output", folder / "run"]
    assert run_here("train", "--task", "sst2", *given).status == 130
    assert not (folder / "run.rows").exists()


def test_the_command_given_again_is_told_to_resume_the_run(folder: Path) -> None:
    options = ["--model", folder / "base", "--steps", 1, "--lr", 1e-3, "--batch-size", 2]
    given = ["train", "--task", "sst2", "--data", folder / "sst2", "--output", folder / "run", *options]
    assert run_here(*given).status == 0
    assert f"continue the run with zo2 train --resume {folder / 'run'}" in refusal(*given)
    assert run_here("train", "--resume", folder / "run").status == 0
