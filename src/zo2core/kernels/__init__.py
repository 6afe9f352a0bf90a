"""Elementwise kernels for perturbations, updates and noise: C, Triton, and a reference in torch.

``dispatch.py`` chooses. A new kernel is a function of ``native.c`` or ``triton_kernels.py`` beside
one of ``reference.py`` with the same bits.
"""

from zo2core.kernels.dispatch import apply as apply
from zo2core.kernels.dispatch import fill as fill
from zo2core.kernels.dispatch import form as form
from zo2core.kernels.dispatch import perturb_each as perturb_each
from zo2core.kernels.programs import Draw as Draw
from zo2core.types import Distribution as Distribution
