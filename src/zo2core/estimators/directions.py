"""The directions of a run: which estimator chooses them, how they perturb, and what draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zo2core.estimators.factors import FactorStore
from zo2core.estimators.noise import PhiloxNoise, choose_noise
from zo2core.estimators.perturbation import (
    DensePerturbation,
    LowRankPerturbation,
    Perturbation,
    choose_perturbation,
    require_perturbation,
)
from zo2core.estimators.two_point import require_distribution
from zo2core.estimators.wrappers import EstimatorWrapper
from zo2core.journal.journal import Journal
from zo2core.protocols import BlockModel, CounterNoise, NoiseGenerator, ZOEstimator
from zo2core.types import BlockLayout, Distribution


@dataclass(frozen=True, kw_only=True)
class Directions:
    """How the weights of evaluations differ from those of the run.

    A run without zeroth-order steps has them, too: nothing is drawn then.
    """

    # its ``perturb_in_place`` is not None; None for a run without zeroth-order steps
    estimator: ZOEstimator | None
    perturbation: Perturbation
    noise: NoiseGenerator
    factors: FactorStore | None  # of low-rank perturbations; None for dense ones
    zo_eps: float  # perturbation scale; any if nothing is perturbed
    # whether weights are perturbed in place from one evaluation to the next
    perturb_in_place: bool

    def with_noise_memory(
        self, name: str | None, layouts: Sequence[BlockLayout], device: torch.device, nbytes: int
    ) -> Directions:
        """The same directions, whose generators may be kept in so much memory."""
        if isinstance(self.noise, CounterNoise):
            return self
        return replace(self, noise=choose_noise(name, layouts, device, memory=nbytes))


def choose_directions(
    model: BlockModel,
    journal: Journal,
    device: torch.device,
    *,
    estimator: ZOEstimator | None,
    perturbation: Perturbation | None,
    noise: NoiseGenerator | None,
    seed: int,
) -> Directions:
    """Choose the directions of a run by its method and its journal, and refuse those that do not
    fit each other.

    Args:
        model: The model.
        journal: The journal of the run.
        device: The device that computes.
        estimator: That of ``ZerothOrder``, as its other fields below.
        perturbation: How weights are perturbed; None: as the journal says.
        noise: Draws z; None: as the journal says, or by what the estimator needs.
        seed: Seed of the run.
    """
    perturbation = choose_perturbation(perturbation, journal)
    is_dense = isinstance(perturbation, DensePerturbation)
    if estimator is not None:
        estimator = _with_perturb_in_place(estimator, default=is_dense)
    if noise is None:
        noise = _default_noise(model, journal, device, estimator, perturbation)
    require_perturbation(perturbation, model, estimator, noise)
    factors = None
    if isinstance(perturbation, LowRankPerturbation):
        assert isinstance(noise, CounterNoise), "other noise was refused"
        recorded = None if journal.header is None else journal.header.get("seed")
        if estimator is None and isinstance(recorded, int):
            seed = recorded
        factors = FactorStore(perturbation, noise.distribution, seed, device)
    if estimator is not None:
        require_distribution(estimator, noise)
    return Directions(
        estimator=estimator,
        perturbation=perturbation,
        noise=noise,
        factors=factors,
        zo_eps=1.0 if estimator is None else estimator.zo_eps,
        perturb_in_place=estimator is not None and bool(estimator.perturb_in_place),
    )


def _default_noise(
    model: BlockModel,
    journal: Journal,
    device: torch.device,
    estimator: ZOEstimator | None,
    perturbation: Perturbation,
) -> NoiseGenerator:
    """The noise that the journal names, or else the one that the estimator or the perturbation
    needs.
    """
    if journal.noise is None:
        if estimator is None or isinstance(perturbation, LowRankPerturbation):
            # also if nothing is drawn: it fits all other options
            return PhiloxNoise(Distribution.GAUSSIAN)
        if estimator.distribution is not None:
            return PhiloxNoise(estimator.distribution)
    return choose_noise(journal.noise, model.layouts, device)


def _with_perturb_in_place(estimator: ZOEstimator, *, default: bool) -> ZOEstimator:
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
            estimator, estimator=_with_perturb_in_place(estimator.estimator, default=default)
        )
    copy: ZOEstimator = replace(estimator, perturb_in_place=default)  # type: ignore[type-var]
    return copy
