"""LOMO: gradient descent, fused into the backward pass (arXiv 2306.09782, Algorithm 1). It has no state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zo2core.optimizers.every_segment import EverySegment
from zo2core.protocols import UpdateInputs
from zo2core.ranges import require_number
from zo2core.types import widened


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
