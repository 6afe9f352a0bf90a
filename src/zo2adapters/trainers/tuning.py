"""Find a learning rate by successive halving: short runs from one base, the better half of which
continues in each round.

A trial is an ordinary run with its own journal. All trials use the same rows and directions, so
their losses can be compared directly. The best trial need not be repeated: ``zo2 train --resume``
continues its run.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

from zo2adapters.trainers import checked_json
from zo2adapters.trainers.methods import RunMethod, checked_method, method_of, open_shared_base
from zo2adapters.trainers.metrics import losses_of
from zo2adapters.trainers.optimization import Decay
from zo2adapters.trainers.options import TrainOptions, can_share, require_tunable
from zo2adapters.trainers.preparation import prepare
from zo2adapters.trainers.process import is_first, storage_of_one
from zo2adapters.trainers.run_directory import (
    TRIALS,
    HeldRun,
    RunDirectory,
    make_new,
    reading,
    replace_file,
)
from zo2adapters.trainers.run_inputs import RunInputs, RunStart
from zo2adapters.trainers.run_plan import RunPlan, duration, plan_run, planned, told_line
from zo2adapters.trainers.run_tasks import RunTasks
from zo2adapters.trainers.trainer import Display, open_run
from zo2core import Journal, SharedBase, Workers, ZO2Error
from zo2core.errors import (
    DivergenceError,
    MemoryBudgetError,
    NonFiniteLossError,
    OutputError,
)
from zo2core.estimators.guard import is_refused
from zo2core.io.durable import read_regular
from zo2core.ranges import counted, require_whole

TABLE = "tune.json"  # name of the table of trials and results in the output directory

_FEWEST_STEPS = 4  # steps of a trial in its first round; losses of fewer steps are too noisy
_JUDGED = 0.5  # share of a trial's steps, the last ones, whose mean loss is compared


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A learning rate to try, and its result so far."""

    lr: float
    zo_eps: float
    directory: Path
    steps: int = 0
    loss: float = math.inf  # mean over the last steps; infinite if the trial diverged

    @property
    def row(self) -> dict[str, object]:
        """The trial as JSON values."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {
            "lr": self.lr,
            "zo_eps": self.zo_eps,
            "steps": self.steps,
            "loss": loss,
            "run": self.directory.name,
        }


class Schedule(NamedTuple):
    """Steps and forward passes of all trials.

    The better half, rounded up, continues in the next round.
    """

    left: tuple[int, ...]  # trials in each round
    rounds: tuple[int, ...]  # total steps of each remaining trial at the end of each round
    evaluations: int  # forward passes per step

    @classmethod
    def of(cls, trials: int, forwards: int, evaluations: int, *, continues: bool = True) -> Self:
        """The rounds of a budget of forward passes, which cost about the same.

        The last one may be that of two trials.
        """
        left = _left(trials, continues=continues)
        added = [forwards // (len(left) * evaluations * count) for count in left]
        least = least_forwards(trials, evaluations, continues=continues)
        require_whole(
            "forwards", forwards, least, otherwise=f" for {trials} trials, or fewer learning rates"
        )
        return cls(left, tuple(accumulate(added)), evaluations)

    @property
    def trials(self) -> int:
        """Trials of the first round."""
        return self.left[0]

    @property
    def steps(self) -> int:
        """Steps of all trials together."""
        return sum(
            count * (end - start)
            for count, start, end in zip(self.left, (0, *self.rounds), self.rounds, strict=False)
        )

    @property
    def forwards(self) -> int:
        """Forward passes of a batch in all trials together."""
        return self.steps * self.evaluations


def least_forwards(trials: int, evaluations: int, *, continues: bool = True) -> int:
    """Smallest budget of forward passes for so many trials."""
    return _FEWEST_STEPS * len(_left(trials, continues=continues)) * evaluations * trials


def _left(trials: int, *, continues: bool) -> tuple[int, ...]:
    """Number of trials in each round."""
    left = [trials]
    while left[-1] > 1:
        left.append(-(-left[-1] // 2))
    return tuple(left if continues else left[:-1])


def tune(
    options: TrainOptions,
    *,
    forwards: int,
    learning_rates: Sequence[float] = (),
    zo_eps: Sequence[float] = (),
    before: Callable[[Schedule], object] = lambda schedule: None,
    after_round: Callable[[Sequence[Trial]], object] = lambda trials: None,
    quiet: bool = True,
    workers: Workers | None = None,
) -> Trial:
    """Find the learning rate, and ``zo_eps`` if several are given, that lowers the loss most."""
    # each trial has its own rate
    optimization = options.optimization
    method = method_of(RunStart(options.with_rate("auto")))
    require_tunable(options, zo_eps)
    rates = learning_rates or method.learning_rates
    scales = zo_eps or [optimization.zo_eps]
    trials = [
        _trial(options, method, lr, eps)
        for lr in dict.fromkeys(rates)
        for eps in dict.fromkeys(scales)
    ]
    schedule = Schedule.of(len(trials), forwards, method.forwards)
    table = options.output / TABLE
    trained = replace(options, storage=storage_of_one(options.storage, workers))
    settings = _open_directory(options, forwards, trials, workers)
    try:
        before(schedule)
        ranking = _ranked(trials, trained, schedule, after_round, quiet=quiet, workers=workers)
    except ZO2Error:
        if options.output.is_dir() and not any(path.is_dir() for path in options.output.iterdir()):
            # no trial has started
            table.unlink(missing_ok=True)
            options.output.rmdir()
        raise
    if is_first(workers):
        results = [trial.row for trial in ranking]
        replace_file(table, checked_json.to_text({**settings, "results": results}))
    return _converged(
        ranking[0], str(options.output), "pass smaller learning rates with --learning-rates"
    )


def expected_seconds(options: TrainOptions, schedule: Schedule) -> float:
    """Expected seconds of all trials on the CPU, one after another.

    The probes take a few seconds.
    """
    run = prepare(RunStart(options.with_rate("auto")))
    assert run.fitting is not None, "a run on the CPU is planned"
    with closing(run.inputs.model.weights):
        return schedule.steps * plan_run(run.fitting, measures_snapshots=False).seconds


def _trial(options: TrainOptions, method: RunMethod, lr: float, zo_eps: float) -> Trial:
    name = f"lr-{lr:g}" if method.has_gradient else f"lr-{lr:g}-eps-{zo_eps:g}"
    return Trial(lr=lr, zo_eps=zo_eps, directory=options.output / name)


def _ranked(
    trials: Sequence[Trial],
    options: TrainOptions,
    schedule: Schedule,
    after_round: Callable[[Sequence[Trial]], object] = lambda trials: None,
    *,
    quiet: bool,
    workers: Workers | None = None,
) -> list[Trial]:
    """Run all rounds, each with the better half of the trials of the round before; the best trial
    comes first.

    The trials of a round share their base, if they only read it: each pass over its blocks is a
    pass of all.
    """
    indices = {trial.directory: index for index, trial in enumerate(trials)}
    finished: list[Trial] = []
    for number, steps in enumerate(schedule.rounds, 1):
        lengthen = {}
        for position, trial in enumerate(trials, 1):
            if workers is None or indices[trial.directory] % workers.size == workers.rank:
                # whose disk has the trial's run
                progress = (
                    f"round {number} of {len(schedule.rounds)}, trial {position} of "
                    f"{len(trials)}, lr {trial.lr:g}"
                )
                lengthen[trial] = partial(
                    _lengthened, trial, options, steps, None if quiet else progress
                )
        if can_share(options) and workers is None and len(lengthen) > 1:
            results = _results_together(lengthen, options)
        else:
            results = [run(shared=None) for run in lengthen.values()]
        local = {result.directory.name: (result.steps, result.loss) for result in results}
        gathered = [local] if workers is None else workers.all_gather(local)
        told = dict(ChainMap(*gathered))
        ended = [(trial, *told[trial.directory.name]) for trial in trials]
        trials = sorted(
            (replace(trial, steps=at, loss=loss) for trial, at, loss in ended),
            key=lambda trial: trial.loss,
        )
        after_round([*trials, *finished])
        left = -(-len(trials) // 2)
        finished = [*trials[left:], *finished]
        trials = trials[:left]
    return [*trials, *finished]


def _converged(best: Trial, where: str, remedy: str) -> Trial:
    """The best trial, unless it diverged."""
    if math.isfinite(best.loss):
        return best
    found = "a trial that diverged at every learning rate"
    raise DivergenceError(
        where, found, "a learning rate with which the loss stays finite", remedy, best_step=0
    )


def _results_together(
    lengthen: Mapping[Trial, Callable[..., Trial]], options: TrainOptions
) -> list[Trial]:
    """Run trials that share their base, as many at a time as memory allows."""
    results: list[Trial] = []
    left = dict(lengthen)
    while left:
        with open_shared_base(options) as shared:
            ended = shared.together(
                {trial: partial(run, shared=shared) for trial, run in left.items()}
            )
        waiting = [
            trial for trial, result in ended.items() if isinstance(result, MemoryBudgetError)
        ]
        for trial, result in ended.items():
            if isinstance(result, Exception) and (
                trial not in waiting or len(waiting) == len(left)
            ):
                raise result
        results += [result for result in ended.values() if isinstance(result, Trial)]
        left = {trial: left[trial] for trial in waiting}
    return results


def _lengthened(
    trial: Trial, options: TrainOptions, steps: int, label: str | None, *, shared: SharedBase | None
) -> Trial:
    """Start or resume a trial and take its steps up to ``steps``; with a label its progress bar is
    displayed.
    """
    run = RunDirectory(trial.directory)
    if resume := RunDirectory.to_resume(trial.directory).has_begun:
        trial_options = run.options().with_steps(steps).having(objective=options.objective)
        with run.journal() as journal:
            if journal.version >= steps:  # the trials were interrupted in a later round
                return _judged(trial, trial_options, journal.until(steps))
    else:
        trial_options = options.having(
            output=trial.directory, lr=trial.lr, zo_eps=trial.zo_eps, steps=steps
        )
    start = RunStart(trial_options, resumes=resume, evaluates=False, shared=shared)
    with open_run(start, display=Display(quiet=label is None, label=label)) as trainer:
        try:
            trainer.train()
        except (DivergenceError, NonFiniteLossError):
            return replace(trial, steps=trainer.engine.version, loss=math.inf)
        return _judged(trial, trainer.options, trainer.engine.journal)


def _judged(trial: Trial, options: TrainOptions, journal: Journal) -> Trial:
    """The trial with its result after the steps of a journal.

    A trial that the guard held back has diverged.
    """
    losses = losses_of(journal)
    refused = sum(map(is_refused, journal.updates))
    verdict = method_of(RunStart(options)).verdict(journal)
    if verdict is not None or 2 * refused > journal.version:
        return replace(trial, steps=journal.version, loss=math.inf)
    return replace(trial, steps=len(losses), loss=fmean(losses[int(len(losses) * (1 - _JUDGED)) :]))


def _open_directory(
    options: TrainOptions, forwards: int, trials: Sequence[Trial], workers: Workers | None
) -> dict[str, Any]:
    """Create the directory, or check that it has the same trials.

    The first worker of the run comes before the others.
    """
    table = options.output / TABLE
    names = [trial.directory.name for trial in trials]
    settings = {"forwards": forwards, "trials": names, "options": options.to_json()}
    if workers is not None:
        workers.require_same("trials", zlib.crc32(repr((forwards, names)).encode()))
        if not is_first(workers):
            workers.all_gather(None)  # returns once the first worker has created the directory
    if not table.exists():
        make_new(options.output)
        replace_file(table, checked_json.to_text(settings))
    else:
        expected = "a table of trials with the same budget, learning rates and options"
        remedy = "choose another output directory"
        try:
            with reading(table):
                saved = checked_json.from_bytes(read_regular(table))
            is_same = {key: saved[key] for key in settings} == settings
        except (ValueError, KeyError, RecursionError) as error:
            found = "a table that was edited or damaged"
            remedy = f"restore it from a copy, or {remedy}"
            raise OutputError(table, found, expected, remedy) from error
        if not is_same:
            raise OutputError(table, "a table of other trials", expected, remedy)
    if workers is not None and is_first(workers):
        workers.all_gather(None)
    return settings


# of the run's forward passes that the trials may take; fewer trials run if all do not fit
_SHARE = 0.2


def with_chosen_rate(
    options: TrainOptions, *, resume: bool, announce: Callable[[str], object]
) -> TrainOptions:
    """Choose a run's learning rate, and save the run with it, which then resumes."""
    start = RunStart(options, resumes=resume)
    checked_method(start)
    with closing(HeldRun(options.output, resume=resume)) as run:
        try:
            prepared = prepare(start, digests=True)
            inputs = prepared.inputs
            RunTasks.of(inputs).task.close()  # refuses rows before the trials
            options = inputs.options
            plan = planned(prepared)
            run.begin(inputs)
            inputs.model.weights.close()
            tried = _tried(options)
            method = prepared.method
            rates, schedule = schedule_of(tried)
            trials = [_trial(tried, method, rate, options.optimization.zo_eps) for rate in rates]
            for line in _cost(inputs, plan, schedule):
                announce(line)
            ranking = _ranked(trials, tried, schedule, quiet=False)
        except BaseException:
            if not any(options.output.glob(f"{TRIALS}*/*/")):
                if not resume:
                    run.remove_trials()
                run.abandon()
            raise
        best = _converged(
            ranking[0], "lr", f"remove {options.output}, and pass a smaller --lr, or better rows"
        )
        results = [_result(trial, method.forwards) for trial in ranking]
        run.write_choice(best.lr, results)
        chosen = options.with_rate(best.lr)
        run.save(chosen)
        run.remove_trials()
    losses = ", ".join(
        f"{trial.lr:g}: {f'{trial.loss:.4f}' if math.isfinite(trial.loss) else 'diverged'}"
        for trial in sorted(ranking, key=lambda trial: trial.lr)
    )
    announce(f"Learning rate: {best.lr:g} (mean loss of each trial's last steps: {losses})")
    if len(ranking) > 1 and best.lr == max(rates):
        announce(
            "The largest rate that was tried is the best one; zo2 tune --learning-rates tries "
            "larger ones."
        )
    return chosen


def _tried(options: TrainOptions) -> TrainOptions:
    """Options of the trials: those of the run at a constant rate, without evaluations, samples and
    trackers.
    """
    tried = options.having(
        evaluation=None,
        evaluate_every=None,
        keep_best=False,
        samples=0,
        report_to="none",
        lr=None,
        decay=Decay.CONSTANT,
        warmup_steps=0,
    )
    digest = zlib.crc32(json.dumps(tried.to_json(), sort_keys=True).encode())
    return tried.having(output=options.output / f"{TRIALS}{digest:08x}")


def schedule_of(options: TrainOptions) -> tuple[Sequence[float], Schedule]:
    """The rates that a run with this number of steps tries, and the steps of its trials."""
    method = method_of(RunStart(options))
    rates = method.learning_rates
    budget = round(_SHARE * options.steps * method.forwards)
    if least_forwards(len(rates), method.forwards, continues=False) > budget:
        rates = method.few_learning_rates
    budget = max(budget, least_forwards(len(rates), method.forwards, continues=False))
    return rates, Schedule.of(len(rates), budget, method.forwards, continues=False)


def _result(trial: Trial, forwards: int) -> dict[str, Any]:
    """A trial's result, with the loss of each step, as JSON values."""
    run = RunDirectory(trial.directory)
    with run.journal() as journal:
        rows = [row for row in run.rows(journal) if "loss" in row]
    return {
        "lr": trial.lr,
        "steps": len(rows),
        "forwards": len(rows) * forwards,
        "seconds": sum(row.get("seconds", 0.0) for row in rows),
        "loss": trial.row["loss"],
        "losses": [row["loss"] for row in rows],
    }


def _cost(inputs: RunInputs, plan: RunPlan | None, schedule: Schedule) -> list[str]:
    """Lines about the time and memory of the run and its trials."""
    options = inputs.options
    trials = (
        f"Learning rate: {schedule.trials} rates are tried first, in short runs of up to "
        f"{schedule.rounds[-1]} steps: "
        f"{schedule.steps} steps, {schedule.forwards} forward passes of "
        f"{counted(options.batching.batch_size, 'row')}"
    )
    together = (
        " They share the model and run together, as far as memory allows."
        if can_share(options)
        else ""
    )
    division = [] if inputs.division is None else [inputs.division.notice()]
    if plan is None:
        return [*division, f"{trials}.{together}"]
    seconds = schedule.steps * plan.seconds
    total = f"about {duration(seconds + plan.run_seconds)} in all"
    return [
        told_line(options, inputs.model, plan),
        *division,
        f"{trials}, about {duration(seconds)}; {total}.{together}",
    ]
