"""A direction for each row of a batch, or for each group of rows, without further forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from zo2core.estimators.rge import MultiQueryRGE
from zo2core.types import Evaluation, RowGroup, Update


@dataclass(frozen=True, kw_only=True)
class PerRowRGE(MultiQueryRGE):
    """``MultiQueryRGE`` that divides the rows of a batch among its directions: each is evaluated on B / q of the B rows.

    A step runs 2 B rows for any q; P-RGE (arXiv 2409.15520) keeps E = q B constant in the same way. With q = B each row has
    its own direction. The projected gradient of a direction is that of the mean loss over its rows' labelled tokens, and
    each direction is applied with ``lr / q``. With low-rank perturbations all rows run as one batch; with dense ones each
    direction is a separate forward.

    Args:
        lr, zo_eps, weight_decay, perturb_in_place: As for ``MultiQueryRGE``.
        q: Number of directions; the number of rows must be a multiple of it.
    """

    name: ClassVar[str] = "per-row-rge"

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List both sides of each direction, for the direction's group of rows."""
        sides = super().evaluations(step, rng)
        return tuple(side._replace(rows=RowGroup(index // 2, self.q)) for index, side in enumerate(sides))

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """Compute the update as ``MultiQueryRGE`` does; its record does not name the rows."""
        return super().update(step, [evaluation._replace(rows=None) for evaluation in evaluations], losses, lr, past)
