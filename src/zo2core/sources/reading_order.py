"""The order in which the scheduler needs segments, and how far a source prefetches along it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from zo2core.types import BlockLayout

READ_AHEAD = 2  # blocks: one is ready while the next one is read. More would evict blocks that are kept for later
NEVER = sys.maxsize  # rank of a segment that is not needed


class ReadingOrder:
    """A cyclic order of segments, from the one that is needed next to the one that is needed last."""

    def __init__(self, layouts: Sequence[BlockLayout]) -> None:
        self._layouts = layouts
        self._ranks: dict[int, int] = {}  # segment to rank, in ascending order of ranks
        self._end = 0  # the rank after the last one

    def follow(self, order: Sequence[int]) -> None:
        """Replace the order."""
        self._ranks = dict(zip(order, range(len(order)), strict=True))
        self._end = len(order)

    def acquired(self, segment: int) -> None:
        """Move a segment to the end of the order: it is needed again after all others."""
        if self._ranks.pop(segment, None) is not None:
            self._ranks[segment] = self._end
            self._end += 1

    def rank(self, segment: int) -> int:
        """A number that is higher the later a segment is needed, or ``NEVER``."""
        return self._ranks.get(segment, NEVER)

    def ahead(self) -> Iterator[int]:
        """Yield the segments to prefetch: the next blocks, and embedding and head where they stand among them."""
        blocks = 0
        for segment in self._ranks:
            blocks += not self._layouts[segment].resident
            if blocks > READ_AHEAD:
                return
            yield segment
