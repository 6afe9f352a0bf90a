"""The estimators that a run can have, by name: how many forwards a step of each takes, and what each goes with."""

from __future__ import annotations

from enum import Enum

from zo2core import OptionError


class EstimatorName(Enum):
    """What turns a step's losses into an update."""

    MEZO = "mezo"
    FZOO = "fzoo"

    def evaluations(self, queries: int) -> int:
        """Forwards of a step along so many directions: both sides of each, or one side and the weights as they are."""
        return queries + 1 if self is EstimatorName.FZOO else 2 * queries

    def require_consistent(self, *, exact_mezo: bool, noise: str, perturb_in_place: bool, queries: int) -> None:
        """Refuse options that would not be heeded, or that the estimator cannot do with.

        Args:
            exact_mezo: Whether MeZO's bits were asked for.
            noise: The name of the noise.
            perturb_in_place: Whether MeZO's walk was asked for.
            queries: Directions a step.

        Raises:
            OptionError: naming the option.
        """
        if self is not EstimatorName.MEZO and exact_mezo:
            raise OptionError(
                "exact_mezo",
                found=f"it beside the estimator {self.value}",
                expected="MeZO's own estimator, whose bits it asks for",
                remedy="leave out one of the two",
            )
        if self is not EstimatorName.FZOO:
            return
        if noise != "rademacher":
            raise OptionError(
                "noise", found=repr(noise), expected="'rademacher', which fzoo is made for", remedy="leave it out"
            )
        if perturb_in_place:
            raise OptionError(
                "perturb_in_place",
                found="it beside the estimator fzoo",
                expected="evaluations that each start from the weights, as those of fzoo do",
                remedy="leave it out",
            )
        if queries < 2:
            raise OptionError(
                "queries",
                found=str(queries),
                expected="at least 2: fzoo divides by how far the losses of its directions spread",
                remedy="pass 8, as its authors do",
            )
