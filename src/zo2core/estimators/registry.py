"""Estimators by the names that users choose them by; each class has as ``name`` what a journal's header calls it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from zo2core.estimators.fzoo import FZOO
from zo2core.estimators.mezo import MeZOSGD
from zo2core.estimators.per_row import PerRowRGE
from zo2core.estimators.rge import MultiQueryRGE


class EstimatorName(Enum):
    """What turns a step's losses into an update."""

    MEZO = "mezo"
    FZOO = "fzoo"

    @property
    def classes(self) -> EstimatorClasses:
        """The classes of this name."""
        return ESTIMATORS[self]

    def evaluations(self, queries: int) -> int:
        """Forwards of a step along ``queries`` directions, all on one batch."""
        return self.classes.several.forwards(queries)


class EstimatorClasses(NamedTuple):
    """The classes of one name: an estimator along several directions, and what it becomes in special cases.

    All take ``lr``, ``zo_eps`` and ``weight_decay``; those with such a field take ``perturb_in_place``.
    """

    several: type[MultiQueryRGE] | type[FZOO]  # q directions, all on one batch
    one: type[MeZOSGD] | None = None  # one direction; None: ``several`` with q = 1, or none if it needs more
    per_row: type[PerRowRGE] | None = None  # q directions, each on its own rows; None: not supported


ESTIMATORS: Mapping[EstimatorName, EstimatorClasses] = {
    EstimatorName.MEZO: EstimatorClasses(several=MultiQueryRGE, one=MeZOSGD, per_row=PerRowRGE),
    EstimatorName.FZOO: EstimatorClasses(several=FZOO),
}
