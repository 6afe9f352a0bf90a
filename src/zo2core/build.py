"""Building a run from its options: the run is planned, and the parts of the plan are opened.

Parts that a caller passes stay the caller's. Parts that are opened here are put on an ``ExitStack`` at once, so that a
refused run leaves nothing open, and an engine closes exactly these parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from zo2core.devices import choose_device
from zo2core.errors import JournalError, OptionError
from zo2core.estimators import direction_seeds, require_distribution, with_perturb_in_place
from zo2core.journal import DRAWN, Journal, digest, json_object
from zo2core.kernels.generators import numbers_drawn
from zo2core.noise import PhiloxNoise, SequentialNoise, choose_noise
from zo2core.perturbation import (
    DensePerturbation,
    FactorStore,
    LowRankPerturbation,
    Perturbation,
    StackedModel,
    choose_perturbation,
    open_factors,
)
from zo2core.planning.device_plan import DevicePlan
from zo2core.planning.host_budget import parse_size
from zo2core.planning.host_plan import HostPlan
from zo2core.planning.low_bit import Replay, require_drawable
from zo2core.planning.machine import Machine
from zo2core.planning.policies import ACTIVATIONS, MemoryPolicy, WriteBackPolicy
from zo2core.planning.run_spec import RunRequest, RunSpec, plan
from zo2core.planning.speeds import MeasuredSpeeds, Speeds
from zo2core.profiling.chrome_trace import Trace
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockModel, BlockSource, CounterNoise, Device, NoiseGenerator, Scheduler, ZOEstimator
from zo2core.schedulers import OverlappedScheduler, SerialScheduler
from zo2core.schedulers.overlapped import spread
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.choice import open_source
from zo2core.sources.generations import Generations
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.sources.low_bit import LowBitSource
from zo2core.sources.scratch import Scratch
from zo2core.sources.slot_file import SlotFile
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.sweep.exclusive_use import ModelUse
from zo2core.sweep.host_replay import HostReplay, LowBitScheduler
from zo2core.sweep.input_file import InputFile
from zo2core.sweep.input_offload import InputOffload
from zo2core.sweep.kept_inputs import KeptInputs
from zo2core.sweep.microbatch import require_rows
from zo2core.sweep.perturber import choose_perturber
from zo2core.sweep.stacked_visitor import StackedVisits
from zo2core.sweep.update_loss import UpdateLoss
from zo2core.sweep.visits import Visits, WeightVisits
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import BlockLayout, Distribution, StateSpec
from zo2core.updates import Trajectory, seeds_of
from zo2core.workers import Workers, require_agreement, sync_journals


class Parts(NamedTuple):
    """The parts of a run."""

    estimator: ZOEstimator | None  # its ``perturb_in_place`` is not None; None for a run without zeroth-order steps
    opened: ExitStack  # closes the parts that were opened for the run, and no part of the caller
    micro_batch_size: int | None  # rows; None does not split batches
    journal: Journal
    trace: Trace | None
    timeline: Timeline
    device: Device
    noise: NoiseGenerator
    source: StoredSegments
    base_digests: BaseDigests  # of the base that the source reads; empty if the caller passed the source
    scheduler: Scheduler
    work_buffer: WorkBuffer
    activations: ActivationOffload
    activation_bytes: int  # for activations in the memory in which forwards run
    spare_bytes: Callable[[], int]  # further bytes there that the present plan leaves over
    waiting_bytes: int  # host memory for what has no room there, on a device with its own memory; without a plan, any
    update_loss: UpdateLoss
    workers: Workers
    visits: Visits  # makes the visitor of each sweep
    factors: FactorStore | None  # of low-rank perturbations; None for dense ones
    layouts: Sequence[BlockLayout]  # segments as they are stored
    generations: Generations | None  # segments on disk that change at each step; None: there are none
    host_plan: HostPlan | None  # None if the caller passed the parts
    device_plan: DevicePlan | None  # None if the device computes in host memory, or the caller passed the parts
    host_limit: int | None  # resident bytes that the process may have; None where the plan of the host's memory does not say


class StoredSegments(Protocol):
    """Where a run's segments are stored, as its runner sees it."""

    @property
    def write_back_every(self) -> int | None:
        """Versions that a segment may be ahead of its bytes on disk; None: segments are never written."""


class Joined(NamedTuple):
    """The place of a run at a shared base."""

    scheduler: SharedScheduler
    activation_bytes: int
    spare_bytes: Callable[[], int]  # the run's share of what the present plan leaves over
    work_memory: Callable[[int], torch.Tensor]  # allocates a work buffer, which the runs use in turn
    leave: Callable[[], None]


class SharedScheduler(Scheduler, StoredSegments, Protocol):
    """Makes a run's sweeps together with those of other runs."""


class SharedSegments(Protocol):
    """A base that several runs read together."""

    @property
    def device(self) -> Device:
        """The device of all runs."""

    def join(self, model: BlockModel, request: RunRequest, timeline: Timeline, digests: BaseDigests) -> Joined:
        """Add a run. See ``SharedBase.join``."""


@dataclass(frozen=True, kw_only=True)
class GenerationPolicy:
    """How segments that change at each step are kept on disk, while blocks stream."""

    directory: Path  # of the files
    states: Sequence[Sequence[StateSpec]]  # for each segment, the optimizer's states that are stored with it
    changing: int  # blocks that change from one generation to the next


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run, as in the constructors of engines."""

    journal: Journal | Path | str | None = None  # a journal or the path of one; None keeps it in memory
    device: Device | str = "cpu"
    noise: NoiseGenerator | None = None  # None: the journal's, else the one that estimator or perturbation need, else MeZO's
    memory: MemoryPolicy = MemoryPolicy()  # noqa: RUF009 - frozen
    micro_batch_size: int | None = None  # rows; None does not split batches
    trace: Trace | Path | str | None = None
    overlap: bool = True
    seed: int = 0
    write_back: WriteBackPolicy | None = None  # None: segments are never written
    provenance: Mapping[str, Any] | None = None  # None: neither recorded nor checked
    replay: Replay = "auto"
    perturbation: Perturbation | None = None  # None: the journal's, else a dense one
    workers: Workers | None = None  # None: a run of one process
    method: Mapping[str, Any] | None = None  # options of a first-order method, for the journal; None: no first-order steps
    trained_copies: int = 0  # copies of trained parameters that first-order steps keep, with gradients and optimizer state
    gradient_bytes: int = 0  # of one segment, in first-order steps that change weights where they are stored
    optimizer_bytes: int = 0  # of the optimizer's state in such steps, in host memory
    stays_in_memory: bool = False  # whether all blocks have to stay in memory, since changes are not written to disk
    generations: GenerationPolicy | None = None  # weights that change on disk; None: none do, or as in zeroth-order runs
    shared: SharedSegments | None = None  # a base that other runs read, too; None: the run reads its base alone

    def takes_steps(self, estimator: ZOEstimator | None) -> bool:
        """Whether the run writes its journal, since it has an estimator or a first-order method."""
        return estimator is not None or self.method is not None


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Parts that the caller of ``ZOEngine.from_parts`` made. They stay the caller's, who closes them.

    Args:
        source: Stores the model's segments.
        device: Runs the forwards.
        noise: Draws z.
        scheduler: Scheduler of this source and this device; None makes an ``OverlappedScheduler``.
        activations: Memory for activations of an evaluation, in bytes or as a size ("2GiB").
        timeline: Timeline in which the other parts record their work; None makes one.
    """

    source: BlockSource
    device: Device
    noise: NoiseGenerator
    scheduler: Scheduler | None = None
    activations: int | str = ACTIVATIONS
    timeline: Timeline | None = None


class _Run(NamedTuple):
    """The parts of a run that do not depend on its plan."""

    model: BlockModel
    estimator: ZOEstimator | None  # its ``perturb_in_place`` is not None; None for a run without zeroth-order steps
    micro_batch_size: int | None
    journal: Journal
    trace: Trace | None
    timeline: Timeline
    device: Device
    noise: NoiseGenerator
    workers: Workers
    factors: FactorStore | None  # of low-rank perturbations; None for dense ones
    update_loss: UpdateLoss

    @property
    def perturb_in_place(self) -> bool:
        """Whether weights are perturbed in place from one evaluation to the next."""
        return self.estimator is not None and bool(self.estimator.perturb_in_place)


def build(model: BlockModel, estimator: ZOEstimator | None, options: RunOptions) -> Parts:
    """Plan a run, and open the parts of the plan.

    Args:
        model: The model to run.
        estimator: Estimator of the steps; None for a run without zeroth-order steps.
        options: Options of the run.

    Raises:
        ZO2Error: as for ``ZOEngine``. All opened parts are closed then.
    """
    with ExitStack() as opened:
        opened.callback(ModelUse(model).end)
        opened.callback(model.weights.close)  # closed last: the other parts may read until they are closed
        run, perturbation = _opened_run(model, estimator, options, opened)
        request = replace(
            request_of(model, options),
            noise=run.noise,
            perturbation=perturbation,
            perturb_in_place=run.perturb_in_place,
            takes_steps=run.estimator is not None,
            directions=_most_directions(run.estimator, run.journal),
            updates=len(run.journal.updates),
        )
        if options.shared is not None:
            return _join(options.shared, run, request, options, opened)
        spec = _planned(request, run, MeasuredSpeeds(model.weights))
        if options.noise is None and not isinstance(run.noise, CounterNoise):
            # The same noise, whose generators may be kept in memory that the plan leaves over.
            spare = max(spec.host_plan.spare, 0)
            run = run._replace(noise=choose_noise(run.journal.noise, model.layouts, run.device.torch_device, memory=spare))
        _begin(run, options, perturbation, opened)
        base_digests = BaseDigests(run.journal.base_digests, learns=options.takes_steps(run.estimator))
        generations = _open_generations(spec, run, options.generations, opened)
        scratch = generations or _open_scratch(spec, run, opened)
        source = _open_source(spec, run, base_digests, scratch, opened)
        scheduler = _scheduler(spec, run, source, opened, overlap=options.overlap)
        allowed = None if options.memory.least_activations is None else spec.activation_bytes
        return _assembled(
            run,
            spec,
            opened,
            source=source,
            scheduler=scheduler,
            base_digests=base_digests,
            activations=ActivationOffload(run.device, allowed, spec.waiting_bytes, timeline=run.timeline),
            activation_bytes=spec.activation_bytes,
            spare_bytes=partial(spec.spare_bytes, in_place=run.device.in_place),
            generations=generations,
        )


def request_of(model: BlockModel, options: RunOptions) -> RunRequest:
    """What the plan of a run depends on, of a run with these options that takes no zeroth-order steps. Nothing is opened.

    Args:
        model: The model to run.
        options: Options of the run.
    """
    write_back, layouts = options.write_back, model.layouts
    if (generations := options.generations) is not None:
        write_back = WriteBackPolicy(directory=generations.directory, every=1)
        states = zip(layouts, generations.states, strict=True)
        layouts = [replace(layout, states=tuple(of_segment)) for layout, of_segment in states]
    return RunRequest(
        layouts=model.layouts,
        on_disk=laid_out_as_on_disk(layouts, model.weights),
        noise=PhiloxNoise(),  # none is drawn
        perturb_in_place=False,
        takes_steps=False,
        memory=options.memory,
        write_back=write_back,
        replay=options.replay,
        overlap=options.overlap,
        trained_copies=options.trained_copies,
        gradient_bytes=options.gradient_bytes,
        optimizer_bytes=options.optimizer_bytes,
        stays_in_memory=options.stays_in_memory,
        streams=generations is not None,
    )


def _begin(run: _Run, options: RunOptions, perturbation: Perturbation, opened: ExitStack) -> None:
    """Begin or continue the journal of a run that was planned."""
    device = run.device.torch_device
    run.journal.begin(_header(run.model, run.noise, run.estimator, options, perturbation, device))
    require_agreement(run.journal, run.noise, run.model.layouts, device, run.workers)
    if run.factors is not None and options.write_back is not None:
        policy = options.write_back
        file = run.factors.keep_periods(Path(policy.directory), run.model.layouts, run.journal, policy.bytes_a_step)
        opened.callback(file.close)


def _join(shared: SharedSegments, run: _Run, request: RunRequest, options: RunOptions, opened: ExitStack) -> Parts:
    """Assemble a run whose base other runs read, too."""
    if run.workers.size > 1:
        raise OptionError(
            "workers", found=f"{run.workers.size} workers", expected="one process for a shared base", remedy="leave it out"
        )
    base_digests = BaseDigests(run.journal.base_digests, learns=options.takes_steps(run.estimator))
    joined = shared.join(run.model, request, run.timeline, base_digests)
    opened.callback(joined.leave)
    _begin(run, options, request.perturbation, opened)
    return _assembled(
        run,
        None,
        opened,
        source=joined.scheduler,
        scheduler=joined.scheduler,
        base_digests=base_digests,
        activations=ActivationOffload(run.device, None, timeline=run.timeline),
        activation_bytes=joined.activation_bytes,
        spare_bytes=joined.spare_bytes,
        work_memory=joined.work_memory,
    )


def kept_inputs(parts: Parts, directory: Path | str) -> KeptInputs[torch.UntypedStorage]:
    """The inputs that blocks keep in first-order steps; closed with the run's parts.

    Args:
        parts: Parts of the run.
        directory: Directory for inputs that have no room in memory.
    """
    device, timeline = parts.device, parts.timeline
    file = InputFile(Path(directory), timeline)
    inputs = KeptInputs(file if device.in_place else InputOffload(device, timeline, file, parts.waiting_bytes))
    parts.opened.callback(inputs.close)
    return inputs


def adopt(model: BlockModel, estimator: ZOEstimator, parts: EngineParts, options: RunOptions) -> Parts:
    """Assemble a run from parts that the caller made.

    Args:
        model: The model to run.
        estimator: Estimator of the steps.
        parts: Parts of the caller.
        options: Further options: journal, seed, micro-batches, trace, provenance and workers.

    Raises:
        OptionError: if the source has other segments than the model, or ``provenance`` is not JSON.
        JournalError: if the journal belongs to another run.
    """
    with ExitStack() as opened:
        opened.callback(ModelUse(model).end)
        require_rows(options.micro_batch_size)
        estimator = with_perturb_in_place(estimator, default=True)
        source, device, noise = parts.source, parts.device, parts.noise
        _require_same_segments(model, source)
        require_distribution(estimator, noise)
        require_drawable(model.layouts, noise)
        timeline = Timeline() if parts.timeline is None else parts.timeline
        activation_bytes = parse_size(parts.activations, option="activations")
        trace = _open_trace(options.trace, opened)
        journal = _open_journal(options.journal, opened, trains=True)
        _require_kind(journal, None)
        workers = Workers() if options.workers is None else options.workers
        sync_journals(journal, workers)
        choose_perturbation(DensePerturbation(), journal)  # refuses the journal of a low-rank run
        journal.begin(_header(model, noise, estimator, options, DensePerturbation(), device.torch_device))
        require_agreement(journal, noise, model.layouts, device.torch_device, workers)
        scheduler = parts.scheduler
        if scheduler is None:
            scheduler = OverlappedScheduler(source, device, timeline=timeline)
        opened.callback(scheduler.release_all)  # the source stays open
        rows, update_loss = options.micro_batch_size, UpdateLoss(noise)
        return _assembled(
            _Run(model, estimator, rows, journal, trace, timeline, device, noise, workers, None, update_loss),
            None,
            opened,
            source=source,
            scheduler=scheduler,
            base_digests=BaseDigests({}, learns=False),
            activations=ActivationOffload(device, None, timeline=timeline),
            activation_bytes=activation_bytes,
            spare_bytes=lambda: 0,
        )


def _assembled(
    run: _Run,
    spec: RunSpec | None,
    opened: ExitStack,
    *,
    source: StoredSegments,
    scheduler: Scheduler,
    base_digests: BaseDigests,
    activations: ActivationOffload,
    activation_bytes: int,
    spare_bytes: Callable[[], int],
    generations: Generations | None = None,
    work_memory: Callable[[int], torch.Tensor] | None = None,
) -> Parts:
    """Make the work buffer, bind the model's modules to it, and collect the parts of a run.

    Without ``spec`` the caller made the parts, or they are shared, and no memory is planned here.
    """
    model, device = run.model, run.device
    keep_noise = device.in_place and (spec is None or spec.host_plan.keep_noise)
    buffer = WorkBuffer(
        model.layouts,
        device,
        run.noise,
        keep_noise=keep_noise,
        perturbs_in_place=run.perturb_in_place,
        allocate=work_memory,
    )
    worker = _start_worker(device, opened)
    host_plan = None if spec is None else spec.host_plan
    visits = _visits(run, buffer, activations, worker)
    buffer.bind(model.bind)
    return Parts(
        estimator=run.estimator,
        opened=opened.pop_all(),
        micro_batch_size=run.micro_batch_size,
        journal=run.journal,
        trace=run.trace,
        timeline=run.timeline,
        device=device,
        noise=run.noise,
        source=source,
        base_digests=base_digests,
        scheduler=scheduler,
        work_buffer=buffer,
        activations=activations,
        activation_bytes=activation_bytes,
        spare_bytes=spare_bytes,
        waiting_bytes=sys.maxsize if spec is None else spec.waiting_bytes + max(spec.host_plan.spare, 0),
        update_loss=run.update_loss,
        workers=run.workers,
        visits=visits,
        factors=run.factors,
        layouts=model.layouts if spec is None else spec.layouts,
        generations=generations,
        host_plan=host_plan,
        device_plan=None if spec is None else spec.device_plan,
        host_limit=_host_limit(host_plan, device),
    )


def _opened_run(
    model: BlockModel, estimator: ZOEstimator | None, options: RunOptions, opened: ExitStack
) -> tuple[_Run, Perturbation]:
    """Open the journal, synchronise it with the other workers, and choose device, noise and perturbation."""
    require_rows(options.micro_batch_size)
    trace = _open_trace(options.trace, opened)
    trains = options.takes_steps(estimator)
    journal = _open_journal(options.journal, opened, trains=trains)
    _require_kind(journal, options.method)
    workers = Workers() if options.workers is None else options.workers
    if trains:
        sync_journals(journal, workers)
    if not trains and options.journal is not None and journal.header is None:
        raise JournalError(journal.name, found="no journal", expected="the journal of a run", remedy="check the path")
    device = options.device if options.shared is None else options.shared.device
    if isinstance(device, str):
        device = choose_device(device)
        opened.callback(device.close)
    perturbation, noise = choose_perturbation(options.perturbation, journal), options.noise
    if estimator is not None:
        estimator = with_perturb_in_place(estimator, default=isinstance(perturbation, DensePerturbation))
    if noise is None and journal.noise is None:
        if estimator is None or isinstance(perturbation, LowRankPerturbation):
            noise = PhiloxNoise(Distribution.GAUSSIAN)  # also if nothing is drawn: it fits all other options
        elif estimator.distribution is not None:
            noise = PhiloxNoise(estimator.distribution)
    if noise is None:
        noise = choose_noise(journal.noise, model.layouts, device.torch_device)
    write_back = options.write_back
    factors = open_factors(
        perturbation,
        model,
        estimator,
        noise,
        journal,
        options.seed,
        device.torch_device,
        replay=options.replay,
        write_back_every=None if write_back is None else write_back.every,
        snapshot_every=None if write_back is None else write_back.snapshot_every,
    )
    if estimator is not None:
        require_distribution(estimator, noise)
    rows, timeline, update_loss = options.micro_batch_size, Timeline(), UpdateLoss(noise)
    run = _Run(model, estimator, rows, journal, trace, timeline, device, noise, workers, factors, update_loss)
    return run, perturbation


def _planned(request: RunRequest, run: _Run, speeds: Speeds) -> RunSpec:
    """Plan a run on this machine, whose free memory the workers of a host divide."""
    device = run.device
    on_host = device.torch_device.type == "cpu"
    neighbours, free = run.workers.neighbours, device.free_memory
    return plan(request, Machine(in_place=device.in_place, on_host=on_host, device_free=free, neighbours=neighbours), speeds)


def _open_generations(spec: RunSpec, run: _Run, policy: GenerationPolicy | None, opened: ExitStack) -> Generations | None:
    """Open the files of segments that change at each step."""
    if policy is None:
        return None
    journal = run.journal
    generations = Generations(policy.directory, spec.layouts, journal.chain, journal.require_version, spare=policy.changing)
    opened.callback(generations.close)
    return generations


def _open_scratch(spec: RunSpec, run: _Run, opened: ExitStack) -> Scratch | None:
    """Open the files of segments that are written back."""
    if spec.write_back is None:
        return None
    scratch = Scratch(Path(spec.write_back.directory), spec.layouts, run.journal.chain, run.journal.require_version)
    opened.callback(scratch.close)
    return scratch


def _open_source(
    spec: RunSpec,
    run: _Run,
    base_digests: BaseDigests,
    scratch: SlotFile | None,
    opened: ExitStack,
) -> BlockSource:
    """Open the source of the plan."""
    device, weights = run.device, run.model.weights
    source = open_source(
        weights,
        spec.layouts,
        device.host_memory,
        buckets=spec.host_plan.buckets,
        scratch=scratch,
        write_back_every=spec.write_back_every,
        base_digests=base_digests,
        timeline=run.timeline,
    )
    opened.callback(source.close)
    return source


def _scheduler(spec: RunSpec, run: _Run, source: BlockSource, opened: ExitStack, *, overlap: bool) -> Scheduler:
    """Make the scheduler of the plan; if blocks are transferred in fewer bits, the host prepares them."""
    if spec.low_bit is None:
        return _plain_scheduler(spec, run, source, overlap=overlap, across_sweeps=True)
    assert isinstance(run.noise, CounterNoise), "other noise was refused"
    host = HostReplay(spec.layouts, run.noise, run.journal.updates, run.update_loss)
    opened.callback(host.close)
    low_bit = LowBitSource(
        source,
        spread([index for index, layout in enumerate(spec.layouts) if not layout.resident], spec.kept),
        run.device.host_memory,
        host.replay,
        comes_back=spec.low_bit.comes_back,
        timeline=run.timeline,
    )
    opened.callback(low_bit.close)
    plain = _plain_scheduler(spec, run, low_bit, overlap=overlap, across_sweeps=False)
    return LowBitScheduler(plain, low_bit, host)


def _plain_scheduler(spec: RunSpec, run: _Run, source: BlockSource, *, overlap: bool, across_sweeps: bool) -> Scheduler:
    if not overlap:
        return SerialScheduler(source, run.device, timeline=run.timeline)
    return OverlappedScheduler(source, run.device, kept=spec.kept, across_sweeps=across_sweeps, timeline=run.timeline)


def _visits(
    run: _Run,
    buffer: WorkBuffer,
    activations: ActivationOffload,
    worker: ThreadPoolExecutor | None,
) -> Visits:
    """Choose how the visitors of sweeps are made. A run without an estimator perturbs nothing."""
    model, estimator = run.model, run.estimator
    zo_eps, in_place = (1.0, True) if estimator is None else (estimator.zo_eps, run.perturb_in_place)
    trajectory = partial(Trajectory, run.journal.updates, zo_eps=zo_eps, perturb_in_place=in_place)
    if run.factors is not None:
        assert isinstance(model, StackedModel), "other models were refused"
        return StackedVisits(
            model=model,
            factors=run.factors,
            trajectory=trajectory,
            buffer=buffer,
            activations=activations,
            streams=run.device.streams,
            timeline=run.timeline,
            worker=worker,
        )
    perturber = choose_perturber(run.noise, buffer, worker)
    return WeightVisits(
        layouts=model.layouts,
        trajectory=trajectory,
        perturber=perturber,
        activations=activations,
        streams=run.device.streams,
        timeline=run.timeline,
        update_loss=run.update_loss,
    )


def _host_limit(plan: HostPlan | None, device: Device) -> int | None:
    if plan is None or not plan.parts or not device.in_place:
        return None
    return plan.budget


def _open_journal(journal: Journal | Path | str | None, opened: ExitStack, *, trains: bool) -> Journal:
    """Open a journal by its path, and close it with ``opened``. A journal is returned unchanged; None is one in memory."""
    if not isinstance(journal, Journal):
        journal = opened.enter_context(closing(Journal(journal)))
    if trains:  # a run that only replays may do so while another process trains
        opened.push(journal.withdraw_if_refused)
        journal.lock()
    return journal


def _open_trace(trace: Trace | Path | str | None, opened: ExitStack) -> Trace | None:
    """Open a trace by its path, and close it with ``opened``. A trace or None is returned unchanged."""
    if trace is None or isinstance(trace, Trace):
        return trace
    return opened.enter_context(closing(Trace(Path(trace))))


def _start_worker(device: Device, opened: ExitStack) -> ThreadPoolExecutor | None:
    if device.torch_device.type != "cpu":
        return None
    worker = ThreadPoolExecutor(1, thread_name_prefix="zo2-perturb")
    opened.callback(worker.shutdown)
    return worker


def _header(
    model: BlockModel,
    noise: NoiseGenerator,
    estimator: ZOEstimator | None,
    options: RunOptions,
    perturbation: Perturbation,
    device: torch.device,
) -> Mapping[str, Any]:
    """Return the journal's header, which identifies the run. A value of None matches any value of the journal."""
    provenance, method = options.provenance, options.method
    steps: Mapping[str, Any] = {
        "noise": noise.name,
        DRAWN: numbers_drawn(device) if isinstance(noise, SequentialNoise) else None,
        "estimator": None if estimator is None else estimator.options,
        "seed": None if estimator is None else options.seed,
    }
    return {
        "base": model.weights.fingerprint,
        "parameters": digest(spec for layout in model.layouts for spec in layout.parameters),
        **(steps if method is None else {"method": json_object("method", method)}),
        "model": json_object("model.description", model.description),
        "provenance": None if provenance is None else json_object("provenance", provenance),
        **({} if isinstance(perturbation, DensePerturbation) else {"perturbation": dict(perturbation.options)}),
    }


def _require_kind(journal: Journal, method: Mapping[str, Any] | None) -> None:
    """Refuse a journal of steps of the other kind."""
    if journal.header is not None and journal.is_replayable is not (method is None):
        kinds = {True: "zeroth-order steps, which are replayed", False: "first-order steps, which have snapshots"}
        raise JournalError(
            journal.name,
            found=f"a run of {kinds[journal.is_replayable]}",
            expected=f"a run of {kinds[method is None]}",
            remedy="name another journal, or resume the run with its own method",
        )


def _require_same_segments(model: BlockModel, source: BlockSource) -> None:
    """Refuse a source of another model."""
    expected = [(layout.kind, layout.parameters, layout.borrowed) for layout in model.layouts]
    found = [(layout.kind, layout.parameters, layout.borrowed) for layout in source.layouts]
    if found != expected:
        raise OptionError(
            "source",
            found=f"{len(found)} segments that are not all the model's",
            expected=f"the {len(expected)} segments of the model",
            remedy="build the source from model.layouts and model.weights",
        )


def _most_directions(estimator: ZOEstimator | None, journal: Journal) -> int:
    """Return the most directions of a step, past or future."""
    past = max((len(seeds_of(update)) for update in journal.updates), default=1)
    if estimator is None:
        return past
    evaluations = estimator.evaluations(0, direction_seeds(0, 0, None))
    return max(past, len({evaluation.seed for evaluation in evaluations}))
