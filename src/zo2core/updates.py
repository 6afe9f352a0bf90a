"""Updates, compiled: the program that brings a weight through the updates it lacks, or from one evaluation to the next.

MeZO perturbs the weights in place: for the evaluations (s, +1), (s, -1) they move by +1, -2 and, to come back, +1 times
``zo_eps * z(s)`` (MeZO, arXiv 2305.17333, Algorithm 1). Each move rounds, so moves are part of the trajectory, and of the
program that replays a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from zo2core.types import Descend, Evaluation, Perturb, Program, Update


class Trajectory(NamedTuple):
    """Where a sweep leads the weights: through updates to the present version, and on through evaluations."""

    updates: Sequence[Update]  # all of the run so far; the list may grow, the sweep does not see what comes later
    version: int  # the present one: updates 0..version-1 are applied
    evaluations: Sequence[Evaluation | None]  # in the order in which they are made; None: of the weights as they are
    zo_eps: float
    perturb_in_place: bool  # evaluations walk from one to the next instead of each starting from the weights


def compile_updates(
    updates: Sequence[Update], then: Evaluation | None = None, zo_eps: float = 1.0
) -> Mapping[bool, Program]:
    """Compile updates, one after the other, to two programs: by whether weight decay applies to a parameter.

    Args:
        updates: In order; none for weights that stay as they are.
        then: The evaluation to whose weights a copy is perturbed in the same pass; None makes no copy.
        zo_eps: Perturbation scale of that evaluation.
    """
    plain = _compiled(updates, then, zo_eps, decays=False)
    decay = any(update.weight_decay != 0 for update in updates)
    return {False: plain, True: _compiled(updates, then, zo_eps, decays=True) if decay else plain}


def compile_moves(before: Evaluation | None, after: Evaluation | None, zo_eps: float) -> Program:
    """What leads from the weights of one evaluation to those of another; None is the weights as they are."""
    moves = _moves(before, after)
    seeds = tuple(dict.fromkeys(seed for seed, _ in moves))
    return Program(seeds, tuple(Perturb(seeds.index(seed), shift, zo_eps) for seed, shift in moves))


def seeds_of(update: Update) -> tuple[int, ...]:
    """The directions that are drawn to replay an update, each once."""
    return tuple(dict.fromkeys([*(seed for seed, _ in _moves_of(update)), *update.seeds]))


def rounds(updates: Sequence[Update], most_seeds: int) -> Iterator[Sequence[Update]]:
    """Cut updates, in their order, into rounds of so many directions at most, or of one update that has more.

    There is one round at least; without updates it is empty.
    """
    begin, seeds = 0, 0
    for at, update in enumerate(updates):
        own = len(seeds_of(update))
        if seeds + own > most_seeds and at > begin:
            yield updates[begin:at]
            begin, seeds = at, 0
        seeds += own
    yield updates[begin:]


def _compiled(updates: Sequence[Update], then: Evaluation | None, zo_eps: float, *, decays: bool) -> Program:
    drawn = [seed for update in updates for seed in seeds_of(update)]
    seeds = tuple(dict.fromkeys(drawn if then is None else [*drawn, then.seed]))
    place = {seed: i for i, seed in enumerate(seeds)}
    instructions: list[Perturb | Descend] = []
    for update in updates:
        instructions += [Perturb(place[seed], shift, update.zo_eps) for seed, shift in _moves_of(update)]
        decay = update.weight_decay if decays else 0.0
        instructions += [
            Descend(place[seed], projected_grad, update.lr, decay)
            for seed, projected_grad in zip(update.seeds, update.projected_grads, strict=True)
        ]
    perturbed = None if then is None else Perturb(place[then.seed], then.shift, zo_eps)
    return Program(seeds, tuple(instructions), perturbed)


def _moves_of(update: Update) -> list[tuple[int, float]]:
    """The moves of MeZO's walk through an update's evaluations and back: seed and shift of each."""
    if not update.perturb_in_place:
        return []
    path: Sequence[Evaluation | None] = (None, *update.evaluations, None)
    return [move for before, after in pairwise(path) for move in _moves(before, after)]


def _moves(before: Evaluation | None, after: Evaluation | None) -> list[tuple[int, float]]:
    """The moves between two evaluations' weights: seed and shift of each."""
    if before is not None and after is not None and before.seed == after.seed:
        moves = [(after.seed, after.shift - before.shift)]
    else:
        back = [] if before is None else [(before.seed, -before.shift)]
        out = [] if after is None else [(after.seed, after.shift)]
        moves = back + out
    return [(seed, shift) for seed, shift in moves if shift != 0]
