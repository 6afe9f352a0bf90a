"""The memory of a sweep forward and backward: inputs of blocks, one segment's graph, and graphs that are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zo2core.protocols import Forward
from zo2core.types import Batch

GRAPH_FORWARDS = 3  # memory of a segment's graph and gradients, in multiples of its forward's


class Group(NamedTuple):
    """Micro-batches that pass the blocks together."""

    start: int
    stop: int
    graph_bytes: int  # memory for graphs that blocks keep


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """Decides how many micro-batches pass the blocks together, and how much memory is left for graphs that blocks keep."""

    blocks: int  # number of blocks, each of which keeps its input
    budget: int  # bytes for inputs and graphs; a single micro-batch may exceed them
    spare: int  # further bytes, which the plan of the run leaves over

    def groups(self, forward: Forward, batches: Sequence[Batch], *, together: bool) -> Iterator[Group]:
        """Divide micro-batches into groups, in order.

        Args:
            forward: Runs the micro-batches.
            batches: Prepared micro-batches.
            together: Whether all have to pass the blocks together.
        """
        allowed = self.budget + self.spare
        start, kept, running = 0, 0, 0
        for index, batch in enumerate(batches):
            nbytes = self.blocks * forward.held_bytes(batch)
            if index > start and kept + nbytes > allowed and not together:
                yield Group(start, index, max(allowed - kept - running, 0))
                start, kept, running = index, 0, 0
            kept += nbytes
            running = max(running, GRAPH_FORWARDS * forward.forward_bytes(batch))
        yield Group(start, len(batches), max(allowed - kept - running, 0))
