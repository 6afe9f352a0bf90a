"""Find a learning rate by successive halving: short runs from one base, the better half of which continues in each round.

A trial is an ordinary run with its own journal. All trials use the same rows and directions, so their losses can be compared
directly. The best trial need not be repeated: ``zo2 train --resume`` continues its run.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

from zo2adapters.trainers.engines import can_share, open_shared_base
from zo2adapters.trainers.methods import RunMethod, method_of, storage
from zo2adapters.trainers.metrics import align_rows
from zo2adapters.trainers.optimization import Decay
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_directory import (
    CHOICE,
    JOURNAL,
    METRICS,
    OPTIONS,
    TRIALS,
    RunDirectory,
    remove_trials,
    replace_file,
    require_new,
)
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.run_plan import RunPlan, duration, first_line, plan_of, planned
from zo2adapters.trainers.trainer import Trainer
from zo2adapters.trainers.worker_options import is_first, storage_of_one
from zo2core import Journal, SharedBase, Workers, ZO2Error
from zo2core.errors import DivergenceError, MemoryBudgetError, NonFiniteLossError, OptionError, OutputError, reason
from zo2core.guard import is_refused
from zo2core.io.durable import read_regular
from zo2core.ranges import counted

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
        return {"lr": self.lr, "zo_eps": self.zo_eps, "steps": self.steps, "loss": loss, "run": self.directory.name}


class Schedule(NamedTuple):
    """Steps and forward passes of all trials. The better half, rounded up, continues in the next round."""

    left: tuple[int, ...]  # trials in each round
    rounds: tuple[int, ...]  # total steps of each remaining trial at the end of each round
    evaluations: int  # forward passes per step

    @classmethod
    def of(cls, trials: int, forwards: int, evaluations: int, *, continues: bool = True) -> Self:
        """The rounds of a budget of forward passes, which cost about the same. The last one may be that of two trials."""
        left = _left(trials, continues=continues)
        added = [forwards // (len(left) * evaluations * count) for count in left]
        if added[0] < _FEWEST_STEPS:
            raise OptionError(
                "forwards",
                found=str(forwards),
                expected=f"at least {least_forwards(trials, evaluations, continues=continues)} for {trials} trials",
                remedy="pass a larger value, or fewer learning rates",
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
            count * (end - start) for count, start, end in zip(self.left, (0, *self.rounds), self.rounds, strict=False)
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
    continues: bool = True,
    before: Callable[[Schedule], object] = lambda schedule: None,
    after_round: Callable[[Sequence[Trial]], object] = lambda trials: None,
    quiet: bool = True,
    workers: Workers | None = None,
) -> Trial:
    """Find the learning rate, and ``zo_eps`` if several are given, that lowers the loss most."""
    _require_comparable(options)
    method = method_of(options.with_rate("auto"))  # each trial has its own
    trials = _all_trials(options, method, learning_rates, zo_eps)
    schedule = Schedule.of(len(trials), forwards, method.forwards, continues=continues)
    settings = _open_directory(options, forwards, trials, workers)
    with _removed_if_unstarted(options.output):
        before(schedule)
        trial_options = replace(options, storage=storage_of_one(options.storage, workers))
        ranking = _run_rounds(trials, trial_options, schedule, after_round, quiet=quiet, workers=workers)
    if is_first(workers):
        results = [trial.row for trial in ranking]
        replace_file(options.output / TABLE, json.dumps({**settings, "results": results}, indent=2) + "\n")
    return _require_converged(ranking[0], options.output)


def expected_seconds(options: TrainOptions, schedule: Schedule) -> float:
    """Expected seconds of all trials on the CPU, one after another. The probes take a few seconds."""
    inputs = RunInputs.read(options.with_rate("auto"))
    with closing(inputs.model.weights):
        return schedule.steps * plan_of(inputs).seconds


def _require_comparable(options: TrainOptions) -> None:
    """Refuse evaluations, and learning rates that decay."""
    for option in ("evaluation", "evaluate_every"):
        if getattr(options, option) is not None:
            raise OptionError(
                option,
                found=str(getattr(options, option)),
                expected="no evaluation, because trials are compared by their training losses",
                remedy="leave it out",
            )
    if options.optimization.decay is not Decay.CONSTANT:
        raise OptionError(
            "decay",
            found=options.optimization.decay.value,
            expected="constant, because the best trial is continued, and a schedule that ends cannot be lengthened",
            remedy="leave it out",
        )


def _all_trials(
    options: TrainOptions, method: RunMethod, learning_rates: Sequence[float], zo_eps: Sequence[float]
) -> list[Trial]:
    """A trial for each learning rate and perturbation scale."""
    if method.has_gradient and zo_eps:
        expected = f"none with --method {options.first_order.method}, which perturbs nothing"
        raise OptionError("zo_eps_to_try", found=", ".join(map(str, zo_eps)), expected=expected, remedy="leave it out")
    scales = tuple(dict.fromkeys(zo_eps)) or (options.optimization.zo_eps,)
    return [
        Trial(
            lr=lr, zo_eps=eps, directory=options.output / (f"lr-{lr:g}" if method.has_gradient else f"lr-{lr:g}-eps-{eps:g}")
        )
        for lr in dict.fromkeys(learning_rates or method.learning_rates)
        for eps in scales
    ]


def _run_rounds(
    trials: Sequence[Trial],
    options: TrainOptions,
    schedule: Schedule,
    after_round: Callable[[Sequence[Trial]], object],
    *,
    quiet: bool,
    workers: Workers | None,
) -> list[Trial]:
    """Run all rounds, each with the better half of the trials of the round before.

    The trials of a round share their base, if they only read it: each pass over its blocks is a pass of all.
    """
    indices = {trial.directory: index for index, trial in enumerate(trials)}
    finished: list[Trial] = []
    for number, steps in enumerate(schedule.rounds, 1):
        lengthen = {}
        for position, trial in enumerate(trials, 1):
            if workers is None or indices[trial.directory] % workers.size == workers.rank:  # whose disk has the trial's run
                progress = f"round {number} of {len(schedule.rounds)}, trial {position} of {len(trials)}, lr {trial.lr:g}"
                lengthen[trial] = partial(_lengthened, trial, options, steps, None if quiet else progress)
        if can_share(options) and workers is None and len(lengthen) > 1:
            results = _results_together(lengthen, options)
        else:
            results = [run(shared=None) for run in lengthen.values()]
        trials = sorted(_gathered(trials, results, workers), key=lambda trial: trial.loss)
        after_round([*trials, *finished])
        survivors = trials[: -(-len(trials) // 2)]
        finished = [*trials[len(survivors) :], *finished]
        trials = survivors
    return [*trials, *finished]


def _require_converged(best: Trial, output: Path) -> Trial:
    """Return the best trial, unless it diverged."""
    if math.isfinite(best.loss):
        return best
    raise DivergenceError(
        str(output),
        found="a trial that diverged at every learning rate",
        expected="a learning rate with which the loss stays finite",
        remedy="pass smaller learning rates with --learning-rates",
        best_step=0,
    )


def _gathered(trials: Sequence[Trial], results: Sequence[Trial], workers: Workers | None) -> list[Trial]:
    """All trials, with the results of all workers."""
    local = {trial.directory.name: (trial.steps, trial.loss) for trial in results}
    found = {
        name: result
        for worker in ([local] if workers is None else workers.all_gather(local))
        for name, result in worker.items()
    }
    by_trial = [(trial, *found[trial.directory.name]) for trial in trials]
    return [replace(trial, steps=steps, loss=loss) for trial, steps, loss in by_trial]


def _results_together(lengthen: Mapping[Trial, Callable[..., Trial]], options: TrainOptions) -> list[Trial]:
    """Run trials that share their base, as many at a time as memory allows."""
    results: list[Trial] = []
    left = dict(lengthen)
    while left:
        with open_shared_base(options) as shared:
            ended = shared.together({trial: partial(run, shared=shared) for trial, run in left.items()})
        waiting = [trial for trial, result in ended.items() if isinstance(result, MemoryBudgetError)]
        for trial, result in ended.items():
            if isinstance(result, Exception) and (trial not in waiting or len(waiting) == len(left)):
                raise result
        results += [result for result in ended.values() if isinstance(result, Trial)]
        left = {trial: left[trial] for trial in waiting}
    return results


def _lengthened(trial: Trial, options: TrainOptions, steps: int, label: str | None, *, shared: SharedBase | None) -> Trial:
    """Start or resume a trial and take its steps up to ``steps``; with a label its progress bar is displayed."""
    resume = (trial.directory / OPTIONS).exists()
    if resume:
        with closing(Journal(trial.directory / JOURNAL)) as journal:
            if journal.version >= steps:  # the trials were interrupted in a later round
                method = method_of(RunDirectory.options(trial.directory).with_steps(steps))
                return _judged(trial, method, journal.until(steps))
        trial_options = replace(RunDirectory.options(trial.directory).with_steps(steps), objective=options.objective)
    else:
        optimization = replace(options.optimization, lr=trial.lr, zo_eps=trial.zo_eps)
        trial_options = replace(options, output=trial.directory, optimization=optimization, steps=steps)
    with Trainer(trial_options, resume=resume, quiet=label is None, label=label, evaluates=False, shared=shared) as trainer:
        try:
            trainer.train()
        except (DivergenceError, NonFiniteLossError):
            return replace(trial, steps=trainer.engine.version, loss=math.inf)
        return _judged(trial, method_of(trainer.options), trainer.engine.journal)


def _judged(trial: Trial, method: RunMethod, journal: Journal) -> Trial:
    """The trial with its result after the steps of a journal. A trial that the guard held back has diverged."""
    losses, refused = method.losses(journal), sum(map(is_refused, journal.updates))
    if method.verdict(journal) is not None or 2 * refused > journal.version:
        return replace(trial, steps=journal.version, loss=math.inf)
    return replace(trial, steps=len(losses), loss=fmean(losses[int(len(losses) * (1 - _JUDGED)) :]))


def _open_directory(
    options: TrainOptions, forwards: int, trials: Sequence[Trial], workers: Workers | None
) -> dict[str, Any]:
    """Create the directory, or check that it has the same trials. The first worker of the run comes before the others."""
    table, names = options.output / TABLE, [trial.directory.name for trial in trials]
    settings = {"forwards": forwards, "trials": names, "options": options.to_json()}
    if workers is not None:
        workers.require_same("trials", zlib.crc32(repr((forwards, names)).encode()))
        if not is_first(workers):
            workers.all_gather(None)  # returns once the first worker has created the directory
    if not table.exists():
        require_new(options.output)
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            expected = "a directory that can be written"
            raise OutputError(options.output, found=reason(error), expected=expected, remedy="choose another one") from error
        replace_file(table, json.dumps(settings) + "\n")
    else:
        try:
            saved = json.loads(table.read_text())
            is_same = {key: saved[key] for key in settings} == settings
        except (OSError, ValueError, KeyError, TypeError):  # damaged
            is_same = False
        if not is_same:
            raise OutputError(
                table,
                found="a table of other trials",
                expected="a table of trials with the same budget, learning rates and options",
                remedy="choose another output directory",
            )
    if workers is not None and is_first(workers):
        workers.all_gather(None)
    return settings


@contextmanager
def _removed_if_unstarted(output: Path) -> Iterator[None]:
    """Remove the directory when the body raises an error, unless a trial has started."""
    try:
        yield
    except ZO2Error:
        if output.is_dir() and not any(path.is_dir() for path in output.iterdir()):
            (output / TABLE).unlink(missing_ok=True)
            output.rmdir()
        raise


_SHARE = 0.2  # of the run's forward passes that the trials may take; fewer trials run if all do not fit


def with_chosen_rate(
    options: TrainOptions, *, resume: bool, announce: Callable[[str], object] = lambda line: None, quiet: bool = True
) -> TrainOptions:
    """Choose a run's learning rate, and save the run with it. ``Trainer(..., resume=True)`` then takes its steps."""
    options.require_valid()
    method_of(options)  # checks the options that depend on neither model nor data
    if not resume:
        require_new(options.output)
    inputs = RunInputs.read(options)
    options, plan = inputs.options, planned(inputs)
    with RunDirectory(options, inputs.tokens(), resume=resume) as run:
        if resume:
            run.require_same_base(options, inputs.model)
        inputs.model.weights.close()
        trials = _trials(options)
        rates, budget = _search(trials)
        rounds: list[Sequence[Trial]] = []
        try:
            best = tune(
                trials,
                forwards=budget,
                learning_rates=rates,
                continues=False,
                before=lambda schedule: [announce(line) for line in _cost(inputs, plan, schedule)],
                after_round=rounds.append,
                quiet=quiet,
            )
        except DivergenceError as error:
            raise _all_diverged(error, options) from error
        except BaseException:
            if not (resume or any(trials.output.glob("*/"))):
                shutil.rmtree(trials.output, ignore_errors=True)
                run.remove()
            raise
        ranking = [_result(trial, method_of(trials).forwards) for trial in rounds[-1]]
        replace_file(options.output / CHOICE, json.dumps({"lr": best.lr, "trials": ranking}, indent=2) + "\n")
        chosen = options.with_rate(best.lr)
        run.save(chosen)
        remove_trials(options.output)
    for line in _choice(best, ranking):
        announce(line)
    return chosen


def _trials(options: TrainOptions) -> TrainOptions:
    """Options of the trials: those of the run at a constant rate, without evaluations, samples and trackers."""
    optimization = replace(options.optimization, lr=type(options.optimization).lr, decay=Decay.CONSTANT, warmup_steps=0)
    trials = replace(
        options,
        evaluation=None,
        evaluate_every=None,
        keep_best=False,
        samples=0,
        report_to="none",
        optimization=optimization,
    )
    digest = zlib.crc32(json.dumps(trials.to_json(), sort_keys=True).encode())
    return replace(trials, output=options.output / f"{TRIALS}{digest:08x}")


def _search(options: TrainOptions) -> tuple[Sequence[float], int]:
    """The rates to try, and the forward passes of all trials together."""
    method = method_of(options)
    rates, budget = method.learning_rates, round(_SHARE * options.steps * method.forwards)
    if least_forwards(len(rates), method.forwards, continues=False) > budget:
        rates = method.few_learning_rates
    return rates, max(budget, least_forwards(len(rates), method.forwards, continues=False))


def schedule_of(options: TrainOptions) -> tuple[Sequence[float], Schedule]:
    """The rates that a run with this number of steps tries, and the steps of its trials."""
    rates, budget = _search(options)
    return rates, Schedule.of(len(rates), budget, method_of(options).forwards, continues=False)


def _result(trial: Trial, forwards: int) -> dict[str, Any]:
    """A trial's result, with the loss of each step, as JSON values."""
    with closing(Journal(trial.directory / JOURNAL)) as journal:
        try:
            raw = read_regular(trial.directory / METRICS)
        except OSError:
            raw = b""
        rows = [row for row in align_rows(raw, journal).rows if "loss" in row]
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
        f"Learning rate: {schedule.trials} rates are tried first, in short runs of up to {schedule.rounds[-1]} steps: "
        f"{schedule.steps} steps, {schedule.forwards} forward passes of {counted(options.batching.batch_size, 'row')}"
    )
    together = " They share the model and run together, as far as memory allows." if can_share(options) else ""
    if plan is None:
        return [f"{trials}.{together}"]
    seconds = schedule.steps * plan.seconds
    writes = method_of(options).writes(plan.write_back_every, inputs.model, plan.host_plan)
    memory = storage(plan.host_plan, None, options.storage, writes)
    total = f"about {duration(seconds + plan.run_seconds)} in all"
    return [f"{first_line(options, plan)} {memory}", f"{trials}, about {duration(seconds)}; {total}.{together}"]


def _choice(best: Trial, ranking: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines about the chosen rate and the results of all trials."""
    losses = ", ".join(
        f"{trial['lr']:g}: {'diverged' if trial['loss'] is None else format(trial['loss'], '.4f')}"
        for trial in sorted(ranking, key=lambda trial: trial["lr"])
    )
    lines = [f"Learning rate: {best.lr:g} (mean loss of each trial's last steps: {losses})"]
    if len(ranking) > 1 and best.lr == max(trial["lr"] for trial in ranking):
        lines.append("The largest rate that was tried is the best one; zo2 tune --learning-rates tries larger ones.")
    return lines


def _all_diverged(error: DivergenceError, options: TrainOptions) -> DivergenceError:
    return DivergenceError(
        "lr",
        found=error.found,
        expected=error.expected,
        remedy=f"remove {options.output}, and pass a smaller --lr, or better rows",
        best_step=0,
    )
