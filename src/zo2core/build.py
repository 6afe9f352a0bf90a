"""Building a run: it is planned, and the parts of the plan are opened.

Parts that a caller passes stay the caller's. Parts that are opened here are put on an ``ExitStack``
at once, so that a refused run leaves nothing open, and an engine closes exactly these parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from zo2core.errors import JournalError, OptionError, without_effect
from zo2core.estimators.factors import FactorStore
from zo2core.estimators.noise import PhiloxNoise, SequentialNoise, choose_noise, numbers_drawn
from zo2core.estimators.perturbation import (
    DensePerturbation,
    LowRankPerturbation,
    choose_perturbation,
    require_perturbation,
)
from zo2core.estimators.two_point import direction_seeds, require_distribution
from zo2core.estimators.wrappers import with_perturb_in_place
from zo2core.journal.journal import Journal
from zo2core.journal.records import DRAWN, digest, json_object
from zo2core.kernels.programs import seeds_of
from zo2core.methods.first_order import (
    TRAINED_COPIES,
    AtSnapshot,
    FirstOrder,
    require_trainable,
    steps_of,
    trained_bytes,
)
from zo2core.methods.zeroth_order import ZerothOrder, ZerothOrderSteps
from zo2core.planning.memory import Machine, RunRequest, RunSpec, plan, require_drawable
from zo2core.planning.speeds import MeasuredSpeeds, WriteBackPolicy
from zo2core.profiling import Timeline, Trace, TraceRecorder
from zo2core.protocols import BlockModel, BlockSource, CounterNoise, DifferentiableModel, Scheduler
from zo2core.runner import Runner, RunOptions, Steps, Trained, TrainedSteps
from zo2core.schedulers.devices import choose_device
from zo2core.schedulers.overlapped import open_scheduler, spread
from zo2core.shared import SharedBase
from zo2core.sources import SegmentStore
from zo2core.sources.low_bit import LowBitScheduler, LowBitSource
from zo2core.sources.segment_store import BaseDigests, laid_out_as_on_disk
from zo2core.sources.slot_file import Generations, Scratch
from zo2core.sweep.activations import StreamActivations
from zo2core.sweep.gradient_visitor import StoredParameters, TrainedParameters
from zo2core.sweep.microbatch import require_rows
from zo2core.sweep.perturbers import WorkBuffer
from zo2core.sweep.visitor import HostReplay, UpdateLoss, Visits, sole_use
from zo2core.types import Distribution
from zo2core.workers.agreement import require_agreement, sync_journals
from zo2core.workers.workers import Workers

Method: TypeAlias = ZerothOrder | FirstOrder | AtSnapshot

JOURNAL = "journal.jsonl"  # name of the journal in the directory of a run


def build(model: BlockModel, method: Method, options: RunOptions) -> tuple[Runner, Steps]:
    """Plan a run, open the parts of the plan, and go on from what the run has kept."""
    _require_consistent(model, method, options)
    with ExitStack() as opened:
        opened.enter_context(sole_use(model))
        if options.source is not None:
            opened.enter_context(sole_use(options.source))
        else:
            # closed last: the other parts may read until they are closed
            opened.callback(model.weights.close)
        runner = Runner(model, options, opened)
        _open_journal(runner, method)
        _choose_directions(runner, method)
        if options.source is not None:
            _place_given(runner, method, options.source)
        elif options.shared is not None:
            _place_shared(runner, method, options.shared)
        else:
            _place_planned(runner, method)
        runner.work_buffer = WorkBuffer(
            model.layouts,
            runner.device,
            runner.noise,
            keep_noise=runner.device.in_place
            and (runner.spec is None or runner.spec.host_plan.keep_noise),
            perturbs_in_place=runner.perturb_in_place,
            allocate=None if options.shared is None else options.shared.work_memory,
        )
        runner.trained = _trained(runner, method)
        if runner.device.torch_device.type == "cpu":
            runner.helper = opened.enter_context(
                ThreadPoolExecutor(1, thread_name_prefix="zo2-perturb")
            )
        runner.visits = Visits(
            layouts=model.layouts,
            perturber=runner.perturber,
            activations=runner.activations,
            streams=runner.device.streams,
            timeline=runner.recorder.timeline,
            update_loss=runner.update_loss if runner.factors is None else None,
        )
        runner.work_buffer.bind(model.bind)
        opened.callback(runner.recorder.flush)
        steps = _steps(runner, method)
        runner.opened = opened.pop_all()
        return runner, steps


def request_of(
    model: BlockModel, method: Method, options: RunOptions, *, workers: int = 1
) -> RunRequest:
    """What the plan of a run depends on, as far as first-order methods are concerned.

    Nothing is opened.
    """
    request = RunRequest(
        layouts=model.layouts,
        on_disk=laid_out_as_on_disk(model.layouts, model.weights),
        memory=options.memory,
        write_back=options.write_back,
        replay=options.replay,
        overlap=options.overlap,
    )
    if isinstance(method, AtSnapshot):
        return replace(
            request, stays_in_memory=method.parameters is not None and _trains_all(model)
        )
    if isinstance(method, ZerothOrder):
        return request
    update, layouts = method.update, model.layouts
    if update is None:
        return replace(
            request, trained_copies=TRAINED_COPIES + (0 if workers == 1 else 1 + workers)
        )
    gradients, optimizer = trained_bytes(update, layouts)
    request = replace(request, gradient_bytes=gradients, optimizer_bytes=optimizer)
    if options.commit_every is None:
        return replace(request, stays_in_memory=True)
    assert options.run is not None, "it is required for commits"
    request = replace(
        request, changing=1, write_back=WriteBackPolicy(directory=options.run, every=1)
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


def _open_journal(runner: Runner, method: Method) -> None:
    """Open trace, journal and device, and synchronise the journal with the other workers."""
    opened, options = runner.opened, runner.options
    require_rows(options.micro_batch_size)
    trace = options.trace
    if trace is not None and not isinstance(trace, Trace):
        trace = opened.enter_context(closing(Trace(Path(trace))))
    runner.recorder = TraceRecorder(
        Timeline() if options.timeline is None else options.timeline, trace
    )
    takes_steps = isinstance(method, ZerothOrder) and method.estimator is not None
    runner.is_kept = options.run is not None if isinstance(method, FirstOrder) else takes_steps
    path = (
        options.journal
        if options.journal is not None or options.run is None
        else Path(options.run) / JOURNAL
    )
    journal = runner.journal = (
        path if isinstance(path, Journal) else opened.enter_context(closing(Journal(path)))
    )
    if runner.is_kept:  # a run that only replays may do so while another process trains
        opened.push(journal.withdraw_if_refused)
        journal.lock()
    _require_kind(journal, method)
    runner.workers = Workers() if options.workers is None else options.workers
    if runner.is_kept:
        sync_journals(journal, runner.workers)
    elif path is not None:
        journal.require_run()
    device = options.device if options.shared is None else options.shared.device
    runner.device = choose_device(device)
    if isinstance(device, str):
        opened.callback(runner.device.close)


def _choose_directions(runner: Runner, method: Method) -> None:
    """Choose estimator, perturbation and noise."""
    model, journal, device = runner.model, runner.journal, runner.device.torch_device
    zeroth = method if isinstance(method, ZerothOrder) else ZerothOrder(None)
    perturbation, noise, estimator = (
        choose_perturbation(zeroth.perturbation, journal),
        zeroth.noise,
        zeroth.estimator,
    )
    if estimator is not None:
        estimator = with_perturb_in_place(
            estimator, default=isinstance(perturbation, DensePerturbation)
        )
    if noise is None and journal.noise is None:
        if estimator is None or isinstance(perturbation, LowRankPerturbation):
            # also if nothing is drawn: it fits all other options
            noise = PhiloxNoise(Distribution.GAUSSIAN)
        elif estimator.distribution is not None:
            noise = PhiloxNoise(estimator.distribution)
    if noise is None:
        noise = choose_noise(journal.noise, model.layouts, device)
    runner.estimator, runner.perturbation, runner.noise = estimator, perturbation, noise
    _require_changing(runner)
    require_perturbation(perturbation, model, estimator, noise)
    if isinstance(perturbation, LowRankPerturbation):
        assert isinstance(noise, CounterNoise), "other noise was refused"
        recorded = None if journal.header is None else journal.header.get("seed")
        seed = recorded if estimator is None and isinstance(recorded, int) else zeroth.seed
        runner.factors = FactorStore(perturbation, noise.distribution, seed, device)
    if estimator is not None:
        require_distribution(estimator, noise)
    runner.update_loss = UpdateLoss(noise)


def _require_changing(runner: Runner) -> None:
    """Refuse options of weights that change where no weight does, before anything is read."""
    options = runner.options
    frozen = [spec for layout in runner.model.layouts for spec in layout.parameters if spec.frozen]
    if not isinstance(runner.perturbation, DensePerturbation):
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


def _begin(runner: Runner, method: Method) -> None:
    """Begin or continue the journal of a run that was planned."""
    policy = runner.options.write_back
    runner.journal.begin(_header(runner, method))
    require_agreement(
        runner.journal,
        runner.noise,
        runner.model.layouts,
        runner.device.torch_device,
        runner.workers,
    )
    if runner.factors is not None and policy is not None:
        directory, layouts = Path(policy.directory), runner.model.layouts
        runner.opened.callback(
            runner.factors.keep_periods(
                directory, layouts, runner.journal, policy.bytes_a_step
            ).close
        )


def _request(runner: Runner, method: Method) -> RunRequest:
    """What the plan of a run depends on."""
    estimator, updates = runner.estimator, runner.journal.updates
    directions = {len(seeds_of(update)) for update in updates} | {1}  # past and future
    if estimator is not None:
        evaluations = estimator.evaluations(0, direction_seeds(0, 0, None))
        directions.add(len({evaluation.seed for evaluation in evaluations}))
    return replace(
        request_of(runner.model, method, runner.options, workers=runner.workers.size),
        noise=runner.noise,
        perturbation=runner.perturbation,
        perturb_in_place=runner.perturb_in_place,
        takes_steps=estimator is not None,
        directions=max(directions),
        updates=len(updates),
    )


def _place_planned(runner: Runner, method: Method) -> None:
    """Plan a run on this machine, whose free memory the workers of a host divide, and open the
    parts of the plan.
    """
    device, model, journal, opened, options = (
        runner.device,
        runner.model,
        runner.journal,
        runner.opened,
        runner.options,
    )
    request, timeline = _request(runner, method), runner.recorder.timeline
    spec = runner.spec = plan(
        request, Machine.of(device, runner.workers.neighbours), MeasuredSpeeds(model.weights)
    )
    own_noise = isinstance(method, ZerothOrder) and method.noise is not None
    if not own_noise and not isinstance(runner.noise, CounterNoise):
        # The same noise, whose generators may be kept in memory that the plan leaves over.
        spare = max(spec.host_plan.spare, 0)
        runner.noise = choose_noise(journal.noise, model.layouts, device.torch_device, memory=spare)
    _begin(runner, method)
    scratch: Scratch | Generations | None = None
    if request.changing:
        assert options.run is not None, "it is required for commits"
        scratch = runner.generations = Generations(
            Path(options.run),
            spec.layouts,
            journal.chain,
            journal.require_version,
            spare=request.changing,
        )
    elif spec.write_back is not None:
        scratch = Scratch(
            Path(spec.write_back.directory), spec.layouts, journal.chain, journal.require_version
        )
    if scratch is not None:
        opened.callback(scratch.close)
    runner.base_digests = BaseDigests(journal.base_digests, learns=runner.is_kept)
    runner.source = SegmentStore(
        model.weights,
        spec.layouts,
        device.host_memory,
        buckets=spec.host_plan.buckets,
        scratch=scratch,
        write_back_every=spec.write_back_every,
        base_digests=runner.base_digests,
        timeline=timeline,
    )
    opened.callback(runner.source.close)
    runner.scheduler = _scheduler(spec, runner, runner.source)
    allowed = None if options.memory.least_activations is None else spec.activation_bytes
    runner.activations = StreamActivations(device, allowed, spec.waiting_bytes, timeline=timeline)
    runner.activation_bytes = spec.activation_bytes
    spare = spec.spare_bytes(in_place=device.in_place)
    runner.spare_bytes = lambda: spare


def _place_given(runner: Runner, method: Method, source: BlockSource) -> None:
    """Use a source that the caller passed."""
    expected = [
        (layout.kind, layout.parameters, layout.borrowed) for layout in runner.model.layouts
    ]
    found = [(layout.kind, layout.parameters, layout.borrowed) for layout in source.layouts]
    if found != expected:
        raise OptionError(
            "source",
            found=f"{len(found)} segments that are not all the model's",
            expected=f"the {len(expected)} segments of the model",
            remedy="build the source from model.layouts and model.weights",
        )
    if not isinstance(method, ZerothOrder) or runner.factors is not None:
        kind = "a run whose weights are not replayed where they are stored"
        raise without_effect(
            "source", kind, "ZerothOrder with dense perturbations, for a source of the caller"
        )
    require_drawable(runner.model.layouts, runner.noise)
    _begin(runner, method)
    timeline, options = runner.recorder.timeline, runner.options
    scheduler = options.scheduler
    if scheduler is None:
        scheduler = open_scheduler(source, runner.device, timeline, overlap=options.overlap)
    runner.opened.callback(scheduler.release_all)  # the source stays open
    runner.source, runner.scheduler, runner.base_digests = (
        source,
        scheduler,
        BaseDigests({}, learns=False),
    )
    runner.activations = StreamActivations(runner.device, None, timeline=timeline)
    runner.activation_bytes, runner.spare_bytes = options.memory.activation_bytes, lambda: 0


def _place_shared(runner: Runner, method: Method, base: SharedBase) -> None:
    """Join the runs of a base."""
    timeline = runner.recorder.timeline
    runner.base_digests = BaseDigests(runner.journal.base_digests, learns=runner.is_kept)
    joined = base.join(runner.model, _request(runner, method), timeline, runner.base_digests)
    runner.opened.callback(joined.leave)
    _begin(runner, method)
    runner.scheduler = joined
    runner.activations = StreamActivations(runner.device, None, timeline=timeline)
    runner.activation_bytes, runner.spare_bytes = joined.activation_bytes, base.spare_bytes


def _scheduler(spec: RunSpec, runner: Runner, source: BlockSource) -> Scheduler:
    """Make the scheduler of the plan; if blocks are transferred in fewer bits, the host prepares
    them.
    """
    timeline, device, overlap = runner.recorder.timeline, runner.device, runner.options.overlap
    open_plain = partial(
        open_scheduler, device=device, timeline=timeline, overlap=overlap, kept=spec.kept
    )
    if spec.low_bit is None:
        return open_plain(source)
    assert isinstance(runner.noise, CounterNoise), "other noise was refused"
    host = HostReplay(spec.layouts, runner.noise, runner.journal.updates, runner.update_loss)
    runner.opened.callback(host.close)
    low_bit = LowBitSource(
        source,
        spread(
            [index for index, layout in enumerate(spec.layouts) if not layout.resident], spec.kept
        ),
        device.host_memory,
        host.replay,
        comes_back=spec.low_bit == "device",
        timeline=timeline,
    )
    runner.opened.callback(low_bit.close)
    return LowBitScheduler(open_plain(low_bit, across_sweeps=False), low_bit)


def _trained(runner: Runner, method: Method) -> Trained | None:
    """What first-order steps train: all parameters where they are stored, or an adapter's in
    memory.
    """
    if isinstance(method, ZerothOrder):
        return None
    if (method.update is not None) if isinstance(method, FirstOrder) else _trains_all(runner.model):
        return StoredParameters(runner.work_buffer, runner.layouts)
    model = runner.model
    return TrainedParameters(
        runner.work_buffer, model.layouts, model.weights, runner.device.torch_device
    )


def _steps(runner: Runner, method: Method) -> Steps:
    """Choose the kind of steps, and go on from what a run has kept."""
    if isinstance(method, ZerothOrder):
        return (
            Steps(runner)
            if runner.estimator is None
            else ZerothOrderSteps(runner, runner.estimator, method.seed)
        )
    if isinstance(method, AtSnapshot):
        at_snapshot = TrainedSteps(runner)
        at_snapshot.version = method.step
        if method.parameters is not None:
            at_snapshot.load(method.parameters)
        return at_snapshot
    return steps_of(runner, method)


def _header(runner: Runner, method: Method) -> Mapping[str, Any]:
    """Return the journal's header, which identifies the run.

    A value of None matches any value of the journal.
    """
    model, noise, estimator, provenance = (
        runner.model,
        runner.noise,
        runner.estimator,
        runner.options.provenance,
    )
    steps: Mapping[str, Any]
    if isinstance(method, FirstOrder):
        steps = {"method": json_object("method", method.journal_options)}
    else:
        drawn = (
            numbers_drawn(runner.device.torch_device)
            if isinstance(noise, SequentialNoise)
            else None
        )
        seed = method.seed if isinstance(method, ZerothOrder) and estimator is not None else None
        recorded = None if estimator is None else estimator.options
        steps = {"noise": noise.name, DRAWN: drawn, "estimator": recorded, "seed": seed}
    perturbation = runner.perturbation
    return {
        "base": model.weights.fingerprint,
        "parameters": digest(spec for layout in model.layouts for spec in layout.parameters),
        **steps,
        "model": json_object("model.description", model.description),
        "provenance": None if provenance is None else json_object("provenance", provenance),
        **(
            {}
            if isinstance(perturbation, DensePerturbation)
            else {"perturbation": dict(perturbation.options)}
        ),
    }


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


def _require_consistent(model: BlockModel, method: Method, options: RunOptions) -> None:
    """Refuse options that would have no effect, and models that a method cannot train, before
    anything is opened.
    """
    first = method if isinstance(method, FirstOrder) else None
    update = None if first is None else first.update
    if first is not None and not isinstance(model, DifferentiableModel):
        raise OptionError(
            "model",
            found=f"a {type(model).__name__}, which has no `leaves`",
            expected="a DifferentiableModel",
            remedy="add this method to the model, or use ZerothOrder",
        )
    if (
        first is not None
        or options.journal is not None
        or (isinstance(method, ZerothOrder) and method.estimator is not None)
    ):
        require_whole_model(model)
    with_method, workers = (
        f"none with {type(method).__name__}",
        1 if options.workers is None else options.workers.size,
    )
    beside_source = "none beside a source, which has a scratch file of its own"
    for option, is_refused, expected in (
        ("write_back", not isinstance(method, ZerothOrder), with_method),
        ("write_back", options.source is not None, beside_source),
        ("shared", options.source is not None, beside_source),
        ("scheduler", options.source is None, "a source beside it"),
        ("commit_every", update is None, with_method),
        ("run", isinstance(method, AtSnapshot), with_method),
        ("journal", isinstance(method, AtSnapshot), with_method),
        ("workers", workers > 1 and options.shared is not None, "one process for a shared base"),
        (
            "workers",
            workers > 1 and update is not None,
            "one process, where all parameters are trained",
        ),
    ):
        value = getattr(options, option)
        if value is not None and is_refused:
            raise without_effect(
                option, f"{workers} workers" if option == "workers" else value, expected
            )
    if first is not None and options.journal is not None and options.run is None:
        raise OptionError(
            "run",
            "None, and a journal",
            "a directory for snapshots",
            f"pass run=..., with its {JOURNAL}",
        )
    if first is not None and update is not None:
        require_trainable(model, first, update, options)
