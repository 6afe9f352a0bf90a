"""``zo2 tune``: find the learning rate for a model and its data, within a budget of forwards."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from zo2adapters.ranges import require_at_least
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import RunOptions, TrainOptions
from zo2adapters.trainers.worker_options import WorkerOptions, is_first
from zo2core import OptionError, Workers

if TYPE_CHECKING:
    from zo2adapters.trainers.tuning import Schedule, Trial  # a command line is read without transformers


@dataclass(frozen=True, kw_only=True)
class Tune(RunOptions):
    """Find the learning rate for a model and its data by short runs, of which the better half goes on for longer."""

    first_options: ClassVar = (
        "model",
        "data",
        "output",
        "forwards",
        "learning_rates",
        "zo_eps_to_try",
        "batch_size",
        "memory",
    )

    model: str
    """Model directory with safetensors weights, or a hub id."""
    data: Path
    """JSONL file, as for training."""
    output: Path
    """Directory for the trials, each a run of its own, and tune.json. Given again, trials that were interrupted go on."""
    forwards: int = 2000
    """Forwards of a batch that all trials may take together."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates to try; by default seven from 1e-6 to 1e-3. --lr itself has no effect here and is refused."""
    zo_eps_to_try: tuple[float, ...] = ()
    """Perturbation scales to try with each of them; by default --zo-eps alone."""
    key_file: Path | None = None
    """File with a secret, the same for all workers that torchrun started, by which they know each other."""

    def after_interruption(self) -> str:
        """How to go on after an interruption."""
        return f"the same command goes on: what was done of the trials is in {self.output}, and is not done again"

    def run(self) -> None:
        """Say what it takes, try, print a table after each round, and say how to go on with the best trial."""
        from zo2adapters.trainers.tuning import LEARNING_RATES, tune

        require_at_least("forwards", self.forwards, 1)
        if self.optimization.lr != Optimization().lr:
            raise OptionError("lr", found=repr(self.optimization.lr), expected="none", remedy="pass --learning-rates")
        if self.first_order != RunOptions().first_order:
            raise OptionError(
                "method",
                found=f"{self.first_order.method}",
                expected="none: trials take zeroth-order steps",
                remedy="leave it out, or compare runs of zo2 train --method with zo2 report",
            )
        if self.steps != RunOptions().steps:
            raise OptionError(
                "steps",
                found=str(self.steps),
                expected="none: --forwards says how much is done",
                remedy="leave it out",
            )
        own = {option.name: getattr(self, option.name) for option in fields(RunOptions)}
        options = TrainOptions(model=self.model, data=self.data, output=self.output, **own)
        with WorkerOptions(key_file=self.key_file).workers() as workers:
            first = is_first(workers)
            best = tune(
                options,
                forwards=self.forwards,
                learning_rates=self.learning_rates or LEARNING_RATES,
                zo_eps=self.zo_eps_to_try,
                before=lambda schedule: print(_cost(schedule, options, workers), file=sys.stderr) if first else None,
                after_round=lambda trials: print(_table(trials), file=sys.stderr) if first else None,
                quiet=not first,
                workers=workers,
            )
        if not first:
            return
        print(
            f"lr {best.lr:g}, zo_eps {best.zo_eps:g}: mean loss {best.loss:.4f} over the last steps of {best.steps}\n"
            f"its run goes on with: zo2 train --resume {best.directory} --steps 1000"
        )


def _cost(schedule: Schedule, options: TrainOptions, workers: Workers | None) -> str:
    """What all trials take, and about how long: by the plan of a step, which is made for the CPU."""
    from zo2adapters.trainers.run_plan import duration
    from zo2adapters.trainers.tuning import expected_seconds

    line = (
        f"{schedule.trials} trials in {len(schedule.rounds)} rounds, of up to {schedule.rounds[-1]} steps each: "
        f"{schedule.steps:,} steps, {schedule.forwards:,} forwards of a batch of {options.batching.batch_size} rows"
    )
    if options.storage.device != "cpu":
        return line
    return (
        f"{line}, about {duration(expected_seconds(options, schedule))}{'' if workers is None else ' of one worker alone'}"
    )


def _table(trials: Sequence[Trial]) -> str:
    lines = [f"{'lr':>8s} {'zo_eps':>8s} {'steps':>6s} {'loss':>9s}"]
    for trial in trials:
        loss = f"{trial.loss:9.4f}" if math.isfinite(trial.loss) else " diverged"
        lines.append(f"{trial.lr:8.1e} {trial.zo_eps:8.1e} {trial.steps:6d} {loss}")
    return "\n".join(lines)
