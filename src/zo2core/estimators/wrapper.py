"""The base class of estimators that wrap another one and change its updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zo2core.protocols import ZOEstimator
from zo2core.types import Distribution, Evaluation, Update


@dataclass(frozen=True, kw_only=True)
class EstimatorWrapper:
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

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """See the wrapped estimator."""
        return self.estimator.update(step, evaluations, losses, lr, past)


def with_perturb_in_place(estimator: ZOEstimator, *, default: bool) -> ZOEstimator:
    """Return an estimator whose ``perturb_in_place`` is not None.

    Args:
        estimator: The estimator. If its ``perturb_in_place`` is None, it is a dataclass with this field, or wraps one.
        default: Replaces None.
    """
    if estimator.perturb_in_place is not None:
        return estimator
    if isinstance(estimator, EstimatorWrapper):
        return replace(estimator, estimator=with_perturb_in_place(estimator.estimator, default=default))
    copy: ZOEstimator = replace(estimator, perturb_in_place=default)  # type: ignore[type-var]
    return copy
