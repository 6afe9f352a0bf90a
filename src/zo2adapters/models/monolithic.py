"""Monolithic MeZO over a whole model: the reference loop with which the engine is compared, bit for
bit.

This is MeZO's trainer (arXiv 2305.17333, Algorithm 1) written down plainly: four passes over all
parameters a step, each of which seeds the generator and draws every z again. It shares no code with
the engine. Unlike the authors' program it uses a local generator in place of the global one, with
the same numbers.

With several seeds a step it is MeZO with several queries (P-RGE, arXiv 2409.15520, Algorithm 2):
all probes in order, each perturbed and restored, then one update for each in the same order with
``lr / q``, each with weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


class MonolithicStep(NamedTuple):
    """The result of one step."""

    losses: tuple[float, ...]  # at +eps and at -eps, for each seed in order
    projected_grads: tuple[float, ...]  # one a seed


@dataclass(eq=False, repr=False)
class MonolithicMeZO:
    """MeZO with every parameter in memory.

    Args:
        model: Module that takes a batch's entries and returns an object with a 0-d ``loss``. Its
            weights change in place. Models of transformers run without a cache of keys and values,
            which some forwards round.
        lr: Learning rate of a step.
        zo_eps: Perturbation scale.
        weight_decay: Weight decay of the parameters whose names contain none of ``bias``,
            ``layer_norm``, ``layernorm``.
        perturb_in_place: True is MeZO. False starts each evaluation from a copy of the weights.
        draw: Writes noise other than MeZO's into z, given z, a seed and the parameter's index in
            registration order.
        autocast: The dtype of ``torch.autocast`` in the forwards; None disables it.
    """

    model: nn.Module
    _: KW_ONLY
    lr: float
    zo_eps: float
    weight_decay: float = 0.0
    perturb_in_place: bool = True
    draw: Callable[[torch.Tensor, int, int], None] | None = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.model.eval()
        self._indices = [
            index for index, p in enumerate(self.model.parameters()) if p.requires_grad
        ]
        self._trainable = [
            (name, p) for name, p in self.model.named_parameters() if p.requires_grad
        ]

    @torch.inference_mode()
    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss at the present weights, 0-d."""
        device = self._trainable[0][1].device
        autocast = torch.autocast(
            device.type, dtype=self.autocast, enabled=self.autocast is not None
        )
        with autocast, _without_cache(self.model):
            loss = self.model(**batch).loss
        assert isinstance(loss, torch.Tensor)
        return loss

    def step(self, batch: Mapping[str, torch.Tensor], *seeds: int) -> MonolithicStep:
        """Take one step along the directions of one or several seeds."""
        losses: list[float] = []
        projected_grads: list[float] = []
        for seed in seeds:
            plus, minus = self._probe(batch, seed)
            losses += [plus.item(), minus.item()]
            projected_grads.append(((plus - minus) / (2 * self.zo_eps)).item())
        for seed, projected_grad in zip(seeds, projected_grads, strict=True):
            self._update(seed, projected_grad, self.lr / len(seeds))
        return MonolithicStep(tuple(losses), tuple(projected_grads))

    def _probe(
        self, batch: Mapping[str, torch.Tensor], seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        saved = [] if self.perturb_in_place else [p.data.clone() for _, p in self._trainable]
        losses = []
        for k in (1, -2 if self.perturb_in_place else -1):
            self._perturb(seed, k)
            losses.append(self.loss(batch))
            if not self.perturb_in_place:
                self._restore(saved)
        if self.perturb_in_place:
            self._perturb(seed, 1)
        plus, minus = losses
        return plus, minus

    def _perturb(self, seed: int, k: int) -> None:
        for (_, p), z in zip(self._trainable, self._noise(seed), strict=True):
            p.data = p.data + k * z * self.zo_eps

    def _update(self, seed: int, g: float, lr: float) -> None:
        for (name, p), z in zip(self._trainable, self._noise(seed), strict=True):
            if "bias" not in name and "layer_norm" not in name and "layernorm" not in name:
                p.data = p.data - lr * (g * z + self.weight_decay * p.data)
            else:
                p.data = p.data - lr * (g * z)

    def _noise(self, seed: int) -> Iterator[torch.Tensor]:
        if self.draw is not None:
            for index, (_, p) in zip(self._indices, self._trainable, strict=True):
                z = torch.empty_like(p.data, memory_format=torch.contiguous_format)
                self.draw(z.view(-1), seed, index)
                yield z
            return
        generator = torch.Generator(self._trainable[0][1].device)
        generator.manual_seed(seed)
        for _, p in self._trainable:
            yield torch.normal(
                0.0, 1.0, p.size(), dtype=p.dtype, device=p.device, generator=generator
            )

    def _restore(self, saved: list[torch.Tensor]) -> None:
        for (_, p), weights in zip(self._trainable, saved, strict=True):
            p.data = weights.clone()


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """A context with ``use_cache`` off in the config of a model of transformers."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):  # the text part of a model of text and images
        config = config.get_text_config()
    if not hasattr(config, "use_cache"):
        yield
        return
    saved, config.use_cache = config.use_cache, False
    try:
        yield
    finally:
        config.use_cache = saved
