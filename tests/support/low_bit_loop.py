"""MeZO over a whole model whose blocks reach the device in fewer bits: a literal loop that engines are held against."""

import math
from collections.abc import Mapping

import torch

from zo2adapters.models.monolithic import MonolithicMeZO, MonolithicStep
from zo2core.kernels.low_bit import FP8


def through(theta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix, carried: as the papers of the formats say it, and not as the code does."""
    if dtype is not FP8:
        return theta.to(dtype).to(theta.dtype)
    largest = theta.abs().amax(dim=1).clamp(min=1e-40)
    scale = torch.tensor([[2.0 ** max(math.ceil(math.log2(row / 448)), -100)] for row in largest])
    scale = scale.to(theta.device)
    return (theta / scale).to(dtype).to(theta.dtype) * scale


class LowBitMeZO(MonolithicMeZO):
    """MeZO over the whole model, whose evaluations are made at the weights as a device is given them."""

    transfer_dtype: torch.dtype
    transfer_back = False  # whether what the device was given is what is kept

    def step(self, batch: Mapping[str, torch.Tensor], *seeds: int) -> MonolithicStep:
        if self.transfer_back:
            self._carry()
        made = super().step(batch, *seeds)
        if self.transfer_back:
            self._carry()
        return made

    def carried_loss(self, batch: Mapping[str, torch.Tensor]) -> float:
        saved = [p.data for _, p in self._trainable]
        self._carry()
        loss = self.loss(batch).item()
        self._restore(saved)
        return loss

    def _carry(self) -> None:
        for name, p in self._trainable:
            p.data = through(p.data, self.transfer_dtype) if "layers." in name and p.ndim == 2 else p.data.clone()

    def _probe(self, batch: Mapping[str, torch.Tensor], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        saved = [p.data for _, p in self._trainable]
        losses: list[torch.Tensor] = []
        for move, shift in ((1, 1), (-2, -1)):
            if not losses or not self.perturb_in_place:
                self._restore(saved)
                self._carry()
            self._perturb(seed, move if self.perturb_in_place else shift)
            losses.append(self.loss(batch))
        self._restore(saved)
        for move in (1, -2, 1) if self.perturb_in_place else ():
            self._perturb(seed, move)
        plus, minus = losses
        return plus, minus
