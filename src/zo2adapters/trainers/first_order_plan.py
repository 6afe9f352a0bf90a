"""Plan of a run of first-order steps: memory, reads and seconds, from headers and quick probes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape, RowShapes
from zo2adapters.trainers.first_order_run import gradient_bytes
from zo2adapters.trainers.run_plan import (
    RunPlan,
    bind_probe,
    decoding_seconds,
    embedded_probe,
    evaluation_pass_seconds,
    fastest,
    measured_forward_seconds,
)
from zo2core import Machine, MemoryPolicy, PhiloxNoise, RunRequest, plan
from zo2core.engine.backprop_engine import TRAINED_COPIES
from zo2core.planning.memory_plan import MemoryPart
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.planning.write_interval import streamed_bytes
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.sweep.activation_offload import flattened
from zo2core.sweep.block_graph import BlockGraph
from zo2core.sweep.gradient_visitor import tensor_ids

_PROBED_TOKENS = 64  # most tokens of the probed row; a graph grows in proportion to tokens


def plan_first_order_run(
    model: HFBlockModel,
    shapes: RowShapes,
    *,
    memory: int | str = "auto",
    steps: int = 0,
    evaluations: int = 0,
) -> RunPlan:
    """Plan a run on the CPU that trains an adapter by gradients. Nothing is loaded; the probes take a few seconds.

    Args:
        model: Model from ``open_checkpoint``, with an adapter.
        shapes: Shapes of the run's batches.
        memory: Host memory the process may use in total.
        steps: Steps of the run.
        evaluations: Evaluations of the run.

    Raises:
        MemoryBudgetError: if no plan fits.
        CheckpointError: if the checkpoint cannot be read.
    """
    longest, on_disk = shapes.longest, laid_out_as_on_disk(model.layouts, model.weights)
    activations, _ = gradient_bytes(model, longest.rows, round(longest.tokens), shapes.micro_rows)
    request = RunRequest(
        layouts=model.layouts,
        on_disk=on_disk,
        noise=PhiloxNoise(),  # none is drawn
        perturb_in_place=False,
        takes_steps=False,
        memory=MemoryPolicy(host=memory, activations=activations),
        trained_copies=TRAINED_COPIES,
    )
    speeds = MeasuredSpeeds(model.weights)
    spec = plan(request, Machine(), speeds)
    layouts, host_plan = spec.layouts, spec.host_plan
    forward = measured_forward_seconds(model, shapes.step, running=shapes.micro_rows)
    blocks = sum(not layout.resident for layout in layouts)
    graph, times = measured_graph_bytes(model, longest), measured_backward(model, shapes.step, shapes.micro_rows)
    kept = min(host_plan.spare // max(graph, 1), blocks)
    host_plan = replace(
        host_plan, parts=(*host_plan.parts, MemoryPart(f"graphs of {kept} of {blocks} blocks", kept * graph))
    )
    read = 2 * streamed_bytes(layouts, host_plan.buckets)
    read_seconds = read / speeds.reading(layouts) if read else 0.0
    decoding = decoding_seconds(layouts)
    evaluation = evaluation_pass_seconds(model, shapes, activations, decoding, read_seconds / 2) if evaluations else 0.0
    return RunPlan(
        host_plan=host_plan,
        model_bytes=sum(layout.nbytes for layout in layouts),
        write_back_every=None,
        scratch_bytes=0,
        read_bytes=read,
        written_bytes=0,
        terabytes_per_1000_steps=0.0,
        forward_seconds=(times + 1 - kept / blocks) * forward,
        update_seconds=2 * decoding,
        disk_seconds=read_seconds,
        steps=steps,
        evaluations=evaluations,
        evaluation_seconds=evaluation,
    )


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
        model: The model, with its adapter; an engine binds its modules anew.
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
    return math.ceil(graph.nbytes / tokens * shape.rows * shape.tokens)
