"""The memory of a sweep forward and backward: micro-batches at a block, one segment's graph, and what blocks keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zo2core.protocols import Forward
from zo2core.types import Batch

# Memory of a segment's forward and backward, in multiples of its forward's. Measured: 0.5 to 1.6 for blocks of OPT and
# Llama; 1.2 for a head in 16 bits and 1.5 in float32, whose loss has three float32 copies of the logits.
GRAPH_FORWARDS = 1.5
PASSING = 3  # what is in memory of a micro-batch at a block: its input, its output, and a gradient


def gradient_bytes(held: int, running: int, kept: int) -> int:
    """Memory of a sweep forward and backward."""
    return (PASSING + kept) * held + math.ceil(GRAPH_FORWARDS * running)


class Group(NamedTuple):
    """Micro-batches that pass the blocks together."""

    start: int
    stop: int
    kept_bytes: int  # memory for inputs and graphs that blocks keep


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """Decides how many micro-batches pass the blocks together, and how much memory is left for what blocks keep."""

    budget: int  # bytes; a single micro-batch may exceed them
    spare: Callable[[], int]  # further bytes, which the present plan leaves over

    def groups(self, forward: Forward, batches: Sequence[Batch], *, together: bool) -> Iterator[Group]:
        """Divide micro-batches into groups, in order."""
        allowed = self.budget + self.spare()
        start, held, running = 0, 0, 0
        for index, batch in enumerate(batches):
            nbytes, forward_bytes = forward.held_bytes(batch), forward.forward_bytes(batch)
            needed = gradient_bytes(held + nbytes, max(running, forward_bytes), 0)
            if index > start and needed > allowed and not together:
                yield Group(start, index, max(allowed - gradient_bytes(held, running, 0), 0))
                start, held, running = index, 0, 0
            held += nbytes
            running = max(running, forward_bytes)
        yield Group(start, len(batches), max(allowed - gradient_bytes(held, running, 0), 0))
