"""Options in, parts out: a run is planned, and what the plan names is opened.

What a caller passes stays the caller's. What is opened here is put on an ``ExitStack`` at once, so that a run that is
refused half-way leaves nothing open, and an engine that was made closes exactly this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zo2core.devices import choose_device
from zo2core.errors import JournalError, OptionError
from zo2core.estimators import direction_seeds, require_distribution, with_perturb_in_place
from zo2core.journal import Journal, digest, json_object
from zo2core.noise import PhiloxNoise, choose_noise
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
from zo2core.planning.policies import ACTIVATIONS, MemoryPolicy, WriteBackPolicy
from zo2core.planning.run_spec import Machine, RunRequest, RunSpec, plan
from zo2core.planning.speeds import MeasuredSpeeds, Speeds
from zo2core.profiling.chrome_trace import Trace
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockModel, BlockSource, CounterNoise, Device, NoiseGenerator, Scheduler, ZOEstimator
from zo2core.schedulers import OverlappedScheduler, SerialScheduler
from zo2core.schedulers.overlapped import spread
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.choice import open_source
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.sources.low_bit import LowBitSource
from zo2core.sources.scratch import Scratch
from zo2core.sources.shared import SharedSource, shared_bytes
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.sweep.host_replay import HostReplay, LowBitScheduler
from zo2core.sweep.microbatch import require_rows
from zo2core.sweep.perturber import Perturber, choose_perturber
from zo2core.sweep.shared_perturber import SharedPerturber
from zo2core.sweep.stacked_visitor import StackedVisits
from zo2core.sweep.update_loss import UpdateLoss
from zo2core.sweep.visits import Visits, WeightVisits
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import Distribution
from zo2core.updates import Trajectory, seeds_of
from zo2core.workers import SoloWorker, Workers


class Parts(NamedTuple):
    """What a run is made of."""

    estimator: ZOEstimator | None  # says whether it perturbs in place; None for a run that takes no steps
    opened: ExitStack  # closes what was opened for the run, and nothing that a caller passed
    micro_batch_size: int | None  # rows; None: batches run whole
    journal: Journal
    trace: Trace | None
    timeline: Timeline
    device: Device
    noise: NoiseGenerator
    source: BlockSource
    base_digests: BaseDigests  # of what the source reads; a source that a caller passed has its own, if any
    scheduler: Scheduler
    work_buffer: WorkBuffer
    activations: ActivationOffload
    activation_bytes: int  # that activations may take where forwards run
    worker: ThreadPoolExecutor | None  # the second thread; None where one host thread issues the work of a device
    update_loss: UpdateLoss
    workers: Workers  # of the run; often one alone
    visits: Visits  # makes the visitor of each sweep
    require_version: Callable[[int], None]  # refuses what was made of bytes that another worker has taken further
    factors: FactorStore | None  # None where directions are in the weights
    host_plan: HostPlan | None  # None for passed parts
    device_plan: DevicePlan | None  # None where the device computes in host memory, and for passed parts

    @property
    def spare_bytes(self) -> int:
        """Memory where forwards run that the plan has left over; 0 for passed parts."""
        plan = self.host_plan if self.device_plan is None and self.device.in_place else self.device_plan
        return 0 if plan is None else plan.spare

    @property
    def host_limit(self) -> int | None:
        """Resident bytes that the process may have; None for passed parts and plans without parts."""
        return self.host_plan.budget if self.host_plan is not None and self.host_plan.parts else None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a caller says of a run, as ``ZOEngine`` and ``Replayer`` take it."""

    journal: Journal | Path | str | None = None  # a path is begun, or checked to be of this run
    device: Device | str = "cpu"
    noise: NoiseGenerator | None = None  # None: the journal's, else what estimator or perturbation need, else MeZO's
    memory: MemoryPolicy = MemoryPolicy()  # noqa: RUF009 - frozen
    micro_batch_size: int | None = None  # rows; None: batches run whole
    trace: Trace | Path | str | None = None
    overlap: bool = True
    seed: int = 0
    write_back: WriteBackPolicy | None = None  # None never writes
    provenance: Mapping[str, Any] | None = None  # None says nothing
    replay: Replay = "auto"
    perturbation: Perturbation | None = None  # None takes what the journal was begun with, else the weights
    workers: Workers | None = None  # None: this one is alone
    method: Mapping[str, Any] | None = None  # of first-order steps, for the journal's header; None takes none
    trained_copies: int = 0  # of first-order steps: parameters, gradients, and what an optimizer keeps of each

    def takes_steps(self, estimator: ZOEstimator | None) -> bool:
        """Whether the run writes its journal: with an estimator or a first-order method."""
        return estimator is not None or self.method is not None


@dataclass(frozen=True, kw_only=True)
class GivenParts:
    """What a caller of ``ZOEngine.from_parts`` made, or says of the rest."""

    source: BlockSource
    device: Device
    noise: NoiseGenerator
    scheduler: Scheduler | None = None  # None: an ``OverlappedScheduler``
    activations: int | str = ACTIVATIONS
    timeline: Timeline | None = None


class _Run(NamedTuple):
    """What a run is, whoever makes its other parts."""

    model: BlockModel
    estimator: ZOEstimator | None  # says whether it perturbs in place; None for a run that takes no steps
    micro_batch_size: int | None
    journal: Journal
    trace: Trace | None
    timeline: Timeline
    device: Device
    noise: NoiseGenerator
    workers: Workers
    factors: FactorStore | None  # None where directions are in the weights

    @property
    def perturb_in_place(self) -> bool:
        """Whether evaluations walk from one to the next."""
        return self.estimator is not None and bool(self.estimator.perturb_in_place)


def build(model: BlockModel, estimator: ZOEstimator | None, options: RunOptions) -> Parts:
    """Plan a run, and open the parts that the plan names.

    Args:
        model: The model to run.
        estimator: None for a run that takes no steps.
        options: What the caller says of it.

    Raises:
        ZO2Error: as ``ZOEngine`` says. What was opened is closed then.
    """
    with ExitStack() as opened:
        opened.callback(model.weights.close)  # last: the parts above may read until they are closed
        run, perturbation = _opened_run(model, estimator, options, opened)
        request = RunRequest(
            layouts=model.layouts,
            on_disk=laid_out_as_on_disk(model.layouts, model.weights),
            noise=run.noise,
            perturbation=perturbation,
            perturb_in_place=run.perturb_in_place,
            takes_steps=run.estimator is not None,
            directions=_most_directions(run.estimator, run.journal),
            updates=len(run.journal.updates),
            memory=options.memory,
            write_back=options.write_back,
            replay=options.replay,
            overlap=options.overlap,
            trained_copies=options.trained_copies,
        )
        spec, is_shared = _planned(request, run, MeasuredSpeeds(model.weights))
        if options.noise is None and not isinstance(run.noise, CounterNoise):
            run = run._replace(noise=_with_memory(run, spec.host_plan.spare))
        run.journal.begin(_header(model, run.noise, run.estimator, options, perturbation))
        run.workers.require_agreement(run.journal, run.noise, model.layouts, run.device.torch_device)
        if run.factors is not None and options.write_back is not None:
            keeping = options.write_back
            kept = run.factors.keep_periods(Path(keeping.directory), model.layouts, run.journal, keeping.bytes_a_step)
            opened.callback(kept.close)
        base_digests = BaseDigests(run.journal.base_digests, learns=options.takes_steps(run.estimator))
        source = _open_source(spec, run, base_digests, opened, is_shared=is_shared)
        update_loss = UpdateLoss(run.noise)
        scheduler = _scheduler(spec, run, source, update_loss, opened, overlap=options.overlap)
        room = None if options.memory.least_activations is None else spec.activation_bytes
        return _assembled(
            run,
            opened,
            source=source,
            scheduler=scheduler,
            base_digests=base_digests,
            update_loss=update_loss,
            activations=ActivationOffload(run.device, room, spec.waiting_bytes, timeline=run.timeline),
            activation_bytes=spec.activation_bytes,
            keep_noise=spec.host_plan.keep_noise,
            host_plan=spec.host_plan,
            device_plan=spec.device_plan,
        )


def adopt(model: BlockModel, estimator: ZOEstimator, given: GivenParts, options: RunOptions) -> Parts:
    """Take parts that the caller made, as ``ZOEngine.from_parts`` says.

    Args:
        model: The model to run.
        estimator: Defines the evaluations and updates of a step.
        given: What the caller made.
        options: What the caller says of the rest: journal, seed, micro-batches, trace, provenance and workers.

    Raises:
        OptionError: if the source holds other segments than the model has, or ``provenance`` is none of JSON.
        JournalError: if the journal is of another run.
    """
    with ExitStack() as opened:
        require_rows(options.micro_batch_size)
        estimator = with_perturb_in_place(estimator, default=True)
        _require_same_segments(model, given.source)
        require_distribution(estimator, given.noise)
        require_drawable(model.layouts, given.noise)
        timeline = Timeline() if given.timeline is None else given.timeline
        activation_bytes = parse_size(given.activations, option="activations")
        trace = _open_trace(options.trace, opened)
        journal = _open_journal(options.journal, opened, trains=True)
        _require_kind(journal, None)
        workers = SoloWorker() if options.workers is None else options.workers
        workers.sync_journal(journal)
        choose_perturbation(DensePerturbation(), journal)  # refuses a run beside the activations
        journal.begin(_header(model, given.noise, estimator, options, DensePerturbation()))
        workers.require_agreement(journal, given.noise, model.layouts, given.device.torch_device)
        scheduler = given.scheduler
        if scheduler is None:
            scheduler = OverlappedScheduler(given.source, given.device, timeline=timeline)
        opened.callback(scheduler.settle)  # buckets go back to the source, which lives on
        rows, device, noise = options.micro_batch_size, given.device, given.noise
        return _assembled(
            _Run(model, estimator, rows, journal, trace, timeline, device, noise, workers, None),
            opened,
            source=given.source,
            scheduler=scheduler,
            base_digests=BaseDigests({}, learns=False),
            update_loss=UpdateLoss(noise),
            activations=ActivationOffload(device, None, timeline=timeline),
            activation_bytes=activation_bytes,
            keep_noise=True,
            host_plan=None,
            device_plan=None,
        )


def _assembled(
    run: _Run,
    opened: ExitStack,
    *,
    source: BlockSource,
    scheduler: Scheduler,
    base_digests: BaseDigests,
    update_loss: UpdateLoss,
    activations: ActivationOffload,
    activation_bytes: int,
    keep_noise: bool,
    host_plan: HostPlan | None,
    device_plan: DevicePlan | None,
) -> Parts:
    """The parts of a run whose segments have a place: the work buffer is made, and the model's modules are bound to it."""
    model, device = run.model, run.device
    buffer = WorkBuffer(
        model.layouts, device, run.noise, keep_noise=device.in_place and keep_noise, perturbs_in_place=run.perturb_in_place
    )
    worker = _start_worker(device, opened)
    visits = _visits(run, source, buffer, activations, worker, update_loss)
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
        worker=worker,
        update_loss=update_loss,
        workers=run.workers,
        visits=visits,
        require_version=source.require_version if isinstance(source, SharedSource) else _any_version,
        factors=run.factors,
        host_plan=host_plan,
        device_plan=device_plan,
    )


def _opened_run(
    model: BlockModel, estimator: ZOEstimator | None, options: RunOptions, opened: ExitStack
) -> tuple[_Run, Perturbation]:
    """Open the journal, bring it in line with other workers', and choose device, noise and where directions live."""
    require_rows(options.micro_batch_size)
    trace = _open_trace(options.trace, opened)
    trains = options.takes_steps(estimator)
    journal = _open_journal(options.journal, opened, trains=trains)
    _require_kind(journal, options.method)
    workers = SoloWorker() if options.workers is None else options.workers
    if estimator is not None:
        workers.sync_journal(journal)
    if not trains and options.journal is not None and journal.header is None:
        raise JournalError(journal.name, found="no journal", expected="one that a run has begun", remedy="check the path")
    device = options.device
    if isinstance(device, str):
        device = choose_device(device)
        opened.callback(device.close)
    perturbation, noise = choose_perturbation(options.perturbation, journal), options.noise
    if estimator is not None:
        estimator = with_perturb_in_place(estimator, default=isinstance(perturbation, DensePerturbation))
    if noise is None and journal.noise is None:
        if estimator is None or isinstance(perturbation, LowRankPerturbation):
            noise = PhiloxNoise(Distribution.GAUSSIAN)  # also where nothing will be drawn: it goes with all else
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
    rows, timeline = options.micro_batch_size, Timeline()
    return _Run(model, estimator, rows, journal, trace, timeline, device, noise, workers, factors), perturbation


def _planned(request: RunRequest, run: _Run, speeds: Speeds) -> tuple[RunSpec, bool]:
    """The plan of a run, and whether this worker has its blocks together with the others of its host.

    It has not if a worker of the run could not share, or blocks have to stream or to be written back.
    """
    device, workers = run.device, run.workers
    on_host = device.torch_device.type == "cpu"
    machine = Machine(in_place=device.in_place, on_host=on_host, device_free=device.free_memory)
    if workers.size == 1 or isinstance(request.memory.host, HostPlan):
        return plan(request, machine, speeds), False
    apart = replace(machine, neighbours=len(workers.neighbours()))
    together = plan(request, replace(apart, shares=True), speeds)
    can_share = device.in_place and not request.has_to_write and together.host_plan.buckets is None
    if all(workers.all_gather(can_share)):
        return together, True
    return plan(request, apart, speeds), False


def _with_memory(run: _Run, spare: int) -> NoiseGenerator:
    """The same noise, which may keep states of its generator in memory that the plan leaves."""
    return choose_noise(run.journal.noise, run.model.layouts, run.device.torch_device, memory=max(spare, 0))


def _open_source(spec: RunSpec, run: _Run, base_digests: BaseDigests, opened: ExitStack, *, is_shared: bool) -> BlockSource:
    """Where segments live, as planned."""
    journal, device, weights = run.journal, run.device, run.model.weights
    scratch = None
    if spec.write_back is not None:
        scratch = Scratch(Path(spec.write_back.directory), spec.layouts, journal.chain, journal.require_version)
        opened.callback(scratch.close)
    source = open_source(
        weights,
        spec.layouts,
        device.host_memory,
        buckets=spec.host_plan.buckets,
        shared=run.workers.shared_memory(shared_bytes(spec.layouts)) if is_shared else None,
        scratch=scratch,
        write_back_every=spec.write_back_every,
        base_digests=base_digests,
        timeline=run.timeline,
    )
    opened.callback(source.close)
    return source


def _scheduler(
    spec: RunSpec, run: _Run, source: BlockSource, update_loss: UpdateLoss, opened: ExitStack, *, overlap: bool
) -> Scheduler:
    """What moves segments, as planned; where blocks travel other than as they are stored, the host makes them ready."""
    if spec.low_bit is None:
        return _plain_scheduler(spec, run, source, overlap=overlap, across_sweeps=True)
    assert isinstance(run.noise, CounterNoise), "what is carried otherwise was refused"
    host = HostReplay(spec.layouts, run.noise, run.journal.updates, update_loss)
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
    source: BlockSource,
    buffer: WorkBuffer,
    activations: ActivationOffload,
    worker: ThreadPoolExecutor | None,
    update_loss: UpdateLoss,
) -> Visits:
    """What makes the visitors of this run's sweeps. A run without an estimator perturbs nothing."""
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
    if isinstance(source, SharedSource):
        perturber = partial(_shared_perturber, perturber, source, model)
    return WeightVisits(
        layouts=model.layouts,
        trajectory=trajectory,
        perturber=perturber,
        activations=activations,
        streams=run.device.streams,
        timeline=run.timeline,
        update_loss=update_loss,
    )


def _shared_perturber(
    perturber: Callable[[Trajectory], Perturber], source: SharedSource, model: BlockModel, trajectory: Trajectory
) -> Perturber:
    return SharedPerturber(perturber(trajectory), source, model.layouts)


def _any_version(version: int) -> None:
    """Where no other worker changes the weights, every version is the present one's."""


def _open_journal(journal: Journal | Path | str | None, opened: ExitStack, *, trains: bool) -> Journal:
    """A journal by its path, which is then for ``opened`` to close; a journal is taken as it is; None is one in memory."""
    made = journal if isinstance(journal, Journal) else opened.enter_context(closing(Journal(journal)))
    if trains:  # whoever only replays may do so while another process trains
        opened.push(made.withdraw_if_refused)
        made.lock()
    return made


def _open_trace(trace: Trace | Path | str | None, opened: ExitStack) -> Trace | None:
    """A trace by its path, which is then for ``opened`` to close; a trace, or None, is taken as it is."""
    if trace is None or isinstance(trace, Trace):
        return trace
    made = Trace(Path(trace))
    opened.callback(made.close)
    return made


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
) -> Mapping[str, Any]:
    """What a journal says of the run it belongs to. A value of None matches whatever the journal has."""
    provenance, method = options.provenance, options.method
    steps: Mapping[str, Any] = {
        "noise": noise.name,
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
    """Refuse to go on with, or to replay, a journal of steps of the other kind.

    Raises:
        JournalError: naming both.
    """
    if journal.header is not None and journal.is_replayable is not (method is None):
        kinds = {True: "zeroth-order steps, which are replayed", False: "first-order steps, which have snapshots"}
        raise JournalError(
            journal.name,
            found=f"a run of {kinds[journal.is_replayable]}",
            expected=f"one of {kinds[method is None]}",
            remedy="name another journal, or go on with the run as it was begun",
        )


def _require_same_segments(model: BlockModel, source: BlockSource) -> None:
    """Refuse a source of another model: its bytes would be taken for this one's."""
    ours = [(layout.kind, layout.parameters, layout.borrowed) for layout in model.layouts]
    theirs = [(layout.kind, layout.parameters, layout.borrowed) for layout in source.layouts]
    if ours != theirs:
        raise OptionError(
            "source",
            found=f"{len(theirs)} segments that are not all the model's",
            expected=f"the {len(ours)} segments of the model",
            remedy="build the source from model.layouts and model.weights",
        )


def _most_directions(estimator: ZOEstimator | None, journal: Journal) -> int:
    """The most directions that a step probes, of those to come and of those taken."""
    taken = max((len(seeds_of(update)) for update in journal.updates), default=1)
    if estimator is None:
        return taken
    evaluations = estimator.evaluations(0, direction_seeds(0, 0, None))
    return max(taken, len({evaluation.seed for evaluation in evaluations}))
