"""Elementwise kernels for perturbations, updates and noise. reference.py has the reference."""

from zo2core.kernels.dispatch import apply as apply
from zo2core.kernels.dispatch import fill as fill
from zo2core.kernels.dispatch import form as form
from zo2core.kernels.dispatch import perturb_each as perturb_each
from zo2core.kernels.programs import Draw as Draw
from zo2core.types import Distribution as Distribution
