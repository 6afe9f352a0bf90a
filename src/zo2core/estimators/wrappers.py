"""Estimators that wrap another one, and change its updates or its options."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from zo2core.errors import OptionError
from zo2core.protocols import ZOEstimator
from zo2core.ranges import require_number
from zo2core.types import Distribution, Evaluation, Update


@dataclass(frozen=True, kw_only=True)
class EstimatorWrapper(ABC):
    """An estimator with the evaluations and updates of another one."""

    estimator: ZOEstimator

    @property
    def lr(self) -> float | Callable[[int], float]:
        """Learning rate of the wrapped estimator."""
        return self.estimator.lr

    @property
    def zo_eps(self) -> float:
        """Perturbation scale of the wrapped estimator."""
        return self.estimator.zo_eps

    @property
    def perturb_in_place(self) -> bool | None:
        """Whether the wrapped estimator perturbs weights in place."""
        return self.estimator.perturb_in_place

    @property
    def distribution(self) -> Distribution | None:
        """Distribution that the wrapped estimator's directions must have."""
        return self.estimator.distribution

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the wrapped estimator."""
        return self.estimator.options

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List the evaluations of the wrapped estimator."""
        return self.estimator.evaluations(step, rng)

    @abstractmethod
    def adjust(self, update: Update, past: Sequence[Update]) -> Update:
        """Adjust the wrapped estimator's update of a step, given the run's updates before it."""

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """Compute the update of the wrapped estimator, and adjust it."""
        return self.adjust(self.estimator.update(step, evaluations, losses, lr, past), past[:step])


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

    def adjust(self, update: Update, past: Sequence[Update]) -> Update:
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
