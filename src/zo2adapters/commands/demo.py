"""``zo2 demo``: a small model is pre-trained, then fine-tuned with zeroth-order steps alone.

Nothing is downloaded. The text is the source of Python's standard library. Part of it pre-trains a small Llama with
first-order steps; held-out files give the task. The two phases are measured separately.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from zo2adapters.commands.at_step import AtStep
from zo2adapters.commands.options import Command
from zo2adapters.tasks.demo_task import LABELS, read_rows
from zo2adapters.trainers.demo_base import RECIPE, DemoTask, Recipe, prepare
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_directory import METRICS, MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zo2adapters.models.hf import HFBlockModel
    from zo2core import Engine


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Pre-train a small model, fine-tune it with zeroth-order steps alone, and print what it learned."""

    keep: Path | None = None
    """Directory that keeps model, data and run; by default they are removed at the end."""
    seed: int = 0
    """Seed of pre-training and fine-tuning."""

    def run(self) -> None:
        """Run the demo."""
        from zo2core.checkpoint import require_unused

        if self.keep is not None:
            require_unused(self.keep)
            run_demo(self.keep, seed=self.seed)
            return
        with tempfile.TemporaryDirectory(prefix="zo2-demo-") as directory:
            run_demo(Path(directory), seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class TaskScore:
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
    before = _score_of(task, task.model)
    with Trainer(options, quiet=quiet) as trainer:
        trainer.run()
    after = _score_of(task, output / MODEL)
    steps = [record for record in read_rows(output / METRICS) if "tokens" in record]
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


def accuracy(
    engine: Engine,
    model: HFBlockModel,
    rows: Sequence[Mapping[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    labels: Sequence[str] = LABELS,
) -> TaskScore:
    """Compute how often the likeliest label is the right one."""
    from zo2adapters.tasks.objectives import score
    from zo2adapters.tasks.row_reader import tokenized_choice
    from zo2adapters.tasks.tokenizer import pad_token_id

    choices = [tokenized_choice(row["prompt"], labels, [labels.index(row["completion"])], tokenizer) for row in rows]
    scored = score(
        engine,
        model,
        [choice.prompt for choice in choices],
        [choice.candidates for choice in choices],
        pad_token_id=pad_token_id(tokenizer),
    )
    right = sum(index in choice.answers for choice, index in zip(choices, scored.choices(), strict=True))
    log_likelihoods, tokens = [], 0
    for choice, likelihoods, lengths in zip(choices, scored.log_likelihoods, scored.tokens, strict=True):
        log_likelihoods.append(likelihoods[choice.answer])
        tokens += lengths[choice.answer]
    return TaskScore(accuracy=right / len(rows), loss=-math.fsum(log_likelihoods) / tokens)


def _score_of(task: DemoTask, directory: Path) -> TaskScore:
    """Score a model, before or after fine-tuning, on the evaluation rows."""
    from zo2adapters.models.checkpoint import open_checkpoint
    from zo2adapters.tasks.tokenizer import load_tokenizer

    model = open_checkpoint(directory)
    with AtStep(model=str(directory)).engine(model) as engine:
        return accuracy(engine, model, read_rows(task.evaluation), load_tokenizer(task.model), labels=task.labels)
