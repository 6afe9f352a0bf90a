"""Measure the rate of streaming all blocks of a checkpoint through a few buckets against the raw rate of the disk.

    python tools/bench_stream.py DIR --buckets 3
    python tools/bench_stream.py DIR --check

Both sides alternate in one process. The raw side reads the same files in order with O_DIRECT into page-aligned buffers, with
as many threads as the source. The other side is a sweep that acquires and releases every segment without using it. With
``--check`` both sides are sweeps, and one computes digests of all bytes, as a run does in its first sweep only. Prints a
table and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zo2adapters import open_checkpoint
from zo2core import BlockLayout, HostDevice, SegmentStore
from zo2core.io.direct_file import byte_view
from zo2core.planning.memory import resident_memory
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.loader import CHUNK, READERS, laid_out_as_on_disk

SETTLE = 2.0  # seconds


class AlwaysNew(BaseDigests):
    """Computes a digest at every read; a run computes one at a segment's first read."""

    def wants(self, layout: BlockLayout) -> bool:
        """Whether a digest is due: always."""
        return True


def raw_read(paths: list[Path], limit: int) -> tuple[int, float]:
    """Read files with O_DIRECT; return bytes and seconds."""
    memory = [HostDevice().host_memory(CHUNK) for _ in range(READERS)]
    buffers = [byte_view(buffer) for buffer in memory]
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    ranges = [(fd, at) for fd in descriptors for at in range(0, os.fstat(fd).st_size, CHUNK)]
    ranges = ranges[: -(-limit // CHUNK)]

    def read(thread: int) -> int:
        return sum(os.preadv(fd, [buffers[thread]], at) for fd, at in ranges[thread::READERS])

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        done = sum(pool.map(read, range(READERS)))
    seconds = time.perf_counter() - began
    for descriptor in descriptors:
        os.close(descriptor)
    return done, seconds


def spread(values: list[float]) -> dict[str, float]:
    """The median and range of values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bench(directory: Path, buckets: int, rounds: int, portion: int) -> dict[str, Any]:
    """Measure both sides in turn, each time on the next blocks; return rates in bytes a second."""
    model = open_checkpoint(directory)
    layouts = laid_out_as_on_disk(model.layouts, model.weights)
    source = SegmentStore(model.weights, layouts, HostDevice().host_memory, buckets=buckets)
    blocks = [index for index, layout in enumerate(model.layouts) if not layout.resident]
    paths = sorted(directory.glob("*.safetensors"))

    def stream(part: list[int]) -> float:
        began = time.perf_counter()
        for index in part:
            source.release(source.acquire(index), 0)
        return time.perf_counter() - began

    for index in (0, len(model.layouts) - 1):
        source.release(source.acquire(index), 0)
    stream(blocks[-2 * buckets :])  # touches the buckets
    raw: list[float] = []
    streamed: list[float] = []
    for turn in range(rounds):
        # A gap between the parts, so that none starts with blocks that were read ahead, and a pause for such reads to end.
        at = turn * (portion + buckets) % (len(blocks) - portion)
        time.sleep(SETTLE)
        part = blocks[at : at + portion]
        nbytes = sum(model.layouts[index].nbytes for index in part)
        done, seconds = raw_read(paths, nbytes)
        raw.append(done / seconds)
        streamed.append(nbytes / stream(part))
    peak = resident_memory()
    source.close()
    return {
        "directory": directory.name,
        "bytes_a_round": nbytes,
        "buckets": buckets,
        "rounds": rounds,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "raw_bytes_per_second": spread(raw),
        "streamed_bytes_per_second": spread(streamed),
        "share": spread([ours / theirs for ours, theirs in zip(streamed, raw, strict=True)]),
        "resident_bytes": peak,
    }


def bench_check(directory: Path, buckets: int, rounds: int, portion: int) -> dict[str, Any]:
    """Measure reading with and without digests in turn, on the same blocks; their order alternates."""
    model = open_checkpoint(directory)
    layouts = laid_out_as_on_disk(model.layouts, model.weights)
    sources = {
        name: SegmentStore(model.weights, layouts, HostDevice().host_memory, buckets=buckets, base_digests=digests)
        for name, digests in (("plain", None), ("checked", AlwaysNew({}, learns=True)))
    }
    blocks = [index for index, layout in enumerate(model.layouts) if not layout.resident]
    portion = min(portion, len(blocks) - 2 * buckets)
    rates: dict[str, list[float]] = {name: [] for name in sources}
    cpu: dict[str, list[float]] = {name: [] for name in sources}
    for turn in range(-1, rounds):  # the first one touches the buckets and does not count
        part = [blocks[(turn * (portion + buckets) + i) % len(blocks)] for i in range(portion)]
        nbytes = sum(model.layouts[index].nbytes for index in part)
        for name in sorted(sources, reverse=turn % 2 == 0):
            time.sleep(SETTLE)
            source = sources[name]
            source.prefetch(part)
            began, began_cpu = time.perf_counter(), time.process_time()
            for index in part:
                source.release(source.acquire(index), 0)
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
            if turn >= 0:
                rates[name].append(nbytes / seconds)
                cpu[name].append(cpu_seconds / nbytes * 1e9)
    for source in sources.values():
        source.close()
    return {
        "directory": directory.name,
        "bytes_a_round": nbytes,
        "buckets": buckets,
        "rounds": rounds,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        **{f"{name}_bytes_per_second": spread(values) for name, values in rates.items()},
        **{f"{name}_cpu_seconds_per_gigabyte": spread(values) for name, values in cpu.items()},
        "share": spread([ours / theirs for ours, theirs in zip(rates["checked"], rates["plain"], strict=True)]),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--buckets", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=10, help="blocks of a round")
    parser.add_argument("--check", action="store_true", help="compare reading with and without digests")
    options = parser.parse_args()
    run = bench_check if options.check else bench
    measured = run(options.directory, options.buckets, options.rounds, options.blocks)
    print(f"{'GB/s':24s} {'median':>8s} {'min':>8s} {'max':>8s}")
    for name in [name for name in measured if name.endswith("_bytes_per_second")]:
        rates = measured[name]
        print(f"{name[: name.index('_')]:24s} " + " ".join(f"{rates[key] / 1e9:8.3f}" for key in ("median", "min", "max")))
    label = "share of the plain rate" if options.check else "share of the raw rate"
    print(f"{label:24s} " + " ".join(f"{measured['share'][key]:8.3f}" for key in ("median", "min", "max")))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
