"""The interval of write-backs, which weighs time against the wear of the disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from zo2core.errors import OptionError
from zo2core.io.direct_file import whole_pages
from zo2core.planning.memory import MOST_USEFUL_BUCKETS
from zo2core.planning.policies import WriteBackPolicy
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.protocols import NoiseGenerator
from zo2core.types import BlockLayout, shown_bytes

SHARE = 0.1  # of a step's time that may be spent on replay to write less
RESUME_SECONDS = 60.0  # of replay that a resumed run of a resident model may need

_LEAST_SNAPSHOT, _MOST_SNAPSHOT = 10, 1000  # steps between writes of a resident model


def write_back_interval(replay: float, write: float, *, step: float, resident: bool) -> int:
    """Number of versions that a segment may be behind on disk before it is written.

    A streamed block that may be k versions behind is replayed k times at most and (k + 1) / 2 times on
    average, and written every k-th step. The larger k of two rules is chosen:

    - The least time, with a slow disk: k = sqrt(2 write / replay) makes (k + 1) / 2 replays and 1 / k writes cheapest.
    - The least wear for a tenth of a step: the largest k whose (k - 1) / 2 further replays take that long. So no step takes
      more than a tenth longer than with the fastest k.

    A resident block is never read again, and written only so that a resumed run replays less: as often as costs a hundredth
    of a replay a step, but not before a resumed run would replay for a minute.
    """
    if resident:
        affordable, resumable = math.ceil(100 * write / replay), math.floor(RESUME_SECONDS / replay)
        return min(max(affordable, resumable, _LEAST_SNAPSHOT), _MOST_SNAPSHOT)
    fastest = round(math.sqrt(2 * write / replay))
    rarest = 1 + math.floor(2 * SHARE * step / replay + 1e-9)
    return max(fastest, rarest, 1)


def terabytes_written(layouts: Sequence[BlockLayout], every: int | None) -> float:
    """Terabytes (10^12 bytes) that 1,000 steps write if segments are written every ``every`` steps; None: never."""
    return 0.0 if every is None else _written_bytes(layouts) * 1000 / every / 1e12


def interval_within(layouts: Sequence[BlockLayout], terabytes_per_1000_steps: float) -> int:
    """The smallest interval within a limit of writes."""
    return max(math.ceil(terabytes_written(layouts, 1) / terabytes_per_1000_steps - 1e-9), 1)


def require_within(layouts: Sequence[BlockLayout], every: int | None, terabytes_per_1000_steps: float | None) -> None:
    """Raise OptionError for an interval that writes more than a limit."""
    if every is None or terabytes_per_1000_steps is None or every >= interval_within(layouts, terabytes_per_1000_steps):
        return
    raise OptionError(
        "write_back",
        found=f"writing every {every} steps, which is {shown_bytes(1e12 * terabytes_written(layouts, every))} in 1,000",
        expected=f"at most the {shown_bytes(1e12 * terabytes_per_1000_steps)} that are allowed",
        remedy=f"write every {interval_within(layouts, terabytes_per_1000_steps)} steps, or allow more",
    )


def streamed_bytes(layouts: Sequence[BlockLayout], buckets: int | None, *, kept: int = 0) -> int:
    """Bytes of blocks that a step reads from disk."""
    sizes = [layout.nbytes for layout in layouts if not layout.resident]
    if buckets is None or not sizes:
        return 0
    moving = len(sizes) - kept - max(buckets - MOST_USEFUL_BUCKETS, 0)
    return sum(sizes) * max(moving, 0) // len(sizes)


def _written_bytes(layouts: Sequence[BlockLayout]) -> int:
    return sum(whole_pages(layout.nbytes) for layout in layouts)


def write_interval(
    policy: WriteBackPolicy,
    layouts: Sequence[BlockLayout],
    noise: NoiseGenerator,
    speeds: MeasuredSpeeds,
    *,
    in_place: bool,
    buckets: int | None,
    kept: int = 0,
) -> int | None:
    """Number of steps after which a segment is written; None: never. "auto" depends on the speeds of replay and disks.

    The time of forwards is not known here. The time of a step's reads, or of one replay, is used as the time of a step: a
    step that takes longer could afford to write even less.
    """
    every, limit = policy.every, policy.terabytes_per_1000_steps
    if every == "auto":
        replay = speeds.replay(noise, layouts, in_place=in_place)
        write = _written_bytes(layouts) / speeds.writing(Path(policy.directory))
        nbytes = streamed_bytes(layouts, buckets, kept=kept)
        read = nbytes / speeds.reading(layouts) if nbytes else 0.0
        every = write_back_interval(replay, write, step=max(read, replay), resident=buckets is None)
        every = every if limit is None else max(every, interval_within(layouts, limit))
    interval = min((steps for steps in (every, policy.snapshot_every) if steps is not None), default=None)
    require_within(layouts, interval, limit)
    return interval
