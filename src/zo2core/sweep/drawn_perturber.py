"""Perturbs with noise that a sequential generator draws into memory.

Drawing takes most of the time. Each direction has its own generator, so two threads draw at once (``_draw_ahead``):
while the first one applies the missing updates chunk by chunk, the second one draws the noise of the first evaluation and
perturbs each chunk into the work buffer as soon as it is up to date and still in the cache.

Where memory allows, a segment's z is kept from one evaluation to the next, and two threads perturb along it (``_halve``).
Elsewhere it is drawn again, on one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue
from types import ModuleType

import torch

from zo2core.kernels import apply, perturb
from zo2core.protocols import SEEDS_IN_TURN, NoiseGenerator, Store, Stores
from zo2core.sweep.perturber import TrajectoryPerturber, in_one_launch
from zo2core.sweep.work_buffer import ParameterView, WorkBuffer
from zo2core.types import Evaluation, Perturb, Program, Update, aligned
from zo2core.updates import Trajectory, compile_updates, seeds_of, split_updates


class _Chunk(Enum):
    """What the replaying thread sends to the second thread."""

    REPLAYED = auto()
    LOST = auto()  # the replay failed: no chunk will follow


class DrawnPerturber(TrajectoryPerturber):
    """Perturbs with noise that is drawn into memory."""

    def __init__(
        self, noise: NoiseGenerator, buffer: WorkBuffer, worker: ThreadPoolExecutor | None, trajectory: Trajectory
    ) -> None:
        super().__init__(buffer, worker, trajectory)
        self._noise = noise
        self._replays: dict[int, Mapping[bool, Program]] = {}  # by the step of the update
        self._missing_updates: dict[int, list[Sequence[Update]]] = {}  # by version, in parts
        self._ahead: Future[bool] | None = None  # whether the second thread has written the first evaluation's weights
        self._drawn: int | None = None  # seed whose z is in the noise buffer for the segment being visited
        self._drawn_at_once: tuple[int, ...] = ()  # seed and parameters of what ``_drawn_together`` has drawn
        self._drawn_tied: dict[str, int] = {}  # tied weight -> seed whose z is in the noise buffer for it

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version. See the contract."""
        self._drawn = None
        replayed: SimpleQueue[_Chunk] = SimpleQueue()
        try:
            missing = self._missing(version)
            ahead = self._draw_ahead(index, stores, missing, replayed)
            for updates in missing:
                is_last = updates is missing[-1]
                self._replay_segment(index, stores[index], updates, replayed if ahead and is_last else None)
        except BaseException:
            replayed.put(_Chunk.LOST)  # ends the second thread's work, if it has any
            self.finish()
            raise
        return self._trajectory.version

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Write an evaluation's weights, unless the second thread has done so. See the contract."""
        if self._join() and evaluation == 0:
            return
        origin = self._origin(evaluation)
        program = self._move(origin, self._trajectory.evaluations[evaluation])
        if origin is None and not program.instructions:
            self._buffer.load(index, stores)
        sources = None if origin is not None else stores
        for instruction in program.instructions:
            assert isinstance(instruction, Perturb)
            self._perturb_segment(index, instruction, program.seeds[instruction.direction], sources)
            sources = None

    def finish(self) -> None:
        """Wait until the second thread no longer uses the memory. See the contract."""
        if self._ahead is not None:
            wait([self._ahead])

    # ---- replay

    def _missing(self, version: int) -> list[Sequence[Update]]:
        """Compile the updates that a version lacks, and return them in parts."""
        if version not in self._missing_updates:
            updates = self._trajectory.updates[version : self._trajectory.version]
            for update in updates:
                if update.step not in self._replays:
                    self._replays[update.step] = compile_updates([update])
                    self.seeds.update(seeds_of(update))
            self._missing_updates[version] = list(split_updates(updates, SEEDS_IN_TURN))
        return self._missing_updates[version]

    def _replay_segment(
        self, index: int, store: Store, updates: Sequence[Update], replayed: SimpleQueue[_Chunk] | None
    ) -> None:
        programs = [self._replays[update.step] for update in updates]
        views = [view for view in self._buffer.segments[index] if view.owner == index]
        kernels = self._kernels(index)
        if kernels is None or any(len(program[False].seeds) != 1 for program in programs):
            for view in views:
                for_parameter = [program[view.spec.decays] for program in programs]
                self._replay_parameter(view, store[view.position], for_parameter, replayed)
            return
        for owned in programs:
            for part, zs in self._drawn_together(views, owned[False].seeds[0]):
                for program, group in in_one_launch(part, partial(_program_of, owned)):
                    drawn = [zs[view.spec.index] for view in group]
                    kernels.apply([store[view.position] for view in group], program, [drawn])

    def _replay_parameter(
        self, view: ParameterView, theta: torch.Tensor, programs: Sequence[Program], replayed: SimpleQueue[_Chunk] | None
    ) -> None:
        spec, buffer = view.spec, self._buffer
        scratch, decay_scratch = buffer.scratch(spec.dtype, "replay"), buffer.scratch(spec.dtype, "decay")
        most_seeds = max((len(program.seeds) for program in programs), default=0)
        zs = [buffer.drawing(spec.dtype, f"z {i}") for i in range(most_seeds)]
        for start, stop in view.chunks:
            chunk, length = theta[start:stop], stop - start
            first, second = scratch[:length], decay_scratch[:length]
            for program in programs:
                drawn = [z[:length] for z in zs[: len(program.seeds)]]
                for z, seed in zip(drawn, program.seeds, strict=True):
                    self._noise.fill(z, seed, spec, start)
                apply(chunk, program, drawn, scratch=first, decay_scratch=second)
            if replayed is not None:
                replayed.put(_Chunk.REPLAYED)

    # ---- the first evaluation, on the second thread

    def _draw_ahead(
        self,
        index: int,
        stores: Stores,
        missing: Sequence[Sequence[Update]],
        replayed: SimpleQueue[_Chunk],
    ) -> bool:
        """Let the second thread prepare the first evaluation, if that saves time; each replayed chunk is sent to it."""
        if self._worker is None or self._first is None or self._kernels(index) is not None:
            return False
        owned = sum(view.spec.numel for view in self._buffer.segments[index] if view.owner == index)
        if owned < self._parallel_from:
            return False  # there is little to replay; later both threads perturb the borrowed weights
        if any(self._first.seed in self._replays[update.step][False].seeds for updates in missing for update in updates):
            return False  # two threads would draw from one seed's generator, which would start over for each chunk
        self._ahead = self._worker.submit(self._prepare, index, stores, self._first, replayed)
        return True

    def _prepare(self, index: int, stores: Stores, evaluation: Evaluation, replayed: SimpleQueue[_Chunk]) -> bool:
        """On the second thread, draw a direction and perturb each chunk along it as soon as the chunk is replayed."""
        move = Perturb(0, evaluation.shift, self._trajectory.zo_eps)
        for view in self._buffer.segments[index]:
            theta = stores[view.owner][view.position]
            for start, stop in view.chunks:
                z = self._noise_memory(view, start, stop, "ahead")
                if self._drawn_tied.get(view.spec.name) != evaluation.seed:
                    self._noise.fill(z, evaluation.seed, view.spec, start)
                if view.owner == index and replayed.get() is _Chunk.LOST:
                    return False
                self._perturb_chunk(view, start, stop, theta, z, move, "ahead")
            self._note_drawn(view, evaluation.seed)
        self._drawn = evaluation.seed
        return True

    def _join(self) -> bool:
        """Wait for the second thread, and return whether it has written the first evaluation's weights."""
        if self._ahead is None:
            return False
        prepared = self._ahead.result()  # if this is interrupted, ``finish`` can still wait for the thread
        self._ahead = None
        return prepared

    # ---- other evaluations

    def _perturb_segment(self, index: int, move: Perturb, seed: int, sources: Stores | None) -> None:
        """Perturb along a direction into the work buffer, from the stores, or in place if ``sources`` is None."""
        if (kernels := self._kernels(index)) is not None:
            for part, zs in self._drawn_together(self._buffer.segments[index], seed):
                for _, group in in_one_launch(part, lambda _: move):
                    thetas, drawn = [_weights(view, sources) for view in group], [zs[view.spec.index] for view in group]
                    kernels.perturb([view.work for view in group], thetas, drawn, move)
            return
        if not self._buffer.keeps_noise:
            self._perturb_part(index, move, 0, 1, sources, seed)
            return
        if self._drawn != seed:
            self._draw(index, seed)
        self._halve(index, move, sources)

    def _halve(self, index: int, move: Perturb, sources: Stores | None) -> None:
        """Perturb along kept noise, with every other chunk on a second thread if that saves time."""
        if self._worker is None or self._buffer.elements[index] < self._parallel_from:
            self._perturb_part(index, move, 0, 1, sources)
            return
        other = self._worker.submit(self._perturb_part, index, move, 1, 2, sources)
        try:
            self._perturb_part(index, move, 0, 2, sources)
        finally:
            other.result()

    def _perturb_part(
        self, index: int, move: Perturb, part: int, parts: int, sources: Stores | None, seed: int | None = None
    ) -> None:
        """Perturb every ``parts``-th chunk of each parameter, along noise that is kept or drawn; chunks do not overlap."""
        for view in self._buffer.segments[index]:
            for start, stop in view.chunks[part::parts]:
                z = self._noise_memory(view, start, stop, "move")
                if seed is not None:
                    self._noise.fill(z, seed, view.spec, start)
                self._perturb_chunk(view, start, stop, _weights(view, sources), z, move, f"move {part}")

    def _perturb_chunk(
        self, view: ParameterView, start: int, stop: int, theta: torch.Tensor, z: torch.Tensor, move: Perturb, scratch: str
    ) -> None:
        out, rounded = view.targets(start, stop)
        perturb(
            out,
            theta[start:stop],
            z,
            move,
            scratch=self._buffer.scratch(view.spec.dtype, scratch)[: stop - start],
            rounded=rounded,
        )

    # ---- several parameters in one launch

    def _kernels(self, index: int) -> ModuleType | None:
        return None if self._buffer.keeps_noise else super()._kernels(index)

    def _drawn_together(
        self, views: Sequence[ParameterView], seed: int
    ) -> Iterator[tuple[Sequence[ParameterView], Mapping[int, torch.Tensor]]]:
        """Draw one direction for parameters in turn, as many at a time as the memory for each dtype's longest one holds.

        What a part of a segment has drawn there is used again for the next evaluation along the same direction.

        Yields:
            A part of the parameters, and their z by index.
        """
        parts: list[dict[int, torch.Tensor]] = [{}]
        ends: dict[torch.dtype, int] = {}
        for view in views:
            memory, numel = self._buffer.drawing(view.spec.dtype, "z together"), view.spec.numel
            if ends.get(view.spec.dtype, 0) + numel > len(memory):
                parts.append({})
                ends = {}
            start = ends.get(view.spec.dtype, 0)
            parts[-1][view.spec.index] = memory[start : start + numel]
            ends[view.spec.dtype] = start + aligned(numel * memory.itemsize) // memory.itemsize
        for zs in parts:
            part = [view for view in views if view.spec.index in zs]
            if self._drawn_at_once != (seed, *zs):
                for view in part:
                    for start, stop in view.chunks:
                        self._noise.fill(zs[view.spec.index][start:stop], seed, view.spec, start)
                self._drawn_at_once = (seed, *zs)
            yield part, zs

    # ---- kept noise

    def _draw(self, index: int, seed: int) -> None:
        """Draw one direction for a segment into the noise buffer, where tied weights keep theirs for other segments."""
        for view in self._buffer.segments[index]:
            if self._drawn_tied.get(view.spec.name) == seed:
                continue
            for start, stop in view.chunks:
                self._noise.fill(self._noise_memory(view, start, stop, "move"), seed, view.spec, start)
            self._note_drawn(view, seed)
        self._drawn = seed

    def _note_drawn(self, view: ParameterView, seed: int) -> None:
        if view.tied and view.z is not None:
            self._drawn_tied[view.spec.name] = seed

    def _noise_memory(self, view: ParameterView, start: int, stop: int, purpose: str) -> torch.Tensor:
        """Return the memory for a chunk of z: a part of the noise buffer, or scratch that the next chunk overwrites."""
        if view.z is not None:
            return view.z[start:stop]
        return self._buffer.drawing(view.spec.dtype, f"z {purpose}")[: stop - start]


def _weights(view: ParameterView, sources: Stores | None) -> torch.Tensor:
    """Return a parameter's weights in the stores, or those that are perturbed in place if ``sources`` is None."""
    return view.targets()[0] if sources is None else sources[view.owner][view.position]


def _program_of(owned: Mapping[bool, Program], view: ParameterView) -> Program:
    """Return the program of one of the segment's own parameters."""
    return owned[view.spec.decays]
