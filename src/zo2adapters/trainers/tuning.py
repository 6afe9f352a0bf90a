"""Find a learning rate by successive halving: short runs from one base, the better half of which continues in each round.

A trial is an ordinary run with its own journal. All trials use the same rows and directions, so their losses can be compared
directly. The best trial need not be repeated: ``zo2 train --resume`` continues its run.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from zo2adapters.trainers.lr_schedules import Decay
from zo2adapters.trainers.methods.choice import method_of
from zo2adapters.trainers.methods.run_method import RunMethod
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.planning import plan_of
from zo2adapters.trainers.run_directory import JOURNAL, OPTIONS, RunDirectory, replace_file, require_new
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.shared_runs import can_share, open_shared_base
from zo2adapters.trainers.trainer import Trainer
from zo2adapters.trainers.worker_options import is_first, storage_of_one
from zo2core import Journal, SharedBase, Workers, ZO2Error
from zo2core.errors import DivergenceError, MemoryBudgetError, NonFiniteLossError, OptionError, OutputError, reason
from zo2core.guard import is_refused

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

    def judged(self, losses: Sequence[float]) -> Trial:
        """The same trial after steps of these losses."""
        return replace(self, steps=len(losses), loss=fmean(losses[int(len(losses) * (1 - _JUDGED)) :]))

    @property
    def row(self) -> dict[str, object]:
        """The trial as JSON values."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"lr": self.lr, "zo_eps": self.zo_eps, "steps": self.steps, "loss": loss, "run": self.directory.name}


class Schedule(NamedTuple):
    """Steps and forward passes of all trials."""

    trials: int  # trials of the first round; half of them, rounded up, continue in the next
    rounds: tuple[int, ...]  # total steps of each remaining trial at the end of each round
    evaluations: int  # forward passes per step

    @property
    def left(self) -> tuple[int, ...]:
        """Number of trials in each round."""
        left = [self.trials]
        for _ in self.rounds[1:]:
            left.append(-(-left[-1] // 2))
        return tuple(left)

    @property
    def steps(self) -> int:
        """Steps of all trials together."""
        starts = (0, *self.rounds)
        return sum(count * (self.rounds[i] - starts[i]) for i, count in enumerate(self.left))

    @property
    def forwards(self) -> int:
        """Forward passes of a batch in all trials together."""
        return self.steps * self.evaluations


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
    rounds = planned_rounds(len(trials), forwards, method.forwards, continues=continues)
    schedule = Schedule(len(trials), tuple(rounds), method.forwards)
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


def planned_rounds(trials: int, forwards: int, evaluations: int, *, continues: bool = True) -> list[int]:
    """Total steps of each remaining trial at the end of each round. All rounds cost about the same."""
    left = _trials_left(trials, continues=continues)
    added = [forwards // (len(left) * evaluations * count) for count in left]
    if added[0] < _FEWEST_STEPS:
        raise OptionError(
            "forwards",
            found=str(forwards),
            expected=f"at least {least_forwards(trials, evaluations, continues=continues)} for {trials} trials",
            remedy="pass a larger value, or fewer learning rates",
        )
    return [sum(added[: i + 1]) for i in range(len(added))]


def least_forwards(trials: int, evaluations: int, *, continues: bool = True) -> int:
    """Smallest budget of forward passes for so many trials. See ``planned_rounds``."""
    return _FEWEST_STEPS * len(_trials_left(trials, continues=continues)) * evaluations * trials


def _trials_left(trials: int, *, continues: bool) -> list[int]:
    """Number of trials in each round."""
    left = [trials]
    while left[-1] > 1:
        left.append(-(-left[-1] // 2))
    return left if continues else left[:-1]


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


def _open_directory(
    options: TrainOptions, forwards: int, trials: Sequence[Trial], workers: Workers | None
) -> dict[str, Any]:
    """Create the directory, or check that it has the same trials. The first worker of the run comes before the others."""
    if workers is not None:
        workers.require_same("trials", zlib.crc32(repr((forwards, [trial.directory.name for trial in trials])).encode()))
        if not is_first(workers):
            workers.all_gather(None)  # returns once the first worker has created the directory
    settings = _begin(options, forwards, trials)
    if workers is not None and is_first(workers):
        workers.all_gather(None)
    return settings


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
            if _runs_here(indices[trial.directory], workers):
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


def _runs_here(index: int, workers: Workers | None) -> bool:
    """Whether this worker runs a trial. It is the same worker in all rounds, whose disk has the trial's run."""
    return workers is None or index % workers.size == workers.rank


def _gathered(trials: Sequence[Trial], results: Sequence[Trial], workers: Workers | None) -> list[Trial]:
    """All trials, with the results of all workers."""
    local = {trial.directory.name: (trial.steps, trial.loss) for trial in results}
    gathered = [local] if workers is None else workers.all_gather(local)
    by_name = {name: result for of_worker in gathered for name, result in of_worker.items()}
    by_trial = [(trial, *by_name[trial.directory.name]) for trial in trials]
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
    refused = sum(map(is_refused, journal.updates))
    if method.verdict(journal) is not None or 2 * refused > journal.version:
        return replace(trial, steps=journal.version, loss=math.inf)
    return trial.judged(method.losses(journal))


def _begin(options: TrainOptions, forwards: int, trials: Sequence[Trial]) -> dict[str, Any]:
    """Create the directory, or check that it has the same trials, which were interrupted."""
    table = options.output / TABLE
    names = [trial.directory.name for trial in trials]
    settings = {"forwards": forwards, "trials": names, "options": options.to_json()}
    if table.exists():
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
        return settings
    require_new(options.output)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            options.output, found=reason(error), expected="a directory that can be written", remedy="choose another one"
        ) from error
    replace_file(table, json.dumps(settings) + "\n")
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
