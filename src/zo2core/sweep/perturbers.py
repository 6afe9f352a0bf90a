"""Perturbers: what brings a segment to the present version, and has its forwards run at perturbed
weights.

``CounterPerturber``: each pass over memory draws the z that it uses. A segment's replay and its
first evaluation are one pass. No state is kept from one pass to the next, and ranges do not depend
on each other, so that threads divide them.

``DrawnPerturber``: a sequential generator draws z into memory, which takes most of the time. Each
direction has its own generator, so two threads draw at once: while the first one applies the
missing updates chunk by chunk, the second one draws the noise of the first evaluation and perturbs
each chunk into the work buffer as soon as it is up to date and still in the cache. Where memory
allows, a segment's z is kept from one evaluation to the next, and two threads perturb along it.
Elsewhere it is drawn again, on one thread.

``FactorPerturber``: low-rank perturbations beside the activations. Weights are only read.

``WorkBuffer``: memory that is allocated once and used in every visit. Its views are the model's
parameters; segments use its memory in turn. Frozen weights that a forward can read in their stored
dtype are not copied: during a visit the segment's modules read them from the store. In the noise
buffer tied weights, which two segments use, have their own memory, so that their noise is drawn
once for both. If the forward computes in another dtype than the stored one, the work buffer holds
the rounded weights. If evaluations are perturbed in place, each from the one before, the unrounded
weights have memory of their own. Weights that are transferred to a device in fewer bits are
converted back there before they are perturbed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import cache, partial
from queue import SimpleQueue
from types import ModuleType
from typing import NamedTuple, TypeAlias

import torch

from zo2core.encodings import decoding
from zo2core.estimators.factors import FactorStore
from zo2core.estimators.noise import noise_bytes
from zo2core.estimators.perturbation import StackedForward, StackedModel
from zo2core.kernels import Draw, apply
from zo2core.kernels.dispatch import triton_kernels
from zo2core.kernels.low_bit import decode, encode, low_bit_bytes, round_low_bit, scales_positions
from zo2core.kernels.programs import (
    Trajectory,
    compile_moves,
    compile_updates,
    seeds_of,
    split_updates,
)
from zo2core.protocols import (
    SEEDS_IN_TURN,
    CounterNoise,
    Device,
    Forward,
    NoiseGenerator,
    Store,
    Stores,
)
from zo2core.types import (
    Batch,
    BlockLayout,
    Evaluation,
    ParameterSpec,
    Perturb,
    Program,
    Update,
    aligned,
    divide_tied,
    flat_views,
    keeps_unrounded,
    packed_bytes,
    unrounded_bytes,
    work_bytes,
)

# Products of float32 vectors round differently if a matrix is not aligned to this. Tensors in a
# file may not be.
_READ_ALIGNMENT = 16  # bytes


class ParameterView(NamedTuple):
    """One parameter in one segment: the memory of its stored weight, its perturbed weight and its
    noise.
    """

    spec: ParameterSpec
    owner: int  # segment whose store holds the weight
    position: int  # position of the weight in that store
    scales: int | None  # position of the scales in a store of 8-bit weights; None for other weights
    work: torch.Tensor  # flat view of the work buffer: the perturbed weight, in the forward's dtype
    # the perturbed weight in its stored dtype; None: it is perturbed in the work buffer
    unrounded: torch.Tensor | None
    z: torch.Tensor | None  # flat view of the noise buffer; None if noise is not kept
    chunks: list[tuple[int, int]]  # (start, stop) of the chunks in which z is drawn

    def stored(self, stores: Stores) -> torch.Tensor:
        """The weight in its store."""
        return stores[self.owner][self.position]

    def is_encoded(self, stored: torch.Tensor) -> bool:
        """Whether a store has the codes of the weight; a shared base hands out decoded weights."""
        return self.spec.encoding is not None and stored.dtype is self.spec.stored_dtype

    def load(self, stores: Stores, helper: Executor | None = None) -> None:
        """Copy or decode the weight to the memory where it is perturbed or read."""
        stored = self.stored(stores)
        (target, _) = self.targets()
        if self.is_encoded(stored):
            decoding.decode(self.spec, stored, target, helper)
        else:
            target.copy_(stored)

    def readable(self, stores: Stores, helper: Executor | None = None) -> torch.Tensor:
        """Return the memory from which modules read the weight: its store if that gives the same
        bits, else the buffer.
        """
        stored = self.stored(stores)
        if (
            stored.dtype is self.spec.in_forward().dtype
            and stored.data_ptr() % _READ_ALIGNMENT == 0
        ):
            return stored.view(self.spec.shape)
        self.load(stores, helper)
        return self.work.view(self.spec.shape)

    def targets(
        self, start: int = 0, stop: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the memory of a range's perturbed weights: unrounded, and rounded for the forward;
        None if not rounded.
        """
        if self.unrounded is None:
            return self.work[start:stop], None
        return self.unrounded[start:stop], self.work[start:stop]


class WorkBuffer:
    """Work and noise memory for segments of these layouts."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        device: Device,
        noise: NoiseGenerator,
        *,
        keep_noise: bool = True,
        perturbs_in_place: bool = True,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        tied, untied = divide_tied(layouts)
        work = (device.empty if allocate is None else allocate)(work_bytes(layouts))
        unrounded_memory = device.empty(
            unrounded_bytes(layouts, perturbs_in_place=perturbs_in_place)
        )
        self._low_bit = device.empty(low_bit_bytes(layouts))  # in which parameters are rounded
        self.keeps_noise = keep_noise and not isinstance(noise, CounterNoise)
        z = device.empty(noise_bytes(layouts)) if self.keeps_noise else None
        # the same memory for all segments that use a weight
        tied_noise = {} if z is None else named_views(tied, z)
        locations = {
            spec.name: (index, position, scales)
            for index, layout in enumerate(layouts)
            for position, (spec, scales) in enumerate(
                zip(layout.parameters, scales_positions(layout), strict=True)
            )
        }
        # for each segment, trained parameters in drawing order
        self.segments: list[tuple[ParameterView, ...]] = []
        self._frozen: list[tuple[ParameterView, ...]] = []  # for each segment, frozen parameters
        for layout, untied_specs in zip(layouts, untied, strict=True):
            used = {spec.name: spec for spec in layout.used}
            kept_noise = (
                {} if z is None else tied_noise | named_views(untied_specs, z[packed_bytes(tied) :])
            )
            works = named_views([spec.in_forward() for spec in used.values()], work)
            unrounded = named_views(
                [
                    spec
                    for spec in used.values()
                    if keeps_unrounded(spec, perturbs_in_place=perturbs_in_place)
                ],
                unrounded_memory,
            )
            views = [
                ParameterView(
                    spec,
                    *locations[name],
                    works[name],
                    unrounded.get(name),
                    kept_noise.get(name),
                    [] if spec.frozen else noise.chunks(spec),
                )
                for name, spec in used.items()
            ]
            views.sort(key=lambda view: view.spec.index)
            self.segments.append(tuple(view for view in views if not view.spec.frozen))
            self._frozen.append(tuple(view for view in views if view.spec.frozen))
        self._device = device
        self.transfers_back = [
            any(spec.is_low_bit and spec.transfer_back for spec in layout.parameters)
            for layout in layouts
        ]
        self.is_low_bit = [any(spec.is_low_bit for spec in layout.used) for layout in layouts]
        self.elements = [sum(view.spec.numel for view in views) for views in self.segments]
        self._drawings: dict[tuple[torch.dtype, str], torch.Tensor] = {}
        self._chunk = max(
            (
                stop - start
                for views in self.segments
                for view in views
                for start, stop in view.chunks
            ),
            default=0,
        )

    def bind(self, bind: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """Make the buffer's views the parameters of a model's modules."""
        self._bind = bind
        # each segment's weights since its last visit, by name
        self.bound: list[dict[str, torch.Tensor]] = [
            {view.spec.name: view.work.view(view.spec.shape) for view in self.views(index)}
            for index in range(len(self.segments))
        ]
        self._reads_stores = False
        for index, parameters in enumerate(self.bound):
            bind(index, parameters)

    def views(self, index: int) -> tuple[ParameterView, ...]:
        """All parameters of a segment."""
        return (*self.segments[index], *self._frozen[index])

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let a segment's modules read frozen weights, from the store or else decoded or rounded
        into the buffer.
        """
        frozen = {view.spec.name: view.readable(stores) for view in self._frozen[index]}
        self._reads_stores |= any(
            frozen[view.spec.name].data_ptr() != view.work.data_ptr()
            for view in self._frozen[index]
        )
        if self._reads_stores and frozen:
            # segments share modules, which may still read another segment's store
            self.bound[index].update(frozen)
            self._bind(index, frozen)

    def load(self, index: int, stores: Stores) -> None:
        """Copy a segment's weights from the stores to the buffer, low-bit ones with the rounding of
        their transfer.
        """
        self.load_low_bit(index, stores)
        for view in self.segments[index]:
            target, rounded = view.targets()
            if not view.spec.is_low_bit:
                view.load(stores)
            if rounded is not None:
                rounded.copy_(target)

    def load_low_bit(self, index: int, stores: Stores) -> None:
        """Convert a segment's low-bit weights to where they are perturbed, with the rounding of
        their transfer.
        """
        for view in self.segments[index]:
            if view.spec.is_low_bit:
                stored = view.stored(stores)
                (target, _) = view.targets()
                if stored.dtype is view.spec.dtype:
                    round_low_bit(view.spec, stored, target, self._low_bit)
                else:
                    decode(
                        stored,
                        None if view.scales is None else stores[view.owner][view.scales],
                        target,
                    )

    def round_to_transfer_dtype(self, index: int, store: Store) -> None:
        """Round a segment's weights to their transfer dtype, if they are transferred back from the
        device.
        """
        for view in self.segments[index]:
            if view.owner == index and view.spec.is_low_bit and view.spec.transfer_back:
                theta = store[view.position]
                if theta.dtype is view.spec.dtype:
                    round_low_bit(view.spec, theta, theta, self._low_bit)
                    continue
                scales = None if view.scales is None else store[view.scales]
                (target, _) = view.targets()
                encode(target, theta, scales)
                decode(theta, scales, target)

    def drawing(self, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """Return memory for a chunk of z: one buffer for each dtype and purpose, kept."""
        key = (dtype, purpose)
        if key not in self._drawings:
            nbytes = self._chunk * dtype.itemsize
            self._drawings[key] = self._device.empty(nbytes)[:nbytes].view(dtype)
        return self._drawings[key]


def named_views(specs: Sequence[ParameterSpec], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Flat typed views of packed parameters, by name."""
    return dict(zip((spec.name for spec in specs), flat_views(specs, memory), strict=True))


# Note: Second thread. Starting work on it takes tens of microseconds, so smaller segments stay on
# one thread.
PARALLEL_FROM = 1 << 17
# Note: Ranges. Large enough that the call costs little, small enough that the threads end together.
# A multiple of Philox's groups.
RANGE = 1 << 18  # elements

# evaluations, each with the batches to run at it
Groups: TypeAlias = Sequence[tuple[Evaluation | None, Sequence[Batch]]]
# of updates, by whether weight decay applies to a parameter
Programs: TypeAlias = Mapping[bool, Program]
Work: TypeAlias = tuple[ParameterView, Sequence[Program]]  # a parameter, and what is run on it
Replayed: TypeAlias = SimpleQueue[int | None]  # ends of replayed chunks; None: the replay failed


class Stream(NamedTuple):
    """Batches whose activations pass from segment to segment as those of one batch."""

    batch: Batch  # the one batch, or all of them joined
    batches: Sequence[Batch]
    groups: Sequence[int]  # for each of them, the position of its evaluation in the sweep


class Perturber(ABC):
    """Changes weights during one sweep: applies updates to the stores, and writes perturbed weights
    to the work buffer.
    """

    seeds: Collection[int] = ()  # of the directions whose generators the next sweep may need

    def __init__(self, buffer: WorkBuffer, version: int) -> None:
        self.buffer = buffer
        self.version = version  # the present one, at which segments are after ``replay``

    def streams(self, groups: Groups, forward: Forward) -> Sequence[Sequence[Stream]]:
        """Divide a sweep's batches by the weights with which they run. Called once."""
        return [
            [Stream(batch, [batch], [group]) for batch in batches]
            for group, (_, batches) in enumerate(groups)
        ]

    @abstractmethod
    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version; its bytes are final for this sweep when
        this returns.

        The work buffer may then hold weights of the first evaluation already.
        """

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let the forward read a segment's frozen weights. Called once a visit."""
        self.buffer.load_frozen(index, stores)

    @abstractmethod
    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Write the weights of a segment's next evaluation, by its position in the sweep, to the
        work buffer.
        """

    def finish(self) -> None:  # noqa: B027 - a perturber without a thread of its own has nothing to wait for
        """Wait until the second thread no longer uses the memory, however the sweep ended."""


class TrajectoryPerturber(Perturber):
    """Replays a trajectory's updates, and perturbs along its evaluations.

    How z is drawn is up to the two kinds of it.
    """

    def __init__(
        self, buffer: WorkBuffer, worker: ThreadPoolExecutor | None, trajectory: Trajectory
    ) -> None:
        super().__init__(buffer, trajectory.version)
        self._worker = worker
        self._trajectory = trajectory
        self._parallel_from = PARALLEL_FROM
        first = trajectory.evaluations[0] if trajectory.evaluations else None
        # prepared during the replay
        self._first = first if first is not None and first.shift != 0 else None
        # whether the work buffer has the first evaluation's weights since the replay
        self._is_prepared = False
        # All segments share programs, so that each is encoded for the kernels once. These caches do
        # not refer to the perturber, which is freed with its sweep, and so is the memory that it
        # uses.
        self._compiled: Callable[[Update], Programs] = cache(
            lambda update: compile_updates([update])
        )
        # Perturbs a copy of the weights, which stay unchanged.
        self._copy: Callable[[Evaluation], Program] = cache(
            lambda evaluation: compile_updates((), evaluation, trajectory.zo_eps)[False]
        )
        self._moves: Callable[[Evaluation | None, Evaluation | None], Sequence[Program]] = cache(
            lambda before, after: [compile_moves(before, after, trajectory.zo_eps)]
        )  # from one evaluation's weights to the next's

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Write an evaluation's weights to the work buffer, unless the replay has done so.

        See the contract.
        """
        if self._is_prepared and evaluation == 0:
            return
        at = self._trajectory.evaluations[evaluation]
        if evaluation and self._trajectory.perturb_in_place:
            # from the weights of the evaluation before
            for move in self._moves(self._trajectory.evaluations[evaluation - 1], at):
                self._run(index, None, [{False: move, True: move}], move)
        elif at is None or at.shift == 0:
            self.buffer.load(index, stores)
        else:
            self.buffer.load_low_bit(index, stores)
            copy = self._copy(at)
            self._run(index, stores, [{False: copy, True: copy}], copy)

    def _missing_updates(self, version: int) -> list[Sequence[Update]]:
        """The updates that a version lacks, in parts for whose seeds a thread draws in turn."""
        return list(split_updates(self._trajectory.updates[version : self.version], SEEDS_IN_TURN))

    def _run(
        self, index: int, stores: Stores | None, owned: Sequence[Programs], borrowed: Program | None
    ) -> None:
        """Run programs on stores, with perturbed copies in the work buffer; in place on perturbed
        weights without stores.
        """
        owned = [
            programs
            for programs in owned
            if programs[False].instructions or programs[False].then is not None
        ]
        by_decay = [[programs[decays] for programs in owned] for decays in (False, True)]
        work: list[Work] = []
        for view in self.buffer.segments[index] if owned else ():
            if view.owner == index:
                work.append((view, by_decay[view.spec.decays]))
            elif borrowed is not None:
                work.append((view, [borrowed]))
        if work:
            self._run_all(index, stores, work)

    @abstractmethod
    def _run_all(self, index: int, stores: Stores | None, work: Sequence[Work]) -> None:
        """Run programs on parameters of a segment, equally many on each."""

    def _kernels(self, index: int) -> ModuleType | None:
        """Kernels that change a segment's parameters in one launch; None if each is changed by
        itself.
        """
        views = self.buffer.segments[index]
        if self.buffer.is_low_bit[index] or any(view.unrounded is not None for view in views):
            return None
        found = [
            triton_kernels(view.work) for view in views if view.spec.dtype is not torch.float64
        ]
        return found[0] if found and len(found) == len(views) and all(found) else None

    def _divide(self, index: int, tasks: Iterable[Callable[[], object]], helpers: int = 1) -> None:
        """Do a segment's tasks on several threads if that saves time."""
        left = deque(tasks)

        @torch.inference_mode()
        def work() -> None:
            while True:
                try:
                    task = left.popleft()
                except IndexError:  # all are begun
                    return
                task()

        others = (
            [self._worker.submit(work) for _ in range(helpers)]
            if self._worker and self._divides(index)
            else []
        )
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()

    def _divides(self, index: int) -> bool:
        """Whether a segment is so large that a second thread saves time."""
        return self._worker is not None and self.buffer.elements[index] >= self._parallel_from


def in_one_launch(
    work: Iterable[tuple[ParameterView, Program]], stores: Stores | None
) -> Iterator[tuple[Program, list[ParameterView], list[torch.Tensor], list[torch.Tensor] | None]]:
    """Divide parameters into those that one launch changes, since they share a program and dtypes.

    Yields:
        The program, the parameters, their weights, and memory for copies if the program makes them.
    """
    groups: dict[tuple[int, torch.dtype, torch.dtype], tuple[Program, list[ParameterView]]] = {}
    for view, program in work:
        # of weights and of copies, as the forward reads them
        dtypes = view.spec.dtype, view.work.dtype
        groups.setdefault((id(program), *dtypes), (program, []))[1].append(view)
    for program, views in groups.values():
        outs = None if program.then is None else [view.work for view in views]
        yield (
            program,
            views,
            [_weights(view, stores, copied=outs is not None) for view in views],
            outs,
        )


def _weights(view: ParameterView, stores: Stores | None, *, copied: bool) -> torch.Tensor:
    """Return stored weights, or perturbed ones without stores; copies of low-bit ones begin in
    their stored dtype.
    """
    if stores is None:
        return view.targets()[0]
    stored = view.stored(stores)
    if view.spec.is_low_bit and (copied or stored.dtype is not view.spec.dtype):
        assert copied or view.spec.transfer_back, (
            "weights that are not transferred back are replayed in their stored dtype"
        )
        return view.targets()[0]
    return stored


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
        # by the arguments of ``_programs``
        self._replays: dict[tuple[int, bool], list[Programs]] = {}

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring the store to the present version, and write the first evaluation's weights in the
        same pass.
        """
        self._is_prepared = False
        if self.buffer.transfers_back[index]:
            self._replay_low_bit(index, stores, version)
            return self.version
        prepares = not self.buffer.is_low_bit[index]
        for programs in self._programs(version, prepares=prepares):
            is_last = programs[False].then is not None
            self._run(
                index,
                stores,
                [programs],
                self._copy(self._first) if is_last and self._first is not None else None,
            )
        self._is_prepared = prepares and self._first is not None
        return self.version

    def _replay_low_bit(self, index: int, stores: Stores, version: int) -> None:
        """Replay one update at a time, and round to the transfer dtype after each, as a device
        does.
        """
        missing = self._trajectory.updates[version : self.version]
        if missing:
            self.buffer.load_low_bit(index, stores)
        if missing and version == 0:  # the base has not been rounded to the transfer dtype
            self.buffer.round_to_transfer_dtype(index, stores[index])
        for update in missing:
            self._run(index, stores, [self._compiled(update)], None)
            self.buffer.round_to_transfer_dtype(index, stores[index])

    def _programs(self, version: int, *, prepares: bool) -> list[Programs]:
        """Compile the missing updates, in parts; the last program may also write the first
        evaluation's weights.
        """
        if (version, prepares) not in self._replays:
            *before, last = self._missing_updates(version)
            last_programs = compile_updates(
                last, self._first if prepares else None, self._trajectory.zo_eps
            )
            self._replays[version, prepares] = [*map(compile_updates, before), last_programs]
        return self._replays[version, prepares]

    def _run_all(self, index: int, stores: Stores | None, work: Sequence[Work]) -> None:
        if (kernels := self._kernels(index)) is not None:
            for program, views, thetas, outs in in_one_launch(
                ((view, program) for view, (program,) in work), stores
            ):
                kernels.apply_drawing(
                    thetas,
                    program,
                    self._distribution,
                    [view.spec.index for view in views],
                    outs=outs,
                )
            return
        length = RANGE if self._divides(index) else max(self.buffer.elements[index], 1)
        tasks = [
            partial(
                self._run_range, view, program, stores, start, min(start + length, view.spec.numel)
            )
            for view, (program,) in work
            for start in range(0, view.spec.numel, length)
        ]
        self._divide(index, tasks, self._helpers)

    def _run_range(
        self, view: ParameterView, program: Program, stores: Stores | None, start: int, stop: int
    ) -> None:
        copies = program.then is not None
        (out, rounded) = view.targets(start, stop)
        theta = _weights(view, stores, copied=copies)[start:stop]
        z = Draw(self._distribution, view.spec.index, start)
        apply(
            theta,
            program,
            z,
            out=out if copies else None,
            rounded=rounded if copies or stores is None else None,
        )


class DrawnPerturber(TrajectoryPerturber):
    """Perturbs with noise that is drawn into memory."""

    def __init__(
        self,
        noise: NoiseGenerator,
        buffer: WorkBuffer,
        worker: ThreadPoolExecutor | None,
        trajectory: Trajectory,
    ) -> None:
        super().__init__(buffer, worker, trajectory)
        self._noise = noise
        self.seeds: set[int] = {
            evaluation.seed for evaluation in trajectory.evaluations if evaluation is not None
        }
        self._replays: dict[int, list[Sequence[Programs]]] = {}  # by version, in parts
        whole_moves = self._moves
        self._moves = cache(
            lambda before, after: [
                move for whole in whole_moves(before, after) for move in _apart(whole)
            ]
        )
        # writes the first evaluation's weights on the second thread
        self._ahead: Future[None] | None = None
        self._replayed: Replayed | None = None  # is told which chunks are replayed
        # seed and parameters of what ``_drawn_together`` has drawn
        self._drawn_at_once: tuple[int, ...] = ()
        # Parameter -> seed whose z is in the noise buffer. Later segments overwrite it, unless the
        # weight is tied.
        self._drawn: dict[str, int] = {}

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version. See the contract."""
        replayed: Replayed = SimpleQueue()
        try:
            missing = self._missing(version)
            self._begin_ahead(index, stores, missing, replayed)
            for programs in missing:
                self._replayed = replayed if self._is_prepared and programs is missing[-1] else None
                self._run(index, stores, programs, None)
        except BaseException:
            replayed.put(None)  # ends the second thread's work, if it has any
            self.finish()
            raise
        return self.version

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Write an evaluation's weights, unless the second thread has done so. See the contract."""
        if self._ahead is not None:  # this is the first evaluation
            self._ahead.result()  # if this is interrupted, ``finish`` can still wait for the thread
            self._ahead = None
        super().perturb(index, stores, evaluation)

    def finish(self) -> None:
        """Wait until the second thread no longer uses the memory. See the contract."""
        if self._ahead is not None:
            wait([self._ahead])

    def _missing(self, version: int) -> list[Sequence[Programs]]:
        """Compile the updates that a version lacks, one by one: z of each takes memory."""
        if version not in self._replays:
            parts = self._missing_updates(version)
            self.seeds.update(
                seed for updates in parts for update in updates for seed in seeds_of(update)
            )
            self._replays[version] = [
                [self._compiled(update) for update in updates] for updates in parts
            ]
        return self._replays[version]

    def _begin_ahead(
        self, index: int, stores: Stores, missing: Sequence[Sequence[Programs]], replayed: Replayed
    ) -> None:
        """Let the second thread prepare the first evaluation, if that saves time; each replayed
        chunk is sent to it.
        """
        self._is_prepared, first = False, self._first
        if self._worker is None or first is None or self._kernels(index) is not None:
            return
        owned = sum(view.spec.numel for view in self.buffer.segments[index] if view.owner == index)
        if owned < self._parallel_from:
            return  # there is little to replay; later both threads perturb the borrowed weights
        if any(first.seed in program[False].seeds for programs in missing for program in programs):
            # two threads would draw from one seed's generator, which would start over for each
            # chunk
            return
        work: list[Work] = [(view, [self._copy(first)]) for view in self.buffer.segments[index]]
        self._is_prepared = True
        is_behind = any(programs[False].instructions for programs in missing[-1])
        awaited = replayed if is_behind else None
        self._ahead = self._worker.submit(self._run_chunks, index, stores, work, awaited=awaited)

    def _run_all(self, index: int, stores: Stores | None, work: Sequence[Work]) -> None:
        programs = work[0][1]
        kernels = None if self.buffer.keeps_noise else self._kernels(index)
        if kernels is not None and all(len(program.seeds) == 1 for program in programs):
            for number, program in enumerate(programs):
                for zs in self._drawn_together([view for view, _ in work], program.seeds[0]):
                    part = ((view, each[number]) for view, each in work if view.spec.index in zs)
                    for launched, views, thetas, outs in in_one_launch(part, stores):
                        kernels.apply(
                            thetas, launched, [[zs[view.spec.index] for view in views]], outs
                        )
        elif _perturbs(programs[0], stores) and all(
            self._has_drawn(view, programs[0]) for view, _ in work
        ):
            halves = [
                partial(self._run_chunks, index, stores, work, part=part, parts=2)
                for part in range(2)
            ]
            self._divide(index, halves)
        else:
            self._run_chunks(index, stores, work)

    @torch.inference_mode()
    def _run_chunks(
        self,
        index: int,
        stores: Stores | None,
        work: Sequence[Work],
        *,
        part: int = 0,
        parts: int = 1,
        awaited: Replayed | None = None,
    ) -> None:
        """Run programs on every ``parts``-th chunk of each parameter, along z that is in the noise
        buffer or is drawn now.

        With ``awaited``, each chunk of the segment's own parameters waits for a message that it is
        up to date.
        """
        perturbs = _perturbs(work[0][1][0], stores)
        for view, programs in work:
            spec = view.spec
            has_drawn = perturbs and self._has_drawn(view, programs[0])
            for start, stop in view.chunks[part::parts]:
                out, rounded = view.targets(start, stop)
                for program in programs:
                    if perturbs and view.z is not None:
                        zs = [view.z[start:stop]]
                    else:
                        names = (
                            ["z move"]
                            if perturbs
                            else [f"z {number}" for number in range(len(program.seeds))]
                        )
                        zs = [
                            self.buffer.drawing(spec.dtype, name)[: stop - start] for name in names
                        ]
                    for z, seed in () if has_drawn else zip(zs, program.seeds, strict=True):
                        self._noise.fill(z, seed, spec, start)
                    if awaited is not None and view.owner == index and awaited.get() is None:
                        return
                    copies = program.then is not None
                    theta = _weights(view, stores, copied=copies)[start:stop]
                    apply(
                        theta,
                        program,
                        zs,
                        out=out if copies else None,
                        rounded=rounded if perturbs else None,
                    )
                if not perturbs and self._replayed is not None:
                    self._replayed.put(stop)
            if perturbs and view.z is not None:
                self._drawn[spec.name] = programs[0].seeds[0]

    def _has_drawn(self, view: ParameterView, program: Program) -> bool:
        """Whether the noise buffer has z of the direction along which a program perturbs a
        parameter.
        """
        return view.z is not None and (self._drawn.get(view.spec.name),) == program.seeds

    def _drawn_together(
        self, views: Sequence[ParameterView], seed: int
    ) -> Iterator[Mapping[int, torch.Tensor]]:
        """Draw one direction for parameters in turn, as many at a time as the memory for each
        dtype's longest one holds.

        What a part of a segment has drawn there is used again for the next evaluation along the
        same direction.

        Yields:
            The z of a part of the parameters, by index.
        """
        parts: list[dict[int, torch.Tensor]] = [{}]
        ends: dict[torch.dtype, int] = {}
        for view in views:
            memory = self.buffer.drawing(view.spec.dtype, "z together")
            numel = view.spec.numel
            if ends.get(view.spec.dtype, 0) + numel > len(memory):
                parts.append({})
                ends = {}
            start = ends.get(view.spec.dtype, 0)
            parts[-1][view.spec.index] = memory[start : start + numel]
            ends[view.spec.dtype] = start + aligned(numel * memory.itemsize) // memory.itemsize
        for zs in parts:
            if self._drawn_at_once != (seed, *zs):
                for view in views:
                    for start, stop in view.chunks if view.spec.index in zs else ():
                        self._noise.fill(zs[view.spec.index][start:stop], seed, view.spec, start)
                self._drawn_at_once = (seed, *zs)
            yield zs


def _perturbs(program: Program, stores: Stores | None) -> bool:
    """Whether a program writes perturbed weights, where others bring stores to another version."""
    return stores is None or program.then is not None


def _apart(program: Program) -> list[Program]:
    """The perturbations of a program, each as one of its own: z of several directions would take
    memory.
    """
    moves = [move for move in program.instructions if isinstance(move, Perturb)]
    return [
        Program((program.seeds[move.direction],), (move._replace(direction=0),)) for move in moves
    ]


class FactorPerturber(Perturber):
    """Perturbs beside the activations: streams that are stacked run as one batch.

    Weights are only read.
    """

    def __init__(
        self,
        model: StackedModel,
        factors: FactorStore,
        buffer: WorkBuffer,
        worker: Executor | None,
        trajectory: Trajectory,
    ) -> None:
        super().__init__(buffer, trajectory.version)
        self._model = model
        self._factors = factors
        self._worker = worker
        self._trajectory = trajectory
        self._perturbations: list[Program] = []  # of each stack
        factors.begin_sweep()

    def streams(self, groups: Groups, forward: Forward) -> Sequence[Sequence[Stream]]:
        """Have each stack run with perturbations of its own. See ``Perturber``."""
        stacks = list(_stacks(forward, groups, self._factors.most_streams))
        factors = self._factors
        self._perturbations = [
            factors.perturbations(
                [groups[group][0] for group in stack.groups], self._trajectory.zo_eps
            )
            for stack in stacks
        ]
        return [[stack] for stack in stacks]

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring the segment's factors to the present version; its weights stay as they are."""
        for spec, theta in zip(self._model.layouts[index].parameters, stores[index], strict=True):
            if not spec.frozen:
                self._factors.advance(spec, theta, self._trajectory.updates, self.version)
        return version

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let the forward read all of a segment's weights. See ``Perturber``."""
        views = self.buffer.views(index)
        self._model.bind(index, {view.spec.name: self._readable(view, stores) for view in views})

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Add the perturbations of a stack beside the activations. See ``Perturber``."""
        program = self._perturbations[evaluation]
        perturbed = {
            view.spec.name: self._factors.perturbed(view.spec, view.stored(stores), program)
            for view in self.buffer.segments[index]
        }
        self._model.perturb(index, perturbed, len(program.instructions))

    def finish(self) -> None:
        """Remove the perturbations from the model, which another engine may use next."""
        self._model.perturb(0, {}, 1)

    def _readable(self, view: ParameterView, stores: Stores) -> torch.Tensor:
        """Return the tensor from which modules read a parameter, with past periods if it has
        many.
        """
        if not self._factors.forms(view.spec):
            return view.readable(stores, self._worker)
        theta = view.stored(stores)
        weight = view.work.view(view.spec.shape)
        if view.is_encoded(theta):
            view.load(stores, self._worker)
            theta = weight
        self._factors.form(view.spec, theta, weight, self._worker)
        return weight


def _stacks(forward: Forward, groups: Groups, most_streams: int | None) -> Iterator[Stream]:
    """Stack the evaluations of each micro-batch, at most so many at a time; those that cannot be
    stacked run alone.
    """
    for number in range(max((len(batches) for _, batches in groups), default=0)):
        streams = [
            (group, batches[number])
            for group, (_, batches) in enumerate(groups)
            if number < len(batches)
        ]
        most = len(streams) if most_streams is None else most_streams
        for start in range(0, len(streams), most):
            part = streams[start : start + most]
            batches = [batch for _, batch in part]
            stacked = (
                forward.stacked(batches)
                if len(part) > 1 and isinstance(forward, StackedForward)
                else None
            )
            if stacked is None:
                yield from (Stream(batch, [batch], [group]) for group, batch in part)
            else:
                yield Stream(stacked, batches, [group for group, _ in part])
