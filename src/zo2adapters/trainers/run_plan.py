"""The plan of a run: memory by part, disk, bytes and seconds per step, from headers and quick
probes.
"""

from __future__ import annotations

import bisect
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.footprint import expected_held_bytes, forward_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers import probes
from zo2adapters.trainers.methods import (
    GradientRun,
    ZerothOrderRun,
    base_model,
    checked_method,
    interval,
    method_of,
)
from zo2adapters.trainers.options import RunOptions, TrainOptions, require_shareable
from zo2adapters.trainers.preparation import (
    FittingPlan,
    PreparedRun,
    divided,
    fitting_plan,
    prepare,
)
from zo2adapters.trainers.process import with_kept_memory
from zo2adapters.trainers.run_directory import (
    RunDirectory,
    require_branch,
    require_resumable,
)
from zo2adapters.trainers.run_inputs import (
    BatchShape,
    Division,
    RowlessInputs,
    RunInputs,
    RunStart,
)
from zo2adapters.trainers.run_tasks import RunTasks
from zo2core import DevicePlan, HostPlan, LowRankPerturbation, MemoryPolicy, ZO2Error
from zo2core.errors import MemoryBudgetError, OptionError, without_effect
from zo2core.estimators.factors import kept_bytes_a_step
from zo2core.estimators.perturbation import require_perturbation
from zo2core.kernels.low_bit import low_bit_layout
from zo2core.methods.stages import divided_blocks, stage_layouts
from zo2core.optimizers.registry import OPTIMIZERS
from zo2core.planning.memory import Machine, MemoryPart, RunRequest, plan
from zo2core.planning.speeds import (
    MeasuredSpeeds,
    evaluation_seconds,
    interval_within,
    read_bytes,
    replay_seconds,
    streamed_bytes,
    terabytes_written,
)
from zo2core.protocols import CounterNoise
from zo2core.ranges import MOST_RUNS, counted, parse_size, require_whole
from zo2core.sources.segment_store import laid_out_as_on_disk
from zo2core.sources.slot_file import slot_bytes
from zo2core.sweep.activations import IN_TRANSIT, streams_on_device
from zo2core.sweep.gradient_visitor import GRAPH_SHARE
from zo2core.types import shown_bytes, trained

# Note: Updates. One thread replays, while a second one draws and perturbs for the first evaluation;
# both perturb for the second evaluation. On steps of OPT-125m and OPT-1.3B perturbing took this
# share of a replay in addition.
_PERTURBING_SHARE = 0.25

_NEGLIGIBLE_BYTES = 1e6  # that a run writes of its weights
# bytes a second between host and GPU, in each direction at the same time; assumed, not measured
BUS = 25 * 10**9


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """What a step transfers between host and GPU.

    Its compute overlaps with this, and is not predicted.
    """

    blocks: int  # number of the model's blocks
    moved_bytes: int  # weights uploaded per step
    returned_bytes: int  # weights transferred back per step
    # activations offloaded to host memory, which are transferred each way at every segment
    waiting_bytes: int
    transfer_seconds: float


@dataclass(frozen=True, kw_only=True)
class Together:
    """What equal runs take that share their base."""

    runs: int
    most_runs: int  # largest number of runs that fit
    memory_a_run: int  # bytes that one run more takes
    seconds_a_run: float  # of compute that one run more adds to a step of all runs
    decoding_seconds: float  # that a step of all runs takes to decode blocks, once for all
    seconds_apart: float  # of a step of each, one run after the other
    # runs whose compute takes no longer than the reads; 0: compute is the limit from the first run
    # on
    free_runs: int


@dataclass(frozen=True)
class StagePlan:
    """What one of several workers takes that divide the blocks."""

    first_block: int  # from 1
    last_block: int
    nbytes: int  # of host memory
    buckets: int | None  # blocks in memory at a time; None: all of the stage


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Expected memory, disk use and time of a run, or of several that share their base."""

    host_plan: HostPlan
    device_plan: DevicePlan | None = None
    model_bytes: int = 0
    steps: int = 0  # steps of the run
    evaluations: int = 0  # evaluations of the run, each on all evaluation rows
    read_bytes: int  # bytes read per step
    # bytes written per step, on average over many steps; on a GPU the most that it may be
    written_bytes: float
    # steps between two writes of a block; None: no block is written back
    write_back_every: int | None = None
    scratch_bytes: int = 0  # size of the scratch file once all blocks are written back
    spilled_bytes: int = 0  # size of the temporary file for inputs of blocks
    # size of a snapshot of what is trained and the optimizer; 0: nothing of the kind is written
    snapshot_bytes: int = 0
    forward_seconds: float = 0.0  # seconds of a step's forward passes
    update_seconds: float = 0.0  # seconds of a step's noise and arithmetic
    disk_seconds: float = 0.0  # seconds of a step's reads and writes, which overlap the other two
    evaluation_seconds: float = 0.0  # seconds of one evaluation
    transfers: Transfers | None = None  # None: the run computes on the CPU
    together: Together | None = None  # None: one run alone
    division: Division | None = None  # None: batches are not divided because of memory
    stages: tuple[StagePlan, ...] = ()  # of workers that divide the blocks

    @property
    def seconds(self) -> float:
        """Expected seconds per step, of all runs together."""
        compute = self.forward_seconds + self.update_seconds
        if self.together is not None:
            compute = (
                self.together.decoding_seconds + self.together.runs * self.together.seconds_a_run
            )
        return max(compute, self.disk_seconds)

    @property
    def run_seconds(self) -> float:
        """Expected seconds of all steps and evaluations."""
        return self.steps * self.seconds + self._runs * self.evaluations * self.evaluation_seconds

    @property
    def _runs(self) -> int:
        return 1 if self.together is None else self.together.runs

    def to_json(self) -> str:
        """The plan as JSON, with total bytes and seconds."""
        values = {
            **asdict(self),
            "division": None if self.division is None else self.division._asdict(),
            "nbytes": self.host_plan.nbytes,
            "terabytes_per_1000_steps": self.written(1000) / 1e12,
        }
        values |= {"seconds": self.seconds, "run_seconds": self.run_seconds}
        if self.transfers is not None:
            values |= {name: None for name in values if name.endswith("seconds")}
        merged = {**values, **(values.pop("transfers") or {}), **(values.pop("together") or {})}
        return json.dumps(_with_null(merged))

    def written(self, steps: int) -> float:
        """Bytes that so many steps write.

        The first and the last step have a snapshot, however few steps there are.
        """
        return max(self.written_bytes * steps, self.snapshot_bytes * min(steps, 2))

    def disk_writes(self) -> str:
        """A line that says how much the runs write."""
        written = self._runs * self.written(self.steps)
        if self.transfers is not None:
            most = f"at most {shown_bytes(self.written(1000))} in 1,000 steps"
            return f"Disk writes: {most if written else 'negligible'}."
        writes = "negligible" if written < _NEGLIGIBLE_BYTES else f"{shown_bytes(written)} in all"
        if self.snapshot_bytes:
            writes = f"{writes}, in snapshots of {shown_bytes(self.snapshot_bytes)} each"
        if self.spilled_bytes:
            writes = (
                f"{writes}, those of a temporary file of {shown_bytes(self.spilled_bytes)} included"
            )
        return f"Disk writes: {writes}."

    def summary(self) -> list[str]:
        """Lines that say whether the run fits, how long it takes, and how much it writes."""
        host = self.host_plan
        device = self.device_plan
        each = f"{duration(self.seconds)} a step"
        streamed = f"blocks are streamed from disk, {host.buckets} at a time"
        where = "all blocks stay in memory" if host.buckets is None else streamed
        memory = (
            f"Memory: it fits, with {shown_bytes(host.nbytes)} of {shown_bytes(host.budget)}; "
            f"{where}."
        )
        if self.together is not None:
            memory = f"{memory} {self.together.most_runs} runs fit at most."
            each = f"{each} of all runs"
        lines = [memory]
        time = f"about {f'{duration(self.run_seconds)} in all, {each}' if self.steps else each}"
        if device is not None and self.transfers is not None:
            used = f"{shown_bytes(device.nbytes)} of {shown_bytes(device.budget)}"
            kept = f"{device.kept} of {self.transfers.blocks} blocks stay there"
            lines.append(f"GPU memory: it fits, with {used}; {kept}.")
            seconds = duration(self.transfers.transfer_seconds)
            time = f"compute is not predicted for a GPU; transfers alone take {seconds} a step"
        for number, stage in enumerate(self.stages, 1):
            blocks = f"blocks {stage.first_block} to {stage.last_block}"
            held = "all in memory" if stage.buckets is None else f"{stage.buckets} at a time"
            lines.append(f"Stage {number}: {blocks}, {held}; {shown_bytes(stage.nbytes)}.")
        if self.division is not None:
            lines.append(f"Batches: {self.division.notice()}.")
        return [*lines, f"Time: {time}.", self.disk_writes()]

    def table(self) -> str:
        """The plan as a table."""
        buckets = self.host_plan.buckets
        all_steps = counted(self.steps, "step")
        rows: list[tuple[str, object]] = [
            (
                "blocks",
                "all in memory"
                if buckets is None
                else f"streamed from disk through {buckets} buckets",
            ),
            ("read per step", shown_bytes(self.read_bytes)),
            ("written per 1,000 steps", shown_bytes(self.written(1000))),
        ]
        if self.transfers is not None and self.device_plan is not None:
            moved = self.transfers
            rows += [
                ("blocks kept on the device", f"{self.device_plan.kept} of {moved.blocks}"),
                ("uploaded per step", shown_bytes(moved.moved_bytes)),
                ("transferred back per step", shown_bytes(moved.returned_bytes)),
                (
                    "offloaded activations",
                    f"{shown_bytes(moved.waiting_bytes)}, transferred at every block",
                ),
                (
                    "transfers",
                    f"{duration(moved.transfer_seconds)}, at {shown_bytes(BUS)}/s each way "
                    "(assumed)",
                ),
                ("compute, overlapped", "not predicted"),
            ]
        else:
            rows += [
                (
                    "written back",
                    "never"
                    if self.write_back_every is None
                    else f"every {self.write_back_every} steps",
                ),
                ("scratch file, at most", shown_bytes(self.scratch_bytes)),
                (
                    "temporary file of inputs",
                    shown_bytes(self.spilled_bytes) if self.spilled_bytes else None,
                ),
                ("snapshot", shown_bytes(self.snapshot_bytes) if self.snapshot_bytes else None),
                ("forward passes", duration(self.forward_seconds)),
                ("noise and arithmetic", duration(self.update_seconds)),
                ("disk, overlapped", duration(self.disk_seconds)),
            ]
            if (runs := self.together) is not None:
                limit = (
                    f"the disk up to {runs.free_runs} runs, then compute"
                    if runs.free_runs
                    else "compute"
                )
                more = (
                    f"{shown_bytes(runs.memory_a_run)}, and {duration(runs.seconds_a_run)} of "
                    "compute a step"
                )
                rows += [
                    ("one run more takes", more),
                    ("runs that fit", runs.most_runs),
                    ("limited by", None if math.isnan(runs.seconds_a_run) else limit),
                ]
                rows.append(
                    ("one run after the other", f"{duration(runs.seconds_apart)} a step of all")
                )
            rows.append(("expected per step", duration(self.seconds)))
            if self.evaluations:
                rows.append(("expected per evaluation", duration(self.evaluation_seconds)))
                all_steps = f"{all_steps}, {counted(self.evaluations, 'evaluation')}"
            rows.append(
                (
                    "expected in total",
                    f"{duration(self.run_seconds)} ({all_steps})" if self.steps else None,
                )
            )
        device = [] if self.device_plan is None else ["", "device memory", self.device_plan.table()]
        lines = [f"{name:26s} {value}" for name, value in rows if value is not None]
        return "\n".join(["host memory", self.host_plan.table(), *device, "", *lines])


def _with_null(value: Any) -> Any:
    """A JSON value with null for what is not known."""
    if isinstance(value, dict):
        return {key: _with_null(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def duration(seconds: float) -> str:
    """Seconds as text with a suitable unit, to about one percent; ? where they are not known."""
    if math.isnan(seconds):
        return "? s"
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def plan_run(
    fitting: FittingPlan,
    *,
    runs: int | None = None,
    stages: int | None = None,
    measures_snapshots: bool = True,
) -> RunPlan:
    """What a run takes on the CPU or on a GPU, which need not be in this machine, or several equal
    runs of one base.

    Nothing is loaded; probes take a few seconds.

    Args:
        fitting: The run, and the plan of its memory.
        runs: Number of equal runs; None: one run alone.
        stages: Number of workers that divide the blocks; None: the run is not divided.
        measures_snapshots: Whether the disk is measured, which snapshots are written to: without
            it, what they write is not known.
    """
    method = fitting.method
    if isinstance(method, ZerothOrderRun):
        require_perturbation(
            fitting.request.perturbation, fitting.model, method.estimator, fitting.request.noise
        )
    options = fitting.options
    if options.storage.device != "cpu":
        return _device_plan(fitting)
    planned = (
        _first_order_plan(fitting, method, measures_snapshots=measures_snapshots)
        if isinstance(method, GradientRun)
        else _zeroth_order_plan(fitting)
    )
    nbytes = sum(layout.nbytes for layout in fitting.spec.layouts)
    evaluations = options.evaluations_from(0)
    planned = replace(planned, model_bytes=nbytes, steps=options.steps, evaluations=evaluations)
    if not evaluations:
        planned = replace(planned, evaluation_seconds=0.0)
    if stages is not None:
        planned = replace(planned, stages=_stage_plans(fitting, stages))
    return planned if runs is None else _plan_together(fitting, planned, runs)


def _zeroth_order_plan(fitting: FittingPlan) -> RunPlan:
    """The plan of zeroth-order steps on the CPU."""
    request = fitting.request
    speeds = fitting.speeds
    layouts = fitting.spec.layouts
    every = fitting.spec.write_back_every
    # a sweep for each token
    write_back = request.write_back
    generated = fitting.options.rewards.new_tokens or 1
    assert write_back is not None, "a run on the CPU may write blocks back"
    host_plan = with_kept_memory(fitting.spec.host_plan, request.memory.activation_bytes)
    read = streamed_bytes(layouts, host_plan.buckets) * generated
    write_seconds = 0.0
    lag = 0.0
    if isinstance(request.perturbation, LowRankPerturbation):
        written = kept_bytes_a_step(request.perturbation, layouts, write_back.bytes_a_step)
    else:
        written = 1e9 * terabytes_written(layouts, every)
        lag = 1.0
        if host_plan.buckets is not None and every is not None:
            lag = (every + 1) / 2
            write_seconds = written / speeds.writing(Path(write_back.directory)) if written else 0.0
    replay = speeds.replay(request.noise, layouts, in_place=request.perturb_in_place)
    beside = replay * fitting.options.optimization.queries * lag + probes.decoding_seconds(layouts)
    return RunPlan(
        host_plan=host_plan,
        write_back_every=every,
        scratch_bytes=0 if every is None else slot_bytes(layouts),
        read_bytes=read,
        written_bytes=written,
        forward_seconds=_forward_seconds(fitting) + fitting.reading_cost(read),
        update_seconds=generated * _update_seconds(fitting, lag),
        disk_seconds=fitting.read_seconds(read) + write_seconds,
        evaluation_seconds=_evaluation_seconds(fitting, beside, fitting.read_seconds(read)),
    )


def _first_order_plan(
    fitting: FittingPlan, method: GradientRun, *, measures_snapshots: bool
) -> RunPlan:
    """The plan of first-order steps on the CPU; memory that is left over is filled with inputs and
    graphs of blocks.
    """
    model = fitting.model
    layouts = fitting.spec.layouts
    blocks = sum(not layout.resident for layout in layouts)
    host_plan, kept, spilled = _with_graphs(fitting, method)
    sweeps = 2 if method.measures_gradients else 1
    passes = probes.measured_gradient_seconds(
        model, fitting.shapes.step, fitting.options.batching.micro_batch_size
    )
    # blocks whose graph is not kept run forward again
    forward = sweeps * (passes.both + passes.forward * (1 - kept / blocks))
    read, evaluated = _streamed_by(method, fitting, host_plan.buckets)
    read_seconds = fitting.read_seconds(read)
    forward += fitting.reading_cost(read)
    spill = sweeps * spilled  # bytes of inputs that have no room
    spill_seconds = fitting.read_seconds(spill)
    if spill:
        spill_seconds += spill / fitting.speeds.writing(fitting.options.output)
    decoding = probes.decoding_seconds(layouts)
    arithmetic = 2 * decoding
    if method.update is not None:
        arithmetic = probes.measured_update_seconds(model, method.update)
    scratch = 0
    snapshot = 0
    written = math.nan
    if method.streams:
        scratch = slot_bytes(layouts, blocks if method.turn is None else 1)
        written = method.written(model, host_plan.buckets)
    else:
        snapshot = method.snapshot_size(model)
        if measures_snapshots:
            # the reads' where compute is not known
            seconds = max(read_seconds, forward + arithmetic)
            written = _snapshots_a_step(fitting, snapshot, seconds)
    return RunPlan(
        host_plan=host_plan,
        scratch_bytes=scratch,
        spilled_bytes=spilled,
        read_bytes=read + spill,
        written_bytes=written + spill,
        snapshot_bytes=snapshot,
        forward_seconds=forward,
        update_seconds=arithmetic,
        disk_seconds=read_seconds + spill_seconds,
        evaluation_seconds=_evaluation_seconds(fitting, decoding, fitting.read_seconds(evaluated)),
    )


class _Graphs(NamedTuple):
    """Memory of a first-order run with what fills it."""

    host_plan: HostPlan
    kept: int  # blocks whose graph is kept
    spilled: int  # bytes of inputs of blocks that have no room


def _with_graphs(fitting: FittingPlan, method: GradientRun) -> _Graphs:
    """Fill memory that is left over with inputs and graphs of blocks."""
    spec = fitting.spec
    blocks = sum(not layout.resident for layout in spec.layouts)
    graph, expected = _graph_bytes(fitting.model, method.micro_batches(fitting.shapes.largest))
    unplaced = fitting.memory.nbytes - spec.activation_bytes
    inputs = min(spec.host_plan.spare, unplaced)
    kept = _kept_graphs(spec.host_plan.spare - inputs, graph, blocks)
    parts = [MemoryPart("inputs of blocks", inputs)] if inputs else []
    parts.append(MemoryPart(f"graphs of {kept} of {blocks} blocks", kept * expected))
    host_plan = replace(spec.host_plan, parts=(*spec.host_plan.parts, *parts))
    return _Graphs(host_plan, kept, unplaced - inputs)


class _Streamed(NamedTuple):
    """Bytes that are read from disk."""

    step: int
    evaluation: int


def _streamed_by(method: GradientRun, fitting: FittingPlan, buckets: int | None) -> _Streamed:
    """What steps and evaluations of a first-order run read through so many buckets."""
    layouts = fitting.spec.layouts
    measures = method.measures_gradients
    if buckets is not None and method.turn is None and method.commit_every is not None:
        step = read_bytes(layouts, buckets, method.commit_every, measures=measures)
        return _Streamed(step, streamed_bytes(fitting.model.layouts, buckets))
    if buckets is not None and method.turn is not None:
        buckets -= 1  # that of the block whose turn it is
    evaluation = streamed_bytes(layouts, buckets)
    return _Streamed((4 if measures else 2) * evaluation, evaluation)


def _snapshots_a_step(fitting: FittingPlan, snapshot: int, seconds: float) -> float:
    """Bytes of snapshots that a step of so many seconds writes on average."""
    limit = fitting.options.storage.write_limit_tb
    writing = snapshot / fitting.speeds.writing(fitting.options.output)
    written = snapshot * seconds / interval(writing + snapshot / probes.hashing_speed())
    return written if limit is None else min(written, 1e9 * limit)


def _device_plan(fitting: FittingPlan) -> RunPlan:
    """The plan of zeroth-order steps on a GPU."""
    device_plan = fitting.spec.device_plan
    low_bit = fitting.spec.low_bit
    layouts = fitting.spec.layouts
    assert device_plan is not None, "a device with memory of its own has a plan"
    blocks = [layout for layout in layouts if not layout.resident]
    uploads = sum(
        (layout if low_bit is None else low_bit_layout(layout)).nbytes for layout in blocks
    )
    moved = uploads * (len(blocks) - device_plan.kept) // max(len(blocks), 1)
    limit, perturbation = fitting.options.storage.write_limit_tb, fitting.request.perturbation
    returned = 0
    written = kept_bytes_a_step(perturbation, layouts, None if limit is None else limit * 1e9)
    if not isinstance(perturbation, LowRankPerturbation):  # otherwise weights are only read
        returned = moved if low_bit in (None, "device") else 0
        written = 1e9 * terabytes_written(
            layouts, 1 if limit is None else interval_within(layouts, limit)
        )
    waiting = _waiting_bytes(fitting, device_plan.activation_bytes)
    return RunPlan(
        host_plan=fitting.spec.host_plan,
        device_plan=device_plan,
        steps=fitting.options.steps,
        read_bytes=streamed_bytes(layouts, fitting.spec.host_plan.buckets, kept=device_plan.kept),
        written_bytes=written,
        transfers=Transfers(
            blocks=len(blocks),
            moved_bytes=moved,
            returned_bytes=returned,
            waiting_bytes=waiting,
            transfer_seconds=(max(moved, returned) + (len(blocks) + 1) * waiting) / BUS,
        ),
    )


def _stage_plans(fitting: FittingPlan, count: int) -> tuple[StagePlan, ...]:
    """The memory of each of so many workers that divide the blocks."""
    request = fitting.request
    if isinstance(request.perturbation, LowRankPerturbation) or request.gradient_bytes:
        raise without_effect("stages", count, "an adapter, or dense zeroth-order steps")
    adapter = sum(spec.nbytes for spec in trained(request.layouts))
    plans = []
    for blocks in divided_blocks(request.layouts, count):
        layouts = stage_layouts(request.layouts, blocks)
        elsewhere = adapter - sum(spec.nbytes for spec in trained(layouts))
        kept = request.trained_copies * elsewhere
        of_stage = replace(
            request,
            layouts=layouts,
            on_disk=stage_layouts(request.on_disk, blocks),
            further=[*request.further, MemoryPart("trained by other stages", kept)],
        )
        host = plan(of_stage, Machine(), fitting.speeds).host_plan
        plans.append(StagePlan(blocks.start, blocks.stop - 1, host.nbytes, host.buckets))
    return tuple(plans)


def _plan_together(fitting: FittingPlan, run: RunPlan, runs: int) -> RunPlan:
    """The plan of equal runs on the CPU that share their base."""
    options = fitting.options
    request = fitting.request
    base = base_model(fitting.options)
    least = request.with_least_activations(in_place=True).memory.activation_bytes
    has_gradient = options.optimization.optimizer is not None
    graph = 0
    if has_gradient:
        step = fitting.shapes.step
        micro_batches = [(step.rows, math.ceil(step.tokens))]
        graph, _ = _graph_bytes(fitting.model, micro_batches)
    speeds = MeasuredSpeeds(base.weights)
    on_disk = laid_out_as_on_disk(base.layouts, base.weights)
    blocks = sum(not layout.resident for layout in base.layouts)

    def planned(count: int) -> HostPlan:
        asked = RunRequest.of_base(
            base.layouts, on_disk, MemoryPolicy(host=options.storage.memory), [request] * count
        )
        host_plan = plan(asked, Machine(), speeds).host_plan
        if not graph:
            return host_plan
        kept = _kept_graphs(host_plan.spare / count, graph, blocks)
        # One run at a time computes, so that graphs have the others' room for computing.
        beyond = max(count * kept * graph - (count - 1) * least, 0)
        graphs = MemoryPart(
            f"graphs of {kept} of {blocks} blocks of each run, beyond what is reserved", beyond
        )
        return replace(host_plan, parts=(*host_plan.parts, graphs))

    most = _most(planned)
    try:
        host_plan = planned(runs)
    except MemoryBudgetError as error:
        found = f"{error.found} for {runs} runs, of which {most} fit"
        raise MemoryBudgetError("runs", found, error.expected, error.remedy) from error
    passes = 2 if has_gradient else 1
    layouts = base.layouts if host_plan.buckets is None else on_disk
    read = passes * streamed_bytes(layouts, host_plan.buckets)
    disk = read / speeds.reading(layouts) if read else 0.0
    decoding = passes * probes.decoding_seconds(base.layouts)
    own = max(run.forward_seconds + run.update_seconds - decoding, 0.0)
    free_runs = 0
    if own == 0.0:
        free_runs = MOST_RUNS
    elif not math.isnan(own):
        free_runs = min(MOST_RUNS, int(max(disk - decoding, 0.0) / own))
    together = Together(
        runs=runs,
        most_runs=most,
        memory_a_run=request.memory.activation_bytes + request.factor_bytes + request.trained_bytes,
        seconds_a_run=own,
        decoding_seconds=decoding,
        seconds_apart=runs * run.seconds,
        free_runs=free_runs,
    )
    return replace(run, host_plan=host_plan, read_bytes=read, disk_seconds=disk, together=together)


def _update_seconds(fitting: FittingPlan, lag: float) -> float:
    """Seconds of a step's noise and arithmetic."""
    noise = fitting.request.noise
    layouts = fitting.spec.layouts
    optimization = fitting.options.optimization
    forwards = optimization.evaluations
    queries = optimization.queries
    rank = optimization.rank
    replay = replay_seconds(noise, layouts, in_place=not isinstance(noise, CounterNoise))
    if rank is not None:
        # weights are only read; factors are drawn for the evaluations and again for the update
        specs = [spec for layout in layouts for spec in layout.parameters]
        numbers = sum(
            spec.shape[0] * rank if len(spec.shape) == 2 else spec.numel for spec in specs
        )
        share = numbers / sum(spec.numel for spec in specs)
        return replay * share * (forwards + queries) + probes.decoding_seconds(layouts)
    if isinstance(noise, CounterNoise):
        first, other = evaluation_seconds(noise, layouts)
        return replay * (queries * lag - 1) + first + other * (forwards - 1)
    return (
        replay * queries * (lag + (_PERTURBING_SHARE if fitting.spec.host_plan.keep_noise else 1.0))
    )


def _forward_seconds(fitting: FittingPlan) -> float:
    """Seconds of a step's forwards. Forwards that run as one batch read the weights once.

    Generation runs the prompts, and then one token of each row at a time.
    """
    options = fitting.options
    model = fitting.model
    shape = fitting.shapes.step
    optimization, micro_rows = options.optimization, options.batching.micro_batch_size
    stacked, new_tokens = optimization.stacked, options.rewards.new_tokens
    if new_tokens is not None:
        count = shape.rows * stacked
        seconds = probes.measured_forward_seconds(
            model, BatchShape(count, shape.tokens, count), all_logits=False
        )
        seconds += (new_tokens - 1) * probes.measured_forward_seconds(
            model, BatchShape(count, 1, count)
        )
    else:
        stack = shape._replace(rows=shape.rows * stacked, predictions=shape.predictions * stacked)
        running = None if micro_rows is None else micro_rows * stacked
        if optimization.per_row and optimization.rank is None:
            # each direction runs on its rows alone
            running = optimization.loss_rows(shape.rows)
        seconds = probes.measured_forward_seconds(model, stack, running=running)
    return optimization.evaluations / stacked * seconds


def _evaluation_seconds(fitting: FittingPlan, sweep_seconds: float, read_seconds: float) -> float:
    """Expected seconds of one evaluation.

    As many batches share a sweep as fit in the memory for activations.
    """
    model = fitting.model
    shape = fitting.shapes.evaluation
    batches = fitting.shapes.evaluation_batches
    if shape is None:
        return 0.0
    tokens = math.ceil(shape.tokens)
    running = min(shape.rows, fitting.options.batching.micro_batch_size or shape.rows)
    held = expected_held_bytes(model.config, running, tokens) * -(-shape.rows // running)
    left = fitting.request.memory.activation_bytes
    left -= forward_bytes(
        model.config,
        running,
        tokens,
        loss_chunk=model.loss_chunk,
        measured=model.forward_peaks,
    )
    sweeps = -(-batches // max(1, left // held))
    forward = probes.measured_forward_seconds(
        model, shape, running=fitting.options.batching.micro_batch_size
    )
    return max(batches * forward + sweeps * sweep_seconds, sweeps * read_seconds)


def _waiting_bytes(fitting: FittingPlan, activation_bytes: int) -> int:
    """Bytes of activations between two segments that do not fit in device memory."""
    config = fitting.model.config
    optimization = fitting.options.optimization
    largest = fitting.shapes.largest
    stacked = optimization.stacked
    [(rows, tokens)] = largest.micro_batches(None)
    running = min(rows, fitting.options.batching.micro_batch_size or rows)
    held = expected_held_bytes(config, running * stacked, tokens)  # activations of one stream
    streams = -(-optimization.evaluations // stacked) * -(-rows // running)
    left = activation_bytes - forward_bytes(
        config, running * stacked, tokens, loss_chunk=fitting.model.loss_chunk, loss_rows=running
    )
    return held * (streams - streams_on_device(streams, held, left, staging=IN_TRANSIT * held))


def _graph_bytes(model: HFBlockModel, micro_batches: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """What a block's graphs keep for a batch, at most and as expected. Where that is not known, no
    graph is expected to fit.
    """
    peaks = model.pass_peaks
    if peaks is None or peaks.both is None:
        return sys.maxsize, 0
    return peaks.both.of_graphs(micro_batches)


def _kept_graphs(spare: float, graph: int, blocks: int) -> int:
    """The number of blocks whose graphs are kept in memory that is spare."""
    return min(int(GRAPH_SHARE * max(spare, 0)) // max(graph, 1), blocks)


def _most(planned: Callable[[int], object]) -> int:
    """The largest number of runs for which a plan fits."""

    def is_too_many(runs: int) -> bool:
        try:
            planned(runs)
        except MemoryBudgetError:
            return True
        return False

    return bisect.bisect_right(range(1, MOST_RUNS + 1), 0, key=is_too_many)


def plan_of(inputs: RunInputs) -> RunPlan:
    """The plan of a run from its rows. See ``plan_run``."""
    method = method_of(RunStart(inputs.options))
    return plan_run(fitting_plan(method, inputs.model, inputs.shapes()))


def require_plannable(options: TrainOptions, runs: int | None, stages: int | None) -> None:
    """Refuse a run, equal runs, or stages of a run for which there is no plan."""
    has_gradient = options.optimization.optimizer is not None
    if options.storage.device != "cpu":
        device_memory = options.storage.device_memory
        if stages is not None:
            raise without_effect("stages", stages, "--device cpu: stages are planned there")
        if has_gradient or runs is not None:
            expected = (
                "none with first-order steps or --runs, which are planned on the CPU: it has no "
                "effect otherwise"
            )
            raise OptionError("device_memory", device_memory, expected, "leave it out")
        parse_size(device_memory, option="device_memory")
    if runs is not None:
        require_whole("runs", runs, 1, MOST_RUNS)
        require_shareable(options)


def plan_of_options(
    options: TrainOptions,
    *,
    has_rows: bool,
    resume: Path | None = None,
    from_step: int | None = None,
    runs: int | None = None,
    stages: int | None = None,
) -> RunPlan:
    """The plan of a run that is not to begin. Refused is what the run refuses.

    Args:
        options: Options of the run.
        has_rows: Whether they name rows; else rows are as long as they may be.
        resume: Directory of the run to continue, or to branch from.
        from_step: Step to branch from; None: the run is continued.
        runs: Number of equal runs that share their base; None: one run alone.
        stages: Number of workers that divide the blocks; None: the run is not divided.
    """
    start = RunStart(options, resumes=resume is not None)
    checked_method(start)
    continues = resume is not None and from_step is None
    if resume is not None:
        with RunDirectory(resume).journal() as journal:
            if from_step is None:
                require_resumable(options, journal)
            else:
                require_branch(options, journal, from_step)
    require_plannable(options, runs, stages)
    inputs: RunInputs | RowlessInputs
    if has_rows:
        inputs, fitting = _prepared_as_a_run(start, continues=continues)
    else:
        options.require_rows(None)
        directory = resolve_directory(options.model)
        inputs, fitting = divided(RowlessInputs(options, options.opened(directory)))
    with closing(inputs.model.weights):
        plan = plan_run(fitting, runs=runs, stages=stages)
    return replace(plan, division=inputs.division)


def _prepared_as_a_run(start: RunStart, *, continues: bool) -> tuple[RunInputs, FittingPlan]:
    """Read what a run reads, and refuse what it refuses. A branch has its parent's division."""
    inputs, method, _, fitting = prepare(start, digests=continues)
    RunTasks.of(inputs).task.close()
    if continues:
        RunDirectory(start.options.output).record_of(inputs)
    if fitting is None:  # on a GPU
        fitting = fitting_plan(method, inputs.model, inputs.shapes())
    return inputs, fitting


def planned(prepared: PreparedRun) -> RunPlan | None:
    """The time and memory of a run, whose model must not have an open engine; None if there is no
    plan.
    """
    if prepared.fitting is None:
        return None
    try:
        return plan_run(prepared.fitting, measures_snapshots=False)
    except ZO2Error:
        return None
    finally:
        probes.release_probe(prepared.inputs.model)


def told_line(
    options: TrainOptions, model: HFBlockModel, plan: RunPlan, *, trial_steps: int = 0
) -> str:
    """A line about a run: method, steps and time, memory and what it writes. See ``first_line``."""
    method = method_of(RunStart(options))
    memory = method.storage(model, plan.host_plan, None, plan.write_back_every)
    return f"{first_line(options, plan, trial_steps=trial_steps)} {memory}"


def first_line(options: RunOptions, plan: RunPlan, *, trial_steps: int = 0) -> str:
    """Method, steps and time of a run, with those of the trials that choose its learning rate if
    they are given.
    """
    evaluations = f", {counted(plan.evaluations, 'evaluation')}" if plan.evaluations else ""
    if not trial_steps:
        return f"{method_words(options)}{evaluations}, about {duration(plan.run_seconds)}."
    total = duration(plan.run_seconds + trial_steps * plan.seconds)
    trials = f"and {counted(trial_steps, 'step')} to choose the learning rate"
    return f"{method_words(options)}{evaluations}, {trials}: about {total} in all."


def method_words(options: RunOptions) -> str:
    """The method, what it trains, and its steps."""
    model, method = options.model_options, options.optimization.optimizer
    trained = model.adapter_name or "all parameters"
    if model.adapter:
        trained = f"the adapter {trained}"
    steps = (
        f"Zeroth-order steps train {trained}"
        if method is None
        else f"{OPTIMIZERS[method].title} trains {trained}"
    )
    return (
        f"{steps}: {counted(options.steps, 'step')} of "
        f"{counted(options.batching.batch_size, 'row')}"
    )
