"""Visitors for tests of schedulers: what a sweep does at a segment, in two steps that a test fills in."""

from __future__ import annotations

from collections.abc import Callable

from zo2core.protocols import Store


class TwoStepVisitor:
    """Commits what it replayed, and evaluates then, as a zeroth-order visit does."""

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        commit(self.replay(index, store, version))
        self.evaluate(index, store)

    def replay(self, index: int, store: Store, version: int) -> int:
        raise NotImplementedError

    def evaluate(self, index: int, store: Store) -> None:
        raise NotImplementedError
