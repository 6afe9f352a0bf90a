"""Policies in, parts out: the one place where the parts of a run are chosen, measured for and opened.

What a caller passes stays the caller's. What is opened here is put on an ``ExitStack`` at once, so that a run that is
refused half-way leaves nothing open, and an engine that was made closes exactly this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zo2core.beside import (
    BesideActivations,
    FactorStore,
    InWeights,
    Perturbation,
    StackedModel,
    choose_perturbation,
    factor_bytes,
    open_factors,
)
from zo2core.devices import choose_device
from zo2core.errors import JournalError, OptionError
from zo2core.estimators import direction_seeds, require_distribution, with_perturb_in_place
from zo2core.journal import Journal, digest, json_object
from zo2core.noise import PhiloxNoise, choose_noise
from zo2core.planning.carrying import Replay, choose_carrying, require_drawable
from zo2core.planning.device_plan import DevicePlan
from zo2core.planning.host_budget import parse_size
from zo2core.planning.host_plan import HostPlan, plan_host, plan_together
from zo2core.planning.policies import MemoryPolicy, WriteBackPolicy
from zo2core.planning.write_interval import interval_of
from zo2core.profiling.chrome_trace import Trace
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockModel, BlockSource, CounterNoise, Device, NoiseGenerator, Scheduler, ZOEstimator
from zo2core.schedulers import OverlappedScheduler, SerialScheduler
from zo2core.schedulers.overlapped import spread
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.carrying import CarryingSource, staging_bytes
from zo2core.sources.choice import open_source
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.sources.scratch import Scratch
from zo2core.sources.shared import SharedSource, shared_bytes
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.sweep.host_replay import CarryingScheduler, HostReplay
from zo2core.sweep.landing import Landing
from zo2core.sweep.microbatch import require_rows
from zo2core.sweep.perturber import Perturber, choose_perturber
from zo2core.sweep.shared_perturber import SharedPerturber
from zo2core.sweep.visits import StackedVisits, Visits, WeightVisits
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
    landing: Landing
    workers: Workers  # of the run; often one alone
    visits: Visits  # makes the visitor of each sweep
    require_version: Callable[[int], None]  # refuses what was made of bytes that another worker has taken further
    factors: FactorStore | None  # None where directions are in the weights
    host_plan: HostPlan | None  # None for passed parts
    device_plan: DevicePlan | None  # None where the device computes in host memory, and for passed parts


def build(
    model: BlockModel,
    estimator: ZOEstimator | None,
    *,
    journal: Journal | Path | str | None,
    device: Device | str,
    noise: NoiseGenerator | None,
    memory: MemoryPolicy,
    micro_batch_size: int | None,
    trace: Trace | Path | str | None,
    overlap: bool,
    seed: int = 0,
    write_back: WriteBackPolicy | None = None,
    provenance: Mapping[str, Any] | None = None,
    replay: Replay = "auto",
    perturbation: Perturbation | None = None,
    workers: Workers | None = None,
) -> Parts:
    """Choose and open the parts of a run.

    Args:
        model: The model to run.
        estimator: None for a run that takes no steps.
        journal: A journal, or the path of one; it is begun, or checked to be of this run.
        device: A device, or the name of one.
        noise: None takes what the journal was begun with, else what the estimator or the perturbation needs, else MeZO's.
        memory: Sizes, or plans.
        micro_batch_size: Rows of a micro-batch; None: batches run whole.
        trace: A trace, or the path of a new one.
        overlap: Whether transfers and disk overlap with compute.
        seed: Of the run.
        write_back: None never writes.
        provenance: What of the caller's decides the run, as JSON values; None says nothing.
        replay: Who replays for a device with memory of its own.
        perturbation: Where directions live; None takes what the journal was begun with, else the weights.
        workers: Others that work on the same run; None: there are none.

    Raises:
        ZO2Error: as ``ZOEngine`` says. What was opened is closed then.
    """
    with ExitStack() as opened:
        require_rows(micro_batch_size)
        layouts, timeline = model.layouts, Timeline()
        opened.callback(model.weights.close)  # last: until then somebody may read
        trace = _open_trace(trace, opened)
        replayed = estimator is None and journal is not None
        journal = _open_journal(journal, opened, trains=estimator is not None)
        workers = SoloWorker() if workers is None else workers
        if estimator is not None:
            workers.meet(journal)
        if replayed and journal.header is None:
            raise JournalError(
                journal.name, found="no journal", expected="one that a run has begun", remedy="check the path"
            )
        if isinstance(device, str):
            device = choose_device(device)
            opened.callback(device.close)
        recorded, where = journal.noise, choose_perturbation(perturbation, journal)
        if estimator is not None:
            estimator = with_perturb_in_place(estimator, default=isinstance(where, InWeights))
        walks = estimator is not None and bool(estimator.perturb_in_place)
        if noise is None and recorded is None:
            if estimator is None or isinstance(where, BesideActivations):
                noise = PhiloxNoise(Distribution.GAUSSIAN)  # also where nothing will be drawn: it goes with all else
            elif estimator.distribution is not None:
                noise = PhiloxNoise(estimator.distribution)
        of_choice = choose_noise(recorded, layouts, device.torch_device) if noise is None else noise
        every = None if write_back is None else write_back.every
        snapshots = None if write_back is None else write_back.snapshot_every
        asked: Any = {"replay": replay, "write_back_every": every, "snapshot_every": snapshots}
        factors = open_factors(where, model, estimator, of_choice, journal, seed, device.torch_device, **asked)
        changes = factors is None and not any(spec.frozen for layout in layouts for spec in layout.parameters)
        keeping, write_back = write_back, write_back if changes else None
        if estimator is not None:
            require_distribution(estimator, of_choice)
        carrying = choose_carrying(replay, layouts, of_choice, in_place=device.in_place)
        directions, carries = _most_directions(estimator, journal), carrying is not None
        held = factor_bytes(where, layouts, len(journal.updates))
        on_host = device.torch_device.type == "cpu"
        device_plan = memory.plan_device(
            layouts,
            of_choice,
            device,
            overlap=overlap,
            walks=walks,
            probes=directions,
            carries=carries,
            factors=0 if on_host else held,
        )
        room = memory.activation_bytes if device_plan is None else device_plan.activation_bytes
        waiting = memory.activation_bytes if room < memory.activation_bytes else 0
        streamed = laid_out_as_on_disk(layouts, model.weights)
        host_plan = memory.host
        sharers: Workers | None = None  # None: this process has a copy of its own
        if not isinstance(host_plan, HostPlan):
            planned = partial(
                plan_host,
                layouts,
                streamed,
                memory=host_plan,
                activation_bytes=memory.activation_bytes if device.in_place else waiting,
                compute_on_host=on_host,
                may_keep_noise=not isinstance(of_choice, CounterNoise),
                walks=walks,
                staging=0 if carrying is None else staging_bytes(layouts),
                factors=held if on_host else 0,
            )
            may_share = device.in_place and (write_back is None or write_back.is_left_to_us)
            host_plan, sharers = plan_together(planned, workers, may_share=may_share)
        write_back = write_back if sharers is None else None
        if noise is None:
            of_choice = choose_noise(recorded, layouts, device.torch_device, memory=max(host_plan.spare, 0))
        journal.begin(_header(model, of_choice, estimator, seed, provenance, where))
        workers.require_agreement(journal, of_choice, layouts, device.torch_device)
        used = layouts if host_plan.buckets is None else streamed
        kept, buckets = 0 if device_plan is None else device_plan.kept, host_plan.buckets
        in_place = estimator is None or walks
        every = interval_of(write_back, used, of_choice, model.weights, in_place=in_place, buckets=buckets, kept=kept)
        scratch = None
        if write_back is not None:
            scratch = Scratch(Path(write_back.directory), used, journal.chain, journal.require_version)
            opened.callback(scratch.close)
        if factors is not None and keeping is not None:
            opened.callback(factors.keep_periods(Path(keeping.directory), layouts, journal, keeping.bytes_a_step).close)
        base_digests = BaseDigests(journal.base_digests, learns=estimator is not None)
        source = open_source(
            model.weights,
            used,
            device.host_memory,
            buckets=buckets,
            shared=None if sharers is None else sharers.shared_memory(shared_bytes(used)),
            scratch=scratch,
            write_back_every=every,
            base_digests=base_digests,
            timeline=timeline,
        )
        opened.callback(source.close)
        landing = Landing(of_choice)
        scheduler: Scheduler
        if carrying is not None:
            assert isinstance(of_choice, CounterNoise), "what is carried otherwise was refused"
            host = HostReplay(used, of_choice, journal.updates, landing)
            opened.callback(host.close)
            blocks = [index for index, layout in enumerate(used) if not layout.resident]
            source = CarryingSource(
                source,
                spread(blocks, kept),
                device.host_memory,
                host.replay,
                comes_back=carrying.comes_back,
                timeline=timeline,
            )
            opened.callback(source.close)
        if overlap:
            scheduler = OverlappedScheduler(source, device, kept=kept, goes_round=carrying is None, timeline=timeline)
        else:
            scheduler = SerialScheduler(source, device, timeline=timeline)
        if isinstance(source, CarryingSource):
            scheduler = CarryingScheduler(scheduler, source, host)
        buffer = WorkBuffer(layouts, device, of_choice, keep_noise=device.in_place and host_plan.keep_noise, walks=walks)
        worker = _start_worker(device, opened)
        least = memory.least_activations
        activations = ActivationOffload(device, None if least is None else room, waiting, timeline=timeline)
        visits = _visits(
            model,
            estimator,
            of_choice,
            journal,
            factors,
            source if isinstance(source, SharedSource) else None,
            buffer=buffer,
            activations=activations,
            device=device,
            timeline=timeline,
            worker=worker,
            landing=landing,
        )
        for index, parameters in enumerate(buffer.parameters()):
            model.bind(index, parameters)
        return Parts(
            estimator=estimator,
            opened=opened.pop_all(),
            micro_batch_size=micro_batch_size,
            journal=journal,
            trace=trace,
            timeline=timeline,
            device=device,
            noise=of_choice,
            source=source,
            base_digests=base_digests,
            scheduler=scheduler,
            work_buffer=buffer,
            activations=activations,
            activation_bytes=room,
            worker=worker,
            landing=landing,
            workers=workers,
            visits=visits,
            require_version=source.require_version if isinstance(source, SharedSource) else _any_version,
            factors=factors,
            host_plan=host_plan,
            device_plan=device_plan,
        )


def adopt(
    model: BlockModel,
    estimator: ZOEstimator,
    *,
    source: BlockSource,
    scheduler: Scheduler | None,
    device: Device,
    noise: NoiseGenerator,
    journal: Journal | Path | str | None,
    seed: int,
    activations: int | str,
    micro_batch_size: int | None,
    trace: Trace | Path | str | None,
    timeline: Timeline | None,
    provenance: Mapping[str, Any] | None,
    workers: Workers | None,
) -> Parts:
    """Take parts that the caller made, as ``ZOEngine.from_parts`` says.

    Raises:
        OptionError: if the source holds other segments than the model has, or ``provenance`` is none of JSON.
        JournalError: if the journal is of another run.
    """
    with ExitStack() as opened:
        require_rows(micro_batch_size)
        estimator = with_perturb_in_place(estimator, default=True)
        _require_same_segments(model, source)
        require_distribution(estimator, noise)
        require_drawable(model.layouts, noise)
        timeline = Timeline() if timeline is None else timeline
        activation_bytes = parse_size(activations, option="activations")
        trace = _open_trace(trace, opened)
        journal = _open_journal(journal, opened, trains=True)
        workers = SoloWorker() if workers is None else workers
        workers.meet(journal)
        choose_perturbation(InWeights(), journal)  # refuses a run beside the activations
        journal.begin(_header(model, noise, estimator, seed, provenance, InWeights()))
        workers.require_agreement(journal, noise, model.layouts, device.torch_device)
        if scheduler is None:
            scheduler = OverlappedScheduler(source, device, timeline=timeline)
        opened.callback(scheduler.settle)  # buckets go back to the source, which lives on
        work_buffer = WorkBuffer(
            model.layouts, device, noise, keep_noise=device.in_place, walks=bool(estimator.perturb_in_place)
        )
        worker = _start_worker(device, opened)
        offload = ActivationOffload(device, None, timeline=timeline)
        landing = Landing(noise)
        visits = _visits(
            model,
            estimator,
            noise,
            journal,
            None,
            None,
            buffer=work_buffer,
            activations=offload,
            device=device,
            timeline=timeline,
            worker=worker,
            landing=landing,
        )
        for index, parameters in enumerate(work_buffer.parameters()):
            model.bind(index, parameters)
        return Parts(
            estimator=estimator,
            opened=opened.pop_all(),
            micro_batch_size=micro_batch_size,
            journal=journal,
            trace=trace,
            timeline=timeline,
            device=device,
            noise=noise,
            source=source,
            base_digests=BaseDigests({}, learns=False),
            scheduler=scheduler,
            work_buffer=work_buffer,
            activations=offload,
            activation_bytes=activation_bytes,
            worker=worker,
            landing=landing,
            workers=workers,
            visits=visits,
            require_version=_any_version,
            factors=None,
            host_plan=None,
            device_plan=None,
        )


def _visits(
    model: BlockModel,
    estimator: ZOEstimator | None,
    noise: NoiseGenerator,
    journal: Journal,
    factors: FactorStore | None,
    shared: SharedSource | None,
    *,
    buffer: WorkBuffer,
    activations: ActivationOffload,
    device: Device,
    timeline: Timeline,
    worker: ThreadPoolExecutor | None,
    landing: Landing,
) -> Visits:
    """What makes the visitors of this run's sweeps. A run without an estimator perturbs nothing."""
    zo_eps, in_place = (1.0, True) if estimator is None else (estimator.zo_eps, bool(estimator.perturb_in_place))
    common: Any = {
        "updates": journal.updates,
        "zo_eps": zo_eps,
        "perturb_in_place": in_place,
        "activations": activations,
        "streams": device.streams,
        "timeline": timeline,
    }
    if factors is not None:
        assert isinstance(model, StackedModel), "other models were refused"
        return StackedVisits(model=model, factors=factors, buffer=buffer, worker=worker, **common)
    perturber = choose_perturber(noise, buffer, worker)
    if shared is not None:
        alone, source = perturber, shared

        def perturber(trajectory: Trajectory) -> Perturber:
            return SharedPerturber(alone(trajectory), source, model.layouts)

    return WeightVisits(model=model, perturber=perturber, landing=landing, **common)


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
    seed: int,
    provenance: Mapping[str, Any] | None,
    perturbation: Perturbation,
) -> Mapping[str, Any]:
    """What a journal says of the run it belongs to. A value of None matches whatever the journal has."""
    return {
        "base": model.weights.fingerprint,
        "parameters": digest(spec for layout in model.layouts for spec in layout.parameters),
        "noise": noise.name,
        "estimator": None if estimator is None else estimator.options,
        "seed": None if estimator is None else seed,
        "model": json_object("model.description", model.description),
        "provenance": None if provenance is None else json_object("provenance", provenance),
        **({} if isinstance(perturbation, InWeights) else {"perturbation": dict(perturbation.options)}),
    }


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
