"""Compare estimators and noises on the demo's task at equal numbers of forwards.

    python tools/compare_estimators.py --output tools/results/compare_estimators
    python tools/compare_estimators.py --precisions --output tools/results/compare_precisions

All variants have the demo's base model and task; each runs with several seeds, which determine the directions and the order
of rows. A variant of MeZO with q directions a step takes 1 / q of the steps at q times the learning rate, so that every
direction has the same weight. Estimators that normalise their step have other learning rates. Prints a table and JSON;
``--output`` writes the JSON and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from zo2adapters import Precision, open_checkpoint
from zo2adapters.commands.demo import accuracy
from zo2adapters.tasks.batches import collate, training_batches
from zo2adapters.tasks.demo_task import read_rows
from zo2adapters.tasks.rows import read_dataset
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2adapters.trainers.demo_base import RECIPE, DemoTask, prepare
from zo2adapters.trainers.lr_schedules import LearningRate
from zo2core import (
    FZOO,
    DensePerturbation,
    Distribution,
    Engine,
    LowRankPerturbation,
    MeZOSGD,
    MultiQueryRGE,
    PerRowRGE,
    PhiloxNoise,
    ZerothOrder,
)
from zo2core.estimators import ESTIMATORS
from zo2core.names import EstimatorName
from zo2core.protocols import NoiseGenerator, ZOEstimator

LR = RECIPE.optimization.rate
LOOKS = 4  # evaluations of a run, including the one before the first step


@dataclass(frozen=True)
class EstimatorVariant:
    """A variant of training."""

    name: str
    noise: Callable[[], NoiseGenerator | None]  # None is MeZO's noise
    perturb_in_place: bool
    queries: int = 1
    name_of_estimator: EstimatorName = EstimatorName.MEZO
    lr: float | None = None  # learning rate; None: the demo's times the number of queries
    rank: int | None = None  # rank of the directions; None: full-rank directions, in the weights
    per_row: bool = False  # whether each row, or with several queries each group of rows, has a direction of its own
    opening: Mapping[str, Any] = field(default_factory=dict)  # arguments of ``open_checkpoint``

    @property
    def forwards(self) -> int:
        """Forwards of a batch in a step."""
        return 2 if self.per_row else ESTIMATORS[self.name_of_estimator].multi_query.forwards(self.queries)

    def estimator(self, steps: int) -> ZOEstimator:
        """Make the estimator, with the demo's schedule."""
        recipe = RECIPE.optimization
        peak = recipe.rate * self.queries if self.lr is None else self.lr
        lr = LearningRate(peak=peak, decay=recipe.decay, warmup_steps=0, steps=steps)
        if self.name_of_estimator is EstimatorName.FZOO:
            return FZOO(q=self.queries, lr=lr, zo_eps=recipe.zo_eps)
        if self.per_row:
            q = RECIPE.batching.batch_size if self.queries == 1 else self.queries
            return PerRowRGE(q=q, lr=lr, zo_eps=recipe.zo_eps, perturb_in_place=False)
        if self.queries == 1:
            return MeZOSGD(lr=lr, zo_eps=recipe.zo_eps, perturb_in_place=self.perturb_in_place)
        return MultiQueryRGE(q=self.queries, lr=lr, zo_eps=recipe.zo_eps, perturb_in_place=self.perturb_in_place)


def gaussian() -> NoiseGenerator:
    """Counter-based."""
    return PhiloxNoise(Distribution.GAUSSIAN)


def rademacher() -> NoiseGenerator:
    """Counter-based."""
    return PhiloxNoise(Distribution.RADEMACHER)


def in_precision(name: str, lr: float, **opening: Any) -> EstimatorVariant:
    """The default estimator with other dtypes."""
    return EstimatorVariant(f"{name}, lr {lr:g}", rademacher, perturb_in_place=False, lr=lr, opening=opening)


def mixed(transfer_dtype: torch.dtype | None = None, *, back: bool = False) -> Precision:
    """Mixed precision: weights in float32, computing in bfloat16."""
    return Precision(stored=torch.float32, computed=torch.bfloat16, transfer_dtype=transfer_dtype, transfer_back=back)


SMALL_LR = 1e-5  # learning rate at which most updates are lost in bfloat16
PRECISIONS = [
    *(
        in_precision(name, lr, **opening)
        for lr in (SMALL_LR, LR)
        for name, opening in (
            ("float32", {"dtype": "float32"}),
            ("bfloat16", {"dtype": "bfloat16"}),
            ("mixed", {"precision": mixed()}),
        )
    ),
    *(
        in_precision(f"mixed, {name} carried{' both ways' if back else ''}", LR, precision=mixed(transfer_dtype, back=back))
        for name, transfer_dtype in (("bfloat16", torch.bfloat16), ("float8", torch.float8_e4m3fn))
        for back in (False, True)
    ),
]
VARIANTS = [
    EstimatorVariant("exact MeZO", lambda: None, perturb_in_place=True),
    EstimatorVariant("Philox Gaussian", gaussian, perturb_in_place=False),
    EstimatorVariant("Philox Rademacher", rademacher, perturb_in_place=False),
    EstimatorVariant("q = 4, Philox Rademacher", rademacher, perturb_in_place=False, queries=4),
    EstimatorVariant(
        "FZOO, q = 8", rademacher, perturb_in_place=False, queries=8, name_of_estimator=EstimatorName.FZOO, lr=2.4e-2
    ),
    EstimatorVariant("rank 8", gaussian, perturb_in_place=False, rank=8),
    *(
        EstimatorVariant(
            f"rank 8, per row, lr x {factor}", gaussian, perturb_in_place=False, lr=factor * LR, rank=8, per_row=True
        )
        for factor in (1, 2, 4, 8)
    ),
]


ALL = [*VARIANTS, *PRECISIONS]


def run(task: DemoTask, place: int, *, seed: int, forwards: int) -> dict[str, Any]:
    """Train once with a variant, given by its index; return the curve over forwards, and the speed."""
    variant = ALL[place]
    tokenizer, rows = load_tokenizer(task.model), read_rows(task.evaluation)
    data = read_dataset(task.train, tokenizer, sequence_length=256)
    steps = forwards // variant.forwards
    batches = training_batches(data, batch_size=RECIPE.batching.batch_size, seed=seed)
    pad = pad_token_id(tokenizer)
    curve: list[dict[str, float]] = []
    seconds = 0.0
    model = open_checkpoint(task.model, **variant.opening)
    perturbation = DensePerturbation() if variant.rank is None else LowRankPerturbation(rank=variant.rank)
    estimator = variant.estimator(steps)
    with Engine(model, ZerothOrder(estimator, noise=variant.noise(), seed=seed, perturbation=perturbation)) as engine:
        for step in range(steps + 1):
            if step % (steps // (LOOKS - 1)) == 0:
                score = accuracy(engine, model, rows, tokenizer, labels=task.labels)
                done = step * variant.forwards
                curve.append({"forwards": done, "accuracy": score.accuracy, "loss": score.loss})
            if step < steps:
                batch = collate(next(batches), pad_token_id=pad)
                began = time.perf_counter()
                engine.step(batch)
                seconds += time.perf_counter() - began
    return {"variant": variant.name, "seed": seed, "steps": steps, "seconds": seconds, "curve": curve}


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The medians and ranges over seeds, in a row for each variant."""
    rows = []
    for name in dict.fromkeys(run["variant"] for run in runs):
        own = [run for run in runs if run["variant"] == name]
        row: dict[str, Any] = {"variant": name, "steps": own[0]["steps"], "seeds": len(own)}
        for key, values in {
            "accuracy": [run["curve"][-1]["accuracy"] for run in own],
            "loss": [run["curve"][-1]["loss"] for run in own],
            "seconds": [run["seconds"] for run in own],
        }.items():
            row[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the results as a table."""
    lines = [f"{'':26s}{'steps':>6s} {'accuracy':>26s} {'loss':>24s} {'seconds':>22s}"]
    for row in rows:
        accuracy_, loss, seconds = (row[key] for key in ("accuracy", "loss", "seconds"))
        lines.append(
            f"{row['variant']:26s}{row['steps']:6d} "
            f"{accuracy_['median']:9.1%} [{accuracy_['min']:.1%} - {accuracy_['max']:.1%}] "
            f"{loss['median']:9.3f} [{loss['min']:.3f} - {loss['max']:.3f}] "
            f"{seconds['median']:8.1f} [{seconds['min']:.1f} - {seconds['max']:.1f}]"
        )
    return "\n".join(lines)


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot loss and accuracy over forwards: a line for each variant's median, a band for its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for name in dict.fromkeys(run["variant"] for run in runs):
            curves = [run["curve"] for run in runs if run["variant"] == name]
            at = [point["forwards"] for point in curves[0]]
            values = [[curve[i][key] for curve in curves] for i in range(len(at))]
            (line,) = axes.plot(at, [statistics.median(column) for column in values], label=name)
            low, high = [min(column) for column in values], [max(column) for column in values]
            axes.fill_between(at, low, high, alpha=0.15, color=line.get_color())
        axes.set_xlabel("forwards")
        axes.set_ylabel(f"evaluation {key}")
        axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forwards", type=int, default=2 * RECIPE.steps)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", help="names of variants, separated by semicolons; by default all estimators")
    parser.add_argument("--precisions", action="store_true", help="compare dtypes instead")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at a time, with one thread each")
    parser.add_argument("--output", type=Path, default=None, help="path without suffix, for .json and .png")
    options = parser.parse_args()
    names = [variant.name for variant in ALL]
    default = [variant.name for variant in (PRECISIONS if options.precisions else VARIANTS)]
    chosen = default if options.variants is None else options.variants.split(";")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--variants: {unknown[0]!r} is none of {'; '.join(names)}")
    places = [names.index(name) for name in chosen]
    with tempfile.TemporaryDirectory() as folder:
        task = prepare(Path(folder) / "task", seed=0, quiet=True)
        pairs = [(seed, place) for seed in range(options.seeds) for place in places]
        with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            started = [pool.submit(run, task, place, seed=seed, forwards=options.forwards) for seed, place in pairs]
            runs = [future.result() for future in started]
    measured = {
        "forwards": options.forwards,
        "jobs": options.jobs,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "summary": summary(runs),
        "runs": runs,
    }
    print(table(measured["summary"]))
    print(json.dumps(measured))
    if options.output is not None:
        options.output.with_suffix(".json").write_text(json.dumps(measured) + "\n")
        plot(runs, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
