"""Training loops over a whole model in memory, written out: what engines are held against."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from zo2adapters.models.low_rank import LowRankModules
from zo2adapters.models.monolithic import MonolithicMeZO, MonolithicStep
from zo2core import Distribution
from zo2core.estimators import factors as factor_store
from zo2core.estimators.perturbation import Factors, PerturbedParameter
from zo2core.kernels import fill
from zo2core.kernels.low_bit import FP8

Values = Mapping[str, torch.Tensor]


class WholeModel:
    """A whole model and its gradients."""

    def __init__(
        self,
        source: Path | PreTrainedModel,
        stored: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if isinstance(source, Path):
            source = cast(
                "PreTrainedModel",
                AutoModelForCausalLM.from_pretrained(source, dtype=stored or "auto"),
            )
            for parameter in source.parameters():
                # what is mapped from a file may lie unaligned, and round otherwise
                parameter.data = parameter.data.clone()
        self.model = source
        self.parameters = dict(source.named_parameters())
        self._autocast = autocast

    def backward(self, micro_batches: Sequence[Values]) -> float:
        """Accumulate the gradients of the mean over all labelled tokens; returns it."""
        self.model.zero_grad()
        tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches]
        total = 0.0
        for batch, count in zip(micro_batches, tokens, strict=True):
            with torch.autocast("cpu", dtype=self._autocast, enabled=self._autocast is not None):
                loss = self.model(**batch, use_cache=False).loss
            total += loss.double().item() * count
            (loss if len(micro_batches) == 1 else loss * (count / sum(tokens))).backward()
        return total / sum(tokens)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by name, in registration order."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}


def torch_loop(
    whole: WholeModel, make: Any, clip_value: float | None, clip_norm: float | None
) -> Callable[..., None]:
    """The step of a torch optimizer over the whole model, and what is clipped before."""
    optimizer = make(list(whole.parameters.values()))

    def step(lr: float) -> None:
        trained = list(whole.parameters.values())
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(trained, clip_value)
        if clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, clip_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

    return step


@torch.no_grad()
def scaled(
    whole: WholeModel, clip_value: float | None, clip_norm: float | None
) -> dict[str, torch.Tensor]:
    """LOMO's treatment of gradients: float32; clipped by value; multiplied by what their norm
    before allows.
    """
    gradients = {name: gradient.to(torch.float32) for name, gradient in whole.gradients().items()}
    norms = torch.stack([torch.norm(gradient, 2.0) for gradient in gradients.values()])
    for gradient in gradients.values():
        if clip_value is not None:
            gradient.clamp_(min=-clip_value, max=clip_value)
        if clip_norm is not None:
            gradient.mul_(torch.clamp(clip_norm / (torch.norm(norms, 2.0) + 1e-6), max=1.0))
    return gradients


def lomo_loop(
    whole: WholeModel, weight_decay: float, clip_value: float | None, clip_norm: float | None
) -> Callable[..., None]:
    """LOMO's update of each parameter (OpenLMLab/LOMO's program)."""

    @torch.no_grad()
    def step(lr: float) -> None:
        for name, gradient in scaled(whole, clip_value, clip_norm).items():
            theta = whole.parameters[name].data.to(torch.float32)
            if weight_decay > 0.0:
                theta.mul_(1.0 - lr * weight_decay)
            theta.add_(gradient, alpha=-lr)
            whole.parameters[name].data.copy_(theta)

    return step


def adalomo_loop(
    whole: WholeModel, weight_decay: float, clip_value: float | None, clip_norm: float | None
) -> Callable[..., None]:
    """AdaLomo's update of each parameter, with its program's defaults but for the scaling of the
    loss by 1024.
    """
    moments: dict[str, list[torch.Tensor]] = {}
    steps = [0]

    @torch.no_grad()
    def step(lr: float) -> None:
        steps[0] += 1
        beta = 1.0 - math.pow(steps[0], -0.8)
        for name, gradient in scaled(whole, clip_value, clip_norm).items():
            squares = gradient**2 + 1e-30
            sides = (
                [squares] if gradient.dim() == 1 else [squares.mean(dim=-1), squares.mean(dim=-2)]
            )
            kept = moments.setdefault(name, [torch.zeros_like(side) for side in sides])
            for moment, side in zip(kept, sides, strict=True):
                moment.mul_(beta).add_(side, alpha=1.0 - beta)
            if gradient.dim() == 1:
                update = kept[0].rsqrt().mul_(gradient)
            else:
                rows = (kept[0] / kept[0].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
                update = torch.mul(rows, kept[1].unsqueeze(-2).rsqrt()).mul_(gradient)
            update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0))
            theta = whole.parameters[name].data.to(torch.float32)
            # a tensor, whose products round
            rate = lr * max(1e-3, torch.norm(theta, 2.0) / math.sqrt(theta.numel()))
            if weight_decay > 0.0:
                theta.mul_(1.0 - rate * weight_decay)
            theta.add_(update, alpha=-rate)
            whole.parameters[name].data.copy_(theta)

    return step


@dataclass
class BlockCoordinateLoop:
    """BAdam's loop: torch's optimizer on one block's parameters, in float32, and no gradient for
    the others.
    """

    whole: WholeModel
    make: Any
    turns: Sequence[Sequence[str]]
    every: int
    clip_value: float | None
    clip_norm: float | None
    steps: int = 0

    def begin(self) -> None:
        """Begin a step: now and then with another block."""
        if self.steps % self.every == 0:
            names = self.turns[self.steps // self.every]
            for name, parameter in self.whole.parameters.items():
                parameter.requires_grad = name in names
            self._copies = {
                name: self.whole.parameters[name].detach().clone().float() for name in names
            }
            for copy in self._copies.values():
                copy.requires_grad = True
            self._optimizer = self.make(list(self._copies.values()))
        self.steps += 1

    def __call__(self, lr: float) -> None:
        """Take the step, with the gradients that are there."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        gradients = scaled(self.whole, self.clip_value, self.clip_norm)
        for name, copy in self._copies.items():
            copy.grad = gradients.get(name)
        self._optimizer.step()
        with torch.no_grad():
            for name, copy in self._copies.items():
                self.whole.parameters[name].copy_(copy)


def through(theta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix, carried: as the papers of the formats say it, and not as the code does."""
    if dtype is not FP8:
        return theta.to(dtype).to(theta.dtype)
    largest = theta.abs().amax(dim=1).clamp(min=1e-40)
    scale = torch.tensor([[2.0 ** max(math.ceil(math.log2(row / 448)), -100)] for row in largest])
    scale = scale.to(theta.device)
    return (theta / scale).to(dtype).to(theta.dtype) * scale


class LowBitMeZO(MonolithicMeZO):
    """MeZO over the whole model, whose evaluations are made at the weights as a device is given
    them.
    """

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
            p.data = (
                through(p.data, self.transfer_dtype)
                if "layers." in name and p.ndim == 2
                else p.data.clone()
            )

    def _probe(
        self, batch: Mapping[str, torch.Tensor], seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
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


EPS, LR = 1e-2, 1e-2


def formed(base: torch.Tensor, own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """``base + own shared^T``: products added one after the other in float32, the base to their
    sum, rounded once.
    """
    sums = torch.zeros(base.shape, device=base.device)
    for factors, numbers in zip(own.unbind(dim=1), shared.float().unbind(dim=1), strict=True):
        sums = sums + factors[:, None] * numbers
    return (base.float() + sums).to(base.dtype)


class StackedLoop:
    """The loop over a whole model: plain sums of factors, and all evaluations of a step as one
    batch of the model's own.
    """

    def __init__(
        self,
        whole: PreTrainedModel,
        rank: int,
        period: int,
        distribution: Distribution,
        run_seed: int = 0,
    ) -> None:
        self.whole, self.rank, self.period = whole, rank, period
        self.distribution, self.run_seed = distribution, run_seed
        self.base = {
            name: parameter.detach().clone() for name, parameter in whole.named_parameters()
        }
        self.index = {name: index for index, name in enumerate(self.base)}
        # seed, projected_grad and lr of each probe
        self.updates: list[tuple[int, float, float]] = []
        self.ends: list[int] = []  # of each step, in updates
        self.modules = LowRankModules(dict(whole.named_modules()))

    def draw(self, name: str, seed: int, *shape: int) -> torch.Tensor:
        drawn = torch.empty(math.prod(shape), device=self.base[name].device)
        fill(drawn, self.distribution, seed, self.index[name])
        return drawn.view(shape)

    def shared(self, name: str, period: int) -> torch.Tensor:
        seed = 2**62 + random.Random(f"{self.run_seed}/period/{period}").randrange(2**62)
        drawn: torch.Tensor = (
            self.draw(name, seed, self.base[name].shape[1], self.rank) / self.rank**0.5
        )
        return drawn.to(self.base[name].dtype)

    def factors(self, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A and V of each period so far, the present one's last."""
        rows = self.base[name].shape[0]
        sums = [
            torch.zeros(rows, self.rank, device=self.base[name].device)
            for _ in range(len(self.ends) // self.period + 1)
        ]
        begin = 0
        for step, end in enumerate(self.ends):
            for seed, grad, lr in self.updates[begin:end]:
                sums[step // self.period] -= self.draw(name, seed, rows, self.rank) * grad * lr
            begin = end
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
                [
                    vector + shift * self.draw(name, seed, len(vector)) * EPS
                    for seed, shift in evaluations
                ]
            ).to(theta.dtype)
        *past, (now, shared) = self.factors(name)
        if sum(sums.shape[1] for sums, _ in past) > factor_store.BESIDE_UP_TO * theta.shape[1]:
            # formed, and rounded once
            sums, others = (torch.cat(parts, dim=1) for parts in zip(*past, strict=True))
            self.whole.get_parameter(name).data = formed(theta, sums, others)
            past = []
        own = [now + shift * self.draw(name, seed, *now.shape) * EPS for seed, shift in evaluations]
        columns = [torch.cat([*(sums for sums, _ in past), streams], dim=1) for streams in own]
        return Factors(
            torch.stack(columns).to(theta.dtype), torch.cat([*(v for _, v in past), shared], dim=1)
        )

    @torch.inference_mode()
    def losses(
        self, batch: Mapping[str, torch.Tensor], evaluations: list[tuple[int, float]]
    ) -> list[torch.Tensor]:
        moved = {name: self.moved(name, evaluations) for name in self.base}
        every = {alias for alias, _ in self.whole.named_parameters(remove_duplicate=False)}
        aliases = every - {name for name, _ in self.whole.named_parameters()}
        for alias in aliases:  # the head is the embedding
            moved[alias] = next(moved[name] for name in moved if "embed_tokens" in name)
        rows, self.modules.tokens = batch["labels"].shape
        self.modules.rows = len(evaluations) * rows
        self.modules.perturb(moved, len(evaluations))
        stacked = {
            key: torch.cat([value] * len(evaluations))
            for key, value in batch.items()
            if key != "labels"
        }
        logits = self.whole(**stacked, use_cache=False).logits.split(len(batch["labels"]))
        vocab = self.whole.config.vocab_size
        return [self.whole.loss_function(own, batch["labels"], vocab_size=vocab) for own in logits]

    def step(self, batch: Mapping[str, torch.Tensor], *seeds: int) -> list[float]:
        losses = self.losses(batch, [(seed, shift) for seed in seeds for shift in (1.0, -1.0)])
        grads = [
            ((plus - minus) / (2 * EPS)).item()
            for plus, minus in zip(losses[::2], losses[1::2], strict=True)
        ]
        self.updates += [
            (seed, grad, LR / len(seeds)) for seed, grad in zip(seeds, grads, strict=True)
        ]
        self.ends.append(len(self.updates))
        return [loss.item() for loss in losses]

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters at the present version, dense."""
        made = {}
        for name, theta in self.base.items():
            if theta.dim() == 1:
                made[name] = self.vector(name).to(theta.dtype)
            else:
                own, shared = (
                    torch.cat(parts, dim=1) for parts in zip(*self.factors(name), strict=True)
                )
                made[name] = formed(theta, own, shared)
        return made
