"""A visit beside the activations: factors are brought to the present version, and all streams of a stack run at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import torch

from zo2core.kernels.encoding import decode
from zo2core.perturbation import FactorStore, PerturbedParameter, StackedModel
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import Activations, Forward, Store, Streams
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.sweep.stream import run_stream
from zo2core.sweep.work_buffer import WorkBuffer, can_be_read
from zo2core.types import Batch, Evaluation, Lane, ParameterSpec, SegmentKind
from zo2core.updates import Trajectory


class Stack(NamedTuple):
    """Streams that run as one batch."""

    batch: Batch
    batches: Sequence[Batch]  # the streams', of which it is made
    groups: Sequence[int]  # to which evaluation each belongs


class StackedVisitor:
    """Visits the segments for one sweep, whose weights it only reads.

    Args:
        model: Whose modules take the directions.
        forward: Runs the segments. The model itself runs stacks; any other forward runs one stream at a time.
        factors: Factors of all parameters.
        trajectory: To which version, and by which scale evaluations move.
        groups: The evaluations to make, each with the batches to run at it, as of ``SegmentVisitor``.
        buffer: Where weights are formed.
        activations: The stacks' memory between segments; one sweep at a time may use it.
        streams: The device's queues of work.
        timeline: Takes down what is done when.
        worker: Helps to decode weights; None does without.
    """

    def __init__(
        self,
        model: StackedModel,
        forward: Forward,
        factors: FactorStore,
        trajectory: Trajectory,
        groups: Sequence[tuple[Evaluation | None, Sequence[Batch]]],
        *,
        buffer: WorkBuffer,
        activations: ActivationOffload,
        streams: Streams,
        timeline: Timeline,
        worker: Executor | None,
    ) -> None:
        self._model = model
        self._forward = forward
        self._factors = factors
        self._trajectory = trajectory
        self._buffer = buffer
        if forward is model:
            self._stacks = list(_stacks(model, groups, factors.most_streams))
        else:
            self._stacks = [Stack(batch, [batch], [at]) for at, (_, batches) in enumerate(groups) for batch in batches]
        asked = [evaluation for evaluation, _ in groups]
        at = ([asked[group] for group in stack.groups] for stack in self._stacks)
        self._perturbations = [factors.perturbations(evaluations, trajectory.zo_eps) for evaluations in at]  # by stack
        self._activations = activations
        self._queues = streams
        self._timeline = timeline
        self._worker = worker
        self._stores: dict[int, Store] = {}  # of the segment being visited, and of resident ones
        places = [
            (spec, index, at) for index, layout in enumerate(model.layouts) for at, spec in enumerate(layout.parameters)
        ]
        self._places = {spec.name: (index, at) for spec, index, at in places}
        self.outputs: list[list[torch.Tensor]] = [[] for _ in groups]  # what the head gave, once it was visited
        self.seeds: Collection[int] = ()  # counter-based noise keeps nothing
        factors.begin_sweep()
        activations.begin(len(self._stacks), may_wait=any(evaluation is not None for evaluation in asked))

    @torch.inference_mode()
    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Bring the segment's factors to the present version, and run its forwards. See the contract."""
        commit(self.replay(index, store, version))
        self._evaluate(index)

    @torch.inference_mode()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring the segment's factors to the present version; its weights stay as they are. See the contract."""
        self._stores[index] = store
        layout, begun = self._model.layouts[index], self._queues.mark()
        for spec, theta in zip(layout.parameters, store, strict=True):
            if not spec.frozen:
                self._factors.advance(spec, theta, self._trajectory.updates, self._trajectory.version)
        self._timeline.note(Lane.REPLAY, layout.name, begun, self._queues.mark())
        return version

    def _evaluate(self, index: int) -> None:
        """Run the forwards of a segment, whose factors are at the present version."""
        layout, begun = self._model.layouts[index], self._queues.mark()  # decoding and forming are of the first stack's time
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
            self._timeline.note(Lane.EVALUATE, layout.name, begun, done, track=number)
            begun = done
        if layout.kind is SegmentKind.BLOCK:
            del self._stores[index]

    def finish(self) -> None:
        """Leave the model as it was: the next sweep may be another engine's."""
        self._model.perturb(0, {}, 1)

    def _weights(self, spec: ParameterSpec) -> torch.Tensor:
        owner, position = self._places[spec.name]
        return self._stores[owner][position]

    def _readable(self, index: int, spec: ParameterSpec, theta: torch.Tensor) -> torch.Tensor:
        """The tensor that modules read a parameter from: its bytes themselves, or what was formed of them for this visit."""
        if can_be_read(spec, theta) and not self._factors.forms(spec):
            return theta.view(spec.shape)
        formed = self._buffer.parameter_view(index, spec.name)
        if spec.encoding is not None:
            decode(spec, theta, formed, self._worker)
            theta = formed
        elif not self._factors.forms(spec):
            formed.copy_(theta.view(spec.shape))
        if self._factors.forms(spec):
            self._factors.form(spec, theta, formed, self._worker)
        return formed

    def _run(self, index: int, number: int, stack: Stack) -> None:
        """Run a segment's forward of one stack."""
        kind, last = self._model.layouts[index].kind, number == len(self._stacks) - 1
        head = partial(self._heads, stack)
        outputs = run_stream(self._activations, self._forward, kind, index, number, stack.batch, head, last=last)
        if outputs is not None:
            for group, output in zip(stack.groups, outputs, strict=True):
                self.outputs[group].append(output)

    def _heads(self, stack: Stack, activations: Activations) -> list[torch.Tensor]:
        """What the head gives for each stream of a stack."""
        if len(stack.groups) == 1:
            return [self._forward.head(stack.batch, activations)]
        return self._model.heads(stack.batches, activations)


def _stacks(
    model: StackedModel, groups: Sequence[tuple[Evaluation | None, Sequence[Batch]]], most_streams: int | None
) -> Iterator[Stack]:
    """Stack the evaluations of each piece of the batch, as many as may be and can be."""
    for position in range(max((len(batches) for _, batches in groups), default=0)):
        streams = [(at, batches[position]) for at, (_, batches) in enumerate(groups) if position < len(batches)]
        most = len(streams) if most_streams is None else most_streams
        for start in range(0, len(streams), most):
            part = streams[start : start + most]
            batches = [batch for _, batch in part]
            joined = batches[0] if len(part) == 1 else model.stacked(batches)
            if joined is not None:
                yield Stack(joined, batches, [at for at, _ in part])
            else:
                yield from (Stack(batch, [batch], [at]) for at, batch in part)
