"""Zeroth-order steps with low-rank perturbations over a whole model: a literal loop that engines are held against."""

import math
import random
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from zo2adapters.models.low_rank import LowRankModules
from zo2core import Distribution
from zo2core import perturbation as factor_store
from zo2core.kernels import fill
from zo2core.perturbation import Factors, PerturbedParameter

EPS, LR = 1e-2, 1e-2


def formed(base: torch.Tensor, own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """``base + own shared^T``: products added one after the other in float32, the base to their sum, rounded once."""
    sums = torch.zeros(base.shape, device=base.device)
    for factors, numbers in zip(own.unbind(dim=1), shared.float().unbind(dim=1), strict=True):
        sums = sums + factors[:, None] * numbers
    return (base.float() + sums).to(base.dtype)


class StackedLoop:
    """The loop over a whole model: plain sums of factors, and all evaluations of a step as one batch of the model's own."""

    def __init__(
        self, whole: PreTrainedModel, rank: int, period: int, distribution: Distribution, run_seed: int = 0
    ) -> None:
        self.whole, self.rank, self.period = whole, rank, period
        self.distribution, self.run_seed = distribution, run_seed
        self.base = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
        self.index = {name: index for index, name in enumerate(self.base)}
        self.updates: list[tuple[int, float, float]] = []  # seed, projected_grad and lr of each probe
        self.ends: list[int] = []  # of each step, in updates
        self.modules = LowRankModules(dict(whole.named_modules()))

    def draw(self, name: str, seed: int, *shape: int) -> torch.Tensor:
        drawn = torch.empty(math.prod(shape), device=self.base[name].device)
        fill(drawn, self.distribution, seed, self.index[name])
        return drawn.view(shape)

    def shared(self, name: str, period: int) -> torch.Tensor:
        seed = 2**62 + random.Random(f"{self.run_seed}/period/{period}").randrange(2**62)
        drawn: torch.Tensor = self.draw(name, seed, self.base[name].shape[1], self.rank) / self.rank**0.5
        return drawn.to(self.base[name].dtype)

    def factors(self, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A and V of each period so far, the present one's last."""
        rows = self.base[name].shape[0]
        sums = [
            torch.zeros(rows, self.rank, device=self.base[name].device) for _ in range(len(self.ends) // self.period + 1)
        ]
        set_batch_shape = 0
        for step, end in enumerate(self.ends):
            for seed, grad, lr in self.updates[set_batch_shape:end]:
                sums[step // self.period] -= self.draw(name, seed, rows, self.rank) * grad * lr
            set_batch_shape = end
        return [(own, self.shared(name, period)) for period, own in enumerate(sums)]

    def vector(self, name: str) -> torch.Tensor:
        values = self.base[name].float()
        for seed, grad, lr in self.updates:
            values = values - self.draw(name, seed, len(values)) * grad * lr
        return values

    def moved(self, name: str, evaluations: list[tuple[int, float]]) -> PerturbedParameter:
        theta = self.base[name]
        if theta.dim() == 1:
            vector = self.vector(name)
            return torch.stack(
                [vector + shift * self.draw(name, seed, len(vector)) * EPS for seed, shift in evaluations]
            ).to(theta.dtype)
        *past, (now, shared) = self.factors(name)
        if sum(sums.shape[1] for sums, _ in past) > factor_store.BESIDE_UP_TO * theta.shape[1]:  # formed, and rounded once
            sums, others = (torch.cat(parts, dim=1) for parts in zip(*past, strict=True))
            self.whole.get_parameter(name).data = formed(theta, sums, others)
            past = []
        own = [now + shift * self.draw(name, seed, *now.shape) * EPS for seed, shift in evaluations]
        columns = [torch.cat([*(sums for sums, _ in past), streams], dim=1) for streams in own]
        return Factors(torch.stack(columns).to(theta.dtype), torch.cat([*(v for _, v in past), shared], dim=1))

    @torch.inference_mode()
    def losses(self, batch: Mapping[str, torch.Tensor], evaluations: list[tuple[int, float]]) -> list[torch.Tensor]:
        moved = {name: self.moved(name, evaluations) for name in self.base}
        every = {alias for alias, _ in self.whole.named_parameters(remove_duplicate=False)}
        aliases = every - {name for name, _ in self.whole.named_parameters()}
        for alias in aliases:  # the head is the embedding
            moved[alias] = next(moved[name] for name in moved if "embed_tokens" in name)
        rows, self.modules.tokens = batch["labels"].shape
        self.modules.rows = len(evaluations) * rows
        self.modules.perturb(moved, len(evaluations))
        stacked = {key: torch.cat([value] * len(evaluations)) for key, value in batch.items() if key != "labels"}
        logits = self.whole(**stacked, use_cache=False).logits.split(len(batch["labels"]))
        vocab = self.whole.config.vocab_size
        return [self.whole.loss_function(own, batch["labels"], vocab_size=vocab) for own in logits]

    def step(self, batch: Mapping[str, torch.Tensor], *seeds: int) -> list[float]:
        losses = self.losses(batch, [(seed, shift) for seed in seeds for shift in (1.0, -1.0)])
        grads = [((plus - minus) / (2 * EPS)).item() for plus, minus in zip(losses[::2], losses[1::2], strict=True)]
        self.updates += [(seed, grad, LR / len(seeds)) for seed, grad in zip(seeds, grads, strict=True)]
        self.ends.append(len(self.updates))
        return [loss.item() for loss in losses]

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters at the present version, dense."""
        made = {}
        for name, theta in self.base.items():
            if theta.dim() == 1:
                made[name] = self.vector(name).to(theta.dtype)
            else:
                own, shared = (torch.cat(parts, dim=1) for parts in zip(*self.factors(name), strict=True))
                made[name] = formed(theta, own, shared)
        return made
