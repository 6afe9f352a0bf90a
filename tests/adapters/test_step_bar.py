"""The progress bar of a run: what it says of time is that of steps, and of evaluations that are to come."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tqdm.std
from runs import small_run

from zo2adapters.trainers import trainer as trainer_module
from zo2adapters.trainers.trainer import Trainer


class Clock:
    """Stands still but for what is said to take time."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    perf_counter = __call__


def lines_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **changes: Any
) -> Sequence[str]:
    """What the bar shows of a run whose steps take 2 s, and whose evaluations take 500 s."""
    clock = Clock()
    monkeypatch.setattr(tqdm.std, "time", clock)
    monkeypatch.setattr(trainer_module, "time", clock)
    with Trainer(replace(small_run(folder), **changes)) as trainer:
        step, evaluate = trainer.engine.step, trainer._task.evaluate

        def slow_step(*arguments: Any) -> object:
            clock.now += 2
            return step(*arguments)

        def slow_evaluation(*arguments: Any) -> Mapping[str, float]:
            clock.now += 500
            return evaluate(*arguments)

        monkeypatch.setattr(trainer.engine, "step", slow_step)
        monkeypatch.setattr(trainer._task, "evaluate", slow_evaluation)
        trainer.train()
    return [line for line in re.split(r"[\r\n]", capsys.readouterr().err) if "step/s" in line or "s/step" in line]


def test_neither_the_time_of_a_step_nor_the_time_left_counts_the_evaluation_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(tmp_path, monkeypatch, capsys, steps=4, evaluation=tmp_path / "rows.jsonl")
    first = next(line for line in lines if " 1/4 " in line)
    assert "2.00s/step" in first
    assert "[08:22<08:26," in first  # three steps, and the evaluation after the last one
    assert all("2.00s/step" in line for line in lines if " 0/4 " not in line)


def test_evaluations_that_are_to_come_count_in_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(tmp_path, monkeypatch, capsys, steps=5, evaluation=tmp_path / "rows.jsonl", evaluate_every=2)
    left = {done: next(line for line in lines if f" {done}/5 " in line) for done in (1, 3, 5)}
    assert "<25:08," in left[1]  # after steps 2, 4 and 5
    assert "<16:44," in left[3]
    assert "[33:30<00:00," in lines[-1]


def test_a_bar_that_is_not_shown_takes_no_note_of_time(tmp_path: Path) -> None:
    options = replace(small_run(tmp_path), evaluation=tmp_path / "rows.jsonl", steps=1)
    with Trainer(options, quiet=True) as trainer:
        trainer.train()
        assert trainer.engine.version == 1
