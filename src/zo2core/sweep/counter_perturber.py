"""Moves a segment's weights where noise is counter-based: each pass over memory draws the z that it uses.

Nothing is kept from one pass to the next, and ranges do not depend on each other: two threads take them in turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from zo2core.protocols import SEEDS_IN_TURN, CounterNoise, Store
from zo2core.sweep.work_buffer import Cell, Workspace
from zo2core.types import Evaluation, Perturb, Program
from zo2core.updates import Move, Replay, rounds

# Note: Shares. Large enough that the call costs little, small enough that the threads end together. A multiple of what is
# drawn at once.
SHARE = 1 << 18  # elements


class Mover:
    """Moves weights for one sweep.

    Args:
        noise: Draws z.
        workspace: Memory.
        worker: The second thread; None does without.
        parallel_from: Elements of the segments that are worth two threads.
        zo_eps: Perturbation scale.
    """

    def __init__(
        self,
        noise: CounterNoise,
        workspace: Workspace,
        worker: ThreadPoolExecutor | None,
        *,
        parallel_from: int,
        zo_eps: float,
    ) -> None:
        self._noise = noise
        self._workspace = workspace
        self._worker = worker
        self._parallel_from = parallel_from
        self._zo_eps = zo_eps
        # One object for all segments, so that each is coded for the kernels once.
        self._programs: dict[tuple[int, int, int | None], tuple[Program, Program, Program]] = {}
        self._moves: dict[tuple[Move, ...], Program] = {}

    def replay(self, index: int, stores: Mapping[int, Store], replays: Sequence[Replay], first: Evaluation | None) -> None:
        """Bring a segment to the present version and, in the same pass, the work buffer to the first evaluation.

        Args:
            index: Of the segment.
            stores: Its own, and those it borrows from.
            replays: The updates it lacks.
            first: The evaluation; None leaves the work buffer alone.
        """
        *before, replays = rounds(replays, SEEDS_IN_TURN)
        for some in before:
            self._replay_round(index, stores, some, None)
        self._replay_round(index, stores, replays, first)

    def _replay_round(
        self, index: int, stores: Mapping[int, Store], replays: Sequence[Replay], first: Evaluation | None
    ) -> None:
        plain, decayed, still = self._joined(replays, first)
        then = None if first is None else Perturb(still.seeds.index(first.seed), first.shift, self._zo_eps)

        def run(cell: Cell, start: int, stop: int) -> None:
            theta = stores[cell.owner][cell.position][start:stop]
            program = still if cell.owner != index else decayed if cell.spec.decays else plain
            out = None if then is None else cell.work[start:stop]
            self._noise.walk(theta, program, cell.spec, start, out=out, then=then)

        cells = self._workspace.segments[index]
        if replays or then is not None:
            self._share(index, run, [cell for cell in cells if then is not None or cell.owner == index])

    def move(self, index: int, moves: Sequence[Move]) -> None:
        """Walk the work buffer."""
        key = tuple(moves)
        if key not in self._moves:
            seeds = tuple(dict.fromkeys(move.seed for move in moves))
            steps = tuple(Perturb(seeds.index(seed), shift, self._zo_eps) for seed, shift in moves)
            self._moves[key] = Program(seeds, steps)
        program = self._moves[key]

        def run(cell: Cell, start: int, stop: int) -> None:
            self._noise.walk(cell.work[start:stop], program, cell.spec, start)

        self._share(index, run, self._workspace.segments[index])

    def _joined(self, replays: Sequence[Replay], first: Evaluation | None) -> tuple[Program, Program, Program]:
        """What is done to parameters without and with weight decay, and to borrowed ones: nothing yet."""
        key = (id(replays[0]) if replays else 0, len(replays), None if first is None else first.seed)
        if key not in self._programs:
            last = [] if first is None else [Program((first.seed,), ())]
            plain, decayed = (
                Program.joined([*(replay.program(decays=decays) for replay in replays), *last]) for decays in (False, True)
            )
            self._programs[key] = (plain, decayed, Program(plain.seeds, ()))
        return self._programs[key]

    def _share(self, index: int, run: Callable[[Cell, int, int], None], cells: Sequence[Cell]) -> None:
        """Run on all ranges of these cells, on two threads if that pays."""
        worker = self._worker if self._workspace.elements[index] >= self._parallel_from else None
        ranges: deque[tuple[Cell, int, int]] = deque()
        for cell in cells:
            numel = cell.spec.numel
            share = max(numel, 1) if worker is None else SHARE
            ranges.extend((cell, start, min(start + share, numel)) for start in range(0, numel, share))

        def work() -> None:
            with torch.inference_mode():
                while True:
                    try:
                        cell, start, stop = ranges.popleft()
                    except IndexError:  # nothing is left
                        return
                    run(cell, start, stop)

        if worker is None:
            work()
            return
        other = worker.submit(work)
        try:
            work()
        finally:
            other.result()
