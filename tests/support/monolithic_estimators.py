"""Other estimators than MeZO's over a whole model: literal loops that the engine is held against, bit for bit.

As ``MonolithicMeZO``, whose passes over all parameters they use, they share no code with the engine, and keep their state
from step to step as their papers have it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zo2adapters.models.monolithic import MonolithicMeZO, MonolithicStep


class MonolithicFZOO(MonolithicMeZO):
    """FZOO (arXiv 2506.09034) as its authors' program takes a step, but for the walk back, which it makes by rounding.

    Args:
        model: As for ``MonolithicMeZO``, which takes the other options, too.
    """

    def step(self, batch: Mapping[str, torch.Tensor], *seeds: int) -> MonolithicStep:
        """Evaluate the weights as they are, then one side of each direction; update along all of them."""
        unperturbed = self.loss(batch).item()
        perturbed = []
        for seed in seeds:
            saved = [p.data.clone() for _, p in self._trainable]
            self._perturb(seed, 1)
            perturbed.append(self.loss(batch).item())
            self._restore(saved)
        losses = (unperturbed, *perturbed)
        if not all(map(math.isfinite, losses)):
            return MonolithicStep(losses, (math.nan,) * len(seeds))
        std = statistics.pstdev(perturbed)
        projected_grads = tuple((loss - unperturbed) / std if std else 0.0 for loss in perturbed)
        for seed, projected_grad in zip(seeds, projected_grads, strict=True):
            self._update(seed, projected_grad, self.lr / len(seeds))
        return MonolithicStep(losses, projected_grads)


def monolithic(name: str, model: nn.Module, **options: Any) -> MonolithicMeZO:
    """The reference of an estimator by its name.

    Args:
        name: "mezo" or "fzoo".
        model: Changed in place.
        options: As ``MonolithicMeZO`` takes them.
    """
    kinds: dict[str, Callable[..., MonolithicMeZO]] = {"mezo": MonolithicMeZO, "fzoo": MonolithicFZOO}
    return kinds[name](model, **options)
