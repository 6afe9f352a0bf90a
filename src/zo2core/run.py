"""A run: its parts, and the sweeps that methods make with them over its segments.

``build.py`` makes it. Whatever differs by the kind of run was chosen there: a part that is here is
the one that this run has, and it stays so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from zo2core.errors import OptionError
from zo2core.estimators.directions import Directions
from zo2core.io.process_memory import make_room
from zo2core.journal.journal import Journal
from zo2core.kernels.matmul_precision import matmul_precision
from zo2core.kernels.programs import Trajectory
from zo2core.planning.memory import Replay, RunSpec
from zo2core.planning.speeds import WriteBackPolicy
from zo2core.protocols import (
    BlockModel,
    BlockSource,
    Device,
    Forward,
    Scheduler,
    TensorReader,
    VisitSegment,
)
from zo2core.ranges import MatmulPrecision
from zo2core.schedulers.profiling import Sweep, Timeline, Trace, TraceRecorder
from zo2core.shared import SharedBase
from zo2core.sources.segment_store import BaseDigests, SegmentStore
from zo2core.sources.slot_file import Generations
from zo2core.sweep.activations import StreamActivations
from zo2core.sweep.gradient_visitor import GradientVisitor, GradientVisits
from zo2core.sweep.microbatch import StepRows, grouped, prepared
from zo2core.sweep.perturbers import Groups, Perturber
from zo2core.sweep.visitor import (
    ExclusiveUse,
    ForwardVisitor,
    UpdateLoss,
    Visitor,
    Visits,
    watched,
)
from zo2core.types import (
    Batch,
    BlockLayout,
    Commit,
    Evaluation,
    ParameterSpec,
    StepResult,
    Update,
)
from zo2core.workers.workers import Workers

StepBatch: TypeAlias = Batch | Sequence[Batch]  # of a step: one, or several that count as one
Outputs: TypeAlias = list[list[torch.Tensor]]  # of the head, one list for each evaluation


class CustomSource(NamedTuple):
    """A source of the model's segments that the caller made, and closes."""

    source: BlockSource
    scheduler: Scheduler | None = None  # of that source and the engine's device; None makes one
    timeline: Timeline | None = None  # in which both record their work; None makes one


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an ``Engine`` that most runs leave as they are.

    Args:
        provenance: Other values that decide the run, as JSON values. The journal records them, and
            other values are refused.
        write_back: When zeroth-order steps write changed segments to disk. None: never; a resumed
            run replays the whole journal.
        commit_every: For first-order steps of all parameters of a model that is larger than memory:
            steps between two commits of the segments, with their optimizer states, to ``run``. With
            more than 1, embedding, head and the blocks that memory has room for are written that
            seldom; other blocks are written at each step. An optimizer with turns commits at their
            ends. None: all blocks stay in memory.
        overlap: Whether transfers and disk reads overlap with compute. The bits are the same
            without.
        replay: For a device with its own memory: "device" replays there, "host" on the host,
            without offloads; "auto" chooses.
        trace: Records the work of every sweep: a trace, or the path of a new one.
        spill: Directory of a temporary file, for the inputs of blocks that have no room in memory
            between a first-order step's forward and backward. None: ``run``, or else the system's
            for temporary files.
        matmul_precision: Precision of products of float32 matrices, as
            ``torch.set_float32_matmul_precision`` names it: "highest", "high" or "medium". It is in
            force during sweeps, and the process's own afterwards. The journal records it, and other
            values are refused. None: that of the journal's run, or else the process's.
        workers: Workers that share steps and evaluations; None: a run of one process.
        source: Where the model's segments are stored. None: in a source that is planned for this
            run alone. ``SharedBase``: a base that other runs read, too; its device and memory are
            used. ``CustomSource``: a source of the caller, with which ``memory`` only limits
            activations.
    """

    provenance: Mapping[str, Any] | None = None
    write_back: WriteBackPolicy | None = None
    commit_every: int | None = None
    overlap: bool = True
    replay: Replay = "auto"
    trace: Trace | Path | str | None = None
    spill: Path | str | None = None
    matmul_precision: MatmulPrecision | None = None
    workers: Workers | None = None
    source: SharedBase | CustomSource | None = None


class CommittedSegments(NamedTuple):
    """Segments on disk that first-order steps change, from one generation to the next."""

    store: SegmentStore  # the source
    generations: Generations
    every: int  # steps between two commits, of an optimizer without turns


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Where the segments of a run are stored between visits, and what brings them to visits."""

    layouts: Sequence[BlockLayout]  # as they are stored
    scheduler: Scheduler
    activations: StreamActivations
    activation_bytes: int  # for activations in the memory in which forwards run
    spare_bytes: Callable[[], int]  # further bytes there that the present plan leaves over
    base_digests: BaseDigests  # empty if the caller passed the source
    # of this run alone, or None: it is shared with other runs
    source: BlockSource | None = None
    # of this run alone, or None: the caller passed the source, or it is shared
    plan: RunSpec | None = None
    # that first-order steps change on disk; None: they do not
    committed: CommittedSegments | None = None

    @property
    def write_back_every(self) -> int | None:
        """Versions that a segment may be ahead of its bytes on disk; None: segments are never
        written.
        """
        return None if self.source is None else self.source.write_back_every

    @property
    def waiting_bytes(self) -> int:
        """Host memory for inputs that have no room where forwards run, on a device with its own
        memory.
        """
        if self.plan is None:
            return sys.maxsize
        return self.plan.waiting_bytes + max(self.plan.host_plan.spare, 0)

    def room_maker(self, device: Device) -> Callable[[int], object]:
        """A function that returns freed memory to the system, if so many bytes more would exceed
        the limit of the process; it does nothing where the plan says no limit.
        """
        if self.plan is None or not self.plan.host_plan.parts or not device.in_place:
            return lambda nbytes: None
        return partial(make_room, self.plan.host_plan.budget)


class Undivided:
    """A run each of whose processes has all segments.

    Args:
        layouts: The segments.
        workers: Those with which the journal and snapshots are shared.
    """

    is_divided = False
    trained_elsewhere = 0  # bytes of trained parameters that this process only keeps

    def __init__(self, layouts: Sequence[BlockLayout], workers: Workers) -> None:
        self.all_layouts = layouts
        self.peers = workers

    @property
    def read_whole(self) -> frozenset[str]:
        """Names of the segments of which this process has all parameters."""
        return frozenset(layout.name for layout in self.all_layouts)

    def check_embedding(self, digests: BaseDigests, weights: TensorReader) -> None:
        """Check what no process reads whole while it computes: nothing."""

    def unknown_digests(self, digests: BaseDigests, journal: Journal) -> Mapping[str, str]:
        """The digests of the base's segments that a journal lacks."""
        return digests.unknown_to(journal)

    def forward(self, forward: Forward) -> Forward:
        """What this process runs of a forward."""
        return forward

    def outputs(self, outputs: Outputs) -> Outputs:
        """The head's outputs, once a sweep has ended."""
        return outputs

    def visitor(
        self,
        visits: GradientVisits,
        rows: StepRows,
        part: slice,
        *,
        kept_bytes: int,
        loss_scale: float,
    ) -> GradientVisitor:
        """The visitor of a sweep forward and backward: see ``GradientVisitor``."""
        return GradientVisitor(visits, rows, part, kept_bytes=kept_bytes, loss_scale=loss_scale)

    def adds_earlier_gradient(self, name: str) -> bool:
        """Whether this process adds the earlier gradient of a parameter to that of a batch."""
        return self.peers.rank == 0

    def agreed_bytes(self, nbytes: int) -> int:
        """Memory that all processes of a run have, by which they group batches alike."""
        return nbytes


@dataclass
class _Progress:
    """State of a run that changes from sweep to sweep."""

    # called after each visit, with the visits so far and of all
    watch: Callable[[int, int], object] | None = None
    # version at which the blocks that stay on the device were last offloaded
    offloaded: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of one run, and its sweeps. It knows no method: a method makes sweeps with it."""

    model: BlockModel
    journal: Journal
    is_kept: bool  # whether steps are recorded in the journal
    directory: Path | None  # of a run that is kept, with its journal and what else it keeps
    spill: Path  # directory of a temporary file, for activations that have no room in memory
    micro_batch_size: int | None  # rows of a micro-batch; None does not split batches
    workers: Workers  # that share steps and evaluations
    division: Undivided  # of the segments among processes
    device: Device
    matmul_precision: MatmulPrecision  # of float32 matrices, in sweeps
    recorder: TraceRecorder
    directions: Directions
    segments: Segments
    # what brings weights to a version and perturbs them in one sweep
    perturber: Callable[[Trajectory], Perturber]
    visits: Visits  # what all sweeps share that run the present or perturbed weights
    update_loss: UpdateLoss
    # refuses files of the model that have changed since they were opened
    require_unchanged: Callable[[], object]
    opened: ExitStack  # closes what was opened for the run, and nothing of the caller's
    use: ExclusiveUse = field(default_factory=lambda: ExclusiveUse("Engine"))
    progress: _Progress = field(default_factory=_Progress)

    def prepared(self, batches: Iterable[Batch], forward: Forward) -> Iterator[Batch]:
        """Yield the batches on the device, checked by their forward."""
        return prepared(batches, forward, self.device.torch_device)

    def filled(self, batches: Iterable[Batch], forward: Forward) -> Iterator[list[Batch]]:
        """Prepare batches, and group them by sweep, as memory for activations allows."""
        self.use.require_open()
        room = self.segments.activation_bytes
        for group, *_ in grouped(
            self.prepared(batches, forward), forward, lambda held, running: held + running <= room
        ):
            self.use.require_open()
            yield group

    def evaluate(self, version: int, groups: Groups, forward: Forward) -> list[list[torch.Tensor]]:
        """Visit all segments once; returns the head's outputs, one list for each evaluation."""
        perturber = self._perturber(version, [evaluation for evaluation, _ in groups])
        own = self.division.forward(forward)
        return self.sweep(ForwardVisitor(self.visits, perturber, groups, own))

    def bring_to(self, version: int) -> None:
        """Bring all segments to a version."""
        self.evaluate(version, [], self.model)

    def sweep(self, visitor: Visitor) -> list[list[torch.Tensor]]:
        """Make a visitor's visits; returns the head's outputs, one list for each evaluation."""
        order = visitor.order
        visit: VisitSegment = visitor.visit
        if self.progress.watch is not None:
            visit = watched(visit, len(order), self.progress.watch)
        with self.use.locked(), matmul_precision(self.matmul_precision):
            try:
                self.segments.scheduler.sweep(visit, order)
            except BaseException:
                self.recorder.flush()  # its transfers do not count for the next step
                raise
            finally:
                visitor.finish()
        return self.division.outputs(visitor.outputs)

    def parameters_at(
        self, version: int, segments: Iterable[int]
    ) -> Generator[tuple[ParameterSpec, torch.Tensor], None, None]:
        """Bring segments to a version, and yield their parameters with their bytes on the host."""
        self.use.require_open()
        self.require_unchanged()
        with self.use.locked():
            visitor = ForwardVisitor(self.visits, self._perturber(version, []), [], self.model)
            try:
                for index in segments:
                    with self.segments.scheduler.replayed(visitor.replay, index) as bucket:
                        parameters = self.model.layouts[index].parameters
                        yield from zip(parameters, bucket.views[: len(parameters)], strict=True)
            finally:
                visitor.finish()
                self.recorder.flush()

    def append(self, record: Update | Commit) -> None:
        """Append a step's record to the journal, after the base's digests."""
        self.note_base()
        self.journal.append(record)

    def note_base(self) -> None:
        """Write the digests of the base's segments that the journal lacks to it."""
        unknown = self.division.unknown_digests(self.segments.base_digests, self.journal)
        if unknown:
            self.journal.note_base(unknown)

    def step_result(self, record: Update | Commit, started: float) -> StepResult:
        """The result of a step that began at a time of ``time.perf_counter``, and has ended."""
        sweep = Sweep.of_step(record.step, started, time.perf_counter())
        lanes = self.recorder.end_sweep(sweep)
        seconds = sweep.done - started
        if isinstance(record, Commit):
            return StepResult(
                step=record.step,
                loss=record.loss,
                losses=(record.loss,),
                projected_grads=(),
                seeds=(),
                lr=record.lr,
                seconds=seconds,
                lanes=lanes,
                grad_norm=record.grad_norm,
            )
        return StepResult(
            step=record.step,
            loss=record.losses[0],
            losses=record.losses,
            projected_grads=record.projected_grads,
            seeds=record.seeds,
            lr=record.lr,
            seconds=seconds,
            lanes=lanes,
            share_applied=self.update_loss.share_applied(record),
        )

    def offload_kept(self, step: int) -> None:
        """Offload blocks that stay on the device, if they are due to be written back, before a
        step.
        """
        every = self.segments.write_back_every
        if every is not None and step > self.progress.offloaded + every:
            with self.use.locked():
                self.segments.scheduler.release_all()
            self.progress.offloaded = step - 1

    def close(self) -> None:
        """Stop all work, and close everything that was opened. May be called twice."""
        self.use.close()
        self.opened.close()

    def _perturber(self, version: int, evaluations: Sequence[Evaluation | None]) -> Perturber:
        directions = self.directions
        return self.perturber(
            Trajectory(
                self.journal.updates,
                version,
                evaluations,
                directions.zo_eps,
                directions.estimator is None or directions.perturb_in_place,
            )
        )


def lacking(operation: str, part: str, expected: str) -> OptionError:
    """The error for an operation that needs a part which an engine does not have."""
    return OptionError(operation, f"an engine without {part}", expected, "pass it to the engine")
