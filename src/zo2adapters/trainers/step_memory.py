"""Memory for the activations and logits of a step, as runs reserve it and plans count it."""

from __future__ import annotations

from typing import NamedTuple

from zo2adapters.models.footprint import activation_bytes, expected_held_bytes, forward_bytes, least_activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds import PeftBlockModel
from zo2adapters.tasks.generation import plan_generation
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.optimization import Optimization
from zo2core import BlockUpdate, SegmentKind
from zo2core.methods.first_order import trained_bytes
from zo2core.planning.memory import free_memory
from zo2core.sweep.gradient_visitor import gradient_bytes
from zo2core.types import divide_tied, packed_bytes

# Share of the free memory that generation may take if it needs more; the other rows then wait.
_GENERATION_SHARE = 0.5


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
    """Expected memory of a zeroth-order step."""
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


def reserved_bytes(
    model: HFBlockModel, rows: int, tokens: int, micro_rows: int | None, update: BlockUpdate | None = None
) -> StepMemory:
    """Memory of a first-order step: the inputs of blocks, one segment's graph, and what adapter or tied weights take."""
    micro_rows = rows if micro_rows is None else min(rows, micro_rows)
    blocks = sum(layout.kind is SegmentKind.BLOCK for layout in model.layouts)
    if isinstance(model, PeftBlockModel):
        beside = model.adapter_bytes(micro_rows, 1)
    else:  # gradients of tied weights, one for each micro-batch, wait for the last segment that uses the weights
        tied, _ = divide_tied(model.layouts)
        beside = -(-rows // micro_rows) * packed_bytes(tied)
        if update is not None and update.turn is not None:  # in the turn of another segment they have no gradient
            most, first = (sum(trained_bytes(update, part)) for part in (model.layouts, model.layouts[:1]))
            beside = max(beside + first - most, 0)
    held = expected_held_bytes(model.config, rows, tokens)
    running = forward_bytes(model.config, micro_rows, tokens, loss_chunk=model.loss_chunk)
    return StepMemory(gradient_bytes(held, running, blocks) + beside, gradient_bytes(held, running, 0) + beside)
