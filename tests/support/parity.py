"""The parity property: an engine and the monolithic loop, side by side, compared bit for bit."""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import assert_equal, weights, zeroth_order
from engines import assert_same_bits as assert_same_bits
from hypothesis import strategies as st
from threaded_device import ThreadedDevice, ThreadedStreams
from torch import nn

from zo2adapters.models.monolithic import MonolithicMeZO, MonolithicStep
from zo2core import (
    FZOO,
    Distribution,
    Engine,
    HostDevice,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    PhiloxNoise,
    WriteBackPolicy,
)
from zo2core.errors import NonFiniteLossError
from zo2core.estimators.two_point import direction_seeds
from zo2core.kernels import fill
from zo2core.planning.memory import DevicePlan, HostPlan
from zo2core.protocols import BlockModel, Device, ZOEstimator
from zo2core.types import Batch

BETWEEN = ["nothing", "evaluate", "flush", "look", "reopen"]


class MonolithicFZOO(MonolithicMeZO):
    """FZOO (arXiv 2506.09034) as its authors' program takes a step, but for the walk back, which it
    makes by rounding.
    """

    def step(self, batch: Mapping[str, torch.Tensor], *seeds: int) -> MonolithicStep:
        """Evaluate the weights as they are, then one side of each direction; update along all of
        them.
        """
        unperturbed = self.loss(batch).item()
        perturbed = []
        for seed in seeds:
            saved = [p.data.clone() for _, p in self._trainable]
            self._perturb(seed, 1)
            perturbed.append(self.loss(batch).item())
            self._restore(saved)
        losses = (unperturbed, *perturbed)
        if not all(map(math.isfinite, losses)):
            return MonolithicStep(losses, (math.nan,) * len(seeds))
        std = statistics.pstdev(perturbed)
        projected_grads = tuple((loss - unperturbed) / std if std else 0.0 for loss in perturbed)
        for seed, projected_grad in zip(seeds, projected_grads, strict=True):
            self._update(seed, projected_grad, self.lr / len(seeds))
        return MonolithicStep(losses, projected_grads)


MONOLITHIC = {"mezo": MonolithicMeZO, "fzoo": MonolithicFZOO}  # share no code with the engine


class Plan(NamedTuple):
    """What is done to both."""

    lr: float
    zo_eps: float
    weight_decay: float
    perturb_in_place: bool
    seeds: list[int]  # of the first direction, one a step
    between: list[str]  # after each step: what is done in BETWEEN
    queries: int = 0  # directions a step; 0 is MeZO's own estimator
    distribution: Distribution | None = None  # of counter-based noise; None is MeZO's noise
    name: str = "mezo"  # of the estimator, among those of ``MONOLITHIC``
    autocast: torch.dtype | None = None  # of mixed precision; None is exact precision

    def estimator(self) -> ZOEstimator:
        if self.name == "fzoo":
            return FZOO(
                lr=self.lr, zo_eps=self.zo_eps, weight_decay=self.weight_decay, q=self.queries
            )
        plain = MeZOSGD(**self.numbers)
        return plain if self.queries == 0 else MultiQueryRGE(**vars(plain), q=self.queries)

    @property
    def numbers(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("lr", "zo_eps", "weight_decay", "perturb_in_place")
        }

    def directions(self, step: int) -> tuple[int, ...]:
        """The seeds that an engine told the step's first one draws."""
        evaluations = self.estimator().evaluations(step, direction_seeds(0, step, self.seeds[step]))
        return tuple(dict.fromkeys(evaluation.seed for evaluation in evaluations))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    steps = draw(st.integers(1, 5))
    return Plan(
        lr=draw(st.sampled_from([1e-6, 1e-3, 0.05])),
        zo_eps=draw(st.sampled_from([1e-3, 0.01, 0.3])),
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
        perturb_in_place=draw(st.booleans()),
        seeds=draw(
            st.lists(st.sampled_from([0, 1, 7, 999_999_999, 2**40]), min_size=steps, max_size=steps)
        ),
        between=draw(st.lists(st.sampled_from(BETWEEN), min_size=steps, max_size=steps)),
        queries=draw(st.integers(0, 3)),
        distribution=draw(st.sampled_from([None, *Distribution])),
    )


@st.composite
def fzoo_plans(draw: st.DrawFn) -> Plan:
    """Plans of FZOO, whose step is divided by how far its losses spread."""
    q = draw(st.integers(2, 4))
    rademacher = Distribution.RADEMACHER
    return draw(plans())._replace(
        name="fzoo", queries=q, perturb_in_place=False, distribution=rademacher
    )


def assert_same_weights(
    ours: Iterable[tuple[str, torch.Tensor]], theirs: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Each of our parameters, by its name, has the bits of theirs."""
    expected = dict(theirs)
    for name, value in ours:
        assert_same_bits(name, value.detach(), expected[name].detach())


def assert_steps_alike(engine: Engine, whole: MonolithicMeZO, batches: Iterable[Batch]) -> None:
    """Take a step on each batch with both: losses, projected gradients and weights have the same
    bits.
    """
    for batch in batches:
        ours = engine.step(batch)
        theirs = whole.step(batch, *ours.seeds)
        assert (ours.losses, ours.projected_grads) == (theirs.losses, theirs.projected_grads)
    assert_same_weights(engine.parameters_now(), whole.model.named_parameters())


def assert_same_parameters(engine: Engine, whole: nn.Module) -> None:
    assert_equal(weights(engine), dict(whole.named_parameters()))


class Storage(NamedTuple):
    """Where the engine keeps its weights."""

    buckets: int | None  # None: all blocks resident
    write_back_every: int | None
    keep_noise: bool
    overlap: bool = True
    kept: int = 0  # blocks that stay on a device with memory of its own
    behind_copies: bool = False  # the device has memory of its own
    activations_wait: bool = False  # in host memory, where the device has memory of its own

    def engine(self, model: BlockModel, plan: Plan, run: Path) -> Engine:
        """An engine that goes on from whatever is in the run directory."""

        activations = 1 if self.activations_wait else 2**28
        has_memory = not self.device().in_place
        return zeroth_order(
            model,
            plan.estimator(),
            noise=None if plan.distribution is None else PhiloxNoise(plan.distribution),
            journal=run / "journal.jsonl",
            memory=MemoryPolicy(
                host=HostPlan((), budget=2**28, buckets=self.buckets, keep_noise=self.keep_noise),
                device=DevicePlan((), 0, self.kept, activations)
                if has_memory and self.overlap
                else "auto",
                activations=activations,
                least_activations=1 if has_memory and self.activations_wait else None,
            ),
            write_back=WriteBackPolicy(directory=run, every=self.write_back_every),
            overlap=self.overlap,
            device=self.device(),
        )

    def device(self) -> Device:
        """In place, or as if behind a bus, with copies that take more or less long."""
        if not self.behind_copies:
            return HostDevice()
        rng = random.Random(0)
        return ThreadedDevice(ThreadedStreams(lambda lane, nbytes: rng.choice([0.0, 0.0, 0.001])))


storages = st.builds(
    Storage,
    buckets=st.sampled_from([None, 1, 2, 3]),
    write_back_every=st.sampled_from([1, 2, 3, None]),
    keep_noise=st.booleans(),
    overlap=st.booleans(),
    kept=st.sampled_from([0, 0, 1]),
    behind_copies=st.booleans(),
    activations_wait=st.booleans(),
)


def go_between(
    what: str, engine: Engine, make: Callable[[], Engine], batch: Batch, loss: Callable[[], float]
) -> Engine:
    """Do one of ``BETWEEN`` after a step, and return the engine that goes on."""
    if what == "evaluate":
        expected, found = loss(), engine.evaluate([batch]).losses[0]
        assert found == expected or (math.isnan(found) and math.isnan(expected))
    elif what == "flush":
        engine.flush()
    elif what == "look":
        list(engine.parameters_now())
    elif what == "reopen":
        engine.close()
        engine = make()
    return engine


def assert_parity(make: Callable[[], Engine], whole: nn.Module, plan: Plan, batch: Batch) -> Engine:
    """Run the plan on both and compare everything on the way."""
    engine = make()
    distribution = plan.distribution

    def draw(out: torch.Tensor, seed: int, place: int) -> None:
        assert distribution is not None
        # compared with its reference in test_kernels.py, which would take minutes here
        fill(out, distribution, seed, place)

    draws = None if distribution is None else draw
    mono = MONOLITHIC[plan.name](whole, **plan.numbers, draw=draws, autocast=plan.autocast)
    for step, (seed, between) in enumerate(zip(plan.seeds, plan.between, strict=True)):
        before = [p.data.clone() for p in whole.parameters()]
        theirs = mono.step(batch, *plan.directions(step))
        if not all(map(math.isfinite, theirs.projected_grads)):
            with pytest.raises(NonFiniteLossError):
                engine.step(batch, seed=seed)
            for parameter, value in zip(whole.parameters(), before, strict=True):
                parameter.data = value
            break
        ours = engine.step(batch, seed=seed)
        assert ours.losses == theirs.losses
        assert ours.projected_grads == theirs.projected_grads
        assert ours.loss == theirs.losses[0]
        engine = go_between(between, engine, make, batch, lambda: mono.loss(batch).item())
        if between == "look":
            assert_same_parameters(engine, whole)
    assert_same_parameters(engine, whole)
    return engine
