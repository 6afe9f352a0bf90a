"""The memory of a sweep forward and backward: micro-batches at a block, one segment's graph, and what blocks keep.

The limit of a process's memory, within which memory that was freed may be kept for later.

Decides which blocks keep their graphs from forward to backward pass: as many of the last ones as fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zo2core.io.process_memory import resident_memory, return_freed_memory
from zo2core.protocols import Forward
from zo2core.sweep.block_graph import BlockGraph
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


@dataclass(frozen=True)
class MemoryLimit:
    """Returns freed memory to the system where it would make the process larger than planned.

    An allocator keeps what is freed, since the next activations are as large. It keeps more than was ever in use at a time:
    inputs that stay lie between activations that go, and blocks aligned for vector instructions are seldom reused whole.
    """

    nbytes: int | None  # resident bytes of the process; None: no limit

    def make_room(self, nbytes: int) -> None:
        """Return what was freed, if the process would exceed its limit with so many bytes more."""
        if self.nbytes is not None and resident_memory() + nbytes > self.nbytes:
            return_freed_memory()


class GraphRoom:
    """The memory for the graphs of a sweep's last blocks, for all of its streams."""

    def __init__(self, nbytes: int, sizes: Sequence[int]) -> None:
        self._left = nbytes
        self._sizes = sizes
        self._largest = 0.0  # bytes of a block's graph for each unit of size, the most so far

    def has_room(self, stream: int, blocks: int) -> bool:
        """Whether the graph of a forward that runs next fits beside those of all later blocks, for all streams."""
        sizes = (blocks - 1) * sum(self._sizes) + sum(self._sizes[stream:])
        return sizes * self._largest <= self._left

    def take(self, graph: BlockGraph, stream: int, blocks: int) -> None:
        """Take the memory of a graph whose forward ran, or drop its activations if it proves too large."""
        nbytes = graph.memory()
        self._largest = max(self._largest, nbytes / max(self._sizes[stream], 1))
        if self.has_room(stream, blocks):
            self._left -= nbytes
        else:
            graph.drop()
