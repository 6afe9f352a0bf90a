"""Zeroth-order gradient estimators."""

from zo2core.estimators.evolution import EvolutionStrategies as EvolutionStrategies
from zo2core.estimators.fzoo import FZOO as FZOO
from zo2core.estimators.guard import Guarded as Guarded
from zo2core.estimators.guard import GuardPolicy as GuardPolicy
from zo2core.estimators.inputs import direction_seeds as direction_seeds
from zo2core.estimators.inputs import learning_rate as learning_rate
from zo2core.estimators.inputs import require_distribution as require_distribution
from zo2core.estimators.mezo import MeZOSGD as MeZOSGD
from zo2core.estimators.per_row import PerRowRGE as PerRowRGE
from zo2core.estimators.registry import ESTIMATORS as ESTIMATORS
from zo2core.estimators.rge import MultiQueryRGE as MultiQueryRGE
from zo2core.estimators.wrapper import Clipped as Clipped
from zo2core.estimators.wrapper import with_perturb_in_place as with_perturb_in_place
