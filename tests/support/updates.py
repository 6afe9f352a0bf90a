"""Updates that nobody computed, and lines of a journal, written out as its formats say it."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zo2core import Evaluation, Update


def update_of(step: int, seeds: Sequence[int] | None = None, **changes: Any) -> Update:
    """An update along these directions, both sides of which were evaluated; by default along one,
    whose seed is the step.
    """
    seeds = (step,) if seeds is None else tuple(seeds)
    evaluations = tuple(Evaluation(seed, shift) for seed in seeds for shift in (1.0, -1.0))
    grads, losses = (
        tuple(0.1 * (1 + place) for place in range(len(seeds))),
        (1.5,) * len(evaluations),
    )
    return replace(
        Update(step, evaluations, seeds, grads, 1e-6, 1e-3, 0.0, True, losses), **changes
    )


def record_of(line: bytes) -> dict[str, Any]:
    """What a line says, without its checksum."""
    record: dict[str, Any] = json.loads(line)
    del record["crc32"]
    return record


def line_of(record: object) -> bytes:
    """A line whose checksum holds; JSON may be given as bytes."""
    raw = (
        record if isinstance(record, bytes) else json.dumps(record, separators=(",", ":")).encode()
    )
    return b'%s,"crc32":"%08x"}\n' % (raw[:-1], zlib.crc32(raw[:-1]))
