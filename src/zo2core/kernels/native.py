"""The compiled kernels of native.c and twister.c, through ctypes: CPU tensors of 32 and 16 bits.

The library is built when the package is installed, and only then. Where that was not possible everything runs on the
reference, with the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from zo2core.kernels.arithmetic import folds
from zo2core.kernels.philox import Distribution
from zo2core.types import Descend, Perturb, Program

_REVISION = 2  # of native.c and twister.c
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DISTRIBUTIONS = {Distribution.GAUSSIAN: 0, Distribution.RADEMACHER: 1}
_PERTURB, _PERTURB_FOLDED, _DESCEND = range(3)


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("direction", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("rate", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
    )


class _Direction(ctypes.Structure):
    _fields_ = (("seed", ctypes.c_uint64), ("z", ctypes.c_void_p))


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where they have not been built, or from another revision of their source."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if not path.exists():
            continue
        loaded = ctypes.CDLL(str(path))
        if loaded.zo2core_revision() != _REVISION:
            return None
        size, pointer, u32, u64 = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
        loaded.zo2core_fill.argtypes = (ctypes.c_int, pointer, u64, ctypes.c_int, u64, u32, u64)
        loaded.zo2core_fill.restype = None
        walk = (ctypes.c_int, pointer, pointer, u64, pointer, size, size, pointer, ctypes.c_int, u32, u64)
        loaded.zo2core_walk.argtypes = walk
        loaded.zo2core_walk.restype = None
        real = ctypes.c_float
        move = (ctypes.c_int, pointer, pointer, pointer, u64, ctypes.c_int32, real, real, real)
        loaded.zo2core_move.argtypes = move
        loaded.zo2core_move.restype = None
        loaded.zo2core_twister_size.restype = size
        for function, arguments in (
            (loaded.zo2core_twister_seed, (pointer, u64)),
            (loaded.zo2core_twister_fill, (pointer, ctypes.c_int, pointer, u64)),
            (loaded.zo2core_twister_skip, (pointer, ctypes.c_int, u64)),
        ):
            function.argtypes, function.restype = arguments, None
        return loaded
    return None


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the compiled kernels are there and work on these tensors."""
    first = tensors[0]
    return (
        library() is not None
        and first.dtype in DTYPES
        and all(t.device.type == "cpu" and t.dtype is first.dtype and t.is_contiguous() for t in tensors)
    )


def fill(out: torch.Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0) -> None:
    """As ``philox.fill``."""
    loaded = library()
    assert loaded is not None
    loaded.zo2core_fill(DTYPES[out.dtype], out.data_ptr(), out.numel(), _DISTRIBUTIONS[distribution], seed, parameter, start)


def move(out: torch.Tensor, theta: torch.Tensor, z: torch.Tensor, instruction: Perturb | Descend) -> None:
    """One instruction along a given direction: a program's set-up would take as long as the pass over a small piece."""
    loaded = library()
    assert loaded is not None
    coded = _coded(instruction)
    loaded.zo2core_move(DTYPES[theta.dtype], theta.data_ptr(), out.data_ptr(), z.data_ptr(), theta.numel(), *coded)


def walk(
    theta: torch.Tensor,
    program: Program,
    zs: Sequence[torch.Tensor] | None,
    *,
    out: torch.Tensor | None = None,
    own: int | None = None,
    distribution: Distribution = Distribution.GAUSSIAN,
    parameter: int = 0,
    start: int = 0,
) -> None:
    """Run a program on weights, and the end of it on a copy.

    Args:
        theta: Weights, changed in place by the first ``own`` instructions.
        program: What to do.
        zs: Its directions; None draws them.
        out: Where the result of all the others goes; may be ``theta``.
        own: How many instructions are theta's own; None: all.
        distribution: Of drawn directions.
        parameter: Place in registration order, of drawn directions.
        start: Element of the parameter at which ``theta`` starts, of drawn directions.
    """
    loaded = library()
    assert loaded is not None
    instructions, directions = _compiled(program)
    if zs is not None:
        directions = (_Direction * len(zs))(*[_Direction(0, z.data_ptr()) for z in zs])
    length = len(program.instructions)
    loaded.zo2core_walk(
        DTYPES[theta.dtype],
        theta.data_ptr(),
        None if out is None else out.data_ptr(),
        theta.numel(),
        instructions,
        length if own is None else own,
        length,
        directions,
        _DISTRIBUTIONS[distribution],
        parameter,
        start,
    )


@lru_cache(maxsize=256)
def _compiled(program: Program) -> tuple[ctypes.Array[_Instruction], ctypes.Array[_Direction]]:
    instructions = (_Instruction * len(program.instructions))()
    for to, instruction in zip(instructions, program.instructions, strict=True):
        to.direction = instruction.direction
        to.kind, to.scale, to.rate, to.weight_decay = _coded(instruction)
    return instructions, (_Direction * len(program.seeds))(*[_Direction(seed, None) for seed in program.seeds])


def _coded(instruction: Perturb | Descend) -> tuple[int, float, float, float]:
    """Kind, scale, rate, weight decay."""
    if not isinstance(instruction, Perturb):
        return _DESCEND, instruction.projected_grad, instruction.lr, instruction.weight_decay
    if folds(instruction.shift):
        return _PERTURB_FOLDED, instruction.shift * instruction.zo_eps, 0.0, 0.0
    return _PERTURB, instruction.shift, instruction.zo_eps, 0.0
