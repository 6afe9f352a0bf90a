"""Programs: what missing updates do to a weight, or what perturbs it from one evaluation to the
next, and tables of them.

MeZO perturbs the weights in place: for the evaluations (s, +1), (s, -1) it adds +1, -2 and, to
restore them, +1 times ``zo_eps * z(s)`` (MeZO, arXiv 2305.17333, Algorithm 1). Each of these moves
rounds, so that the program that replays a step includes them.

Note: Folding the shift. ``(k * z) * eps`` equals ``z * (k * eps)`` bit for bit when k is a power of
two, because scaling by k is then exact on both sides of the rounding, if k is at least 1: halving a
subnormal number rounds. MeZO's shifts, 1 and -2, are folded; other shifts are multiplied in two
steps.

Note: Tables. Compiled kernels read a program as two tables, made once for each device. A row of
``instructions`` is five 32-bit words, native.c's ``struct instruction``: kind, direction, and three
float32 scalars, which depend on the kind:

    0  perturb             shift, zo_eps, -
    1  perturb, folded     shift * zo_eps, -, -        see the note on folding
    2  descend             projected_grad, lr, weight_decay

A row of ``directions`` is two 64-bit words, native.c's ``struct direction``: the seed, and 0 for a
z that the kernel draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from zo2core.types import (
    Descend,
    Distribution,
    Evaluation,
    Perturb,
    Program,
    Table,
    Update,
    aligned,
)

_PERTURB, _PERTURB_FOLDED, _DESCEND = range(3)  # kinds of instructions


class Draw(NamedTuple):
    """How kernels draw z of a range of a parameter, in each pass that uses it."""

    distribution: Distribution
    parameter: int  # index in registration order
    start: int = 0  # element of the parameter at which the range starts


class Trajectory(NamedTuple):
    """The updates and evaluations of a sweep."""

    # all updates of the run; the list may grow, but a sweep applies only those of its version
    updates: Sequence[Update]
    version: int  # the present version: updates 0..version-1 are applied
    evaluations: Sequence[Evaluation | None]  # in order; None stands for unperturbed weights
    zo_eps: float
    perturb_in_place: bool  # whether weights are perturbed in place from one evaluation to the next


def compile_updates(
    updates: Sequence[Update], then: Evaluation | None = None, zo_eps: float = 1.0
) -> Mapping[bool, Program]:
    """Compile consecutive updates to two programs, by whether weight decay applies to a
    parameter.
    """
    plain = _compile(updates, then, zo_eps, decays=False)
    decay = any(update.weight_decay != 0 for update in updates)
    return {False: plain, True: _compile(updates, then, zo_eps, decays=True) if decay else plain}


def compile_copy(evaluation: Evaluation, zo_eps: float) -> Program:
    """Compile the perturbation of a copy of the weights, which stay unchanged."""
    return Program((evaluation.seed,), (), Perturb(0, evaluation.shift, zo_eps))


def compile_moves(start: Evaluation | None, end: Evaluation | None, zo_eps: float) -> Program:
    """Compile the perturbations from one evaluation to another; None stands for unperturbed
    weights.
    """
    moves = _moves(start, end)
    seeds = tuple(dict.fromkeys(seed for seed, _ in moves))
    return Program(seeds, tuple(Perturb(seeds.index(seed), shift, zo_eps) for seed, shift in moves))


def single_moves(program: Program) -> list[Program]:
    """The perturbations of a program, each as one of its own."""
    moves = [move for move in program.instructions if isinstance(move, Perturb)]
    return [
        Program((program.seeds[move.direction],), (move._replace(direction=0),)) for move in moves
    ]


def seeds_of(update: Update) -> tuple[int, ...]:
    """Return the seeds of the directions that are drawn to replay an update, each once."""
    return tuple(dict.fromkeys([*(seed for seed, _ in _moves_of(update)), *update.seeds]))


def split_updates(updates: Sequence[Update], most_seeds: int) -> Iterator[Sequence[Update]]:
    """Split updates, in order, into parts of at most ``most_seeds`` directions, or of one update
    that has more.

    There is at least one part; without updates it is empty.
    """
    start = 0
    seeds = 0
    for index, update in enumerate(updates):
        added = len(seeds_of(update))
        if seeds + added > most_seeds and index > start:
            yield updates[start:index]
            start = index
            seeds = 0
        seeds += added
    yield updates[start:]


def _compile(
    updates: Sequence[Update], then: Evaluation | None, zo_eps: float, *, decays: bool
) -> Program:
    in_order = [seed for update in updates for seed in seeds_of(update)]
    if then is not None:
        in_order.append(then.seed)
    seeds = tuple(dict.fromkeys(in_order))
    direction = {seed: i for i, seed in enumerate(seeds)}
    instructions: list[Perturb | Descend] = []
    for update in updates:
        instructions += [
            Perturb(direction[seed], shift, update.zo_eps) for seed, shift in _moves_of(update)
        ]
        decay = update.weight_decay if decays else 0.0
        instructions += [
            Descend(direction[seed], projected_grad, update.lr, decay)
            for seed, projected_grad in zip(update.seeds, update.projected_grads, strict=True)
        ]
    perturbed = None if then is None else Perturb(direction[then.seed], then.shift, zo_eps)
    return Program(seeds, tuple(instructions), perturbed)


def _moves_of(update: Update) -> list[tuple[int, float]]:
    """Return the in-place perturbations of an update's evaluations, and back: seed and shift of
    each.
    """
    if not update.perturb_in_place:
        return []
    path: Sequence[Evaluation | None] = (None, *update.evaluations, None)
    return [move for start, end in pairwise(path) for move in _moves(start, end)]


def _moves(start: Evaluation | None, end: Evaluation | None) -> list[tuple[int, float]]:
    """Return the perturbations between two evaluations' weights: seed and shift of each."""
    if start is not None and end is not None and start.seed == end.seed:
        moves = [(end.seed, end.shift - start.shift)]
    else:
        back = [] if start is None else [(start.seed, -start.shift)]
        out = [] if end is None else [(end.seed, end.shift)]
        moves = back + out
    return [(seed, shift) for seed, shift in moves if shift != 0]


def folds(shift: float) -> bool:
    """Whether a shift may be multiplied with ``zo_eps`` first. See the note on folding."""
    return abs(shift) >= 1 and math.frexp(shift)[0] in (0.5, -0.5)


def _row(instruction: Perturb | Descend) -> tuple[int, float, float, float]:
    """Code one instruction, without its direction."""
    if not isinstance(instruction, Perturb):
        return _DESCEND, instruction.projected_grad, instruction.lr, instruction.weight_decay
    if folds(instruction.shift):
        return _PERTURB_FOLDED, instruction.shift * instruction.zo_eps, 0.0, 0.0
    return _PERTURB, instruction.shift, instruction.zo_eps, 0.0


def table(program: Program, device: torch.device) -> Table:
    """The program in a device's memory, with ``then`` as its last instruction.

    Made at the first call.
    """
    if device not in program.tables:
        program.tables.setdefault(device, _encode(program, device))
    return program.tables[device]


def _encode(program: Program, device: torch.device) -> Table:
    """Code a program and copy it to the device. The host does not wait for the copy."""
    run = program.instructions if program.then is None else (*program.instructions, program.then)
    rows = [_row(instruction) for instruction in run]
    instructions = torch.empty((len(rows), 5), dtype=torch.int32)
    instructions[:, 0] = torch.tensor([kind for kind, *_ in rows], dtype=torch.int32)
    instructions[:, 1] = torch.tensor(
        [instruction.direction for instruction in run], dtype=torch.int32
    )
    scalars = torch.tensor([coded[1:] for coded in rows], dtype=torch.float64).view(len(rows), 3)
    # rounded as C rounds a double
    instructions[:, 2:] = scalars.to(torch.float32).view(torch.int32)
    directions = torch.tensor([(seed, 0) for seed in program.seeds], dtype=torch.int64)
    # One copy for both. Both are aligned alike: Triton would compile again for another alignment.
    begin = aligned(instructions.nbytes)
    end = aligned(instructions.nbytes) + directions.nbytes
    packed = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed[: instructions.nbytes] = instructions.view(-1).view(torch.uint8)
    packed[begin:] = directions.view(-1).view(torch.uint8)
    on_device = packed.to(device, non_blocking=True)
    words = on_device[: instructions.nbytes]
    seeds = on_device[begin:].view(torch.int64)
    return Table(
        words.view(torch.int32).view(-1, 5),
        words.view(torch.float32).view(-1, 5),
        seeds.view(-1, 2),
    )
