"""Chooses the kernel: compiled or Triton's if it is installed and supports the tensors, else the reference.

All give the same bits.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from zo2core.kernels import native, reference
from zo2core.kernels.native import DTYPES
from zo2core.types import Distribution, Perturb, Program

_CHUNK = 32768  # elements that the reference draws at a time on the CPU
_DEVICE_CHUNK = 1 << 22  # the same on other devices, where launches cost more than memory
_DISTRIBUTIONS = {Distribution.GAUSSIAN: 0, Distribution.RADEMACHER: 1}
_PANEL = 16  # columns of a matrix that forming.c sums at once
_TWO_THREADS = 1 << 16  # weights of a matrix from which a second thread pays


class _Direction(ctypes.Structure):
    """A row of a table's directions with the address of a z that was already drawn."""

    _fields_ = (("seed", ctypes.c_uint64), ("z", ctypes.c_void_p))


def perturb(out: Tensor, theta: Tensor, z: Tensor, by: Perturb, *, scratch: Tensor, rounded: Tensor | None = None) -> None:
    """Do what ``reference.perturb`` does; ``rounded`` gets a second copy of the result, rounded once to its dtype."""
    if native.takes(theta, z) and native.rounds_to(out, rounded):
        _walk(theta, reference.copying(by), _given([z]), (0, 0, 0), out, rounded)
        return
    if (kernels := triton_kernels(theta)) is not None:
        kernels.perturb([out], [theta], [z], by)
    else:
        reference.perturb(out, theta, z, by, scratch=scratch)
    if rounded is not None:
        rounded.copy_(out)


def apply(theta: Tensor, program: Program, zs: Sequence[Tensor], *, scratch: Tensor, decay_scratch: Tensor) -> None:
    """Do what ``reference.apply`` does."""
    if native.takes(theta, *zs):
        _walk(theta, program, _given(zs), (0, 0, 0))
    elif (kernels := triton_kernels(theta)) is not None:
        kernels.apply([theta], program, [[z] for z in zs])
    else:
        reference.apply(theta, program, zs, scratch=scratch, decay_scratch=decay_scratch)


def fill(out: Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0) -> None:
    """Do what ``reference.fill`` does."""
    if native.takes(out):
        drawn = out.numel(), _DISTRIBUTIONS[distribution], seed, parameter, start
        native.functions().zo2core_fill(DTYPES[out.dtype], out.data_ptr(), *drawn)
        return
    if (kernels := triton_kernels(out)) is not None:
        kernels.fill(out, distribution, seed, parameter, start)
        return
    length = _chunk(out)
    for first in range(0, out.numel(), length):
        reference.fill(out[first : first + length], distribution, seed, parameter, start + first)


def apply_drawing(
    theta: Tensor,
    program: Program,
    distribution: Distribution,
    parameter: int,
    start: int = 0,
    *,
    out: Tensor | None = None,
    rounded: Tensor | None = None,
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
        directions = reference.table(program, theta.device).directions.data_ptr()
        _walk(theta, program, directions, (_DISTRIBUTIONS[distribution], parameter, start), out, rounded)
        return
    if (kernels := triton_kernels(theta)) is not None:
        outs = None if out is None else [out]
        kernels.apply_drawing([theta], program, distribution, [parameter], start, outs=outs)
    else:  # the reference draws all directions of a chunk, then runs the program on it
        length = min(_chunk(theta), theta.numel())
        memory = [torch.empty(length, dtype=theta.dtype, device=theta.device) for _ in range(2 + len(program.seeds))]
        for first in range(0, theta.numel(), max(length, 1)):
            chunk = theta[first : first + length]
            scratch, decay_scratch, *zs = (buffer[: chunk.numel()] for buffer in memory)
            for z, seed in zip(zs, program.seeds, strict=True):
                reference.fill(z, distribution, seed, parameter, start + first)
            reference.apply(chunk, program, zs, scratch=scratch, decay_scratch=decay_scratch)
            if program.then is not None and out is not None:
                copy, z = out[first : first + length], zs[program.then.direction]
                reference.perturb(copy, chunk, z, program.then, scratch=scratch)
    if rounded is not None:
        rounded.copy_(theta if out is None else out)


def perturb_each(theta: Tensor, perturbations: Program, distribution: Distribution, parameter: int, out: Tensor) -> None:
    """Write one perturbed copy of the weights for each instruction, drawing its direction.

    Args:
        theta: A whole parameter, 1-D, contiguous; only read.
        perturbations: Program of ``Perturb`` instructions, one a row; a shift of 0 copies the weights.
        distribution: Distribution of z.
        parameter: Index of the parameter in registration order.
        out: (instructions, elements), contiguous, of any floating-point dtype, to which a row is rounded once.
    """
    if native.takes(theta) and native.rounds_to(out):
        coded, memory = reference.table(perturbations, theta.device), (DTYPES[out.dtype], out.data_ptr(), theta.numel())
        moves = coded.instructions.data_ptr(), len(perturbations.instructions), coded.directions.data_ptr()
        drawn = _DISTRIBUTIONS[distribution], parameter
        native.functions().zo2core_move_each(DTYPES[theta.dtype], theta.data_ptr(), *memory, *moves, *drawn)
        return
    for row, perturbation in zip(out, perturbations.instructions, strict=True):
        assert isinstance(perturbation, Perturb), "only perturbations make copies"
        if perturbation.shift == 0:
            row.copy_(theta)
        else:
            program = Program((perturbations.seeds[perturbation.direction],), (), then=perturbation._replace(direction=0))
            apply_drawing(theta, program, distribution, parameter, out=row)


def _walk(
    theta: Tensor,
    program: Program,
    directions: object,
    drawn: tuple[int, int, int],  # distribution, parameter and start: of no effect where z is given
    out: Tensor | None = None,
    rounded: Tensor | None = None,
) -> None:
    """Run a program on host memory with the compiled kernels, with its ``then`` where there is memory for that copy."""
    coded, in_place = reference.table(program, theta.device).instructions.data_ptr(), len(program.instructions)
    memory = DTYPES[theta.dtype], theta.data_ptr(), *_results(theta, out, rounded), theta.numel()
    run = coded, in_place, in_place + (out is not None), directions
    native.functions().zo2core_walk(*memory, *run, *drawn)


def _given(zs: Sequence[Tensor]) -> object:
    """Directions that were already drawn."""
    return (_Direction * len(zs))(*[_Direction(0, z.data_ptr()) for z in zs])


def _results(theta: Tensor, out: Tensor | None, rounded: Tensor | None) -> tuple[int | None, int, int | None]:
    """A kernel's output arguments: address of an unrounded output, and dtype and address of a rounded one."""
    if out is not None and out.dtype is not theta.dtype:
        assert rounded is None, "one other dtype at a time"
        out, rounded = None, out
    unrounded = None if out is None else out.data_ptr()
    return (unrounded, 0, None) if rounded is None else (unrounded, DTYPES[rounded.dtype], rounded.data_ptr())


def _chunk(tensor: Tensor) -> int:
    """Elements that the reference draws at a time on a tensor's device."""
    return _CHUNK if tensor.is_cpu else _DEVICE_CHUNK


def triton_kernels(tensor: Tensor) -> ModuleType | None:
    """The Triton kernels, if they support this tensor."""
    kernels = _triton_kernels() if tensor.is_cuda else None
    return kernels if kernels is not None and kernels.takes(tensor) else None


@cache
def _triton_kernels() -> ModuleType | None:
    """The Triton kernels, imported for the first CUDA tensor; None without Triton."""
    return importlib.import_module("zo2core.kernels.triton_kernels") if find_spec("triton") else None


def form(base: Tensor, left: Tensor, right: Tensor, out: Tensor, helper: Executor | None = None) -> None:
    """Write ``base + left right^T``, summed in float32 and rounded once.

    Products are added one after the other, so that every machine forms the same weights: a library's matrix product sums in
    an order of its own choice.

    Args:
        base: (rows, columns), contiguous, of a floating-point dtype.
        left: (rows, rank), float32.
        right: (columns, rank), of a floating-point dtype.
        out: Memory of the shape and dtype of ``base``; may be ``base``.
        helper: Runs half of the work in parallel if compiled kernels do it.
    """
    left = left.contiguous()
    if (kernels := triton_kernels(base)) is not None:
        kernels.form(base, left, right.float().t().contiguous(), out)
    elif native.takes(base, out):
        columns, rank = right.shape
        padded = torch.nn.functional.pad(right.float(), (0, 0, 0, -columns % _PANEL))
        panels = padded.view(len(padded) // _PANEL, _PANEL, rank).transpose(1, 2).contiguous()  # forming.c's layout

        def run(first: int, last: int) -> None:
            rows = (matrix[first:last].data_ptr() for matrix in (base, out, left))
            native.functions().zo2core_form(DTYPES[base.dtype], *rows, panels.data_ptr(), last - first, columns, rank)

        native.run_in_halves(run, len(base), None if base.numel() < _TWO_THREADS else helper)
    else:
        reference.form(base, left, right, out)
