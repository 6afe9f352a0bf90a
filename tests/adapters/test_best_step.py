"""Which step ``--keep-best`` exports: the journal's checksummed results decide, whatever became of ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended, run_here
from runs import small_run

from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.trainer import Trainer
from zo2core import Journal
from zo2core.errors import JournalError
from zo2core.io.record_log import to_line

STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated after every step, without its model. Its last evaluation was not the best one."""
    place = tmp_path_factory.mktemp("best")
    options = small_run(
        place,
        evaluation=place / "rows.jsonl",
        evaluate_every=1,
        keep_best=True,
        steps=STEPS,
        optimization=Optimization(lr=3e-2),
    )
    with Trainer(options, quiet=True) as trainer:
        trainer.run()
    assert best_of(losses(options.output)) != STEPS
    (options.output / "model").rename(place / "best")
    return options.output


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["evaluation_loss"] for row in rows if "evaluation_loss" in row}


def best_of(values: dict[int, float]) -> int:
    return min(values, key=lambda step: (values[step], step))


def without_metrics(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


def with_another_best(run: Path) -> None:
    """The last evaluation's loss becomes the smallest."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["evaluation_loss"] = 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def resumed(finished: Path, run: Path, *damage: Callable[[Path], None]) -> Ended:
    shutil.copytree(finished, run)
    for damaged in damage:
        damaged(run)
    ended = run_here("train", "--resume", run)
    assert ended.status == 0, ended
    name = "model.safetensors"
    assert (run / "model" / name).read_bytes() == (finished.parent / "best" / name).read_bytes()
    return ended


@pytest.mark.parametrize("damage", [without_metrics, with_another_best])
def test_damaged_metrics_do_not_change_which_step_is_exported(
    finished: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    resumed(finished, tmp_path / "run", damage)
    assert losses(tmp_path / "run") == losses(finished)


def test_commands_take_the_best_step_unless_another_is_asked_for(finished: Path, tmp_path: Path) -> None:
    best, weights = best_of(losses(finished)), (finished.parent / "best" / "model.safetensors").read_bytes()
    said = f"{finished}: step {best} (best of {STEPS + 1} evaluations); --at N takes another one\n"
    for command in ("export", "merge"):
        ended = run_here(command, "--run", finished, "--output", tmp_path / command)
        assert (ended.status, said in ended.err) == (0, True), ended
        assert f"after {best} " in ended.out
        assert (tmp_path / command / "model.safetensors").read_bytes() == weights
        assert f" after {best} zeroth-order steps" in (tmp_path / command / "README.md").read_text()
    evaluated = run_here("evaluate", "--run", finished)
    assert said in evaluated.err
    assert evaluated.out.splitlines()[0].split() == ["base", "step", str(best)]
    assert f"{losses(finished)[best]:.6f}" in evaluated.out
    generated = run_here("generate", "--run", finished, "--prompt", "the cat", "--max-new-tokens", 2)
    assert said in generated.err
    asked = run_here("export", "--run", finished, "--at", STEPS, "--output", tmp_path / "last")
    assert "best of" not in asked.err
    assert (tmp_path / "last" / "model.safetensors").read_bytes() != weights


def test_results_are_read_back_as_they_were_noted_and_are_no_update(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.begin({"noise": "z"})
    checksum = journal.checksum
    journal.note_evaluation(0, {"loss": 0.1, "accuracy": math.nan})
    journal.note_evaluation(0, {"loss": 1 / 3, "accuracy": math.nan})
    journal.close()
    again = Journal(path)
    assert again.evaluations.keys() == {0}
    assert again.evaluations[0]["loss"] == 1 / 3
    assert math.isnan(again.evaluations[0]["accuracy"])
    assert (again.checksum, list(again.updates)) == (checksum, [])


@pytest.mark.parametrize(
    "record", [{"step": 1, "loss": 1.0}, {"loss": 1.0}, {"step": 0, "loss": "1"}, {"step": True, "loss": 1.0}, [0, 1.0]]
)
def test_a_result_that_no_run_has_written_is_refused(tmp_path: Path, record: object) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.begin({"noise": "z"})
    journal.close()
    path.write_bytes(path.read_bytes() + to_line({"evaluation": record}))
    with pytest.raises(JournalError, match="line 2: found"):
        Journal(path)
