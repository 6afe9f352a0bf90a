"""Elementwise kernels of perturbation and update."""

from zo2core.kernels.arithmetic import descend as descend
from zo2core.kernels.arithmetic import perturb as perturb
