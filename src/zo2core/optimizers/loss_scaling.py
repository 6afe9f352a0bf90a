"""The scale of the loss, by which small gradients do not vanish in float16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zo2core.optimizers.states import (
    unusable_state,
)
from zo2core.ranges import require_number, require_whole
from zo2core.types import LARGEST_FLOAT32


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the scale of the loss changes, so that small gradients do not vanish in float16.

    See ``torch.amp.GradScaler``, whose defaults these are.

    Args:
        initial: The scale at first.
        growth: Factor of the scale after ``interval`` steps in a row without overflow.
        backoff: Factor of the scale after a step whose gradients overflow, and which is skipped.
        interval: Number of these steps.

    Raises:
        OptionError: if a number is out of its range.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        require_number("loss_scaling.initial", self.initial, least=1)
        require_number("loss_scaling.growth", self.growth, above=1)
        require_number("loss_scaling.backoff", self.backoff, above=0, below=1)
        require_whole("loss_scaling.interval", self.interval, 1)


class LossScale:
    """The present scale of the loss, as in ``torch.amp.GradScaler``."""

    def __init__(self, scaling: LossScaling | None) -> None:
        self._scaling = scaling
        self.scale = 1.0 if scaling is None else scaling.initial
        self._good_steps = 0  # in a row, without overflow

    @property
    def may_skip(self) -> bool:
        """Whether a step whose gradients overflow is skipped, and the next one scaled by less.

        A loss that is not scaled up has gradients that are too large by themselves.
        """
        return self._scaling is not None and self.scale > 1.0

    def unscaled(self, gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Divide a float32 gradient of the scaled loss by the scale; into ``out``, if it is
        given.
        """
        if self._scaling is None:
            return gradient
        return torch.mul(gradient, torch.tensor(1.0 / self.scale, dtype=torch.float32), out=out)

    def update(self, *, overflowed: bool) -> None:
        """Choose the scale of the next step."""
        if self._scaling is None:
            return
        if overflowed:
            self.scale = max(self.scale * self._scaling.backoff, 1.0)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._scaling.interval:
            self._good_steps = 0
            grown = self.scale * self._scaling.growth
            if grown <= LARGEST_FLOAT32:
                self.scale = grown

    def values(self) -> dict[str, Any]:
        """What later steps depend on, as JSON."""
        if self._scaling is None:
            return {}
        return {"loss_scale": self.scale, "good_steps": self._good_steps}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Continue with what ``values`` returned."""
        values = values if isinstance(values, Mapping) else {"loss_scale": values}
        scale = values.get("loss_scale", 1.0)
        steps = values.get("good_steps", 0)
        if (
            not isinstance(scale, float)
            or not 1.0 <= scale <= LARGEST_FLOAT32
            or type(steps) is not int
            or steps < 0
        ):
            raise unusable_state(f"{values!r:.80} as the scale of the loss")
        if self._scaling is not None and "loss_scale" in values:
            self.scale, self._good_steps = scale, steps
