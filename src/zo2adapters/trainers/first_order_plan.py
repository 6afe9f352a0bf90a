"""Plan of a run of first-order steps: memory, reads and seconds, from headers and quick probes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape, RowShapes
from zo2adapters.trainers.first_order_run import FORWARDS, reserved_bytes
from zo2adapters.trainers.run_plan import (
    RunPlan,
    bind_probe,
    decoding_seconds,
    evaluation_pass_seconds,
    measured_forward_seconds,
)
from zo2core import Machine, MemoryPolicy, PhiloxNoise, RunRequest, plan
from zo2core.engine.backprop_engine import TRAINED_COPIES
from zo2core.planning.memory_plan import MemoryPart
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.planning.write_interval import streamed_bytes
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.sweep.block_graph import BlockGraph

_PROBED_TOKENS = 64  # most tokens of the probed row; a graph grows in proportion to tokens


def plan_first_order_run(
    model: HFBlockModel,
    shapes: RowShapes,
    *,
    memory: int | str = "auto",
    scratch: Path,
    steps: int = 0,
    evaluations: int = 0,
) -> RunPlan:
    """Plan a run on the CPU that trains an adapter by gradients. Nothing is loaded; the probes take a few seconds.

    Args:
        model: Model from ``open_checkpoint``, with an adapter.
        shapes: Shapes of the run's batches.
        memory: Host memory the process may use in total.
        scratch: A directory on the disk to which inputs of blocks are written that have no room in memory.
        steps: Steps of the run.
        evaluations: Evaluations of the run.

    Raises:
        MemoryBudgetError: if no plan fits.
        ScratchError: if the directory cannot be written.
        CheckpointError: if the checkpoint cannot be read.
    """
    longest, on_disk = shapes.longest, laid_out_as_on_disk(model.layouts, model.weights)
    activations, least = reserved_bytes(model, longest.rows, round(longest.tokens), shapes.micro_rows)
    request = RunRequest(
        layouts=model.layouts,
        on_disk=on_disk,
        noise=PhiloxNoise(),  # none is drawn
        perturb_in_place=False,
        takes_steps=False,
        memory=MemoryPolicy(host=memory, activations=activations, least_activations=least),
        trained_copies=TRAINED_COPIES,
    )
    speeds = MeasuredSpeeds(model.weights)
    spec = plan(request, Machine(), speeds)
    layouts, host_plan = spec.layouts, spec.host_plan
    forward = measured_forward_seconds(model, shapes.step, running=shapes.micro_rows)
    blocks = sum(not layout.resident for layout in layouts)
    graph = measured_graph_bytes(model, longest)
    inputs = min(host_plan.spare, activations - spec.activation_bytes)
    spilled = activations - spec.activation_bytes - inputs
    kept = min((host_plan.spare - inputs) // max(graph, 1), blocks)
    if inputs:
        host_plan = replace(host_plan, parts=(*host_plan.parts, MemoryPart("inputs of blocks", inputs)))
    host_plan = replace(
        host_plan, parts=(*host_plan.parts, MemoryPart(f"graphs of {kept} of {blocks} blocks", kept * graph))
    )
    read = 2 * streamed_bytes(layouts, host_plan.buckets)
    read_seconds = read / speeds.reading(layouts) if read else 0.0
    spill_seconds = spilled / speeds.reading(layouts) + spilled / speeds.writing(scratch) if spilled else 0.0
    decoding = decoding_seconds(layouts)
    evaluation = evaluation_pass_seconds(model, shapes, activations, decoding, read_seconds / 2) if evaluations else 0.0
    return RunPlan(
        host_plan=host_plan,
        model_bytes=sum(layout.nbytes for layout in layouts),
        write_back_every=None,
        scratch_bytes=0,
        spilled_bytes=spilled,
        read_bytes=read + spilled,
        written_bytes=spilled,
        terabytes_per_1000_steps=spilled / 1e9,
        forward_seconds=(FORWARDS - kept / blocks) * forward,
        update_seconds=2 * decoding,
        disk_seconds=read_seconds + spill_seconds,
        steps=steps,
        evaluations=evaluations,
        evaluation_seconds=evaluation,
    )


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
    return math.ceil(graph.nbytes / tokens * shape.rows * shape.tokens)
