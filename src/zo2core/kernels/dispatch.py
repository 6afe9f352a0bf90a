"""Chooses the kernel: compiled or Triton's if it is installed and supports the tensors, else the
reference.

All give the same bits. The compiled kernels are for CPU tensors of 32 and 16 bits.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from zo2core.kernels import native, parallel, reference
from zo2core.kernels.programs import Draw, table
from zo2core.types import Distribution, Perturb, Program

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the compiled kernels are installed and support these tensors."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES or native.library() is None:
        return False
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous()):
            return False
    return True


def rounds_to(*tensors: torch.Tensor | None) -> bool:
    """Whether results can be rounded to all of these tensors; None entries are skipped."""
    for tensor in tensors:
        if tensor is not None and not (
            tensor.is_cpu and tensor.dtype in DTYPES and tensor.is_contiguous()
        ):
            return False
    return True


def decodes(stored: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the compiled kernels are installed and can decode these bytes into this memory."""
    return (
        native.library() is not None
        and stored.device.type == "cpu"
        and stored.is_contiguous()
        and rounds_to(out)
    )


_DISTRIBUTIONS = {Distribution.GAUSSIAN: 0, Distribution.RADEMACHER: 1}
_PANEL = 16  # columns of a matrix that forming.c sums at once
_IN_A_PART = 1 << 15  # weights that a thread forms at once, at least


class _Direction(ctypes.Structure):
    """A row of a table's directions with the address of a z that was already drawn."""

    _fields_ = (("seed", ctypes.c_uint64), ("z", ctypes.c_void_p))


# Runs a program as ``apply`` does, with its arguments in their order.
Kernel: TypeAlias = Callable[
    [Tensor, Program, Draw | Sequence[Tensor], Tensor | None, Tensor | None], None
]


def apply(
    theta: Tensor,
    program: Program,
    z: Draw | Sequence[Tensor],
    *,
    out: Tensor | None = None,
    rounded: Tensor | None = None,
) -> None:
    """Run a program on a range of a parameter, in one pass over memory. Thread-safe.

    Args:
        theta: The range's weights, 1-D, contiguous, changed in place.
        program: Instructions to run.
        z: The range's directions, one for each seed of the program, or how they are drawn.
        out: Memory for the perturbed copy that ``program.then`` makes: ``theta`` itself, or memory
            that does not overlap it; if its dtype is another one, the copy is rounded to it once.
        rounded: Memory for a second copy of the result (``out``, or ``theta`` without it), rounded
            once to its dtype; it overlaps no other tensor.
    """
    assert (out is None) == (program.then is None)
    zs = () if isinstance(z, Draw) else z
    choose_kernel(theta, *zs, copies=(out, rounded))(theta, program, z, out, rounded)


def choose_kernel(*weights: Tensor, copies: Sequence[Tensor | None]) -> Kernel:
    """Choose the fastest kernel for tensors of these dtypes on their device. All are contiguous.

    Args:
        weights: Weights, and their directions if these are drawn before.
        copies: Memory for copies, or None.
    """
    if takes(*weights) and rounds_to(*copies):
        return _apply_compiled
    if triton_kernels(weights[0]) is not None:
        return _apply_triton
    return reference.apply


def _apply_compiled(
    theta: Tensor,
    program: Program,
    z: Draw | Sequence[Tensor],
    out: Tensor | None,
    rounded: Tensor | None,
) -> None:
    assert (out is None) == (program.then is None), "the copy has memory"
    coded = program.tables.get(theta.device) or table(program, theta.device)
    directions: object
    if isinstance(z, Draw):
        directions = coded.directions.data_ptr()
        drawn = (_DISTRIBUTIONS[z.distribution], z.parameter, z.start)
    else:
        rows = map(_Direction, program.seeds, map(Tensor.data_ptr, z))
        directions = (_Direction * len(z))(*rows)
        drawn = (0, 0, 0)
    if out is not None and out.dtype is not theta.dtype:
        assert rounded is None, "one other dtype at a time"
        rounded = out
        out = None
    in_place = len(program.instructions)
    native.functions().zo2core_walk(
        DTYPES[theta.dtype],
        theta.data_ptr(),
        None if out is None else out.data_ptr(),
        0 if rounded is None else DTYPES[rounded.dtype],
        None if rounded is None else rounded.data_ptr(),
        theta.numel(),
        coded.instructions.data_ptr(),
        in_place,
        in_place + (program.then is not None),
        directions,
        *drawn,
    )


def _apply_triton(
    theta: Tensor,
    program: Program,
    z: Draw | Sequence[Tensor],
    out: Tensor | None,
    rounded: Tensor | None,
) -> None:
    kernels = triton_kernels(theta)
    assert kernels is not None, "the kernel was chosen for another tensor"
    outs = None if out is None else [out]
    if isinstance(z, Draw):
        kernels.apply_drawing([theta], program, z.distribution, [z.parameter], z.start, outs=outs)
    else:
        kernels.apply([theta], program, [[direction] for direction in z], outs)
    if rounded is not None:
        rounded.copy_(theta if out is None else out)


def fill(
    out: Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0
) -> None:
    """Do what ``reference.fill`` does."""
    if takes(out):
        drawn = out.numel(), _DISTRIBUTIONS[distribution], seed, parameter, start
        native.functions().zo2core_fill(DTYPES[out.dtype], out.data_ptr(), *drawn)
        return
    if (kernels := triton_kernels(out)) is not None:
        kernels.fill(out, distribution, seed, parameter, start)
        return
    length = reference.chunk(out)
    for first in range(0, out.numel(), length):
        reference.fill(out[first : first + length], distribution, seed, parameter, start + first)


def perturb_each(
    theta: Tensor, perturbations: Program, distribution: Distribution, parameter: int, out: Tensor
) -> None:
    """Write one perturbed copy of the weights for each instruction, drawing its direction.

    Args:
        theta: A whole parameter, 1-D, contiguous; only read.
        perturbations: Program of ``Perturb`` instructions, one a row; a shift of 0 copies the
            weights.
        distribution: Distribution of z.
        parameter: Index of the parameter in registration order.
        out: (instructions, elements), contiguous, of any floating-point dtype, to which a row is
            rounded once.
    """
    if takes(theta) and rounds_to(out):
        coded = table(perturbations, theta.device)
        memory = (DTYPES[out.dtype], out.data_ptr(), theta.numel())
        moves = (
            coded.instructions.data_ptr(),
            len(perturbations.instructions),
            coded.directions.data_ptr(),
        )
        drawn = _DISTRIBUTIONS[distribution], parameter
        native.functions().zo2core_move_each(
            DTYPES[theta.dtype], theta.data_ptr(), *memory, *moves, *drawn
        )
        return
    for row, perturbation in zip(out, perturbations.instructions, strict=True):
        assert isinstance(perturbation, Perturb), "only perturbations make copies"
        if perturbation.shift == 0:
            row.copy_(theta)
        else:
            program = Program(
                (perturbations.seeds[perturbation.direction],),
                (),
                then=perturbation._replace(direction=0),
            )
            apply(theta, program, Draw(distribution, parameter), out=row)


def triton_kernels(tensor: Tensor) -> ModuleType | None:
    """The Triton kernels, if they support this tensor."""
    kernels = _triton_kernels() if tensor.is_cuda else None
    return kernels if kernels is not None and kernels.takes(tensor) else None


@cache
def _triton_kernels() -> ModuleType | None:
    """The Triton kernels, imported for the first CUDA tensor; None without Triton."""
    return (
        importlib.import_module("zo2core.kernels.triton_kernels") if find_spec("triton") else None
    )


def form(base: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write ``base + left right^T``, summed in float32 and rounded once.

    Products are added one after the other, so that every machine forms the same weights: a
    library's matrix product sums in an order of its own choice.

    Args:
        base: (rows, columns), contiguous, of a floating-point dtype.
        left: (rows, rank), float32.
        right: (columns, rank), of a floating-point dtype.
        out: Memory of the shape and dtype of ``base``; may be ``base``.
    """
    left = left.contiguous()
    if (kernels := triton_kernels(base)) is not None:
        kernels.form(base, left, right.float().t().contiguous(), out)
    elif takes(base, out):
        columns, rank = right.shape
        padded = torch.nn.functional.pad(right.float(), (0, 0, 0, -columns % _PANEL))
        # forming.c's layout
        panels = padded.view(len(padded) // _PANEL, _PANEL, rank).transpose(1, 2).contiguous()

        def run(first: int, last: int) -> None:
            rows = (matrix[first:last].data_ptr() for matrix in (base, out, left))
            native.functions().zo2core_form(
                DTYPES[base.dtype], *rows, panels.data_ptr(), last - first, columns, rank
            )

        parallel.run_in_parts(run, len(base), base.numel() // _IN_A_PART)
    else:
        reference.form(base, left, right, out)
