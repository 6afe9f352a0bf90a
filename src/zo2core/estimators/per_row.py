"""A direction for each row of a batch, or for each group of rows: as many directions as that for no more forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from zo2core.estimators.rge import MultiQueryRGE
from zo2core.types import Evaluation, RowGroup, Update


@dataclass(frozen=True, kw_only=True)
class PerRowRGE(MultiQueryRGE):
    """``MultiQueryRGE`` whose q directions share out the rows of a batch: each is evaluated on its own B / q of the B rows.

    A step runs 2 B rows whatever q is, as P-RGE (arXiv 2409.15520) holds E = q B constant. With q = B each row has a
    direction of its own. The projected gradient of a direction is that of the mean loss over its rows' labelled tokens, and
    the update is ``lr / q`` along each in turn. Beside the activations all rows run as one batch; in the weights each
    direction is a pass over them.

    Args:
        lr: As in ``MultiQueryRGE``, and so all others.
        zo_eps: As there.
        weight_decay: As there.
        perturb_in_place: As there.
        q: Directions a step; the number of rows must be a multiple of it.
    """

    name: ClassVar[str] = "per-row-rge"

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """Both sides of each direction in turn, each pair for its group of the rows."""
        sides = super().evaluations(step, rng)
        return tuple(side._replace(rows=RowGroup(place // 2, self.q)) for place, side in enumerate(sides))

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """As of ``MultiQueryRGE``; the record says directions and losses, and not whose rows they were."""
        return super().update(step, [evaluation._replace(rows=None) for evaluation in evaluations], losses, lr, past)
