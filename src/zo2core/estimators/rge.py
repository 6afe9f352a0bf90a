"""Multi-query randomized gradient estimation: MeZO along q directions in each step (P-RGE, arXiv 2409.15520, equation 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from zo2core.estimators.inputs import distinct
from zo2core.estimators.mezo import MeZOSGD
from zo2core.ranges import require_whole
from zo2core.types import Evaluation, Update


@dataclass(frozen=True, kw_only=True)
class MultiQueryRGE(MeZOSGD):
    """The mean of q two-point estimates: ``g_i = (l(theta + eps z_i) - l(theta - eps z_i)) / (2 eps)``, i = 1, ..., q.

    All 2 q evaluations perturb the weights at the step's start, up to the rounding of in-place perturbations. Then q updates
    follow in the order of the directions, each with ``lr / q``. Each update applies its weight decay to the current weights:
    together ``lr * weight_decay``, to first order. With q = 1 this is ``MeZOSGD``, bit for bit.

    Args:
        lr: Learning rate of the whole step, or a function from the 0-based step to it.
        zo_eps: Perturbation scale.
        weight_decay: As for ``MeZOSGD``.
        perturb_in_place: As for ``MeZOSGD``; True adds +eps, -2 eps and +eps along one direction after the other.
        q: Number of directions.

    Raises:
        OptionError: if a number is out of its range.
    """

    name: ClassVar[str] = "multi-query-rge"

    q: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("q", self.q, self.least_queries)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of ``MeZOSGD``, and q."""
        return {**super().options, "q": self.q}

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List both sides of each direction."""
        return tuple(Evaluation(seed, shift) for seed in distinct(rng, self.q) for shift in (1.0, -1.0))

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """Compute one projected gradient for each direction, applied with ``lr / q``; q counts those with losses."""
        pairs = range(0, len(evaluations), 2)
        update_of_pair = super().update
        probes = [update_of_pair(step, evaluations[i : i + 2], losses[i : i + 2], lr, past) for i in pairs]
        return replace(
            probes[0],
            evaluations=tuple(evaluations),
            seeds=tuple(seed for probe in probes for seed in probe.seeds),
            projected_grads=tuple(grad for probe in probes for grad in probe.projected_grads),
            lr=lr / len(pairs),
            losses=tuple(loss for probe in probes for loss in probe.losses),
        )
