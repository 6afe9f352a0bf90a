"""Stream every block of a checkpoint through a few buckets, against the raw rate of the disk, alternating in one process.

    python tools/bench_stream.py DIR --buckets 3

The raw side reads the same files in order with O_DIRECT into page-aligned buffers, with as many threads as the source.
The source's side is a sweep that acquires and releases every segment and does nothing with it. Prints a table and JSON.
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
from zo2core import HostDevice, StreamedSource
from zo2core.io.direct_file import byte_view
from zo2core.planning.host_budget import resident_memory
from zo2core.sources.loader import CHUNK, READERS, laid_out_as_on_disk

SETTLE = 2.0  # seconds


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
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bench(directory: Path, buckets: int, rounds: int, portion: int) -> dict[str, Any]:
    """Run both sides in turn, each time over the next blocks; rates in bytes a second."""
    model = open_checkpoint(directory)
    layouts = laid_out_as_on_disk(model.layouts, model.weights)
    source = StreamedSource(model.weights, layouts, HostDevice().host_memory, buckets=buckets)
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
        # A gap between the parts, so that none begins with what was read ahead; and time for that to end.
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--buckets", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=10, help="a round")
    options = parser.parse_args()
    measured = bench(options.directory, options.buckets, options.rounds, options.blocks)
    print(f"{'GB/s':24s} {'median':>8s} {'min':>8s} {'max':>8s}")
    for name in ("raw_bytes_per_second", "streamed_bytes_per_second"):
        rates = measured[name]
        print(f"{name[: name.index('_')]:24s} " + " ".join(f"{rates[key] / 1e9:8.3f}" for key in ("median", "min", "max")))
    print(f"{'share of the raw rate':24s} " + " ".join(f"{measured['share'][key]:8.3f}" for key in ("median", "min", "max")))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
