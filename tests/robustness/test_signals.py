"""SIGINT, SIGTERM and SIGHUP at any moment of a command: no traceback, nothing torn, one line that
says how to go on.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_lines import Apart, Ended, Forker, command, environment, run_here, wait_until
from profiles import LONG
from runs import bits_of

from zo2adapters import cli
from zo2adapters.cli import Interrupted, SignalHandling
from zo2adapters.commands.journal import ShowJournal
from zo2core import Journal
from zo2core.errors import OutputError

STEPS = 60
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(scope="module")
def apart(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Apart:
    return Apart(forker, tmp_path_factory.mktemp("apart"), shuts_down=True)


@pytest.fixture(params=NUMBERS, ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> signal.Signals:
    """One signal, and in the long profile each of them."""
    chosen: signal.Signals = request.param
    if chosen is not signal.SIGTERM and not request.config.getoption("--long"):
        pytest.skip("a run in training tells the signals apart")
    return chosen


@pytest.fixture(scope="module")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert run_here(*train(prepared, run)).status == 0
    return bits_of(run)


def train(folder: Path, output: Path) -> list[object]:
    given = ["--model", folder / "base", "--data", folder / "rows.jsonl", "--output", output]
    return [
        "train",
        "--method",
        "zeroth-order",
        *given,
        "--steps",
        STEPS,
        "--batch-size",
        3,
        "--lr",
        1e-3,
        "--write-back-every",
        2,
    ]


def wait_for_steps(run: Path, steps: int) -> None:
    """Wait until a run writes the step after so many: an interrupt may still take that one back."""
    journal = run / "journal.jsonl"
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"projected_grads") > steps)


def under_way(apart: Apart, folder: Path, run: Path, steps: int, patch: str = "") -> Path:
    """A run that has taken so many steps."""
    apart.start(*train(folder, run), patch=patch)
    wait_for_steps(run, steps)
    return run


def assert_interrupted(ended: Ended, number: signal.Signals) -> None:
    assert ended.status == 128 + number, ended
    assert "Traceback" not in ended.err
    assert "Exception ignored" not in ended.err


@pytest.mark.few(1)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_a_signal_in_training_says_how_to_go_on_and_the_run_goes_on(
    prepared: Path, tmp_path: Path, apart: Apart, whole: dict[str, object], number: signal.Signals
) -> None:
    run = under_way(apart, prepared, tmp_path / "run", 10)
    apart.send(number)
    ended = apart.finish()
    assert_interrupted(ended, number)
    assert f"zo2 train --resume {run}" in ended.err
    match = re.search(r"stopped after (\d+) steps", ended.err)
    assert match is not None
    assert f"zo2 export --run {run} --at {match[1]} --output DIR" in ended.err
    assert abs(len(Journal(run / "journal.jsonl").updates) - int(match[1])) <= 1
    assert run_here("train", "--resume", run).status == 0
    assert bits_of(run) == whole


@pytest.mark.parametrize("count", [pytest.param(2, marks=LONG), 50])
def test_many_signals_are_as_one(
    prepared: Path, tmp_path: Path, apart: Apart, number: signal.Signals, count: int
) -> None:
    run = under_way(apart, prepared, tmp_path / "run", 3)
    for _ in range(count):
        apart.send(number)
        time.sleep(0.0 if count == 2 else 0.001)
    ended = apart.finish()
    assert_interrupted(ended, number)
    assert len(Journal(run / "journal.jsonl").updates) >= 3


@pytest.mark.parametrize(
    ("number", "after"),
    [(signal.SIGINT, 0.0), (signal.SIGTERM, 0.7), pytest.param(signal.SIGINT, 2.0, marks=LONG)],
)
def test_a_signal_at_the_start_leaves_nothing(
    prepared: Path, tmp_path: Path, number: signal.Signals, after: float
) -> None:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command(*train(prepared, tmp_path / "run")), env=environment(), **pipes
    )
    wait_until_handled(process.pid)
    time.sleep(after)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    ended = Ended(process.returncode, out, err)
    assert_interrupted(ended, number)
    if "nothing was started" in ended.err:
        assert not any(tmp_path.iterdir())


def wait_until_handled(pid: int) -> None:
    """Wait until a process has handlers: before that it is Python that starts, not the command."""

    def is_handled() -> bool:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    wait_until(is_handled)


SLOWLY = """
import time
import zo2core.checkpoint.export as writer
real = writer._write_header
def slow(file, parameters):
    written = real(file, parameters)
    file.flush()
    time.sleep(5)
    return written
writer._write_header = slow
"""


def test_a_signal_leaves_no_half_of_a_model(
    prepared: Path, tmp_path: Path, apart: Apart, number: signal.Signals
) -> None:
    apart.start("export", "--model", prepared / "base", "--output", tmp_path / "new", patch=SLOWLY)
    wait_until(lambda: list(tmp_path.glob(".new.partial-*/new/model.safetensors")))
    apart.send(number)
    apart.send(number)
    ended = apart.finish()
    assert_interrupted(ended, number)
    assert (
        f"{tmp_path / 'new'} was not written; run the same command again to write it" in ended.err
    )
    assert not list(tmp_path.iterdir())


TOO_LATE = """
import os, signal
import zo2core.checkpoint.export as writer
real = writer.shutil.rmtree
def interrupted(path, ignore_errors):
    real(path)
    os.kill(os.getpid(), signal.SIGTERM)
writer.shutil.rmtree = interrupted
"""


def test_a_signal_after_a_model_was_written_says_that_it_is_there(
    prepared: Path, tmp_path: Path, apart: Apart
) -> None:
    ended = apart.run(
        "export", "--model", prepared / "base", "--output", tmp_path / "new", patch=TOO_LATE
    )
    assert_interrupted(ended, signal.SIGTERM)
    assert ended.line == f"{tmp_path / 'new'} is complete"
    assert (
        run_here("evaluate", "--model", tmp_path / "new", "--data", prepared / "rows.jsonl").status
        == 0
    )


@pytest.mark.long_profile
def test_a_signal_in_tuning_says_how_to_go_on(
    prepared: Path, tmp_path: Path, apart: Apart, number: signal.Signals
) -> None:
    given = [
        "--model",
        prepared / "base",
        "--data",
        prepared / "rows.jsonl",
        "--batch-size",
        3,
        "--forwards",
        400,
    ]
    arguments = ["tune", "--method", "zeroth-order", *given, "--learning-rates", "1e-4", "1e-3"]
    apart.start(*arguments, "--output", tmp_path / "tuned")
    wait_for_steps(tmp_path / "tuned" / "lr-0.0001-eps-0.001", 5)
    apart.send(number)
    ended = apart.finish()
    assert_interrupted(ended, number)
    assert ended.line.startswith(
        f"run the same command again to continue: finished work is in {tmp_path / 'tuned'}"
    )
    again, whole = (
        run_here(*arguments, "--output", tmp_path / name) for name in ("tuned", "whole")
    )
    assert (again.status, again.err.splitlines()[-1]) == (whole.status, whole.err.splitlines()[-1])


ON_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
terminal = os.open({!r}, os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
os.dup2(terminal, 2)
# as a process has it that starts on a terminal
sys.stderr = open(2, "w", buffering=1, closefd=False)
"""


@pytest.mark.long_profile
def test_a_run_whose_terminal_is_closed_stops_as_after_sigterm(
    prepared: Path, tmp_path: Path, apart: Apart
) -> None:
    ours, terminal = os.openpty()
    run = under_way(
        apart, prepared, tmp_path / "run", 5, ON_A_TERMINAL.format(os.ttyname(terminal))
    )
    os.close(terminal)
    os.close(ours)
    assert apart.finish().status == 128 + signal.SIGHUP
    assert 5 <= len(Journal(run / "journal.jsonl").updates) < STEPS


@pytest.mark.long_profile
def test_a_signal_that_was_ignored_stays_ignored(
    prepared: Path, tmp_path: Path, apart: Apart
) -> None:
    under_way(
        apart,
        prepared,
        tmp_path / "run",
        3,
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
    )
    apart.send(signal.SIGINT)
    assert apart.finish().status == 0


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("trying to pop from empty mode stack"), 143, "zo2: interrupted"),
        (
            OutputError("trace.json", found="no space", expected="room", remedy="free some"),
            143,
            "found no space",
        ),
    ],
)
def test_an_error_that_came_of_a_signal_ends_as_the_signal_does(
    error: Exception, status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_in_two(journal: object) -> None:
        try:
            raise Interrupted(signal.SIGTERM)
        finally:
            raise error

    monkeypatch.setattr(ShowJournal, "run", cut_in_two)
    (tmp_path / "journal.jsonl").touch()
    ended = run_here("journal", tmp_path)
    assert (ended.status, ended.line.count(said)) == (status, 1), ended
    assert "Traceback" not in ended.err


@pytest.fixture
def handling() -> Iterator[SignalHandling]:
    """The handlers of a command, in this process."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    hook = sys.unraisablehook
    yield SignalHandling()
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "error", [None, SystemError("of C"), OutputError("x", "damage", "none", "none")]
)
def test_a_signal_whose_exception_foreign_code_drops_ends_the_command_all_the_same(
    error: Exception | None,
    handling: SignalHandling,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def drop(journal: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # as compiled code does that calls Python
            os.kill(os.getpid(), signal.SIGTERM)
        if error is not None:
            raise error

    monkeypatch.setattr(ShowJournal, "run", drop)
    (tmp_path / "journal.jsonl").touch()
    assert cli._status(["journal", str(tmp_path)], handling) == 128 + signal.SIGTERM
    assert "damage" not in capsys.readouterr().err


@pytest.mark.long_profile
def test_signals_at_random_moments_tear_nothing(
    prepared: Path,
    tmp_path: Path,
    apart: Apart,
    whole: dict[str, object],
    request: pytest.FixtureRequest,
) -> None:
    """From the first option to the last byte of the model, again and again, with one signal, two or
    three.
    """
    rng = random.Random(5)
    wanted = 300 if request.config.getoption("--long") else 2
    run, interrupted, attempts = tmp_path / "run", 0, 0
    while True:
        arguments = (
            ["train", "--resume", run] if (run / "options.json").exists() else train(prepared, run)
        )
        apart.start(*arguments)
        if interrupted < wanted:
            wait_until_handled(apart.pid)
            time.sleep(rng.uniform(0, 2))
            number = rng.choice(NUMBERS)
            for _ in range(rng.randint(1, 3)):
                apart.send(number)
                time.sleep(rng.choice([0, 0.001, 0.02]))
        ended = apart.finish()
        if ended.status == 0 and interrupted >= wanted:
            break
        assert ended.status in (0, 129, 130, 143), ended
        assert "Traceback" not in ended.err, ended.err
        assert "Exception ignored" not in ended.err, ended.err
        interrupted += 1
        if ended.status == 0:
            shutil.rmtree(run)
        attempts += 1
        assert attempts < 4 * wanted
    assert bits_of(run) == whole
    assert json.loads((run / "options.json").read_text())["options"]["steps"] == STEPS
    assert not [name for name in os.listdir(run) if "partial" in name]
