"""What one first-order step of all parameters does with the gradients of each segment: they are
measured, clipped, and change the weights.

One segment's gradients are in memory at a time. A norm of all gradients is then known only when all
updates are made. So clipping by norm takes a sweep before, which only measures (LOMO, arXiv
2306.09782, section 3.3.1), unless a single segment is trained, or each segment's norm is clipped by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from zo2core.errors import NonFiniteLossError
from zo2core.optimizers.loss_scaling import LossScale
from zo2core.optimizers.states import StateMemory, StatesInStores
from zo2core.protocols import BlockUpdate, Store, UpdateInputs
from zo2core.ranges import NormGroup
from zo2core.sweep.microbatch import StepRows
from zo2core.types import HALVES, widened


class GradientLimits(NamedTuple):
    """How gradients are clipped."""

    norm: float | None  # largest 2-norm of gradients together; None does not clip it
    value: float | None  # largest absolute value of an element, before; None does not clip them
    norm_per: NormGroup = "all"  # together are all gradients, or those of a segment


class FusedStep:
    """One step, in which each segment is updated as soon as its gradients are there.

    Args:
        update: The optimizer.
        states: The optimizer's states.
        scale: The scale of the loss.
        limits: How gradients are clipped.
        rows: The micro-batches of the step.
        names: Names of all trained parameters, in registration order.
        step: 0-based step.
    """

    def __init__(
        self,
        update: BlockUpdate,
        states: StateMemory | StatesInStores,
        scale: LossScale,
        limits: GradientLimits,
        rows: StepRows,
        names: Sequence[str],
        step: int,
    ) -> None:
        self._update = update
        self._states = states
        self._scale = scale
        self._limits = limits
        self.rows = rows
        self._names = names
        self._step = step
        self._norms: dict[str, torch.Tensor] = {}  # by name, 0-d
        # of the first sweep, once the head has run
        self._loss: float | None = None
        self.is_measuring = False  # whether the present sweep changes nothing
        # norm of all gradients, if a sweep before has measured it
        self.total: torch.Tensor | None = None
        self.overflowed = False  # whether a gradient of the scaled loss is not finite
        self.lr = 0.0
        self.changed_segments = 0  # segments that are changed, or were being changed when it failed

    def prepare(self, gradients: dict[str, torch.Tensor]) -> None:
        """Convert a segment's gradients, add their norms unless they were measured, and clip them
        unless they are being measured.
        """
        converted = self._convert(gradients)
        if self.total is None:
            self._add_norms(gradients)
        if not self.is_measuring:
            self._clip(gradients, converted)

    def change(
        self,
        segment: int,
        weights: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        store: Store,
    ) -> None:
        """Change a segment's weights."""
        self.changed_segments += 1
        states = self._states.of(segment, store)
        self._update.apply(UpdateInputs(segment, weights, gradients, states, self._step, self.lr))

    def norm(self) -> torch.Tensor:
        """The norm of all gradients together, 0-d; 0 if one overflowed.

        The order of the names decides its last bit.
        """
        norms = [self._norms[name] for name in self._names if name in self._norms]
        if self.overflowed or not norms:
            return torch.zeros(())
        return _norm_of(norms)

    def _convert(self, gradients: dict[str, torch.Tensor]) -> set[str]:
        """Convert 16-bit gradients to float32, if the optimizer wants them so, and divide them by
        the scale of the loss; returns the names of those that were converted.
        """
        widens = self._update.widens_gradients
        converted = {
            name for name, gradient in gradients.items() if widens and gradient.dtype in HALVES
        }
        for name, gradient in gradients.items():
            if name in converted:
                wide = widened(gradient)
                gradients[name] = self._scale.unscaled(wide, out=wide)
            else:
                gradients[name] = self._scale.unscaled(gradient)
        return converted

    def _clip(self, gradients: dict[str, torch.Tensor], converted: set[str]) -> None:
        factor = None
        if self._limits.norm is not None and gradients:
            total = self._norm_to_clip(gradients)
            factor = torch.clamp(self._limits.norm / (total + 1e-6), max=1.0)
        largest = self._limits.value
        for name, gradient in gradients.items():
            out = gradient if name in converted else None  # others may share memory
            if largest is not None:
                gradients[name] = torch.clamp(gradients[name], -largest, largest, out=out)
            if factor is not None:
                gradients[name] = torch.mul(gradients[name], factor, out=out)

    def _norm_to_clip(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The norm of the gradients that are clipped together with those of a segment."""
        if self._limits.norm_per == "layer":
            return _norm_of([self._norms[name] for name in gradients])
        return self.norm() if self.total is None else self.total

    def _add_norms(self, gradients: Mapping[str, torch.Tensor]) -> None:
        norms = {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}
        if self._loss is None:
            self._loss = float(self.rows.loss(self.rows.outputs))
        is_finite = math.isfinite(self._loss)
        overflowed = [name for name, norm in norms.items() if not math.isfinite(norm.item())]
        if overflowed and is_finite and self._scale.may_skip:
            self.overflowed = True
        elif overflowed or not is_finite:
            raise self._not_finite(overflowed)
        self._norms.update(norms)

    def _not_finite(self, overflowed: Sequence[str]) -> NonFiniteLossError:
        found = f"loss {self._loss}"
        if overflowed:
            found += f", and a gradient of {overflowed[0]} that is not finite"
        state = "no step was taken"
        if self.changed_segments:
            state = (
                f"{self.changed_segments} segments had been changed: resume from the last snapshot"
            )
        return step_not_finite(self._step, found, "a finite loss and finite gradients", state)


def _norm_of(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of gradients together, from their norms."""
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return total


def step_not_finite(step: int, found: str, expected: str, state: str) -> NonFiniteLossError:
    """The error for a loss or gradients that are not finite; ``state``: what became of the step."""
    remedy = f"lower the learning rate, or use bfloat16 or float32 where float16 overflows; {state}"
    return NonFiniteLossError(f"step {step}", found, expected, remedy)
