"""A visit: bring a segment to the present version, and run its forwards at the present or perturbed
weights.

Updates are applied to the segment's own bytes. Perturbed weights are written to the work buffer,
whose views are the model's parameters, or low-rank perturbations are added beside the activations.
A ``Perturber`` does this; the visitor runs the forwards. ``HostReplay`` brings segments to the
present version on the host, for a device that receives them so. Models and engines have one user at
a time (``sole_use``, ``ExclusiveUse``).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zo2core.errors import BusyError, ClosedError
from zo2core.estimators.perturbation import StackedForward
from zo2core.kernels import Distribution, Draw, apply
from zo2core.kernels.parallel import end_openmp_team
from zo2core.kernels.programs import Trajectory
from zo2core.protocols import (
    Activations,
    CounterNoise,
    Forward,
    NoiseGenerator,
    Store,
    Streams,
    VisitSegment,
)
from zo2core.schedulers.devices import HostDevice
from zo2core.schedulers.profiling import Timeline
from zo2core.sweep.activations import StreamActivations
from zo2core.sweep.perturbers import CounterPerturber, Groups, Perturber, Stream, WorkBuffer
from zo2core.types import (
    BlockLayout,
    Descend,
    Lane,
    ParameterSpec,
    Program,
    SegmentKind,
    Update,
)

EVERY = 100  # steps from one measurement to the next
SAMPLED = 256  # evenly spread elements of a segment; a few more if it has many parameters


class UpdateLoss:
    """Measures the share of weights that an update changes, at the first step and then at every
    hundredth.

    The other weights round back to their value. A sample of each segment is copied during the
    sweep. Once the step's update is known, it is applied to the copies along directions of the same
    distribution but of other seeds: so no direction is drawn twice or kept, and the run does not
    depend on the sample. Changes by the rounding of perturbations or by weight decay do not count.
    """

    def __init__(self, noise: NoiseGenerator) -> None:
        self._distribution = (
            noise.distribution if isinstance(noise, CounterNoise) else Distribution.GAUSSIAN
        )
        self._next = 0  # the next step to measure
        self._is_sampling = False  # whether the present step is measured
        self._samples: dict[int, list[torch.Tensor]] = {}  # by segment

    def begin(self, step: int) -> None:
        """Prepare for a step's sweep."""
        self._is_sampling = step >= self._next
        self._samples = {}

    def sample(self, index: int, store: Store, specs: Sequence[ParameterSpec]) -> None:
        """Copy a few elements of a segment, if the present step is measured.

        The host does not wait for the device.
        """
        if not self._is_sampling:
            return
        pairs = zip(store, specs, strict=False)  # a store of 8-bit weights ends with their scales
        weights = [
            (theta, spec.dtype, _dtype_between_steps(spec))
            for theta, spec in pairs
            if not spec.frozen
        ]
        if any(theta.dtype not in dtypes for theta, *dtypes in weights):
            return
        stride = max(1, sum(theta.numel() for theta, *_ in weights) // SAMPLED)
        self._samples[index] = [
            theta[::stride].to(dtype, copy=True)
            for theta, _, dtype in weights
            if dtype.itemsize > 1
        ]

    @torch.inference_mode()
    def share_applied(self, update: Update) -> float | None:
        """Return the share of sampled weights that the step's update changes."""
        samples = self._samples
        self._samples = {}
        if not samples or not update.lr or not any(update.projected_grads):
            return None
        self._next = update.step + EVERY
        self._is_sampling = False
        copies = [copy.cpu() for of_segment in samples.values() for copy in of_segment]
        by_dtype = [
            [copy for copy in copies if copy.dtype is dtype]
            for dtype in {copy.dtype for copy in copies}
        ]
        count = sum(self._count_changed(torch.cat(of_dtype), update) for of_dtype in by_dtype)
        return count / sum(map(torch.numel, copies))

    def _count_changed(self, weights: torch.Tensor, update: Update) -> int:
        """Count the weights that an update along directions of this distribution changes."""
        changed_weights = weights.clone()
        grads = update.projected_grads
        steps = tuple(
            Descend(direction, grad, update.lr, 0.0) for direction, grad in enumerate(grads)
        )
        apply(
            changed_weights, Program(tuple(range(len(grads))), steps), Draw(self._distribution, 0)
        )
        return int((changed_weights != weights).sum())


def _dtype_between_steps(spec: ParameterSpec) -> torch.dtype:
    """The dtype in which a parameter is kept from step to step."""
    if spec.transfer_dtype is not None and spec.transfer_back:
        return spec.transfer_dtype
    return spec.dtype


@dataclass(frozen=True, kw_only=True)
class Visits:
    """The objects that a run's sweeps share."""

    layouts: Sequence[BlockLayout]  # in visiting order
    activations: StreamActivations  # between segments; one sweep uses it at a time
    # returns freed memory to the system, if so many bytes more would exceed a limit
    make_room: Callable[[int], object]
    streams: Streams
    timeline: Timeline
    # samples segments at the present version; None if their weights do not change
    update_loss: UpdateLoss | None


class Visitor(ABC):
    """Visits segments in one sweep."""

    outputs: list[list[torch.Tensor]]  # of the head, one list for each evaluation

    @property
    @abstractmethod
    def order(self) -> Sequence[int]:
        """The segments in the order of their visits, in which a block may occur more than once."""

    @abstractmethod
    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Visit a segment, as ``VisitSegment`` says."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until nothing uses the sweep's memory any more, and free it, however the sweep
        ended.
        """


class ForwardVisitor(Visitor):
    """Visits all segments once: brings them to a version, and runs the forwards of evaluations."""

    def __init__(
        self, visits: Visits, perturber: Perturber, groups: Groups, forward: Forward
    ) -> None:
        self._visits = visits
        self._forward = forward
        self._perturber = perturber
        self._streams = self._perturber.streams(groups, forward)
        # stores of the visited segment and of resident segments, by segment
        self._stores: dict[int, Store] = {}
        self.outputs: list[list[torch.Tensor]] = [[] for _ in groups]  # of the head, by evaluation
        # of the forward of each stream, by its number
        self._forward_bytes = [
            forward.forward_bytes(stream.batch) for streams in self._streams for stream in streams
        ]
        may_offload = any(evaluation is not None for evaluation, _ in groups)
        visits.activations.begin(len(self._forward_bytes), may_offload=may_offload)

    @property
    def order(self) -> Sequence[int]:
        """All segments."""
        return range(len(self._visits.layouts))

    @torch.inference_mode()
    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Bring a segment to the present version, and run its forwards."""
        commit(self.replay(index, store, version))
        self._evaluate(index)

    @torch.inference_mode()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version, and return that version."""
        visits = self._visits
        layout = visits.layouts[index]
        self._stores[index] = store
        started = visits.streams.mark()
        if layout.trains:
            version = self._perturber.replay(index, self._stores, version)
            if visits.update_loss is not None:
                visits.update_loss.sample(index, store, layout.parameters)
        else:
            # the segment has no updates; the weights that it borrows are perturbed for the first
            # evaluation
            self._perturber.replay(index, self._stores, self._perturber.version)
        visits.timeline.note(Lane.REPLAY, layout.name, started, visits.streams.mark())
        return version

    def finish(self) -> None:
        """Wait until no thread uses the sweep's memory any more, however the sweep ended."""
        self._perturber.finish()

    def _evaluate(self, index: int) -> None:
        """Run the forwards of a segment that has been replayed."""
        visits = self._visits
        layout = visits.layouts[index]
        started = visits.streams.mark()
        number = 0
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
        """Run a segment's forward of one stream, with its activations taken from their memory and
        put back.
        """
        memory = self._visits.activations
        forward = self._forward
        kind = self._visits.layouts[index].kind
        nbytes = self._forward_bytes[number]
        self._visits.make_room(nbytes)
        if kind is SegmentKind.EMBEDDING:
            memory.add(number, forward.embed(stream.batch), nbytes)
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


def watched(visit: VisitSegment, visits: int, watch: Callable[[int, int], object]) -> VisitSegment:
    """A visit that is reported, with the number of visits so far and of all."""
    done = 0

    def visit_and_report(
        index: int, store: Store, version: int, commit: Callable[[int], None]
    ) -> None:
        nonlocal done
        visit(index, store, version, commit)
        done += 1
        watch(done, visits)

    return visit_and_report


class HostReplay:
    """Brings stored segments to the present version with the host's kernels."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        noise: CounterNoise,
        updates: Sequence[Update],
        update_loss: UpdateLoss,
    ) -> None:
        self._layouts = layouts
        self._noise = noise
        self._updates = updates
        self._update_loss = update_loss
        # Only this work buffer's views, and its memory to round low-bit weights, are used: other
        # pages are never touched.
        self._buffer = WorkBuffer(
            layouts, HostDevice(), noise, keep_noise=False, perturbs_in_place=False
        )
        self._perturber: CounterPerturber | None = None

    @torch.inference_mode()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the version of the present number of updates.

        See ``ReplaySegment``.
        """
        present = len(self._updates)
        if self._perturber is None or self._perturber.version != present:  # a new sweep
            trajectory = Trajectory(self._updates, present, (), zo_eps=1.0, perturb_in_place=True)
            self._perturber = CounterPerturber(self._noise, self._buffer, trajectory)
        try:
            version = self._perturber.replay(index, {index: store}, version)
        finally:
            end_openmp_team()  # of the thread that prepares blocks: visits have one of their own
        self._update_loss.sample(index, store, self._layouts[index].parameters)
        return version


_IN_USE: set[int] = set()  # ids of models and sources, which those who use them keep alive


@contextlib.contextmanager
def sole_use(used: object) -> Iterator[None]:
    """The use of a model, or of a source, by one engine: a second one would make the first read
    other weights.
    """
    if id(used) in _IN_USE:
        raise BusyError(
            type(used).__name__,
            found="an engine that is open on it",
            expected="one at a time",
            remedy="close() that one first, or open the model a second time",
        )
    _IN_USE.add(id(used))
    try:
        yield
    finally:  # also of an engine that is dropped without being closed
        _IN_USE.remove(id(used))


class ExclusiveUse:
    """Refuses to start a sweep, or an iteration over parameters, before the last one has ended."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._closed = self._busy = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse any other use within the context."""
        if self._busy:
            raise BusyError(
                self._owner,
                found="an iteration over parameters_now() that has not ended",
                expected="one use at a time",
                remedy="exhaust the iterator or close() it first",
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def require_open(self) -> None:
        """Refuse a use after ``close``."""
        if self._closed:
            owner = self._owner
            raise ClosedError(owner, f"a closed {owner}", "an open one", "build a new one")

    def close(self) -> None:
        """Refuse all later uses."""
        self._closed = True
