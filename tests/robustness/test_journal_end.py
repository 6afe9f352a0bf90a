"""Commands that only read a run whose journal has lost its end, or whose last record is damaged: they say it, or refuse."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended, assert_typed, run_here
from runs import small_run

from zo2adapters.trainers.trainer import Trainer
from zo2core import Journal

STEPS = 3
COMMANDS = ("export", "evaluate", "generate", "report")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = small_run(tmp_path_factory.mktemp("end"), steps=STEPS)
    with Trainer(options, quiet=True) as trainer:
        trainer.run()
    return options.output


def damaged(run: Path) -> None:
    """A digit of the last record is another one."""
    raw = (run / "journal.jsonl").read_bytes()
    at = raw.rindex(b'"lr":') + 6
    (run / "journal.jsonl").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


def torn(run: Path) -> None:
    raw = (run / "journal.jsonl").read_bytes()
    (run / "journal.jsonl").write_bytes(raw[:-30])


def cut(run: Path) -> None:
    """The last record is gone as a whole."""
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (run / "journal.jsonl").write_bytes(b"".join(lines[:-1]))


def used(command: str, run: Path, folder: Path, *more: object) -> Ended:
    options: dict[str, list[object]] = {
        "export": ["--run", run, "--output", folder / "model"],
        "evaluate": ["--run", run, "--data", run.parent / "rows.jsonl"],
        "generate": ["--run", run, "--prompt", "the cat", "--max-new-tokens", 1],
        "report": [run, "--output", folder / "page.html"],
        "journal": [run],
    }
    return run_here(command, *options[command], *more)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    shutil.copy(finished.parent / "rows.jsonl", tmp_path / "rows.jsonl")
    return tmp_path / "run"


@pytest.mark.few(4)
@pytest.mark.parametrize("damage", [damaged, torn, cut])
@pytest.mark.parametrize("command", [*COMMANDS, "journal"])
def test_a_lost_step_is_refused_if_the_metrics_know_it_and_said_otherwise(
    run: Path, tmp_path: Path, command: str, damage: Callable[[Path], None]
) -> None:
    damage(run)
    if command != "journal":
        ended = used(command, run, tmp_path)
        assert ended.status == 2
        assert_typed(ended)
        assert "expected at least 3, since metrics.jsonl knows of step 2" in ended.line
        assert not (tmp_path / "model").exists()
    (run / "metrics.jsonl").unlink()
    ended = used(command, run, tmp_path)
    assert ended.status == 0, ended
    told = "journal.jsonl: the last record is damaged or incomplete and is ignored; the run has 2 steps"
    assert (told in ended.err) == (damage is not cut)


def test_an_earlier_step_is_exported_whatever_became_of_the_last_one(run: Path, tmp_path: Path) -> None:
    damaged(run)
    ended = used("export", run, tmp_path, "--at", 2)
    assert (ended.status, "damaged" in ended.err) == (0, False), ended


def test_a_journal_without_its_run_says_that_its_end_is_damaged(finished: Path, run: Path, tmp_path: Path) -> None:
    damaged(run)
    base, journal = finished.parent / "base", run / "journal.jsonl"
    ended = run_here("export", "--model", base, "--journal", journal, "--output", tmp_path / "model")
    assert ended.status == 0, ended
    assert "the last record is damaged or incomplete and is ignored; the run has 2 steps" in ended.err


def test_a_header_of_a_stranger_cannot_change_a_terminal(tmp_path: Path) -> None:
    values = {"note": "\x1b[31m", "\x1b[2J": [{"a": "\r"}], "nothing": None, "model": {"model_type": "\x07"}}
    journal = Journal(tmp_path / "journal.jsonl")
    journal.begin({"base": "0", "seed": 0, **values})
    journal.close()
    ended = run_here("journal", tmp_path)
    assert ended.status == 0, ended
    assert all(line.isprintable() for line in ended.out.splitlines())
    assert "nothing" not in ended.out
