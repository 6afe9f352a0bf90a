"""``zo2 tune``: find the learning rate for a model and its data, within a budget of forward passes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from zo2adapters.commands.options import Command, text_table
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import RunOptions, TrainOptions
from zo2adapters.trainers.worker_options import WorkerOptions, is_first
from zo2core.errors import OptionError
from zo2core.ranges import require_whole

if TYPE_CHECKING:
    from zo2adapters.trainers.tuning import Schedule, Trial  # command lines are parsed without importing transformers
    from zo2core import Workers


@dataclass(frozen=True, kw_only=True)
class Tune(RunOptions, Command):
    """Find the learning rate for a model and its data by short runs; the better half of them runs for longer."""

    needs: ClassVar = ("zo2adapters.trainers.trainer", "zo2adapters.trainers.tuning")
    first_options: ClassVar = "model data output forwards learning_rates zo_eps_to_try batch_size memory"

    model: str
    """Model directory with safetensors weights, a GGUF file, or a hub id."""
    data: Path
    """File to train on, as for zo2 train."""
    output: Path
    """Directory for tune.json and the trials, each of which is a run. The same command continues interrupted trials."""
    forwards: int = 2000
    """Forward passes of a batch that all trials together may take. With --method, a step counts as three for an adapter,
    and as four or eight for all parameters."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates to try; by default seven from 1e-6 to 1e-3, with --method five: from 3e-5 to 3e-3 for an adapter,
    and on the optimizer's own scale for all parameters. --lr has no effect here and is refused."""
    zo_eps_to_try: tuple[float, ...] = ()
    """Perturbation scales to try with each learning rate; by default --zo-eps alone."""

    def after_interruption(self) -> str:
        """How to continue after an interruption."""
        return f"run the same command again to continue: finished work is in {self.output} and is not repeated"

    def check(self) -> None:
        """See the contract."""
        require_whole("forwards", self.forwards, 1)
        for option, value, default, expected, remedy in (
            ("lr", self.optimization.lr, Optimization().lr, "none", "pass --learning-rates"),
            ("steps", self.steps, RunOptions().steps, "no --steps, because --forwards sets the budget", "leave it out"),
        ):
            if value != default:
                raise OptionError(option, found=repr(value), expected=expected, remedy=remedy)

    def run(self) -> None:
        """Print the cost, run the trials, print a table after each round, and print how to continue the best trial."""
        from zo2adapters.trainers.tuning import tune

        options = self.of_run(model=self.model, data=self.data, output=self.output)
        with WorkerOptions().workers() as workers:
            first = is_first(workers)
            best = tune(
                options,
                forwards=self.forwards,
                learning_rates=self.learning_rates,
                zo_eps=self.zo_eps_to_try,
                before=lambda schedule: print(_cost(schedule, options, workers), file=sys.stderr) if first else None,
                after_round=lambda trials: print(_table(trials), file=sys.stderr) if first else None,
                quiet=not first,
                workers=workers,
            )
        if not first:
            return
        scale = "" if self.first_order.method else f", zo_eps {best.zo_eps:g}"
        print(
            f"lr {best.lr:g}{scale}: mean loss {best.loss:.4f} over the last steps of {best.steps}\n"
            f"to continue this run: {replace(options, output=best.directory).resume_command} --steps 1000"
        )


def _cost(schedule: Schedule, options: TrainOptions, workers: Workers | None) -> str:
    """The number of steps and forward passes and, on the CPU, the planned time."""
    from zo2adapters.trainers.run_plan import duration
    from zo2adapters.trainers.tuning import expected_seconds

    line = (
        f"{schedule.trials} trials in {len(schedule.rounds)} rounds, of up to {schedule.rounds[-1]} steps: "
        f"{schedule.steps:,} steps, {schedule.forwards:,} forward passes of {options.batching.batch_size} rows"
    )
    if options.storage.device != "cpu":
        return line
    return f"{line}, about {duration(expected_seconds(options, schedule))}{'' if workers is None else ' with one worker'}"


def _table(trials: Sequence[Trial]) -> str:
    losses = [f"{trial.loss:.4f}" if math.isfinite(trial.loss) else "diverged" for trial in trials]
    rows = [(f"{trial.lr:.1e}", f"{trial.zo_eps:.1e}", str(trial.steps)) for trial in trials]
    return text_table(
        [("lr", "zo_eps", "steps", "loss"), *((*row, loss) for row, loss in zip(rows, losses, strict=True))], left=()
    )
