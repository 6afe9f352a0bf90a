"""A visit of segments that the workers of a host share: whoever comes first replays, under the segment's lock."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from zo2core.protocols import Store
from zo2core.sources.shared import SharedSource
from zo2core.sweep.visitor import SegmentVisitor
from zo2core.types import BlockLayout


class TurnVisitor:
    """A ``SegmentVisitor`` whose segments other workers replay, too.

    Args:
        visitor: Replays and evaluates.
        source: Where the segments are.
        layouts: Segments in visiting order.
        version: The present one.
    """

    def __init__(self, visitor: SegmentVisitor, source: SharedSource, layouts: Sequence[BlockLayout], version: int) -> None:
        self._visitor = visitor
        self._source = source
        self._layouts = layouts
        self._version = version

    @property
    def outputs(self) -> list[list[torch.Tensor]]:
        """What the head gave, once it was visited."""
        return self._visitor.outputs

    @property
    def seeds(self) -> Collection[int]:
        """Directions that this sweep draws."""
        return self._visitor.seeds

    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version, unless another worker has. See the contract."""
        if not self._layouts[index].trains:
            return self._visitor.replay(index, store, version)
        with self._source.turn(index) as turn:
            present = turn.version
            if present < self._version:
                with turn.changing(self._version):
                    return self._visitor.replay(index, store, present)
        return self._visitor.replay(index, store, self._version)

    def evaluate(self, index: int, store: Store) -> None:
        """Run the segment's forwards. See the contract."""
        self._visitor.evaluate(index, store)

    def finish(self) -> None:
        """Wait until nobody uses the memory of the sweep any more, however it ended."""
        self._visitor.finish()
