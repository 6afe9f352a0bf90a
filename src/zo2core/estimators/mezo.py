"""MeZO-SGD: two evaluations along one direction (MeZO, arXiv 2305.17333, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from zo2core.estimators.inputs import describe_lr
from zo2core.ranges import require_number
from zo2core.types import Distribution, Evaluation, Update


@dataclass(frozen=True, kw_only=True)
class MeZOSGD:
    """The two-point estimator ``g = (l(theta + eps z) - l(theta - eps z)) / (2 eps)`` with plain SGD.

    Args:
        lr: Learning rate, or a function from the 0-based step to it.
        zo_eps: Perturbation scale.
        weight_decay: Weight decay; MeZO adds ``weight_decay * theta`` to the gradient estimate of parameters that decay.
        perturb_in_place: True is MeZO's arithmetic bit for bit: +eps, -2 eps and +eps are added to the weights, which keep
            the rounding. False starts each evaluation from the unperturbed weights, so that evaluations leave no rounding.
            None is True for dense perturbations, and False for low-rank ones, which change no weight.

    Raises:
        OptionError: if a number is not finite or has the wrong sign.
    """

    name: ClassVar[str] = "mezo-sgd"
    distribution: ClassVar[Distribution | None] = None  # directions may have any distribution
    least_queries: ClassVar[int] = 1
    is_two_sided: ClassVar[bool] = True  # losses come in pairs, of both sides of a direction

    lr: float | Callable[[int], float]
    zo_eps: float
    weight_decay: float = 0.0
    perturb_in_place: bool | None = None

    def __post_init__(self) -> None:
        if not callable(self.lr):
            require_number("lr", self.lr, above=0)
        require_number("zo_eps", self.zo_eps, above=0)
        require_number("weight_decay", self.weight_decay, least=0)

    @staticmethod
    def forwards(queries: int) -> int:
        """Number of evaluations along ``queries`` directions: both sides of each."""
        return 2 * queries

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and numbers. A schedule is described by its ``repr`` if it is a dataclass, else as "a function"."""
        return {
            "name": self.name,
            "lr": describe_lr(self.lr),
            "zo_eps": self.zo_eps,
            "weight_decay": self.weight_decay,
            "perturb_in_place": self.perturb_in_place is not False,
        }

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List both sides of one direction."""
        seed = next(rng)
        return (Evaluation(seed, 1.0), Evaluation(seed, -1.0))

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """Compute the update. The losses are subtracted in their own dtype, as in MeZO."""
        plus, minus = losses
        projected_grad = float(((plus - minus) / (2 * self.zo_eps)).item())
        return Update(
            step=step,
            evaluations=tuple(evaluations),
            seeds=(evaluations[0].seed,),
            projected_grads=(projected_grad,),
            lr=lr,
            zo_eps=self.zo_eps,
            weight_decay=self.weight_decay,
            perturb_in_place=self.perturb_in_place is not False,
            losses=(float(plus.item()), float(minus.item())),
        )
