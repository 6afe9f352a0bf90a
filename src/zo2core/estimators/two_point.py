"""Two-point estimators, and what all estimators have in common: which evaluations a step has, and
what update follows from their losses.

The ``name`` of each class is its name in journals.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from zo2core.errors import OptionError
from zo2core.protocols import CounterNoise, NoiseGenerator, ZOEstimator
from zo2core.ranges import recorded_rate, require_number, require_whole
from zo2core.types import Distribution, Evaluation, RowGroup, Update


def learning_rate(estimator: ZOEstimator, step: int) -> float:
    """Return the learning rate of a step.

    Raises:
        OptionError: if a schedule returns a number that is negative or not finite. It may return 0,
            as a warm-up does at its first step.
    """
    if not callable(estimator.lr):
        return float(estimator.lr)
    value = estimator.lr(step)
    require_number(
        f"lr at step {step}", value, least=0, remedy="correct the learning rate schedule"
    )
    return float(value)


def direction_seeds(run_seed: int, step: int, first: int | None) -> Iterator[int]:
    """Yield seeds in [0, 1e9), as MeZO draws them, from a separate generator for each step.

    Args:
        run_seed: Seed of the run.
        step: 0-based.
        first: A first seed that the caller chose, from which the others follow; None draws all
            seeds.
    """
    if first is not None:
        yield first
    state = f"{run_seed}/{step}" if first is None else f"given/{first}"
    rng = random.Random(state)  # noqa: S311 - no secret
    while True:
        yield rng.randrange(1_000_000_000)


def distinct(seeds: Iterator[int], count: int) -> tuple[int, ...]:
    """Take ``count`` different seeds.

    A repeated seed is skipped, so that q directions are different.
    """
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        chosen[next(seeds)] = None
    return tuple(chosen)


def require_distribution(estimator: ZOEstimator, noise: NoiseGenerator) -> None:
    """Refuse noise of another distribution than the estimator needs."""
    needed = estimator.distribution
    if needed is None or (isinstance(noise, CounterNoise) and noise.distribution is needed):
        return
    raise OptionError(
        "noise",
        found=noise.name,
        expected=f"{needed.value} noise, which the estimator {estimator.options.get('name')} needs",
        remedy=f"pass `PhiloxNoise(Distribution.{needed.name})`",
    )


@dataclass(frozen=True, kw_only=True)
class EstimatorBase(ABC):
    """The numbers that all estimators have, and the record of a step; a subclass computes the
    projected gradients.
    """

    name: ClassVar[str]
    distribution: ClassVar[Distribution | None] = None  # directions may have any distribution
    least_queries: ClassVar[int] = 1
    is_two_sided: ClassVar[bool] = True  # losses come in pairs, of both sides of a direction

    lr: float | Callable[[int], float]
    zo_eps: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.lr):
            require_number("lr", self.lr, above=0)
        require_number("zo_eps", self.zo_eps, above=0)
        require_number("weight_decay", self.weight_decay, least=0)

    @classmethod
    def forwards(cls, queries: int) -> int:
        """Number of evaluations: both sides of each direction, or one side of each and the
        unperturbed weights.
        """
        return 2 * queries if cls.is_two_sided else queries + 1

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and numbers."""
        return {
            "name": self.name,
            "lr": recorded_rate(self.lr),
            "zo_eps": self.zo_eps,
            "weight_decay": self.weight_decay,
        }

    @abstractmethod
    def projected_grads(self, losses: Sequence[torch.Tensor]) -> tuple[float, ...]:
        """Compute the projected gradient of each direction from the losses of all evaluations."""

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """Compute the update: of q directions, each is applied with ``lr / q``.

        Its record does not name rows.
        """
        seeds = tuple(dict.fromkeys(evaluation.seed for evaluation in evaluations))
        return Update(
            step=step,
            evaluations=tuple(evaluation._replace(rows=None) for evaluation in evaluations),
            seeds=seeds,
            projected_grads=self.projected_grads(losses),
            lr=lr / len(seeds),
            zo_eps=self.zo_eps,
            weight_decay=self.weight_decay,
            perturb_in_place=self.options.get("perturb_in_place", False),
            losses=tuple(float(loss.item()) for loss in losses),
        )


@dataclass(frozen=True, kw_only=True)
class MeZOSGD(EstimatorBase):
    """The two-point estimator ``g = (l(theta + eps z) - l(theta - eps z)) / (2 eps)`` with plain
    SGD.

    This is MeZO (arXiv 2305.17333, Algorithm 1): two evaluations along one direction.

    Args:
        lr: Learning rate, or a function from the 0-based step to it.
        zo_eps: Perturbation scale.
        weight_decay: Weight decay; MeZO adds ``weight_decay * theta`` to the gradient estimate of
            parameters that decay.
        perturb_in_place: True is MeZO's arithmetic bit for bit: +eps, -2 eps and +eps are added to
            the weights, which keep the rounding. False starts each evaluation from the unperturbed
            weights, so that evaluations leave no rounding. None is True for dense perturbations,
            and False for low-rank ones, which change no weight.

    Raises:
        OptionError: if a number is not finite or has the wrong sign.
    """

    name: ClassVar[str] = "mezo-sgd"

    perturb_in_place: bool | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """The numbers, and ``perturb_in_place``."""
        return {**super().options, "perturb_in_place": self.perturb_in_place is not False}

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List both sides of one direction."""
        seed = next(rng)
        return (Evaluation(seed, 1.0), Evaluation(seed, -1.0))

    def projected_grads(self, losses: Sequence[torch.Tensor]) -> tuple[float, ...]:
        """Subtract the losses of each pair in their own dtype, as MeZO does."""
        pairs = zip(losses[::2], losses[1::2], strict=True)
        return tuple(float(((plus - minus) / (2 * self.zo_eps)).item()) for plus, minus in pairs)


@dataclass(frozen=True, kw_only=True)
class QueryEstimator(EstimatorBase):
    """An estimator along q directions."""

    q: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("q", self.q, self.least_queries)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of an estimator along one direction, and q."""
        return {**super().options, "q": self.q}


@dataclass(frozen=True, kw_only=True)
class MultiQueryRGE(QueryEstimator, MeZOSGD):
    """The mean of q two-point estimates: ``g_i = (l(theta + eps z_i) - l(theta - eps z_i)) / (2
    eps)``, i = 1, ..., q.

    This is multi-query randomized gradient estimation (P-RGE, arXiv 2409.15520, equation 1).

    All 2 q evaluations perturb the weights at the step's start, up to the rounding of in-place
    perturbations. Then q updates follow in the order of the directions, each with ``lr / q``. Each
    update applies its weight decay to the current weights: together ``lr * weight_decay``, to first
    order. With q = 1 this is ``MeZOSGD``, bit for bit.

    Args:
        lr: Learning rate of the whole step, or a function from the 0-based step to it.
        zo_eps: Perturbation scale.
        weight_decay: As for ``MeZOSGD``.
        perturb_in_place: As for ``MeZOSGD``; True adds +eps, -2 eps and +eps along one direction
            after the other.
        q: Number of directions.

    Raises:
        OptionError: if a number is out of its range.
    """

    name: ClassVar[str] = "multi-query-rge"

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List both sides of each direction."""
        return tuple(
            Evaluation(seed, shift) for seed in distinct(rng, self.q) for shift in (1.0, -1.0)
        )


@dataclass(frozen=True, kw_only=True)
class PerRowRGE(MultiQueryRGE):
    """``MultiQueryRGE`` that divides the rows of a batch among its directions: each is evaluated on
    B / q of the B rows.

    A step runs 2 B rows for any q; P-RGE (arXiv 2409.15520) keeps E = q B constant in the same way.
    With q = B each row has its own direction. The projected gradient of a direction is that of the
    mean loss over its rows' labelled tokens, and each direction is applied with ``lr / q``. With
    low-rank perturbations all rows run as one batch; with dense ones each direction is a separate
    forward.

    Args:
        lr, zo_eps, weight_decay, perturb_in_place: As for ``MultiQueryRGE``.
        q: Number of directions; the number of rows must be a multiple of it.
    """

    name: ClassVar[str] = "per-row-rge"

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List both sides of each direction, for the direction's group of rows."""
        sides = super().evaluations(step, rng)
        return tuple(
            side._replace(rows=RowGroup(index // 2, self.q)) for index, side in enumerate(sides)
        )
