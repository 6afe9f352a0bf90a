"""Shard groups of rows over the workers of a run, and gather the results in order."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from zo2core import Engine


def is_own_shard(engine: Engine, number: int) -> bool:
    """Whether a group of rows belongs to this worker."""
    return number % engine.workers.size == engine.workers.rank


def gather_in_order(engine: Engine, values: Sequence[float], counts: Sequence[int], rows: object) -> list[float]:
    """Gather the results of all workers' groups, in the order of the groups."""
    engine.workers.require_same("rows", zlib.crc32(repr(rows).encode()))
    remaining = iter(values)
    own = [[next(remaining) for _ in range(count)] for number, count in enumerate(counts) if is_own_shard(engine, number)]
    return [value for group in engine.workers.in_order(own) for value in group]
