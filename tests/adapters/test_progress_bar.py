"""Bars of long work: shown in a terminal alone, and as far as the work is."""

import io
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tqdm.std
from command_lines import done, make_place
from hypothesis import given
from hypothesis import strategies as st
from runs import small_run

from zo2adapters import open_checkpoint
from zo2adapters.cli import main
from zo2adapters.trainers import metrics
from zo2adapters.trainers import trainer as trainer_module
from zo2adapters.trainers.metrics import SharedSweeps, StepBar, sweep_bars
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import open_run
from zo2core import Engine


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, rows, and a run of an adapter."""
    folder = make_place(tmp_path_factory.mktemp("bars"))
    given = (
        "--model",
        folder / "base",
        "--data",
        folder / "rows.jsonl",
        "--output",
        folder / "run",
    )
    done("train", "--method", "zeroth-order", *given, "--steps", 2, "--lr", 1e-2, "--lora-rank", 2)
    return folder


COMMANDS = {
    "evaluate --run run --data rows.jsonl": ("base: 100%", "step 2: 100%"),
    "evaluate --model base --data choices.jsonl": ("base: 100%",),
    "export --run run --output out": ("export: 100%",),
    "merge --run run --output out": ("merge: 100%",),
    "convert --model base --output out --quantize int8": ("int8: 100%",),
    "train --resume run --verify-base": ("base: 100%",),
    "generate --model base --prompt the --max-new-tokens 2": ("2/2 [",),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_long_work_has_a_bar_in_a_terminal_alone(
    command: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(command.split())
    told = capsys.readouterr().err
    for text in COMMANDS[command]:
        assert text in told
    shutil.rmtree("out", ignore_errors=True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    main(command.split())
    logged = capsys.readouterr().err
    assert "%" not in logged
    assert not set("\r\x1b") & set(logged)


@pytest.mark.parametrize(("seconds", "shown"), [(60.0, False), (0.0, True)])
def test_a_sweep_has_a_bar_if_it_takes_seconds(
    seconds: float,
    shown: bool,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(metrics, "_SECONDS", seconds)
    with Engine(open_checkpoint("base")) as runner:
        with sweep_bars(runner):
            runner.flush()
        told = capsys.readouterr().err
        assert ("pass:" in told) is shown
        runner.flush()
        assert capsys.readouterr().err == "", "outside of the context nothing is watched"


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(1, 7),
)
def test_rows_count_as_far_as_their_sweep_is(sweeps: list[list[int]], visits: int) -> None:
    bar = tqdm.std.tqdm(file=io.StringIO())
    shared, finished = SharedSweeps(bar), 0
    for batches in sweeps:
        for rows in batches:
            shared.took(rows)
        for visited in range(1, visits + 1):
            shared.visited(visited, visits)
            assert bar.n == finished + sum(batches) * visited // visits
        finished += sum(batches)
    assert bar.n == sum(map(sum, sweeps))


class StoppedClock:
    """Stands still but for what is said to take time."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    perf_counter = __call__


def test_later_evaluations_count_in_the_time_that_is_left_and_the_first_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run whose steps take 2 s, and whose evaluations take 500 s."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = StoppedClock()
    monkeypatch.setattr(tqdm.std, "time", clock)
    monkeypatch.setattr(trainer_module, "time", clock)
    options = replace(
        small_run(tmp_path), steps=5, evaluation=tmp_path / "rows.jsonl", evaluate_every=2
    )
    with open_run(RunStart(options)) as trainer:
        step, evaluate = trainer.engine.step, trainer.tasks.task.evaluate

        def slow_step(*arguments: Any) -> object:
            clock.now += 2
            return step(*arguments)

        def slow_evaluation(*arguments: Any) -> Mapping[str, float]:
            clock.now += 500
            return evaluate(*arguments)

        monkeypatch.setattr(trainer.engine, "step", slow_step)
        monkeypatch.setattr(trainer.tasks.task, "evaluate", slow_evaluation)
        trainer.train()
    lines = [
        line
        for line in re.split(r"[\r\n]", capsys.readouterr().err)
        if "step/s" in line or "s/step" in line
    ]
    left = {done: next(line for line in lines if f" {done}/5 " in line) for done in (1, 3, 5)}
    assert "2.00s/step" in left[1]
    assert "[08:22<25:08," in left[1]  # after steps 2, 4 and 5
    assert "<16:44," in left[3]
    assert "[33:30<00:00," in lines[-1]
    assert all("2.00s/step" in line for line in lines if " 0/5 " not in line)


@pytest.mark.parametrize(
    ("steps", "seconds", "told"),
    [
        (1000, 0.5, [*range(100, 1001, 100)]),
        (100, 20.0, [done + more for done in range(0, 100, 10) for more in (3, 6, 9, 10)]),
        (3, 0.5, [1, 2, 3]),
        (20, 25.0, [*range(2, 21, 2)]),
    ],
)
def test_a_log_has_a_line_a_tenth_of_the_steps_and_one_a_minute(
    steps: int, seconds: float, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"loss": 1.5, "tokens_per_second": 3.0, "rss_bytes": 1, "peak_rss_bytes": 2}
    clock, log = StoppedClock(), io.StringIO()
    clock.monotonic = clock  # type: ignore[attr-defined]
    monkeypatch.setattr(tqdm.std, "time", clock)
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(sys, "stderr", log)
    with StepBar("small", steps, initial=0, evaluations=0, quiet=False) as bar:
        bar.miniters, bar.dynamic_miniters = 1, False
        for _ in range(steps):
            clock.now += seconds
            bar.count_step(record)
        bar.write("a line", file=log)
    lines = log.getvalue().splitlines()
    assert not set("\r\x1b") & set(log.getvalue())
    assert lines.pop() == "a line"
    assert [int(re.match(r"small: step (\d+)/", line)[1]) for line in lines] == told  # type: ignore[index]
    assert all("loss 1.5" in line for line in lines)
