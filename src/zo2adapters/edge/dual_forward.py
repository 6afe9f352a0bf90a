"""A step of P-RGE with LoRA-FA as one forward, in a module that ``torch.export`` takes (arXiv 2409.15520, Algorithm 1).

Both evaluations of a step run as one batch: its first half at +eps, its second at -eps, so that the weights are read once. A
layer computes ``x W^T + (x A^T) B^T`` with a B for each half; W and A are only read.

Note: Differences from Algorithm 1. There each layer keeps both perturbed copies of B, takes their difference as the noise of
the step before, and applies that step's update before it draws new noise; the projected gradient is an input that the caller
computes from the losses. Here the noise follows from a seed (``signs``). So B is kept once, is never restored with rounding
errors, and is updated at the end of the same step; the caller passes nothing back. Noise is random signs instead of
Gaussian. In exact arithmetic, and with the same noise, losses and B are those of Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - as everywhere

from zo2adapters.edge.signs import GROUP, Signs, groups_of
from zo2core.errors import UnsupportedModelError

STREAMS = 2  # evaluations of a step: at +eps and at -eps
_LARGEST = torch.finfo(torch.float32).max


class DualForwardLinear(nn.Module):
    """A linear layer with LoRA, whose B differs between the two halves of a batch."""

    lora_A: torch.Tensor  # noqa: N815 - peft's name
    lora_B: torch.Tensor  # noqa: N815

    def __init__(self, base: nn.Linear, lora_a: torch.Tensor, scaling: float, *, path: str, batch: tuple[int, int]) -> None:
        super().__init__()
        self.base = base
        self.scaling = scaling
        self.path = path
        self.batch = batch
        self.register_buffer("lora_A", lora_a)
        # Float32 (2, outputs, rank), for both halves. A step replaces it while it runs.
        self.register_buffer("lora_B", torch.zeros(STREAMS, base.out_features, len(lora_a)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute both halves."""
        rows, tokens = self.batch
        if x.shape[:-1] not in ((rows, tokens), (rows * tokens,)):
            raise UnsupportedModelError(
                self.path,
                found=f"a layer that is called with shape {tuple(x.shape)}",
                expected=f"a layer that is called with all {rows} rows of {tokens} tokens, in order",
                remedy="name other layers in the adapter's target_modules",
            )
        reduced = F.linear(x.to(self.lora_A.dtype), self.lora_A)
        halves = reduced.reshape(STREAMS, -1, reduced.shape[-1])
        adapter = torch.bmm(halves, self.lora_B.transpose(1, 2)).reshape(*x.shape[:-1], -1)
        computed: torch.Tensor = self.base(x)
        return (computed + adapter * self.scaling).to(computed.dtype)


class AdapterState(nn.Module):
    """The state that steps change: B of all layers, and the seed of the next step."""

    adapter: torch.Tensor
    seed: torch.Tensor

    def __init__(self, values: Sequence[torch.Tensor], seed: int) -> None:
        super().__init__()
        flat = [F.pad(value.flatten(), (0, groups_of(value.numel()) * GROUP - value.numel())) for value in values]
        # Float32, one layer after another. Each starts at a whole group, as its noise does; the padding is not read.
        self.register_buffer("adapter", torch.cat(flat))
        self.register_buffer("seed", torch.tensor(seed, dtype=torch.int64))


class TrainingStep(nn.Module):
    """One step of zeroth-order LoRA-FA: two losses from one forward, and the update."""

    def __init__(
        self, model: Any, names: Sequence[str], indices: Sequence[int], state: AdapterState, *, zo_eps: float
    ) -> None:
        super().__init__()
        self.model = model
        self.state = state
        self.zo_eps = zo_eps
        self._names = tuple(names)
        self._shapes = tuple(model.get_submodule(name).lora_B.shape for name in names)
        self.signs = Signs(indices, [shape[1:].numel() for shape in self._shapes])

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, lr: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take a step. If the projected gradient is not finite, B does not change."""
        state = self.state
        seed = state.seed.clone()
        z = self.signs(seed)
        shift = self.zo_eps * z
        logits = self._logits(input_ids.repeat(STREAMS, 1), torch.stack((shift, -shift)))
        options = {"vocab_size": self.model.config.get_text_config().vocab_size}
        plus, minus = (self.model.loss_function(half, labels, **options) for half in torch.chunk(logits, STREAMS))
        projected_grad = (plus - minus) / (2 * self.zo_eps)
        is_finite = projected_grad.abs() <= _LARGEST
        applied = torch.where(is_finite, projected_grad, torch.zeros_like(projected_grad))
        state.adapter.copy_(state.adapter - lr * (applied * z))
        state.seed.copy_(state.seed + 1)
        return torch.stack((plus, minus)), projected_grad, seed

    def _logits(self, input_ids: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Run the model with these shifts added to B in each half."""
        perturbed: dict[str, torch.Tensor] = {}
        sizes = [groups_of(shape[1:].numel()) * GROUP for shape in self._shapes]
        parts = torch.split(self.state.adapter + shifts, sizes, dim=1)
        for name, shape, part in zip(self._names, self._shapes, parts, strict=True):
            perturbed[f"{name}.lora_B"] = part[:, : shape[1:].numel()].reshape(shape)
        arguments = {"input_ids": input_ids, "use_cache": False}
        logits: torch.Tensor = functional_call(self.model, perturbed, kwargs=arguments).logits
        return logits


class StateReader(nn.Module):
    """A method of a program that returns the state."""

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of B and of the seed."""
        return self.state.adapter.clone(), self.state.seed.clone()


class StateWriter(nn.Module):
    """A method of a program that sets the state."""

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self, adapter: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """Set the state to that of a ``StateReader``, and return the seed."""
        self.state.adapter.copy_(adapter)
        self.state.seed.copy_(seed)
        return seed.clone()
