"""Find a learning rate by successive halving: short runs from one base, of which the better half goes on for longer.

A trial is a run like any other: a journal over the same base. All trials take the same rows and directions, so their losses
are compared pair by pair. The best one is not run again: the run that follows goes on with its journal.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.tasks.row_files import read_rows
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2adapters.trainers.batch_shapes import RowShapes
from zo2adapters.trainers.lr_schedules import Decay
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_directory import OPTIONS, RunDirectory, replace_file, require_new
from zo2adapters.trainers.run_plan import step_seconds
from zo2adapters.trainers.trainer import Trainer
from zo2adapters.trainers.worker_options import is_first, storage_of_one
from zo2core import DivergenceError, NonFiniteLossError, OptionError, OutputError, Update, Workers, ZO2Error
from zo2core.errors import reason

LEARNING_RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
TABLE = "tune.json"  # in the output directory: what was tried, and what came of it

_FEWEST_STEPS = 4  # of a trial in its first round: fewer say nothing
_JUDGED = 0.5  # share of a trial's steps, its last ones, whose mean loss counts


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One learning rate, and how far it has come."""

    lr: float
    zo_eps: float
    directory: Path
    steps: int = 0
    loss: float = math.inf  # mean over its last steps; infinite where it diverged

    def judged(self, updates: Sequence[Update]) -> Trial:
        """The same trial after these updates."""
        last = updates[int(len(updates) * (1 - _JUDGED)) :]
        return replace(self, steps=len(updates), loss=fmean(update.losses[0] for update in last))

    @property
    def row(self) -> dict[str, object]:
        """The trial as JSON values."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"lr": self.lr, "zo_eps": self.zo_eps, "steps": self.steps, "loss": loss, "run": self.directory.name}


class Schedule(NamedTuple):
    """What the trials take together."""

    trials: int  # of the first round; half of them, rounded up, go on
    rounds: tuple[int, ...]  # steps that each trial that is left has taken at the end of each round
    evaluations: int  # forwards of a step

    @property
    def left(self) -> tuple[int, ...]:
        """Trials of each round."""
        left = [self.trials]
        for _ in self.rounds[1:]:
            left.append(-(-left[-1] // 2))
        return tuple(left)

    @property
    def steps(self) -> int:
        """Steps of all trials together."""
        begun = (0, *self.rounds)
        return sum(count * (self.rounds[i] - begun[i]) for i, count in enumerate(self.left))

    @property
    def forwards(self) -> int:
        """Forwards of a batch of all trials together."""
        return self.steps * self.evaluations


def tune(
    options: TrainOptions,
    *,
    forwards: int,
    learning_rates: Sequence[float] = LEARNING_RATES,
    zo_eps: Sequence[float] = (),
    before: Callable[[Schedule], object] = lambda schedule: None,
    told: Callable[[Sequence[Trial]], object] = lambda trials: None,
    quiet: bool = True,
    workers: Workers | None = None,
) -> Trial:
    """Find the learning rate, and ``zo_eps`` if several are given, with which the loss falls furthest.

    Args:
        options: Of the runs; ``output`` is the directory for all of them. The steps are what the budget allows.
        forwards: Forwards of a batch that all trials may take together.
        learning_rates: To try.
        zo_eps: Perturbation scales to try with each of them; none: that of the options.
        before: Given what all trials will take, before the first one begins.
        told: Told of all trials after each round.
        quiet: Whether to show no progress bar of each trial.
        workers: Others that try some of the learning rates, each with trials of its own; None: there are none.

    Returns:
        The best trial. ``zo2 train --resume`` goes on with the run in its directory, on the host of the worker that made it.

    Raises:
        OptionError: if the learning rate is scheduled to fall, evaluations are asked for, or the budget is too small for the
            trials.
        OutputError: if the output directory is in use, by trials of other options for example.
        DivergenceError: if every trial diverged.
        ZO2Error: of the kind that fits, for whatever of the options a run cannot use.
    """
    for option in ("evaluation", "evaluate_every"):
        if getattr(options, option) is not None:
            raise OptionError(
                option,
                found=str(getattr(options, option)),
                expected="none: trials are compared by their losses",
                remedy="leave it out",
            )
    if options.optimization.decay is not Decay.CONSTANT:
        raise OptionError(
            "decay",
            found=options.optimization.decay.value,
            expected="constant: the best trial is gone on with, and what ends cannot be lengthened",
            remedy="leave it out",
        )
    scales = tuple(dict.fromkeys(zo_eps)) or (options.optimization.zo_eps,)
    trials = [
        Trial(lr=lr, zo_eps=eps, directory=options.output / f"lr-{lr:g}-eps-{eps:g}")
        for lr in dict.fromkeys(learning_rates)
        for eps in scales
    ]
    rounds = planned_rounds(len(trials), forwards, options.optimization.evaluations)
    if workers is not None:
        workers.require_same("trials", zlib.crc32(repr((forwards, [trial.directory.name for trial in trials])).encode()))
    if not is_first(workers):
        assert workers is not None
        workers.all_gather(None)  # the first one has made the directory
    asked = _begin(options, forwards, trials)
    if workers is not None and is_first(workers):
        workers.all_gather(None)
    schedule = Schedule(len(trials), tuple(rounds), options.optimization.evaluations)
    try:
        before(schedule)
    except ZO2Error:
        _take_back(options.output)
        raise
    options = replace(options, storage=storage_of_one(options.storage, workers))
    places = {trial.directory: place for place, trial in enumerate(trials)}
    finished: list[Trial] = []
    for number, steps in enumerate(rounds, 1):
        try:
            made = []
            for place, trial in enumerate(trials, 1):
                if _is_own(places[trial.directory], workers):
                    where = f"round {number} of {len(rounds)}, trial {place} of {len(trials)}"
                    label = None if quiet else f"{where}, lr {trial.lr:g}"
                    made.append(_lengthened(trial, options, steps, label))
            trials = sorted(_of_all(trials, made, workers), key=lambda trial: trial.loss)
        except ZO2Error:
            _take_back(options.output)
            raise
        told([*trials, *finished])
        survivors = trials[: -(-len(trials) // 2)]
        finished = [*trials[len(survivors) :], *finished]
        trials = survivors
    results = [trial.row for trial in (*trials, *finished)]
    if is_first(workers):
        replace_file(options.output / TABLE, json.dumps({**asked, "results": results}, indent=2) + "\n")
    best = trials[0]
    if not math.isfinite(best.loss):
        raise DivergenceError(
            str(options.output),
            found="a trial that diverged at every learning rate",
            expected="one that does not",
            remedy="try smaller ones with --learning-rates",
            best_step=0,
        )
    return best


def expected_seconds(options: TrainOptions, schedule: Schedule) -> float:
    """Seconds that all trials are expected to take on the CPU, one after another. The probes take a few seconds.

    Args:
        options: Of the runs.
        schedule: What the trials take.

    Raises:
        ZO2Error: of the kind that fits, if model or data cannot be read.
    """
    directory, batching = resolve_directory(options.model), options.batching
    model = options.opened(directory)
    data = read_rows(
        options.data,
        load_tokenizer(directory),
        sequence_length=batching.length_for(model),
        labelled_for=model.config if options.takes_labels else None,
    )
    shape = RowShapes.of_rows(batching, data, None, seed=options.seed).step
    return schedule.steps * step_seconds(model, shape, options.optimization, batching.micro_batch_size)


def planned_rounds(trials: int, forwards: int, evaluations: int) -> list[int]:
    """How many steps each trial that is left has taken at the end of each round; every round costs about as much.

    Args:
        trials: Of the first round; half of them, rounded up, go on.
        forwards: Of all rounds.
        evaluations: Forwards of a step.

    Raises:
        OptionError: if a trial could not take as many steps as say something.
    """
    left = [trials]
    while left[-1] > 1:
        left.append(-(-left[-1] // 2))
    added = [forwards // (len(left) * evaluations * count) for count in left]
    if added[0] < _FEWEST_STEPS:
        least = _FEWEST_STEPS * len(left) * evaluations * trials
        raise OptionError(
            "forwards", found=str(forwards), expected=f"at least {least} for {trials} trials", remedy="allow more"
        )
    return [sum(added[: i + 1]) for i in range(len(added))]


def _is_own(place: int, workers: Workers | None) -> bool:
    """Whether a trial is this worker's: the same one's in all rounds, since its run is on that one's disk."""
    return workers is None or place % workers.size == workers.rank


def _of_all(trials: Sequence[Trial], made: Sequence[Trial], workers: Workers | None) -> list[Trial]:
    """All trials, with what the workers made of theirs."""
    own = {trial.directory.name: (trial.steps, trial.loss) for trial in made}
    of_workers = [own] if workers is None else workers.all_gather(own)
    results = {name: result for of_worker in of_workers for name, result in of_worker.items()}
    by_trial = [(trial, *results[trial.directory.name]) for trial in trials]
    return [replace(trial, steps=steps, loss=loss) for trial, steps, loss in by_trial]


def _lengthened(trial: Trial, options: TrainOptions, steps: int, label: str | None) -> Trial:
    """Take a trial to so many steps, with a progress bar of this label; one that was interrupted is gone on with."""
    resume = (trial.directory / OPTIONS).exists()
    if resume:
        own = replace(RunDirectory.options(trial.directory).with_steps(steps), objective=options.objective)
    else:
        optimization = replace(options.optimization, lr=trial.lr, zo_eps=trial.zo_eps)
        own = replace(options, output=trial.directory, optimization=optimization, steps=steps)
    with Trainer(own, resume=resume, quiet=label is None, label=label) as trainer:
        try:
            trainer.train()
        except (DivergenceError, NonFiniteLossError):
            return replace(trial, steps=trainer.engine.version, loss=math.inf)
        if trainer.divergence() is not None:
            return replace(trial, steps=trainer.engine.version, loss=math.inf)
        return trial.judged(trainer.engine.journal.updates)


def _begin(options: TrainOptions, forwards: int, trials: Sequence[Trial]) -> dict[str, Any]:
    """Make the directory, or see that it is that of the same trials, which were interrupted. Returns what was asked for.

    Args:
        options: Of the runs.
        forwards: Of all trials.
        trials: All of them.
    """
    table = options.output / TABLE
    names = [trial.directory.name for trial in trials]
    asked = {"forwards": forwards, "trials": names, "options": options.to_json()}
    if table.exists():
        try:
            begun = json.loads(table.read_text())
            same = {key: begun[key] for key in asked} == asked
        except (OSError, ValueError, KeyError, TypeError):  # not what was written there
            same = False
        if not same:
            raise OutputError(
                table,
                found="a table of other trials",
                expected="that of these ones, or none",
                remedy="choose another output directory",
            )
        return asked
    require_new(options.output)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            options.output, found=reason(error), expected="a directory that can be written", remedy="choose another one"
        ) from error
    replace_file(table, json.dumps(asked) + "\n")
    return asked


def _take_back(output: Path) -> None:
    """Remove the directory again, unless there is a trial to go on with."""
    if output.is_dir() and not any(path.is_dir() for path in output.iterdir()):
        (output / TABLE).unlink(missing_ok=True)
        output.rmdir()
