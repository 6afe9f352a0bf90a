"""Perturbers that write perturbed weights to the work buffer, one for counter-based noise and one for drawn noise.

``CounterPerturber``: each pass over memory draws the z that it uses. A segment's replay and its first evaluation are one
pass. No state is kept from one pass to the next, and ranges do not depend on each other, so that threads divide them.

``DrawnPerturber``: a sequential generator draws z into memory, which takes most of the time. Each direction has its own
generator, so two threads draw at once (``_draw_ahead``): while the first one applies the missing updates chunk by chunk, the
second one draws the noise of the first evaluation and perturbs each chunk into the work buffer as soon as it is up to date
and still in the cache. Where memory allows, a segment's z is kept from one evaluation to the next, and two threads perturb
along it (``_halve``). Elsewhere it is drawn again, on one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from types import ModuleType
from typing import TypeAlias, TypeVar

import torch

from zo2core.kernels import apply, apply_drawing, perturb
from zo2core.kernels.dispatch import triton_kernels
from zo2core.protocols import SEEDS_IN_TURN, CounterNoise, NoiseGenerator, Store, Stores
from zo2core.sweep.visitor import Perturber
from zo2core.sweep.work_buffer import ParameterView, WorkBuffer
from zo2core.types import Evaluation, Perturb, Program, Update, aligned
from zo2core.updates import Trajectory, compile_moves, compile_updates, split_updates

# Note: Second thread. Starting work on it takes tens of microseconds, so smaller segments stay on one thread.
PARALLEL_FROM = 1 << 17
# Note: Ranges. Large enough that the call costs little, small enough that the threads end together. A multiple of Philox's
# groups.
RANGE = 1 << 18  # elements

P = TypeVar("P", bound=Perturb | Program)
Programs: TypeAlias = Mapping[bool, Program]  # of updates, by whether weight decay applies to a parameter
Replayed: TypeAlias = SimpleQueue[int | None]  # ends of replayed chunks; None: the replay failed


class TrajectoryPerturber(Perturber):
    """A perturber that replays a trajectory's updates and perturbs along its evaluations."""

    seeds: set[int]

    def __init__(self, buffer: WorkBuffer, worker: ThreadPoolExecutor | None, trajectory: Trajectory) -> None:
        super().__init__(buffer)
        self._worker = worker
        self._trajectory = trajectory
        self._parallel_from = PARALLEL_FROM
        first = trajectory.evaluations[0] if trajectory.evaluations else None
        self._first = first if first is not None and first.shift != 0 else None  # prepared during the replay
        # All segments share programs, so that each is encoded for the kernels once.
        self._moves: dict[tuple[Evaluation | None, Evaluation | None], Program] = {}
        self._updates: dict[int, Programs] = {}  # programs of single updates, by step
        self.seeds = {evaluation.seed for evaluation in trajectory.evaluations if evaluation is not None}

    @property
    def version(self) -> int:
        """The present version. See ``Perturber``."""
        return self._trajectory.version

    def _origin(self, evaluation: int) -> Evaluation | None:
        """The evaluation from whose weights another one is perturbed in place; None: it is perturbed from the stores."""
        return self._trajectory.evaluations[evaluation - 1] if evaluation and self._trajectory.perturb_in_place else None

    def _compiled(self, update: Update) -> Programs:
        """Return the program of a single update, whose directions this sweep draws."""
        if update.step not in self._updates:
            self._updates[update.step] = compile_updates([update])
            self.seeds.update(self._updates[update.step][False].seeds)
        return self._updates[update.step]

    def _kernels(self, index: int) -> ModuleType | None:
        """Kernels that change a segment's parameters in one launch; None if each is changed by itself."""
        views = self.buffer.segments[index]
        if self.buffer.is_low_bit[index] or any(view.unrounded is not None for view in views):
            return None
        found = [triton_kernels(view.work) for view in views if view.spec.dtype is not torch.float64]
        return found[0] if found and len(found) == len(views) and all(found) else None

    def _move(self, before: Evaluation | None, evaluation: Evaluation | None) -> Program:
        """Return the program that leads from one evaluation's weights to those of the next."""
        if (before, evaluation) not in self._moves:
            self._moves[before, evaluation] = compile_moves(before, evaluation, self._trajectory.zo_eps)
        return self._moves[before, evaluation]


class CounterPerturber(TrajectoryPerturber):
    """Perturbs with noise that kernels draw."""

    def __init__(
        self,
        noise: CounterNoise,
        buffer: WorkBuffer,
        worker: ThreadPoolExecutor | None,
        trajectory: Trajectory,
        *,
        helpers: int = 1,
    ) -> None:
        super().__init__(buffer, worker if helpers > 0 else None, trajectory)
        self._distribution = noise.distribution
        self._helpers = helpers
        self._is_prepared = False  # whether a replay has written the first evaluation's weights to the work buffer
        self._replays: dict[tuple[int, bool], list[Programs]] = {}  # by the arguments of ``_programs``
        self._copies: dict[Evaluation, Program] = {}

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring the store to the present version, and write the first evaluation's weights in the same pass."""
        self._is_prepared = False
        if self.buffer.transfers_back[index]:
            self._replay_low_bit(index, stores, version)
            return self._trajectory.version
        prepares = not self.buffer.is_low_bit[index]
        for programs in self._programs(version, prepares=prepares):
            is_last = programs[False].then is not None
            self._run(index, stores, programs, self._copy(self._first) if is_last and self._first is not None else None)
        self._is_prepared = prepares and self._first is not None
        return self._trajectory.version

    def _replay_low_bit(self, index: int, stores: Stores, version: int) -> None:
        """Replay one update at a time, and round to the transfer dtype after each, as a device does."""
        missing = self._trajectory.updates[version : self._trajectory.version]
        if missing:
            self.buffer.load_low_bit(index, stores)
        if missing and version == 0:  # the base has not been rounded to the transfer dtype
            self.buffer.round_to_transfer_dtype(index, stores[index])
        for update in missing:
            self._run(index, stores, self._compiled(update), None)
            self.buffer.round_to_transfer_dtype(index, stores[index])

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Write an evaluation's weights to the work buffer, unless the replay has done so. See the contract."""
        origin, at = self._origin(evaluation), self._trajectory.evaluations[evaluation]
        if self._is_prepared and evaluation == 0:
            return
        if origin is not None:
            move = self._move(origin, at)
            self._run(index, None, {False: move, True: move}, move)
        elif at is None or at.shift == 0:
            self.buffer.load(index, stores)
        else:
            self.buffer.load_low_bit(index, stores)
            copy = self._copy(at)
            self._run(index, stores, {False: copy, True: copy}, copy)

    def _programs(self, version: int, *, prepares: bool) -> list[Programs]:
        """Compile the missing updates, in parts; the last program may also write the first evaluation's weights."""
        if (version, prepares) not in self._replays:
            trajectory = self._trajectory
            *before, last = split_updates(trajectory.updates[version : trajectory.version], SEEDS_IN_TURN)
            programs = [compile_updates(updates) for updates in before]
            programs.append(compile_updates(last, self._first if prepares else None, trajectory.zo_eps))
            self.seeds.update(seed for program in programs for seed in program[False].seeds)
            self._replays[version, prepares] = programs
        return self._replays[version, prepares]

    def _copy(self, evaluation: Evaluation) -> Program:
        """Return the program that perturbs a copy of the weights, which stay unchanged."""
        if evaluation not in self._copies:
            self._copies[evaluation] = compile_updates((), evaluation, self._trajectory.zo_eps)[False]
        return self._copies[evaluation]

    def _run(self, index: int, stores: Stores | None, owned: Programs, borrowed: Program | None) -> None:
        """Run programs on stores, with perturbed copies in the work buffer; in place on perturbed weights without stores."""
        if not owned[False].instructions and owned[False].then is None:
            return

        def program_of(view: ParameterView) -> Program:
            program = owned[view.spec.decays] if view.owner == index else borrowed
            assert program is not None
            return program

        def run(view: ParameterView, start: int, stop: int) -> None:
            program, (out, rounded) = program_of(view), view.targets(start, stop)
            apply_drawing(
                _weights(view, stores, copied=program.then is not None)[start:stop],
                program,
                self._distribution,
                view.spec.index,
                start,
                out=None if program.then is None else out,
                rounded=None if program.then is None and stores is not None else rounded,
            )

        views = [view for view in self.buffer.segments[index] if view.owner == index or borrowed is not None]
        if (kernels := self._kernels(index)) is None:
            self._run_all(index, run, views)
            return
        for program, group in in_one_launch(views, program_of):
            thetas = [_weights(view, stores, copied=program.then is not None) for view in group]
            outs = None if program.then is None else [view.work for view in group]
            kernels.apply_drawing(thetas, program, self._distribution, [view.spec.index for view in group], outs=outs)

    def _run_all(self, index: int, run: Callable[[ParameterView, int, int], None], views: Sequence[ParameterView]) -> None:
        """Run on all ranges of these parameters, on several threads if that saves time."""
        worker = self._worker if self.buffer.elements[index] >= self._parallel_from else None
        ranges: deque[tuple[ParameterView, int, int]] = deque()
        for view in views:
            numel = view.spec.numel
            length = max(numel, 1) if worker is None else RANGE
            ranges.extend((view, start, min(start + length, numel)) for start in range(0, numel, length))

        def work() -> None:
            with torch.inference_mode():
                while True:
                    try:
                        view, start, stop = ranges.popleft()
                    except IndexError:  # all ranges are done
                        return
                    run(view, start, stop)

        others = [] if worker is None else [worker.submit(work) for _ in range(self._helpers)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()


def _weights(view: ParameterView, stores: Stores | None, *, copied: bool = False) -> torch.Tensor:
    """Return stored weights, or perturbed ones without stores; copies of low-bit ones begin in their stored dtype."""
    if stores is None:
        return view.targets()[0]
    store = stores[view.owner]
    if view.spec.is_low_bit and (copied or not view.is_stored_in(store)):
        assert copied or view.spec.transfer_back, "weights that are not transferred back are replayed in their stored dtype"
        return view.targets()[0]
    return store[view.position]


def in_one_launch(
    views: Iterable[ParameterView], program_of: Callable[[ParameterView], P]
) -> list[tuple[P, list[ParameterView]]]:
    """Divide parameters into those that one launch changes: they share a program and a dtype."""
    groups: dict[tuple[int, torch.dtype], tuple[P, list[ParameterView]]] = {}
    for view in views:
        program = program_of(view)
        groups.setdefault((id(program), view.spec.dtype), (program, []))[1].append(view)
    return list(groups.values())


class DrawnPerturber(TrajectoryPerturber):
    """Perturbs with noise that is drawn into memory."""

    def __init__(
        self, noise: NoiseGenerator, buffer: WorkBuffer, worker: ThreadPoolExecutor | None, trajectory: Trajectory
    ) -> None:
        super().__init__(buffer, worker, trajectory)
        self._noise = noise
        self._replays: dict[int, list[Sequence[Programs]]] = {}  # by version, in parts
        self._ahead: Future[bool] | None = None  # whether the second thread has written the first evaluation's weights
        self._drawn: int | None = None  # seed whose z is in the noise buffer for the segment being visited
        self._drawn_at_once: tuple[int, ...] = ()  # seed and parameters of what ``_drawn_together`` has drawn
        self._drawn_tied: dict[str, int] = {}  # tied weight -> seed whose z is in the noise buffer for it

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version. See the contract."""
        self._drawn = None
        replayed: Replayed = SimpleQueue()
        try:
            missing = self._missing(version)
            ahead = self._draw_ahead(index, stores, missing, replayed)
            for programs in missing:
                is_last = programs is missing[-1]
                self._replay_segment(index, stores[index], programs, replayed if ahead and is_last else None)
        except BaseException:
            replayed.put(None)  # ends the second thread's work, if it has any
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
            self.buffer.load(index, stores)
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

    def _missing(self, version: int) -> list[Sequence[Programs]]:
        """Compile the updates that a version lacks, and return their programs in parts."""
        if version not in self._replays:
            parts = split_updates(self._trajectory.updates[version : self._trajectory.version], SEEDS_IN_TURN)
            self._replays[version] = [[self._compiled(update) for update in updates] for updates in parts]
        return self._replays[version]

    def _replay_segment(self, index: int, store: Store, programs: Sequence[Programs], replayed: Replayed | None) -> None:
        views = [view for view in self.buffer.segments[index] if view.owner == index]
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
        self, view: ParameterView, theta: torch.Tensor, programs: Sequence[Program], replayed: Replayed | None
    ) -> None:
        spec, buffer = view.spec, self.buffer
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
                replayed.put(stop)

    # ---- the first evaluation, on the second thread

    def _draw_ahead(self, index: int, stores: Stores, missing: Sequence[Sequence[Programs]], replayed: Replayed) -> bool:
        """Let the second thread prepare the first evaluation, if that saves time; each replayed chunk is sent to it."""
        if self._worker is None or self._first is None or self._kernels(index) is not None:
            return False
        owned = sum(view.spec.numel for view in self.buffer.segments[index] if view.owner == index)
        if owned < self._parallel_from:
            return False  # there is little to replay; later both threads perturb the borrowed weights
        if any(self._first.seed in program[False].seeds for programs in missing for program in programs):
            return False  # two threads would draw from one seed's generator, which would start over for each chunk
        self._ahead = self._worker.submit(self._prepare, index, stores, self._first, replayed)
        return True

    def _prepare(self, index: int, stores: Stores, evaluation: Evaluation, replayed: Replayed) -> bool:
        """On the second thread, draw a direction and perturb each chunk along it as soon as the chunk is replayed."""
        move = Perturb(0, evaluation.shift, self._trajectory.zo_eps)
        for view in self.buffer.segments[index]:
            theta = stores[view.owner][view.position]
            for start, stop in view.chunks:
                z = self._noise_memory(view, start, stop, "ahead")
                if self._drawn_tied.get(view.spec.name) != evaluation.seed:
                    self._noise.fill(z, evaluation.seed, view.spec, start)
                if view.owner == index and replayed.get() is None:
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
            for part, zs in self._drawn_together(self.buffer.segments[index], seed):
                for _, group in in_one_launch(part, lambda _: move):
                    thetas, drawn = [_weights(view, sources) for view in group], [zs[view.spec.index] for view in group]
                    kernels.perturb([view.work for view in group], thetas, drawn, move)
            return
        if not self.buffer.keeps_noise:
            self._perturb_part(index, move, 0, 1, sources, seed)
            return
        if self._drawn != seed:
            self._draw(index, seed)
        self._halve(index, move, sources)

    def _halve(self, index: int, move: Perturb, sources: Stores | None) -> None:
        """Perturb along kept noise, with every other chunk on a second thread if that saves time."""
        if self._worker is None or self.buffer.elements[index] < self._parallel_from:
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
        for view in self.buffer.segments[index]:
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
            scratch=self.buffer.scratch(view.spec.dtype, scratch)[: stop - start],
            rounded=rounded,
        )

    # ---- several parameters in one launch

    def _kernels(self, index: int) -> ModuleType | None:
        return None if self.buffer.keeps_noise else super()._kernels(index)

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
            memory, numel = self.buffer.drawing(view.spec.dtype, "z together"), view.spec.numel
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
        for view in self.buffer.segments[index]:
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
        return self.buffer.drawing(view.spec.dtype, f"z {purpose}")[: stop - start]


def _program_of(owned: Programs, view: ParameterView) -> Program:
    """Return the program of one of the segment's own parameters."""
    return owned[view.spec.decays]
