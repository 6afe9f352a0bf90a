"""Tuning: successive halving over runs, of which the best one is gone on with."""

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import Ended, done, refusal, run_here
from profiles import short_first
from runs import small_run

from zo2adapters.commands.report_page import page, read_run
from zo2adapters.trainers import run_directory, tuning
from zo2adapters.trainers.methods import ZerothOrderRun
from zo2adapters.trainers.optimization import Decay, Optimization
from zo2adapters.trainers.options import Batching, TrainOptions
from zo2adapters.trainers.run_directory import RunDirectory
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import QUIET, Trainer, open_run
from zo2adapters.trainers.tuning import TABLE, Schedule, Trial, tune
from zo2core import Journal
from zo2core.errors import CheckpointError, DivergenceError, OptionError, OutputError
from zo2core.ranges import EstimatorName

RATES = (1e-7, 1e-3, 0.9)


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return small_run(
        tmp_path,
        layers=2,
        output=tmp_path / "tuned",
        steps=1000,
        optimization=Optimization(method="zeroth-order"),
    )


@pytest.mark.parametrize("trials", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("evaluations", [2, 5])
def test_rounds_keep_to_the_budget_and_every_trial_goes_further_than_the_last_round(
    trials: int, evaluations: int
) -> None:
    budget = 1000
    rounds = Schedule.of(trials, budget, evaluations).rounds
    left, taken, forwards = trials, 0, 0
    for steps in rounds:
        assert steps > taken
        forwards += (steps - taken) * left * evaluations
        left, taken = -(-left // 2), steps
    assert budget / 2 < forwards <= budget
    with pytest.raises(OptionError, match="at least 224") as refused:
        Schedule.of(7, 100, 2)
    assert "7 trials" in str(refused.value)
    assert Schedule.of(7, 224, 2)


def test_what_all_trials_take_is_told_before_the_first_one_and_holds(options: TrainOptions) -> None:
    schedules: list[Schedule] = []
    options.output.mkdir()
    # of a process that was killed before its first trial
    (options.output / ".tune.json.partial").write_text('{"forwards"')

    def before(schedule: Schedule) -> None:
        assert not list(options.output.glob("lr-*"))
        schedules.append(schedule)

    tune(options, forwards=200, learning_rates=(1e-7, 1e-6), before=before)
    [schedule] = schedules
    journals = [Journal(run / "journal.jsonl") for run in options.output.glob("lr-*")]
    assert schedule.steps == sum(len(journal.updates) for journal in journals)
    assert (
        schedule.forwards
        == sum(len(update.losses) for journal in journals for update in journal.updates)
        <= 200
    )
    assert not (options.output / ".tune.json.partial").exists()
    firsts = [journal.updates[0] for journal in journals]
    assert len({first.seeds for first in firsts}) == 1, (
        "all trials take the same rows and directions"
    )
    assert len({first.losses for first in firsts}) == 1
    for journal in journals:
        journal.close()


@pytest.mark.filterwarnings("ignore:step")  # that are not applied
def test_the_better_half_goes_on_and_the_best_journal_is_the_beginning_of_the_run(
    options: TrainOptions,
) -> None:
    with pytest.raises(DivergenceError, match="every learning rate"):
        tune(
            replace(options, output=options.output.parent / "hot"),
            forwards=200,
            learning_rates=(0.9, 1.0),
        )
    told: list[list[Trial]] = []
    best = tune(
        options,
        forwards=240,
        learning_rates=RATES,
        after_round=lambda trials: told.append(list(trials)),
    )
    assert best.lr != 0.9
    assert not math.isfinite(told[0][-1].loss), "a trial that diverges is last"
    taken = [{trial.lr: trial.steps for trial in trials} for trials in told]
    assert taken[0][1e-7] == taken[0][1e-3] > 0
    assert best.steps == max(taken[-1].values()) > taken[0][best.lr]
    losses = [trial.loss for trial in told[-1] if trial.steps == best.steps]
    assert best.loss == min(losses)
    done("train", "--resume", best.directory, "--steps", best.steps + 3)
    alone = replace(
        options,
        output=options.output.parent / "alone",
        steps=best.steps + 3,
        optimization=Optimization(method="zeroth-order", lr=best.lr),
    )
    with open_run(RunStart(alone), display=QUIET) as trainer:
        trainer.run()
    files = [run / "model" / "model.safetensors" for run in (best.directory, alone.output)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_directory_of_other_trials_is_refused_and_that_of_the_same_ones_is_gone_on_with(
    options: TrainOptions,
) -> None:
    settings = tuning._open_directory(options, 240, [], None)
    assert tuning._open_directory(options, 240, [], None) == settings
    for other, forwards in ((options, 300), (replace(options, seed=9), 240)):
        with pytest.raises(OutputError, match="other trials"):
            tuning._open_directory(other, forwards, [], None)


@pytest.mark.parametrize("steps", [1_000, 10_000])
def test_the_trials_of_a_run_take_a_fifth_of_its_forwards(
    steps: int, options: TrainOptions
) -> None:
    _, schedule = tuning.schedule_of(replace(options, steps=steps))
    share = schedule.forwards / (steps * schedule.evaluations)
    assert 0.15 < share <= 0.2


@pytest.mark.long_profile
def test_interrupted_trials_go_on_and_other_trials_are_refused(options: TrainOptions) -> None:
    whole = tune(
        replace(options, output=options.output.parent / "whole"),
        forwards=240,
        learning_rates=RATES[:2],
    )

    def interrupted(trials: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(options, forwards=240, learning_rates=RATES[:2], after_round=interrupted)
    best = tune(options, forwards=240, learning_rates=RATES[:2])
    assert (best.lr, best.steps, best.loss) == (whole.lr, whole.steps, whole.loss)
    with pytest.raises(OutputError, match="other trials"):
        tune(options, forwards=300, learning_rates=RATES[:2])
    with pytest.raises(OutputError, match="other trials"):
        tune(
            replace(options, batching=Batching(batch_size=2)),
            forwards=240,
            learning_rates=RATES[:2],
        )
    (options.output / TABLE).unlink()
    with pytest.raises(OutputError, match="something"):
        tune(options, forwards=240, learning_rates=RATES[:2])


def test_trials_that_are_refused_leave_nothing(options: TrainOptions) -> None:
    with pytest.raises(CheckpointError):
        tune(
            replace(options, model=str(options.data.parent / "nowhere")),
            forwards=400,
            learning_rates=RATES[:2],
        )
    with pytest.raises(OptionError, match="decay"):  # a schedule that ends
        tune(
            replace(options, optimization=Optimization(method="zeroth-order", decay=Decay.LINEAR)),
            forwards=400,
        )
    assert not options.output.exists()


def test_the_command_prints_the_best_and_how_to_go_on(options: TrainOptions) -> None:
    where = [
        "--model",
        options.model,
        "--data",
        str(options.data),
        "--output",
        str(options.output),
        "--batch-size",
        "3",
    ]
    printed = done(
        "tune",
        "--method",
        "zeroth-order",
        *where,
        "--forwards",
        "200",
        "--learning-rates",
        "1e-6",
        "1e-3",
        "--zo-eps-to-try",
        "1e-3",
    )
    assert "zo2 train --resume" in printed.out
    cost = (
        "2 trials in 2 rounds, of up to 75 steps: 100 steps, 200 forward passes of 3 rows, about "
    )
    assert printed.err.startswith(cost)
    assert "round 1 of 2, trial 2 of 2, lr 0.001:" in printed.err
    assert printed.err.index("round 1 of 2, trial 1 of 2, lr 1e-06") < printed.err.index(
        "round 2 of 2, trial 1 of 1"
    )
    assert printed.err.count("lr   zo_eps") == 2
    results = json.loads((options.output / TABLE).read_text())["results"]
    assert [set(result) for result in results] == [{"lr", "zo_eps", "steps", "loss", "run"}] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("optimization", "says"),
    [
        (Optimization(method="zeroth-order", lr=1e-9), True),
        (Optimization(method="zeroth-order", lr=1e-3), False),
        (Optimization(method="zeroth-order", lr=1e-3, clip_grad=1e-6), True),
        (
            Optimization(method="zeroth-order", lr=1e-9, estimator=EstimatorName.FZOO, queries=2),
            False,
        ),
    ],
)
def test_a_learning_rate_that_was_never_tuned_and_is_far_too_small_is_told_once(
    optimization: Optimization,
    says: bool,
    options: TrainOptions,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open_run(
        RunStart(replace(options, steps=100, optimization=optimization)),
        display=QUIET,
    ) as trainer:
        trainer.run()
    assert capsys.readouterr().err.count("is far too small, and zo2 tune") == says


# ``--lr auto``: the rate is chosen by short runs, and the run is that of the rate


pytest.importorskip("peft")

METHODS = {
    "zeroth-order": [],
    "adamw": ["--method", "adamw", "--lora-rank", 2],
    "all parameters": ["--method", "lomo"],
}
DECAYED = ["--decay", "linear", "--warmup-steps", 2, "--eval-split", 0.3, "--keep-best"]
STEPS = 12

each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def train(output: str, *more: object, lr: object = "auto") -> list[object]:
    where = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--output",
        output,
        "--steps",
        STEPS,
        "--batch-size",
        3,
    ]
    return [*where, "--lr", lr, *more]


@pytest.fixture(scope="module")
def finished(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Puts a run with some options into the present directory, and returns what its command said.

    Each is run once.
    """
    runs: dict[tuple[object, ...], tuple[Path, Ended]] = {}

    def copied(output: str, *more: object) -> Ended:
        if more not in runs:
            folder = tmp_path_factory.mktemp("finished") / "here"
            shutil.copytree(prepared, folder)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                runs[more] = folder / "run", done(*train("run", *more))
        run, ended = runs[more]
        shutil.copytree(run, output)
        return ended

    return copied


def outcome(run: str) -> dict[str, Any]:
    """What a run came to, without its times and its directory."""
    [weights] = Path(run, "model").glob("*.safetensors")
    recipe = yaml.safe_load(Path(run, "recipe.yaml").read_text())
    return {
        "journal": Path(run, "journal.jsonl").read_bytes(),
        "weights": weights.read_bytes(),
        "recipe": {
            **recipe,
            "output": None,
            **{key: Path(recipe[key]).name for key in ("model", "data")},
        },
    }


def trials(run: str) -> list[dict[str, Any]]:
    return [{**trial, "seconds": None} for trial in RunDirectory(Path(run)).trials()]


@pytest.mark.few(1)
@each_method
@pytest.mark.usefixtures("here")
def test_the_run_is_that_of_the_rate_that_was_chosen(
    finished: Callable[..., Ended], method: list[object]
) -> None:
    finished("run", *method, *DECAYED)
    [best, *_] = trials("run")
    done(*train("given", *method, *DECAYED, lr=best["lr"]))
    assert outcome("run") == outcome("given")
    assert yaml.safe_load(Path("run/recipe.yaml").read_text())["lr"] == best["lr"]
    done("train", "run/recipe.yaml", "--output", "again")
    assert outcome("again") == outcome("run")


@pytest.mark.long_profile
@pytest.mark.few(1)
@each_method
@pytest.mark.usefixtures("here")
def test_the_best_of_the_trials_is_chosen_the_same_each_time_and_what_they_cost_told_before(
    finished: Callable[..., Ended], method: list[object]
) -> None:
    said = finished("run", *method).err
    done(*train("again", *method))
    assert trials("run") == trials("again")
    [best, *others] = trials("run")
    assert others
    assert all(best["loss"] <= other["loss"] for other in others if other["steps"] == best["steps"])
    assert len({other["losses"][0] for other in [best, *others]}) == 1, "all start from the base"
    told = re.search(
        r"Learning rate: (\d+) rates are tried first, "
        r".*: (\d+) steps, (\d+) forward passes of 3 rows",
        said,
    )
    assert told is not None
    assert said.index("rates are tried first") < said.index("round 1 of 2")
    assert said.count("Memory: ") == 1
    assert "precision: " in said, "the other lines are printed"
    assert ("share the model and run together" in said) is ("--lora-rank" in method), (
        "runs of all parameters cannot"
    )
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    of_trials = [row for row in rows if "trial_lr" in row]
    assert rows[: len(of_trials)] == of_trials
    sums = [
        len(of_trials),
        *(sum(row[key] for row in of_trials) for key in ("trial_steps", "trial_forwards")),
    ]
    assert [int(number) for number in told.groups()] == sums
    run = read_run(Path("run"))
    per_step = 2 if not method else 3 if "--lora-rank" in method else 4
    assert run.forwards[-1] == STEPS * per_step
    assert run.minutes[-1] * 60 == pytest.approx(sum(row["seconds"] for row in run.steps))
    assert sum(trial["forwards"] for trial in run.trials) == sums[2]


@pytest.mark.long_profile
def test_a_run_of_streamed_blocks_says_before_its_trials_what_it_writes(here: Path) -> None:
    before, _, _ = done(*train("run", "--method", "lomo", "--stream-blocks")).err.partition(
        "round 1 of 2"
    )
    assert "Disk writes: changed blocks with their states, a commit every step, " in before


@pytest.mark.usefixtures("here")
def test_the_report_shows_the_choice_and_its_curves(finished: Callable[..., Ended]) -> None:
    pytest.importorskip("matplotlib")
    finished("run")
    done(*train("plain", lr=1e-3))
    [best, *_] = trials("run")
    text = page([read_run(Path("run"))])
    assert "<h2>Learning rate of run</h2>" in text
    assert f"{best['lr']:g} (chosen)" in text
    assert "mean loss of the last steps" in text
    assert "Learning rate of" not in page([read_run(Path("plain"))])


@pytest.mark.few(1)
@each_method
# the second round's first trial, and others
@pytest.mark.parametrize("trial", short_first([3], [0, 1, 4]))
@pytest.mark.usefixtures("here")
def test_a_run_that_is_killed_while_it_tunes_ends_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    finished: Callable[..., Ended],
    method: list[object],
    trial: int,
) -> None:
    finished("whole", *method, *DECAYED)
    begun = 0
    take = Trainer.train

    def killed(trainer: Trainer) -> None:
        nonlocal begun
        begun += 1
        if begun == trial + 1:
            engine: Any = trainer.engine
            step = engine.step
            taken = 0

            def counted(*arguments: Any) -> object:
                nonlocal taken
                if taken == 2:
                    raise KeyboardInterrupt
                taken += 1
                return step(*arguments)

            engine.step = counted
        take(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", killed)
        stopped = run_here(*train("run", *method, *DECAYED))
    assert stopped.status != 0
    assert "zo2 train --resume run" in stopped.err
    assert not Path("run/tune.json").exists()
    assert list(Path("run").glob("tune-*/lr-*"))
    done("train", "--resume", "run")
    assert outcome("run") == outcome("whole")
    assert trials("run") == trials("whole")
    assert not list(Path("run").glob("tune-*"))


@pytest.mark.long_profile
def test_trials_that_a_killed_process_left_after_its_choice_are_removed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_directory.HeldRun, "remove_trials", lambda run: None)
        done(*train("run", "--eval-split", 0.3))
    [left] = Path("run").glob("tune-*")
    for trial in left.glob("lr-*"):
        assert "evaluation" not in (trial / "metrics.jsonl").read_text(), (
            "trials are compared by their training losses"
        )
        assert json.loads((trial / "options.json").read_text())["options"]["eval_split"] == 0.3
    done("train", "--resume", "run")
    assert not left.exists()


@pytest.mark.filterwarnings("ignore:step")
def test_a_longer_run_tries_more_rates_and_one_line_says_if_all_diverge(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps, rates in (
        (STEPS, ZerothOrderRun.few_learning_rates),
        (2000, ZerothOrderRun.learning_rates),
    ):
        said = refused_by_stopping(*train("run", "--steps", steps))
        assert f"Learning rate: {len(rates)} rates are tried first" in said
    done(*train("plain", lr=1e-3))
    resumed = ("train", "--resume", "plain", "--lr", "auto")
    assert "auto with --from-step" in refusal(*resumed, "--from-step", 2, "--output", "branch")
    assert "found auto; expected" in refusal(*resumed)
    assert not Path("branch").exists()
    monkeypatch.setattr(ZerothOrderRun, "few_learning_rates", (0.9, 1.0))
    assert "pass a smaller --lr" in refusal(*train("run"))


def refused_by_stopping(*arguments: object) -> str:
    """What a run says until its first trial would start; nothing of it is left."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zo2adapters.trainers.tuning.open_run", stop)
        ended = run_here(*arguments)
    assert not Path("run").exists()
    return ended.err


def edited(text: str) -> str:
    """A table of trials without the last one, or with another loss."""
    table = json.loads(text)
    del table["trials"][-1]
    return json.dumps(table)


DAMAGES: list[Callable[[str], str]] = [
    lambda text: "",
    lambda text: text[:-40],
    lambda text: "[1]",
    lambda text: '{"trials": [{"lr": 1}]}',
    lambda text: '{"trials": 3}',
    lambda text: text.replace('"steps": ', '"steps": 1'),
    edited,
]


RESTORED = "run/tune.json was damaged or removed, and is written anew from metrics.jsonl"


def resumed_with_warnings() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        return done("train", "--resume", "run").err


@pytest.mark.long_profile
@pytest.mark.usefixtures("here")
def test_trials_of_a_damaged_table_are_restored_from_the_metrics(
    finished: Callable[..., Ended],
) -> None:
    finished("run")
    weights = outcome("run")["weights"]
    table, metrics = Path("run/tune.json"), Path("run/metrics.jsonl")
    text, rows = table.read_text(), metrics.read_bytes()
    trials = RunDirectory(Path("run")).trials()
    assert len(trials) > 1
    for damage in DAMAGES:
        table.write_text(damage(text))
        assert RunDirectory(Path("run")).trials() == read_run(Path("run")).trials == trials
        assert RESTORED in resumed_with_warnings()
        assert (table.read_text(), metrics.read_bytes()) == (text, rows)
    table.unlink()
    assert RESTORED in resumed_with_warnings()
    assert table.read_text() == text
    metrics.unlink()
    for damage in DAMAGES:
        table.write_text(damage(text))
        for command in (("train", "--resume", "run"), ("report", "run", "--output", "p.html")):
            line = refusal(*command)
            assert line.startswith("zo2: run/tune.json: found a file that was edited or damaged;")
    table.unlink()
    done("train", "--resume", "run")  # as the remedy says
    assert RunDirectory(Path("run")).trials() == []
    assert outcome("run")["weights"] == weights


@pytest.mark.usefixtures("here")
def test_a_damaged_table_of_zo2_tune_is_not_told_as_one_of_other_trials(
    options: TrainOptions,
) -> None:
    table = options.output / "tune.json"
    options.output.mkdir()
    for content in ("", "[]", "{}", '{"forwards": 240, "sha256": "0"}'):
        table.write_text(content)
        with pytest.raises(OutputError, match=r"tune\.json: found a table that was edited or dama"):
            tune(options, forwards=240, learning_rates=RATES[:2])
        assert table.read_text() == content
