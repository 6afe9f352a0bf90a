"""The memory that a sweep forward and back works in: inputs of blocks, one segment's graph, and graphs that are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zo2core.protocols import Forward
from zo2core.types import Batch

GRAPH_FORWARDS = 3  # a segment's graph with its gradients takes as much as so many of its forwards


class Group(NamedTuple):
    """Micro-batches that pass the blocks together."""

    start: int
    stop: int
    graph_bytes: int  # of memory, for graphs that blocks keep


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """How many micro-batches pass the blocks together, and how much memory is left for graphs that blocks keep."""

    blocks: int  # of the model: each keeps what it was given
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
        start, kept, running = 0, 0, 0
        for place, batch in enumerate(batches):
            nbytes = self.blocks * forward.held_bytes(batch)
            if place > start and kept + nbytes > room and not together:
                yield Group(start, place, max(room - kept - running, 0))
                start, kept, running = place, 0, 0
            kept += nbytes
            running = max(running, GRAPH_FORWARDS * forward.forward_bytes(batch))
        yield Group(start, len(batches), max(room - kept - running, 0))
