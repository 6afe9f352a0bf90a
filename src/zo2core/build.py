"""Building a run: it is planned, and the parts of the plan are opened.

Parts that a caller passes stay the caller's. Parts that are opened here are put on an ``ExitStack`` at once, so that a
refused run leaves nothing open, and an engine closes exactly these parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from zo2core.devices import choose_device
from zo2core.errors import JournalError, OptionError
from zo2core.estimators import direction_seeds, require_distribution, with_perturb_in_place
from zo2core.journal import DRAWN, Journal, digest, json_object
from zo2core.kernels.generators import numbers_drawn
from zo2core.methods.choice import Method
from zo2core.methods.first_order import FirstOrder, needs_of
from zo2core.methods.states import AtSnapshot
from zo2core.methods.zeroth_order import ZerothOrder
from zo2core.noise import PhiloxNoise, SequentialNoise, choose_noise
from zo2core.perturbation import (
    DensePerturbation,
    LowRankPerturbation,
    Perturbation,
    StackedModel,
    choose_perturbation,
    open_factors,
)
from zo2core.planning.low_bit import Replay, require_drawable
from zo2core.planning.memory import Machine
from zo2core.planning.policies import MemoryPolicy, WriteBackPolicy
from zo2core.planning.run_spec import MethodNeeds, RunRequest, RunSpec, plan
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.profiling import TraceRecorder
from zo2core.profiling.chrome_trace import Trace
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockModel, BlockSource, CounterNoise, Device, Scheduler, ZOEstimator
from zo2core.runner import Runner, RunParts, SegmentParts
from zo2core.schedulers import open_scheduler
from zo2core.schedulers.overlapped import spread
from zo2core.shared import SharedBase
from zo2core.sources import SegmentStore
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.sources.low_bit import LowBitSource
from zo2core.sources.slot_file import Generations, Scratch
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.sweep.exclusive_use import SoleUse
from zo2core.sweep.host_replay import HostReplay, LowBitScheduler
from zo2core.sweep.microbatch import require_rows
from zo2core.sweep.stacked_visitor import StackedVisits
from zo2core.sweep.stored_parameters import StoredParameters
from zo2core.sweep.trained_parameters import PresentVisits, PresentWeights, TrainedParameters
from zo2core.sweep.update_loss import UpdateLoss
from zo2core.sweep.visitor import Visits, WeightVisits
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import BlockLayout, Distribution
from zo2core.updates import Trajectory, seeds_of
from zo2core.workers import Workers, require_agreement, sync_journals

JOURNAL = "journal.jsonl"  # name of the journal in the directory of a run


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``Engine``, which describes them."""

    journal: Journal | Path | str | None = None
    run: Path | str | None = None
    provenance: Mapping[str, Any] | None = None
    device: Device | str = "cpu"
    memory: MemoryPolicy = MemoryPolicy()  # noqa: RUF009 - frozen
    write_back: WriteBackPolicy | None = None
    commit_every: int | None = None
    micro_batch_size: int | None = None
    overlap: bool = True
    replay: Replay = "auto"
    trace: Trace | Path | str | None = None
    workers: Workers | None = None
    shared: SharedBase | None = None
    source: BlockSource | None = None
    scheduler: Scheduler | None = None
    timeline: Timeline | None = None


@dataclass(kw_only=True)
class _Run(RunParts):
    """A run that is being built."""

    method: Method
    options: RunOptions
    perturbation: Perturbation
    is_kept: bool  # whether steps are recorded in the journal

    @property
    def perturb_in_place(self) -> bool:
        """Whether weights are perturbed in place from one evaluation to the next."""
        return self.estimator is not None and bool(self.estimator.perturb_in_place)


def build(model: BlockModel, method: Method, options: RunOptions) -> Runner:
    """Plan a run, and open the parts of the plan."""
    with ExitStack() as opened:
        opened.callback(SoleUse(model).end)
        if options.source is not None:
            opened.callback(SoleUse(options.source).end)
        else:
            opened.callback(model.weights.close)  # closed last: the other parts may read until they are closed
        run = _opened_run(model, method, options, opened)
        if options.source is not None:
            segments = _given(run, options.source, opened)
        elif options.shared is not None:
            segments = _shared(run, options.shared, opened)
        else:
            segments = _planned(run, opened)
        buffer = WorkBuffer(
            model.layouts,
            run.device,
            run.noise,
            keep_noise=run.device.in_place and (segments.host_plan is None or segments.host_plan.keep_noise),
            perturbs_in_place=run.perturb_in_place,
            allocate=segments.work_memory,
        )
        worker = None
        if run.device.torch_device.type == "cpu":
            worker = opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="zo2-perturb"))
        trained = _trained(run, segments.layouts)
        visits = _visits(run, trained, segments.activations, buffer, worker)
        buffer.bind(model.bind)
        opened.callback(run.recorder.flush)
        parts = {part.name: getattr(run, part.name) for part in fields(RunParts)}
        return Runner(**parts, **vars(segments), opened=opened.pop_all(), work_buffer=buffer, visits=visits, trained=trained)


def request_of(model: BlockModel, method: Method, options: RunOptions, *, workers: int = 1) -> RunRequest:
    """What the plan of a run depends on, as far as first-order methods are concerned. Nothing is opened."""
    write_back, layouts, needs = options.write_back, model.layouts, _needs(model, method, options, workers)
    if needs.states is not None:
        assert options.run is not None, "it is required for commits"
        write_back = WriteBackPolicy(directory=options.run, every=1)
        states = zip(layouts, needs.states, strict=True)
        layouts = [replace(layout, states=tuple(of_segment)) for layout, of_segment in states]
    return RunRequest(
        layouts=model.layouts,
        on_disk=laid_out_as_on_disk(layouts, model.weights),
        memory=options.memory,
        write_back=write_back,
        replay=options.replay,
        overlap=options.overlap,
        needs=needs,
    )


def _needs(model: BlockModel, method: Method, options: RunOptions, workers: int) -> MethodNeeds:
    if isinstance(method, FirstOrder):
        return needs_of(method, model, streams=options.commit_every is not None, workers=workers)
    is_loaded = isinstance(method, AtSnapshot) and method.parameters is not None
    return MethodNeeds(stays_in_memory=is_loaded and trains_all(model))


def trains_all(model: BlockModel) -> bool:
    """Whether no parameter is frozen."""
    return not any(spec.frozen for layout in model.layouts for spec in layout.parameters)


def _opened_run(model: BlockModel, method: Method, options: RunOptions, opened: ExitStack) -> _Run:
    """Open the journal, synchronise it with the other workers, and choose device, noise and perturbation."""
    require_rows(options.micro_batch_size)
    trace = options.trace
    if trace is not None and not isinstance(trace, Trace):
        trace = opened.enter_context(closing(Trace(Path(trace))))
    zeroth = method if isinstance(method, ZerothOrder) else ZerothOrder(None)
    is_kept = options.run is not None if isinstance(method, FirstOrder) else zeroth.estimator is not None
    path = options.journal if options.journal is not None or options.run is None else Path(options.run) / JOURNAL
    journal = path if isinstance(path, Journal) else opened.enter_context(closing(Journal(path)))
    if is_kept:  # a run that only replays may do so while another process trains
        opened.push(journal.withdraw_if_refused)
        journal.lock()
    _require_kind(journal, method)
    workers = Workers() if options.workers is None else options.workers
    if is_kept:
        sync_journals(journal, workers)
    elif path is not None and journal.header is None:
        raise JournalError(journal.name, found="no journal", expected="the journal of a run", remedy="check the path")
    device = options.device if options.shared is None else options.shared.device
    if isinstance(device, str):
        device = choose_device(device)
        opened.callback(device.close)
    perturbation, noise, estimator = choose_perturbation(zeroth.perturbation, journal), zeroth.noise, zeroth.estimator
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
        zeroth.seed,
        device.torch_device,
        replay=options.replay,
        write_back_every=None if write_back is None else write_back.every,
        snapshot_every=None if write_back is None else write_back.snapshot_every,
    )
    if estimator is not None:
        require_distribution(estimator, noise)
    timeline = Timeline() if options.timeline is None else options.timeline
    return _Run(
        model=model,
        method=method,
        options=options,
        estimator=estimator,
        micro_batch_size=options.micro_batch_size,
        journal=journal,
        workers=workers,
        device=device,
        noise=noise,
        timeline=timeline,
        recorder=TraceRecorder(timeline, trace),
        perturbation=perturbation,
        is_kept=is_kept,
        factors=factors,
        update_loss=UpdateLoss(noise),
    )


def _begin(run: _Run, opened: ExitStack) -> None:
    """Begin or continue the journal of a run that was planned."""
    device, policy = run.device.torch_device, run.options.write_back
    run.journal.begin(_header(run))
    require_agreement(run.journal, run.noise, run.model.layouts, device, run.workers)
    if run.factors is not None and policy is not None:
        file = run.factors.keep_periods(Path(policy.directory), run.model.layouts, run.journal, policy.bytes_a_step)
        opened.callback(file.close)


def _request(run: _Run) -> RunRequest:
    """What the plan of a run depends on."""
    return replace(
        request_of(run.model, run.method, run.options, workers=run.workers.size),
        noise=run.noise,
        perturbation=run.perturbation,
        perturb_in_place=run.perturb_in_place,
        takes_steps=run.estimator is not None,
        directions=_most_directions(run.estimator, run.journal),
        updates=len(run.journal.updates),
    )


def _planned(run: _Run, opened: ExitStack) -> SegmentParts:
    """Plan a run on this machine, whose free memory the workers of a host divide, and open the parts of the plan."""
    device, model, options, timeline = run.device, run.model, run.options, run.timeline
    request = _request(run)
    machine = Machine.of(device, run.workers.neighbours)
    spec, needs = plan(request, machine, MeasuredSpeeds(model.weights)), request.needs
    own_noise = isinstance(run.method, ZerothOrder) and run.method.noise is not None
    if not own_noise and not isinstance(run.noise, CounterNoise):
        # The same noise, whose generators may be kept in memory that the plan leaves over.
        spare = max(spec.host_plan.spare, 0)
        run.noise = choose_noise(run.journal.noise, model.layouts, device.torch_device, memory=spare)
    _begin(run, opened)
    digests = BaseDigests(run.journal.base_digests, learns=run.is_kept)
    scratch, generations, journal = None, None, run.journal
    if needs.streams:
        assert options.run is not None, "it is required for commits"
        generations = Generations(
            Path(options.run), spec.layouts, journal.chain, journal.require_version, spare=needs.changing
        )
        opened.callback(generations.close)
    elif spec.write_back is not None:
        scratch = Scratch(Path(spec.write_back.directory), spec.layouts, journal.chain, journal.require_version)
        opened.callback(scratch.close)
    source = SegmentStore(
        model.weights,
        spec.layouts,
        device.host_memory,
        buckets=spec.host_plan.buckets,
        scratch=generations or scratch,
        write_back_every=spec.write_back_every,
        base_digests=digests,
        timeline=timeline,
    )
    opened.callback(source.close)
    allowed = None if options.memory.least_activations is None else spec.activation_bytes
    return SegmentParts(
        source=source,
        scheduler=_scheduler(spec, run, source, opened),
        layouts=spec.layouts,
        base_digests=digests,
        activations=ActivationOffload(device, allowed, spec.waiting_bytes, timeline=timeline),
        activation_bytes=spec.activation_bytes,
        spare_bytes=partial(spec.spare_bytes, in_place=device.in_place),
        waiting_bytes=spec.waiting_bytes + max(spec.host_plan.spare, 0),
        write_back_every=source.write_back_every,
        generations=generations,
        host_plan=spec.host_plan,
        device_plan=spec.device_plan,
    )


def _given(run: _Run, source: BlockSource, opened: ExitStack) -> SegmentParts:
    """Use a source that the caller passed."""
    expected = [(layout.kind, layout.parameters, layout.borrowed) for layout in run.model.layouts]
    found = [(layout.kind, layout.parameters, layout.borrowed) for layout in source.layouts]
    if found != expected:
        raise OptionError(
            "source",
            found=f"{len(found)} segments that are not all the model's",
            expected=f"the {len(expected)} segments of the model",
            remedy="build the source from model.layouts and model.weights",
        )
    options = run.options
    if not isinstance(run.method, ZerothOrder) or run.factors is not None:
        raise OptionError(
            "source",
            found="a run whose weights are not replayed where they are stored",
            expected="ZerothOrder with dense perturbations, for a source of the caller",
            remedy="leave it out",
        )
    if options.write_back is not None or options.shared is not None:
        raise OptionError(
            "source",
            found="write_back, or a shared base, beside a source",
            expected="one of them",
            remedy="give the source its scratch file, and leave the others out",
        )
    require_drawable(run.model.layouts, run.noise)
    _begin(run, opened)
    scheduler = options.scheduler
    if scheduler is None:
        scheduler = open_scheduler(source, run.device, run.timeline, overlap=options.overlap)
    opened.callback(scheduler.release_all)  # the source stays open
    return SegmentParts(
        source=source,
        scheduler=scheduler,
        layouts=run.model.layouts,
        base_digests=BaseDigests({}, learns=False),
        activations=ActivationOffload(run.device, None, timeline=run.timeline),
        activation_bytes=options.memory.activation_bytes,
        write_back_every=source.write_back_every,
    )


def _shared(run: _Run, base: SharedBase, opened: ExitStack) -> SegmentParts:
    """Join the runs of a base."""
    if run.workers.size > 1:
        raise OptionError(
            "workers", found=f"{run.workers.size} workers", expected="one process for a shared base", remedy="leave it out"
        )
    digests = BaseDigests(run.journal.base_digests, learns=run.is_kept)
    joined = base.join(run.model, _request(run), run.timeline, digests)
    opened.callback(joined.leave)
    _begin(run, opened)
    return SegmentParts(
        scheduler=joined.scheduler,
        layouts=run.model.layouts,
        base_digests=digests,
        activations=ActivationOffload(run.device, None, timeline=run.timeline),
        activation_bytes=joined.activation_bytes,
        spare_bytes=joined.spare_bytes,
        work_memory=joined.work_memory,
    )


def _scheduler(spec: RunSpec, run: _Run, source: BlockSource, opened: ExitStack) -> Scheduler:
    """Make the scheduler of the plan; if blocks are transferred in fewer bits, the host prepares them."""
    open_plain = partial(
        open_scheduler, device=run.device, timeline=run.timeline, overlap=run.options.overlap, kept=spec.kept
    )
    if spec.low_bit is None:
        return open_plain(source)
    assert isinstance(run.noise, CounterNoise), "other noise was refused"
    host = HostReplay(spec.layouts, run.noise, run.journal.updates, run.update_loss)
    opened.callback(host.close)
    low_bit = LowBitSource(
        source,
        spread([index for index, layout in enumerate(spec.layouts) if not layout.resident], spec.kept),
        run.device.host_memory,
        host.replay,
        comes_back=spec.low_bit == "device",
        timeline=run.timeline,
    )
    opened.callback(low_bit.close)
    return LowBitScheduler(open_plain(low_bit, across_sweeps=False), low_bit, host)


def _trained(run: _Run, layouts: Sequence[BlockLayout]) -> TrainedParameters | StoredParameters | None:
    """What first-order steps train: all parameters where they are stored, or an adapter's in memory."""
    model, method = run.model, run.method
    if isinstance(method, ZerothOrder):
        return None
    if (method.update is not None) if isinstance(method, FirstOrder) else trains_all(model):
        return StoredParameters(layouts)
    return TrainedParameters(model.layouts, model.weights, run.device.torch_device)


def _visits(
    run: _Run,
    trained: TrainedParameters | StoredParameters | None,
    activations: ActivationOffload,
    buffer: WorkBuffer,
    worker: ThreadPoolExecutor | None,
) -> Visits:
    """Choose how the visitors of sweeps are made, by where what is trained is."""
    model, estimator, streams, timeline = run.model, run.estimator, run.device.streams, run.timeline
    if trained is not None:
        return PresentVisits(
            layouts=model.layouts,
            weights=PresentWeights(trained, buffer),
            activations=activations,
            streams=streams,
            timeline=timeline,
            update_loss=run.update_loss,
        )
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
            streams=streams,
            timeline=timeline,
            worker=worker,
        )
    return WeightVisits(
        layouts=model.layouts,
        trajectory=trajectory,
        noise=run.noise,
        buffer=buffer,
        worker=worker,
        activations=activations,
        streams=streams,
        timeline=timeline,
        update_loss=run.update_loss,
    )


def _header(run: _Run) -> Mapping[str, Any]:
    """Return the journal's header, which identifies the run. A value of None matches any value of the journal."""
    model, noise, estimator, method, provenance = run.model, run.noise, run.estimator, run.method, run.options.provenance
    steps: Mapping[str, Any]
    if isinstance(method, FirstOrder):
        steps = {"method": json_object("method", method.journal_options)}
    else:
        drawn = numbers_drawn(run.device.torch_device) if isinstance(noise, SequentialNoise) else None
        seed = method.seed if isinstance(method, ZerothOrder) and estimator is not None else None
        options = None if estimator is None else estimator.options
        steps = {"noise": noise.name, DRAWN: drawn, "estimator": options, "seed": seed}
    perturbation = run.perturbation
    return {
        "base": model.weights.fingerprint,
        "parameters": digest(spec for layout in model.layouts for spec in layout.parameters),
        **steps,
        "model": json_object("model.description", model.description),
        "provenance": None if provenance is None else json_object("provenance", provenance),
        **({} if isinstance(perturbation, DensePerturbation) else {"perturbation": dict(perturbation.options)}),
    }


def _require_kind(journal: Journal, method: Method) -> None:
    """Refuse a journal of steps of the other kind."""
    is_replayable = not isinstance(method, FirstOrder)
    if journal.header is not None and journal.is_replayable is not is_replayable:
        kinds = {True: "zeroth-order steps, which are replayed", False: "first-order steps, which have snapshots"}
        raise JournalError(
            journal.name,
            found=f"a run of {kinds[journal.is_replayable]}",
            expected=f"a run of {kinds[is_replayable]}",
            remedy="name another journal, or resume the run with its own method",
        )


def _most_directions(estimator: ZOEstimator | None, journal: Journal) -> int:
    """Return the most directions of a step, past or future."""
    past = max((len(seeds_of(update)) for update in journal.updates), default=1)
    if estimator is None:
        return past
    evaluations = estimator.evaluations(0, direction_seeds(0, 0, None))
    return max(past, len({evaluation.seed for evaluation in evaluations}))
