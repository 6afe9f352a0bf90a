"""A visitor that reports how far its sweep is: a sweep over a large model takes minutes."""

from __future__ import annotations

from collections.abc import Callable

from zo2core.protocols import Store, Visitor


class WatchedVisitor:
    """Does what another visitor does, and reports each visit."""

    def __init__(self, visitor: Visitor, visits: int, watch: Callable[[int, int], object]) -> None:
        self._visitor, self._visits, self._watch = visitor, visits, watch
        self._done = 0

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Visit the segment, and report. See the contract."""
        self._visitor.visit(index, store, version, commit)
        self._done += 1
        self._watch(self._done, self._visits)

    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version. See the contract."""
        return self._visitor.replay(index, store, version)
