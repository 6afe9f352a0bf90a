"""Time steps that do more work in a sweep, against as many sweeps: q queries, and a batch in q micro-batches.

    python tools/bench_queries.py DIR --queries 4 --rows 1 --tokens 64
    python tools/bench_queries.py DIR --rate 20MB

Blocks stream from the checkpoint in every step. Each measured step is the second one of a new engine: it replays one update
and reads every block, so that all settings are comparable; nothing is written. Settings alternate, round by round.
``--rate`` slows reads to the rate of a slower disk, where noise and arithmetic would hide the difference. Prints a table and
JSON: seconds a step, and a step's time in steps of one query and one micro-batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from zo2adapters import open_checkpoint
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.verification import random_batch
from zo2core import CudaDevice, Engine, HostDevice, SegmentStore, SequentialNoise, ZerothOrder
from zo2core.protocols import TensorReader
from zo2core.ranges import parse_size
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.types import Batch

BUCKETS = 3


class SlowReader:
    """A reader that takes at least the time that a slower disk would.

    Args:
        inner: Reads.
        rate: Bytes a second, of all threads together.
    """

    def __init__(self, inner: TensorReader, rate: float) -> None:
        self._inner = inner
        self._rate = rate
        self._free = 0.0  # time at which the disk is free again
        self._lock = threading.Lock()
        self.fingerprint = inner.fingerprint
        self.close = inner.close
        self.page_offset = inner.page_offset
        self.itemsize = inner.itemsize
        self.origin = inner.origin

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Read, then wait for the slower disk."""
        with self._lock:
            self._free = until = max(self._free, time.perf_counter()) + out.nbytes / self._rate
        self._inner.read_into(parameter, out, start)
        time.sleep(max(until - time.perf_counter(), 0))


def step_seconds(options: argparse.Namespace, queries: int, batch: Batch, micro_rows: int | None) -> float:
    """The seconds of a new engine's second step."""
    model = open_checkpoint(options.directory)
    device = CudaDevice() if options.device == "cuda" else HostDevice()
    weights = model.weights if options.rate is None else SlowReader(model.weights, parse_size(options.rate))
    source = SegmentStore(weights, laid_out_as_on_disk(model.layouts, weights), device.host_memory, buckets=BUCKETS)
    optimization = Optimization(lr=1e-6, queries=queries, exact_mezo=options.exact_mezo)
    noise = optimization.generator(model.layouts)
    drawn = SequentialNoise(model.layouts, device.torch_device) if noise is None else noise
    with (
        closing(device),
        closing(model.weights),
        closing(source),
        Engine(
            model,
            ZerothOrder(optimization.estimator_of(2), noise=drawn),
            source=source,
            device=device,
            micro_batch_size=micro_rows,
        ) as engine,
    ):
        engine.step(batch, seed=0)
        return engine.step(batch, seed=1).seconds


def spread(values: list[float]) -> dict[str, float]:
    """The median and range of values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all settings in turn, round by round."""
    q = options.queries
    vocabulary = open_checkpoint(options.directory).config.vocab_size
    one = random_batch(vocabulary, options.rows, options.tokens, seed=0)
    many = random_batch(vocabulary, options.rows * q, options.tokens, seed=0)
    settings: dict[str, tuple[int, Batch, int | None]] = {
        "one query": (1, one, None),
        f"{q} queries": (q, one, None),
        f"{q} micro-batches": (1, many, options.rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(options.rounds):
        for name, setting in settings.items():
            seconds[name].append(step_seconds(options, *setting))
    single = seconds["one query"]
    return {
        "directory": options.directory.name,
        "device": options.device,
        "rows": options.rows,
        "tokens": options.tokens,
        "queries": q,
        "rate": options.rate,
        "exact_mezo": options.exact_mezo,
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "torch": torch.__version__,
        "step_seconds": {name: spread(values) for name, values in seconds.items()},
        "single_steps": {
            name: spread([a / b for a, b in zip(values, single, strict=True)]) for name, values in seconds.items()
        },
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--queries", type=int, default=4, help="number of queries, and of micro-batches")
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", default=None, help="bytes a second of a simulated slower disk, such as 20MB")
    parser.add_argument(
        "--exact-mezo", action="store_true", help="MeZO's noise and in-place perturbations, as in `zo2 train`"
    )
    options = parser.parse_args()
    measured = bench(options)
    print(f"{'':24s} {'seconds':>8s} {'min':>8s} {'max':>8s} {'single steps':>13s}")
    for name, values in measured["step_seconds"].items():
        ratio = measured["single_steps"][name]["median"]
        print(f"{name:24s} {values['median']:8.3f} {values['min']:8.3f} {values['max']:8.3f} {ratio:13.2f}")
    print(f"{'as many single steps':24s} {measured['queries'] * measured['step_seconds']['one query']['median']:8.3f}")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
