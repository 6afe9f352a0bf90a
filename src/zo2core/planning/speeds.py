"""Speeds of this machine (replay, reading from and writing to disks), and the interval of
write-backs that follows.

The interval weighs time against the wear of the disk.
"""

from __future__ import annotations

import contextlib
import math
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from zo2core.errors import OptionError, ScratchError, system_errors_as
from zo2core.io.direct_file import RangedFile, byte_view, whole_pages
from zo2core.kernels import Draw, apply
from zo2core.kernels.parallel import thread_count
from zo2core.kernels.programs import compile_updates
from zo2core.protocols import CounterNoise, NoiseGenerator, TensorReader
from zo2core.ranges import require_number, require_whole
from zo2core.schedulers.devices import HostDevice
from zo2core.sources.segment_store import CHUNK, READ_AHEAD, READERS
from zo2core.types import (
    BlockLayout,
    Evaluation,
    ParameterSpec,
    Program,
    Update,
    shown_bytes,
    trained,
)

MOST_USEFUL_BUCKETS = 1 + READ_AHEAD  # further buckets only keep blocks from sweep to sweep

_BYTES = 64 << 20  # written to measure a disk
_READ_CHUNKS = 48  # read to measure a checkpoint's disk
_CHUNKS = 64  # of a parameter, replayed to measure replay
_ROUNDS = 3  # of each measurement, of which the fastest counts
_UPDATES = 4  # replayed in one pass, to measure the cost of one more
# of a pass with one update, the least cost of one more: smaller differences are noise of the clock
_LEAST_SHARE = 0.1

# A typical weight. Updates of zeros would be denormal in float16, whose arithmetic is then ten
# times as slow.
_WEIGHT = 0.02


class MeasuredSpeeds:
    """Speeds of this machine, each measured for a fraction of a second at its first use."""

    def __init__(self, weights: TensorReader) -> None:
        self._weights = weights
        self._measured: dict[object, float] = {}

    def replay(
        self, noise: NoiseGenerator, layouts: Sequence[BlockLayout], *, in_place: bool
    ) -> float:
        """Measure ``replay_seconds``."""
        return self._once(
            ("replay", in_place), lambda: replay_seconds(noise, layouts, in_place=in_place)
        )

    def reading(self, layouts: Sequence[BlockLayout]) -> float:
        """Measure ``read_bytes_per_second``."""
        return self._once("reading", lambda: read_bytes_per_second(self._weights, layouts))

    def writing(self, directory: Path) -> float:
        """Measure ``write_bytes_per_second``."""
        return self._once(("writing", directory), lambda: write_bytes_per_second(directory))

    def _once(self, key: object, measure: Callable[[], float]) -> float:
        if key not in self._measured:
            self._measured[key] = measure()
        return self._measured[key]


def replay_seconds(
    noise: NoiseGenerator, layouts: Sequence[BlockLayout], *, in_place: bool = True
) -> float:
    """Seconds to replay one more update of the whole model, on as many threads as a visit uses.

    With counter-based noise, updates are replayed in one pass over memory, so that one more costs
    less than the first one.
    """

    def seconds_of(updates: int) -> float:
        missing = [_update(seed, in_place=in_place) for seed in range(updates)]
        return _seconds(noise, layouts, compile_updates(missing)[False])

    seconds_of_one = seconds_of(1)
    if not isinstance(noise, CounterNoise):
        return seconds_of_one
    return max(
        (seconds_of(_UPDATES) - seconds_of_one) / (_UPDATES - 1), _LEAST_SHARE * seconds_of_one
    )


def evaluation_seconds(noise: CounterNoise, layouts: Sequence[BlockLayout]) -> tuple[float, float]:
    """Seconds to perturb the whole model for an evaluation, on as many threads as a visit uses:
    after an update, or not.
    """
    evaluation = Evaluation(1, 1.0)
    update = _update(0, in_place=False)
    with_update, without = (
        compile_updates(updates, evaluation, 1e-3)[False] for updates in ([update], [])
    )
    return _seconds(noise, layouts, with_update), _seconds(noise, layouts, without)


def _update(seed: int, *, in_place: bool) -> Update:
    """An update of MeZO."""
    evaluations = (Evaluation(seed, 1.0), Evaluation(seed, -1.0))
    return Update(
        seed,
        evaluations,
        (seed,),
        (1.0,),
        1e-6,
        1e-3,
        0.0,
        perturb_in_place=in_place,
        losses=(0.0, 0.0),
    )


def _seconds(noise: NoiseGenerator, layouts: Sequence[BlockLayout], program: Program) -> float:
    """Estimate the seconds of a program's pass over all weights from some chunks of the largest
    parameter.
    """
    specs = trained(layouts)
    largest = max(specs, key=lambda spec: spec.numel)
    chunks = noise.chunks(largest)[:_CHUNKS]
    longest = max(stop - start for start, stop in chunks)
    memory = [torch.full((longest,), _WEIGHT, dtype=largest.dtype) for _ in range(2)]

    def run() -> None:
        for start, stop in chunks:
            theta, z = (buffer[: stop - start] for buffer in memory)
            if isinstance(noise, CounterNoise):
                out = None if program.then is None else z
                apply(theta, program, Draw(noise.distribution, largest.index, start), out=out)
            else:
                noise.fill(z, 0, largest, start)
                apply(theta, program, [z])

    # a sequential generator allows one
    threads = thread_count() if isinstance(noise, CounterNoise) else 1
    share = sum(stop - start for start, stop in chunks) / sum(spec.numel for spec in specs)
    return min(timeit.repeat(run, number=1, repeat=_ROUNDS)) / share / threads


def read_bytes_per_second(weights: TensorReader, layouts: Sequence[BlockLayout]) -> float:
    """Bytes a second at which a source reads blocks from a checkpoint; infinite if no parameter has
    a chunk.
    """
    specs = [spec for layout in layouts if not layout.resident for spec in layout.parameters]
    chunks: list[tuple[ParameterSpec, int]] = []
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        step = CHUNK // spec.stored_dtype.itemsize
        chunks += [(spec, start) for start in range(0, spec.stored_numel - step + 1, step)]
        if len(chunks) >= _READ_CHUNKS:
            break
    chunks = chunks[:_READ_CHUNKS]
    if not chunks:
        return math.inf

    def read(chunk: tuple[ParameterSpec, int]) -> None:
        spec, start = chunk
        weights.read_into(
            spec.name,
            torch.empty(CHUNK // spec.stored_dtype.itemsize, dtype=spec.stored_dtype),
            start,
        )

    with ThreadPoolExecutor(READERS) as pool:
        return len(chunks) * CHUNK / timeit.timeit(lambda: list(pool.map(read, chunks)), number=1)


def write_bytes_per_second(directory: Path) -> float:
    """Bytes a second of durable writes to a directory's disk. A missing directory is not made."""
    data = byte_view(memory := HostDevice().host_memory(_BYTES))
    memory.fill_(1)
    expected, remedy = (
        "a directory on a disk with free space",
        "choose another directory or free space",
    )
    with system_errors_as(ScratchError, directory, expected=expected, remedy=remedy):
        existing = next(
            parent
            for parent in (directory.absolute(), *directory.absolute().parents)
            if parent.exists()
        )
        with contextlib.closing(RangedFile.unnamed(existing)) as file:

            def write() -> None:
                file.write(0, data)
                file.sync()

            return _BYTES / min(timeit.repeat(write, number=1, repeat=_ROUNDS))


@dataclass(frozen=True, kw_only=True)
class WriteBackPolicy:
    """Whether and when changed segments are written to disk. The base checkpoint is never written.

    Args:
        directory: Directory of the scratch file or, with low-rank perturbations, of the factors of
            ended periods. A later engine resumes from it and the journal.
        every: A segment is written once it is this many steps ahead of its bytes on disk; "auto"
            measures noise and disk, and writes as seldom as costs at most a tenth of a step; None
            reads earlier files, and writes only as often as ``snapshot_every`` asks.
        snapshot_every: Most steps between two writes of a segment, which limits the replay of a
            resumed run.
        terabytes_per_1000_steps: Limit of writes in 1,000 steps, in units of 10^12 bytes: "auto"
            stays below it, and numbers above that exceed it are refused. None: no limit.

    Raises:
        OptionError: if a number is out of its range.
    """

    directory: Path | str
    every: int | Literal["auto"] | None = "auto"
    snapshot_every: int | None = None
    terabytes_per_1000_steps: float | None = None

    @property
    def is_automatic(self) -> bool:
        """Whether the caller set no interval: then writing may be left out."""
        return self.every in ("auto", None) and self.snapshot_every is None

    @property
    def bytes_a_step(self) -> float | None:
        """Most bytes a step that may be written without an explicit interval; None: no limit."""
        if self.every is None:
            return 0.0
        return (
            None if self.terabytes_per_1000_steps is None else self.terabytes_per_1000_steps * 1e9
        )

    def __post_init__(self) -> None:
        limit, remedy = (
            self.terabytes_per_1000_steps,
            "pass a limit above 0; `every=None` writes nothing",
        )
        if limit is not None:
            require_number("write_back.terabytes_per_1000_steps", limit, above=0, remedy=remedy)
        if self.every not in (None, "auto"):
            require_whole("write_back.every", self.every, 1, otherwise=", 'auto' or None")
        if self.snapshot_every is not None:
            require_whole(
                "write_back.snapshot_every", self.snapshot_every, 1, otherwise=", or None"
            )


SHARE = 0.1  # of a step's time that may be spent on replay to write less
RESUME_SECONDS = 60.0  # of replay that a resumed run of a resident model may need

_LEAST_SNAPSHOT, _MOST_SNAPSHOT = 10, 1000  # steps between writes of a resident model


def write_back_interval(replay: float, write: float, *, step: float, resident: bool) -> int:
    """Number of versions that a segment may be behind on disk before it is written.

    A streamed block that may be k versions behind is replayed k times at most and (k + 1) / 2 times
    on average, and written every k-th step. The larger k of two rules is chosen:

    - The least time, with a slow disk: k = sqrt(2 write / replay) makes (k + 1) / 2 replays and 1 /
      k writes cheapest.
    - The least wear for a tenth of a step: the largest k whose (k - 1) / 2 further replays take
      that long. So no step takes more than a tenth longer than with the fastest k.

    A resident block is never read again, and written only so that a resumed run replays less: as
    often as costs a hundredth of a replay a step, but not before a resumed run would replay for a
    minute.
    """
    if resident:
        affordable = math.ceil(100 * write / replay)
        resumable = math.floor(RESUME_SECONDS / replay)
        return min(max(affordable, resumable, _LEAST_SNAPSHOT), _MOST_SNAPSHOT)
    fastest = round(math.sqrt(2 * write / replay))
    rarest = 1 + math.floor(2 * SHARE * step / replay + 1e-9)
    return max(fastest, rarest, 1)


def terabytes_written(layouts: Sequence[BlockLayout], every: int | None) -> float:
    """Terabytes (10^12 bytes) that 1,000 steps write if segments are written every ``every`` steps;
    None: never.
    """
    return 0.0 if every is None else _written_bytes(layouts) * 1000 / every / 1e12


def interval_within(layouts: Sequence[BlockLayout], terabytes_per_1000_steps: float) -> int:
    """The smallest interval within a limit of writes."""
    return max(math.ceil(terabytes_written(layouts, 1) / terabytes_per_1000_steps - 1e-9), 1)


def require_within(
    layouts: Sequence[BlockLayout], every: int | None, terabytes_per_1000_steps: float | None
) -> None:
    """Raise OptionError for an interval that writes more than a limit."""
    if (
        every is None
        or terabytes_per_1000_steps is None
        or every >= interval_within(layouts, terabytes_per_1000_steps)
    ):
        return
    raise OptionError(
        "write_back",
        found=f"writing every {every} steps, which is "
        f"{shown_bytes(1e12 * terabytes_written(layouts, every))} in 1,000",
        expected=f"at most the {shown_bytes(1e12 * terabytes_per_1000_steps)} that are allowed",
        remedy=f"write every {interval_within(layouts, terabytes_per_1000_steps)} steps, or allow "
        "more",
    )


def streamed_bytes(layouts: Sequence[BlockLayout], buckets: int | None, *, kept: int = 0) -> int:
    """Bytes of blocks that a step reads from disk."""
    sizes = [layout.nbytes for layout in layouts if not layout.resident]
    if buckets is None or not sizes:
        return 0
    moving = len(sizes) - kept - max(buckets - MOST_USEFUL_BUCKETS, 0)
    return sum(sizes) * max(moving, 0) // len(sizes)


def kept_blocks(buckets: int, commit_every: int) -> int:
    """Blocks that stay in memory from one commit to the next, of so many buckets."""
    return 0 if commit_every == 1 else max(buckets - MOST_USEFUL_BUCKETS, 0)


def read_bytes(
    layouts: Sequence[BlockLayout], buckets: int, commit_every: int, *, measures: bool = False
) -> int:
    """Bytes of blocks that a step reads from disk, for an optimizer without turns.

    Weights of blocks that are not in a bucket are read on the way there and on the way back.
    Optimizer states are read on the way back. At the end of a step the first blocks are in the
    buckets, and at its turn the last blocks.
    """
    pinned = kept_blocks(buckets, commit_every)
    blocks = [layout for layout in layouts if not layout.resident][pinned:]
    count = len(blocks)
    free = buckets - pinned
    if free >= count:
        return 0
    weights = [whole_pages(layout.weight_bytes) for layout in blocks]
    states = [
        whole_pages(layout.nbytes) - of_weights
        for layout, of_weights in zip(blocks, weights, strict=True)
    ]
    moved = sum(weights[free:]) + sum(weights[: count - free])
    return (
        moved * (2 if measures else 1)
        + sum(states[max(free, count - free) :])
        + sum(states[: count - free])
    )


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
    """Number of steps after which a segment is written; None: never.

    "auto" depends on the speeds of replay and disks.

    The time of forwards is not known here. The time of a step's reads, or of one replay, is used as
    the time of a step: a step that takes longer could afford to write even less.
    """
    every, limit = policy.every, policy.terabytes_per_1000_steps
    if every == "auto":
        replay = speeds.replay(noise, layouts, in_place=in_place)
        write = _written_bytes(layouts) / speeds.writing(Path(policy.directory))
        nbytes = streamed_bytes(layouts, buckets, kept=kept)
        read = nbytes / speeds.reading(layouts) if nbytes else 0.0
        every = write_back_interval(replay, write, step=max(read, replay), resident=buckets is None)
        every = every if limit is None else max(every, interval_within(layouts, limit))
    interval = min(
        (steps for steps in (every, policy.snapshot_every) if steps is not None), default=None
    )
    require_within(layouts, interval, limit)
    return interval
