"""A guard against divergence: steps far outside the run's range are not applied, and a run that got worse stops."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zo2core.errors import DivergenceError, OptionError, ZO2Warning
from zo2core.estimators.run_health import MOST_MOVED, RECENT, RunHealth, best_step, drift, is_refused, outlier, squared_move
from zo2core.estimators.wrapper import EstimatorWrapper
from zo2core.types import Evaluation, Update


@dataclass(frozen=True, kw_only=True)
class GuardPolicy:
    """How a guard judges. The defaults are made never to act on a run that learns.

    Args:
        window: Steps whose losses make up the running range.
        factor: How many times the distance from the range's median to its extreme a step may be away from the median.
        refusals: Steps of the last ten that end the run if they are not applied.

    Raises:
        OptionError: if a number is out of its range.
    """

    window: int = 50
    factor: float = 5.0
    refusals: int = 5

    def __post_init__(self) -> None:
        if type(self.window) is not int or self.window < RECENT:
            raise _out_of_range("window", self.window, f"a whole number of at least {RECENT}")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise _out_of_range("factor", self.factor, "a finite number of at least 1")
        if type(self.refusals) is not int or not 1 <= self.refusals <= RECENT:
            raise _out_of_range("refusals", self.refusals, f"a whole number from 1 to {RECENT}")


@dataclass(frozen=True, kw_only=True)
class Guarded(EstimatorWrapper):
    """An estimator whose steps are judged by the run's past before they are applied.

    A step whose losses lie far outside the range that they have been in, or whose update is larger than weights are, is *not
    applied*, which a warning says. Its record has its losses and projected gradients of 0, no weight decay and no walk, so
    that replaying it leaves every weight as it is. As long as the guard does not act, updates are the wrapped estimator's,
    bit for bit. ``run_health.py`` has the numbers.

    The run ends in a ``DivergenceError`` if too many of the last ten steps are not applied, or if the run, as
    ``run_health.py`` judges it, has got worse for good. The error names the best step so far, from which to branch the run.

    All this follows from the journal, so a resumed run is bitwise the undisturbed one, and ends in the same error.

    Args:
        estimator: The one that is wrapped.
        policy: How to judge.
    """

    policy: GuardPolicy = field(default_factory=GuardPolicy)
    # What was computed last, so that a step does not begin with the first one again: no state, it follows from ``past``.
    _known: list[RunHealth] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def options(self) -> Mapping[str, Any]:
        """As of the wrapped estimator, and the policy."""
        policy = self.policy
        judged = {"window": policy.window, "factor": float(policy.factor), "refusals": policy.refusals}
        return {**self.estimator.options, "guard": judged}

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """That of the wrapped estimator, or one that changes nothing.

        Raises:
            DivergenceError: if the run has got worse for good.
        """
        past, policy = past[:step], self.policy
        drifted = drift(self._health(past), past, window=policy.window)
        if drifted is not None:
            raise _diverged(step, past, *drifted)
        update = self.estimator.update(step, evaluations, losses, lr, past)
        moves = math.sqrt(squared_move(update))
        found = outlier(update, past, window=policy.window, factor=policy.factor)
        if found is None and not moves > MOST_MOVED:
            return update
        found = found or f"an update that moves each weight by {moves:.2g}, and most weights are below 1"
        refused = 1 + sum(is_refused(earlier) for earlier in past[1 - RECENT :])
        if refused >= policy.refusals:
            judged = f"{refused} of the last {min(step + 1, RECENT)} steps cannot be applied ({found})"
            raise _diverged(step, past, judged, f"fewer than {policy.refusals}")
        warnings.warn(f"step {step} is not applied: {found}", ZO2Warning, stacklevel=2)
        unchanged = (0.0,) * len(update.projected_grads)
        return replace(update, projected_grads=unchanged, weight_decay=0.0, perturb_in_place=False)

    def _health(self, past: Sequence[Update]) -> RunHealth:
        health = (self._known.pop() if self._known else RunHealth()).extended(past)
        self._known.append(health)
        return health


def _diverged(step: int, past: Sequence[Update], found: str, expected: str) -> DivergenceError:
    best = best_step(past)
    return DivergenceError(
        f"step {step}",
        found=found,
        expected=expected,
        remedy=f"branch the journal at step {best}, the best so far, and go on with a lower `lr`; the step was not taken",
        best_step=best,
    )


def _out_of_range(name: str, value: object, expected: str) -> OptionError:
    return OptionError(f"guard.{name}", found=repr(value), expected=expected, remedy="leave it out for the default")
