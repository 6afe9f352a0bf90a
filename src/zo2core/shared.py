"""A base that several runs read together: each block comes from disk, or to a device, once for all
of them.

A run of a base that it only reads (an adapter by any method, or low-rank perturbations of the
activations) is opened with ``EngineOptions(source=base)``. Its steps, evaluations and exports then
use the segments of the shared base, and its results are, bit for bit, those of the run alone. Only
the reads, the decoding of quantised blocks and the work buffer are shared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol, Self, TypeVar

import torch

from zo2core.encodings.decoding import decode
from zo2core.errors import MemoryBudgetError, OptionError
from zo2core.estimators.perturbation import DensePerturbation
from zo2core.planning.memory import (
    DevicePlan,
    HostPlan,
    Machine,
    MemoryPolicy,
    RunRequest,
    RunSpec,
    decoded_bytes,
    plan,
)
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.protocols import BlockModel, Device, ReplaySegment, Store, VisitSegment
from zo2core.schedulers.devices import choose_device
from zo2core.schedulers.lockstep import Lockstep, T
from zo2core.schedulers.overlapped import open_scheduler
from zo2core.schedulers.profiling import Timeline
from zo2core.sources import SegmentStore
from zo2core.sources.segment_store import BaseDigests, SegmentDigest, laid_out_as_on_disk
from zo2core.sweep.perturbers import named_views
from zo2core.sweep.visitor import ExclusiveUse, sole_use
from zo2core.types import (
    Batch,
    Bucket,
    ParameterSpec,
    SegmentKind,
    StepResult,
    flat_views,
    packed_bytes,
)

KeyT = TypeVar("KeyT", bound=Hashable)


class Stepping(Hashable, Protocol):
    """An engine of a run."""

    def step(self, batch: Batch | Sequence[Batch]) -> StepResult:
        """Take a step."""


EngineT = TypeVar("EngineT", bound=Stepping)


class _Opened:
    """The source of the base, the scheduler, and memory for decoded blocks, for the plan at one
    time.
    """

    def __init__(self, model: BlockModel, device: Device, spec: RunSpec, *, overlap: bool) -> None:
        with ExitStack() as opened:
            self.timeline = Timeline()
            self.digests = BaseDigests({}, learns=True)
            source = SegmentStore(
                model.weights,
                spec.layouts,
                device.host_memory,
                buckets=spec.host_plan.buckets,
                base_digests=self.digests,
                timeline=self.timeline,
            )
            opened.callback(source.close)
            self.scheduler = open_scheduler(
                source, device, self.timeline, overlap=overlap, kept=spec.kept
            )
            self._layouts = model.layouts
            self._memory = device.empty(decoded_bytes(model.layouts))
            self.close = opened.pop_all().close

    @torch.no_grad()
    def decoded(self, index: int, store: Store) -> Store:
        """Return a segment's parameters; a block's encoded ones are decoded, once for all runs."""
        layout = self._layouts[index]
        decoded = list(store)
        if layout.kind is not SegmentKind.BLOCK:
            # embedding and head are decoded by each run, if at all
            return store
        views = iter(
            flat_views(
                [spec.decoded for spec in layout.parameters if spec.encoding is not None],
                self._memory,
            )
        )
        for position, spec in enumerate(layout.parameters):
            if spec.encoding is not None:
                decoded[position] = next(views)
                decode(spec, store[position], decoded[position])
        return decoded


class SharedBase:
    """One base, which is only read, for several runs.

    The memory of all runs is planned together. Blocks are opened with the first sweep, and opened
    again, with less memory for them, when a run joins later.

    Args:
        model: The base, without an adapter. Each run has a model of its own, opened from the same
            files.
        device: "cpu", "cuda", "cuda:N" or a ``Device``, for all runs.
        memory: Memory of the process and of the device, with all runs. Activations are those that
            the runs ask for.
        overlap: Whether transfers and disk reads overlap with compute. The bits are the same
            without.

    Raises:
        OptionError, DeviceError: if an option is out of its range, or the device is missing.
        MemoryBudgetError: if there is no memory for the base alone.
    """

    def __init__(
        self,
        model: BlockModel,
        *,
        device: Device | str = "cpu",
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        overlap: bool = True,
    ) -> None:
        self._model = model
        self._memory = memory
        self._overlap = overlap
        self._runs: dict[SharedRun, RunRequest] = {}
        self._opened: _Opened | None = None
        with ExitStack() as opened:
            opened.enter_context(sole_use(model))
            opened.callback(model.weights.close)
            self.device = choose_device(device) if isinstance(device, str) else device
            if isinstance(device, str):
                opened.callback(self.device.close)
            self._on_disk = laid_out_as_on_disk(model.layouts, model.weights)
            self._spec = self._planned([])
            self._closing = opened.pop_all()
        self._work = self.device.empty(0)
        self.lockstep: Lockstep[_RunSweep] = Lockstep(self._serve)  # makes sweeps of runs together
        self._use = ExclusiveUse(type(self).__name__)

    @property
    def host_plan(self) -> HostPlan:
        """Plan of host memory, with all runs that have joined."""
        return self._spec.host_plan

    @property
    def device_plan(self) -> DevicePlan | None:
        """Plan of device memory; None if the device computes in host memory."""
        return self._spec.device_plan

    def step(
        self, batches: Mapping[EngineT, Batch | Sequence[Batch]]
    ) -> dict[EngineT, StepResult | Exception]:
        """Take a step of each of some runs, in one sweep.

        Args:
            batches: The batch of each run that steps, as for its ``step``, by its engine.

        Returns:
            The result of each step, or the exception with which it failed: such a step was not
            taken, and all others were.

        Raises:
            BusyError, ClosedError: as for ``together``.
        """
        return self.together(
            {engine: partial(engine.step, batch) for engine, batch in batches.items()}
        )

    def together(self, functions: Mapping[KeyT, Callable[[], T]]) -> dict[KeyT, T | Exception]:
        """Run functions that use the engines of this base, so that their sweeps are made together.

        Each function runs until it needs a sweep, whatever for: a step, an evaluation, a token of a
        generation. Once all need one, or have ended, one sweep serves all that wait. The functions
        run in threads of their own, one at a time.

        Args:
            functions: The functions, each for a run of its own, by any key.

        Returns:
            What each function returned, or the exception that it raised.

        Raises:
            BusyError: within such a function.
            ClosedError: after ``close``.
        """
        self._use.require_open()
        results = self.lockstep.run(list(functions.values()))
        return dict(zip(functions, results, strict=True))

    def join(
        self, model: BlockModel, request: RunRequest, timeline: Timeline, digests: BaseDigests
    ) -> SharedRun:
        """Add a run. Engines call it when they are made.

        Args:
            model: The run's model.
            request: What the run needs.
            timeline: Timeline of the run, which gets the reads that it shares.
            digests: Digests of the base in the run's journal.

        Raises:
            OptionError: if the run has another base, would change it, or asks for what belongs to
                the shared base.
            MemoryBudgetError: if there is no memory for it.
            BusyError: during an iteration over ``parameters_now`` of another run.
        """
        self._use.require_open()
        _require_shareable(request)
        takes_steps = request.takes_steps or request.updates > 0 or request.trained_copies > 0
        changes = takes_steps and isinstance(request.perturbation, DensePerturbation)
        run = SharedRun(self, self._model, model, timeline, digests, changes_base=changes)
        with self._use.locked():  # an iteration over parameters has a bucket
            self._close_segments()
        try:
            self._spec = self._planned([*self._runs.values(), request])
        except MemoryBudgetError:
            least = request.with_least_activations(in_place=self.device.in_place)
            if least is request:
                raise
            request = least
            self._spec = self._planned([*self._runs.values(), request])
        self._runs[run] = request
        try:
            # Sweeps that other runs wait for have memory that was planned without this run, which
            # uses none meanwhile.
            self.lockstep.request(None)
        except BaseException:
            run.leave()
            raise
        run.activation_bytes = request.memory.activation_bytes
        return run

    def leave(self, run: SharedRun) -> None:
        """Remove a run."""
        self._runs.pop(run, None)

    def close(self) -> None:
        """Stop all reads and free memory.

        May be called twice. The runs' engines are closed before.
        """
        self._use.close()
        self._close_segments()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def replayed(self, run: SharedRun, replay: ReplaySegment, index: int) -> Iterator[Bucket]:
        """Bring a run's part of a segment to the present version, with the run's parameters on the
        host.
        """
        with (
            self._use.locked(),
            self._segments().scheduler.replayed(partial(run.replay, replay), index) as bucket,
        ):
            views = tuple(view.cpu() for view in run.views(index, bucket.views))
            yield Bucket(index, bucket.data, views, bucket.version)

    def spare_bytes(self) -> int:
        """What the plan of all runs leaves over to each of them, in equal shares."""
        return self._spec.spare_bytes(in_place=self.device.in_place) // len(self._runs)

    def work_memory(self, nbytes: int) -> torch.Tensor:
        """Memory in which runs take turns: what is in it is not needed after a visit."""
        if len(self._work) < nbytes:
            self._work = self.device.empty(nbytes)
        return self._work[:nbytes]

    def _planned(self, runs: Sequence[RunRequest]) -> RunSpec:
        """Plan the memory of the base and of runs."""
        request = RunRequest.of_base(self._model.layouts, self._on_disk, self._memory, runs)
        return plan(
            replace(request, overlap=self._overlap),
            Machine.of(self.device),
            MeasuredSpeeds(self._model.weights),
        )

    def _segments(self) -> _Opened:
        self._use.require_open()
        if self._opened is None:
            self._opened = _Opened(self._model, self.device, self._spec, overlap=self._overlap)
        return self._opened

    def _close_segments(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _serve(self, sweeps: Sequence[_RunSweep]) -> None:
        """Make the sweeps of several runs: one for all whose orders begin alike."""
        left = list(sweeps)
        while left:
            longest = max((sweep.order for sweep in left), key=len)
            together = [sweep for sweep in left if sweep.order == longest[: len(sweep.order)]]
            left = [sweep for sweep in left if sweep not in together]
            self._sweep(together, longest)

    def _sweep(self, sweeps: Sequence[_RunSweep], order: Sequence[int]) -> None:
        try:
            with self._use.locked():
                opened = self._segments()
                opened.scheduler.sweep(_SharedVisitor(sweeps, self._model, opened).visit, order)
        except _SweepEnded:
            pass
        except Exception as error:
            # whatever ends the sweep ends it for all runs in it, each of which raises it
            for sweep in sweeps:
                sweep.error = sweep.error or error
            return
        for span in opened.timeline.take():
            for sweep in sweeps:
                sweep.run.timeline.note(*span[:5], track=span.track)


class _RunSweep:
    """The part of one run in a shared sweep."""

    def __init__(self, run: SharedRun, visit: VisitSegment, order: Sequence[int]) -> None:
        self.run = run
        self.visit = visit
        self.order = tuple(order)
        self.error: Exception | None = None  # which ended it


class _SweepEnded(Exception):  # noqa: N818 - no error
    """No run is left in a sweep."""


class _SharedVisitor:
    """Visits segments for several runs, whose orders begin alike. A run that fails ends alone."""

    def __init__(self, sweeps: Sequence[_RunSweep], model: BlockModel, opened: _Opened) -> None:
        self._sweeps = sweeps
        self._layouts = model.layouts
        self._opened = opened
        self._position = 0

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Let each run visit a segment, whose bytes stay as they are."""
        commit(version)
        here = [
            sweep
            for sweep in self._sweeps
            if sweep.error is None and self._position < len(sweep.order)
        ]
        self._position += 1
        if not here:
            raise _SweepEnded
        digest = self._opened.digests.known(self._layouts[index])
        decoded = self._opened.decoded(index, store)
        for sweep in here:
            try:
                sweep.run.check(index, store, digest)
                sweep.run.visit(sweep.visit, index, decoded)
            except Exception as error:  # of one run: it ends alone, and raises it
                sweep.error = error


class SharedRun:
    """A run's part of the shared base: a scheduler whose sweeps are made together with those of
    other runs.

    The base is only read. What the run has beside it, such as an adapter's parameters, is in memory
    of its own, and so is their version: the run's visitor cannot tell that others share its
    segments.
    """

    def __init__(
        self,
        base: SharedBase,
        shared: BlockModel,
        model: BlockModel,
        timeline: Timeline,
        digests: BaseDigests,
        *,
        changes_base: bool,
    ) -> None:
        self._base = base
        self._model = model
        self.timeline = timeline
        self._digests = digests
        self.activation_bytes = 0  # for its activations
        self._checked: set[int] = set()
        if [layout.kind for layout in model.layouts] != [layout.kind for layout in shared.layouts]:
            raise _other_base(
                f"{len(model.layouts)} segments",
                f"the {len(shared.layouts)} segments of the shared base",
            )
        # For each parameter: its position in the base, or own memory.
        self._sources: list[list[int | torch.Tensor]] = []
        # of own memory; None: it has to be read
        self._versions: list[int | None] = [None] * len(shared.layouts)
        for index, layout in enumerate(model.layouts):
            positions = _positions(model, shared, index, changes_base=changes_base)
            beside = [spec for spec in layout.parameters if spec.name not in positions]
            memory = base.device.empty(packed_bytes(beside))
            sources: dict[str, int | torch.Tensor] = {**positions, **named_views(beside, memory)}
            self._sources.append([sources[spec.name] for spec in layout.parameters])

    def sweep(self, visit: VisitSegment, order: Sequence[int]) -> None:
        """Visit the segments in this order, together with the other runs that are in a sweep."""
        sweep = _RunSweep(self, visit, order)
        self._base.lockstep.request(sweep)
        if sweep.error is not None:
            raise sweep.error

    def replayed(self, replay: ReplaySegment, index: int) -> AbstractContextManager[Bucket]:
        """Bring one segment to the present version, with its bytes on the host."""
        return self._base.replayed(self, replay, index)

    def release_all(self) -> None:
        """Do nothing: nothing newer is on a device than the run's own memory."""

    def leave(self) -> None:
        """Free the run's place."""
        self._base.leave(self)

    def views(self, index: int, shared: Store) -> tuple[torch.Tensor, ...]:
        """Return a segment's parameters in the order of the run's layout, given those of the
        base.
        """
        return tuple(
            shared[source] if isinstance(source, int) else source for source in self._sources[index]
        )

    def visit(self, visit: VisitSegment, index: int, shared: Store) -> None:
        """Let the run visit a segment."""
        store, version = self._at_version(index, shared)

        def commit(committed: int) -> None:
            self._versions[index] = committed

        visit(index, store, version, commit)
        if self._versions[index] is None:
            self._versions[index] = version  # nothing was committed, so nothing was changed

    def replay(self, replay: ReplaySegment, index: int, shared: Store, version: int) -> int:
        """Bring the run's part of a segment to the present version; returns the base's, which does
        not change.
        """
        store, own_version = self._at_version(index, shared)
        self._versions[index] = replay(index, store, own_version)
        return version

    def check(self, index: int, shared: Store, digest: str) -> None:
        """Compare the digest of a segment's base with that of the run, when the run first
        uses it.
        """
        layout = self._model.layouts[index]
        if index in self._checked or not self._digests.wants(layout):
            return
        self._checked.add(index)
        if not all(isinstance(source, int) for source in self._sources[index]):
            views = self._at_version(index, shared)[0]
            self._versions[index] = 0
            if any(view.device.type != "cpu" for view in views):
                return  # a run alone computes the digest of this segment when it continues
            of_run = SegmentDigest(views)
            for number, view in enumerate(views):
                of_run.add(number, 0, view.numel())
            digest = of_run.value()
        if digest:
            self._digests.check(layout, digest, self._model.weights)

    def _at_version(self, index: int, shared: Store) -> tuple[tuple[torch.Tensor, ...], int]:
        """A segment's parameters and their version.

        The version is unknown until the visitor has said it.
        """
        views = self.views(index, shared)
        version = self._versions[index]
        if version is None:
            for spec, source in zip(
                self._model.layouts[index].parameters, self._sources[index], strict=True
            ):
                if not isinstance(source, int):
                    values = torch.empty(spec.stored_numel, dtype=spec.stored_dtype)
                    self._model.weights.read_into(spec.name, values)
                    source.copy_(values)
            version = 0
        self._versions[index] = None
        return views, version


def _require_shareable(request: RunRequest) -> None:
    """Refuse options that belong to the shared base, and runs whose weights change where they are
    stored.
    """
    memory = request.memory
    every = "an interval" if request.has_to_write else "auto"
    options = {
        "memory.host": memory.host,
        "memory.device": memory.device,
        "replay": request.replay,
        "write_back.every": every,
    }
    for option, value in options.items():
        if value != "auto":
            expected = "none for a run of a shared base"
            raise OptionError(option, str(value), expected, "pass it to SharedBase")


def _positions(
    model: BlockModel, base: BlockModel, index: int, *, changes_base: bool
) -> dict[str, int]:
    """Find the base's parameters in a segment of a run, and refuse those that are not the base's,
    or that would change.

    An adapter may give a parameter another name, but it neither moves it nor puts parameters of its
    own into blocks.
    """
    layout = model.layouts[index]
    shared = base.layouts[index]
    by_name = {spec.name: position for position, spec in enumerate(shared.parameters)}
    same_name = []
    renamed = []
    files = {_file(base, spec) for spec in shared.parameters}
    for spec in layout.parameters:
        if spec.name in by_name:
            same_name.append(spec.name)
        elif _file(model, spec) in files:
            renamed.append(spec.name)
    # in their order, the parameters of the base that have another name in the run
    others = [position for name, position in by_name.items() if name not in same_name]
    positions = {name: by_name[name] for name in same_name}
    positions.update(zip(renamed, others, strict=False))
    for spec in layout.parameters:
        if spec.name in positions:
            expected = shared.parameters[positions[spec.name]]
            _require_same(spec, expected, _file(model, spec), _file(base, expected))
            if changes_base and not spec.frozen:
                raise OptionError(
                    "source",
                    found=f"a run that would change {spec.name}",
                    expected="runs that only read the base",
                    remedy="train an adapter, or pass `LowRankPerturbation(rank=8)`",
                )
        elif not layout.resident or spec.name in renamed:
            raise _other_base(spec.name, f"only the parameters that {shared.name} has")
    return positions


def _file(model: BlockModel, spec: ParameterSpec) -> str:
    """The file of a parameter, by one path however the model was named."""
    return os.path.realpath(model.weights.origin(spec.name))


def _require_same(spec: ParameterSpec, shared: ParameterSpec, file: str, shared_file: str) -> None:
    """Refuse a parameter that is not the base's."""
    names = ("shape", "dtype", "encoding", "transfer_dtype")
    attributes = {name: (getattr(spec, name), getattr(shared, name)) for name in names} | {
        "file": (file, shared_file)
    }
    for name, (found, expected) in attributes.items():
        if found != expected:
            raise _other_base(
                f"{spec.name} of {name} {found}", f"{name} {expected}, as in the shared base"
            )


def _other_base(found: str, expected: str) -> OptionError:
    return OptionError(
        "source", found, expected, "open the run's model as the shared base was opened"
    )
