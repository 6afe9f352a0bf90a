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
    """Run a segment's forward of one stream.

    Args:
        memory: Stores the streams' activations between segments.
        forward: Runs the embedding and the blocks.
        kind: Kind of the segment.
        index: Index of the segment in visiting order.
        stream: Index of the stream in the sweep.
        batch: Batch of the stream.
        head: Runs the head.
        last: Whether it is the last stream of the sweep.

    Returns:
        The output of the head; None at other segments.
    """
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
