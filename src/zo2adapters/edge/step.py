"""A step of P-RGE with LoRA-FA as one forward, in a module that ``torch.export`` takes (arXiv 2409.15520, Algorithm 1).

Both evaluations of a step run as one batch: its first half at +eps, its second at -eps, so that the weights are read once. A
layer computes ``x W^T + (x A^T) B^T`` with a B for each half; W and A are only read.

Note: Differences from Algorithm 1. There each layer keeps both perturbed copies of B, takes their difference as the noise of
the step before, and applies that step's update before it draws new noise; the projected gradient is an input that the caller
computes from the losses. Here the noise follows from a seed (``Signs``). So B is kept once, is never restored with rounding
errors, and is updated at the end of the same step; the caller passes nothing back. Noise is random signs instead of
Gaussian. In exact arithmetic, and with the same noise, losses and B are those of Algorithm 1.

Note: Directions. They are random signs, computed from a seed inside the program. ExecuTorch's kernels have no generator
that can be seeded: ``rand`` and ``randn`` use the system's. So P-RGE adds an operator to the runtime. Counter-based noise
needs none. The numbers are those of ``PhiloxNoise(Distribution.RADEMACHER)``, bit for bit, so that an engine that replays a
program's losses gets the program's adapter.

Note: Operations. The runtime's portable kernels have neither shifts nor unsigned 64-bit integers. Words are int64 below
2**32, multipliers are split into halves of 16 bits so that no product reaches 2**63, and words are shifted by division. Two
words of a counter that need the same operations share a tensor: each operation adds to the time of lowering a program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - as everywhere

from zo2core.errors import UnsupportedModelError

GROUP = 1024  # signs from eight calls of Philox
_CALLS = 8  # calls per group
_BITS = 32  # bits of a word; each gives a sign
_WORD = (1 << _BITS) - 1
_HALF = 1 << 16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Philox4x32's multipliers of the counter's words 0 and 2
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the key's words after each round
_ROUNDS = 10


class Signs(nn.Module):
    """Draws z of several parameters at once: each number is +1 or -1, by Philox4x32-10."""

    block: torch.Tensor
    parameter: torch.Tensor
    high_multipliers: torch.Tensor
    low_multipliers: torch.Tensor
    key_steps: torch.Tensor
    masks: torch.Tensor

    def __init__(self, indices: Sequence[int], sizes: Sequence[int]) -> None:
        super().__init__()
        calls = [_CALLS * groups_of(size) for size in sizes]
        parameters = [torch.full((count,), index) for index, count in zip(indices, calls, strict=True)]
        multipliers = torch.tensor(_MULTIPLIERS).view(2, 1)
        constants = {
            "block": torch.cat([torch.arange(count) for count in calls]),  # int64 (calls,): the counter's words 0 and 1
            "parameter": torch.cat(parameters),  # int64 (calls,): its word 2
            "high_multipliers": multipliers >> 16,  # int64 (2, 1)
            "low_multipliers": multipliers & (_HALF - 1),  # int64 (2, 1)
            "key_steps": torch.tensor(_KEY_STEPS).view(2, 1),  # int64
            "masks": (1 << torch.arange(_BITS)).view(1, _BITS, 1),  # int64, of each bit
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, seed: torch.Tensor) -> torch.Tensor:
        """Draw z of all parameters."""
        groups = len(self.block) // _CALLS
        words = self._words(seed).view(4, groups, _CALLS).transpose(0, 1).reshape(groups, 1, 4 * _CALLS)
        is_positive = (words & self.masks) == 0
        return (is_positive.to(torch.float32) * 2 - 1).reshape(-1)

    def _words(self, seed: torch.Tensor) -> torch.Tensor:
        """Four words of each call: int64 (4, calls)."""
        even = torch.stack((self.block & _WORD, self.parameter))  # words 0 and 2 of the counters
        odd = torch.stack((self.block // (_WORD + 1), torch.zeros_like(self.parameter)))  # words 1 and 3
        key = torch.stack((seed & _WORD, seed // (_WORD + 1))).view(2, 1)
        for _ in range(_ROUNDS):
            high, low = even * self.high_multipliers, even * self.low_multipliers  # each product is high * 2**16 + low
            upper = (high + low // _HALF) // _HALF
            lower = ((high & (_HALF - 1)) * _HALF + low) & _WORD
            even, odd = upper.flip(0) ^ odd ^ key, lower.flip(0)
            key = (key + self.key_steps) & _WORD
        return torch.stack((even[0], odd[0], even[1], odd[1]))


def groups_of(size: int) -> int:
    """Number of groups for this number of elements."""
    return math.ceil(size / GROUP)


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
