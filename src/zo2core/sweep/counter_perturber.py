"""Perturbs along counter-based noise: each pass over memory draws the z that it uses.

A segment's replay and its first evaluation are one pass. No state is kept from one pass to the next, and ranges do not
depend on each other, so that threads divide them (``_run_all``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from zo2core.kernels import apply_drawing
from zo2core.protocols import SEEDS_IN_TURN, CounterNoise, Stores
from zo2core.sweep.perturber import TrajectoryPerturber, in_one_launch
from zo2core.sweep.work_buffer import ParameterView, WorkBuffer
from zo2core.types import Evaluation, Program
from zo2core.updates import Trajectory, compile_updates, split_updates

# Note: Ranges. Large enough that the call costs little, small enough that the threads end together. A multiple of Philox's
# groups.
RANGE = 1 << 18  # elements


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
        self._prepared: Evaluation | None = None  # the evaluation whose weights a replay has written to the work buffer
        self._replays: dict[tuple[int, bool], list[Mapping[bool, Program]]] = {}  # by the arguments of ``_programs``
        self._updates: dict[int, Mapping[bool, Program]] = {}  # programs of single updates, by step
        self._copies: dict[Evaluation, Program] = {}

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring the store to the present version, and write the first evaluation's weights in the same pass."""
        if self._buffer.transfers_back[index]:
            self._replay_low_bit(index, stores, version)
            return self._trajectory.version
        prepares = not self._buffer.is_low_bit[index]
        for programs in self._programs(version, prepares=prepares):
            is_last = programs[False].then is not None
            self._run(index, stores, programs, self._copy(self._first) if is_last and self._first is not None else None)
        self._prepared = self._first if prepares else None
        return self._trajectory.version

    def _replay_low_bit(self, index: int, stores: Stores, version: int) -> None:
        """Replay one update at a time, and round to the transfer dtype after each, as a device does."""
        self._prepared = None
        missing = self._trajectory.updates[version : self._trajectory.version]
        if missing:
            self._buffer.load_low_bit(index, stores)
        if missing and version == 0:  # the base has not been rounded to the transfer dtype
            self._buffer.round_to_transfer_dtype(index, stores[index])
        for update in missing:
            if update.step not in self._updates:
                self._updates[update.step] = compile_updates([update])
                self.seeds.update(self._updates[update.step][False].seeds)
            self._run(index, stores, self._updates[update.step], None)
            self._buffer.round_to_transfer_dtype(index, stores[index])

    def perturb(self, index: int, stores: Stores, before: Evaluation | None, evaluation: Evaluation | None) -> None:
        """Write an evaluation's weights to the work buffer, unless the replay has done so. See the contract."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared == evaluation:
            return
        if before is not None and self._trajectory.perturb_in_place:
            self._move_in_place(index, before, evaluation)
        elif evaluation is None or evaluation.shift == 0:
            self._buffer.load(index, stores)
        else:
            self._buffer.load_low_bit(index, stores)
            copy = self._copy(evaluation)
            self._run(index, stores, {False: copy, True: copy}, copy)

    def _programs(self, version: int, *, prepares: bool) -> list[Mapping[bool, Program]]:
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

    def _run(self, index: int, stores: Stores, owned: Mapping[bool, Program], borrowed: Program | None) -> None:
        """Run programs on stores; perturbed copies are written to the work buffer."""
        if not owned[False].instructions and owned[False].then is None:
            return

        def program_of(view: ParameterView) -> Program:
            program = owned[view.spec.decays] if view.owner == index else borrowed
            assert program is not None
            return program

        def run(view: ParameterView, start: int, stop: int) -> None:
            program = program_of(view)
            theta = self._weights(view, stores, program)[start:stop]
            out, rounded = (None, None) if program.then is None else view.targets(start, stop)
            apply_drawing(theta, program, self._distribution, view.spec.index, start, out=out, rounded=rounded)

        views = [view for view in self._buffer.segments[index] if view.owner == index or borrowed is not None]
        if (kernels := self._kernels(index)) is None:
            self._run_all(index, run, views)
            return
        for program, group in in_one_launch(views, program_of):
            thetas = [self._weights(view, stores, program) for view in group]
            outs = None if program.then is None else [view.work for view in group]
            kernels.apply_drawing(thetas, program, self._distribution, [view.spec.index for view in group], outs=outs)

    def _weights(self, view: ParameterView, stores: Stores, program: Program) -> torch.Tensor:
        """Return the weights that a program runs on: those in a store, or low-bit ones converted to their stored dtype."""
        store = stores[view.owner]
        if view.spec.is_low_bit and (program.then is not None or not view.is_stored_in(store)):
            assert program.then is not None or view.spec.transfer_back, (
                "weights that are not transferred back are replayed in their stored dtype"
            )
            return view.targets()[0]
        return store[view.position]

    def _move_in_place(self, index: int, before: Evaluation, evaluation: Evaluation | None) -> None:
        """Perturb the work buffer in place, from one evaluation to the next."""
        program = self._move(before, evaluation)

        def run(view: ParameterView, start: int, stop: int) -> None:
            theta, rounded = view.targets(start, stop)
            apply_drawing(theta, program, self._distribution, view.spec.index, start, rounded=rounded)

        if not program.instructions:
            return
        views = self._buffer.segments[index]
        if (kernels := self._kernels(index)) is None:
            self._run_all(index, run, views)
            return
        for _, group in in_one_launch(views, lambda _: program):
            indices = [view.spec.index for view in group]
            kernels.apply_drawing([view.work for view in group], program, self._distribution, indices)

    def _run_all(self, index: int, run: Callable[[ParameterView, int, int], None], views: Sequence[ParameterView]) -> None:
        """Run on all ranges of these parameters, on several threads if that saves time."""
        worker = self._worker if self._buffer.elements[index] >= self._parallel_from else None
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

        if worker is None:
            work()
            return
        others = [worker.submit(work) for _ in range(self._helpers)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()
