"""Evolution strategies: scores of losses instead of losses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from zo2core.estimators.two_point import MultiQueryRGE
from zo2core.ranges import Fitness


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
    mean = statistics.fmean(losses)
    deviation = statistics.pstdev(losses)
    return [(loss - mean) / deviation if deviation else 0.0 for loss in losses]


def _ranks(losses: Sequence[float]) -> list[float]:
    below = [sum(other < loss for other in losses) for loss in losses]
    equal = [sum(other == loss for other in losses) for loss in losses]
    return [
        (lower + (same - 1) / 2) / (len(losses) - 1) - 0.5
        for lower, same in zip(below, equal, strict=True)
    ]
