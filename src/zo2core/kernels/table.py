"""A program in the form that compiled kernels read: two tables, made once for each device.

A row of ``instructions`` is five 32-bit words, native.c's ``struct instruction``: kind, direction, and three float32
scalars, which depend on the kind:

    0  perturb             shift, zo_eps, -
    1  perturb, folded     shift * zo_eps, -, -        see the note on folding in arithmetic.py
    2  descend             projected_grad, lr, weight_decay

A row of ``directions`` is two 64-bit words, native.c's ``struct direction``: the seed, and 0 for a z that the kernel draws.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zo2core.kernels.arithmetic import folds
from zo2core.types import Descend, Perturb, Program, Table, aligned

_PERTURB, _PERTURB_FOLDED, _DESCEND = range(3)


class Row(NamedTuple):
    """One instruction, without its direction."""

    kind: int
    scale: float
    rate: float
    weight_decay: float


def row(instruction: Perturb | Descend) -> Row:
    """Code one instruction."""
    if not isinstance(instruction, Perturb):
        return Row(_DESCEND, instruction.projected_grad, instruction.lr, instruction.weight_decay)
    if folds(instruction.shift):
        return Row(_PERTURB_FOLDED, instruction.shift * instruction.zo_eps, 0.0, 0.0)
    return Row(_PERTURB, instruction.shift, instruction.zo_eps, 0.0)


def table(program: Program, device: torch.device) -> Table:
    """The program in a device's memory, with ``then`` as its last instruction. Made at the first call."""
    cached = program.tables.get(device)
    return program.tables.setdefault(device, _coded(program, device)) if cached is None else cached


def _coded(program: Program, device: torch.device) -> Table:
    """Code a program and copy it to the device. The host does not wait for the copy."""
    program_instructions = program.instructions if program.then is None else (*program.instructions, program.then)
    rows = [row(instruction) for instruction in program_instructions]
    instructions = torch.empty((len(rows), 5), dtype=torch.int32)
    instructions[:, 0] = torch.tensor([coded.kind for coded in rows], dtype=torch.int32)
    instructions[:, 1] = torch.tensor([instruction.direction for instruction in program_instructions], dtype=torch.int32)
    scalars = torch.tensor([coded[1:] for coded in rows], dtype=torch.float64).view(len(rows), 3)
    instructions[:, 2:] = scalars.to(torch.float32).view(torch.int32)  # rounded as C rounds a double
    directions = torch.tensor([(seed, 0) for seed in program.seeds], dtype=torch.int64)
    # One copy for both. Both are aligned alike: Triton would compile again for another alignment.
    begin, end = aligned(instructions.nbytes), aligned(instructions.nbytes) + directions.nbytes
    packed = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed[: instructions.nbytes] = instructions.view(-1).view(torch.uint8)
    packed[begin:] = directions.view(-1).view(torch.uint8)
    on_device = packed.to(device, non_blocking=True)
    words = on_device[: instructions.nbytes]
    return Table(
        words.view(torch.int32).view(-1, 5),
        words.view(torch.float32).view(-1, 5),
        on_device[begin:].view(torch.int64).view(-1, 2),
    )
