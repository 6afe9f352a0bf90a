"""Measure the rate of streaming all blocks of a checkpoint through a few buckets against the raw rate of the disk.

    python tools/bench.py stream DIR --buckets 3
    python tools/bench.py stream DIR --check

The raw side reads the same files in order with O_DIRECT into page-aligned buffers, with as many threads as the source. The
other side is a sweep that acquires and releases every segment without using it. With ``--check`` both sides are sweeps, and
one computes digests of all bytes, as a run does in its first sweep only.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from measuring import ratio, spread, timed

from zo2adapters import open_checkpoint
from zo2core import BlockLayout, HostDevice, SegmentStore
from zo2core.io.direct_file import byte_view
from zo2core.planning.memory import resident_memory
from zo2core.sources.segment_store import CHUNK, READERS, BaseDigests, laid_out_as_on_disk

SETTLE = 2.0  # seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path)
    parser.add_argument("--buckets", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=10, help="blocks of a round")
    parser.add_argument("--check", action="store_true", help="compare reading with and without digests")


class AlwaysNew(BaseDigests):
    """Computes a digest at every read; a run computes one at a segment's first read."""

    def wants(self, layout: BlockLayout) -> bool:
        return True


class RawReader:
    """Reads files from their start with O_DIRECT, and again from the start where they end."""

    def __init__(self, paths: list[Path]) -> None:
        self._buffers = [byte_view(HostDevice().host_memory(CHUNK)) for _ in range(READERS)]
        descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        self._ranges = [(fd, at) for fd in descriptors for at in range(0, os.fstat(fd).st_size, CHUNK)]

    def read(self, nbytes: int) -> int:
        """Read about so many bytes; returns how many."""
        ranges = self._ranges[: -(-nbytes // CHUNK)]

        def read(thread: int) -> int:
            return sum(os.preadv(fd, [self._buffers[thread]], at) for fd, at in ranges[thread::READERS])

        with ThreadPoolExecutor(READERS) as pool:
            return sum(pool.map(read, range(READERS)))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turn, each time on the next blocks; the first round touches the buckets and does not count."""
    model, digests = open_checkpoint(options.directory), AlwaysNew({}, learns=True) if options.check else None
    layouts = laid_out_as_on_disk(model.layouts, model.weights)
    blocks = [index for index, layout in enumerate(model.layouts) if not layout.resident]
    portion = min(options.blocks, len(blocks) - 2 * options.buckets)

    def sweeping(base_digests: BaseDigests | None) -> Callable[[list[int], int], int]:
        memory = HostDevice().host_memory
        source = SegmentStore(model.weights, layouts, memory, buckets=options.buckets, base_digests=base_digests)

        def sweep(part: list[int], nbytes: int) -> int:
            source.prefetch(part)
            for index in part:
                source.release(source.acquire(index), 0)
            return nbytes

        return sweep

    raw = RawReader(sorted(options.directory.glob("*.safetensors")))
    sides = {"streamed": sweeping(None)}
    sides["checked" if options.check else "raw"] = sweeping(digests) if options.check else lambda _, nbytes: raw.read(nbytes)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1, options.rounds):
        # A gap between the parts, so that none starts with blocks that were read ahead, and a pause for such reads to end.
        part = [blocks[(number * (portion + options.buckets) + i) % len(blocks)] for i in range(portion)]
        nbytes = sum(model.layouts[index].nbytes for index in part)
        for name in sorted(sides, reverse=number % 2 == 0):
            time.sleep(SETTLE)
            began = time.process_time()
            seconds, done = timed(partial(sides[name], part, nbytes))
            if number >= 0:
                rates[name].append(done / seconds)
                cpu[name].append((time.process_time() - began) / done * 1e9)
    first, second = rates.values()
    return {
        "round_bytes": nbytes,
        "resident_bytes": resident_memory(),
        "share": ratio(second, first) if options.check else ratio(first, second),
        "bytes a second": {name: spread(values) for name, values in rates.items()},
        "CPU seconds a GB": {name: spread(values) for name, values in cpu.items()},
    }
