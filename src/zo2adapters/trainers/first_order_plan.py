"""Plan of a run of first-order steps: memory, reads and seconds, from headers and quick probes."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape, RowShapes
from zo2adapters.trainers.methods.first_order_run import adapter_bytes, reserved_bytes
from zo2adapters.trainers.methods.full_run import snapshot_bytes
from zo2adapters.trainers.methods.snapshot_policy import interval
from zo2adapters.trainers.methods.streamed_full_run import written_bytes
from zo2adapters.trainers.run_plan import (
    RunPlan,
    bind_probe,
    decoding_seconds,
    embedded_probe,
    evaluation_pass_seconds,
    fastest,
    measured_forward_seconds,
)
from zo2core import BlockLayout, BlockUpdate, FirstOrder, HostPlan, MemoryPolicy, SegmentKind
from zo2core.build import RunOptions, request_of
from zo2core.methods.states import read_bytes
from zo2core.optimizers import StateMemory
from zo2core.planning.machine import Machine
from zo2core.planning.memory_plan import MemoryPart
from zo2core.planning.run_spec import RunRequest, RunSpec, plan
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.planning.write_interval import streamed_bytes
from zo2core.protocols import UpdateInputs
from zo2core.sources.slot_file import slot_bytes
from zo2core.sweep.activation_offload import flattened
from zo2core.sweep.block_graph import BlockGraph
from zo2core.sweep.gradient_visitor import tensor_ids
from zo2core.types import widened

_PROBED_ROWS = 1024  # and columns of a matrix
_PROBE_ROUNDS = 4  # of which the best counts
_HASHED = 1 << 25  # bytes
_PROBED_TOKENS = 64  # most tokens of the probed row; a graph grows in proportion to tokens


def plan_first_order_run(
    model: HFBlockModel,
    shapes: RowShapes,
    *,
    memory: int | str = "auto",
    steps: int = 0,
    evaluations: int = 0,
    update: BlockUpdate | None = None,
    scratch: Path = Path(),
    streams: bool = False,
    commit_every: int = 1,
    measures: bool = False,
    write_limit_tb: float | None = None,
) -> RunPlan:
    """Plan a run on the CPU that trains by gradients. Nothing is loaded; the probes take a few seconds.

    Args:
        model: Model from ``open_checkpoint``, with an adapter unless all parameters are trained.
        shapes: Shapes of the run's batches.
        memory: Host memory the process may use in total.
        steps: Steps of the run.
        evaluations: Evaluations of the run.
        update: The optimizer of all parameters; None: an adapter is trained.
        scratch: Directory on the disk that snapshots are written to, and inputs of blocks that have no room in memory.
        streams: Whether blocks stream from disk and change there.
        commit_every: Steps between two commits of such blocks, unless the optimizer has turns.
        measures: Whether each step sweeps twice, first to measure all gradients.
        write_limit_tb: Terabytes that snapshots may write in 1,000 steps; None: no limit. Streamed blocks have none: a run
            that would write more of them is refused.

    Raises:
        MemoryBudgetError: if no plan fits.
        ScratchError: if the directory cannot be written.
        CheckpointError: if the checkpoint cannot be read.
    """
    request = _request(model, shapes, memory, update, streams=streams)
    activations, speeds = request.memory.activation_bytes, MeasuredSpeeds(model.weights)
    spec = plan(request, Machine(), speeds)
    layouts = spec.layouts
    room = _room(model, shapes, spec, activations)
    forward = measured_forward_seconds(model, shapes.step, running=shapes.micro_rows)
    sweeps = 2 if measures else 1
    times = sweeps * (measured_backward(model, shapes.step, shapes.micro_rows) + 1 - room.graphs)
    spilled = sweeps * room.spilled
    moving = room.host_plan.buckets
    if moving is not None and update is not None and update.turn is not None:
        moving -= 1  # that of the block whose turn it is
    read, evaluated = sweeps * 2 * streamed_bytes(layouts, moving), streamed_bytes(layouts, moving)
    if moving is not None and update is not None and update.turn is None:
        read, evaluated = read_bytes(layouts, moving, commit_every, measures=measures), streamed_bytes(model.layouts, moving)
    read_seconds = read / speeds.reading(layouts) if read else 0.0
    spill_seconds = spilled / speeds.reading(layouts) + spilled / speeds.writing(scratch) if spilled else 0.0
    decoding = decoding_seconds(layouts)
    arithmetic = 2 * decoding if update is None else measured_update_seconds(model, update)
    evaluation = 0.0
    if evaluations:
        seconds = evaluated / speeds.reading(layouts) if evaluated else 0.0
        evaluation = evaluation_pass_seconds(model, shapes, activations, decoding, seconds)
    scratch_file, snapshot = 0, 0
    if update is not None and streams:
        slots = 1 if update.turn is not None else sum(not layout.resident for layout in layouts)
        scratch_file = slot_bytes(layouts, slots)
        written = written_bytes(layouts, update, room.host_plan.buckets or 0, commit_every)
    else:
        snapshot = adapter_bytes(model) if update is None else snapshot_bytes(model, update)
        step_seconds = max(times * forward + arithmetic, read_seconds)
        written = snapshot * step_seconds / interval(snapshot / speeds.writing(scratch) + snapshot / hashing_speed())
        written = written if write_limit_tb is None else min(written, 1e9 * write_limit_tb)
    return RunPlan(
        host_plan=room.host_plan,
        model_bytes=sum(layout.nbytes for layout in layouts),
        write_back_every=None,
        scratch_bytes=scratch_file,
        spilled_bytes=room.spilled,
        read_bytes=read + spilled,
        written_bytes=written + spilled,
        snapshot_bytes=snapshot,
        forward_seconds=times * forward,
        update_seconds=arithmetic,
        disk_seconds=read_seconds + spill_seconds,
        steps=steps,
        evaluations=evaluations,
        evaluation_seconds=evaluation,
    )


def _request(
    model: HFBlockModel, shapes: RowShapes, memory: int | str, update: BlockUpdate | None, *, streams: bool
) -> RunRequest:
    """The request of a run, as its engine makes it from the same options."""
    longest = shapes.longest
    activations, least = reserved_bytes(model, longest.rows, round(longest.tokens), shapes.micro_rows, update)
    policy = MemoryPolicy(host=memory, activations=activations, least_activations=least)
    options = RunOptions(memory=policy, run=Path(), commit_every=1 if streams else None)
    return request_of(model, FirstOrder(update, lr=0.0), options)


class _Room(NamedTuple):
    """The memory that a plan leaves over, filled with inputs and graphs of blocks."""

    host_plan: HostPlan
    spilled: int  # bytes of inputs that have no room
    graphs: float  # share of the blocks whose graphs are kept


def _room(model: HFBlockModel, shapes: RowShapes, spec: RunSpec, activations: int) -> _Room:
    """Fill the memory that a plan leaves over: first with inputs of blocks, then with graphs.

    Args:
        model: The model.
        shapes: Shapes of the run's batches.
        spec: The plan.
        activations: Bytes of activations with the inputs of all blocks in memory.
    """
    host_plan, blocks = spec.host_plan, sum(not layout.resident for layout in spec.layouts)
    graph = measured_graph_bytes(model, shapes.longest)
    inputs = min(host_plan.spare, activations - spec.activation_bytes)
    kept = min((host_plan.spare - inputs) // max(graph, 1), blocks)
    parts = [MemoryPart("inputs of blocks", inputs)] if inputs else []
    parts.append(MemoryPart(f"graphs of {kept} of {blocks} blocks", kept * graph))
    host_plan = replace(host_plan, parts=(*host_plan.parts, *parts))
    return _Room(host_plan, activations - spec.activation_bytes - inputs, kept / blocks)


def hands_over_tensors(model: HFBlockModel) -> bool:
    """Whether a block hands tensors to later blocks beside its output, so that its gradient would be lost.

    Every block runs once on a row of two tokens.

    Args:
        model: The model; an engine binds its modules anew.
    """
    ids = torch.ones(1, 2, dtype=torch.long)
    bind_probe(model)
    with torch.no_grad():
        activations = model.embed({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
        for index in range(1, len(model.layouts) - 1):
            bind_probe(model, index)
            given, nesting = flattened(activations)
            before = [tensor_ids(value) for value in given]
            activations = model.block(index - 1, activations)
            if flattened(activations)[1] != nesting or before != [tensor_ids(value) for value in given]:
                return True
    return False


def measured_backward(model: HFBlockModel, shape: BatchShape, running: int | None) -> float:
    """Measure a block's forward with its backward, as a multiple of its forward alone.

    Args:
        model: The model; an engine binds its modules anew.
        shape: Shape of the batch.
        running: Rows that run at a time; None: all.
    """
    trained = {spec.name for layout in model.layouts for spec in layout.parameters if not spec.frozen}
    with torch.no_grad():
        activations, _ = embedded_probe(model, shape, running)
        forward = fastest(lambda: model.block(0, activations))
    hidden = activations.hidden.detach().requires_grad_()
    wanted = [hidden, *(leaf.requires_grad_() for name, leaf in model.leaves(1).items() if name in trained)]

    def both() -> None:
        with torch.enable_grad():
            output = model.block(0, activations._replace(hidden=hidden)).hidden
            torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)

    return fastest(both) / forward


def measured_graph_bytes(model: HFBlockModel, shape: BatchShape) -> int:
    """Measure what a block's graph keeps for a batch of this shape, from one row of a few tokens.

    Args:
        model: The model; an engine binds its modules anew.
        shape: Shape of the batch.
    """
    bind_probe(model)
    tokens = min(math.ceil(shape.tokens), _PROBED_TOKENS)
    ids = torch.ones(1, tokens, dtype=torch.long)
    with torch.no_grad():
        activations = model.embed({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    hidden = activations.hidden.detach().requires_grad_()
    weights = dict(model.leaves(1))
    graph = BlockGraph(weights, [hidden])
    with torch.enable_grad(), graph.recorded(keep=True):
        model.block(0, activations._replace(hidden=hidden))
    return graph.memory(shape.rows * shape.tokens / tokens)


def measured_update_seconds(model: HFBlockModel, update: BlockUpdate) -> float:
    """Measure what an optimizer takes for a step of all segments, on one matrix in the dtype of the weights.

    Args:
        model: The model.
        update: The optimizer.
    """
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    weight = torch.zeros(_PROBED_ROWS, _PROBED_ROWS, dtype=specs[0].dtype)
    gradient = widened(weight) if update.widens_gradients else weight
    probe = replace(specs[0], name="probe", shape=tuple(weight.shape))
    states = StateMemory(update, [BlockLayout("probe", SegmentKind.BLOCK, (probe,))]).of(0, ())
    seconds = math.inf
    for step in range(_PROBE_ROUNDS):
        started = time.perf_counter()
        update.apply(UpdateInputs(0, {"probe": weight}, {"probe": gradient}, states, step, 0.0))
        seconds = min(seconds, time.perf_counter() - started)
    segments = [index for index, layout in enumerate(model.layouts) if layout.parameters]
    share = len(update.segments(0, segments)) / len(segments)
    return seconds * share * sum(spec.numel for spec in specs) / weight.numel()


def hashing_speed() -> float:
    """Measure in how many bytes a second snapshots are checksummed."""
    content = bytes(_HASHED)
    started = time.perf_counter()
    hashlib.sha256(content).digest()
    return _HASHED / (time.perf_counter() - started)
