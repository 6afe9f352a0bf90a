"""The forward of one stream through a segment, with its activations taken from their memory and put back.

A visit: bring a segment to the present version, and run its forwards at the perturbed weights.

Updates are applied to the segment's own bytes. Perturbed weights are written to the work buffer, whose views are the model's
parameters. A ``Perturber`` does both; the visitor runs the forwards.

Factories of visitors: a run's is chosen once, when the run is built.

A visitor that reports how far its sweep is: a sweep over a large model takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias, TypeVar

import torch

from zo2core.profiling import Timeline
from zo2core.protocols import Activations, CounterNoise, Forward, NoiseGenerator, Store, Streams, Visitor
from zo2core.sweep.activations import StreamActivations
from zo2core.sweep.counter_perturber import CounterPerturber
from zo2core.sweep.drawn_perturber import DrawnPerturber
from zo2core.sweep.perturber import Perturber
from zo2core.sweep.update_loss import UpdateLoss
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import Batch, BlockLayout, Evaluation, Lane, SegmentKind
from zo2core.updates import Trajectory

Output = TypeVar("Output")


def run_stream(
    memory: StreamActivations,
    forward: Forward,
    kind: SegmentKind,
    index: int,
    stream: int,
    batch: Batch,
    head: Callable[[Activations], Output],
) -> Output | None:
    """Run a segment's forward of one stream."""
    if kind is SegmentKind.EMBEDDING:
        memory.add(stream, forward.embed(batch), partial(forward.forward_bytes, batch))
        return None
    activations = memory.take(index, stream)
    if kind is SegmentKind.BLOCK:
        memory.put(index + 1, stream, forward.block(index - 1, activations))
        return None
    return head(activations)


Groups: TypeAlias = Sequence[tuple[Evaluation | None, Sequence[Batch]]]  # evaluations, each with the batches to run at it


@dataclass(frozen=True, kw_only=True)
class SegmentVisits:
    """The objects that all sweeps of a run share."""

    layouts: Sequence[BlockLayout]  # in visiting order
    activations: StreamActivations  # of the streams between segments; one sweep uses it at a time
    streams: Streams
    timeline: Timeline
    update_loss: UpdateLoss  # samples segments at the present version


class SegmentVisitor:
    """Visits the segments for one sweep.

    A *stream* is one batch at one evaluation: its activations pass from segment to segment.
    """

    def __init__(self, visits: SegmentVisits, forward: Forward, perturber: Perturber, groups: Groups) -> None:
        self._layouts = visits.layouts
        self._forward = forward
        self._perturber = perturber
        self._evaluations = [evaluation for evaluation, _ in groups]
        self._batches = [batch for _, batches in groups for batch in batches]  # one for each stream
        ends = list(accumulate((len(batches) for _, batches in groups), initial=0))
        self._streams_of = [range(*ends_of_group) for ends_of_group in pairwise(ends)]  # by group
        self._activations = visits.activations
        self._queues = visits.streams
        self._timeline = visits.timeline
        self._update_loss = visits.update_loss
        self._stores: dict[int, Store] = {}  # stores of the visited segment and of resident segments, by segment
        self.outputs: list[list[torch.Tensor]] = [[] for _ in groups]  # outputs of the head, by evaluation
        may_offload = any(evaluation is not None for evaluation in self._evaluations)
        self._activations.begin(len(self._batches), may_offload=may_offload)

    @property
    def seeds(self) -> Collection[int]:
        """Seeds of the directions that this sweep draws."""
        return self._perturber.seeds

    @torch.inference_mode()
    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Bring a segment to the present version, and run its forwards. See the contract."""
        commit(self.replay(index, store, version))
        self._evaluate(index)

    @torch.inference_mode()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version. See the contract."""
        self._stores[index] = store
        started = self._queues.mark()
        layout = self._layouts[index]
        if layout.trains:
            version = self._perturber.replay(index, self._stores, version)
            self._update_loss.sample(index, store, layout.parameters)
        else:  # the segment has no updates; the weights that it borrows are perturbed for the first evaluation
            self._perturber.replay(index, self._stores, self._perturber.version)
        self._timeline.note(Lane.REPLAY, layout.name, started, self._queues.mark())
        return version

    def _evaluate(self, index: int) -> None:
        """Run the forwards of a segment that has been replayed."""
        layout = self._layouts[index]
        before: Evaluation | None = None
        started = self._queues.mark()
        if self._evaluations:
            self._perturber.load_frozen(index, self._stores)
        for group, evaluation in enumerate(self._evaluations):
            self._perturber.perturb(index, self._stores, before, evaluation)
            for stream in self._streams_of[group]:
                self._run(index, stream, group)
            done = self._queues.mark()
            self._timeline.note(Lane.EVALUATE, layout.name, started, done, track=group)
            before, started = evaluation, done
        if layout.kind is SegmentKind.BLOCK:
            del self._stores[index]

    def finish(self) -> None:
        """Wait until no thread uses the sweep's memory any more, however the sweep ended."""
        self._perturber.finish()

    def _run(self, index: int, stream: int, group: int) -> None:
        """Run a segment's forward of one stream."""
        batch, kind = self._batches[stream], self._layouts[index].kind
        head = partial(self._forward.head, batch)
        output = run_stream(self._activations, self._forward, kind, index, stream, batch, head)
        if output is not None:
            self.outputs[group].append(output)


class SweepVisitor(Visitor, Protocol):
    """The visitor of one sweep, with the sweep's results."""

    @property
    def outputs(self) -> list[list[torch.Tensor]]:
        """The head's outputs, one list for each evaluation, once the head was visited."""

    @property
    def seeds(self) -> Collection[int]:
        """Seeds of the directions that the sweep draws."""

    def finish(self) -> None:
        """Wait until nothing uses the sweep's memory any more, however the sweep ended."""


class Visits(Protocol):
    """Makes the visitor of a sweep."""

    def visitor(self, version: int, groups: Groups, forward: Forward) -> SweepVisitor:
        """Make the visitor of one sweep."""


@dataclass(frozen=True, kw_only=True)
class WeightVisits(SegmentVisits):
    """Makes visitors that perturb weights in the work buffer."""

    trajectory: Callable[[int, Sequence[Evaluation | None]], Trajectory]  # to a version and through evaluations
    noise: NoiseGenerator
    buffer: WorkBuffer
    worker: ThreadPoolExecutor | None  # a second thread; None uses one thread

    def visitor(self, version: int, groups: Groups, forward: Forward) -> SegmentVisitor:
        """Make the visitor of one sweep. See the contract."""
        trajectory = self.trajectory(version, [evaluation for evaluation, _ in groups])
        perturber: Perturber
        if isinstance(self.noise, CounterNoise):
            perturber = CounterPerturber(self.noise, self.buffer, self.worker, trajectory)
        else:
            perturber = DrawnPerturber(self.noise, self.buffer, self.worker, trajectory)
        return SegmentVisitor(self, forward, perturber, groups)


class WatchedVisitor:
    """Does what another visitor does, and reports each visit."""

    def __init__(self, visitor: Visitor, visits: int, watch: Callable[[int, int], object]) -> None:
        self._visitor, self._visits, self._watch = visitor, visits, watch
        self._done = 0

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Visit the segment, and report. See the contract."""
        self._visitor.visit(index, store, version, commit)
        self._done += 1
        self._watch(self._done, self._visits)

    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version. See the contract."""
        return self._visitor.replay(index, store, version)
