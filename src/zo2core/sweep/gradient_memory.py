"""The memory that a sweep forward and back works in: micro-batches at a block, one segment's graph, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zo2core.protocols import Forward
from zo2core.types import Batch

GRAPH_FORWARDS = 3  # a segment's graph with its gradients takes as much as so many of its forwards
PASSING = 3  # what is in memory of a micro-batch at a block: its input, its output, and a gradient


class Group(NamedTuple):
    """Micro-batches that pass the blocks together."""

    start: int
    stop: int
    kept_bytes: int  # of memory, for inputs and graphs that blocks keep


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """How many micro-batches pass the blocks together, and how much memory is left for what blocks keep of them."""

    room: int  # bytes; a single micro-batch always passes
    spare: int  # bytes beside that: nothing else takes them

    def groups(self, forward: Forward, batches: Sequence[Batch], *, together: bool) -> Iterator[Group]:
        """Cut micro-batches into groups, in order.

        Args:
            forward: Runs them.
            batches: Micro-batches, prepared.
            together: Whether all have to pass the blocks together.
        """
        room = self.room + self.spare
        start, passing, running = 0, 0, 0
        for place, batch in enumerate(batches):
            nbytes = PASSING * forward.held_bytes(batch)
            graph = GRAPH_FORWARDS * forward.forward_bytes(batch)
            if place > start and passing + nbytes + max(running, graph) > room and not together:
                yield Group(start, place, max(room - passing - running, 0))
                start, passing, running = place, 0, 0
            passing += nbytes
            running = max(running, graph)
        yield Group(start, len(batches), max(room - passing - running, 0))
