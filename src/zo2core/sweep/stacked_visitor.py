"""A visit with low-rank perturbations: factors are brought to the present version, and stacked streams run as one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from zo2core.factor_store import FactorStore
from zo2core.kernels.encoding import decode
from zo2core.perturbation import PerturbedParameter, StackedForward, StackedModel
from zo2core.profiling import Timeline
from zo2core.protocols import Activations, Forward, Store, Streams
from zo2core.sweep.activations import StreamActivations
from zo2core.sweep.visitor import Groups, run_stream
from zo2core.sweep.work_buffer import WorkBuffer, can_be_read, is_encoded
from zo2core.types import Batch, Evaluation, Lane, ParameterSpec, SegmentKind
from zo2core.updates import Trajectory


class Stack(NamedTuple):
    """Streams that run as one batch."""

    batch: Batch
    batches: Sequence[Batch]  # one for each stream
    groups: Sequence[int]  # for each stream, the position of its evaluation in the sweep


@dataclass(frozen=True, kw_only=True)
class StackedVisits:
    """Makes visitors that only read weights, and add low-rank perturbations beside the activations."""

    model: StackedModel
    factors: FactorStore  # of all parameters
    trajectory: Callable[[int, Sequence[Evaluation | None]], Trajectory]  # to a version and through evaluations
    buffer: WorkBuffer  # for weights that cannot be read from the store
    activations: StreamActivations  # of the stacks between segments; one sweep uses it at a time
    streams: Streams
    timeline: Timeline
    worker: Executor | None  # helps to decode weights; None uses one thread

    def visitor(self, version: int, groups: Groups, forward: Forward) -> StackedVisitor:
        """Make the visitor of one sweep. See the contract."""
        return StackedVisitor(self, forward, self.trajectory(version, [evaluation for evaluation, _ in groups]), groups)


class StackedVisitor:
    """Visits the segments for one sweep that only reads weights."""

    def __init__(self, visits: StackedVisits, forward: Forward, trajectory: Trajectory, groups: Groups) -> None:
        self._model = visits.model
        self._forward = forward
        self._factors = visits.factors
        self._trajectory = trajectory
        self._buffer = visits.buffer
        if isinstance(forward, StackedForward):
            self._heads = partial(_heads, forward)
            self._stacks = list(_stacks(forward, groups, self._factors.most_streams))
        else:
            self._heads = partial(_head, forward)
            self._stacks = [Stack(batch, [batch], [group]) for group, (_, batches) in enumerate(groups) for batch in batches]
        evaluations = trajectory.evaluations
        self._perturbations = [
            self._factors.perturbations([evaluations[group] for group in stack.groups], trajectory.zo_eps)
            for stack in self._stacks
        ]
        self._activations = visits.activations
        self._queues = visits.streams
        self._timeline = visits.timeline
        self._worker = visits.worker
        self._stores: dict[int, Store] = {}  # stores of the visited segment and of resident segments, by segment
        self._locations = {  # segment and position in its store, by name
            spec.name: (index, position)
            for index, layout in enumerate(self._model.layouts)
            for position, spec in enumerate(layout.parameters)
        }
        self.outputs: list[list[torch.Tensor]] = [[] for _ in groups]  # outputs of the head, by evaluation
        self.seeds: Collection[int] = ()  # counter-based noise keeps no state
        self._factors.begin_sweep()
        may_offload = any(evaluation is not None for evaluation in evaluations)
        self._activations.begin(len(self._stacks), may_offload=may_offload)

    @torch.inference_mode()
    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Bring the segment's factors to the present version, and run its forwards. See the contract."""
        commit(self.replay(index, store, version))
        self._evaluate(index)

    @torch.inference_mode()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring the segment's factors to the present version; its weights stay as they are. See the contract."""
        self._stores[index] = store
        layout, started = self._model.layouts[index], self._queues.mark()
        for spec, theta in zip(layout.parameters, store, strict=True):
            if not spec.frozen:
                self._factors.advance(spec, theta, self._trajectory.updates, self._trajectory.version)
        self._timeline.note(Lane.REPLAY, layout.name, started, self._queues.mark())
        return version

    def _evaluate(self, index: int) -> None:
        """Run the forwards of a segment, whose factors are at the present version."""
        layout, started = self._model.layouts[index], self._queues.mark()  # the first stack's time includes decoding
        weights = {spec.name: self._weights(spec) for spec in layout.used}
        if self._stacks:
            self._model.bind(index, {spec.name: self._readable(index, spec, weights[spec.name]) for spec in layout.used})
        for number, stack in enumerate(self._stacks):
            perturbed: dict[str, PerturbedParameter] = {
                spec.name: self._factors.perturbed(spec, weights[spec.name], self._perturbations[number])
                for spec in layout.used
                if not spec.frozen
            }
            self._model.perturb(index, perturbed, len(stack.groups))
            self._run(index, number, stack)
            done = self._queues.mark()
            self._timeline.note(Lane.EVALUATE, layout.name, started, done, track=number)
            started = done
        if layout.kind is SegmentKind.BLOCK:
            del self._stores[index]

    def finish(self) -> None:
        """Remove the perturbations from the model, which another engine may use next."""
        self._model.perturb(0, {}, 1)

    def _weights(self, spec: ParameterSpec) -> torch.Tensor:
        owner, position = self._locations[spec.name]
        return self._stores[owner][position]

    def _readable(self, index: int, spec: ParameterSpec, theta: torch.Tensor) -> torch.Tensor:
        """Return the tensor from which modules read a parameter: its store, or the work buffer, filled for this visit."""
        if can_be_read(spec, theta) and not self._factors.forms(spec):
            return theta.view(spec.shape)
        weight = self._buffer.parameter_view(index, spec.name)
        if is_encoded(spec, theta):
            decode(spec, theta, weight, self._worker)
            theta = weight
        elif not self._factors.forms(spec):
            weight.copy_(theta.view(spec.shape))
        if self._factors.forms(spec):
            self._factors.form(spec, theta, weight, self._worker)
        return weight

    def _run(self, index: int, number: int, stack: Stack) -> None:
        """Run a segment's forward of one stack."""
        kind = self._model.layouts[index].kind
        head = partial(self._heads, stack)
        outputs = run_stream(self._activations, self._forward, kind, index, number, stack.batch, head)
        if outputs is not None:
            for group, output in zip(stack.groups, outputs, strict=True):
                self.outputs[group].append(output)


def _head(forward: Forward, stack: Stack, activations: Activations) -> list[torch.Tensor]:
    """Run the head on a stack of one stream, and return its output."""
    return [forward.head(stack.batch, activations)]


def _heads(forward: StackedForward, stack: Stack, activations: Activations) -> list[torch.Tensor]:
    """Run the head, and return its output for each stream of a stack."""
    if len(stack.groups) == 1:
        return _head(forward, stack, activations)
    return forward.heads(stack.batches, activations)


def _stacks(forward: StackedForward, groups: Groups, most_streams: int | None) -> Iterator[Stack]:
    """Stack the evaluations of each micro-batch, at most so many at a time; those that cannot be stacked run alone."""
    for number in range(max((len(batches) for _, batches in groups), default=0)):
        streams = [(group, batches[number]) for group, (_, batches) in enumerate(groups) if number < len(batches)]
        most = len(streams) if most_streams is None else most_streams
        for start in range(0, len(streams), most):
            part = streams[start : start + most]
            batches = [batch for _, batch in part]
            stacked = batches[0] if len(part) == 1 else forward.stacked(batches)
            if stacked is not None:
                yield Stack(stacked, batches, [group for group, _ in part])
            else:
                yield from (Stack(batch, [batch], [group]) for group, batch in part)
