"""The programs of the papers' tables of accuracy: what they hold of the papers, and that each kind
of line runs, goes on and is kept.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import main
from command_lines import done, run_tool, write_rows
from models import WORDS, save_model, save_tokenizer, small_config
from paper import accuracy
from paper.accuracy import PRINTED, TABLES

from zo2adapters.commands.options import parse_command
from zo2adapters.commands.train import Train


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base, the rows of two tasks, and commands that run in this process."""
    config = small_config("llama", vocab_size=len(WORDS), max_position_embeddings=64)
    save_tokenizer(save_model(tmp_path / "base", config, torch.float32))
    for task in ("sst2", "wnli"):
        (tmp_path / task).mkdir()
        for name in ("train", "validation"):
            rows = [
                {"sentence": word, "sentence1": word, "sentence2": "cat", "label": number % 2}
                for number, word in enumerate(WORDS)
            ]
            write_rows(tmp_path / task / f"{name}.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accuracy, "zo2", lambda *words: done(*words).out)
    return tmp_path


def run(table: str, *options: object) -> dict[str, Any]:
    """The JSON of the program's last line."""
    told = ("accuracy", table, "runs", "--model", "base", "--data", ".", "--steps", 2, *options)
    out = run_tool(main, *told, "--rows", 6, 3, 5, "--rates", 1e-2).out
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_a_line_of_p_rge_is_run_once_goes_on_and_is_scored_beside_the_papers_figure(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "ZO-LoRA-FA (q>1)"
    told = ("--tasks", "wnli", "--lines", line, "--queries", 2, 4)
    first = run("p-rge-1", *told)
    runs = sorted(path.name for path in Path("runs/wnli").glob("*/lr*"))
    assert runs == ["lr0.01-q2", "lr0.01-q4"]
    options = json.loads(Path("runs/wnli/zo-lora-fa-q-1/lr0.01-q2/options.json").read_text())
    assert options["options"]["batching"]["batch_size"] == 8
    assert options["options"]["adapter_frozen"] == ["lora_A"]
    table = first["P-RGE, Table 1: TinyLlama-1.1B"]
    result = first["results"][line]["wnli"]
    scored = done("evaluate", "--run", result["run"], "--data", "runs/wnli/rows/test.jsonl").out
    assert f"{result['score']:.1f}%" in scored
    assert table[line]["wnli"] == result["score"]
    assert table[line]["paper's wnli"] == PRINTED["p-rge-1"][line]["wnli"] == 66.2
    assert first["results"]["Zero-shot"]["wnli"] == {"score": result["zero_shot"]}
    assert "FO-Full, wnli" in first["not run"]
    assert f"{line}, sst2" in first["not run"]
    assert f"{line}, wnli" not in first["not run"]

    def refuse(*words: object) -> str:
        raise AssertionError(words)

    monkeypatch.setattr(accuracy, "zo2", refuse)
    assert run("p-rge-1", *told)["results"] == first["results"], "finished lines are kept"


def test_zo2s_table_is_of_mezos_own_bits_and_says_that_mezo_was_not_run(here: Path) -> None:
    found = run("zo2", "--tasks", "sst2")
    assert found["results"]["ZO2"]["sst2"]["queries"] == 1
    assert "MeZO, sst2" in found["not run"]
    header = json.loads(Path("runs/sst2/zo2/lr0.01-q1/journal.jsonl").read_text().splitlines()[0])
    assert header["estimator"]["perturb_in_place"]
    assert header["noise"].endswith("sequential")


@pytest.mark.parametrize("name", TABLES)
def test_lines_of_the_papers_are_options_of_zo2_train(name: str) -> None:
    lines = TABLES[name].lines
    assert PRINTED[name].keys() - {"Zero-shot", "MeZO"} == lines.keys()
    for line in lines.values():
        told = ["--model", "base", "--data", "rows.jsonl", "--output", "run", "--lr", "1e-4"]
        command: Train = parse_command("train", Train, [*told, *shlex.split(line.options)])
        command.options.require_valid()
        assert len(line.grid("sst2")) >= 2
