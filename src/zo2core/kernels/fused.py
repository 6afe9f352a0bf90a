"""Which kernel runs: the compiled one or Triton's, where they are there and take the tensors, else the reference.

All give the same bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from types import ModuleType

import torch

from zo2core.kernels import arithmetic, native, philox
from zo2core.kernels.philox import Distribution
from zo2core.types import Descend, Perturb, Program

_PIECE = 32768  # elements for which the reference draws at once on the CPU
_DEVICE_PIECE = 1 << 22  # and elsewhere, where launches cost more than memory


def perturb(
    out: torch.Tensor, theta: torch.Tensor, z: torch.Tensor, *, shift: float, zo_eps: float, scratch: torch.Tensor
) -> None:
    """As ``arithmetic.perturb``; the scratch may stay as it is."""
    if native.takes(out, theta, z):
        native.move(out, theta, z, Perturb(0, shift, zo_eps))
    else:
        arithmetic.perturb(out, theta, z, shift=shift, zo_eps=zo_eps, scratch=scratch)


def descend(
    theta: torch.Tensor,
    z: torch.Tensor,
    *,
    projected_grad: float,
    lr: float,
    weight_decay: float,
    scratch: torch.Tensor,
    decay_scratch: torch.Tensor,
) -> None:
    """As ``arithmetic.descend``; the scratch may stay as it is."""
    if native.takes(theta, z):
        native.move(theta, theta, z, Descend(0, projected_grad, lr, weight_decay))
        return
    arithmetic.descend(
        theta,
        z,
        projected_grad=projected_grad,
        lr=lr,
        weight_decay=weight_decay,
        scratch=scratch,
        decay_scratch=decay_scratch,
    )


def walk(
    theta: torch.Tensor,
    program: Program,
    zs: Sequence[torch.Tensor],
    *,
    scratch: torch.Tensor,
    decay_scratch: torch.Tensor,
) -> None:
    """As ``arithmetic.walk``; the scratch may stay as it is."""
    if native.takes(theta, *zs):
        native.walk(theta, program, zs)
    else:
        arithmetic.walk(theta, program, zs, scratch=scratch, decay_scratch=decay_scratch)


@lru_cache(maxsize=256)
def _followed(program: Program, then: Perturb) -> Program:
    """One object for all ranges, so that it is coded for the kernels once."""
    return Program(program.seeds, (*program.instructions, then))


@cache
def _triton() -> ModuleType | None:
    """The Triton kernels, imported when the first CUDA tensor comes; None without Triton."""
    return importlib.import_module("zo2core.kernels.triton_kernels") if find_spec("triton") else None


def fill(out: torch.Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0) -> None:
    """As ``philox.fill``."""
    if native.takes(out):
        native.fill(out, distribution, seed, parameter, start)
        return
    length = _PIECE if out.device.type == "cpu" else _DEVICE_PIECE
    for first in range(0, out.numel(), length):
        philox.fill(out[first : first + length], distribution, seed, parameter, start + first)


def walk_drawing(
    theta: torch.Tensor,
    program: Program,
    distribution: Distribution,
    parameter: int,
    start: int = 0,
    *,
    out: torch.Tensor | None = None,
    then: Perturb | None = None,
) -> None:
    """Run a program whose directions are drawn on the way, in one pass over memory.

    Args:
        theta: Weights, 1-D, contiguous, changed in place.
        program: What to do to them.
        distribution: Of z.
        parameter: Place in registration order.
        start: Element of the parameter at which ``theta`` starts.
        out: With ``then``: where ``theta + (shift * z) * zo_eps`` goes. May be ``theta``, else must not overlap it.
        then: Its direction is a place in ``program.seeds``, though the program need not use it.
    """
    own = len(program.instructions)
    whole = program if then is None else _followed(program, then)
    if native.takes(theta, *(() if out is None else (out,))):
        native.walk(theta, whole, None, out=out, own=own, distribution=distribution, parameter=parameter, start=start)
        return
    if theta.is_cuda and (kernels := _triton()) is not None and kernels.takes(theta):
        kernels.walk(theta, whole, out=out, own=own, distribution=distribution, parameter=parameter, start=start)
        return
    length = min(_PIECE if theta.device.type == "cpu" else _DEVICE_PIECE, theta.numel())
    memory = [torch.empty(length, dtype=theta.dtype, device=theta.device) for _ in range(2 + len(program.seeds))]
    for first in range(0, theta.numel(), max(length, 1)):
        piece = theta[first : first + length]
        scratch, decay_scratch, *zs = (each[: piece.numel()] for each in memory)
        for z, seed in zip(zs, program.seeds, strict=True):
            philox.fill(z, distribution, seed, parameter, start + first)
        arithmetic.walk(piece, program, zs, scratch=scratch, decay_scratch=decay_scratch)
        if then is not None:
            assert out is not None
            moved = out[first : first + length]
            z = zs[then.direction]
            arithmetic.perturb(moved, piece, z, shift=then.shift, zo_eps=then.zo_eps, scratch=scratch)
