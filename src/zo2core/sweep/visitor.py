"""A visit: bring a segment to the present version, and run its forwards at the present or perturbed weights.

Updates are applied to the segment's own bytes. Perturbed weights are written to the work buffer, whose views are the model's
parameters, or low-rank perturbations are added beside the activations. A ``Perturber`` does this; the visitor runs the
forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from zo2core.perturbation import StackedForward
from zo2core.profiling import Timeline
from zo2core.protocols import Activations, Forward, Store, Streams, Visitor
from zo2core.sweep.activations import StreamActivations
from zo2core.sweep.perturber import Groups, Perturber, Stream
from zo2core.sweep.update_loss import UpdateLoss
from zo2core.types import BlockLayout, Lane, SegmentKind


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


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Makes the visitors of a run's sweeps, which share these objects."""

    layouts: Sequence[BlockLayout]  # in visiting order
    perturber: Callable[[int, Groups, Forward], Perturber]  # of a sweep: to a version and through evaluations
    activations: StreamActivations  # between segments; one sweep uses it at a time
    streams: Streams
    timeline: Timeline
    update_loss: UpdateLoss | None  # samples segments at the present version; None if their weights do not change

    def visitor(self, version: int, groups: Groups, forward: Forward) -> SegmentVisitor:
        """Make the visitor of one sweep."""
        return SegmentVisitor(self, forward, self.perturber(version, groups, forward), groups)


class SegmentVisitor:
    """Visits the segments for one sweep."""

    def __init__(self, visits: Visits, forward: Forward, perturber: Perturber, groups: Groups) -> None:
        self._visits, self._forward, self._perturber = visits, forward, perturber
        self._streams = perturber.streams(groups)
        self._stores: dict[int, Store] = {}  # stores of the visited segment and of resident segments, by segment
        self.outputs: list[list[torch.Tensor]] = [[] for _ in groups]  # of the head, by evaluation
        may_offload = any(evaluation is not None for evaluation, _ in groups)
        visits.activations.begin(sum(map(len, self._streams)), may_offload=may_offload)

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
        visits, self._stores[index] = self._visits, store
        started, layout = visits.streams.mark(), visits.layouts[index]
        if layout.trains:
            version = self._perturber.replay(index, self._stores, version)
            if visits.update_loss is not None:
                visits.update_loss.sample(index, store, layout.parameters)
        else:  # the segment has no updates; the weights that it borrows are perturbed for the first evaluation
            self._perturber.replay(index, self._stores, self._perturber.version)
        visits.timeline.note(Lane.REPLAY, layout.name, started, visits.streams.mark())
        return version

    def finish(self) -> None:
        """Wait until no thread uses the sweep's memory any more, however the sweep ended."""
        self._perturber.finish()

    def _evaluate(self, index: int) -> None:
        """Run the forwards of a segment that has been replayed."""
        visits, number = self._visits, 0
        started, layout = visits.streams.mark(), visits.layouts[index]
        if self._streams:
            self._perturber.load_frozen(index, self._stores)
        for evaluation, streams in enumerate(self._streams):
            self._perturber.perturb(index, self._stores, evaluation)
            for stream in streams:
                self._run(index, number, stream)
                number += 1
            done = visits.streams.mark()
            visits.timeline.note(Lane.EVALUATE, layout.name, started, done, track=evaluation)
            started = done
        if layout.kind is SegmentKind.BLOCK:
            del self._stores[index]

    def _run(self, index: int, number: int, stream: Stream) -> None:
        """Run a segment's forward of one stream, with its activations taken from their memory and put back."""
        memory, forward, kind = self._visits.activations, self._forward, self._visits.layouts[index].kind
        if kind is SegmentKind.EMBEDDING:
            memory.add(number, forward.embed(stream.batch), partial(forward.forward_bytes, stream.batch))
            return
        activations = memory.take(index, number)
        if kind is SegmentKind.BLOCK:
            memory.put(index + 1, number, forward.block(index - 1, activations))
            return
        for group, output in zip(stream.groups, self._outputs(stream, activations), strict=True):
            self.outputs[group].append(output)

    def _outputs(self, stream: Stream, activations: Activations) -> Sequence[torch.Tensor]:
        """Run the head, and return its output for each of the stream's batches."""
        if len(stream.groups) == 1:
            return [self._forward.head(stream.batch, activations)]
        assert isinstance(self._forward, StackedForward), "other batches are not stacked"
        return self._forward.heads(stream.batches, activations)


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
