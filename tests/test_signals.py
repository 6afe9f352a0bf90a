"""SIGINT and SIGTERM at any moment of a command: no traceback, nothing torn, one line that says how to go on."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_lines import Ended, command, environment, make_place, run_here
from test_run import outcome

from zo2core import Journal

STEPS = 300
NUMBERS = (signal.SIGINT, signal.SIGTERM)

every_signal = pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("signals"))


def train(folder: Path, output: Path) -> list[object]:
    given = ["--model", folder / "base", "--data", folder / "rows.jsonl", "--output", output]
    return ["train", *given, "--steps", STEPS, "--batch-size", 3, "--lr", 1e-3, "--write-back-every", 2]


def start(arguments: Sequence[object]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def finish(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    """Wait until a run has taken so many steps."""
    journal, end = run / "journal.jsonl", time.monotonic() + 100
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > steps):
        assert time.monotonic() < end
        time.sleep(0.005)


def assert_interrupted(ended: Ended, number: signal.Signals) -> None:
    assert ended.status == 128 + number, ended
    assert "Traceback" not in ended.err
    assert "Exception ignored" not in ended.err


@every_signal
def test_a_signal_in_training_says_how_to_go_on_and_the_run_goes_on(
    prepared: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = start(train(prepared, run))
    wait_for_steps(process, run, 20)
    process.send_signal(number)
    ended = finish(process)
    assert_interrupted(ended, number)
    assert f"zo2 train --resume {run}" in ended.err
    match = re.search(r"stopped after (\d+) steps", ended.err)
    assert match is not None
    assert abs(len(Journal(run / "journal.jsonl").updates) - int(match[1])) <= 1
    assert run_here("train", "--resume", run).status == 0
    assert run_here(*train(prepared, tmp_path / "whole")).status == 0
    assert outcome(run)["weights"] == outcome(tmp_path / "whole")["weights"]
    assert outcome(run)["journal"] == outcome(tmp_path / "whole")["journal"]


@every_signal
def test_two_signals_at_once_are_as_good_as_one(prepared: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    process = start(train(prepared, run))
    wait_for_steps(process, run, 3)
    process.send_signal(number)
    process.send_signal(number)
    ended = finish(process)
    assert_interrupted(ended, number)
    assert len(Journal(run / "journal.jsonl").updates) >= 3


def test_signals_without_end_end_it(prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(train(prepared, run))
    wait_for_steps(process, run, 3)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert_interrupted(finish(process), signal.SIGTERM)
    assert len(Journal(run / "journal.jsonl").updates) >= 3


@every_signal
@pytest.mark.parametrize("after", [0.15, 1.0, 2.5])
def test_a_signal_while_a_command_starts_leaves_nothing(
    prepared: Path, tmp_path: Path, number: signal.Signals, after: float
) -> None:
    process = start(train(prepared, tmp_path / "run"))
    wait_until_handled(process)
    time.sleep(after)
    process.send_signal(number)
    ended = finish(process)
    assert_interrupted(ended, number)
    if "nothing was begun" in ended.err:
        assert not any(tmp_path.iterdir())


def wait_until_handled(process: subprocess.Popen[str]) -> None:
    """Wait until a process has handlers: before that it is Python that starts, not the command."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.002)
    raise AssertionError("no handler")


EXPORTING = """
import sys, time
import zo2core.checkpoint.writer as writer
real = writer._write_header
def slow(file, parameters):
    real(file, parameters)
    file.flush()
    time.sleep(5)
writer._write_header = slow
from zo2adapters.cli import main
main()
"""


@every_signal
def test_a_signal_while_a_model_is_written_leaves_no_half_of_it(
    prepared: Path, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ["export", "--model", prepared / "base", "--output", tmp_path / "new"]
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORTING, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    end = time.monotonic() + 100
    while not list(tmp_path.glob(".new.partial-*/model.safetensors")):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    process.send_signal(number)
    assert_interrupted(finish(process), number)
    assert not list(tmp_path.iterdir())


def test_a_signal_that_was_ignored_stays_ignored(prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command(*train(prepared, run))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    wait_for_steps(process, run, 3)
    process.send_signal(signal.SIGINT)
    assert finish(process).status == 0


def test_signals_at_random_moments_tear_nothing(prepared: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """From the first import to the last byte of the model, again and again, with one signal, two or three."""
    rng = random.Random(5)
    wanted = 60 if request.config.getoption("--long") else 2
    assert run_here(*train(prepared, tmp_path / "whole")).status == 0
    expected = outcome(tmp_path / "whole")
    run, interrupted, attempts = tmp_path / "run", 0, 0
    while True:
        arguments = ["train", "--resume", run] if (run / "options.json").exists() else train(prepared, run)
        process = start(arguments)
        if interrupted < wanted:
            wait_until_handled(process)
            time.sleep(rng.uniform(0, 5))
            number = rng.choice(NUMBERS)
            for _ in range(rng.randint(1, 3)):
                process.send_signal(number)
                time.sleep(rng.choice([0, 0.001, 0.02]))
        ended = finish(process)
        if ended.status == 0 and interrupted >= wanted:
            break
        assert ended.status in (0, 130, 143), ended
        assert "Traceback" not in ended.err, ended.err
        assert "Exception ignored" not in ended.err, ended.err
        interrupted += 1
        if ended.status == 0:
            shutil.rmtree(run)
        attempts += 1
        assert attempts < 4 * wanted
    assert {key: outcome(run)[key] for key in ("journal", "weights")} == {key: expected[key] for key in ("journal", "weights")}
    assert json.loads((run / "options.json").read_text())["options"]["steps"] == STEPS
    assert not [name for name in os.listdir(run) if "partial" in name]
