"""Compare how small updates accumulate: in float32, in bfloat16 weights, or in float32 factors with a bfloat16 base.

    python tools/bench.py accumulation

One matrix takes the same updates of rank-R directions as float32 weights, as bfloat16 weights in place, and as the factors
of a low-rank run (``FactorStore``). An update's size is its root mean square; projected gradients are drawn from N(0, 1), as
if directions were right as often as wrong. The change is compared with a sum in float64. Factors are read in three forms: as
they are stored, as a forward uses them, and exported, rounded to bfloat16. What it means for a task, `real-task` measures.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

import torch

from zo2core import Distribution, LowRankPerturbation
from zo2core.kernels import fill
from zo2core.perturbation import Factors, FactorStore
from zo2core.types import Evaluation, ParameterSpec, Update

ZO_EPS = 1e-3
GAUSSIAN = Distribution.GAUSSIAN
SCALE = 0.02  # standard deviation of synthetic weights, as in a newly initialised model


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4], help="sizes of updates")
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 1000, 10000], help="numbers of steps to measure after")
    parser.add_argument("--side", type=int, default=768, help="rows and columns of the matrix")
    parser.add_argument("--rank", type=int, default=8, help="rank of the directions")


class Sides:
    """One matrix, bfloat16, with updates of the size ``lr``, accumulated by all methods."""

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
        pair, number = (Evaluation(seed, 1.0), Evaluation(seed, -1.0)), len(self.updates)
        given: dict[str, Any] = {"perturb_in_place": False, "losses": (0.0, 0.0)}
        self.updates.append(Update(number, pair, (seed,), (grad,), self.lr, ZO_EPS, 0.0, **given))
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


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sizes with the same directions, after several numbers of steps."""
    generator, drawn_grads = torch.Generator().manual_seed(0), random.Random(0)
    base = torch.empty(options.side, options.side).normal_(0.0, SCALE, generator=generator).bfloat16()
    sides = {size: Sides(base, options.rank, size) for size in options.sizes}
    first = sides[options.sizes[0]]  # V is the same for all
    drawn, measured = torch.empty(options.side * options.rank), dict[str, Any]()
    for step in range(max(options.steps)):
        if step % LowRankPerturbation(rank=options.rank).period == 0:
            shared = first.advance().float()
        seed, grad = drawn_grads.getrandbits(62), drawn_grads.gauss(0, 1)
        fill(drawn, GAUSSIAN, seed, 0)
        own = drawn.view(options.side, options.rank)
        z, exact = own @ shared.t(), own.double() @ shared.double().t()
        for size, side in sides.items():
            side.take(seed, grad, z)
            side.exact.sub_(exact, alpha=size * grad)
            if step + 1 in options.steps:
                side.advance()
                formed = {"in the weights": side.store.forms(side.spec)}
                measured[f"size {size:g}, {step + 1} steps"] = formed | side.report()
    return measured
