"""A base that several runs read together: each block comes from disk, or to a device, once for all of them.

A run of a base that it only reads (an adapter by any method, or low-rank perturbations of the activations) is opened with
``shared=base``. Its steps, evaluations and exports then use the segments of the shared base, and its results are, bit for
bit, those of the run alone. Only the reads, the decoding of quantised blocks and the work buffer are shared.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch

from zo2core.devices import choose_device
from zo2core.errors import BusyError, MemoryBudgetError, OptionError
from zo2core.perturbation import DensePerturbation
from zo2core.planning.memory import DevicePlan, HostPlan, Machine, MemoryPolicy, RunRequest, RunSpec, decoded_bytes, plan
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.profiling import Timeline
from zo2core.protocols import BlockModel, Device, Replaying, Visitor
from zo2core.schedulers import open_scheduler
from zo2core.sources import SegmentStore
from zo2core.sources.segment_store import BaseDigests, laid_out_as_on_disk
from zo2core.sweep.shared_visitor import BlockDecoder, RunReplay, RunSegments, RunSweep, SharedVisitor, SweepEnded
from zo2core.sweep.visitor import ExclusiveUse, sole_use
from zo2core.types import Batch, Bucket, StepResult

_PAUSE_SOFT = 1  # omp_pause_soft of omp.h: threads end, and settings stay


def end_openmp_team() -> None:
    """End the OpenMP threads of the calling thread, which start again when it next computes.

    Once a process has more OpenMP threads than processors, GNU's library puts them to sleep at the end of each operation
    instead of letting them wait actively: a step of a small model then takes a quarter longer. Threads that take turns
    call this before they wait. Other libraries than OpenMP 5.0 are left alone.
    """
    try:
        openmp = ctypes.CDLL(None)
        openmp.omp_pause_resource(_PAUSE_SOFT, openmp.omp_get_initial_device())
    except (OSError, AttributeError, TypeError):
        return


RequestT = TypeVar("RequestT")
T = TypeVar("T")


class _Turn(threading.Thread, Generic[RequestT]):
    """A function, and a thread that runs it until it makes a request, and then only when it is told to."""

    def __init__(self, function: Callable[[], Any], local: threading.local) -> None:
        super().__init__(name="zo2-run", daemon=True)
        self._function, self._local = function, local
        self._resumed: SimpleQueue[BaseException | None] = SimpleQueue()  # holds what the function's request raises, if any
        self._paused: SimpleQueue[None] = SimpleQueue()
        self.request: RequestT | None = None  # that waits to be served
        self.result: Any = None  # what the function returned, or the exception that it raised
        self.has_ended = False

    def run(self) -> None:
        """Run the function; its thread calls this."""
        self._local.turn = self
        try:
            self._wait()
            self.result = self._function()
        except BaseException as error:
            self.result = error
        finally:
            self.request, self.has_ended = None, True
            self._paused.put(None)

    def pause(self, request: RequestT | None) -> None:
        """Let the other functions run, until the requests of all are served."""
        self.request = request
        end_openmp_team()
        self._paused.put(None)
        self._wait()

    def resume(self, error: BaseException | None = None) -> None:
        """Run the function until it makes its next request, or has ended; an error is raised in it first."""
        self._resumed.put(error)
        self._paused.get()

    def _wait(self) -> None:
        error = self._resumed.get()
        if error is not None:
            raise error


class Lockstep(Generic[RequestT]):
    """Runs functions one at a time, each until it makes a request, and serves the requests of all together.

    Each function has a thread of its own, but only one thread runs at a time: the functions need no locks, and always run in
    the same order. Requests are served in the thread of the caller.
    """

    def __init__(self, serve: Callable[[Sequence[RequestT]], None]) -> None:
        self._serve = serve
        self._local = threading.local()  # the turn of the present thread
        self._is_running = False

    def request(self, request: RequestT | None) -> None:
        """Wait until a request is served: with those of the other functions, or alone outside of ``run``.

        None waits until each other function has ended or made a request that is served.
        """
        turn: _Turn[RequestT] | None = getattr(self._local, "turn", None)
        if turn is not None:
            turn.pause(request)
        elif request is not None:
            self._serve([request])

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Run functions to their ends."""
        if self._is_running:
            raise BusyError(
                "shared base",
                found="a call within a function that already runs together with others",
                expected="one call at a time",
                remedy="pass all functions in one call",
            )
        turns: list[_Turn[RequestT]] = [_Turn(function, self._local) for function in functions]
        for turn in turns:
            turn.start()
        self._is_running = True
        try:
            self._run_rounds(turns)
        except BaseException as error:  # whatever the functions wait for raises it, until all have ended
            for turn in turns:
                while not turn.has_ended:
                    turn.resume(error)
            raise
        finally:
            self._is_running = False
            for turn in turns:
                if turn.has_ended:
                    turn.join()
        return [turn.result for turn in turns]

    def _run_rounds(self, turns: Sequence[_Turn[RequestT]]) -> None:
        while running := [turn for turn in turns if not turn.has_ended]:
            for turn in running:
                turn.resume()
                if isinstance(turn.result, BaseException) and not isinstance(turn.result, Exception):
                    raise turn.result
            requests = [turn.request for turn in running if turn.request is not None]
            if requests:
                self._serve(requests)


KeyT = TypeVar("KeyT", bound=Hashable)


class Stepping(Hashable, Protocol):
    """An engine of a run."""

    def step(self, batch: Batch | Sequence[Batch]) -> StepResult:
        """Take a step."""


EngineT = TypeVar("EngineT", bound=Stepping)


class _Opened:
    """The source of the base, the scheduler, and what decodes blocks, for the plan at one time."""

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
            self.scheduler = open_scheduler(source, device, self.timeline, overlap=overlap, kept=spec.kept)
            helper = None
            if device.torch_device.type == "cpu":
                helper = opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="zo2-decode"))
            self.decoder = BlockDecoder(model.layouts, device.empty(decoded_bytes(model.layouts)), helper)
            self.close = opened.pop_all().close


class SharedBase:
    """One base, which is only read, for several runs.

    The memory of all runs is planned together. Blocks are opened with the first sweep, and opened again, with less memory
    for them, when a run joins later.

    Args:
        model: The base, without an adapter. Each run has a model of its own, opened from the same files.
        device: "cpu", "cuda", "cuda:N" or a ``Device``, for all runs.
        memory: Memory of the process and of the device, with all runs. Activations are those that the runs ask for.
        overlap: Whether transfers and disk reads overlap with compute. The bits are the same without.

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
        self._model, self._memory, self._overlap = model, memory, overlap
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
        self.lockstep: Lockstep[_SweepRequest] = Lockstep(self._serve)  # makes sweeps of runs together
        self._use = ExclusiveUse(type(self).__name__)

    @property
    def host_plan(self) -> HostPlan:
        """Plan of host memory, with all runs that have joined."""
        return self._spec.host_plan

    @property
    def device_plan(self) -> DevicePlan | None:
        """Plan of device memory; None if the device computes in host memory."""
        return self._spec.device_plan

    def step(self, batches: Mapping[EngineT, Batch | Sequence[Batch]]) -> dict[EngineT, StepResult | Exception]:
        """Take a step of each of some runs, in one sweep.

        Args:
            batches: The batch of each run that steps, as for its ``step``, by its engine.

        Returns:
            The result of each step, or the exception with which it failed: such a step was not taken, and all others were.

        Raises:
            BusyError, ClosedError: as for ``together``.
        """
        return self.together({engine: partial(engine.step, batch) for engine, batch in batches.items()})

    def together(self, functions: Mapping[KeyT, Callable[[], T]]) -> dict[KeyT, T | Exception]:
        """Run functions that use the engines of this base, so that their sweeps are made together.

        Each function runs until it needs a sweep, whatever for: a step, an evaluation, a token of a generation. Once all
        need one, or have ended, one sweep serves all that wait. The functions run in threads of their own, one at a time.

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

    def join(self, model: BlockModel, request: RunRequest, timeline: Timeline, digests: BaseDigests) -> SharedRun:
        """Add a run. Engines call it when they are made.

        Args:
            model: The run's model.
            request: What the run needs.
            timeline: Timeline of the run, which gets the reads that it shares.
            digests: Digests of the base in the run's journal.

        Raises:
            OptionError: if the run has another base, would change it, or asks for what belongs to the shared base.
            MemoryBudgetError: if there is no memory for it.
            BusyError: during an iteration over ``parameters_now`` of another run.
        """
        self._use.require_open()
        _require_shareable(request)
        takes_steps = request.takes_steps or request.updates > 0 or request.trained_copies > 0
        changes = takes_steps and isinstance(request.perturbation, DensePerturbation)
        segments = RunSegments(model, self._model, self.device, digests, changes_base=changes)
        run = SharedRun(self, segments, timeline)
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
            # Sweeps that other runs wait for have memory that was planned without this run, which uses none meanwhile.
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
        """Stop all reads and free memory. May be called twice. The runs' engines are closed before."""
        self._use.close()
        self._close_segments()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def replayed(self, segments: RunSegments, visitor: Replaying, index: int) -> Iterator[Bucket]:
        """Bring a run's part of a segment to the present version, with the run's parameters on the host."""
        with self._use.locked(), self._segments().scheduler.replayed(RunReplay(segments, visitor), index) as bucket:
            views = tuple(view.cpu() for view in segments.views(index, bucket.views))
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
        return plan(replace(request, overlap=self._overlap), Machine.of(self.device), MeasuredSpeeds(self._model.weights))

    def _segments(self) -> _Opened:
        self._use.require_open()
        if self._opened is None:
            self._opened = _Opened(self._model, self.device, self._spec, overlap=self._overlap)
        return self._opened

    def _close_segments(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _serve(self, requests: Sequence[_SweepRequest]) -> None:
        """Make the sweeps of several runs: one for all whose orders begin alike."""
        left = list(requests)
        while left:
            longest = max((request.sweep.order for request in left), key=len)
            together = [request for request in left if request.sweep.order == longest[: len(request.sweep.order)]]
            left = [request for request in left if request not in together]
            self._sweep(together, longest)

    def _sweep(self, requests: Sequence[_SweepRequest], order: Sequence[int]) -> None:
        sweeps = [request.sweep for request in requests]
        try:
            with self._use.locked():
                opened = self._segments()
                visitor = SharedVisitor(sweeps, self._model.layouts, opened.decoder, opened.digests)
                opened.scheduler.sweep(visitor, order)
        except SweepEnded:
            pass
        except Exception as error:  # whatever ends the sweep ends it for all runs in it, each of which raises it
            for sweep in sweeps:
                sweep.error = sweep.error or error
            return
        for span in opened.timeline.take():
            for request in requests:
                request.timeline.note(*span[:5], track=span.track)


class _SweepRequest(NamedTuple):
    """A sweep that a run waits for."""

    sweep: RunSweep
    timeline: Timeline  # of the run


class SharedRun:
    """A run's part of the shared base: a scheduler whose sweeps are made together with those of other runs."""

    def __init__(self, base: SharedBase, segments: RunSegments, timeline: Timeline) -> None:
        self._base, self._segments, self._timeline = base, segments, timeline
        self.activation_bytes = 0  # for its activations

    def sweep(self, visitor: Visitor, order: Sequence[int]) -> None:
        """Visit the segments in this order. See the contract."""
        sweep = RunSweep(self._segments, visitor, order)
        self._base.lockstep.request(_SweepRequest(sweep, self._timeline))
        if sweep.error is not None:
            raise sweep.error

    def replayed(self, visitor: Replaying, index: int) -> AbstractContextManager[Bucket]:
        """Bring one segment to the present version, with its bytes on the host. See the contract."""
        return self._base.replayed(self._segments, visitor, index)

    def release_all(self) -> None:
        """Do nothing: nothing newer is on a device than the run's own memory. See the contract."""

    def leave(self) -> None:
        """Free the run's place."""
        self._base.leave(self)


def _require_shareable(request: RunRequest) -> None:
    """Refuse options that belong to the shared base, and runs whose weights change where they are stored."""
    memory = request.memory
    refused: Mapping[str, tuple[Any, bool]] = {
        "memory.host": (memory.host, memory.host != "auto"),
        "memory.device": (memory.device, memory.device != "auto"),
        "replay": (request.replay, request.replay != "auto"),
        "write_back.every": ("an interval", request.has_to_write),
    }
    for option, (found, is_set) in refused.items():
        if is_set:
            raise OptionError(
                option, found=str(found), expected="none for a run of a shared base", remedy="pass it to SharedBase"
            )
