"""The forward of one stream through a segment, with its activations taken from their memory and put back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from zo2core.protocols import Activations, Forward
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.types import Batch, SegmentKind

Output = TypeVar("Output")


def run_stream(
    memory: ActivationOffload,
    forward: Forward,
    kind: SegmentKind,
    index: int,
    stream: int,
    batch: Batch,
    head: Callable[[Activations], Output],
    *,
    last: bool,
) -> Output | None:
    """Run a segment's forward of one stream."""
    if kind is SegmentKind.EMBEDDING:
        memory.add(stream, forward.embed(batch), partial(forward.forward_bytes, batch))
        if last:
            memory.prefetch(0)
        return None
    activations = memory.take(stream)
    if not last or kind is SegmentKind.BLOCK:
        memory.prefetch(0 if last else stream + 1)
    if kind is SegmentKind.BLOCK:
        memory.put(stream, forward.block(index - 1, activations))
        return None
    output = head(activations)
    memory.drop(stream)
    return output
