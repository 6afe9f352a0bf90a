"""Zeroth-order gradient estimators."""

from zo2core.estimators.mezo import MeZOSGD as MeZOSGD
from zo2core.estimators.mezo import require_positive as require_positive
from zo2core.estimators.rge import MultiQueryRGE as MultiQueryRGE
