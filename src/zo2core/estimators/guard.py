"""A guard against divergence: it skips steps far outside the run's range, and stops a run that has become worse."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zo2core.errors import DivergenceError, ZO2Warning
from zo2core.estimators.run_health import MOST_MOVED, RECENT, RunHealth, best_step, drift, is_refused, outlier, squared_move
from zo2core.estimators.wrapper import EstimatorWrapper
from zo2core.ranges import require_number, require_whole
from zo2core.types import Evaluation, Update


@dataclass(frozen=True, kw_only=True)
class GuardPolicy:
    """The limits of a guard. The defaults are chosen so that the guard never acts on a run that learns.

    Args:
        window: Number of steps in the running median of losses.
        factor: Largest distance of a step from that median, as a multiple of the distance from the median to the highest
            recent loss.
        refusals: Number of skipped steps, of the last ten, that ends the run.

    Raises:
        OptionError: if a number is out of its range.
    """

    window: int = 50
    factor: float = 5.0
    refusals: int = 5

    def __post_init__(self) -> None:
        require_whole("guard.window", self.window, RECENT)
        require_number("guard.factor", self.factor, least=1)
        require_whole("guard.refusals", self.refusals, 1, RECENT)


@dataclass(frozen=True, kw_only=True)
class Guarded(EstimatorWrapper):
    """An estimator whose steps are compared with the run's past before they are applied.

    A step whose losses lie far outside their past range, or whose update is larger than the weights, is *not applied*, and
    a warning says so. Its record has the losses, but projected gradients of 0, no weight decay and no in-place
    perturbations, so that replaying it changes no weight. All other updates are the wrapped estimator's, bit for bit.
    ``run_health.py`` has the numbers.

    The run ends with a ``DivergenceError`` if too many of the last ten steps were not applied, or if the run has become
    permanently worse by the measure of ``run_health.py``. The error names the best step so far, from which to branch.

    The guard depends only on the journal, so a resumed run has the same bits, and ends with the same error.

    Args:
        estimator: The wrapped estimator.
        policy: The limits.
    """

    policy: GuardPolicy = field(default_factory=GuardPolicy)
    # A cache of the last summary, which follows from ``past``, so that a step does not start from the first update again.
    _cached: list[RunHealth] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the wrapped estimator, and the limits."""
        policy = self.policy
        limits = {"window": policy.window, "factor": float(policy.factor), "refusals": policy.refusals}
        return {**self.estimator.options, "guard": limits}

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """Compute the update of the wrapped estimator, or one that changes no weight.

        Raises:
            DivergenceError: if the run has diverged.
        """
        past, policy = past[:step], self.policy
        drifted = drift(self._health(past), past, window=policy.window)
        if drifted is not None:
            raise _diverged(step, past, *drifted)
        update = self.estimator.update(step, evaluations, losses, lr, past)
        moves = math.sqrt(squared_move(update))
        reason = outlier(update, past, window=policy.window, factor=policy.factor)
        if reason is None and not moves > MOST_MOVED:
            return update
        reason = reason or f"an update that moves each weight by {moves:.2g}, and most weights are below 1"
        refused = 1 + sum(is_refused(earlier) for earlier in past[1 - RECENT :])
        if refused >= policy.refusals:
            found = f"{refused} of the last {min(step + 1, RECENT)} steps cannot be applied ({reason})"
            raise _diverged(step, past, found, f"fewer than {policy.refusals}")
        warnings.warn(f"step {step} is not applied: {reason}", ZO2Warning, stacklevel=2)
        unchanged = (0.0,) * len(update.projected_grads)
        return replace(update, projected_grads=unchanged, weight_decay=0.0, perturb_in_place=False)

    def _health(self, past: Sequence[Update]) -> RunHealth:
        health = (self._cached.pop() if self._cached else RunHealth()).extended(past)
        self._cached.append(health)
        return health


def _diverged(step: int, past: Sequence[Update], found: str, expected: str) -> DivergenceError:
    best = best_step(past)
    return DivergenceError(
        f"step {step}",
        found=found,
        expected=expected,
        remedy=f"branch the journal at step {best}, the best so far, and continue with a lower `lr`; the step was not taken",
        best_step=best,
    )
