"""MeZO-SGD: two evaluations along one direction (MeZO, arXiv 2305.17333, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from zo2core.estimators.inputs import describe_lr, require_positive, require_weight_decay
from zo2core.types import Distribution, Evaluation, Update


@dataclass(frozen=True, kw_only=True)
class MeZOSGD:
    """The two-point estimator ``g = (l(theta + eps z) - l(theta - eps z)) / (2 eps)`` with plain SGD.

    Args:
        lr: Learning rate, or a function from the 0-based step to it.
        zo_eps: Perturbation scale.
        weight_decay: MeZO adds ``weight_decay * theta`` to the gradient estimate of the parameters that decay.
        perturb_in_place: True is MeZO's arithmetic bit for bit: the weights walk +eps, -2 eps, +eps and keep the rounding
            of the walk. False starts each evaluation from the weights, so that probing leaves no rounding behind. None is
            True where directions are in the weights, and False beside the activations, where no weight changes.

    Raises:
        OptionError: if a number is not finite or has the wrong sign.
    """

    name: ClassVar[str] = "mezo-sgd"
    distribution: ClassVar[Distribution | None] = None  # directions of any distribution will do
    least_queries: ClassVar[int] = 1

    lr: float | Callable[[int], float]
    zo_eps: float
    weight_decay: float = 0.0
    perturb_in_place: bool | None = None

    def __post_init__(self) -> None:
        if not callable(self.lr):
            require_positive("lr", self.lr)
        require_positive("zo_eps", self.zo_eps)
        require_weight_decay(self.weight_decay)

    @staticmethod
    def forwards(queries: int) -> int:
        """Evaluations of a step along ``queries`` directions: both sides of each."""
        return 2 * queries

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and numbers. A schedule is known by its ``repr`` if it is a dataclass; other functions are not told apart."""
        return {
            "name": self.name,
            "lr": describe_lr(self.lr),
            "zo_eps": self.zo_eps,
            "weight_decay": self.weight_decay,
            "perturb_in_place": self.perturb_in_place is not False,
        }

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """One direction, both sides."""
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
        """The projected gradient and its update; the difference is taken in the losses' own dtype, as MeZO does."""
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
