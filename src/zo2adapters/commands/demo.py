"""``zo2 demo``: a small model is pre-trained, then fine-tuned with zeroth-order steps alone.

Nothing is downloaded. The text is the source of Python's standard library. Part of it pre-trains a small Llama with
first-order steps; held-out files give the task. The two phases are measured separately.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from zo2adapters.commands.at_step import AtStep
from zo2adapters.commands.options import Command
from zo2adapters.tasks.demo_task import read_rows
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.trainers.demo_base import RECIPE, Recipe, prepare
from zo2adapters.trainers.options import DEFAULT_LENGTH, TrainOptions
from zo2adapters.trainers.run_directory import METRICS, MODEL


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Pre-train a small model, fine-tune it with zeroth-order steps alone, and print what it learned."""

    keep: Path | None = None
    """Directory that keeps model, data and run; by default they are removed at the end."""
    seed: int = 0
    """Seed of pre-training and fine-tuning."""

    def run(self) -> None:
        """Run the demo."""
        from zo2core.checkpoint.shards import require_unused

        if self.keep is not None:
            require_unused(self.keep)
        with nullcontext(self.keep) if self.keep else tempfile.TemporaryDirectory(prefix="zo2-demo-") as directory:
            run_demo(Path(directory), seed=self.seed)


class TaskScore(NamedTuple):
    """How well a model answers the task's rows."""

    accuracy: float  # share of rows whose completion is the likeliest label, 0 to 1
    loss: float  # mean loss over the tokens of the right completions, in nats


def run_demo(directory: Path, *, seed: int, recipe: Recipe = RECIPE, quiet: bool = False) -> tuple[TaskScore, TaskScore]:
    """Make a model, fine-tune it with zeroth-order steps alone, and print what it learned."""
    from zo2adapters.trainers.trainer import Trainer

    task = prepare(directory, seed=seed, recipe=recipe, quiet=quiet)
    losses, output = task.pretraining_losses, directory / "run"
    print(
        f"model: Llama, {task.parameters:,} parameters, made from {recipe.characters / 1e6:.1f} MB of Python's own source\n"
        f"  first-order pre-training: {len(losses)} steps of AdamW, loss {losses[0]:.2f} -> {fmean(losses[-20:]):.2f}, "
        f"{task.pretraining_seconds:.0f} s\n"
        "task: is a line docstring text (a) or code (b)? The question is new to the model, and the lines come from files\n"
        f"  that pre-training did not see: {recipe.training_rows} rows to train on, {recipe.evaluation_rows} to evaluate on",
        flush=True,
    )
    options = TrainOptions(
        model=str(task.model),
        data=task.train,
        output=output,
        evaluation=task.evaluation,
        evaluate_every=max(recipe.steps // 5, 1),
        steps=recipe.steps,
        seed=seed,
        batching=recipe.batching,
        optimization=recipe.optimization,
    )
    accuracies = [accuracy(task.model, task.evaluation, task.labels)]
    with Trainer(options, quiet=quiet) as trainer:
        trainer.run()
    accuracies.append(accuracy(output / MODEL, task.evaluation, task.labels))
    records = read_rows(output / METRICS)
    evaluated = [record["evaluation_loss"] for record in records if "evaluation_loss" in record]
    before, after = (TaskScore(*score) for score in zip(accuracies, (evaluated[0], evaluated[-1]), strict=True))
    steps = [record for record in records if "tokens" in record]
    seconds, tokens = (sum(record[key] for record in steps) for key in ("seconds", "tokens"))
    print(
        f"zeroth-order fine-tuning: {len(steps)} steps of two forwards each, no gradient, {seconds:.0f} s\n"
        f"  before  accuracy {before.accuracy:6.1%}  loss {before.loss:.3f}\n"
        f"  after   accuracy {after.accuracy:6.1%}  loss {after.loss:.3f}\n"
        f"  speed   {len(steps) / seconds:.1f} steps/s, {tokens / seconds:.0f} tokens/s\n"
        f"  memory  {max(record['rss_bytes'] for record in steps) / 1e6:.0f} MB at most, of the whole process\n"
        "next, on a model of your own:\n"
        "  zo2 init --model DIR --data FILE\n"
        "  zo2 train recipe.yaml",
        flush=True,
    )
    return before, after


def accuracy(directory: Path, rows: Path, labels: Sequence[str]) -> float:
    """The share of rows of which a model finds the right label the likeliest."""
    from zo2adapters.models.checkpoint import open_checkpoint
    from zo2adapters.tasks.row_reader import RowReader
    from zo2adapters.tasks.task import TaskOptions, measured
    from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id

    model, tokenizer = open_checkpoint(directory), load_tokenizer(directory)
    options = RowOptions(label_column="completion", labels=tuple(labels))
    choices = RowReader(tokenizer, model.longest_row or DEFAULT_LENGTH, options).read(rows)
    with AtStep(model=str(directory)).engine(model) as engine:
        measuring = TaskOptions(tokenizer=tokenizer, pad=pad_token_id(tokenizer), batch_size=16)
        return measured(engine, model, choices, measuring).results["accuracy"]
