"""The walk of the weights through a step's evaluations, as a list of moves.

MeZO perturbs the weights in place: for the evaluations (s, +1), (s, -1) they move by +1, -2 and, to come back, +1 times
``zo_eps * z(s)`` (MeZO, arXiv 2305.17333, Algorithm 1). Each move rounds, so moves are part of the trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from zo2core.types import Descend, Evaluation, Perturb, Program, Update


class Move(NamedTuple):
    """``theta += (shift * z(seed)) * zo_eps``."""

    seed: int
    shift: float


def moves_to(before: Evaluation | None, after: Evaluation | None) -> tuple[Move, ...]:
    """Moves from one evaluation's weights to the next one's; None is the unperturbed weights."""
    if before is not None and after is not None and before.seed == after.seed:
        steps = [Move(after.seed, after.shift - before.shift)]
    else:
        back = [] if before is None else [Move(before.seed, -before.shift)]
        out = [] if after is None else [Move(after.seed, after.shift)]
        steps = back + out
    return tuple(move for move in steps if move.shift != 0)


class Replay:
    """One update, prepared for being applied piece by piece.

    Args:
        update: To replay.
    """

    def __init__(self, update: Update) -> None:
        path: Sequence[Evaluation | None] = (None, *update.evaluations, None)
        pairs = pairwise(path)
        moves = [move for before, after in pairs for move in moves_to(before, after)] if update.perturb_in_place else []
        self.seeds = tuple(dict.fromkeys([*(move.seed for move in moves), *update.seeds]))  # whose z is needed
        place = {seed: i for i, seed in enumerate(self.seeds)}
        perturbs = [Perturb(place[move.seed], move.shift, update.zo_eps) for move in moves]
        probes = list(zip(update.seeds, update.projected_grads, strict=True))
        self._programs = {
            decays: Program(
                self.seeds,
                (
                    *perturbs,
                    *(
                        Descend(place[seed], grad, update.lr, update.weight_decay if decays else 0.0)
                        for seed, grad in probes
                    ),
                ),
            )
            for decays in (True, False)
        }

    def program(self, *, decays: bool) -> Program:
        """What it does to a parameter with or without weight decay."""
        return self._programs[decays]


def rounds(replays: Sequence[Replay], most_seeds: int) -> Iterator[Sequence[Replay]]:
    """Cut a replay, in its order, into rounds of so many directions at most, or of one update that has more.

    There is one at least; without updates it is empty.
    """
    begin, seeds = 0, 0
    for at, replay in enumerate(replays):
        if seeds + len(replay.seeds) > most_seeds and at > begin:
            yield replays[begin:at]
            begin, seeds = at, 0
        seeds += len(replay.seeds)
    yield replays[begin:]
