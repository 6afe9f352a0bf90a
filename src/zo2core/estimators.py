"""Zeroth-order gradient estimators: which evaluations a step has, and what update follows from
their losses.

A wrapped estimator's updates are clipped, or guarded against divergence by the health of the run.

``ESTIMATORS`` has the names by which users choose them. The ``name`` of each class is its name in
journals.
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from statistics import median
from typing import Any, ClassVar, NamedTuple

import torch

from zo2core.errors import DivergenceError, OptionError, ZO2Warning
from zo2core.protocols import CounterNoise, NoiseGenerator, ZOEstimator
from zo2core.ranges import EstimatorName, Fitness, require_number, require_whole
from zo2core.types import Distribution, Evaluation, RowGroup, Update


def learning_rate(estimator: ZOEstimator, step: int) -> float:
    """Return the learning rate of a step.

    Raises:
        OptionError: if it is not positive and finite. A schedule may also return 0, as a warm-up
            does at its first step.
    """
    if callable(estimator.lr):
        value = estimator.lr(step)
        require_number(
            f"lr at step {step}", value, least=0, remedy="correct the learning rate schedule"
        )
    else:
        value = estimator.lr
        require_number("lr", value, above=0)
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
    rng = random.Random(f"{run_seed}/{step}" if first is None else f"given/{first}")  # noqa: S311 - no secret
    while True:
        yield rng.randrange(1_000_000_000)


def distinct(seeds: Iterator[int], count: int) -> tuple[int, ...]:
    """Take ``count`` different seeds.

    A repeated seed is skipped, so that q directions are different.
    """
    taken: dict[int, None] = {}
    while len(taken) < count:
        taken[next(seeds)] = None
    return tuple(taken)


def require_distribution(estimator: ZOEstimator, noise: NoiseGenerator) -> None:
    """Refuse noise of another distribution than the estimator needs."""
    needed = estimator.distribution
    if needed is None or (isinstance(noise, CounterNoise) and noise.distribution is needed):
        return
    raise OptionError(
        "noise",
        found=noise.name,
        expected=f"{needed.value} noise, which the estimator {estimator.options.get('name')} needs",
        remedy=f"pass noise=PhiloxNoise(Distribution.{needed.name})",
    )


@dataclass(frozen=True, kw_only=True)
class _Estimator(ABC):
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
        """Name and numbers.

        A schedule is described by its ``repr`` if it is a dataclass, else as "a function".
        """
        lr = self.lr
        described = (repr(lr) if is_dataclass(lr) else "a function") if callable(lr) else float(lr)
        return {
            "name": self.name,
            "lr": described,
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
class MeZOSGD(_Estimator):
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
class _Queries(_Estimator):
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
class MultiQueryRGE(_Queries, MeZOSGD):
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


@dataclass(frozen=True, kw_only=True)
class EvolutionStrategies(MultiQueryRGE):
    """``theta <- theta - lr / q * sum_i (s_i+ - s_i-) / 2 * z_i``, with s the scores of the losses
    at ``theta +- zo_eps z``.

    This is ``theta + lr / N sum_n F_n epsilon_n`` over a population of N = 2 q antithetic members,
    with fitness F = -s (arXiv 1703.03864, 2509.24372). A score compares a loss with all losses of
    the step, so the length of a step depends on neither the scale of the losses nor ``zo_eps``: a
    weight moves by at most about ``lr / sqrt(q)``.

    - ``Fitness.SCALED``: the loss minus the mean, divided by the standard deviation, of all losses
      of the step.
    - ``Fitness.RANKS``: the loss's rank among them, from -0.5 to 0.5; equal losses share their mean
      rank.

    If all losses are equal, the step changes no weight. All members are evaluated on the same rows,
    so that subtracting the mean of each row would subtract the same number from all losses: fitness
    is centred by row as it is.

    Args:
        lr, zo_eps, weight_decay, perturb_in_place, q: As for ``MultiQueryRGE``; the population has
            2 q members.
        fitness: How losses become scores.
    """

    name: ClassVar[str] = "evolution-strategies"

    fitness: Fitness = Fitness.SCALED

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of ``MultiQueryRGE``, and the fitness."""
        return {**super().options, "fitness": self.fitness.value}

    def projected_grads(self, losses: Sequence[torch.Tensor]) -> tuple[float, ...]:
        """Compute half the difference of the scores of each pair, as doubles."""
        score = _ranks if self.fitness is Fitness.RANKS else _scaled
        scores = score([float(loss.item()) for loss in losses])
        return tuple(
            (plus - minus) / 2 for plus, minus in zip(scores[::2], scores[1::2], strict=True)
        )


def _scaled(losses: Sequence[float]) -> list[float]:
    mean, deviation = statistics.fmean(losses), statistics.pstdev(losses)
    return [(loss - mean) / deviation if deviation else 0.0 for loss in losses]


def _ranks(losses: Sequence[float]) -> list[float]:
    below = [sum(other < loss for other in losses) for loss in losses]
    equal = [sum(other == loss for other in losses) for loss in losses]
    return [
        (lower + (same - 1) / 2) / (len(losses) - 1) - 0.5
        for lower, same in zip(below, equal, strict=True)
    ]


# Note: Text and code. The paper's text, as far as a summary of its equations shows, also divides by
# zo_eps, as a gradient estimate does, and computes the standard deviation with q - 1. Its authors'
# program (github.com/DKmiyan/FZOO, trainer.py) does not divide by zo_eps, and uses q. This file
# follows the program, since the published learning rates (5e-5 at zo_eps 1e-4, q = 8) are the
# program's. The two differ by a constant: the text's learning rate is this one's times zo_eps *
# sqrt(q / (q - 1)). The program perturbs the weights in place, which leaves rounding in them; here
# each evaluation starts from the unperturbed weights. The program computes losses and deviation in
# float32; here they are doubles, and the deviation is rounded once.


@dataclass(frozen=True, kw_only=True)
class FZOO(_Queries):
    """``theta <- theta - lr / q * sum_i (l_i - l_0) / sigma * z_i``, with Rademacher directions
    z_i, i = 1, ..., q.

    This is FZOO (arXiv 2506.09034): one-sided evaluations, scaled by the spread of their losses.

    l_0 is the loss of the unperturbed weights, ``l_i = l(theta + zo_eps * z_i)``, and sigma the
    standard deviation of l_1 to l_q: ``sigma^2 = 1/q sum_i (l_i - mean)^2``. Since sigma is
    proportional to the slope, all steps have about the same length: a weight moves by about ``lr /
    sqrt(q)``. So the learning rate has other units than MeZO's. The note 'Text and code' says where
    the paper's text and program differ.

    If l_1 to l_q are equal, as with 16-bit weights and a small zo_eps, then sigma is 0, and so are
    the step's projected gradients.

    Args:
        lr: Learning rate of the whole step, or a function from the 0-based step to it.
        zo_eps: Perturbation scale.
        weight_decay: As for ``MeZOSGD``, and not divided by sigma; the paper has none.
        q: Number of directions, N in the paper; a step has q + 1 evaluations.

    Raises:
        OptionError: if a number is out of its range; q is at least 2.
    """

    name: ClassVar[str] = "fzoo"
    perturb_in_place: ClassVar[bool] = False  # each evaluation starts from the weights
    # an evaluation moves every weight by zo_eps
    distribution: ClassVar[Distribution | None] = Distribution.RADEMACHER
    least_queries: ClassVar[int] = 2  # one direction has no standard deviation
    is_two_sided: ClassVar[bool] = False

    q: int = 8

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List the unperturbed weights, whose loss is the step's, and then one side of each
        direction.
        """
        seeds = distinct(rng, self.q)
        return (Evaluation(seeds[0], 0.0), *(Evaluation(seed, 1.0) for seed in seeds))

    def projected_grads(self, losses: Sequence[torch.Tensor]) -> tuple[float, ...]:
        """Divide the change of each direction's loss by the standard deviation, as doubles."""
        centre, *sides = [float(loss.item()) for loss in losses]
        sigma = statistics.pstdev(sides)
        return tuple(0.0 if sigma == 0 else (side - centre) / sigma for side in sides)


@dataclass(frozen=True, kw_only=True)
class EstimatorWrapper(ABC):
    """An estimator with the evaluations and updates of another one."""

    estimator: ZOEstimator

    @property
    def lr(self) -> float | Callable[[int], float]:
        """See the wrapped estimator."""
        return self.estimator.lr

    @property
    def zo_eps(self) -> float:
        """See the wrapped estimator."""
        return self.estimator.zo_eps

    @property
    def perturb_in_place(self) -> bool | None:
        """See the wrapped estimator."""
        return self.estimator.perturb_in_place

    @property
    def distribution(self) -> Distribution | None:
        """See the wrapped estimator."""
        return self.estimator.distribution

    @property
    def options(self) -> Mapping[str, Any]:
        """See the wrapped estimator."""
        return self.estimator.options

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """See the wrapped estimator."""
        return self.estimator.evaluations(step, rng)

    @abstractmethod
    def changed(self, update: Update, past: Sequence[Update]) -> Update:
        """Change the wrapped estimator's update of a step, given the run's updates before it."""

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """Compute the update of the wrapped estimator, and change it."""
        return self.changed(self.estimator.update(step, evaluations, losses, lr, past), past[:step])


def with_perturb_in_place(estimator: ZOEstimator, *, default: bool) -> ZOEstimator:
    """Return an estimator whose ``perturb_in_place`` is not None.

    Args:
        estimator: The estimator. If its ``perturb_in_place`` is None, it is a dataclass with this
            field, or wraps one.
        default: Replaces None.
    """
    if estimator.perturb_in_place is not None:
        return estimator
    if isinstance(estimator, EstimatorWrapper):
        return replace(
            estimator, estimator=with_perturb_in_place(estimator.estimator, default=default)
        )
    copy: ZOEstimator = replace(estimator, perturb_in_place=default)  # type: ignore[type-var]
    return copy


_MEDIAN_OF = 50  # steps of the running median
_LEAST_MEDIAN = 10  # steps without a median at the start of a run


@dataclass(frozen=True, kw_only=True)
class Clipped(EstimatorWrapper):
    """An estimator whose projected gradients are clipped: ``g <- max(-c, min(g, c))``.

    c is ``value``, or ``medians`` times the median of the absolute projected gradients that the
    last 50 steps applied, or the smaller of both. Since ``medians`` is at least 1, clipping does
    not change the median. The first 10 steps have no median, and steps that were not applied do not
    count.

    Args:
        estimator: The wrapped estimator.
        value: Largest absolute projected gradient; None: no such bound.
        medians: Largest multiple of the running median; None: no such bound.

    Raises:
        OptionError: if neither bound is given, or a number is out of its range.
    """

    value: float | None = None
    medians: float | None = None

    def __post_init__(self) -> None:
        if self.value is not None:
            require_number("clip_grad", self.value, above=0)
        if self.medians is not None:  # with a smaller one the median would shrink to 0
            require_number(
                "clip_median", self.medians, least=1, remedy="choose `clip_median` such as 3"
            )
        if self.value is None and self.medians is None:
            raise OptionError("clipping", "no bound", "value or medians", "pass one of the two")

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the wrapped estimator, and the bounds."""
        bounds = {"clip_grad": self.value, "clip_median": self.medians}
        return {
            **self.estimator.options,
            **{name: float(bound) for name, bound in bounds.items() if bound is not None},
        }

    def changed(self, update: Update, past: Sequence[Update]) -> Update:
        """Clip the projected gradients."""
        if not all(math.isfinite(grad) for grad in update.projected_grads):
            return update  # the engine refuses it; clipping would hide it
        most = self._largest(past[-_MEDIAN_OF:])
        return replace(
            update,
            projected_grads=tuple(max(-most, min(grad, most)) for grad in update.projected_grads),
        )

    def _largest(self, recent: Sequence[Update]) -> float:
        most = math.inf if self.value is None else self.value
        if self.medians is not None:
            applied = [
                [abs(grad) for grad in update.projected_grads if grad != 0] for update in recent
            ]
            if sum(map(bool, applied)) >= _LEAST_MEDIAN:
                most = min(most, self.medians * median(size for sizes in applied for size in sizes))
        return most


# Run health: steps far outside the past losses, runs that have become permanently worse, and the
# best step of a run.
#
# All functions depend only on the losses in the journal's records, whatever an estimator, clipping
# or a guard computed from them. The *level* of a step is the mean of its losses. Its *contrast* is
# the range of its losses divided by ``zo_eps``: twice the projected gradient of a two-point
# estimator. Directions are independent with unit variance, so after some steps each weight has
# moved by the root of the sum of ``(lr * projected_grad)^2``.
#
# A guard against divergence: it skips steps far outside the run's range, and stops a run that has
# become worse.

RECENT = 10  # the last steps, of which refused ones do not count
LEAST = 20  # steps at the start of a run, none of which is refused

# Note: How far is far. Noise must never stop a run, and should hardly ever refuse a step. Losses of
# small batches are not normally distributed: most rows are easy, and one in a hundred is not. So a
# single step is compared with the extremes of the last 200, not with their quartiles: rows that
# come once in 50 steps are within the range. With normal noise, five times the distance from the
# median to the extreme is nine standard deviations at the 20th step and fourteen at the 200th.

BLOCK = 10  # steps with one median loss; the run is checked after each such block
# weights of trained models are below 1: if each moved by more, the model is destroyed
MOST_MOVED = 1.0

# Note: How much worse is permanently worse. The noise of single losses must never stop a run, so
# each margin is at least half a nat, half of the loss itself, and twice the distance from the
# median to the extreme of the losses it is compared with: with batches of one row, of which one in
# ten is hard, medians of ten steps jump. Progress counts as lost when more than half of it is. A
# destroyed model may also have a low loss, that of a coin toss, which no longer changes; the
# distance that its weights have moved shows it.


def level(update: Update) -> float:
    """Return the mean of a step's losses."""
    return sum(update.losses) / len(update.losses)


def is_refused(update: Update) -> bool:
    """Whether a step with different losses was not applied."""
    return not any(update.projected_grads) and min(update.losses) != max(update.losses)


def outlier(update: Update, past: Sequence[Update], *, window: int, factor: float) -> str | None:
    """Describe how a step lies far outside the run's range; None if it does not.

    Recently refused steps do not count, so that all steps after a lasting jump are refused until
    the run stops.
    """
    if len(past) < LEAST:
        return None
    counted = [
        *past[-4 * window : -RECENT],
        *(earlier for earlier in past[-RECENT:] if not is_refused(earlier)),
    ]
    now, contrast, last = level(update), _contrast(update), counted[-LEAST:]
    if now <= max(map(level, last)) and contrast <= max(map(_contrast, last)):
        return None  # a step within the range of the last steps, as most are, is within that of all
    levels = [level(earlier) for earlier in counted]
    middle, extreme = median(levels[-window:]), max(levels)
    if now > middle + factor * max(extreme - middle, 0.1 * abs(middle)):
        return (
            f"loss {now:.4g}, where the last {len(levels)} steps had {min(levels):.4g} to "
            f"{extreme:.4g}"
        )
    largest = max(map(_contrast, counted))
    if contrast > factor * largest > 0:
        return (
            f"losses {contrast:.4g} zo_eps apart, where the last {len(levels)} steps had "
            f"{largest:.4g} at most"
        )
    return None


def _contrast(update: Update) -> float:
    return (max(update.losses) - min(update.losses)) / update.zo_eps


class RunHealth(NamedTuple):
    """A summary of a run's updates, in blocks of ``BLOCK`` steps."""

    version: int = 0  # number of updates in the summary
    last: Update | None = None  # last of these updates
    squares: float = 0.0  # square of the distance that each weight has moved
    best: float = math.inf  # lowest median loss of a block
    best_end: int = 0  # version after that block

    def extended(self, past: Sequence[Update]) -> RunHealth:
        """Return the summary of these updates: this one extended if they continue it, else a new
        one.
        """
        continues = self.version <= len(past) and (
            self.version == 0 or past[self.version - 1] is self.last
        )
        health = self if continues else RunHealth()
        for end in range(health.version + BLOCK, len(past) + 1, BLOCK):
            block = past[end - BLOCK : end]
            now, squares = median(map(level, block)), sum(map(squared_move, block), health.squares)
            best, best_end = (now, end) if now < health.best else (health.best, health.best_end)
            health = RunHealth(end, block[-1], squares, best, best_end)
        return health


def squared_move(update: Update) -> float:
    """Return the square of the distance that an update moves each weight."""
    return sum((update.lr * grad) ** 2 for grad in update.projected_grads)


def drift(health: RunHealth, past: Sequence[Update], *, window: int) -> tuple[str, str] | None:
    """Check whether a run has become permanently worse; runs are checked at the end of a block."""
    if not past or health.version != len(past):
        return None
    moved = math.sqrt(health.squares)
    if moved > MOST_MOVED:
        return (
            f"each weight moved by {moved:.2g} in all",
            f"at most {MOST_MOVED:g}, since most weights are below it",
        )
    now = median(map(level, past[-BLOCK:]))
    found = f"a median loss of {now:.4g} in the last {BLOCK} steps"
    first_levels = _levels_while(past[:window], 10 * past[0].zo_eps)
    start, worst = median(first_levels), max(first_levels)
    limit = worst + max(0.5, 0.5 * abs(worst), 2 * (worst - start))
    if now > limit:
        return found, f"at most {limit:.4g}, since the run began with {start:.4g}"
    around = max(map(level, past[max(0, health.best_end - window) : health.best_end]))
    limit = health.best + max(
        0.5, 0.5 * abs(health.best), 0.5 * (start - health.best), 2 * (around - health.best)
    )
    if now > limit:
        return found, f"at most {limit:.4g}, since the best ten steps had {health.best:.4g}"
    return None


def best_step(past: Sequence[Update]) -> int:
    """Return the version of a run's best weights.

    Of the ten consecutive steps (fewer at the start) with the lowest median loss, it is the one
    with the lowest loss. So neither a single lucky batch wins, nor a step after a jump at the end
    of these ten, nor the weights of a destroyed model.
    """
    levels = _levels_while(past, MOST_MOVED)
    if not levels:
        return 0
    medians = [median(levels[max(0, step + 1 - BLOCK) : step + 1]) for step in range(len(levels))]
    end = medians.index(min(medians)) + 1
    start = max(0, end - BLOCK)
    return levels.index(min(levels[start:end]), start)


def _levels_while(past: Sequence[Update], most_moved: float) -> list[float]:
    """Return the levels of the first steps, at least one, until the weights have moved further than
    ``most_moved``.
    """
    levels: list[float] = []
    squares = 0.0
    for update in past:
        if levels and squares > most_moved**2:
            break
        levels.append(level(update))
        squares += squared_move(update)
    return levels


@dataclass(frozen=True, kw_only=True)
class GuardPolicy:
    """The limits of a guard.

    The defaults are chosen so that the guard never acts on a run that learns.

    Args:
        window: Number of steps in the running median of losses.
        factor: Largest distance of a step from that median, as a multiple of the distance from the
            median to the highest recent loss.
        refusals: Number of skipped steps, of the last ten, that ends the run.

    Raises:
        OptionError: if a number is out of its range.
    """

    window: int = 50
    factor: float = 5.0
    refusals: int = 5

    def __post_init__(self) -> None:
        require_whole("guard.window", self.window, RECENT)
        require_number("guard.factor", self.factor, least=1)
        require_whole("guard.refusals", self.refusals, 1, RECENT)


@dataclass(frozen=True, kw_only=True)
class Guarded(EstimatorWrapper):
    """An estimator whose steps are compared with the run's past before they are applied.

    A step whose losses lie far outside their past range, or whose update is larger than the
    weights, is *not applied*, and a warning says so. Its record has the losses, but projected
    gradients of 0, no weight decay and no in-place perturbations, so that replaying it changes no
    weight. All other updates are the wrapped estimator's, bit for bit. The functions ``outlier``
    and ``drift`` say how far is too far.

    The run ends with a ``DivergenceError`` if too many of the last ten steps were not applied, or
    if the run has become permanently worse by the measure of ``drift``. The error names the best
    step so far, from which to branch.

    The guard depends only on the journal, so a resumed run has the same bits, and ends with the
    same error.

    Args:
        estimator: The wrapped estimator.
        policy: The limits.
    """

    policy: GuardPolicy = field(default_factory=GuardPolicy)
    # A cache of the last summary, which follows from ``past``, so that a step does not start from
    # the first update again.
    _cached: list[RunHealth] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the wrapped estimator, and the limits."""
        policy = self.policy
        limits = {
            "window": policy.window,
            "factor": float(policy.factor),
            "refusals": policy.refusals,
        }
        return {**self.estimator.options, "guard": limits}

    def changed(self, update: Update, past: Sequence[Update]) -> Update:
        """Leave the update as it is, or make it one that changes no weight.

        Raises:
            DivergenceError: if the run has diverged.
        """
        step, policy = update.step, self.policy
        drifted = drift(self._health(past), past, window=policy.window)
        if drifted is not None:
            raise _diverged(step, past, *drifted)
        moves = math.sqrt(squared_move(update))
        reason = outlier(update, past, window=policy.window, factor=policy.factor)
        if reason is None and not moves > MOST_MOVED:
            return update
        reason = (
            reason
            or f"an update that moves each weight by {moves:.2g}, and most weights are below 1"
        )
        refused = 1 + sum(is_refused(earlier) for earlier in past[1 - RECENT :])
        if refused >= policy.refusals:
            found = (
                f"{refused} of the last {min(step + 1, RECENT)} steps cannot be applied ({reason})"
            )
            raise _diverged(step, past, found, f"fewer than {policy.refusals}")
        warnings.warn(f"step {step} is not applied: {reason}", ZO2Warning, stacklevel=2)
        unchanged = (0.0,) * len(update.projected_grads)
        return replace(update, projected_grads=unchanged, weight_decay=0.0, perturb_in_place=False)

    def _health(self, past: Sequence[Update]) -> RunHealth:
        health = (self._cached.pop() if self._cached else RunHealth()).extended(past)
        self._cached.append(health)
        return health


def _diverged(step: int, past: Sequence[Update], found: str, expected: str) -> DivergenceError:
    best = best_step(past)
    return DivergenceError(
        f"step {step}",
        found=found,
        expected=expected,
        remedy=(
            f"branch the journal at step {best}, the best so far, and continue with a lower `lr`; "
            "the step was not taken"
        ),
        best_step=best,
    )


class EstimatorClasses(NamedTuple):
    """The classes of one name: an estimator along several directions, and its special cases.

    All have the fields ``lr``, ``zo_eps`` and ``weight_decay``; some have ``perturb_in_place``.
    """

    multi_query: type[MultiQueryRGE] | type[FZOO]  # q directions, all on one batch
    # one direction; None: ``multi_query`` with q = 1, if it allows that
    single_query: type[MeZOSGD] | None = None
    # q directions, each on its own rows; None: not supported
    per_row: type[PerRowRGE] | None = None


ESTIMATORS: Mapping[EstimatorName, EstimatorClasses] = {
    EstimatorName.MEZO: EstimatorClasses(
        multi_query=MultiQueryRGE, single_query=MeZOSGD, per_row=PerRowRGE
    ),
    EstimatorName.FZOO: EstimatorClasses(multi_query=FZOO),
    EstimatorName.ES: EstimatorClasses(multi_query=EvolutionStrategies),
}
