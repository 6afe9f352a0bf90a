"""Compare how small updates accumulate: in float32, in bfloat16 weights, or in float32 factors with a bfloat16 base.

    python tools/compare_accumulation.py weights --output accumulation.json
    python tools/compare_accumulation.py task --forwards 800 --output accumulation-task.json

*Weights*: one matrix takes the same updates of rank-R directions as float32 weights, as bfloat16 weights in place, and as
the factors of a low-rank run (``FactorStore``). An update's size is its root mean square; projected gradients are drawn from
N(0, 1), as if directions were right as often as wrong. The change is compared with a sum in float64. Factors are read in
three forms: as they are stored, as a forward uses them, and exported, rounded to bfloat16.

*Task*: the demo's task, at constant learning rates that give about those sizes: a size is divided by the root mean square of
the first projected gradients. Every run reports the actual size of its updates. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import keep, machine, spread

from zo2adapters import open_checkpoint
from zo2adapters.commands.demo import accuracy
from zo2adapters.tasks.batches import collate, training_batches
from zo2adapters.tasks.demo_task import read_rows
from zo2adapters.tasks.rows import read_dataset
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2adapters.trainers.demo_base import RECIPE, DemoTask, prepare
from zo2core import DensePerturbation, Distribution, Engine, LowRankPerturbation, MeZOSGD, PhiloxNoise, ZerothOrder
from zo2core.kernels import fill
from zo2core.perturbation import Factors, FactorStore
from zo2core.types import Evaluation, ParameterSpec, Update

ZO_EPS = RECIPE.optimization.zo_eps
GAUSSIAN = Distribution.GAUSSIAN
SCALE = 0.02  # standard deviation of synthetic weights, as in a newly initialised model
PROBED = 20  # steps whose projected gradients decide the learning rates
LOOKS = 4  # evaluations of a run, including the one before the first step


def rms(values: Sequence[float]) -> float:
    """The root mean square of values."""
    return math.sqrt(statistics.fmean(value * value for value in values))


class Sides:
    """One matrix with updates of one size, accumulated by all methods.

    Args:
        base: The matrix before the updates, (outputs, inputs), bfloat16.
        rank: Rank of the directions.
        lr: Size of the updates, because projected gradients and directions have a variance of 1.
    """

    def __init__(self, base: torch.Tensor, rank: int, lr: float) -> None:
        self.spec = ParameterSpec("matrix", tuple(base.shape), base.dtype, 0, decays=True)
        self.store = FactorStore(LowRankPerturbation(rank=rank), GAUSSIAN, 0, base.device)
        self.base, self.rank, self.lr = base, rank, lr
        self.exact = torch.zeros(base.shape, dtype=torch.float64)  # sum of the updates
        self.updates: list[Update] = []
        self.in_place = {"float32": base.float(), "bfloat16 in place": base.clone()}

    def advance(self) -> torch.Tensor:
        """Bring the factors to the current version; return V of the current period, (inputs, rank)."""
        self.store.begin_sweep()
        self.store.advance(self.spec, self.base.view(-1), self.updates, len(self.updates))
        factors = self.store.learned(self.spec, self.base.view(-1)).factors
        assert factors is not None, "a matrix has factors"
        return factors.right[:, -self.rank :]

    def take(self, seed: int, grad: float, z: torch.Tensor) -> None:
        """Take one update, with MeZO's arithmetic in the weights."""
        sides = (Evaluation(seed, 1.0), Evaluation(seed, -1.0))
        self.updates.append(
            Update(
                len(self.updates), sides, (seed,), (grad,), self.lr, ZO_EPS, 0.0, perturb_in_place=False, losses=(0.0, 0.0)
            )
        )
        for weights in self.in_place.values():
            weights.sub_(z.to(weights.dtype, copy=True).mul_(grad).mul_(self.lr))

    def changes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each method's name and weights after the updates, in float64."""
        yield from ((name, weights.double()) for name, weights in self.in_place.items())
        flat = self.base.view(-1)
        learned = self.store.learned(self.spec, flat)
        assert learned.factors is not None, "a matrix has factors"
        yield "virtual float32", self.base.double() + learned.factors.left.double() @ learned.factors.right.double().t()
        formed, factors = self.base.clone(), self.store.perturbed(self.spec, flat, self.store.perturbations([None], ZO_EPS))
        if self.store.forms(self.spec):
            self.store.form(self.spec, flat, formed)
        assert isinstance(factors, Factors), "a matrix has factors"
        yield "the same, as a forward sees it", formed.double() + factors.left[0].double() @ factors.right.double().t()
        yield "the same, exported in bfloat16", learned.present().double()

    def report(self) -> dict[str, dict[str, float]]:
        """The share of weights that changed in float32, and the error of the change relative to the exact change's size."""
        base, size = self.base.double(), self.exact.norm()
        return {
            name: {
                "moved": float((weights.float() != self.base.float()).double().mean()),
                "error": float((weights - base - self.exact).norm() / size),
            }
            for name, weights in self.changes()
        }


def in_weights(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sizes with the same directions, after several numbers of steps."""
    generator, told = torch.Generator().manual_seed(0), random.Random(0)
    base = torch.empty(options.side, options.side).normal_(0.0, SCALE, generator=generator).bfloat16()
    sides = {size: Sides(base, options.rank, size) for size in options.sizes}
    first = sides[options.sizes[0]]  # V is the same for all
    drawn, looks = torch.empty(options.side * options.rank), []
    for step in range(max(options.steps)):
        if step % LowRankPerturbation(rank=options.rank).period == 0:
            shared = first.advance().float()
        seed, grad = told.getrandbits(62), told.gauss(0, 1)
        fill(drawn, GAUSSIAN, seed, 0)
        own = drawn.view(options.side, options.rank)
        z, exact = own @ shared.t(), own.double() @ shared.double().t()
        for size, side in sides.items():
            side.take(seed, grad, z)
            side.exact.sub_(exact, alpha=size * grad)
        if step + 1 in options.steps:
            for size, side in sides.items():
                side.advance()
                looks.append({"size": size, "steps": step + 1, "formed": side.store.forms(side.spec), "ways": side.report()})
    for look in looks:
        for name, found in look["ways"].items():
            told_ = f"{found['moved']:9.2%} moved, error {found['error']:.2e}"
            print(f"{look['size']:.0e} x {look['steps']:6d}  {name:32s}{told_}")
    return {"side": options.side, "rank": options.rank, "looks": looks}


class Method(NamedTuple):
    """A method of accumulating a run's updates."""

    name: str
    dtype: str
    rank: int | None  # rank of the directions; None: full-rank updates of the weights


METHODS = [
    Method("virtual float32, rank 8", "bfloat16", 8),
    Method("float32, rank 8", "float32", 8),
    Method("bfloat16 in place, dense", "bfloat16", None),
    Method("float32 in place, dense", "float32", None),
]


def train(task: DemoTask, method: Method, *, lr: float, seed: int, steps: int, looks: int = LOOKS) -> dict[str, Any]:
    """Train once; return the curve of the run, and the size of its updates."""
    tokenizer, rows = load_tokenizer(task.model), read_rows(task.evaluation)
    batches = training_batches(
        read_dataset(task.train, tokenizer, sequence_length=256), batch_size=RECIPE.batching.batch_size, seed=seed
    )
    pad, curve = pad_token_id(tokenizer), []
    grads: list[float] = []
    model = open_checkpoint(task.model, dtype=method.dtype)
    perturbation = DensePerturbation() if method.rank is None else LowRankPerturbation(rank=method.rank)
    estimator = MeZOSGD(lr=lr, zo_eps=ZO_EPS, perturb_in_place=False)
    with Engine(model, ZerothOrder(estimator, noise=PhiloxNoise(GAUSSIAN), seed=seed, perturbation=perturbation)) as engine:
        for step in range(steps + 1):
            if looks > 0 and step % max(1, steps // (looks - 1)) == 0:
                score = accuracy(engine, model, rows, tokenizer, labels=task.labels)
                curve.append({"forwards": 2 * step, "accuracy": score.accuracy, "loss": score.loss})
            if step < steps:
                grads += engine.step(collate(next(batches), pad_token_id=pad)).projected_grads
    return {"way": method.name, "seed": seed, "lr": lr, "grad": rms(grads), "size": lr * rms(grads), "curve": curve}


def on_task(options: argparse.Namespace, task: DemoTask) -> dict[str, Any]:
    """Train all runs; return medians with ranges."""
    steps, seeds = options.forwards // 2, range(options.seeds)
    probes = [train(task, METHODS[1], lr=1e-12, seed=seed, steps=min(PROBED, steps), looks=0)["grad"] for seed in seeds]
    runs, rows = [], []
    for size in options.sizes:
        lr = float(f"{size / rms(probes):.1e}")
        for method in METHODS:
            own = [train(task, method, lr=lr, seed=seed, steps=steps) for seed in seeds]
            runs += [{"asked": size, **run} for run in own]
            losses = [[run["curve"][look]["loss"] for run in own] for look in range(len(own[0]["curve"]))]
            row = {"asked": size, "lr": lr, "way": method.name, "size": spread([run["size"] for run in own])}
            rows.append({**row, "losses": [spread(values) for values in losses]})
            cells = "".join(f"{at['median']:9.4f} [{at['min']:.4f} - {at['max']:.4f}]" for at in rows[-1]["losses"])
            print(f"{size:.0e}, lr {lr:g}, was {rows[-1]['size']['median']:.1e}  {method.name:26s}{cells}", flush=True)
    return {"forwards": options.forwards, "seeds": options.seeds, "summary": rows, "runs": runs}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["weights", "task"])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4], help="sizes of updates")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[100, 1000, 10000], help="weights: numbers of steps to measure after"
    )
    parser.add_argument("--side", type=int, default=768, help="weights: rows and columns of the matrix")
    parser.add_argument("--rank", type=int, default=8, help="weights: rank of the directions")
    parser.add_argument("--forwards", type=int, default=800, help="task: forwards of a batch in a run")
    parser.add_argument("--seeds", type=int, default=3, help="task: number of seeds")
    parser.add_argument("--threads", type=int, help="number of torch threads; by default all cores")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.what == "weights":
        measured = in_weights(options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measured = on_task(options, prepare(Path(folder) / "task", seed=0, quiet=True))
    keep({"machine": machine(), **measured}, options.output)


if __name__ == "__main__":
    main()
