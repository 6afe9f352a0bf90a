"""Compare evolution strategies, GRPO and supervised training on sums of two numbers, which a program makes and checks.

    python tools/compare_rewards.py --model smollm2 --rollouts 4096 --output compared.json
    python tools/compare_rewards.py --model smollm2 --methods es --seeds 0,1,2 --lr 1e-3

The prompt has two solved sums and an unsolved one. A completion gets 1 if its last number is the sum, else 0. Evolution
strategies move all weights along directions of low rank; GRPO (TRL's trainer over streamed blocks) and the supervised runs
train LoRA of rank 8 on the attention's q and v. Evolution strategies and GRPO write as many completions as ``--rollouts``
says; the supervised runs, an upper bound that is told the answers, read as many rows. Tune ``--lr`` with ``--tuning``, which
evaluates on other rows. Prints a line for each run and JSON: reward on held-out rows, drift from the base in nats a token,
and seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_overlap import keep, machine
from peft import LoraConfig
from transformers import AutoTokenizer

from zo2adapters import Adapter, BackpropGRPOMixin, open_checkpoint
from zo2adapters.tasks.reward_options import RewardOptions
from zo2adapters.tasks.reward_program import arithmetic
from zo2adapters.tasks.reward_task import RewardTask
from zo2adapters.tasks.rows import read_dataset
from zo2adapters.tasks.task import TaskOptions
from zo2adapters.tasks.tokenizer import pad_token_id
from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.first_order import FirstOrder
from zo2adapters.trainers.model_options import RunModelOptions
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.trainer import Trainer
from zo2core import Replayer
from zo2core.estimators import EstimatorName

NEW_TOKENS = 6
RATES = {"es": 1e-3, "grpo": 1e-4, "supervised": 3e-4}  # by default, of each method
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}


datasets, trl = (importlib.import_module(name) for name in ("datasets", "trl"))  # which have no types


class GRPO(BackpropGRPOMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
    """TRL's trainer over streamed blocks."""


def rows(count: int, seed: int, digits: int) -> list[dict[str, str]]:
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

    def __init__(self, base: Path, held_out: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(base)
        self._rows = read_dataset(held_out, self._tokenizer, sequence_length=64, keeps_sources=True)
        self._base = self._task(open_checkpoint(base))
        self._base.prepare(lambda: Replayer(self._base_model), list)

    def _task(self, model: Any) -> RewardTask:
        self._base_model = model
        options = RewardOptions(reward=("arithmetic",), max_new_tokens=NEW_TOKENS)
        pad = pad_token_id(self._tokenizer)
        given: Any = {"rewards": options, "tokenizer": self._tokenizer}
        return RewardTask(model, self._rows, TaskOptions(objective="reward", pad=pad, batch_size=64, **given))

    def of(self, path: Path, adapter: Path | None = None) -> dict[str, float]:
        """Evaluate a checkpoint, or one with an adapter."""
        model = open_checkpoint(path, adapter=None if adapter is None else Adapter(config=adapter, is_trained=False))
        task = self._task(model)
        task._kept = self._base._kept
        with Replayer(model) as replayer:
            results = task.evaluate(replayer, self._rows)
        task.close()
        return results


def by_evolution(
    base: Path, data: Path, output: Path, options: argparse.Namespace, lr: float, seed: int
) -> tuple[Path, Any]:
    """Train all weights by evolution strategies; the exported model."""
    trained = TrainOptions(
        model=str(base),
        data=data,
        output=output,
        steps=options.rollouts // (2 * options.queries * options.batch),
        seed=seed,
        rewards=RewardOptions(reward=("arithmetic",), max_new_tokens=NEW_TOKENS),
        optimization=Optimization(
            estimator=EstimatorName.ES, queries=options.queries, rank=8, lr=lr, zo_eps=options.zo_eps, guard=False
        ),
        batching=Batching(batch_size=options.batch, sequence_length=64),
    )
    with Trainer(trained, quiet=True) as trainer:
        return trainer.run(), None


def by_gradients(
    base: Path, data: Path, output: Path, options: argparse.Namespace, lr: float, seed: int
) -> tuple[Path, Path]:
    """Train LoRA on the answers; base and adapter."""
    trained = TrainOptions(
        model=str(base),
        data=data,
        output=output,
        steps=options.rollouts // 16,
        seed=seed,
        first_order=FirstOrder(method="adamw"),
        model_options=RunModelOptions(lora_rank=8, lora_targets=("q_proj", "v_proj")),
        optimization=Optimization(lr=lr),
        batching=Batching(batch_size=16, sequence_length=64),
    )
    with Trainer(trained, quiet=True) as trainer:
        return base, trainer.run()


def by_grpo(base: Path, data: Path, output: Path, options: argparse.Namespace, lr: float, seed: int) -> tuple[Path, Path]:
    """Train LoRA by GRPO, with groups of eight completions; base and adapter."""

    def reward(prompts: list[str], completions: list[str], completion: list[str], **_: Any) -> list[float]:
        return [
            arithmetic(prompt, text, {"completion": right})
            for prompt, text, right in zip(prompts, completions, completion, strict=True)
        ]

    args = trl.GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=NEW_TOKENS,
        max_steps=options.rollouts // 64,
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
    made = datasets.Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()])
    adapter = {"peft_config": LoraConfig(**LORA)}  # type: ignore[arg-type]
    trainer = GRPO(model=str(base), args=args, reward_funcs=reward, train_dataset=made, **adapter)
    trainer.train()
    trainer.save_model(str(output / "adapter"))
    trainer.engine.close()
    return base, output / "adapter"


METHODS: dict[str, Callable[..., tuple[Path, Any]]] = {"es": by_evolution, "grpo": by_grpo, "supervised": by_gradients}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--methods", default="es,grpo,supervised")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rollouts", type=int, default=4096, help="completions of a run")
    parser.add_argument("--lr", type=float, help="learning rate; by default one for each method")
    parser.add_argument("--zo-eps", type=float, default=1e-2)
    parser.add_argument("--queries", type=int, default=8, help="antithetic pairs of evolution strategies")
    parser.add_argument("--batch", type=int, default=32, help="rows of each member of evolution strategies")
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--tuning", action="store_true", help="evaluate on rows to tune on")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = save(Path(folder, "train.jsonl"), rows(4096, 1, options.digits))
        held_out = save(Path(folder, "held-out.jsonl"), rows(options.held_out, 2 if options.tuning else 3, options.digits))
        scores = Scores(options.model, held_out)
        runs.append({"method": "base", **scores.of(options.model)})
        print(runs[-1], flush=True)
        for method in options.methods.split(","):
            for seed in map(int, options.seeds.split(",")):
                lr, output = options.lr or RATES[method], Path(folder, f"{method}-{seed}")
                began = time.perf_counter()
                trained = METHODS[method](options.model, data, output, options, lr, seed)
                seconds = time.perf_counter() - began
                runs.append({"method": method, "seed": seed, "lr": lr, "seconds": seconds, **scores.of(*trained)})
                print(runs[-1], flush=True)
    keep({"machine": machine(), **{key: str(value) for key, value in vars(options).items()}, "runs": runs}, options.output)


if __name__ == "__main__":
    main()
