"""A step of P-RGE with LoRA-FA as one forward of a module for ``torch.export`` (arXiv 2409.15520, Algorithm 1).

Both evaluations of a step run as one batch: the first half at +eps, the second at -eps, so that weights are read once. A
layer computes ``x W^T + (x A^T) B^T`` with a separate B for each half; W and A are only read.

Note: Differences from Algorithm 1. There each layer keeps both perturbed copies of B, computes the last step's noise from
their difference, and applies that step's update before it draws new noise; its projected gradient is an input, which the
caller computes from the losses. Here the noise is drawn from a seed (``signs``), so there is one copy of B, without the
rounding of restoring it. The update is applied at the end of the same step, so the state after a step is final, and the
caller passes nothing back. Noise consists of signs instead of Gaussian numbers. In exact arithmetic and with the same noise,
losses and B are Algorithm 1's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - as everywhere

from zo2adapters.edge.signs import GROUP, Signs, groups_of
from zo2core import UnsupportedModelError

STREAMS = 2  # evaluations of a step: at +eps and at -eps
_LARGEST = torch.finfo(torch.float32).max


class DualForwardLinear(nn.Module):
    """A linear layer with a LoRA adapter whose B differs between the two halves of a batch.

    Args:
        base: The linear layer; it is only read.
        lora_a: A of the adapter, float32 (rank, inputs); frozen.
        scaling: Scaling of the adapter.
        path: Path of the layer in the model, for messages.
        batch: Number of rows of both halves, and of tokens of each row.
    """

    lora_A: torch.Tensor  # noqa: N815 - peft's name
    lora_B: torch.Tensor  # noqa: N815

    def __init__(self, base: nn.Linear, lora_a: torch.Tensor, scaling: float, *, path: str, batch: tuple[int, int]) -> None:
        super().__init__()
        self.base = base
        self.scaling = scaling
        self.path = path
        self.batch = batch
        self.register_buffer("lora_A", lora_a)
        # Float32 (2, outputs, rank), for both halves; each step replaces it while it runs.
        self.register_buffer("lora_B", torch.zeros(STREAMS, base.out_features, len(lora_a)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute both halves.

        Args:
            x: (2 * rows, tokens, inputs), with the half at +eps first, or (2 * rows * tokens, inputs).

        Returns:
            (2 * rows, tokens, outputs) or (2 * rows * tokens, outputs), in the base's dtype.

        Raises:
            UnsupportedModelError: if the model passes another shape, in which the halves are unknown.
        """
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
        change = torch.bmm(halves, self.lora_B.transpose(1, 2)).reshape(*x.shape[:-1], -1)
        output: torch.Tensor = self.base(x)
        return (output + change * self.scaling).to(output.dtype)


class AdapterState(nn.Module):
    """The state that steps change: B of all layers, and the seed of the next step.

    Args:
        values: Initial B of each layer, float32 (outputs, rank).
        seed: Seed of the first step.
    """

    adapter: torch.Tensor
    seed: torch.Tensor

    def __init__(self, values: Sequence[torch.Tensor], seed: int) -> None:
        super().__init__()
        flat = [F.pad(value.flatten(), (0, groups_of(value.numel()) * GROUP - value.numel())) for value in values]
        # Float32, one layer after another; each starts at a whole group, as its noise does. The padding is not read.
        self.register_buffer("adapter", torch.cat(flat))
        self.register_buffer("seed", torch.tensor(seed, dtype=torch.int64))


class TrainingStep(nn.Module):
    """One step of zeroth-order LoRA-FA: two losses from one forward, and their update.

    Args:
        model: Hugging Face model, with a ``DualForwardLinear`` for each layer of the adapter.
        names: Names of these layers in the model.
        indices: Index of each layer's B among the model's parameters, on which its noise depends.
        state: State of these layers, in this order; changed by each step.
        zo_eps: Perturbation scale.
    """

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
        """Take a step. B does not change if the projected gradient is not finite.

        Args:
            input_ids: int64 (rows, tokens), padded on the right.
            labels: int64 (rows, tokens), -100 for tokens without loss.
            lr: Learning rate, float32, 0-d.

        Returns:
            The losses at +eps and at -eps, (2,); the projected gradient, 0-d; the step's seed, int64, 0-d.
        """
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
        """Run the model with B perturbed by ``shifts``, one for each half."""
        perturbed: dict[str, torch.Tensor] = {}
        sizes = [groups_of(shape[1:].numel()) * GROUP for shape in self._shapes]
        parts = torch.split(self.state.adapter + shifts, sizes, dim=1)
        for name, shape, part in zip(self._names, self._shapes, parts, strict=True):
            perturbed[f"{name}.lora_B"] = part[:, : shape[1:].numel()].reshape(shape)
        arguments = {"input_ids": input_ids, "use_cache": False}
        logits: torch.Tensor = functional_call(self.model, perturbed, kwargs=arguments).logits
        return logits


class StateReader(nn.Module):
    """The method of a program that returns the state."""

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of B and of the seed."""
        return self.state.adapter.clone(), self.state.seed.clone()


class StateWriter(nn.Module):
    """The method of a program that sets the state."""

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self, adapter: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """Set B and the seed, and return the seed."""
        self.state.adapter.copy_(adapter)
        self.state.seed.copy_(seed)
        return seed.clone()
