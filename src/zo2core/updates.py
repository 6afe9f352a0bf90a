"""Compiled updates: programs that apply missing updates to a weight, or perturb it from one evaluation to the next.

MeZO perturbs the weights in place: for the evaluations (s, +1), (s, -1) it adds +1, -2 and, to restore them, +1 times
``zo_eps * z(s)`` (MeZO, arXiv 2305.17333, Algorithm 1). Each of these moves rounds, so that the program that replays a step
includes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from zo2core.types import Descend, Evaluation, Perturb, Program, Update


class Trajectory(NamedTuple):
    """The updates and evaluations of a sweep."""

    updates: Sequence[Update]  # all updates of the run; the list may grow, but a sweep applies only those of its version
    version: int  # the present version: updates 0..version-1 are applied
    evaluations: Sequence[Evaluation | None]  # in order; None stands for unperturbed weights
    zo_eps: float
    perturb_in_place: bool  # whether weights are perturbed in place from one evaluation to the next


def compile_updates(
    updates: Sequence[Update], then: Evaluation | None = None, zo_eps: float = 1.0
) -> Mapping[bool, Program]:
    """Compile consecutive updates to two programs, by whether weight decay applies to a parameter."""
    plain = _compiled(updates, then, zo_eps, decays=False)
    decay = any(update.weight_decay != 0 for update in updates)
    return {False: plain, True: _compiled(updates, then, zo_eps, decays=True) if decay else plain}


def compile_moves(before: Evaluation | None, after: Evaluation | None, zo_eps: float) -> Program:
    """Compile the perturbations from one evaluation to another; None stands for unperturbed weights."""
    moves = _moves(before, after)
    seeds = tuple(dict.fromkeys(seed for seed, _ in moves))
    return Program(seeds, tuple(Perturb(seeds.index(seed), shift, zo_eps) for seed, shift in moves))


def seeds_of(update: Update) -> tuple[int, ...]:
    """Return the seeds of the directions that are drawn to replay an update, each once."""
    return tuple(dict.fromkeys([*(seed for seed, _ in _moves_of(update)), *update.seeds]))


def split_updates(updates: Sequence[Update], most_seeds: int) -> Iterator[Sequence[Update]]:
    """Split updates, in order, into parts of at most ``most_seeds`` directions, or of one update that has more.

    There is at least one part; without updates it is empty.
    """
    start, seeds = 0, 0
    for index, update in enumerate(updates):
        added = len(seeds_of(update))
        if seeds + added > most_seeds and index > start:
            yield updates[start:index]
            start, seeds = index, 0
        seeds += added
    yield updates[start:]


def _compiled(updates: Sequence[Update], then: Evaluation | None, zo_eps: float, *, decays: bool) -> Program:
    drawn = [seed for update in updates for seed in seeds_of(update)]
    seeds = tuple(dict.fromkeys(drawn if then is None else [*drawn, then.seed]))
    direction = {seed: i for i, seed in enumerate(seeds)}
    instructions: list[Perturb | Descend] = []
    for update in updates:
        instructions += [Perturb(direction[seed], shift, update.zo_eps) for seed, shift in _moves_of(update)]
        decay = update.weight_decay if decays else 0.0
        instructions += [
            Descend(direction[seed], projected_grad, update.lr, decay)
            for seed, projected_grad in zip(update.seeds, update.projected_grads, strict=True)
        ]
    perturbed = None if then is None else Perturb(direction[then.seed], then.shift, zo_eps)
    return Program(seeds, tuple(instructions), perturbed)


def _moves_of(update: Update) -> list[tuple[int, float]]:
    """Return the in-place perturbations of an update's evaluations, and back: seed and shift of each."""
    if not update.perturb_in_place:
        return []
    path: Sequence[Evaluation | None] = (None, *update.evaluations, None)
    return [move for before, after in pairwise(path) for move in _moves(before, after)]


def _moves(before: Evaluation | None, after: Evaluation | None) -> list[tuple[int, float]]:
    """Return the perturbations between two evaluations' weights: seed and shift of each."""
    if before is not None and after is not None and before.seed == after.seed:
        moves = [(after.seed, after.shift - before.shift)]
    else:
        back = [] if before is None else [(before.seed, -before.shift)]
        out = [] if after is None else [(after.seed, after.shift)]
        moves = back + out
    return [(seed, shift) for seed, shift in moves if shift != 0]
