"""MEAZO: MeZO divided by the running root mean square of its projected gradient, a single scalar (arXiv 2605.03869)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from zo2core.errors import NonFiniteLossError, OptionError
from zo2core.estimators.ranges import require_positive
from zo2core.estimators.rge import MultiQueryRGE
from zo2core.types import Evaluation, Update

# Note: Second moment from the record. An update has the losses of its evaluations, and any float of 64 bits or less is a
# double exactly. So g is computed in doubles from the losses as the record has them, by the same operations for the present
# step and for earlier ones: nothing else has to be kept, and a resumed run has the same second moment, bit for bit. The
# applied projected gradients would not do: they are divided already, and a guard may have clipped them.


class _Moment(NamedTuple):
    """The second moment that the first updates of a run come to."""

    version: int = 0  # how many updates were looked at
    last: Update | None = None  # of them
    steps: int = 0  # of them, that count
    value: float = 0.0  # v, without the correction for its beginning with 0

    def after(self, g: float, beta: float) -> _Moment:
        """With one more step, whose mean projected gradient is g."""
        return self._replace(steps=self.steps + 1, value=beta * self.value + (1 - beta) * (g * g))

    def root_mean_square(self, beta: float) -> float:
        """The root of the corrected moment."""
        return math.sqrt(self.value / (1 - beta**self.steps))


@dataclass(frozen=True, kw_only=True)
class MEAZO(MultiQueryRGE):
    """``theta <- theta - lr / q * sum_i g_i / (sqrt(v / (1 - beta^t)) + delta) * z_i``, with g_i as in ``MultiQueryRGE``.

    v is one scalar for all weights: ``v <- beta * v + (1 - beta) * g^2`` with ``g = 1/q sum_i g_i``, the present step
    included, and t counts the steps from 1. Since the step is divided by how large projected gradients have been, a weight
    moves by about lr where z is of unit variance: the learning rate has other units than MeZO's.

    The paper itself was not at hand, only its equations in a summary: beta and delta have no value there, and t is one less
    in the correction, which would divide by zero at the first step. The correction is Adam's here.

    A step whose projected gradients stand as zero in the journal though its losses differ was not applied: somebody thought
    its losses outliers. It does not count, neither in v nor in t.

    Args:
        lr: Learning rate of the whole step, or a function from the 0-based step to it.
        zo_eps: Perturbation scale.
        weight_decay: As in ``MeZOSGD``, and not divided.
        perturb_in_place: As in ``MultiQueryRGE``.
        q: Directions a step.
        beta: How much of v stays from step to step, in [0, 1): it looks back about 1 / (1 - beta) steps.
        delta: Keeps the quotient finite where no loss has differed yet.

    Raises:
        OptionError: if a number is out of its range.
    """

    q: int = 1
    beta: float = 0.99
    delta: float = 1e-8
    # What was computed last, so that a step does not begin with the first one again: no state, it follows from ``past``.
    _known: list[_Moment] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < 1:
            raise OptionError(
                "beta", found=repr(self.beta), expected="at least 0 and less than 1", remedy="choose beta such as 0.99"
            )
        require_positive("delta", self.delta)

    @property
    def options(self) -> Mapping[str, Any]:
        """As of ``MultiQueryRGE``, and what decides the second moment."""
        return {**super().options, "name": "meazo", "beta": self.beta, "delta": self.delta}

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """One projected gradient a direction, divided, to be applied with ``lr / q`` each."""
        plain = super().update(step, evaluations, losses, lr, past)
        grads = _projected_grads(plain)
        moment = self._moment(step, past).after(_mean(grads), self.beta)
        if not math.isfinite(moment.value):
            raise NonFiniteLossError(
                f"step {step}",
                found=f"projected gradients {grads}, whose square is not finite",
                expected="losses closer to each other",
                remedy="raise `zo_eps`, or lower `lr`; the step was not taken",
            )
        scale = moment.root_mean_square(self.beta) + self.delta
        return replace(plain, projected_grads=tuple(grad / scale for grad in grads))

    def _moment(self, step: int, past: Sequence[Update]) -> _Moment:
        """The second moment after the first ``step`` updates of a run."""
        moment = self._known.pop() if self._known else _Moment()
        if moment.version > step or (moment.version > 0 and past[moment.version - 1] is not moment.last):
            moment = _Moment()  # it is of another run, or of a later step of this one
        for version in range(moment.version, step):
            update = past[version]
            grads = _projected_grads(update)
            if any(update.projected_grads) or not any(grads):
                moment = moment.after(_mean(grads), self.beta)
            moment = moment._replace(version=version + 1, last=update)
        self._known.append(moment)
        return moment


def _mean(grads: Sequence[float]) -> float:
    return sum(grads) / len(grads)


def _projected_grads(update: Update) -> list[float]:
    """The projected gradients that an update's losses come to, in doubles.

    Raises:
        OptionError: if its evaluations are not both sides of each direction.
    """
    shifts = [evaluation.shift for evaluation in update.evaluations]
    if shifts != [1.0, -1.0] * len(update.seeds):
        raise OptionError(
            f"past, step {update.step}",
            found=f"evaluations at the shifts {shifts}",
            expected="both sides of each direction, whose difference is the projected gradient",
            remedy="begin a new run: this one was begun with another estimator",
        )
    pairs = zip(update.losses[::2], update.losses[1::2], strict=True)
    return [(plus - minus) / (2 * update.zo_eps) for plus, minus in pairs]
