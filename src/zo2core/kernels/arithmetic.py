"""MeZO's elementwise arithmetic: the reference that every faster kernel is compared with.

Each operation rounds to the parameter's dtype, in the association order of MeZO's own trainer; Python scalars act in the
kernel's wider type. Operations that could contract into a fused multiply-add (``alpha=``, ``addcmul``) are not used.

All tensors are 1-D, contiguous, of one dtype and, unless told otherwise, one length.

Note: Folding the shift. ``(k * z) * eps`` equals ``z * (k * eps)`` bit for bit when k is a power of two, because scaling
by k is then exact on both sides of the rounding, if k is at least 1: halving a subnormal number rounds. All shifts of MeZO's
walk (1 and -2) are such; others take the literal way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zo2core.types import Perturb, Program


def perturb(
    out: torch.Tensor, theta: torch.Tensor, z: torch.Tensor, *, shift: float, zo_eps: float, scratch: torch.Tensor
) -> None:
    """``out = theta + ((shift * z) * zo_eps)`` (MeZO, Algorithm 1, PerturbParameters).

    Args:
        out: Result; may be ``theta``, or of another dtype, to which the result is rounded once more.
        theta: Weights.
        z: Direction.
        shift: Signed multiple of ``zo_eps``.
        zo_eps: Perturbation scale.
        scratch: Overwritten; not any of the others. Where it is shorter than they are, the work is done in chunks.
    """
    length = max(scratch.numel(), 1)
    for start in range(0, theta.numel(), length):
        chunk = theta[start : start + length]
        moved = scratch[: len(chunk)]
        if folds(shift):
            torch.mul(z[start : start + length], shift * zo_eps, out=moved)
        else:
            torch.mul(z[start : start + length], shift, out=moved)
            moved.mul_(zo_eps)
        if out.dtype is theta.dtype:
            torch.add(chunk, moved, out=out[start : start + length])
        else:
            out[start : start + length].copy_(torch.add(chunk, moved, out=moved))


def folds(shift: float) -> bool:
    """Whether a shift may be multiplied with ``zo_eps`` first. See the note."""
    return abs(shift) >= 1 and math.frexp(shift)[0] in (0.5, -0.5)


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
    """``theta = theta - lr * ((g * z) + (weight_decay * theta))``; without the decay term where it is 0.

    MeZO's trainer writes the decay term for every decayed parameter, also with a decay of 0. Leaving it out gives the same
    bits: ``x + 0 * theta`` differs from ``x`` in the sign of a zero at most, which ``theta - x`` shows only if theta is -0,
    and no weight is -0 after MeZO's walk, whose last two moves have opposite signs.

    Args:
        theta: Weights, changed in place.
        z: Direction.
        projected_grad: The scalar g.
        lr: Learning rate.
        weight_decay: For this parameter.
        scratch: Overwritten; not any of the others.
        decay_scratch: Overwritten; not any of the others.
    """
    torch.mul(z, projected_grad, out=scratch)
    if weight_decay != 0:
        torch.mul(theta, weight_decay, out=decay_scratch)
        scratch.add_(decay_scratch)
    scratch.mul_(lr)
    theta.sub_(scratch)


def apply(
    theta: torch.Tensor,
    program: Program,
    zs: Sequence[torch.Tensor],
    *,
    scratch: torch.Tensor,
    decay_scratch: torch.Tensor,
) -> None:
    """Run a program's instructions on weights; a perturbation of a copy that follows is not made.

    Args:
        theta: Weights, changed in place.
        program: What to do.
        zs: Directions, one for each seed of the program.
        scratch: Overwritten; not any of the others. Where it is shorter than they are, the work is done in chunks.
        decay_scratch: As long as the scratch; overwritten; not any of the others.
    """
    length = max(scratch.numel(), 1)
    for start in range(0, theta.numel(), length):
        chunk = theta[start : start + length]
        first, second = scratch[: len(chunk)], decay_scratch[: len(chunk)]
        for move in program.instructions:
            z = zs[move.direction][start : start + length]
            if isinstance(move, Perturb):
                perturb(chunk, chunk, z, shift=move.shift, zo_eps=move.zo_eps, scratch=first)
            else:
                descend(
                    chunk,
                    z,
                    projected_grad=move.projected_grad,
                    lr=move.lr,
                    weight_decay=move.weight_decay,
                    scratch=first,
                    decay_scratch=second,
                )
