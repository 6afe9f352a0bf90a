"""The names by which users choose estimators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zo2core.estimators.evolution import EvolutionStrategies
from zo2core.estimators.fzoo import FZOO
from zo2core.estimators.two_point import MeZOSGD, MultiQueryRGE, PerRowRGE
from zo2core.ranges import EstimatorName


class EstimatorClasses(NamedTuple):
    """The classes of one name: an estimator along several directions, and its special cases.

    All have the fields ``lr``, ``zo_eps`` and ``weight_decay``; some have ``perturb_in_place``.
    """

    multi_query: type[MultiQueryRGE] | type[FZOO]  # q directions, all on one batch
    # one direction; None: ``multi_query`` with q = 1, if it allows that
    single_query: type[MeZOSGD] | None = None
    # q directions, each on its own rows; None: not supported
    per_row: type[PerRowRGE] | None = None


ESTIMATORS: Mapping[EstimatorName, EstimatorClasses] = {
    EstimatorName.MEZO: EstimatorClasses(
        multi_query=MultiQueryRGE, single_query=MeZOSGD, per_row=PerRowRGE
    ),
    EstimatorName.FZOO: EstimatorClasses(multi_query=FZOO),
    EstimatorName.ES: EstimatorClasses(multi_query=EvolutionStrategies),
}
