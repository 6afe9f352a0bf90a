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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from types import ModuleType
from typing import NamedTuple, TypeAlias

import torch

from zo2core.encodings import decoding
from zo2core.estimators.noise import noise_bytes
from zo2core.kernels import parallel
from zo2core.kernels.dispatch import (
    Kernel,
    choose_kernel,
    triton_kernels,
)
from zo2core.kernels.low_bit import low_bit_bytes, scales_positions
from zo2core.kernels.programs import (
    Draw,
    Trajectory,
    compile_copy,
    compile_moves,
    compile_updates,
    seeds_of,
    single_moves,
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
from zo2core.sweep.low_bit_weights import LowBitWeight, LowBitWeights
from zo2core.types import (
    Batch,
    BlockLayout,
    Evaluation,
    ParameterSpec,
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
    """One parameter in one segment: where its stored weight is, and the memory of its perturbed
    weight and its noise.
    """

    spec: ParameterSpec
    owner: int  # segment whose store holds the weight
    position: int  # position of the weight in that store
    is_low_bit: bool  # whether it is converted from its transfer dtype before it is perturbed
    work: torch.Tensor  # flat view of the work buffer: what the forward reads, in its dtype
    # flat, where the weight is perturbed: in its stored dtype, or else in the work buffer
    target: torch.Tensor
    rounded: torch.Tensor | None  # ``work``, where the target is memory of its own
    z: torch.Tensor | None  # flat view of the noise buffer; None if noise is not kept
    chunks: list[tuple[int, int]]  # (start, stop) of the chunks in which z is drawn
    apply: Kernel  # runs programs on the stored weight and on the target

    def stored(self, stores: Stores) -> torch.Tensor:
        """The weight in its store."""
        return stores[self.owner][self.position]

    def load(self, stored: torch.Tensor) -> None:
        """Copy or decode the weight to the memory where it is perturbed or read.

        A shared base hands out decoded weights.
        """
        if self.spec.encoding is None or stored.dtype is self.spec.dtype:
            self.target.copy_(stored)
        else:
            decoding.decode(self.spec, stored, self.target)

    def readable(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the memory from which modules read the weight: its store if that gives the same
        bits, else the buffer.
        """
        if stored.dtype is self.work.dtype and stored.data_ptr() % _READ_ALIGNMENT == 0:
            return stored.view(self.spec.shape)
        self.load(stored)
        return self.work.view(self.spec.shape)


class SegmentViews(NamedTuple):
    """The parameters of one segment in the work buffer, and what holds for all of them."""

    trained: tuple[ParameterView, ...]  # in drawing order
    owned: tuple[ParameterView, ...]  # the trained ones whose weight is in the segment's store
    frozen: tuple[ParameterView, ...]
    numel: int  # elements of the trained ones
    owned_numel: int  # elements of the owned ones
    # trained ones that are converted from their transfer dtype; None: there is none
    low_bit: LowBitWeights | None
    # kernels that change all trained ones in one launch; None if each is changed by itself
    kernels: ModuleType | None

    @property
    def all(self) -> tuple[ParameterView, ...]:
        """All parameters."""
        return (*self.trained, *self.frozen)


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
        self._device = device
        self.keeps_noise = keep_noise and not isinstance(noise, CounterNoise)
        memory = _Memory(
            work=(device.empty if allocate is None else allocate)(work_bytes(layouts)),
            unrounded=device.empty(unrounded_bytes(layouts, perturbs_in_place=perturbs_in_place)),
            z=device.empty(noise_bytes(layouts)) if self.keeps_noise else None,
            low_bit=device.empty(low_bit_bytes(layouts)),
            perturbs_in_place=perturbs_in_place,
        )
        stored = _stored_positions(layouts)
        kept_noise = _kept_noise(layouts, memory.z)
        self.segments: list[SegmentViews] = []
        for index, layout in enumerate(layouts):
            views = _parameter_views(layout, stored, memory, kept_noise[index], noise)
            low_bit = _low_bit_weights(index, views, stored, memory)
            self.segments.append(_segment_views(index, views, low_bit))
        self._drawings: dict[tuple[torch.dtype, str], torch.Tensor] = {}
        self._longest_chunk = max(
            (
                stop - start
                for segment in self.segments
                for view in segment.trained
                for start, stop in view.chunks
            ),
            default=0,
        )

    @property
    def has_threads(self) -> bool:
        """Whether several threads may change it; on a device kernels run in streams of the thread
        that launches them.
        """
        return self._device.torch_device.type == "cpu" and parallel.thread_count() > 1

    def bind(self, bind: Callable[[int, Mapping[str, torch.Tensor]], None]) -> None:
        """Make the buffer's views the parameters of a model's modules."""
        self._bind = bind
        # each segment's weights since its last visit, by name
        self.bound: list[dict[str, torch.Tensor]] = [
            {view.spec.name: view.work.view(view.spec.shape) for view in segment.all}
            for segment in self.segments
        ]
        self._reads_stores = False
        for index, parameters in enumerate(self.bound):
            if parameters:
                bind(index, parameters)

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let a segment's modules read frozen weights, from the store or else decoded or rounded
        into the buffer.
        """
        frozen: dict[str, torch.Tensor] = {}
        for view in self.segments[index].frozen:
            weight = view.readable(stores[view.owner][view.position])
            frozen[view.spec.name] = weight
            self._reads_stores |= weight.data_ptr() != view.work.data_ptr()
        if self._reads_stores and frozen:
            # segments share modules, which may still read another segment's store
            self.bound[index].update(frozen)
            self._bind(index, frozen)

    def load(self, index: int, stores: Stores) -> None:
        """Copy a segment's weights from the stores to the buffer, low-bit ones with the rounding of
        their transfer.
        """
        segment = self.segments[index]
        if segment.low_bit is not None:
            segment.low_bit.load(stores)
        for view in segment.trained:
            if not view.is_low_bit:
                view.load(stores[view.owner][view.position])
            if view.rounded is not None:
                view.rounded.copy_(view.target)

    def drawing(self, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """Return memory for a chunk of z: one buffer for each dtype and purpose, kept."""
        key = (dtype, purpose)
        if key not in self._drawings:
            nbytes = self._longest_chunk * dtype.itemsize
            self._drawings[key] = self._device.empty(nbytes)[:nbytes].view(dtype)
        return self._drawings[key]


class _Memory(NamedTuple):
    """The memory of a work buffer, uint8, which segments use in turn."""

    work: torch.Tensor  # weights as forwards read them
    unrounded: torch.Tensor  # perturbed weights whose rounded copy is in ``work``
    z: torch.Tensor | None  # noise that is kept; None: it is drawn again
    low_bit: torch.Tensor  # in which a weight is rounded to its transfer dtype
    perturbs_in_place: bool


class _StoredPosition(NamedTuple):
    """Where a stored weight is."""

    owner: int  # segment
    weight: int  # position in the segment's store
    scales: int | None  # position of the scales of 8-bit weights in a store that has them


def _stored_positions(layouts: Sequence[BlockLayout]) -> dict[str, _StoredPosition]:
    """Where each parameter is stored, by name."""
    positions: dict[str, _StoredPosition] = {}
    for index, layout in enumerate(layouts):
        pairs = zip(layout.parameters, scales_positions(layout), strict=True)
        for position, (spec, scales) in enumerate(pairs):
            positions[spec.name] = _StoredPosition(index, position, scales)
    return positions


def _kept_noise(
    layouts: Sequence[BlockLayout], z: torch.Tensor | None
) -> list[dict[str, torch.Tensor]]:
    """Memory for the noise of each segment's parameters, by name.

    Segments that use a tied weight have the same memory for its noise.
    """
    if z is None:
        return [{} for _ in layouts]
    tied, untied = divide_tied(layouts)
    tied_noise = named_views(tied, z)
    untied_memory = z[packed_bytes(tied) :]
    return [tied_noise | named_views(specs, untied_memory) for specs in untied]


def _parameter_views(
    layout: BlockLayout,
    stored: Mapping[str, _StoredPosition],
    memory: _Memory,
    kept_noise: Mapping[str, torch.Tensor],
    noise: NoiseGenerator,
) -> list[ParameterView]:
    """The parameters that a segment uses, in drawing order."""
    specs = list({spec.name: spec for spec in layout.used}.values())
    works = named_views([spec.in_forward() for spec in specs], memory.work)
    with_unrounded = [
        spec for spec in specs if keeps_unrounded(spec, perturbs_in_place=memory.perturbs_in_place)
    ]
    unrounded = named_views(with_unrounded, memory.unrounded)
    views: list[ParameterView] = []
    for spec in sorted(specs, key=lambda spec: spec.index):
        work = works[spec.name]
        target = unrounded.get(spec.name, work)
        rounded = None if target is work else work
        weights = torch.empty(0, dtype=spec.dtype, device=work.device)
        views.append(
            ParameterView(
                spec,
                owner=stored[spec.name].owner,
                position=stored[spec.name].weight,
                is_low_bit=spec.is_low_bit,
                work=work,
                target=target,
                rounded=rounded,
                z=kept_noise.get(spec.name),
                chunks=[] if spec.frozen else noise.chunks(spec),
                apply=choose_kernel(weights, copies=(target, rounded)),
            )
        )
    return views


def _low_bit_weights(
    index: int,
    views: Sequence[ParameterView],
    stored: Mapping[str, _StoredPosition],
    memory: _Memory,
) -> LowBitWeights | None:
    """A segment's trained weights that are transferred in fewer bits; None if there is none."""
    weights = [
        LowBitWeight(view.spec, *stored[view.spec.name], view.target)
        for view in views
        if view.is_low_bit and not view.spec.frozen
    ]
    return LowBitWeights(index, weights, memory.low_bit) if weights else None


def _segment_views(
    index: int, views: Sequence[ParameterView], low_bit: LowBitWeights | None
) -> SegmentViews:
    """Divide a segment's parameters into trained and frozen ones."""
    trained = tuple(view for view in views if not view.spec.frozen)
    owned = tuple(view for view in trained if view.owner == index)
    return SegmentViews(
        trained=trained,
        owned=owned,
        frozen=tuple(view for view in views if view.spec.frozen),
        numel=sum(view.spec.numel for view in trained),
        owned_numel=sum(view.spec.numel for view in owned),
        low_bit=low_bit,
        kernels=_kernels_in_one_launch(trained),
    )


def _kernels_in_one_launch(views: Sequence[ParameterView]) -> ModuleType | None:
    """Kernels that change all of these parameters in one launch; None if one of them has no such
    kernel, or is perturbed where the forward does not read it.
    """
    kernels: ModuleType | None = None
    for view in views:
        kernels = triton_kernels(view.work)
        is_rounded_apart = view.rounded is not None or view.is_low_bit
        if kernels is None or is_rounded_apart or view.spec.dtype is torch.float64:
            return None
    return kernels


def named_views(specs: Sequence[ParameterSpec], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Flat typed views of packed parameters, by name."""
    return dict(zip((spec.name for spec in specs), flat_views(specs, memory), strict=True))


# Note: Threads. Starting work in them takes about 0.1 ms, so smaller segments stay in one.
PARALLEL_FROM = 1 << 17
# Note: Ranges. Large enough that the call costs little, small enough that the threads end together.
# A multiple of Philox's groups.
RANGE = 1 << 18  # elements

# evaluations, each with the batches to run at it
Groups: TypeAlias = Sequence[tuple[Evaluation | None, Sequence[Batch]]]
# of one update or of several ones, by whether weight decay applies to a parameter
Programs: TypeAlias = Mapping[bool, Program]
ProgramsInTurn: TypeAlias = Mapping[bool, Sequence[Program]]  # the same, run one after the other
ReplayedChunks: TypeAlias = SimpleQueue[int | None]  # their ends; None: the replay failed


class Stream(NamedTuple):
    """Batches whose activations pass from segment to segment as those of one batch."""

    batch: Batch  # the one batch, or all of them joined
    batches: Sequence[Batch]
    groups: Sequence[int]  # for each of them, the position of its evaluation in the sweep


class Perturber(ABC):
    """Changes weights during one sweep: applies updates to the stores, and writes perturbed weights
    to the work buffer.
    """

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

    def finish(self) -> None:  # noqa: B027 - most have nothing to free
        """Free what the sweep alone needed, however it ended."""


class Operation(NamedTuple):
    """Programs that one pass over a parameter's memory runs."""

    view: ParameterView
    programs: Sequence[Program]  # run one after the other on each range
    weights: torch.Tensor  # flat; changed in place, or copied
    out: torch.Tensor | None  # flat; memory for a perturbed copy, if the program makes one
    rounded: torch.Tensor | None  # flat; memory for the result as the forward reads it

    def run(
        self, program: Program, z: Draw | Sequence[torch.Tensor], start: int, stop: int
    ) -> None:
        """Run one of the programs on a range."""
        self.view.apply(
            self.weights[start:stop],
            program,
            z,
            None if self.out is None else self.out[start:stop],
            None if self.rounded is None else self.rounded[start:stop],
        )


class TrajectoryPerturber(Perturber):
    """Replays a trajectory's updates, and perturbs along its evaluations.

    How z is drawn is up to the two kinds of it. All segments share programs, so that each is
    encoded for the kernels once.
    """

    def __init__(self, buffer: WorkBuffer, trajectory: Trajectory) -> None:
        super().__init__(buffer, trajectory.version)
        self._trajectory = trajectory
        self._parallel_from = PARALLEL_FROM
        evaluations = trajectory.evaluations
        # for each evaluation what perturbs a copy of the weights, which stay unchanged; None: the
        # weights are not perturbed
        self._copies = [
            None
            if evaluation is None or evaluation.shift == 0
            else compile_copy(evaluation, trajectory.zo_eps)
            for evaluation in evaluations
        ]
        # for each evaluation after the first one what perturbs the weights of the one before
        self._moves: list[list[Program]] = []
        for start, end in pairwise(evaluations):
            move = compile_moves(start, end, trajectory.zo_eps)
            self._moves.append([move] if move.instructions else [])
        # whether the work buffer has the first evaluation's weights since the replay
        self._is_prepared = False

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Write an evaluation's weights to the work buffer, unless the replay has done so."""
        if evaluation == 0 and self._is_prepared:
            return
        if evaluation > 0 and self._trajectory.perturb_in_place:
            for move in self._moves[evaluation - 1]:
                self._run(index, self._moving_operations(index, move))
            return
        copy = self._copies[evaluation]
        if copy is None:
            self.buffer.load(index, stores)
            return
        low_bit = self.buffer.segments[index].low_bit
        if low_bit is not None:
            low_bit.load(stores)
        self._run(index, self._copying_operations(index, stores, {False: copy, True: copy}, copy))

    def _missing_updates(self, version: int) -> list[Sequence[Update]]:
        """The updates that a version lacks, in parts for whose seeds a thread draws in turn."""
        missing = self._trajectory.updates[version : self.version]
        return list(split_updates(missing, SEEDS_IN_TURN))

    @abstractmethod
    def _run(self, index: int, operations: Sequence[Operation]) -> None:
        """Run the operations of a segment, each of one program; all have the same directions."""

    def _operations_in_store(
        self, index: int, store: Store, programs: ProgramsInTurn
    ) -> list[Operation]:
        """Operations that change the weights of a segment's store."""
        operations: list[Operation] = []
        for view in self.buffer.segments[index].owned:
            weights = store[view.position]
            if weights.dtype is not view.spec.dtype:
                assert view.spec.transfer_back, "other weights are replayed in their stored dtype"
                weights = view.target  # converted before, and back afterwards
            operations.append(Operation(view, programs[view.spec.decays], weights, None, None))
        return operations

    def _copying_operations(
        self, index: int, stores: Stores, owned: Programs, borrowed: Program
    ) -> list[Operation]:
        """Operations that write perturbed copies of weights to the work buffer.

        Those of low-bit ones start where these were converted to.
        """
        operations: list[Operation] = []
        for view in self.buffer.segments[index].trained:
            program = owned[view.spec.decays] if view.owner == index else borrowed
            weights = view.target if view.is_low_bit else stores[view.owner][view.position]
            operations.append(Operation(view, (program,), weights, view.target, view.rounded))
        return operations

    def _moving_operations(self, index: int, program: Program) -> list[Operation]:
        """Operations that perturb perturbed weights further."""
        return [
            Operation(view, (program,), view.target, None, view.rounded)
            for view in self.buffer.segments[index].trained
        ]

    def _divide(self, index: int, tasks: Sequence[Callable[[], object]]) -> None:
        """Do a segment's tasks, on several threads if that saves time."""
        if self._divides(index):
            parallel.run_together(tasks)
        else:
            for task in tasks:
                task()

    def _divides(self, index: int) -> bool:
        """Whether a segment is so large that further threads save time."""
        return self.buffer.has_threads and self.buffer.segments[index].numel >= self._parallel_from


class Launch(NamedTuple):
    """Parameters that one launch changes, since they share a program and dtypes."""

    program: Program
    views: list[ParameterView]
    weights: list[torch.Tensor]
    outs: list[torch.Tensor] | None  # memory for copies, if the program makes them


def divide_by_launch(operations: Iterable[Operation], number: int = 0) -> list[Launch]:
    """Divide operations, each with its program of this number, by the launch that runs them."""
    launches: dict[tuple[int, torch.dtype, torch.dtype], Launch] = {}
    for operation in operations:
        program = operation.programs[number]
        # dtypes of weights and of copies, as the forward reads them
        key = id(program), operation.view.spec.dtype, operation.view.work.dtype
        if key not in launches:
            launches[key] = Launch(program, [], [], None if program.then is None else [])
        launch = launches[key]
        launch.views.append(operation.view)
        launch.weights.append(operation.weights)
        if launch.outs is not None and operation.out is not None:
            launch.outs.append(operation.out)
    return list(launches.values())


class CounterPerturber(TrajectoryPerturber):
    """Perturbs with noise that kernels draw."""

    def __init__(
        self,
        noise: CounterNoise,
        buffer: WorkBuffer,
        trajectory: Trajectory,
    ) -> None:
        super().__init__(buffer, trajectory)
        self._distribution = noise.distribution
        # by version, and by whether the last program writes the first evaluation's weights
        self._replays: dict[tuple[int, bool], list[Programs]] = {}
        self._low_bit_replays: dict[int, Programs] = {}  # by step

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring the store to the present version, and write the first evaluation's weights in the
        same pass.
        """
        low_bit = self.buffer.segments[index].low_bit
        self._is_prepared = False
        if low_bit is not None and low_bit.transfers_back:
            self._replay_low_bit(index, low_bit, stores, version)
            return self.version
        first = self._copies[0] if self._copies and low_bit is None else None
        for programs in self._programs(version, prepares=first is not None):
            if programs[False].then is None:
                self._change_store(index, stores[index], programs)
            else:
                assert first is not None, "programs make copies for the first evaluation"
                self._run(index, self._copying_operations(index, stores, programs, first))
        self._is_prepared = first is not None
        return self.version

    def _replay_low_bit(
        self, index: int, low_bit: LowBitWeights, stores: Stores, version: int
    ) -> None:
        """Replay one update at a time, and round to the transfer dtype after each, as a device
        does.
        """
        if version < self.version:
            low_bit.load(stores)
        store = stores[index]
        for step in range(version, self.version):
            if step == 0:  # the base has not been rounded to the transfer dtype
                low_bit.round(store)
            if step not in self._low_bit_replays:
                self._low_bit_replays[step] = compile_updates([self._trajectory.updates[step]])
            self._change_store(index, store, self._low_bit_replays[step])
            low_bit.round(store)

    def _programs(self, version: int, *, prepares: bool) -> list[Programs]:
        """Compile the missing updates, in parts; the last program may also write the first
        evaluation's weights.
        """
        if (version, prepares) not in self._replays:
            *earlier, last = self._missing_updates(version)
            first = self._trajectory.evaluations[0] if prepares else None
            last_programs = compile_updates(last, first, self._trajectory.zo_eps)
            self._replays[version, prepares] = [*map(compile_updates, earlier), last_programs]
        return self._replays[version, prepares]

    def _change_store(self, index: int, store: Store, programs: Programs) -> None:
        """Run programs on the weights of a segment's store."""
        if programs[False].instructions:
            by_decay = {decays: (program,) for decays, program in programs.items()}
            self._run(index, self._operations_in_store(index, store, by_decay))

    def _run(self, index: int, operations: Sequence[Operation]) -> None:
        kernels = self.buffer.segments[index].kernels
        if kernels is not None:
            for launch in divide_by_launch(operations):
                kernels.apply_drawing(
                    launch.weights,
                    launch.program,
                    self._distribution,
                    [view.spec.index for view in launch.views],
                    outs=launch.outs,
                )
            return
        length = max(self.buffer.segments[index].numel, 1)
        if self._divides(index):
            length = RANGE
        tasks = [
            partial(self._run_range, operation, start, min(start + length, len(operation.weights)))
            for operation in operations
            for start in range(0, len(operation.weights), length)
        ]
        self._divide(index, tasks)

    def _run_range(self, operation: Operation, start: int, stop: int) -> None:
        draw = Draw(self._distribution, operation.view.spec.index, start)
        operation.run(operation.programs[0], draw, start, stop)


class DrawnPerturber(TrajectoryPerturber):
    """Perturbs with noise that is drawn into memory."""

    def __init__(
        self,
        noise: NoiseGenerator,
        buffer: WorkBuffer,
        trajectory: Trajectory,
    ) -> None:
        super().__init__(buffer, trajectory)
        self._noise = noise
        # z of several directions would take memory
        self._moves = [
            [single for move in moves for single in single_moves(move)] for moves in self._moves
        ]
        # of the directions whose generators the next sweep may need
        self._seeds = {
            evaluation.seed for evaluation in trajectory.evaluations if evaluation is not None
        }
        # by version, in parts: a program for each update, since z of each takes memory
        self._replays: dict[int, list[ProgramsInTurn]] = {}
        # seed and parameters of what ``_draw_together`` has drawn
        self._drawn_at_once: tuple[int, ...] = ()
        # Parameter -> seed whose z is in the noise buffer. Later segments overwrite it, unless the
        # weight is tied.
        self._kept_seeds: dict[str, int] = {}

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version; write the first evaluation's weights
        beside it, if that saves time.
        """
        parts = self._programs(version)
        first = self._first_evaluation(index, stores, parts)
        self._is_prepared = first is not None
        if first is None:
            self._replay_parts(index, stores, parts, None)
            return self.version
        replayed: ReplayedChunks = SimpleQueue()
        awaited = replayed if parts[-1][False] else None
        parallel.run_together(
            [
                partial(self._replay_parts, index, stores, parts, replayed),
                partial(self._perturb_chunks, index, first, awaited=awaited),
            ],
            failed=partial(replayed.put, None),
        )
        return self.version

    def finish(self) -> None:
        """Free the generators of other directions, however the sweep ended."""
        self._noise.retain(self._seeds)

    def _programs(self, version: int) -> list[ProgramsInTurn]:
        """Compile the missing updates, in parts."""
        if version not in self._replays:
            parts = self._missing_updates(version)
            self._replays[version] = [self._compile(updates) for updates in parts]
        return self._replays[version]

    def _compile(self, updates: Sequence[Update]) -> ProgramsInTurn:
        """Compile updates one by one."""
        programs: dict[bool, list[Program]] = {False: [], True: []}
        for update in updates:
            self._seeds.update(seeds_of(update))
            compiled = compile_updates([update])
            if compiled[False].instructions:
                for decays, program in compiled.items():
                    programs[decays].append(program)
        return programs

    def _first_evaluation(
        self, index: int, stores: Stores, parts: Sequence[ProgramsInTurn]
    ) -> list[Operation] | None:
        """The operations that write a segment's weights of the first evaluation, where a second
        thread does that beside the replay.
        """
        segment = self.buffer.segments[index]
        first = self._copies[0] if self._copies else None
        if first is None or segment.kernels is not None or not self.buffer.has_threads:
            return None
        if segment.owned_numel < self._parallel_from:
            return None  # there is little to replay; later both threads perturb borrowed weights
        if any(first.seeds[0] in program.seeds for part in parts for program in part[False]):
            # two threads would draw from one seed's generator, which would start over for each
            # chunk
            return None
        return self._copying_operations(index, stores, {False: first, True: first}, first)

    def _replay_parts(
        self,
        index: int,
        stores: Stores,
        parts: Sequence[ProgramsInTurn],
        replayed: ReplayedChunks | None,
    ) -> None:
        """Run parts of programs on a segment's store; each chunk that has passed the last part is
        put into ``replayed``.
        """
        for part in parts:
            operations = self._operations_in_store(index, stores[index], part)
            self._replay(index, operations, replayed if part is parts[-1] else None)

    def _replay(
        self, index: int, operations: Sequence[Operation], replayed: ReplayedChunks | None
    ) -> None:
        if not operations or not operations[0].programs:
            return
        programs = operations[0].programs
        kernels = self._kernels_for_drawn(index)
        if kernels is None or any(len(program.seeds) != 1 for program in programs):
            self._replay_chunks(operations, replayed)
            return
        for number, program in enumerate(programs):
            self._run_together(kernels, operations, number, program.seeds[0])

    def _run(self, index: int, operations: Sequence[Operation]) -> None:
        if not operations:
            return
        seed = operations[0].programs[0].seeds[0]
        kernels = self._kernels_for_drawn(index)
        if kernels is not None:
            self._run_together(kernels, operations, 0, seed)
        elif {self._kept_seeds.get(operation.view.spec.name) for operation in operations} == {seed}:
            halves = [
                partial(self._perturb_chunks, index, operations, part=part, parts=2)
                for part in range(2)
            ]
            self._divide(index, halves)
        else:
            self._perturb_chunks(index, operations)

    def _kernels_for_drawn(self, index: int) -> ModuleType | None:
        """Kernels that change a segment's parameters in one launch, along noise that is not
        kept.
        """
        return None if self.buffer.keeps_noise else self.buffer.segments[index].kernels

    @torch.inference_mode()
    def _replay_chunks(
        self, operations: Sequence[Operation], replayed: ReplayedChunks | None
    ) -> None:
        """Run programs on the chunks of each parameter, along z that is drawn for each of them."""
        for operation in operations:
            spec = operation.view.spec
            for start, stop in operation.view.chunks:
                for program in operation.programs:
                    zs: list[torch.Tensor] = []
                    for number, seed in enumerate(program.seeds):
                        z = self.buffer.drawing(spec.dtype, f"z {number}")[: stop - start]
                        self._noise.fill(z, seed, spec, start)
                        zs.append(z)
                    operation.run(program, zs, start, stop)
                if replayed is not None:
                    replayed.put(stop)

    @torch.inference_mode()
    def _perturb_chunks(
        self,
        index: int,
        operations: Sequence[Operation],
        *,
        part: int = 0,
        parts: int = 1,
        awaited: ReplayedChunks | None = None,
    ) -> None:
        """Perturb every ``parts``-th chunk of each parameter, along z that is kept or is drawn now.

        With ``awaited``, each chunk of the segment's own parameters waits for a message that it is
        up to date.
        """
        for operation in operations:
            view = operation.view
            program = operation.programs[0]
            seed = program.seeds[0]
            has_drawn = self._kept_seeds.get(view.spec.name) == seed
            for start, stop in view.chunks[part::parts]:
                if view.z is None:
                    z = self.buffer.drawing(view.spec.dtype, "z move")[: stop - start]
                else:
                    z = view.z[start:stop]
                if not has_drawn:
                    self._noise.fill(z, seed, view.spec, start)
                if awaited is not None and view.owner == index and awaited.get() is None:
                    return
                operation.run(program, [z], start, stop)
            if view.z is not None:
                self._kept_seeds[view.spec.name] = seed

    def _run_together(
        self, kernels: ModuleType, operations: Sequence[Operation], number: int, seed: int
    ) -> None:
        """Run the programs of one number along one direction, in few launches."""
        for zs in self._draw_together([operation.view for operation in operations], seed):
            drawn = [operation for operation in operations if operation.view.spec.index in zs]
            for launch in divide_by_launch(drawn, number):
                directions = [[zs[view.spec.index] for view in launch.views]]
                kernels.apply(launch.weights, launch.program, directions, launch.outs)

    def _draw_together(
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
