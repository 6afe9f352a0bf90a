"""``zo2 train --runs``: several runs of one base at once, each in a directory of its own, where it can continue alone."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from zo2adapters.trainers.recipe import read_recipe
from zo2adapters.trainers.run_directory import JOURNAL, OPTIONS, acquire, directory_lock, replace_file
from zo2core.errors import OptionError, OutputError, ZO2Error, reason
from zo2core.ranges import counted

if TYPE_CHECKING:
    from zo2adapters.trainers.options import TrainOptions  # a command line is read without transformers
    from zo2core import SharedBase

TABLE = "runs.json"  # name of the comparison in the output directory

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_JUDGED = 0.1  # share of a run's steps, the last ones, whose mean loss is compared
_COMMON = (
    "model",
    "output",
    "memory",
    "device",
    "device_memory",
    "dtype",
    "precision",
    "resume",
    "runs",
    "task",
    "from_step",
)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One of the runs."""

    name: str
    options: TrainOptions
    resume: bool  # whether its directory holds it already


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    run: str
    steps: int
    loss: float | None  # mean over the last steps; None without steps
    evaluation: float | None  # the best loss of its evaluations; None without evaluations
    seconds: float  # of its steps, each of which includes the time of the sweep that it shares
    directory: str
    error: str | None = None  # with which it ended early


def read_differences(path: Path) -> dict[str, Mapping[object, object]]:
    """Read the runs' names, and the options in which they differ."""
    from zo2core.planning.memory import MOST_RUNS

    runs: dict[str, Mapping[object, object]] = {}
    try:
        named = read_recipe(path)
    except OptionError as error:
        expected = "a YAML file with a line such as small: {lr: 1e-4} for each run"
        raise OptionError(path, found=error.found, expected=expected, remedy=error.remedy) from error
    if len(named) > MOST_RUNS:
        expected = f"at most {MOST_RUNS}, which take their steps together"
        raise OptionError(path, found=counted(len(named), "run"), expected=expected, remedy="write several files")
    for name, values in named.items():
        values = {} if values is None else values
        if not (isinstance(name, str) and _NAME.fullmatch(name)) or not isinstance(values, dict):
            raise OptionError(
                path,
                found=f"{name!r}: {str(values)[:80]}",
                expected="a name of letters and digits, which its directory gets, and its options, for each run",
                remedy="write a line such as small: {lr: 1e-4} for each run",
            )
        for option in values:
            if option in _COMMON:
                raise OptionError(
                    f"{path}, {name}",
                    found=f"{option}",
                    expected="options in which runs of one base may differ",
                    remedy=f"pass --{str(option).replace('_', '-')} for all runs",
                )
        runs[name] = values
    return runs


def train_together(runs: Sequence[PlannedRun], output: Path) -> None:
    """Train several runs that share their base, and print how they compare."""
    from zo2adapters.trainers.engines import open_shared_base, require_shareable

    for run in runs:
        try:
            require_shareable(run.options)
        except OptionError as error:
            raise OptionError(run.name, found=error.found, expected=error.expected, remedy=error.remedy) from error
    try:
        output.mkdir(parents=True, exist_ok=True)
        held = acquire(directory_lock(output))  # before its runs': else two processes take some of them each, and both end
    except OSError as error:
        expected = "a directory that can be written"
        raise OutputError(output, found=reason(error), expected=expected, remedy="choose another one") from error
    print(f"{len(runs)} runs share each pass over the blocks: {', '.join(run.name for run in runs)}", file=sys.stderr)
    with held, open_shared_base(runs[0].options) as shared:
        functions: Mapping[str, Callable[[], Outcome]] = {run.name: partial(_trained, run, shared) for run in runs}
        try:
            ended = shared.together(functions)
        except KeyboardInterrupt:
            print("\nstopped; the same command continues all runs; to continue one of them:", file=sys.stderr)
            for run in runs:
                print(f"  {run.options.resume_command}", file=sys.stderr)
            raise
    outcomes, first = [], None
    for run in runs:
        result = ended[run.name]
        if isinstance(result, Exception):
            print(f"{run.name} ended: {result}", file=sys.stderr)
            first, result = first or result, _failed(run, result)
        outcomes.append(result)
    replace_file(output / TABLE, json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    print(_table(outcomes))
    directories = " ".join(outcome.directory for outcome in outcomes if outcome.steps)
    if directories:
        print(f"their curves side by side: zo2 report {directories} --output runs.html")
    if first is not None:
        raise first


def tell(*lines: str | None, prefix: str = "") -> None:
    """Print lines on standard error, but for those that are None."""
    for line in lines:
        if line is not None:
            print(f"{prefix}{line}", file=sys.stderr)


def _trained(run: PlannedRun, shared: SharedBase) -> Outcome:
    """Train and export one run; the sweeps are made together with those of the others."""
    from zo2adapters.trainers.trainer import Trainer

    with Trainer(run.options, resume=run.resume, label=run.name, shared=shared) as trainer:
        tell(*trainer.first_lines(), prefix=f"{run.name}: ")
        trainer.run()
        tell(trainer.divergence(), trainer.best_evaluation(), prefix=f"{run.name}: ")
        return _outcome(run, trainer.losses, trainer.evaluation_losses(), trainer.seconds())


def _outcome(
    run: PlannedRun, losses: Sequence[float], evaluations: Sequence[float], seconds: float, error: str | None = None
) -> Outcome:
    last = losses[-max(1, round(_JUDGED * len(losses))) :]
    return Outcome(
        run=run.name,
        steps=len(losses),
        loss=fmean(last) if last else None,
        evaluation=min(evaluations, default=None),
        seconds=seconds,
        directory=str(run.options.output),
        error=error,
    )


def _failed(run: PlannedRun, error: Exception) -> Outcome:
    """The outcome of a run that ended early, with the steps that its journal has."""
    from zo2core import Journal

    losses: list[float] = []
    if (run.options.output / OPTIONS).exists():
        try:
            with closing(Journal(run.options.output / JOURNAL)) as journal:
                losses = [step.losses[0] for step in journal.updates] or [commit.loss for commit in journal.commits]
        except ZO2Error:  # its journal may be what failed
            losses = []
    return _outcome(run, losses, (), 0.0, str(error))


def _table(outcomes: Sequence[Outcome]) -> str:
    rows: list[tuple[str, ...]] = [("run", "steps", "loss", "evaluation", "s a step", "")]
    for outcome in outcomes:
        values = ["" if value is None else f"{value:.4f}" for value in (outcome.loss, outcome.evaluation)]
        seconds = f"{outcome.seconds / outcome.steps:.2f}" if outcome.steps and outcome.seconds else ""
        state = outcome.directory if outcome.error is None else "ended early"
        rows.append((outcome.run, str(outcome.steps), *values, seconds, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells, state in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=False)]
        lines.append("  ".join([name.ljust(widths[0]), *right, state]).rstrip())
    return "\n".join(lines)
