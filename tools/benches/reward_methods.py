"""Compare evolution strategies, GRPO and supervised training on sums of two numbers, which a program makes and checks.

    python tools/bench.py reward-methods smollm2 --folder compared
    python tools/bench.py reward-methods smollm2 --folder compared --methods es --seeds 1000 --lr 3e-3 6e-3 --tuning

The prompt has two solved sums and an unsolved one. A completion has one token more than the numbers have digits, which is
enough for a sum, or for a shorter one and the end of its line. It gets 1 if its last number is the sum, else 0. Evolution
strategies move all weights along directions of low rank; GRPO (TRL's trainer over streamed blocks) and the supervised runs
train LoRA of rank 8 on the attention's q and v. Evolution strategies and GRPO write as many completions as ``--rollouts``
says; the supervised runs, an upper bound that is told the answers, read as many rows. ``--tuning`` evaluates on other rows.

Each method, learning rate and seed is a run, which gets a JSON file in the folder. Called again with more of them, or after
it was killed, it does only what is missing. A file says how many completions were written, the CPU seconds and seconds of
training, the mean reward of each step, the reward on held-out rows, and the drift from the base in nats a token.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from measuring import machine, spread
from peft import LoraConfig
from transformers import AutoTokenizer

from zo2adapters import Adapter, BackpropGRPOMixin, open_checkpoint
from zo2adapters.tasks.reward_program import arithmetic
from zo2adapters.tasks.reward_task import RewardTask
from zo2adapters.tasks.rewards import RewardOptions
from zo2adapters.tasks.row_reader import read_rows
from zo2adapters.tasks.task import TaskOptions
from zo2adapters.tasks.tokenizer import pad_token_id
from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.first_order import FirstOrder
from zo2adapters.trainers.model_options import RunModelOptions
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_directory import METRICS
from zo2adapters.trainers.trainer import Trainer
from zo2core import Engine
from zo2core.errors import OptionError
from zo2core.names import EstimatorName

GROUP, GRPO_BATCH = 8, 64  # completions of a prompt, and of a step
SUPERVISED_BATCH = 16
RATES = {"es": 6e-3, "grpo": 1e-3, "supervised": 1e-3}  # by default, as tuned on SmolLM2-135M
LORA_RANK, LORA_TARGETS = 8, ("q_proj", "v_proj")
SETTINGS = ("model", "rollouts", "zo_eps", "queries", "rank", "batch", "digits", "held_out", "tuning")

datasets, trl = (importlib.import_module(name) for name in ("datasets", "trl"))  # which have no types


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs' files")
    parser.add_argument("--methods", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, nargs="+", help="learning rates; by default one for each method")
    parser.add_argument("--rollouts", type=int, default=2048, help="completions of a run")
    parser.add_argument("--zo-eps", type=float, default=1e-2)
    parser.add_argument("--queries", type=int, default=8, help="antithetic pairs of evolution strategies")
    parser.add_argument("--rank", type=int, default=8, help="rank of the directions of evolution strategies")
    parser.add_argument("--batch", type=int, default=8, help="rows of each member of evolution strategies")
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--tuning", action="store_true", help="evaluate on rows to tune on")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train what the folder does not have; medians and ranges over seeds for each method and learning rate."""
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data = save(Path(folder, "train.jsonl"), sums(4096, 1, options.digits))
        held_out = save(Path(folder, "held-out.jsonl"), sums(options.held_out, 2 if options.tuning else 3, options.digits))
        runs = Runs(options, data, Scores(options.model, held_out, rewards_of(options)))
        measured: dict[str, Any] = {"base": {name: runs.base()[name] for name in ("reward", "drift") if name in runs.base()}}
        for method in options.methods:
            for lr in options.lr or [RATES[method]]:
                made = [runs.run(method, lr, seed) for seed in options.seeds]
                values = {name: [one[name] for one in made] for name in ("reward", "drift", "rollouts", "cpu_seconds")}
                measured[f"{method}, lr {lr:g}"] = {name: spread(each) for name, each in values.items()}
    return measured


class GRPO(BackpropGRPOMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
    """TRL's trainer over streamed blocks."""


class Trained(NamedTuple):
    """What a run made."""

    model: Path
    adapter: Path | None  # None: all weights of the model were trained
    rows: int  # completions that were written to train on, or rows that were read
    rewards: list[float]  # mean of each step; empty if no completion was written


def sums(count: int, seed: int, digits: int) -> list[dict[str, str]]:
    """Make sums of two numbers with so many digits."""
    numbers, least, most = random.Random(seed), 10 ** (digits - 1), 10**digits - 1
    made = []
    for _ in range(count):
        a, b = numbers.randint(least, most), numbers.randint(least, most)
        made.append({"prompt": f"11+12=23\n34+25=59\n{a}+{b}=", "completion": f"{a + b}\n"})
    return made


def save(path: Path, made: list[dict[str, str]]) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


class Scores:
    """Rewards and drift on held-out rows, of models that were trained from one base."""

    def __init__(self, base: Path, held_out: Path, rewards: RewardOptions) -> None:
        self._rewards = rewards
        self._tokenizer = AutoTokenizer.from_pretrained(base)
        self._rows = read_rows(held_out, self._tokenizer, sequence_length=64, keeps_sources=True)
        model = open_checkpoint(base)
        task = self._task(model)
        task.prepare(lambda: Engine(model), list)
        task.close()
        self._kept = task._kept  # what the base wrote, by which all models are measured

    def _task(self, model: Any) -> RewardTask:
        pad = pad_token_id(self._tokenizer)
        given: Any = {"rewards": self._rewards, "tokenizer": self._tokenizer}
        return RewardTask(model, self._rows, TaskOptions(objective="reward", pad=pad, batch_size=64, **given))

    def of(self, path: Path, adapter: Path | None) -> dict[str, float]:
        """Evaluate a checkpoint, or one with an adapter."""
        model = open_checkpoint(path, adapter=None if adapter is None else Adapter(config=adapter, is_trained=False))
        task = self._task(model)
        task._kept = self._kept
        with Engine(model) as replayer:
            results = task.evaluate(replayer, self._rows)
        task.close()
        return results


def by_evolution(data: Path, output: Path, options: argparse.Namespace, lr: float, seed: int) -> Trained:
    """Train all weights by evolution strategies."""
    completions = 2 * options.queries * options.batch  # of a step
    trained = TrainOptions(
        model=str(options.model),
        data=data,
        output=output,
        steps=steps_of(options, completions),
        seed=seed,
        rewards=rewards_of(options),
        optimization=Optimization(
            estimator=EstimatorName.ES,
            queries=options.queries,
            rank=options.rank,
            lr=lr,
            zo_eps=options.zo_eps,
            guard=False,
        ),
        batching=Batching(batch_size=options.batch, sequence_length=64),
    )
    with Trainer(trained, quiet=True) as trainer:
        model = trainer.run()
    steps = [json.loads(line) for line in (output / METRICS).read_text().splitlines()]
    rewards = [step["reward"] for step in steps if "generated_tokens" in step]
    return Trained(model, None, len(rewards) * completions, rewards)


def by_gradients(data: Path, output: Path, options: argparse.Namespace, lr: float, seed: int) -> Trained:
    """Train LoRA on the answers."""
    steps = steps_of(options, SUPERVISED_BATCH)
    trained = TrainOptions(
        model=str(options.model),
        data=data,
        output=output,
        steps=steps,
        seed=seed,
        first_order=FirstOrder(method="adamw"),
        model_options=RunModelOptions(lora_rank=LORA_RANK, lora_targets=LORA_TARGETS),
        optimization=Optimization(lr=lr),
        batching=Batching(batch_size=SUPERVISED_BATCH, sequence_length=64),
    )
    with Trainer(trained, quiet=True) as trainer:
        return Trained(options.model, trainer.run(), steps * SUPERVISED_BATCH, [])


def by_grpo(data: Path, output: Path, options: argparse.Namespace, lr: float, seed: int) -> Trained:
    """Train LoRA by GRPO."""
    rewards: list[list[float]] = []

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        written = zip(prompts, completions, answer, strict=True)
        rewards.append([arithmetic(prompt, text, {"answer": right}) for prompt, text, right in written])
        return rewards[-1]

    args = trl.GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=GRPO_BATCH,
        num_generations=GROUP,
        max_completion_length=rewards_of(options).max_new_tokens,
        max_steps=steps_of(options, GRPO_BATCH),
        learning_rate=lr,
        seed=seed,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    # TRL passes its own columns only by their names, and a reward gets no column named completion.
    made = datasets.Dataset.from_list([{"prompt": row["prompt"], "answer": row["completion"]} for row in rows])
    adapter = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=list(LORA_TARGETS), lora_dropout=0.0)
    trainer = GRPO(model=str(options.model), args=args, reward_funcs=reward, train_dataset=made, peft_config=adapter)
    try:
        trainer.train()
        trainer.save_model(str(output / "adapter"))
    finally:
        trainer.engine.close()
    return Trained(options.model, output / "adapter", sum(map(len, rewards)), list(map(statistics.fmean, rewards)))


METHODS: dict[str, Callable[..., Trained]] = {"es": by_evolution, "grpo": by_grpo, "supervised": by_gradients}


def steps_of(options: argparse.Namespace, completions: int) -> int:
    """Steps of a run whose steps write so many completions.

    Raises:
        OptionError: if they are no whole number.
    """
    if options.rollouts % completions:
        found, expected = f"{options.rollouts}", f"a multiple of {completions}, the completions of a step"
        raise OptionError("rollouts", found=found, expected=expected, remedy="change it, or --queries or --batch")
    return int(options.rollouts) // completions


def rewards_of(options: argparse.Namespace) -> RewardOptions:
    """The reward, and the length of completions."""
    return RewardOptions(reward=("arithmetic",), max_new_tokens=options.digits + 1)


class Runs:
    """The runs of a folder, with a JSON file for each.

    Args:
        options: The options of the command line.
        data: Rows to train on.
        scores: Evaluates what a run made.
    """

    def __init__(self, options: argparse.Namespace, data: Path, scores: Scores) -> None:
        self._options = options
        self._data = data
        self._scores = scores
        self._settings = {name: str(getattr(options, name)) for name in SETTINGS}

    def base(self) -> dict[str, Any]:
        """The base, evaluated like a run."""
        return self._kept("base", lambda: {"method": "base", **self._scores.of(self._options.model, None)})

    def run(self, method: str, lr: float, seed: int) -> dict[str, Any]:
        """Train once, and evaluate."""

        def made() -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as folder:
                began, began_cpu = time.perf_counter(), sum(os.times()[:4])
                trained = METHODS[method](self._data, Path(folder, "run"), self._options, lr, seed)
                spent = {"seconds": time.perf_counter() - began, "cpu_seconds": sum(os.times()[:4]) - began_cpu}
                named = {"method": method, "lr": lr, "seed": seed, "rollouts": trained.rows}
                return {**named, **spent, **self._scores.of(trained.model, trained.adapter), "steps": trained.rewards}

        return self._kept(f"{method}-lr{lr:g}-seed{seed}", made)

    def _kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Read a run from its file, or make it and write the file.

        Raises:
            OptionError: if the file is of a run with other settings.
        """
        path = self._options.folder / f"{'tuning-' if self._options.tuning else ''}{name}.json"
        if path.exists():
            kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if kept["settings"] != self._settings:
                expected = f"one with {self._settings}"
                raise OptionError(
                    path, found=f"a run with {kept['settings']}", expected=expected, remedy="pass another folder"
                )
            return kept
        made = {**make(), "settings": self._settings, "machine": machine()}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(made) + "\n", encoding="utf-8")
        partial.replace(path)
        print({key: made[key] for key in made if key not in ("settings", "machine", "steps")}, flush=True)
        return made
