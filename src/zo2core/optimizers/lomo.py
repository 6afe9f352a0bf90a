"""What most optimizers of all parameters have in common: they change every segment at each step, and need no state.

LOMO: gradient descent, fused into the backward pass (arXiv 2306.09782, Algorithm 1). It has no state.

AdaLomo: LOMO with an adaptive rate from a factored second moment (arXiv 2310.10195, Algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zo2core.protocols import UpdateInputs
from zo2core.ranges import require_number
from zo2core.types import BlockLayout, StateSpec, widened


class EverySegment:
    """Defaults of the ``BlockUpdate`` contract; an optimizer overrides what differs."""

    @property
    def widens_gradients(self) -> bool:
        """Whether 16-bit gradients are converted to float32 first: yes."""
        return True

    @property
    def copies(self) -> int:
        """None. See the contract."""
        return 0

    @property
    def turn(self) -> int | None:
        """Nothing is forgotten. See the contract."""
        return None

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """All of them."""
        return trained

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """None. See the contract."""
        return ()

    def settle(self) -> None:
        """Do nothing: no work is left to other threads."""


@dataclass(frozen=True, kw_only=True)
class LOMO(EverySegment):
    """Gradient descent in float32 arithmetic: ``theta <- (1 - lr * weight_decay) * theta - lr * g``.

    16-bit weights are converted to float32 and rounded once, as in the authors' program.

    Args:
        weight_decay: Decoupled weight decay, for all parameters.

    Raises:
        OptionError: if ``weight_decay`` is out of its range.
    """

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_number("weight_decay", self.weight_decay, least=0)

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return {"name": "lomo", **asdict(self)}

    @property
    def copies(self) -> int:
        """A 16-bit weight. See the contract."""
        return 1

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place. See the contract."""
        for name, gradient in inputs.gradients.items():
            weight = inputs.weights[name]
            theta = widened(weight)  # the weight itself, unless it has 16 bits
            if self.weight_decay:
                theta.mul_(1.0 - inputs.lr * self.weight_decay)
            theta.add_(gradient, alpha=-inputs.lr)
            if theta is not weight:
                weight.copy_(theta)


@dataclass(frozen=True, kw_only=True)
class AdaLOMO(EverySegment):
    """Gradient descent whose steps are normalised by the second moment of the gradients, kept for rows and columns only.

    For a matrix, ``r`` and ``c`` are running means of ``g * g + eps[0]`` over rows and columns, with the decay
    ``1 - t ** decay_rate`` at the 1-based step t. The update ``u = g / sqrt(r c / mean(r))`` is divided by
    ``max(1, rms(u) / clip_threshold)``, and ``theta <- (1 - a * weight_decay) * theta - a * u`` with
    ``a = lr * max(eps[1], rms(theta))``. Vectors keep the second moment of each element. All arithmetic is float32.

    Args:
        weight_decay: Decoupled weight decay, for all parameters.
        eps: Term added to squared gradients; and the least root mean square by which a parameter's rate is scaled.
        clip_threshold: Largest root mean square of an update.
        decay_rate: Exponent of the running means' decay.

    Raises:
        OptionError: if ``weight_decay``, ``eps`` or ``clip_threshold`` is out of its range.
    """

    weight_decay: float = 0.0
    eps: tuple[float, float] = (1e-30, 1e-3)
    clip_threshold: float = 1.0
    decay_rate: float = -0.8

    def __post_init__(self) -> None:
        require_number("weight_decay", self.weight_decay, least=0)
        for value in self.eps:
            require_number("eps", value, least=0)
        require_number("clip_threshold", self.clip_threshold, above=0)

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return {"name": "adalomo", **asdict(self), "eps": list(self.eps)}

    @property
    def copies(self) -> int:
        """A 16-bit weight, the squared gradient with and without its term, and then the update. See the contract."""
        return 3

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """One row and one column of each matrix, and each element of vectors, in float32. See the contract."""
        return [
            StateSpec(f"{spec.name}.{side}", shape, torch.float32)
            for spec in layout.parameters
            for side, shape in _moment_shapes(spec.shape).items()
        ]

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place. See the contract."""
        for name, gradient in inputs.gradients.items():
            weight = inputs.weights[name]
            theta = widened(weight)  # the weight itself, unless it has 16 bits
            update = self._update(name, gradient, 1.0 - math.pow(inputs.step + 1, self.decay_rate), inputs.states)
            update.div_((_rms(update) / self.clip_threshold).clamp_(min=1.0))
            scale = torch.norm(theta, 2.0) / math.sqrt(theta.numel())
            rate = inputs.lr * max(self.eps[1], scale)  # a float32 tensor, as its authors' program has it
            if self.weight_decay:
                theta.mul_(1.0 - rate * self.weight_decay)
            theta.add_(update, alpha=-rate)
            if theta is not weight:
                weight.copy_(theta)

    def _update(self, name: str, gradient: torch.Tensor, decay: float, states: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Update a parameter's moments with a gradient, and return the gradient divided by their root."""
        squares = gradient**2 + self.eps[0]
        means = {"squares": squares}
        if gradient.dim() > 1:
            means = {"rows": squares.mean(dim=-1), "columns": squares.mean(dim=-2)}
        moments = {}
        for side, mean in means.items():
            kept = states[f"{name}.{side}"]
            moments[side] = kept.to(mean.device).mul_(decay).add_(mean, alpha=1.0 - decay)
            if moments[side] is not kept:
                kept.copy_(moments[side])
        if gradient.dim() < 2:
            return moments["squares"].rsqrt().mul_(gradient)
        rows, columns = moments["rows"], moments["columns"]
        rows = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        return torch.mul(rows, columns.unsqueeze(-2).rsqrt()).mul_(gradient)


def _moment_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of a parameter's moments, by their side."""
    if len(shape) < 2:
        return {"squares": shape}
    return {"rows": shape[:-1], "columns": (*shape[:-2], shape[-1])}


def _rms(values: torch.Tensor) -> torch.Tensor:
    root: torch.Tensor = torch.norm(values, 2.0) / (values.numel() ** 0.5)
    return root
