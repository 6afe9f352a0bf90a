"""Low-rank perturbations, computed beside the activations: weights are only read."""

from zo2core.perturbation.factor_store import FactorStore as FactorStore
from zo2core.perturbation.factor_store import Learned as Learned
from zo2core.perturbation.factor_store import LearnedFactors as LearnedFactors
from zo2core.perturbation.factor_store import factor_bytes as factor_bytes
from zo2core.perturbation.factor_store import kept_bytes_a_step as kept_bytes_a_step
from zo2core.perturbation.perturbation import DensePerturbation as DensePerturbation
from zo2core.perturbation.perturbation import LowRankPerturbation as LowRankPerturbation
from zo2core.perturbation.perturbation import Perturbation as Perturbation
from zo2core.perturbation.perturbation import choose_perturbation as choose_perturbation
from zo2core.perturbation.perturbation import require_perturbation as require_perturbation
from zo2core.perturbation.stacked_model import Factors as Factors
from zo2core.perturbation.stacked_model import PerturbedParameter as PerturbedParameter
from zo2core.perturbation.stacked_model import StackedForward as StackedForward
from zo2core.perturbation.stacked_model import StackedModel as StackedModel
