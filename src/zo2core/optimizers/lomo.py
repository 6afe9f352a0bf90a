"""LOMO and AdaLOMO, which have no state, or one number for each row and column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from zo2core.protocols import BlockUpdate, UpdateInputs
from zo2core.ranges import require_number
from zo2core.types import BlockLayout, StateSpec, widened


@dataclass(frozen=True, kw_only=True)
class LOMO(BlockUpdate):
    """Gradient descent in float32 arithmetic: ``theta <- (1 - lr * weight_decay) * theta - lr *
    g``.

    This is LOMO (arXiv 2306.09782, Algorithm 1): descent without a state, fused into the backward
    pass. 16-bit weights are converted to float32 and rounded once, as in the authors' program.

    Args:
        weight_decay: Decoupled weight decay, for all parameters.

    Raises:
        OptionError: if ``weight_decay`` is out of its range.
    """

    name: ClassVar[str] = "lomo"  # in a run's record
    copies = 1  # a 16-bit weight

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_number("weight_decay", self.weight_decay, least=0)

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options, for the journal."""
        return {"name": self.name, **asdict(self)}

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place."""
        for name in inputs.gradients:
            weight = inputs.weights[name]
            theta = widened(weight)  # the weight itself, unless it has 16 bits
            update, rate = self._descent(name, theta, inputs)
            if self.weight_decay:
                theta.mul_(1.0 - rate * self.weight_decay)
            theta.add_(update, alpha=-rate)
            if theta is not weight:
                weight.copy_(theta)

    def _descent(
        self, name: str, theta: torch.Tensor, inputs: UpdateInputs
    ) -> tuple[torch.Tensor, Any]:
        """What is subtracted from a parameter, and with which rate."""
        return inputs.gradients[name], inputs.lr


@dataclass(frozen=True, kw_only=True)
class AdaLOMO(LOMO):
    """Gradient descent whose steps are normalised by the second moment of the gradients, kept for
    rows and columns only.

    For a matrix, ``r`` and ``c`` are running means of ``g * g + eps[0]`` over rows and columns,
    with the decay ``1 - t ** decay_rate`` at the 1-based step t. The update ``u = g / sqrt(r c /
    mean(r))`` is divided by ``max(1, rms(u) / clip_threshold)``, and ``theta <- (1 - a *
    weight_decay) * theta - a * u`` with ``a = lr * max(eps[1], rms(theta))``. Vectors keep the
    second moment of each element. All arithmetic is float32. This is AdaLomo (arXiv 2310.10195,
    Algorithm 1).

    Args:
        weight_decay: Decoupled weight decay, for all parameters.
        eps: Term added to squared gradients; and the least root mean square by which a parameter's
            rate is scaled.
        clip_threshold: Largest root mean square of an update.
        decay_rate: Exponent of the running means' decay.

    Raises:
        OptionError: if ``weight_decay``, ``eps`` or ``clip_threshold`` is out of its range.
    """

    name = "adalomo"
    # a 16-bit weight, the squared gradient with and without its term, and then the update
    copies = 3

    eps: tuple[float, float] = (1e-30, 1e-3)
    clip_threshold: float = 1.0
    decay_rate: float = -0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in self.eps:
            require_number("eps", value, least=0)
        require_number("clip_threshold", self.clip_threshold, above=0)

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options, for the journal."""
        return {**super().options, "eps": list(self.eps)}

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """One row and one column of each matrix, and each element of vectors, in float32."""
        return [
            StateSpec(f"{spec.name}.{side}", shape, torch.float32)
            for spec in layout.parameters
            for side, shape in _moment_shapes(spec.shape).items()
        ]

    def _descent(
        self, name: str, theta: torch.Tensor, inputs: UpdateInputs
    ) -> tuple[torch.Tensor, Any]:
        decay = 1.0 - math.pow(inputs.step + 1, self.decay_rate)
        update = self._update(name, inputs.gradients[name], decay, inputs.states)
        update.div_((_rms(update) / self.clip_threshold).clamp_(min=1.0))
        scale = torch.norm(theta, 2.0) / math.sqrt(theta.numel())
        # a float32 tensor, as its authors' program has it
        return update, inputs.lr * max(self.eps[1], scale)

    def _update(
        self, name: str, gradient: torch.Tensor, decay: float, states: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Update a parameter's moments with a gradient, and return the gradient divided by their
        root.
        """
        squares = gradient**2 + self.eps[0]
        means = {"squares": squares}
        if gradient.dim() > 1:
            means = {"rows": squares.mean(dim=-1), "columns": squares.mean(dim=-2)}
        moments = {}
        for side, mean in means.items():
            moment = states[f"{name}.{side}"]
            moments[side] = moment.to(mean.device).mul_(decay).add_(mean, alpha=1.0 - decay)
            if moments[side] is not moment:
                moment.copy_(moments[side])
        if gradient.dim() < 2:
            return moments["squares"].rsqrt().mul_(gradient)
        rows = moments["rows"]
        columns = moments["columns"]
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
