"""Perturbers bring segments to the present version, and put weights of evaluations where forwards read them.

``CounterPerturber`` perturbs along counter-based noise: each pass over memory draws the z that it uses. A segment's replay
and its first evaluation are one pass. No state is kept from one pass to the next, and ranges do not depend on each other, so
that threads divide them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import ModuleType
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from zo2core.kernels import apply_drawing
from zo2core.kernels.dispatch import triton_kernels
from zo2core.protocols import SEEDS_IN_TURN, CounterNoise, Stores
from zo2core.sweep.work_buffer import ParameterView, WorkBuffer
from zo2core.types import Batch, Evaluation, Perturb, Program
from zo2core.updates import Trajectory, compile_moves, compile_updates, split_updates

# Note: Second thread. Starting work on it takes tens of microseconds, so smaller segments stay on one thread.
PARALLEL_FROM = 1 << 17
# Note: Ranges. Large enough that the call costs little, small enough that the threads end together. A multiple of Philox's
# groups.
RANGE = 1 << 18  # elements

P = TypeVar("P", bound=Perturb | Program)
Groups: TypeAlias = Sequence[tuple[Evaluation | None, Sequence[Batch]]]  # evaluations, each with the batches to run at it


class Stream(NamedTuple):
    """Batches whose activations pass from segment to segment as those of one batch."""

    batch: Batch  # the one batch, or all of them joined
    batches: Sequence[Batch]
    groups: Sequence[int]  # for each of them, the position of its evaluation in the sweep


class Perturber(ABC):
    """Changes weights during one sweep: applies updates to the stores, and writes perturbed weights to the work buffer."""

    seeds: Collection[int] = ()  # of the directions that this sweep draws

    def __init__(self, buffer: WorkBuffer) -> None:
        self._buffer = buffer

    @property
    @abstractmethod
    def version(self) -> int:
        """The present version of the weights, at which segments are after ``replay``."""

    def streams(self, groups: Groups) -> Sequence[Sequence[Stream]]:
        """Divide a sweep's batches by the weights with which they run."""
        return [[Stream(batch, [batch], [group]) for batch in batches] for group, (_, batches) in enumerate(groups)]

    @abstractmethod
    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version; its bytes are final for this sweep when this returns.

        The work buffer may then hold weights of the first evaluation already.
        """

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let the forward read a segment's frozen weights. Called once a visit."""
        self._buffer.load_frozen(index, stores)

    @abstractmethod
    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Write the weights of a segment's next evaluation, by its position in the sweep, to the work buffer."""

    def finish(self) -> None:  # noqa: B027 - a perturber without a thread of its own has nothing to wait for
        """Wait until the second thread no longer uses the memory, however the sweep ended."""


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
        self.seeds = {evaluation.seed for evaluation in trajectory.evaluations if evaluation is not None}

    @property
    def version(self) -> int:
        """The present version. See ``Perturber``."""
        return self._trajectory.version

    def _origin(self, evaluation: int) -> Evaluation | None:
        """The evaluation from whose weights another one is perturbed in place; None: it is perturbed from the stores."""
        return self._trajectory.evaluations[evaluation - 1] if evaluation and self._trajectory.perturb_in_place else None

    def _kernels(self, index: int) -> ModuleType | None:
        """Kernels that change a segment's parameters in one launch; None if each is changed by itself."""
        views = self._buffer.segments[index]
        if self._buffer.is_low_bit[index] or any(view.unrounded is not None for view in views):
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
        self._replays: dict[tuple[int, bool], list[Mapping[bool, Program]]] = {}  # by the arguments of ``_programs``
        self._updates: dict[int, Mapping[bool, Program]] = {}  # programs of single updates, by step
        self._copies: dict[Evaluation, Program] = {}

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring the store to the present version, and write the first evaluation's weights in the same pass."""
        self._is_prepared = False
        if self._buffer.transfers_back[index]:
            self._replay_low_bit(index, stores, version)
            return self._trajectory.version
        prepares = not self._buffer.is_low_bit[index]
        for programs in self._programs(version, prepares=prepares):
            is_last = programs[False].then is not None
            self._run(index, stores, programs, self._copy(self._first) if is_last and self._first is not None else None)
        self._is_prepared = prepares and self._first is not None
        return self._trajectory.version

    def _replay_low_bit(self, index: int, stores: Stores, version: int) -> None:
        """Replay one update at a time, and round to the transfer dtype after each, as a device does."""
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

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Write an evaluation's weights to the work buffer, unless the replay has done so. See the contract."""
        origin, at = self._origin(evaluation), self._trajectory.evaluations[evaluation]
        if self._is_prepared and evaluation == 0:
            return
        if origin is not None:
            move = self._move(origin, at)
            self._run(index, None, {False: move, True: move}, move)
        elif at is None or at.shift == 0:
            self._buffer.load(index, stores)
        else:
            self._buffer.load_low_bit(index, stores)
            copy = self._copy(at)
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

    def _run(self, index: int, stores: Stores | None, owned: Mapping[bool, Program], borrowed: Program | None) -> None:
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
                _weights(view, stores, program)[start:stop],
                program,
                self._distribution,
                view.spec.index,
                start,
                out=None if program.then is None else out,
                rounded=None if program.then is None and stores is not None else rounded,
            )

        views = [view for view in self._buffer.segments[index] if view.owner == index or borrowed is not None]
        if (kernels := self._kernels(index)) is None:
            self._run_all(index, run, views)
            return
        for program, group in in_one_launch(views, program_of):
            thetas = [_weights(view, stores, program) for view in group]
            outs = None if program.then is None else [view.work for view in group]
            kernels.apply_drawing(thetas, program, self._distribution, [view.spec.index for view in group], outs=outs)

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

        others = [] if worker is None else [worker.submit(work) for _ in range(self._helpers)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()


def _weights(view: ParameterView, stores: Stores | None, program: Program) -> torch.Tensor:
    """Return the weights that a program runs on: stored ones, perturbed ones, or low-bit ones in their stored dtype."""
    if stores is None:
        return view.targets()[0]
    store = stores[view.owner]
    if view.spec.is_low_bit and (program.then is not None or not view.is_stored_in(store)):
        assert program.then is not None or view.spec.transfer_back, (
            "weights that are not transferred back are replayed in their stored dtype"
        )
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
