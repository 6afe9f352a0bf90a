"""A source that checks the bytes it is given back, a visitor in two steps, and durations that make a missing wait fail."""

import threading
from collections.abc import Callable, Sequence

import torch
from segments import segments

from zo2core.protocols import Store
from zo2core.types import Bucket

BLOCKS = 5
NUMBERS = 64  # a segment
SLOW = 0.02  # seconds


class CheckingSource:
    """Segments whose every number is 1000 * segment + version; whoever gives back other bytes is found out."""

    def __init__(self, capacity: int = BLOCKS) -> None:
        self.layouts = segments([NUMBERS] * (BLOCKS + 2))
        self.capacity = capacity
        self.acquired: set[int] = set()
        self.write_back_every = None
        self.versions = [0] * len(self.layouts)
        self.memory = [torch.empty(layout.nbytes, dtype=torch.uint8) for layout in self.layouts]
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def expected(self, index: int, version: int) -> float:
        return 1000.0 * index + version

    def prefetch(self, order: Sequence[int]) -> int:
        return len(order)

    def acquire(self, index: int) -> Bucket:
        layout, memory = self.layouts[index], self.memory[index]
        if index in self.acquired:
            self.errors.append(f"segment {index} was acquired again before it was released")
        self.acquired.add(index)
        views = layout.views(memory)
        views[0].fill_(self.expected(index, self.versions[index]))
        return Bucket(index, memory, views, self.versions[index])

    def release(self, bucket: Bucket, version: int | None) -> None:
        self.acquired.discard(bucket.segment)
        if version is None:  # lost: what comes next is the version from before
            return
        if not bool((bucket.views[0] == self.expected(bucket.segment, version)).all()):
            self.errors.append(f"segment {bucket.segment} came back with other bytes than version {version}'s")
        self.versions[bucket.segment] = version
        bucket.data.fill_(255)  # from here on the memory is the source's

    def close(self) -> None:
        pass


def nothing() -> float:
    return 0.0


def slow() -> float:
    return SLOW


class TwoStepVisitor:
    """Commits what it replayed, and evaluates then, as a zeroth-order visit does."""

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        commit(self.replay(index, store, version))
        self.evaluate(index, store)

    def replay(self, index: int, store: Store, version: int) -> int:
        raise NotImplementedError

    def evaluate(self, index: int, store: Store) -> None:
        raise NotImplementedError
