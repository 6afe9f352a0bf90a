"""FZOO: one-sided evaluations, scaled by the spread of their losses."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from zo2core.estimators.two_point import QueryEstimator, distinct
from zo2core.types import Distribution, Evaluation

# Note: Text and code. The paper's text, as far as a summary of its equations shows, also divides by
# zo_eps, as a gradient estimate does, and computes the standard deviation with q - 1. Its authors'
# program (github.com/DKmiyan/FZOO, trainer.py) does not divide by zo_eps, and uses q. This file
# follows the program, since the published learning rates (5e-5 at zo_eps 1e-4, q = 8) are the
# program's. The two differ by a constant: the text's learning rate is this one's times zo_eps *
# sqrt(q / (q - 1)). The program perturbs the weights in place, which leaves rounding in them; here
# each evaluation starts from the unperturbed weights. The program computes losses and deviation in
# float32; here they are doubles, and the deviation is rounded once.


@dataclass(frozen=True, kw_only=True)
class FZOO(QueryEstimator):
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
