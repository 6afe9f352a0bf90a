"""Tuning: successive halving over runs, of which the best one is gone on with."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from command_lines import done
from runs import small_run

from zo2adapters.trainers.optimization import Decay, Optimization
from zo2adapters.trainers.options import Batching, TrainOptions
from zo2adapters.trainers.trainer import Trainer
from zo2adapters.trainers.tuning import TABLE, Schedule, Trial, tune
from zo2core import Journal
from zo2core.errors import CheckpointError, DivergenceError, OptionError, OutputError
from zo2core.names import EstimatorName

RATES = (1e-7, 1e-3, 0.9)


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return small_run(tmp_path, layers=2, output=tmp_path / "tuned", steps=1000, optimization=Optimization())


@pytest.mark.parametrize("trials", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("evaluations", [2, 5])
def test_rounds_keep_to_the_budget_and_every_trial_goes_further_than_the_last_round(trials: int, evaluations: int) -> None:
    budget = 1000
    rounds = Schedule.of(trials, budget, evaluations).rounds
    left, taken, forwards = trials, 0, 0
    for steps in rounds:
        assert steps > taken
        forwards += (steps - taken) * left * evaluations
        left, taken = -(-left // 2), steps
    assert budget / 2 < forwards <= budget


def test_a_budget_in_which_a_trial_says_nothing_is_refused_with_the_least_that_does() -> None:
    with pytest.raises(OptionError, match="at least 224") as refused:
        Schedule.of(7, 100, 2)
    assert "7 trials" in str(refused.value)
    assert Schedule.of(7, 224, 2)


def test_what_all_trials_take_is_told_before_the_first_one_and_holds(options: TrainOptions) -> None:
    schedules: list[Schedule] = []
    options.output.mkdir()
    (options.output / ".tune.json.partial").write_text('{"forwards"')  # of a process that was killed before its first trial

    def before(schedule: Schedule) -> None:
        assert not list(options.output.glob("lr-*"))
        schedules.append(schedule)

    tune(options, forwards=200, learning_rates=(1e-7, 1e-6), before=before)
    [schedule] = schedules
    journals = [Journal(run / "journal.jsonl") for run in options.output.glob("lr-*")]
    assert schedule.steps == sum(len(journal.updates) for journal in journals)
    assert schedule.forwards == sum(len(update.losses) for journal in journals for update in journal.updates) <= 200
    assert not (options.output / ".tune.json.partial").exists()
    firsts = [journal.updates[0] for journal in journals]
    assert len({first.seeds for first in firsts}) == 1, "all trials take the same rows and directions"
    assert len({first.losses for first in firsts}) == 1
    for journal in journals:
        journal.close()


@pytest.mark.filterwarnings("ignore:step")  # that are not applied
def test_the_better_half_goes_on_and_the_best_journal_is_the_beginning_of_the_run(options: TrainOptions) -> None:
    told: list[list[Trial]] = []
    best = tune(options, forwards=240, learning_rates=RATES, after_round=lambda trials: told.append(list(trials)))
    assert best.lr != 0.9
    taken = [{trial.lr: trial.steps for trial in trials} for trials in told]
    assert taken[0][1e-7] == taken[0][1e-3] > 0
    assert best.steps == max(taken[-1].values()) > taken[0][best.lr]
    losses = [trial.loss for trial in told[-1] if trial.steps == best.steps]
    assert best.loss == min(losses)
    done("train", "--resume", best.directory, "--steps", best.steps + 3)
    alone = replace(
        options, output=options.output.parent / "alone", steps=best.steps + 3, optimization=Optimization(lr=best.lr)
    )
    with Trainer(alone, quiet=True) as trainer:
        trainer.run()
    files = [run / "model" / "model.safetensors" for run in (best.directory, alone.output)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.filterwarnings("ignore:step")
def test_a_trial_that_diverges_is_last_and_one_line_says_when_all_do(options: TrainOptions) -> None:
    told: list[list[Trial]] = []
    tune(options, forwards=200, learning_rates=(1e-4, 1.0), after_round=lambda trials: told.append(list(trials)))
    assert [math.isfinite(trial.loss) for trial in told[0]] == [True, False]
    with pytest.raises(DivergenceError, match="every learning rate"):
        tune(replace(options, output=options.output.parent / "hot"), forwards=200, learning_rates=(0.9, 1.0))


@pytest.mark.long_profile
def test_interrupted_trials_go_on_and_other_trials_are_refused(options: TrainOptions) -> None:
    whole = tune(replace(options, output=options.output.parent / "whole"), forwards=240, learning_rates=RATES[:2])

    def interrupted(trials: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(options, forwards=240, learning_rates=RATES[:2], after_round=interrupted)
    best = tune(options, forwards=240, learning_rates=RATES[:2])
    assert (best.lr, best.steps, best.loss) == (whole.lr, whole.steps, whole.loss)
    with pytest.raises(OutputError, match="other trials"):
        tune(options, forwards=300, learning_rates=RATES[:2])
    with pytest.raises(OutputError, match="other trials"):
        tune(replace(options, batching=Batching(batch_size=2)), forwards=240, learning_rates=RATES[:2])
    (options.output / TABLE).unlink()
    with pytest.raises(OutputError, match="something"):
        tune(options, forwards=240, learning_rates=RATES[:2])


def test_a_schedule_that_ends_cannot_be_tuned(options: TrainOptions) -> None:
    falling = replace(options, optimization=Optimization(decay=Decay.LINEAR))
    with pytest.raises(OptionError, match="decay"):
        tune(falling, forwards=400)
    assert not options.output.exists()


def test_trials_that_are_refused_leave_nothing(options: TrainOptions) -> None:
    with pytest.raises(CheckpointError):
        tune(replace(options, model=str(options.data.parent / "nowhere")), forwards=400, learning_rates=RATES[:2])
    assert not options.output.exists()


def test_the_command_prints_the_best_and_how_to_go_on(options: TrainOptions) -> None:
    where = ["--model", options.model, "--data", str(options.data), "--output", str(options.output), "--batch-size", "3"]
    printed = done("tune", *where, "--forwards", "200", "--learning-rates", "1e-6", "1e-3", "--zo-eps-to-try", "1e-3")
    assert "zo2 train --resume" in printed.out
    cost = "2 trials in 2 rounds, of up to 75 steps: 100 steps, 200 forward passes of 3 rows, about "
    assert printed.err.startswith(cost)
    assert "round 1 of 2, trial 2 of 2, lr 0.001:" in printed.err
    assert printed.err.index("round 1 of 2, trial 1 of 2, lr 1e-06") < printed.err.index("round 2 of 2, trial 1 of 1")
    assert printed.err.count("lr   zo_eps") == 2
    results = json.loads((options.output / TABLE).read_text())["results"]
    assert [set(result) for result in results] == [{"lr", "zo_eps", "steps", "loss", "run"}] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("optimization", "says"),
    [
        (Optimization(lr=1e-9), True),
        (Optimization(lr=1e-3), False),
        (Optimization(lr=1e-3, clip_grad=1e-6), True),
        (Optimization(lr=1e-9, estimator=EstimatorName.FZOO, queries=2), False),
    ],
)
def test_a_learning_rate_that_was_never_tuned_and_is_far_too_small_is_told_once(
    optimization: Optimization, says: bool, options: TrainOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    with Trainer(replace(options, steps=100, optimization=optimization), quiet=True) as trainer:
        trainer.run()
    assert capsys.readouterr().err.count("is far too small, and zo2 tune") == says
