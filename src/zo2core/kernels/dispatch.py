"""Chooses the kernel: compiled or Triton's if it is installed and supports the tensors, else the reference.

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

_CHUNK = 32768  # elements that the reference draws at a time on the CPU
_DEVICE_CHUNK = 1 << 22  # the same on other devices, where launches cost more than memory


def perturb(
    out: torch.Tensor,
    theta: torch.Tensor,
    z: torch.Tensor,
    by: Perturb,
    *,
    scratch: torch.Tensor,
    rounded: torch.Tensor | None = None,
) -> None:
    """Do what ``arithmetic.perturb`` does; ``rounded`` gets a second copy of the result, rounded once to its dtype."""
    if native.takes(theta, z) and native.rounds_to(out, rounded):
        native.perturb(out, theta, z, by, rounded=rounded)
        return
    if (kernels := triton_kernels(theta)) is not None:
        kernels.perturb([out], [theta], [z], by)
    else:
        arithmetic.perturb(out, theta, z, by, scratch=scratch)
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
    """Do what ``arithmetic.apply`` does."""
    if native.takes(theta, *zs):
        native.apply(theta, program, zs)
    elif (kernels := triton_kernels(theta)) is not None:
        kernels.apply([theta], program, [[z] for z in zs])
    else:
        arithmetic.apply(theta, program, zs, scratch=scratch, decay_scratch=decay_scratch)


def fill(out: torch.Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0) -> None:
    """Do what ``philox.fill`` does."""
    if native.takes(out):
        native.fill(out, distribution, seed, parameter, start)
        return
    if (kernels := triton_kernels(out)) is not None:
        kernels.fill(out, distribution, seed, parameter, start)
        return
    length = _chunk(out)
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
    """Draw a program's directions and run it on a range of a parameter, in one pass over memory. Thread-safe.

    Args:
        theta: The range's weights, 1-D, contiguous, changed in place.
        program: Instructions to run.
        distribution: Distribution of z.
        parameter: Index of the parameter in registration order.
        start: Element of the parameter at which ``theta`` starts.
        out: Memory for the perturbed copy that ``program.then`` makes: ``theta`` itself, or memory that does not overlap it;
            if its dtype is another one, the copy is rounded to it once.
        rounded: Memory for a second copy of the result (``out``, or ``theta`` without it), rounded once to its dtype; it
            overlaps no other tensor.
    """
    assert (out is None) == (program.then is None)
    if native.takes(theta) and native.rounds_to(out, rounded):
        native.apply_drawing(theta, program, distribution, parameter, start, out=out, rounded=rounded)
        return
    if (kernels := triton_kernels(theta)) is not None:
        outs = None if out is None else [out]
        kernels.apply_drawing([theta], program, distribution, [parameter], start, outs=outs)
    else:
        _apply_drawing(theta, program, distribution, parameter, start, out=out)
    if rounded is not None:
        rounded.copy_(theta if out is None else out)


def perturb_each(
    theta: torch.Tensor, perturbations: Program, distribution: Distribution, parameter: int, out: torch.Tensor
) -> None:
    """Write one perturbed copy of the weights for each instruction, drawing its direction.

    Args:
        theta: A whole parameter, 1-D, contiguous; only read.
        perturbations: Program of ``Perturb`` instructions, one a row; a shift of 0 copies the weights.
        distribution: Distribution of z.
        parameter: Index of the parameter in registration order.
        out: (instructions, elements), contiguous, of any floating-point dtype, to which a row is rounded once.
    """
    if native.takes(theta) and native.rounds_to(out):
        native.perturb_each(theta, perturbations, distribution, parameter, out)
        return
    for row, perturbation in zip(out, perturbations.instructions, strict=True):
        assert isinstance(perturbation, Perturb), "only perturbations make copies"
        if perturbation.shift == 0:
            row.copy_(theta)
        else:
            program = Program((perturbations.seeds[perturbation.direction],), (), then=perturbation._replace(direction=0))
            apply_drawing(theta, program, distribution, parameter, out=row)


def _chunk(tensor: torch.Tensor) -> int:
    """Elements that the reference draws at a time on a tensor's device."""
    return _CHUNK if tensor.is_cpu else _DEVICE_CHUNK


def triton_kernels(tensor: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, if they support this tensor."""
    kernels = _triton_kernels() if tensor.is_cuda else None
    return kernels if kernels is not None and kernels.takes(tensor) else None


@cache
def _triton_kernels() -> ModuleType | None:
    """The Triton kernels, imported for the first CUDA tensor; None without Triton."""
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
    """Draw all directions of a chunk, then run the program on it. This is the reference."""
    length = min(_chunk(theta), theta.numel())
    memory = [torch.empty(length, dtype=theta.dtype, device=theta.device) for _ in range(2 + len(program.seeds))]
    for first in range(0, theta.numel(), max(length, 1)):
        chunk = theta[first : first + length]
        scratch, decay_scratch, *zs = (buffer[: chunk.numel()] for buffer in memory)
        for z, seed in zip(zs, program.seeds, strict=True):
            philox.fill(z, distribution, seed, parameter, start + first)
        arithmetic.apply(chunk, program, zs, scratch=scratch, decay_scratch=decay_scratch)
        if program.then is not None and out is not None:
            copy, z = out[first : first + length], zs[program.then.direction]
            arithmetic.perturb(copy, chunk, z, program.then, scratch=scratch)
