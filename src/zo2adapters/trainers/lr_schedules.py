"""Learning-rate schedules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zo2core.errors import OptionError


class Decay(Enum):
    """Shape of the learning rate's decay after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to a peak, then decay towards 0. The rate is positive at every step of the run."""

    peak: float
    decay: Decay
    warmup_steps: int
    steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < max(self.steps, 1):
            raise OptionError(
                "warmup_steps",
                found=repr(self.warmup_steps),
                expected=f"0 to {self.steps - 1}, fewer than the run's steps",
                remedy="pass a value in this range",
            )

    def __call__(self, step: int) -> float:
        """The learning rate of a 0-based step."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min((step - self.warmup_steps) / (self.steps - self.warmup_steps), 1.0)
        if self.decay is Decay.LINEAR:
            return self.peak * (1.0 - progress)
        if self.decay is Decay.COSINE:
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak


def with_peak_rate(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """An estimator's options from a journal, for a reader: the peak in place of the text that stands for a schedule."""
    schedule = re.match(rf"{LearningRate.__name__}\(peak=(\d+(?:\.\d+)?(?:e[+-]?\d+)?),", str(options.get("lr")))
    return options if schedule is None else {**options, "lr": float(schedule[1])}
