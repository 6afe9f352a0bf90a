"""Which kernel runs: the compiled one or Triton's where it is installed and takes the tensors, else the reference.

All give the same bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from zo2core.kernels import arithmetic, native, philox
from zo2core.types import Distribution, Perturb, Program

_CHUNK = 32768  # elements for which the reference draws at once on the CPU
_DEVICE_CHUNK = 1 << 22  # and elsewhere, where launches cost more than memory


def perturb(
    out: torch.Tensor,
    theta: torch.Tensor,
    z: torch.Tensor,
    *,
    shift: float,
    zo_eps: float,
    scratch: torch.Tensor,
    rounded: torch.Tensor | None = None,
) -> None:
    """As ``arithmetic.perturb``; scratch memory may be left untouched.

    Args:
        out: As there; may be of another dtype than the weights, to which the result is rounded once.
        theta: As there.
        z: As there.
        shift: As there.
        zo_eps: As there.
        scratch: As there.
        rounded: Where the result goes as well, rounded once to this memory's dtype; not any of the others.
    """
    if native.takes(theta, z) and native.rounds_to(out, rounded):
        native.perturb(out, theta, z, shift=shift, zo_eps=zo_eps, rounded=rounded)
        return
    if (kernels := triton_kernels(theta)) is not None:
        kernels.perturb(out, theta, z, shift=shift, zo_eps=zo_eps)
    else:
        arithmetic.perturb(out, theta, z, shift=shift, zo_eps=zo_eps, scratch=scratch)
    if rounded is not None:
        rounded.copy_(out)


def apply(
    theta: torch.Tensor,
    program: Program,
    zs: Sequence[torch.Tensor],
    *,
    scratch: torch.Tensor,
    decay_scratch: torch.Tensor,
) -> None:
    """As ``arithmetic.apply``; scratch memory may be left untouched."""
    if native.takes(theta, *zs):
        native.apply(theta, program, zs)
    elif (kernels := triton_kernels(theta)) is not None:
        kernels.apply(theta, program, zs)
    else:
        arithmetic.apply(theta, program, zs, scratch=scratch, decay_scratch=decay_scratch)


def fill(out: torch.Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0) -> None:
    """As ``philox.fill``."""
    if native.takes(out):
        native.fill(out, distribution, seed, parameter, start)
        return
    if (kernels := triton_kernels(out)) is not None:
        kernels.fill(out, distribution, seed, parameter, start)
        return
    length = _CHUNK if out.device.type == "cpu" else _DEVICE_CHUNK
    for first in range(0, out.numel(), length):
        philox.fill(out[first : first + length], distribution, seed, parameter, start + first)


def apply_drawing(
    theta: torch.Tensor,
    program: Program,
    distribution: Distribution,
    parameter: int,
    start: int = 0,
    *,
    out: torch.Tensor | None = None,
    rounded: torch.Tensor | None = None,
) -> None:
    """Run a program on a range of a parameter, drawing its directions on the way, in one pass over memory.

    May be called from several threads.

    Args:
        theta: The range's weights, 1-D, contiguous, changed in place.
        program: What to do to them.
        distribution: Distribution of z.
        parameter: The parameter's place in registration order.
        start: Element of the parameter at which ``theta`` starts.
        out: Where the perturbed copy goes, for a program that makes one. May be ``theta``, else must not overlap it; may be
            of another dtype, to which the copy is rounded once.
        rounded: Where the copy, or for a program that makes none the weights, go as well, rounded once to this memory's
            dtype; not any of the others.
    """
    assert (out is None) == (program.then is None)
    if native.takes(theta) and native.rounds_to(out, rounded):
        native.apply_drawing(theta, program, distribution, parameter, start, out=out, rounded=rounded)
        return
    if (kernels := triton_kernels(theta)) is not None:
        kernels.apply_drawing(theta, program, distribution, parameter, start, out=out)
    else:
        _apply_drawing(theta, program, distribution, parameter, start, out=out)
    if rounded is not None:
        rounded.copy_(theta if out is None else out)


def move_each(theta: torch.Tensor, moves: Program, distribution: Distribution, parameter: int, out: torch.Tensor) -> None:
    """Write weights as each of several moves by itself leaves them, drawing directions on the way.

    Args:
        theta: The whole of a parameter, 1-D, contiguous; only read.
        moves: Program with one perturbation for each row of ``out``; a shift of 0 changes nothing.
        distribution: Distribution of z.
        parameter: The parameter's place in registration order.
        out: (moves, elements), contiguous, of any floating-point dtype, to which a row is rounded once.
    """
    if native.takes(theta) and native.rounds_to(out):
        native.move_each(theta, moves, distribution, parameter, out)
        return
    for row, move in zip(out, moves.instructions, strict=True):
        assert isinstance(move, Perturb), "other moves have no row of their own"
        if move.shift == 0:
            row.copy_(theta)
        else:
            alone = Program((moves.seeds[move.direction],), (), then=move._replace(direction=0))
            apply_drawing(theta, alone, distribution, parameter, out=row)


def triton_kernels(tensor: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, if they take this tensor."""
    kernels = _triton_kernels() if tensor.is_cuda else None
    return kernels if kernels is not None and kernels.takes(tensor) else None


@cache
def _triton_kernels() -> ModuleType | None:
    """Imported when the first CUDA tensor comes; None without Triton."""
    return importlib.import_module("zo2core.kernels.triton_kernels") if find_spec("triton") else None


def _apply_drawing(
    theta: torch.Tensor,
    program: Program,
    distribution: Distribution,
    parameter: int,
    start: int,
    *,
    out: torch.Tensor | None,
) -> None:
    """The reference: draw all directions of a chunk, then run the program on it."""
    length = min(_CHUNK if theta.device.type == "cpu" else _DEVICE_CHUNK, theta.numel())
    memory = [torch.empty(length, dtype=theta.dtype, device=theta.device) for _ in range(2 + len(program.seeds))]
    for first in range(0, theta.numel(), max(length, 1)):
        chunk = theta[first : first + length]
        scratch, decay_scratch, *zs = (buffer[: chunk.numel()] for buffer in memory)
        for z, seed in zip(zs, program.seeds, strict=True):
            philox.fill(z, distribution, seed, parameter, start + first)
        arithmetic.apply(chunk, program, zs, scratch=scratch, decay_scratch=decay_scratch)
        if program.then is not None and out is not None:
            copy, z, shift = out[first : first + length], zs[program.then.direction], program.then.shift
            arithmetic.perturb(copy, chunk, z, shift=shift, zo_eps=program.then.zo_eps, scratch=scratch)
