"""Time steps that do more work in a sweep, against as many sweeps: q queries, and a batch in q micro-batches.

    python tools/bench.py queries DIR --queries 4 --rows 1 --tokens 64
    python tools/bench.py queries DIR --rate 20MB

Blocks stream from the checkpoint in every step. Each measured step is the second one of a new engine: it replays one update
and reads every block, so that all settings are comparable; nothing is written. ``--rate`` slows reads to the rate of a
slower disk, where noise and arithmetic would hide the difference. A ratio is a step's time in steps of one query and
micro-batch.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from measuring import add_sizes, alternate, ratio, spread, zeroth_order
from synthetic import slowed

from zo2adapters import open_checkpoint
from zo2adapters.trainers.verification import random_batch
from zo2core import CudaDevice, Distribution, Engine, HostDevice, SegmentStore
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.types import Batch

BUCKETS = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--queries", type=int, default=4, help="number of queries, and of micro-batches")
    add_sizes(parser, steps=3)
    parser.add_argument("--rate", help="bytes a second of a simulated slower disk, such as 20MB")
    parser.add_argument("--exact-mezo", action="store_true", help="MeZO's noise and in-place perturbations")


def second_step(options: argparse.Namespace, queries: int, batch: Batch, micro_rows: int | None) -> float:
    """The seconds of a new engine's second step."""
    model = slowed(open_checkpoint(options.directory), options.rate)
    device = CudaDevice() if options.device == "cuda" else HostDevice()
    layouts = laid_out_as_on_disk(model.layouts, model.weights)
    source = SegmentStore(model.weights, layouts, device.host_memory, buckets=BUCKETS)
    method = zeroth_order(queries=queries, noise=None if options.exact_mezo else Distribution.RADEMACHER)
    with (
        closing(device),
        closing(model.weights),
        closing(source),
        Engine(model, method, source=source, device=device, micro_batch_size=micro_rows) as engine,
    ):
        engine.step(batch, seed=0)
        return engine.step(batch, seed=1).seconds


def run(options: argparse.Namespace) -> dict[str, Any]:
    q, vocabulary = options.queries, open_checkpoint(options.directory).config.vocab_size
    one, many = (random_batch(vocabulary, rows, options.tokens, seed=0) for rows in (options.rows, options.rows * q))
    measured = alternate(
        {
            "one query": partial(second_step, options, 1, one, None),
            f"{q} queries": partial(second_step, options, q, one, None),
            f"{q} micro-batches": partial(second_step, options, 1, many, options.rows),
        },
        options.steps,
        warm_up=0,
    )
    single = measured["one query"].results
    return {
        name: {"step": spread(side.results), "single steps": ratio(side.results, single)} for name, side in measured.items()
    }
