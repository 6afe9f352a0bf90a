"""The table of options: each option of train has a row, and what a resumed run takes of a command follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_lines import make_place, refusal, run_here

from zo2adapters.commands.option_fields import option_names
from zo2adapters.commands.parsing import parse_command
from zo2adapters.commands.train import Train
from zo2adapters.trainers.option_table import ROWS, Change, require_unchanged
from zo2adapters.trainers.options import TrainOptions
from zo2core.errors import OptionError

CHANGED: dict[str, tuple[object, object]] = {  # the value on the command line, and in the options
    "steps": (5, 5),
    "keep_best": (True, True),
    "report_to": ("tensorboard", "tensorboard"),
    "memory": ("6GiB", "6GiB"),
    "device_memory": ("6GiB", "6GiB"),
    "snapshot_every": (3, 3),
    "activation_memory": ("1GiB", "1GiB"),
    "reward_seconds": (7, 7.0),
    "reward_memory": ("2GiB", "2GiB"),
    "max_drift": (0.5, 0.5),
    "write_back_every": (4, 4),
    "write_limit_tb": (0.5, 0.5),
}


def leaves(values: dict[str, Any]) -> dict[str, Any]:
    nested = [leaves(value) if isinstance(value, dict) else {name: value} for name, value in values.items()]
    return {name: value for group in nested for name, value in group.items()}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainOptions:
    """Options of a run that begins, in the directory ``run``."""
    monkeypatch.chdir(tmp_path)
    given = ["--model", "base", "--data", "rows.jsonl", "--evaluation", "rows.jsonl", "--output", "run"]
    begun = ["--steps", "4", "--reward", "length", "--estimator", "es", "--queries", "2"]
    command: Train = parse_command("train", Train, [*given, *begun])
    options = command.options().settled_as(command.options())
    Path("run").mkdir()
    (Path("run") / "options.json").write_text(json.dumps({"options": options.to_json()}))
    return options


def test_every_option_has_a_row_and_every_row_an_option() -> None:
    assert sorted(ROWS) == sorted(option_names(Train))


def test_every_option_of_a_run_that_is_saved_has_a_row(saved: TrainOptions) -> None:
    of_the_command = {name for name, row in ROWS.items() if row.change is Change.CALL}
    assert {*leaves(saved.to_json())} - {"schedule_steps"} == ROWS.keys() - of_the_command


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.change is Change.RESUME])
def test_what_may_change_at_a_resume_changes(name: str, saved: TrainOptions) -> None:
    given, expected = CHANGED[name]
    flag = f"--{name.replace('_', '-')}"
    command: Train = parse_command("train", Train, ["--resume", "run", *([flag] if given is True else [flag, str(given)])])
    before, after = leaves(saved.to_json()), leaves(command.options().to_json())
    assert {name: after[name] for name in after if after[name] != before[name]} == {
        name: expected,
        **({"schedule_steps": 4} if name == "steps" else {}),
    }


@pytest.mark.parametrize(
    "change", [change for change in Change if change not in (Change.RESUME, Change.CALL)], ids=lambda change: change.name
)
def test_what_is_fixed_at_the_start_is_refused_by_name(change: Change, saved: TrainOptions) -> None:
    before = leaves(saved.to_json())
    for name in (name for name, row in ROWS.items() if row.change is change):
        with pytest.raises(OptionError, match=f"^{name}: found "):
            require_unchanged(before, {**before, name: ["another value"]}, Change.RESUME, remedy="")


RUN = ("train", "--model", "base", "--data", "rows.jsonl", "--output", "all", "--runs", "runs.yaml", "--batch-size", 2)


def test_runs_that_go_on_refuse_another_common_option_and_take_what_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("runs.yaml").write_text("one: {rank: 2}\n")
    assert run_here(*RUN, "--steps", 2, "--lr", 1e-3).status == 0
    changes = ("--seed", 3), ("--lr", 2e-3), ("--weight-decay", 0.1), ("--eval-split", 0.5)
    for option, value in changes:
        told = refusal(*RUN, "--steps", 3, "--lr", 1e-3, option, value)
        assert told.startswith(f"zo2: {option}: found {value}; expected ")
    assert "--lr: found 1e-06" in refusal(*RUN, "--steps", 3), "it was left out, which is another rate"
    Path("runs.yaml").write_text("one: {rank: 3}\n")
    assert "--rank: found 3; expected 2" in refusal(*RUN, "--steps", 3, "--lr", 1e-3)
    Path("runs.yaml").write_text("one: {rank: 2}\n")
    assert run_here(*RUN, "--steps", 3, "--lr", 1e-3, "--memory", "4GiB").status == 0
    options = json.loads(Path("all/one/options.json").read_text())["options"]
    assert (options["steps"], options["storage"]["memory"]) == (3, "4GiB")
