"""First-order loops over a whole Hugging Face model with all parameters in memory, written out: the oracles."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

Values = Mapping[str, torch.Tensor]


class WholeModel:
    """A whole model and its gradients."""

    def __init__(
        self, source: Path | PreTrainedModel, stored: torch.dtype | None = None, autocast: torch.dtype | None = None
    ) -> None:
        if isinstance(source, Path):
            source = cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(source, dtype=stored or "auto"))
            for parameter in source.parameters():
                parameter.data = parameter.data.clone()  # what is mapped from a file may lie unaligned, and round otherwise
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


def torch_loop(whole: WholeModel, make: Any, clip_value: float | None, clip_norm: float | None) -> Callable[..., None]:
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
def scaled(whole: WholeModel, clip_value: float | None, clip_norm: float | None) -> dict[str, torch.Tensor]:
    """LOMO's treatment of gradients: float32; clipped by value; multiplied by what their norm before allows."""
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
    """AdaLomo's update of each parameter, with its program's defaults but for the scaling of the loss by 1024."""
    moments: dict[str, list[torch.Tensor]] = {}
    steps = [0]

    @torch.no_grad()
    def step(lr: float) -> None:
        steps[0] += 1
        beta = 1.0 - math.pow(steps[0], -0.8)
        for name, gradient in scaled(whole, clip_value, clip_norm).items():
            squares = gradient**2 + 1e-30
            sides = [squares] if gradient.dim() == 1 else [squares.mean(dim=-1), squares.mean(dim=-2)]
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
            rate = lr * max(1e-3, torch.norm(theta, 2.0) / math.sqrt(theta.numel()))  # a tensor, whose products round
            if weight_decay > 0.0:
                theta.mul_(1.0 - rate * weight_decay)
            theta.add_(update, alpha=-rate)
            whole.parameters[name].data.copy_(theta)

    return step


class BlockCoordinateLoop:
    """BAdam's loop: torch's optimizer on one block's parameters, in float32, and no gradient for the others."""

    def __init__(
        self,
        whole: WholeModel,
        make: Any,
        turns: Sequence[Sequence[str]],
        every: int,
        clip_value: float | None,
        clip_norm: float | None,
    ) -> None:
        self._whole = whole
        self._make = make
        self._turns = turns
        self._every = every
        self._clips = clip_value, clip_norm
        self._steps = 0

    def begin(self) -> None:
        """Begin a step: now and then with another block."""
        if self._steps % self._every == 0:
            names = self._turns[self._steps // self._every]
            for name, parameter in self._whole.parameters.items():
                parameter.requires_grad = name in names
            self._copies = {name: self._whole.parameters[name].detach().clone().float() for name in names}
            for copy in self._copies.values():
                copy.requires_grad = True
            self._optimizer = self._make(list(self._copies.values()))
        self._steps += 1

    def __call__(self, lr: float) -> None:
        """Take the step, with the gradients that are there."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        gradients = scaled(self._whole, *self._clips)
        for name, copy in self._copies.items():
            copy.grad = gradients.get(name)
        self._optimizer.step()
        with torch.no_grad():
            for name, copy in self._copies.items():
                self._whole.parameters[name].copy_(copy)
