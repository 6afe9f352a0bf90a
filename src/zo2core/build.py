"""Building a run: it is planned, and the parts of the plan are opened.

What differs by the kind of run is chosen here, once: where segments are (planned, in a source that
the caller passed, or shared with other runs), what brings weights to a version, and which state
steps change. Parts that a caller passes stay the caller's. Parts that are opened here are put on an
``ExitStack`` at once, so that a refused run leaves nothing open, and an engine closes exactly these
parts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from zo2core.errors import JournalError, OptionError, without_effect
from zo2core.estimators.directions import Directions, choose_directions
from zo2core.estimators.noise import SequentialNoise, drawing_fingerprint
from zo2core.estimators.perturbation import (
    DensePerturbation,
    LowRankPerturbation,
    StackedModel,
)
from zo2core.estimators.two_point import direction_seeds
from zo2core.journal.journal import Journal
from zo2core.journal.records import DRAWN, digest, json_object
from zo2core.kernels.matmul_precision import (
    EXACT,
    HEADER_KEY,
    present_precision,
    recorded_precision,
    require_precision,
)
from zo2core.kernels.programs import Trajectory, seeds_of
from zo2core.methods.first_order import (
    TRAINED_COPIES,
    AtSnapshot,
    FirstOrder,
    require_committable,
    require_widened_gradients,
    trained_bytes,
)
from zo2core.methods.gradient_steps import AdapterSteps, FusedSteps
from zo2core.methods.stages import Stage
from zo2core.methods.states import (
    AdapterState,
    DiskState,
    DividedState,
    RunState,
    StoredState,
    TrainedState,
)
from zo2core.methods.zeroth_order import JournalState, ZerothOrder, ZerothOrderSteps
from zo2core.planning.memory import (
    Machine,
    MemoryPart,
    MemoryPolicy,
    RunRequest,
    RunSpec,
    plan,
    require_drawable,
)
from zo2core.planning.speeds import MeasuredSpeeds, WriteBackPolicy
from zo2core.protocols import (
    BlockModel,
    BlockSource,
    CounterNoise,
    Device,
    DifferentiableModel,
    MeasuredModel,
    ModelOfFiles,
    RoomTakingModel,
    Scheduler,
)
from zo2core.ranges import MatmulPrecision, require_whole
from zo2core.run import CommittedSegments, CustomSource, EngineOptions, Run, Segments, Undivided
from zo2core.schedulers.devices import choose_device
from zo2core.schedulers.overlapped import open_scheduler, spread
from zo2core.schedulers.profiling import Timeline, Trace, TraceRecorder
from zo2core.shared import SharedBase
from zo2core.sources import SegmentStore
from zo2core.sources.low_bit import LowBitScheduler, LowBitSource
from zo2core.sources.segment_store import BaseDigests, laid_out_as_on_disk
from zo2core.sources.slot_file import Generations, Scratch
from zo2core.sweep.activations import StreamActivations
from zo2core.sweep.factor_perturber import FactorPerturber
from zo2core.sweep.perturbers import (
    CounterPerturber,
    DrawnPerturber,
    Perturber,
    WorkBuffer,
)
from zo2core.sweep.trained_weights import AdapterWeights, StoredWeights, TrainedWeights
from zo2core.sweep.visitor import HostReplay, UpdateLoss, Visits, sole_use
from zo2core.workers.agreement import common_step, require_agreement, sync_journals
from zo2core.workers.divided_states import DividedStates
from zo2core.workers.workers import BLOCKS, Workers

Method: TypeAlias = ZerothOrder | FirstOrder | AtSnapshot
Steps: TypeAlias = ZerothOrderSteps | AdapterSteps | FusedSteps

JOURNAL = "journal.jsonl"  # name of the journal in the directory of a run


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run is made from; ``Engine`` describes each value."""

    model: BlockModel
    method: Method
    journal: Journal | Path | str | None = None
    run: Path | str | None = None
    device: Device | str = "cpu"
    memory: MemoryPolicy = MemoryPolicy()  # noqa: RUF009 - frozen
    micro_batch_size: int | None = None
    options: EngineOptions = EngineOptions()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None:
            require_whole("micro_batch_size", self.micro_batch_size, 1)

    @property
    def directory(self) -> Path | None:
        """Directory of a run that is kept."""
        return None if self.run is None else Path(self.run)

    @property
    def spill(self) -> Path:
        """Directory of a temporary file for activations."""
        if self.options.spill is not None:
            return Path(self.options.spill)
        return Path(tempfile.gettempdir()) if self.run is None else Path(self.run)

    @property
    def shared(self) -> SharedBase | None:
        """The base that other runs read, too."""
        return self.options.source if isinstance(self.options.source, SharedBase) else None

    @property
    def custom(self) -> CustomSource | None:
        """The source of the caller."""
        return self.options.source if isinstance(self.options.source, CustomSource) else None

    @property
    def is_kept(self) -> bool:
        """Whether steps are recorded in the journal."""
        if isinstance(self.method, FirstOrder):
            return self.run is not None
        return isinstance(self.method, ZerothOrder) and self.method.estimator is not None

    @property
    def has_steps(self) -> bool:
        """Whether a run has steps, new ones or those of a journal."""
        return self.is_kept or isinstance(self.method, FirstOrder) or self.journal is not None


class OpenedRun(NamedTuple):
    """A run, the state that its steps change, and what takes them."""

    run: Run
    state: RunState
    steps: Steps | None  # None: the run takes no steps


def open_run(inputs: RunInputs) -> OpenedRun:
    """Plan a run, open the parts of the plan, and go on from what the run has kept."""
    _require_consistent(inputs)
    model = inputs.model
    with ExitStack() as refused:
        opened = ExitStack()
        refused.push(opened)
        _claim_model(inputs, opened)
        parts = _open_parts(inputs, opened)
        parts, segments = _open_segments(parts)
        agreed = parts.division.agreed_bytes(segments.activation_bytes)
        segments = replace(segments, activation_bytes=agreed)
        buffer = _allocate_work_buffer(parts, segments)
        trained = _trained_weights(parts, segments, buffer)
        run = Run(
            model=model,
            journal=parts.journal,
            is_kept=inputs.is_kept,
            directory=inputs.directory,
            spill=inputs.spill,
            micro_batch_size=inputs.micro_batch_size,
            workers=parts.workers,
            division=parts.division,
            device=parts.device,
            matmul_precision=parts.matmul_precision,
            recorder=parts.recorder,
            directions=parts.directions,
            segments=segments,
            perturber=_perturber_maker(parts, buffer, trained),
            visits=_visits(parts, segments),
            update_loss=parts.update_loss,
            require_unchanged=_file_check(model),
            opened=opened,
        )
        buffer.bind(model.bind)
        if isinstance(model, RoomTakingModel):
            model.make_room = run.visits.make_room
        opened.callback(parts.recorder.flush)
        result = _choose_state(run, inputs.method, trained)
        refused.pop_all()
        return result


def _file_check(model: BlockModel) -> Callable[[], object]:
    """The check of the files that a model was opened from; of other models none."""
    return model.require_unchanged if isinstance(model, ModelOfFiles) else lambda: None


@dataclass(frozen=True, kw_only=True)
class _RunParts:
    """A run before its segments are placed."""

    inputs: RunInputs
    opened: ExitStack
    recorder: TraceRecorder
    journal: Journal
    workers: Workers  # that share steps and evaluations
    division: Undivided  # of the segments among processes
    device: Device
    matmul_precision: MatmulPrecision
    directions: Directions
    update_loss: UpdateLoss

    @property
    def model(self) -> BlockModel:
        """Model of the run."""
        return self.inputs.model

    @property
    def options(self) -> EngineOptions:
        """Options of the run."""
        return self.inputs.options

    @property
    def timeline(self) -> Timeline:
        """Timeline of the run."""
        return self.recorder.timeline

    @property
    def request(self) -> RunRequest:
        """What the plan of the run depends on."""
        estimator, updates = self.directions.estimator, self.journal.updates
        directions = {len(seeds_of(update)) for update in updates} | {1}  # past and future
        if estimator is not None:
            evaluations = estimator.evaluations(0, direction_seeds(0, 0, None))
            directions.add(len({evaluation.seed for evaluation in evaluations}))
        request = request_of(self.inputs, workers=self.division.peers.size)
        elsewhere = self.division.trained_elsewhere
        further = [MemoryPart("trained by other stages", request.trained_copies * elsewhere)]
        return replace(
            request,
            further=further if elsewhere else (),
            noise=self.directions.noise,
            perturbation=self.directions.perturbation,
            perturb_in_place=self.directions.perturb_in_place,
            takes_steps=estimator is not None,
            directions=max(directions),
            updates=len(updates),
        )


def _claim_model(inputs: RunInputs, opened: ExitStack) -> None:
    """Use the model, and a source that the caller passed, alone."""
    opened.enter_context(sole_use(inputs.model))
    if inputs.custom is not None:
        opened.enter_context(sole_use(inputs.custom.source))
    else:
        # closed last: the other parts may read until they are closed
        opened.callback(inputs.model.weights.close)


def _open_parts(inputs: RunInputs, opened: ExitStack) -> _RunParts:
    """Open trace, journal and device, and choose the directions."""
    recorder = _open_recorder(inputs, opened)
    peers = Workers() if inputs.options.workers is None else inputs.options.workers
    journal = _open_journal(inputs, opened, peers)
    device = _open_device(inputs, opened)
    method = inputs.method
    zeroth = method if isinstance(method, ZerothOrder) else ZerothOrder(None)
    directions = choose_directions(
        inputs.model,
        journal,
        device.torch_device,
        estimator=zeroth.estimator,
        perturbation=zeroth.perturbation,
        noise=zeroth.noise,
        seed=zeroth.seed,
    )
    _require_changing(inputs.model, directions, inputs.options)
    division = _divide(inputs, peers, opened)
    return _RunParts(
        inputs=inputs,
        opened=opened,
        recorder=recorder,
        journal=journal,
        workers=Workers(neighbours=peers.neighbours) if division.is_divided else peers,
        division=division,
        device=device,
        matmul_precision=_choose_precision(inputs.options, journal),
        directions=directions,
        update_loss=UpdateLoss(directions.noise),
    )


def _divide(inputs: RunInputs, peers: Workers, opened: ExitStack) -> Undivided:
    """Divide the model's segments among the workers, if that is their split; the model has all of
    them again once the run is closed.
    """
    model = inputs.model
    if peers.size == 1 or peers.split != BLOCKS:
        return Undivided(model.layouts, peers)
    stage = Stage(model, peers)
    stage.require_alike()
    if isinstance(model, MeasuredModel):
        model.agree(partial(peers.all_gather, purpose="measured memory"))
    divided: Any = model  # a read-only property of the contract, which only this changes
    opened.callback(setattr, divided, "layouts", stage.all_layouts)
    divided.layouts = stage.layouts
    return stage


def _open_recorder(inputs: RunInputs, opened: ExitStack) -> TraceRecorder:
    trace = inputs.options.trace
    if trace is not None and not isinstance(trace, Trace):
        trace = opened.enter_context(closing(Trace(Path(trace))))
    timeline = None if inputs.custom is None else inputs.custom.timeline
    return TraceRecorder(Timeline() if timeline is None else timeline, trace)


def _open_journal(inputs: RunInputs, opened: ExitStack, workers: Workers) -> Journal:
    """Open the journal, and synchronise it with the other workers."""
    path = inputs.journal
    if path is None and inputs.directory is not None:
        path = inputs.directory / JOURNAL
    journal = path if isinstance(path, Journal) else opened.enter_context(closing(Journal(path)))
    if inputs.is_kept:  # a run that only replays may do so while another process trains
        opened.push(journal.withdraw_if_refused)
        journal.lock()
    _require_kind(journal, inputs.method)
    if inputs.is_kept:
        sync_journals(journal, workers)
    elif path is not None:
        journal.require_run()
    return journal


def _open_device(inputs: RunInputs, opened: ExitStack) -> Device:
    chosen = inputs.device if inputs.shared is None else inputs.shared.device
    device = choose_device(chosen)
    if isinstance(chosen, str):
        opened.callback(device.close)
    return device


def _choose_precision(options: EngineOptions, journal: Journal) -> MatmulPrecision:
    """The precision of products: the given one, the one of the journal's run, or the process's."""
    precision = options.matmul_precision or recorded_precision(journal.header)
    if precision is None:
        return present_precision()
    require_precision(precision)
    return precision


def _open_segments(parts: _RunParts) -> tuple[_RunParts, Segments]:
    """Decide where the segments of a run are, and open what brings them to visits."""
    if parts.inputs.custom is not None:
        return parts, _use_custom_source(parts, parts.inputs.custom)
    if parts.inputs.shared is not None:
        return parts, _join_shared_base(parts, parts.inputs.shared)
    return _open_planned_segments(parts)


def _open_planned_segments(parts: _RunParts) -> tuple[_RunParts, Segments]:
    """Plan a run on this machine, whose free memory the workers of a host divide, and open the
    parts of the plan.
    """
    model = parts.model
    device = parts.device
    journal = parts.journal
    machine = Machine.of(device, parts.workers.neighbours)
    request = parts.request
    spec = plan(request, machine, MeasuredSpeeds(model.weights))
    if not isinstance(parts.inputs.method, ZerothOrder) or parts.inputs.method.noise is None:
        # The same noise, whose generators may be kept in memory that the plan leaves over.
        directions = parts.directions.with_noise_memory(
            journal.noise,
            parts.division.all_layouts,
            device.torch_device,
            max(spec.host_plan.spare, 0),
        )
        parts = replace(parts, directions=directions)
    _begin_journal(parts)
    committed_every = parts.options.commit_every if request.changing else None
    slots: Scratch | Generations | None = None
    if committed_every is not None:
        slots = _open_generations(parts, spec, spare=request.changing)
    elif spec.write_back is not None:
        slots = Scratch(
            Path(spec.write_back.directory), spec.layouts, journal.chain, journal.require_version
        )
    if slots is not None:
        parts.opened.callback(slots.close)
    base_digests = BaseDigests(
        journal.base_digests, learns=parts.inputs.is_kept, read_whole=parts.division.read_whole
    )
    parts.division.check_embedding(base_digests, model.weights)
    store = SegmentStore(
        model.weights,
        spec.layouts,
        device.host_memory,
        buckets=spec.host_plan.buckets,
        scratch=slots,
        write_back_every=spec.write_back_every,
        base_digests=base_digests,
        timeline=parts.timeline,
    )
    parts.opened.callback(store.close)
    committed = None
    if committed_every is not None and isinstance(slots, Generations):
        committed = CommittedSegments(store, slots, committed_every)
    least = parts.inputs.memory.least_activations
    spare = spec.spare_bytes(in_place=device.in_place)
    segments = Segments(
        layouts=spec.layouts,
        scheduler=_open_scheduler(parts, spec, store),
        activations=StreamActivations(
            device,
            None if least is None else spec.activation_bytes,
            spec.waiting_bytes,
            timeline=parts.timeline,
        ),
        activation_bytes=spec.activation_bytes,
        spare_bytes=lambda: spare,
        base_digests=base_digests,
        source=store,
        plan=spec,
        committed=committed,
    )
    return parts, segments


def _use_custom_source(parts: _RunParts, custom: CustomSource) -> Segments:
    """Use a source that the caller passed."""
    model = parts.model
    device = parts.device
    source = custom.source
    expected = [(layout.kind, layout.parameters, layout.borrowed) for layout in model.layouts]
    actual = [(layout.kind, layout.parameters, layout.borrowed) for layout in source.layouts]
    if actual != expected:
        raise OptionError(
            "source",
            found=f"{len(actual)} segments that are not all the model's",
            expected=f"the {len(expected)} segments of the model",
            remedy="build the source from model.layouts and model.weights",
        )
    if not isinstance(parts.inputs.method, ZerothOrder) or parts.directions.factors is not None:
        kind = "a run whose weights are not replayed where they are stored"
        raise without_effect(
            "source", kind, "ZerothOrder with dense perturbations, for a source of the caller"
        )
    require_drawable(model.layouts, parts.directions.noise)
    _begin_journal(parts)
    scheduler = custom.scheduler
    if scheduler is None:
        scheduler = open_scheduler(source, device, parts.timeline, overlap=parts.options.overlap)
    parts.opened.callback(scheduler.release_all)  # the source stays open
    return Segments(
        layouts=model.layouts,
        scheduler=scheduler,
        activations=StreamActivations(device, None, timeline=parts.timeline),
        activation_bytes=parts.inputs.memory.activation_bytes,
        spare_bytes=lambda: 0,
        base_digests=BaseDigests({}, learns=False),
        source=source,
    )


def _join_shared_base(parts: _RunParts, base: SharedBase) -> Segments:
    """Join the runs of a base."""
    base_digests = BaseDigests(parts.journal.base_digests, learns=parts.inputs.is_kept)
    joined = base.join(parts.model, parts.request, parts.timeline, base_digests)
    parts.opened.callback(joined.leave)
    _begin_journal(parts)
    return Segments(
        layouts=parts.model.layouts,
        scheduler=joined,
        activations=StreamActivations(parts.device, None, timeline=parts.timeline),
        activation_bytes=joined.activation_bytes,
        spare_bytes=base.spare_bytes,
        base_digests=base_digests,
    )


def _open_generations(parts: _RunParts, spec: RunSpec, *, spare: int) -> Generations:
    """Open the generations of segments on disk, in the directory of the run."""
    journal, directory = parts.journal, parts.inputs.directory
    assert directory is not None, "it is required for commits"
    return Generations(
        directory,
        spec.layouts,
        journal.chain,
        journal.require_version,
        spare=spare,
        choose=partial(common_step, workers=parts.division.peers),
    )


def _open_scheduler(parts: _RunParts, spec: RunSpec, source: BlockSource) -> Scheduler:
    """Make the scheduler of the plan; if blocks are transferred in fewer bits, the host prepares
    them.
    """
    device, timeline = parts.device, parts.timeline
    open_plain = partial(
        open_scheduler,
        device=device,
        timeline=timeline,
        overlap=parts.options.overlap,
        kept=spec.kept,
    )
    if spec.low_bit is None:
        return open_plain(source)
    noise = parts.directions.noise
    assert isinstance(noise, CounterNoise), "other noise was refused"
    host = HostReplay(spec.layouts, noise, parts.journal.updates, parts.update_loss)
    blocks = [index for index, layout in enumerate(spec.layouts) if not layout.resident]
    low_bit = LowBitSource(
        source,
        spread(blocks, spec.kept),
        device.host_memory,
        host.replay,
        comes_back=spec.low_bit == "device",
        timeline=timeline,
    )
    parts.opened.callback(low_bit.close)
    return LowBitScheduler(open_plain(low_bit, across_sweeps=False), low_bit)


def _allocate_work_buffer(parts: _RunParts, segments: Segments) -> WorkBuffer:
    """Allocate the memory of the forwards' weights."""
    shared, device = parts.inputs.shared, parts.device
    has_room = segments.plan is None or segments.plan.host_plan.keep_noise
    return WorkBuffer(
        parts.model.layouts,
        device,
        parts.directions.noise,
        keep_noise=device.in_place and has_room,
        perturbs_in_place=parts.directions.perturb_in_place,
        allocate=None if shared is None else shared.work_memory,
    )


def _trained_weights(
    parts: _RunParts, segments: Segments, buffer: WorkBuffer
) -> AdapterWeights | StoredWeights | None:
    """What first-order steps train: all parameters where they are stored, or an adapter's in
    memory; None: weights are the journal's.
    """
    method, model = parts.inputs.method, parts.model
    if isinstance(method, ZerothOrder):
        return None
    is_fused = isinstance(method, FirstOrder) and method.update is not None
    if is_fused or (isinstance(method, AtSnapshot) and _trains_all(model)):
        return StoredWeights(buffer, segments.layouts)
    return AdapterWeights(
        buffer, model.layouts, model.weights, parts.device.torch_device, parts.division.all_layouts
    )


def _perturber_maker(
    parts: _RunParts, buffer: WorkBuffer, trained: TrainedWeights | None
) -> Callable[[Trajectory], Perturber]:
    """A function that makes the perturber of a sweep, given the updates and evaluations of it."""
    if trained is not None:
        return trained.for_sweep
    directions = parts.directions
    if directions.factors is not None:
        assert isinstance(parts.model, StackedModel), "other models were refused"
        return partial(FactorPerturber, parts.model, directions.factors, buffer)
    if isinstance(directions.noise, CounterNoise):
        return partial(CounterPerturber, directions.noise, buffer)
    return partial(DrawnPerturber, directions.noise, buffer)


def _visits(parts: _RunParts, segments: Segments) -> Visits:
    """The objects that all sweeps share which run the present or perturbed weights."""
    return Visits(
        layouts=parts.model.layouts,
        activations=segments.activations,
        make_room=segments.room_maker(parts.device),
        streams=parts.device.streams,
        timeline=parts.timeline,
        update_loss=parts.update_loss if parts.directions.factors is None else None,
    )


def _choose_state(
    run: Run, method: Method, trained: AdapterWeights | StoredWeights | None
) -> OpenedRun:
    """Choose the state that steps change and what takes them, and go on from what the run has
    kept.
    """
    if trained is None or isinstance(method, ZerothOrder):
        journal_state = JournalState(run)
        estimator = run.directions.estimator
        if estimator is None or not isinstance(method, ZerothOrder):
            return OpenedRun(run, journal_state, None)
        steps = ZerothOrderSteps(run, estimator, method.seed, journal_state)
        return OpenedRun(run, journal_state, steps)
    if isinstance(method, AtSnapshot):
        at_snapshot = TrainedState(run, trained, step=method.step)
        if method.parameters is not None:
            at_snapshot.load(method.parameters)
        return OpenedRun(run, at_snapshot, None)
    assert isinstance(run.model, DifferentiableModel), "other models were refused"
    if isinstance(trained, AdapterWeights):
        adapter = AdapterState(run, trained, method.factory)
        adapter_steps = AdapterSteps(run, run.model, method, adapter)
        adapter.resume()
        return OpenedRun(run, adapter, adapter_steps)
    # otherwise some workers would wait for weights that others never send
    run.workers.require_same("divide_states", int(method.divide_states))
    update = method.update_of(run.segments.layouts, run.workers)
    assert update is not None, "an adapter was trained otherwise"
    fused: StoredState | DiskState
    if isinstance(update, DividedStates):
        fused = DividedState(run, trained, method, update)
    elif run.segments.committed is None:
        fused = StoredState(run, trained, method, update)
    else:
        fused = DiskState(run, trained, method, update, run.segments.committed)
    fused_steps = FusedSteps(run, run.model, method, fused)
    fused.resume()
    return OpenedRun(run, fused, fused_steps)


def request_of(inputs: RunInputs, *, workers: int = 1) -> RunRequest:
    """What the plan of a run depends on, as far as first-order methods are concerned.

    Nothing is opened.
    """
    model, method = inputs.model, inputs.method
    request = RunRequest(
        layouts=model.layouts,
        on_disk=laid_out_as_on_disk(model.layouts, model.weights),
        memory=inputs.memory,
        write_back=inputs.options.write_back,
        replay=inputs.options.replay,
        overlap=inputs.options.overlap,
    )
    if isinstance(method, AtSnapshot):
        return replace(
            request, stays_in_memory=method.parameters is not None and _trains_all(model)
        )
    if isinstance(method, ZerothOrder):
        return request
    layouts = model.layouts
    update = method.update_of(layouts, inputs.options.workers)
    if update is None:
        copies_of_workers = 0 if workers == 1 else 1 + workers
        return replace(request, trained_copies=TRAINED_COPIES + copies_of_workers)
    gradients, optimizer = trained_bytes(update, layouts, workers=workers)
    request = replace(request, gradient_bytes=gradients, optimizer_bytes=optimizer)
    if inputs.options.commit_every is None:
        return replace(request, stays_in_memory=True)
    assert inputs.run is not None, "it is required for commits"
    request = replace(
        request, changing=1, write_back=WriteBackPolicy(directory=inputs.run, every=1)
    )
    if update.turn is not None:
        return request
    stored = [replace(layout, states=tuple(update.states(layout))) for layout in layouts]
    return replace(
        request,
        on_disk=laid_out_as_on_disk(stored, model.weights),
        changing=sum(not layout.resident for layout in layouts),
        # A first step makes the states of one segment before they are in its bucket.
        optimizer_bytes=max(sum(spec.nbytes for spec in layout.states) for layout in stored),
    )


def _trains_all(model: BlockModel) -> bool:
    """Whether no parameter is frozen."""
    return not any(spec.frozen for layout in model.layouts for spec in layout.parameters)


def _require_changing(model: BlockModel, directions: Directions, options: EngineOptions) -> None:
    """Refuse options of weights that change where no weight does, before anything is read."""
    frozen = [spec for layout in model.layouts for spec in layout.parameters if spec.frozen]
    if not isinstance(directions.perturbation, DensePerturbation):
        where = "beside the activations, where no weight changes"
    elif frozen:
        where = f"beside frozen weights such as {frozen[0].name}, which never change"
    else:
        return
    policy = options.write_back
    unused: dict[str, object] = {"replay": options.replay if options.replay == "host" else None}
    if policy is not None:
        unused["write_back.every"] = policy.every if isinstance(policy.every, int) else None
        unused["write_back.snapshot_every"] = policy.snapshot_every
    for option, value in unused.items():
        if value is not None:
            raise without_effect(option, value, f"no value {where}")


def _begin_journal(parts: _RunParts) -> None:
    """Begin or continue the journal of a run that was planned."""
    model = parts.model
    journal = parts.journal
    factors = parts.directions.factors
    journal.begin(_journal_header(parts))
    require_agreement(
        journal,
        parts.directions.noise,
        parts.division.all_layouts,
        parts.device.torch_device,
        parts.division.peers,
    )
    policy = parts.options.write_back
    if factors is not None and policy is not None:
        period_file = factors.keep_periods(
            Path(policy.directory), model.layouts, journal, policy.bytes_a_step
        )
        parts.opened.callback(period_file.close)


def _journal_header(parts: _RunParts) -> Mapping[str, Any]:
    """Return the journal's header, which identifies the run.

    A value of None matches any value of the journal.
    """
    model, perturbation = parts.model, parts.directions.perturbation
    provenance = parts.options.provenance
    header = {
        "base": model.weights.fingerprint,
        "parameters": digest(
            spec for layout in parts.division.all_layouts for spec in layout.parameters
        ),
        **_method_header(parts),
        "model": json_object("model.description", model.description),
        "provenance": None if provenance is None else json_object("provenance", provenance),
    }
    precision = parts.matmul_precision
    if precision != EXACT or recorded_precision(parts.journal.header) not in (None, EXACT):
        header[HEADER_KEY] = precision
    if not isinstance(perturbation, DensePerturbation):
        header["perturbation"] = dict(perturbation.options)
    return header


def _method_header(parts: _RunParts) -> Mapping[str, Any]:
    """The part of the header that says how steps are made."""
    method = parts.inputs.method
    noise = parts.directions.noise
    estimator = parts.directions.estimator
    if isinstance(method, FirstOrder):
        return {"method": json_object("method", method.journal_options)}
    drawn = None
    if isinstance(noise, SequentialNoise):
        drawn = drawing_fingerprint(parts.device.torch_device)
    seed = method.seed if isinstance(method, ZerothOrder) and estimator is not None else None
    recorded = None if estimator is None else estimator.options
    return {"noise": noise.name, DRAWN: drawn, "estimator": recorded, "seed": seed}


def _require_kind(journal: Journal, method: Method) -> None:
    """Refuse a journal of steps of the other kind."""
    is_replayable = not isinstance(method, FirstOrder)
    if journal.header is not None and journal.is_replayable is not is_replayable:
        kinds = {
            True: "zeroth-order steps, which are replayed",
            False: "first-order steps, which have snapshots",
        }
        raise JournalError(
            journal.name,
            found=f"a run of {kinds[journal.is_replayable]}",
            expected=f"a run of {kinds[is_replayable]}",
            remedy="name another journal, or resume the run with its own method",
        )


def require_whole_model(model: BlockModel) -> None:
    """Refuse a model with parameters outside its segments for steps, replays and exports."""
    if getattr(model, "forwards_only", False):
        raise OptionError(
            "model",
            found="a model whose experts are read when tokens are routed to them",
            expected="a model with all parameters in its segments, for steps, journals and exports",
            remedy="open it again",
        )


def _require_consistent(inputs: RunInputs) -> None:
    """Refuse options that would have no effect, and models that a method cannot train, before
    anything is opened.
    """
    model, method = inputs.model, inputs.method
    if isinstance(method, FirstOrder) and not isinstance(model, DifferentiableModel):
        raise OptionError(
            "model",
            found=f"a {type(model).__name__}, which has no `leaves`",
            expected="a DifferentiableModel",
            remedy="add this method to the model, or train by `ZerothOrder`",
        )
    if inputs.has_steps:
        require_whole_model(model)
    update = method.update if isinstance(method, FirstOrder) else None
    _require_effect(inputs, trains_all=update is not None)
    if not isinstance(method, FirstOrder):
        return
    if inputs.journal is not None and inputs.run is None:
        raise OptionError(
            "run",
            found="None, and a journal",
            expected="a directory for snapshots",
            remedy=f"pass run=..., with its {JOURNAL}",
        )
    if update is None:
        return
    require_widened_gradients(model, method, update)
    commit_every = inputs.options.commit_every
    if commit_every is not None:
        if inputs.run is None:
            expected = "a directory for the segments of commit_every"
            raise OptionError("run", "None", expected, "pass run=...")
        if method.divide_states:
            expected = "states in memory: those of commit_every are on each worker's own disk"
            raise without_effect("divide_states", "True", expected)
        require_committable(model, update, commit_every)


def _require_effect(inputs: RunInputs, *, trains_all: bool) -> None:
    """Refuse options that would have no effect beside others."""
    options = inputs.options
    with_method = f"none with {type(inputs.method).__name__}"
    at_snapshot = isinstance(inputs.method, AtSnapshot)
    beside_source = "none beside a source, which has a scratch file of its own"
    for option, value, is_refused, expected in (
        ("write_back", options.write_back, not isinstance(inputs.method, ZerothOrder), with_method),
        ("write_back", options.write_back, inputs.custom is not None, beside_source),
        ("commit_every", options.commit_every, not trains_all, with_method),
        ("run", inputs.run, at_snapshot, with_method),
        ("journal", inputs.journal, at_snapshot, with_method),
    ):
        if value is not None and is_refused:
            raise without_effect(option, value, expected)
    workers = 1 if options.workers is None else options.workers.size
    if workers > 1 and inputs.shared is not None:
        raise without_effect("workers", f"{workers} workers", "one process for a shared base")
    if workers > 1 and options.workers is not None and options.workers.split == BLOCKS:
        _require_divisible(inputs, trains_all=trains_all)


def _require_divisible(inputs: RunInputs, *, trains_all: bool) -> None:
    """Refuse to divide the blocks of a run that needs all of them in one process."""
    method = inputs.method
    is_low_rank = isinstance(method, ZerothOrder) and isinstance(
        method.perturbation, LowRankPerturbation
    )
    for is_refused, expected in (
        (inputs.custom is not None, "one process, with a source of the caller"),
        (trains_all, "an adapter, or zeroth-order steps: of all parameters, split rows"),
        (is_low_rank, "dense perturbations; those of low rank are split by directions or rows"),
    ):
        if is_refused:
            raise without_effect("split", BLOCKS, expected)
