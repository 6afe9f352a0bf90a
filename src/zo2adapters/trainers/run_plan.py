"""Plan of a run on the CPU: host memory by part, disk, bytes and seconds per step, from headers and quick probes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from zo2adapters.models.footprint import activation_bytes, expected_held_bytes, forward_bytes, least_activation_bytes
from zo2adapters.models.hf import Activations, HFBlockModel
from zo2adapters.models.peft_kinds.block_model import PeftBlockModel
from zo2adapters.tasks.generation import plan_generation
from zo2adapters.trainers.allocator import with_kept_memory
from zo2adapters.trainers.batch_shapes import BatchShape, RowShapes
from zo2adapters.trainers.optimization import Optimization
from zo2core import (
    BlockLayout,
    HostDevice,
    HostPlan,
    LowRankPerturbation,
    MemoryPolicy,
    NoiseGenerator,
    SequentialNoise,
    WriteBackPolicy,
)
from zo2core.kernels.encoding import decode
from zo2core.perturbation import kept_bytes_a_step
from zo2core.planning.host_budget import free_memory
from zo2core.planning.machine import Machine
from zo2core.planning.run_spec import RunRequest, plan
from zo2core.planning.speeds import MeasuredSpeeds, evaluation_seconds, replay_seconds
from zo2core.planning.write_interval import streamed_bytes, terabytes_written
from zo2core.protocols import CounterNoise
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.sources.slot_file import slot_bytes
from zo2core.types import aligned, flat_views, shown_bytes

_PROBED_PRODUCTS = 100_000_000_000  # most multiplications in a block's matrices per forward probe
_ROUNDS = 3  # least number of probes; the fastest counts, since other programs can slow one down tenfold
_PROBE_SECONDS, _MOST_ROUNDS = 1.0, 20  # seconds of all probes of a forward, unless so many take less

# Note: Updates. One thread replays, while a second one draws and perturbs for the first evaluation; both perturb for the
# second evaluation. On steps of OPT-125m and OPT-1.3B perturbing took this share of a replay in addition.
_PERTURBING_SHARE = 0.25

_NEGLIGIBLE_BYTES = 1e6  # that a run writes of its weights

# Share of the free memory that generation may take if it needs more; the other rows then wait.
_GENERATION_SHARE = 0.5


@dataclass(frozen=True)
class RunPlan:
    """Expected memory, disk use and time of a run."""

    host_plan: HostPlan
    model_bytes: int
    write_back_every: int | None  # steps between two writes of a block; None: no block is written back
    scratch_bytes: int  # size of the scratch file once all blocks are written back
    spilled_bytes: int = field(default=0, kw_only=True)  # size of the temporary file for inputs of blocks
    read_bytes: int  # bytes read per step
    written_bytes: float  # bytes written per step, on average over many steps
    forward_seconds: float  # seconds of a step's forward passes
    update_seconds: float  # seconds of a step's noise and arithmetic
    disk_seconds: float  # seconds of a step's reads and writes, which overlap the other two
    steps: int = 0  # steps of the run
    evaluations: int = 0  # evaluations of the run, each on all evaluation rows
    evaluation_seconds: float = 0.0  # seconds of one evaluation
    snapshot_bytes: int = 0  # size of a snapshot of what is trained and the optimizer; 0: nothing of the kind is written

    @property
    def seconds(self) -> float:
        """Expected seconds per step."""
        return max(self.forward_seconds + self.update_seconds, self.disk_seconds)

    @property
    def run_seconds(self) -> float:
        """Expected seconds of all steps and evaluations."""
        return self.steps * self.seconds + self.evaluations * self.evaluation_seconds

    def to_json(self) -> str:
        """The plan as JSON, with total bytes and seconds."""
        sums = {
            "nbytes": self.host_plan.nbytes,
            "seconds": self.seconds,
            "run_seconds": self.run_seconds,
            "terabytes_per_1000_steps": self.written(1000) / 1e12,
        }
        return json.dumps({**asdict(self), **sums})

    def written(self, steps: int) -> float:
        """Bytes that so many steps write. The first and the last step have a snapshot, however few steps there are."""
        return max(self.written_bytes * steps, self.snapshot_bytes * min(steps, 2))

    def disk_writes(self, runs: int = 1) -> str:
        """A line that says how much so many equal runs write."""
        written = runs * self.written(self.steps)
        writes = "negligible" if written < _NEGLIGIBLE_BYTES else f"{shown_bytes(written)} in all"
        if self.snapshot_bytes:
            writes = f"{writes}, in snapshots of {shown_bytes(self.snapshot_bytes)} each"
        if self.spilled_bytes:
            writes = f"{writes}, those of a temporary file of {shown_bytes(self.spilled_bytes)} included"
        return f"Disk writes: {writes}."

    def summary(self) -> list[str]:
        """Lines that say whether the run fits, how long it takes, and how much it writes."""
        each = f"{duration(self.seconds)} a step"
        return [
            f"Memory: {memory_words(self.host_plan)}.",
            f"Time: about {f'{duration(self.run_seconds)} in all, {each}' if self.steps else each}.",
            self.disk_writes(),
        ]

    def table(self) -> str:
        """The plan as a table."""
        buckets = self.host_plan.buckets
        blocks = "all in memory" if buckets is None else f"streamed from disk through {buckets} buckets"
        rows = [
            ("blocks", blocks),
            ("written back", "never" if self.write_back_every is None else f"every {self.write_back_every} steps"),
            ("scratch file, at most", shown_bytes(self.scratch_bytes)),
            *([("temporary file of inputs", shown_bytes(self.spilled_bytes))] if self.spilled_bytes else []),
            ("read per step", shown_bytes(self.read_bytes)),
            ("written per 1,000 steps", shown_bytes(self.written(1000))),
            ("forward passes", duration(self.forward_seconds)),
            ("noise and arithmetic", duration(self.update_seconds)),
            ("disk, overlapped", duration(self.disk_seconds)),
            ("expected per step", duration(self.seconds)),
        ]
        if self.snapshot_bytes:
            rows.insert(3, ("snapshot", shown_bytes(self.snapshot_bytes)))
        count = f"{self.steps} steps"
        if self.evaluations:
            rows.append(("expected per evaluation", duration(self.evaluation_seconds)))
            count = f"{count}, {self.evaluations} evaluations"
        if self.steps:
            rows.append(("expected in total", f"{duration(self.run_seconds)} ({count})"))
        lines = [f"{name:26s} {value}" for name, value in rows]
        return "\n".join(["host memory", self.host_plan.table(), "", *lines])


def memory_words(host: HostPlan) -> str:
    """What a plan takes of host memory, and where blocks are."""
    streamed = f"blocks are streamed from disk, {host.buckets} at a time"
    where = "all blocks stay in memory" if host.buckets is None else streamed
    return f"it fits, with {shown_bytes(host.nbytes)} of {shown_bytes(host.budget)}; {where}"


def duration(seconds: float) -> str:
    """Seconds as text with a suitable unit, to about one percent."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def plan_run(
    model: HFBlockModel,
    shapes: RowShapes,
    optimization: Optimization,
    *,
    memory: int | str = "auto",
    write_back: WriteBackPolicy,
    workers: int = 1,
    steps: int = 0,
    evaluations: int = 0,
) -> RunPlan:
    """Plan a run on the CPU. Nothing is loaded; the probes take a few seconds.

    Args:
        model: Model from ``open_checkpoint``.
        shapes: Shapes of the run's batches.
        optimization: How a step is taken. Low-rank factors are counted for a new run; each period adds as many.
        memory: Host memory the process may use in total.
        write_back: When segments are written to disk.
        workers: Number of workers on this host, which divide its free memory. Memory and time are those of one of them.
        steps: Steps of the run.
        evaluations: Evaluations of the run.

    Raises:
        MemoryBudgetError: if no plan fits.
        ScratchError: if the directory cannot be written.
        CheckpointError: if the checkpoint cannot be read.
    """
    perturbation, speeds = optimization.perturbation, MeasuredSpeeds(model.weights)
    generated = shapes.new_tokens
    activations = step_memory(model, shapes.longest, optimization, shapes.micro_rows, new_tokens=generated).nbytes
    noise = _noise(model, optimization)
    policy = MemoryPolicy(host=memory, activations=activations)
    request = replace(run_request(model, shapes, optimization, noise, policy), write_back=write_back)
    spec = plan(request, Machine(neighbours=workers), speeds)
    host_plan, layouts, every = with_kept_memory(spec.host_plan, activations), spec.layouts, spec.write_back_every
    read = streamed_bytes(layouts, host_plan.buckets) * (generated or 1)  # a sweep for each token
    read_seconds = read / speeds.reading(layouts) if read else 0.0
    model_bytes = sum(layout.nbytes for layout in layouts)
    if isinstance(perturbation, LowRankPerturbation):
        written = kept_bytes_a_step(perturbation, layouts, write_back.bytes_a_step)
        write_seconds, lag = 0.0, 0.0
    else:
        is_streamed = host_plan.buckets is not None and every is not None
        written = 1e9 * terabytes_written(layouts, every)
        write_seconds = written / speeds.writing(Path(write_back.directory)) if is_streamed and written else 0.0
        lag = (every + 1) / 2 if every is not None and is_streamed else 1.0
    replay = speeds.replay(noise, layouts, in_place=request.perturb_in_place) * optimization.queries * lag
    return RunPlan(
        host_plan=host_plan,
        model_bytes=model_bytes,
        write_back_every=every,
        scratch_bytes=0 if every is None else slot_bytes(layouts),
        read_bytes=read,
        written_bytes=written,
        forward_seconds=_step_forward_seconds(model, shapes.step, optimization, shapes.micro_rows, generated),
        update_seconds=(generated or 1)
        * _update_seconds(model, layouts, optimization, lag=lag, keeps_noise=host_plan.keep_noise),
        disk_seconds=read_seconds + write_seconds,
        steps=steps,
        evaluations=evaluations,
        evaluation_seconds=evaluation_pass_seconds(
            model, shapes, activations, replay + decoding_seconds(layouts), read_seconds
        )
        if evaluations
        else 0.0,
    )


def run_request(
    model: HFBlockModel, shapes: RowShapes, optimization: Optimization, noise: NoiseGenerator, memory: MemoryPolicy
) -> RunRequest:
    """The request of a run that has taken no steps, as its engine makes it from the same options.

    Args:
        model: The model.
        shapes: Shapes of the run's batches.
        optimization: How a step is taken.
        noise: Draws the directions.
        memory: Memory that the run may use.
    """
    has_direction_per_row = optimization.per_row and optimization.queries == 1
    return RunRequest(
        layouts=model.layouts,
        on_disk=laid_out_as_on_disk(model.layouts, model.weights),
        noise=noise,
        perturbation=optimization.perturbation,
        perturb_in_place=bool(optimization.estimator_of(1).perturb_in_place),
        directions=shapes.longest.rows if has_direction_per_row else optimization.queries,
        memory=memory,
    )


class StepMemory(NamedTuple):
    """Memory for the activations and logits of a step."""

    nbytes: int  # bytes to reserve
    least: int  # least bytes that a device needs


def step_memory(
    model: HFBlockModel,
    longest: BatchShape,
    optimization: Optimization,
    micro_rows: int | None,
    *,
    new_tokens: int | None = None,
) -> StepMemory:
    """Expected memory of a zeroth-order step.

    Args:
        model: The model.
        longest: Shape of the largest batch.
        optimization: How a step is taken.
        micro_rows: Rows that run at a time; None: all of a batch.
        new_tokens: Most tokens that are generated for each row, with the rows as prompts; None: losses are computed.
    """
    rows, tokens, stacked = longest.rows, round(longest.tokens), optimization.stacked
    streams, running = optimization.evaluations, (rows if micro_rows is None else min(rows, micro_rows)) * stacked
    loss_rows = optimization.loss_rows(rows)
    adapter = 0
    if isinstance(model, PeftBlockModel):
        adapter = model.adapter_bytes(running, -(-streams // stacked) * -(-rows * stacked // running))
    nbytes = adapter + activation_bytes(
        model.config,
        rows,
        tokens,
        streams=streams,
        micro_rows=micro_rows,
        loss_chunk=model.loss_chunk,
        stacked=stacked,
        loss_rows=loss_rows if optimization.per_row else None,
    )
    least = adapter + least_activation_bytes(model.config, running, tokens, loss_chunk=model.loss_chunk)
    if new_tokens is not None:
        shape = {"evaluations": streams, "rows": rows, "prompt_tokens": tokens, "new_tokens": new_tokens}
        needed, fewest = (plan_generation(model.config, **shape, allowed=most).nbytes for most in (None, 0))
        nbytes = adapter + min(needed, max(fewest, round(_GENERATION_SHARE * free_memory())))
        least = max(least, nbytes)  # keys and values stay on a device
    if optimization.rank is None:
        return StepMemory(nbytes, least)
    columns = max(  # bytes of one column of the factors of a segment's matrices, which are in memory twice
        sum(spec.shape[0] * spec.dtype.itemsize for spec in layout.used if len(spec.shape) == 2 and not spec.frozen)
        for layout in model.layouts
    )
    return StepMemory(nbytes + 2 * columns * optimization.rank * stacked * -(-rows // loss_rows), least)


def step_seconds(
    model: HFBlockModel,
    shape: BatchShape,
    optimization: Optimization,
    micro_rows: int | None = None,
    *,
    new_tokens: int | None = None,
) -> float:
    """Expected seconds of a step on the CPU with all blocks in memory. Nothing is loaded; the probes take a few seconds.

    Args:
        model: Model from ``open_checkpoint``.
        shape: Shape of a step's batch.
        optimization: How a step is taken.
        micro_rows: Rows that run at a time; None: all of a batch.
        new_tokens: Tokens that are generated for each row; None: losses are computed.
    """
    forwards = _step_forward_seconds(model, shape, optimization, micro_rows, new_tokens)
    updates = _update_seconds(model, model.layouts, optimization, lag=1.0, keeps_noise=True)
    return forwards + (new_tokens or 1) * updates


def _update_seconds(
    model: HFBlockModel, layouts: Sequence[BlockLayout], optimization: Optimization, *, lag: float, keeps_noise: bool
) -> float:
    """Seconds of a step's noise and arithmetic.

    Args:
        model: The model.
        layouts: The model's segments, with their layout in memory.
        optimization: How a step is taken.
        lag: Updates that a segment is behind when it is visited, on average.
        keeps_noise: Whether z stays in memory between evaluations.
    """
    generator = _noise(model, optimization)
    forwards, queries, perturbation = optimization.evaluations, optimization.queries, optimization.perturbation
    replay = replay_seconds(generator, layouts, in_place=not isinstance(generator, CounterNoise))
    if isinstance(perturbation, LowRankPerturbation):
        # Weights are only read. Factors are drawn for the evaluations and again for the update.
        return replay * _factor_share(layouts, perturbation.rank) * (forwards + queries) + decoding_seconds(layouts)
    if isinstance(generator, CounterNoise):
        first, other = evaluation_seconds(generator, layouts)
        return replay * (queries * lag - 1) + first + other * (forwards - 1)
    return replay * queries * (lag + (_PERTURBING_SHARE if keeps_noise else 1.0))


def _noise(model: HFBlockModel, optimization: Optimization) -> NoiseGenerator:
    """The generator of a run on the CPU."""
    return optimization.generator(model.layouts) or SequentialNoise(model.layouts)


def _step_forward_seconds(
    model: HFBlockModel,
    shape: BatchShape,
    optimization: Optimization,
    micro_rows: int | None,
    new_tokens: int | None = None,
) -> float:
    """Seconds of a step's forwards. Forwards that run as one batch read the weights once.

    Generation runs the prompts, and then one token of each row at a time.
    """
    stacked = optimization.stacked
    if new_tokens is not None:
        count = shape.rows * stacked
        prompts = measured_forward_seconds(model, BatchShape(count, shape.tokens, count), all_logits=False)
        newest = measured_forward_seconds(model, BatchShape(count, 1, count))
        return optimization.evaluations / stacked * (prompts + (new_tokens - 1) * newest)
    stack = BatchShape(shape.rows * stacked, shape.tokens, shape.predictions * stacked)
    running = None if micro_rows is None else micro_rows * stacked
    if optimization.per_row and optimization.rank is None:  # each direction runs on its rows alone
        running = optimization.loss_rows(shape.rows)
    return optimization.evaluations / stacked * measured_forward_seconds(model, stack, running=running)


def evaluation_pass_seconds(
    model: HFBlockModel, shapes: RowShapes, activations: int, sweep_seconds: float, read_seconds: float
) -> float:
    """Expected seconds of one evaluation. As many batches share a sweep as fit in the memory for activations.

    Args:
        model: The model.
        shapes: Shapes of the run's batches; without evaluation rows the result is 0.
        activations: Bytes reserved for activations.
        sweep_seconds: Seconds that a sweep computes beside its forwards.
        read_seconds: Seconds in which a sweep reads the blocks from disk.
    """
    if shapes.evaluation is None:
        return 0.0
    rows, tokens = shapes.evaluation.rows, math.ceil(shapes.evaluation.tokens)
    running = rows if shapes.micro_rows is None else min(rows, shapes.micro_rows)
    held = expected_held_bytes(model.config, running, tokens) * -(-rows // running)
    left = activations - forward_bytes(model.config, running, tokens, loss_chunk=model.loss_chunk)
    sweeps = -(-shapes.evaluation_batches // max(1, left // held))
    forward = measured_forward_seconds(model, shapes.evaluation, running=shapes.micro_rows)
    return max(shapes.evaluation_batches * forward + sweeps * sweep_seconds, sweeps * read_seconds)


def decoding_seconds(layouts: Sequence[BlockLayout]) -> float:
    """Seconds to decode all encoded matrices, measured on the largest one."""
    encoded = [spec for layout in layouts for spec in layout.parameters if spec.encoding is not None]
    if not encoded:
        return 0.0
    largest = max(encoded, key=lambda spec: spec.numel)
    stored, out = torch.zeros(largest.nbytes, dtype=torch.uint8), torch.empty(largest.numel, dtype=largest.dtype)
    best = math.inf
    for _ in range(_ROUNDS):  # the first one also touches the memory, as the first step of a run does
        began = time.perf_counter()
        decode(largest, stored, out)
        best = min(best, time.perf_counter() - began)
    return best / largest.numel * sum(spec.numel for spec in encoded)


def _factor_share(layouts: Sequence[BlockLayout], rank: int) -> float:
    """Random numbers of a low-rank direction as a share of those of a dense one."""
    specs = [spec for layout in layouts for spec in layout.parameters]
    numbers = sum(spec.shape[0] * rank if len(spec.shape) == 2 else spec.numel for spec in specs)
    return numbers / sum(spec.numel for spec in specs)


def bind_probe(model: HFBlockModel, block: int = 1) -> None:
    """Bind the modules of embedding, head and one block to memory, the block's filled with a constant.

    Args:
        model: The model.
        block: Index of the block's segment.
    """
    for index in (0, block, len(model.layouts) - 1):
        specs = [spec.in_forward() for spec in model.layouts[index].used]
        memory = HostDevice().host_memory(sum(aligned(spec.nbytes) for spec in specs))
        views = zip(specs, flat_views(specs, memory), strict=True)
        model.bind(
            index, {spec.name: (view.fill_(0.01) if index == block else view).view(spec.shape) for spec, view in views}
        )


def release_probe(model: HFBlockModel) -> None:
    """Free the memory that probes have bound, before an engine allocates its own.

    Args:
        model: The model, whose modules get parameters without memory.
    """
    for index in (0, 1, len(model.layouts) - 1):
        specs = [spec.in_forward() for spec in model.layouts[index].used]
        model.bind(index, {spec.name: torch.empty(1, dtype=spec.dtype).expand(spec.shape) for spec in specs})


def embedded_probe(model: HFBlockModel, shape: BatchShape, running: int | None) -> tuple[Activations, int]:
    """Bind the modules as ``bind_probe`` does, and embed a batch of this shape, or a part of it, for a block to run on.

    Args:
        model: The model.
        shape: Shape of the batch.
        running: Rows that run at a time; None: all.

    Returns:
        What the first block is given, and the number of tokens in it.
    """
    numel = sum(spec.numel for spec in model.layouts[1].parameters)
    bind_probe(model)
    rows, tokens = min(shape.rows, running or shape.rows), max(round(shape.tokens), 1)
    probed_rows = min(rows, max(_PROBED_PRODUCTS // (numel * tokens), 1))
    probed_tokens = min(tokens, max(_PROBED_PRODUCTS // (numel * probed_rows), 1))
    ids = torch.ones(probed_rows, probed_tokens, dtype=torch.long)
    return model.embed(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    ), probed_rows * probed_tokens


def fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    seconds: list[float] = []
    while len(seconds) < _ROUNDS or sum(seconds) < min(_PROBE_SECONDS, _MOST_ROUNDS * seconds[0]):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measured_forward_seconds(
    model: HFBlockModel, shape: BatchShape, *, running: int | None = None, all_logits: bool = True
) -> float:
    """Measure the seconds of one forward: a block of the model runs on a batch of this shape, or on a part of it.

    Args:
        model: The model, whose modules are bound to one block's memory, filled with a constant; an engine binds them anew.
        shape: Shape of the batch.
        running: Rows that run at a time; None: all.
        all_logits: Whether a model that does not compute logits in chunks computes those of all tokens.
    """
    numel = sum(spec.numel for spec in model.layouts[1].parameters)
    with torch.inference_mode():
        activations, probed = embedded_probe(model, shape, running)
        seconds = fastest(lambda: model.block(0, activations))
    head = model.layouts[-1]
    heads = sum(spec.numel for spec in (*head.parameters, *head.borrowed) if len(spec.shape) > 1)
    blocks = sum(spec.numel for layout in model.layouts if not layout.resident for spec in layout.parameters)
    positions = shape.rows * shape.tokens
    in_head = positions if model.loss_chunk is None and all_logits else shape.predictions
    return seconds / probed * (blocks * positions + heads * in_head) / numel
