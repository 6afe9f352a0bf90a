"""Groups of rows that the workers of a run take in turns, and what they make of them, in order again."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from zo2core import Runner


def is_own_shard(engine: Runner, number: int) -> bool:
    """Whether a group of rows is this worker's."""
    return number % engine.workers.size == engine.workers.rank


def gather_in_order(engine: Runner, values: Sequence[float], counts: Sequence[int], rows: object) -> list[float]:
    """The numbers of all groups, in their order.

    Args:
        engine: Whose workers took them in turns.
        values: What this worker made of its groups, one after the other.
        counts: How many numbers each group has.
        rows: What all groups are of; workers have to have equal ones, by their ``repr``.

    Raises:
        WorkerError: if another worker has other groups, or is silent.
    """
    engine.workers.require_same("rows", zlib.crc32(repr(rows).encode()))
    taken = iter(values)
    own = [[next(taken) for _ in range(count)] for number, count in enumerate(counts) if is_own_shard(engine, number)]
    return [value for group in engine.workers.in_order(own) for value in group]
