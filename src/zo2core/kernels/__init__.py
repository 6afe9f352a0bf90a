"""Elementwise kernels: perturbation, update, noise. The reference is in arithmetic.py and philox.py."""

from zo2core.kernels.fused import descend as descend
from zo2core.kernels.fused import fill as fill
from zo2core.kernels.fused import perturb as perturb
from zo2core.kernels.fused import walk as walk
from zo2core.kernels.fused import walk_drawing as walk_drawing
from zo2core.kernels.philox import Distribution as Distribution
