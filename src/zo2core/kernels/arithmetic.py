"""MeZO's elementwise arithmetic: the reference that every faster kernel is compared with.

Each operation rounds to the parameter's dtype, in the association order of MeZO's own trainer; Python scalars act in the
kernel's wider type. Operations that could contract into a fused multiply-add (``alpha=``, ``addcmul``) are not used.

All tensors are 1-D and contiguous and, unless stated otherwise, have the same dtype and length.

Note: Folding the shift. ``(k * z) * eps`` equals ``z * (k * eps)`` bit for bit when k is a power of two, because scaling
by k is then exact on both sides of the rounding, if k is at least 1: halving a subnormal number rounds. MeZO's shifts, 1 and
-2, are folded; other shifts are multiplied in two steps.

Note: Tables. Compiled kernels read a program as two tables, made once for each device. A row of ``instructions`` is five
32-bit words, native.c's ``struct instruction``: kind, direction, and three float32 scalars, which depend on the kind:

    0  perturb             shift, zo_eps, -
    1  perturb, folded     shift * zo_eps, -, -        see the note on folding
    2  descend             projected_grad, lr, weight_decay

A row of ``directions`` is two 64-bit words, native.c's ``struct direction``: the seed, and 0 for a z that the kernel draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from zo2core.types import Descend, Perturb, Program, Table, aligned

_PERTURB, _PERTURB_FOLDED, _DESCEND = range(3)  # kinds of instructions


def perturb(out: Tensor, theta: Tensor, z: Tensor, by: Perturb, *, scratch: Tensor) -> None:
    """``out = theta + ((shift * z) * zo_eps)`` (MeZO, Algorithm 1, PerturbParameters).

    Args:
        out: Result; may be ``theta``, or of another dtype, to which the result is rounded once more.
        theta: Weights.
        z: Direction.
        by: Shift and scale; its direction is not used.
        scratch: Memory to overwrite, which overlaps no other tensor. If it is shorter, the work is done in chunks.
    """
    length = max(scratch.numel(), 1)
    for start in range(0, theta.numel(), length):
        chunk = theta[start : start + length]
        delta = scratch[: len(chunk)]
        if folds(by.shift):
            torch.mul(z[start : start + length], by.shift * by.zo_eps, out=delta)
        else:
            torch.mul(z[start : start + length], by.shift, out=delta)
            delta.mul_(by.zo_eps)
        if out.dtype is theta.dtype:
            torch.add(chunk, delta, out=out[start : start + length])
        else:
            out[start : start + length].copy_(torch.add(chunk, delta, out=delta))


def folds(shift: float) -> bool:
    """Whether a shift may be multiplied with ``zo_eps`` first. See the note on folding."""
    return abs(shift) >= 1 and math.frexp(shift)[0] in (0.5, -0.5)


def descend(theta: Tensor, z: Tensor, by: Descend, *, scratch: Tensor, decay_scratch: Tensor) -> None:
    """``theta = theta - lr * ((g * z) + (weight_decay * theta))``; without the decay term where it is 0.

    MeZO's trainer writes the decay term for every decayed parameter, also with a decay of 0. Leaving it out gives the same
    bits: ``x + 0 * theta`` differs from ``x`` at most in the sign of a zero, which matters to ``theta - x`` only if theta is
    -0. No weight is -0 after MeZO's perturbations, the last two of which have opposite signs.

    Args:
        theta: Weights, changed in place.
        z: Direction.
        by: The scalar g, learning rate and weight decay; its direction is not used.
        scratch: Memory to overwrite, which overlaps no other tensor.
        decay_scratch: A second such memory.
    """
    torch.mul(z, by.projected_grad, out=scratch)
    if by.weight_decay != 0:
        torch.mul(theta, by.weight_decay, out=decay_scratch)
        scratch.add_(decay_scratch)
    scratch.mul_(by.lr)
    theta.sub_(scratch)


def apply(theta: Tensor, program: Program, zs: Sequence[Tensor], *, scratch: Tensor, decay_scratch: Tensor) -> None:
    """Run a program's instructions on weights. Its ``then``, the perturbed copy, is not made.

    Args:
        theta: Weights, changed in place.
        program: Instructions to run.
        zs: Directions, one for each seed of the program.
        scratch: Memory to overwrite, which overlaps no other tensor. If it is shorter, the work is done in chunks.
        decay_scratch: A second such memory, as long as the first.
    """
    length = max(scratch.numel(), 1)
    for start in range(0, theta.numel(), length):
        chunk = theta[start : start + length]
        first, second = scratch[: len(chunk)], decay_scratch[: len(chunk)]
        for instruction in program.instructions:
            z = zs[instruction.direction][start : start + length]
            if isinstance(instruction, Perturb):
                perturb(chunk, chunk, z, instruction, scratch=first)
            else:
                descend(chunk, z, instruction, scratch=first, decay_scratch=second)


def _row(instruction: Perturb | Descend) -> tuple[int, float, float, float]:
    """Code one instruction, without its direction."""
    if not isinstance(instruction, Perturb):
        return _DESCEND, instruction.projected_grad, instruction.lr, instruction.weight_decay
    if folds(instruction.shift):
        return _PERTURB_FOLDED, instruction.shift * instruction.zo_eps, 0.0, 0.0
    return _PERTURB, instruction.shift, instruction.zo_eps, 0.0


@lru_cache(maxsize=256)
def copying(by: Perturb) -> Program:
    """The program of one perturbed copy. Cached: coding it takes as long as the pass over a small parameter."""
    return Program((0,), (), then=by._replace(direction=0))


def table(program: Program, device: torch.device) -> Table:
    """The program in a device's memory, with ``then`` as its last instruction. Made at the first call."""
    if device not in program.tables:
        program.tables.setdefault(device, _coded(program, device))
    return program.tables[device]


def _coded(program: Program, device: torch.device) -> Table:
    """Code a program and copy it to the device. The host does not wait for the copy."""
    run = program.instructions if program.then is None else (*program.instructions, program.then)
    rows = [_row(instruction) for instruction in run]
    instructions = torch.empty((len(rows), 5), dtype=torch.int32)
    instructions[:, 0] = torch.tensor([kind for kind, *_ in rows], dtype=torch.int32)
    instructions[:, 1] = torch.tensor([instruction.direction for instruction in run], dtype=torch.int32)
    scalars = torch.tensor([coded[1:] for coded in rows], dtype=torch.float64).view(len(rows), 3)
    instructions[:, 2:] = scalars.to(torch.float32).view(torch.int32)  # rounded as C rounds a double
    directions = torch.tensor([(seed, 0) for seed in program.seeds], dtype=torch.int64)
    # One copy for both. Both are aligned alike: Triton would compile again for another alignment.
    begin, end = aligned(instructions.nbytes), aligned(instructions.nbytes) + directions.nbytes
    packed = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed[: instructions.nbytes] = instructions.view(-1).view(torch.uint8)
    packed[begin:] = directions.view(-1).view(torch.uint8)
    on_device = packed.to(device, non_blocking=True)
    words, seeds = on_device[: instructions.nbytes], on_device[begin:].view(torch.int64)
    return Table(words.view(torch.int32).view(-1, 5), words.view(torch.float32).view(-1, 5), seeds.view(-1, 2))
