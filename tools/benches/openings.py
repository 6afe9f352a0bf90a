"""Compare steps of two checkpoints or options of opening: dtypes, precisions, encodings, or logits for labels only.

    python tools/bench.py openings opt-1.3b opt-1.3b-bf16 --buckets 3
    python tools/bench.py openings task/model task/model --loss-chunk auto none --rows 16 --tokens 40 --labelled 2
    python tools/bench.py openings opt-1.3b-bf16 opt-1.3b-nf4 --precision exact exact --rank 2 --buckets 3 --rate 1GB

``--rate`` slows the reads of both sides to the rate of a slower disk. Besides times, a row has the bytes read and written a
step, and the peak bytes of a step's operations without weights and buffers.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from measuring import add_sizes, alternate, host_memory, lanes_of, peak_of_step, spread, times_faster, zeroth_order
from synthetic import slowed

from zo2adapters import open_checkpoint
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine
from zo2core.sweep.microbatch import IGNORE_INDEX


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directories", type=Path, nargs=2)
    parser.add_argument("--precision", choices=["exact", "mixed"], nargs=2, default=["mixed", "mixed"])
    parser.add_argument("--dtype", nargs=2, default=["auto", "auto"])
    parser.add_argument("--loss-chunk", choices=["auto", "none"], nargs=2, default=["auto", "auto"])
    parser.add_argument("--buckets", type=int, help="number of blocks in host memory; by default all")
    parser.add_argument("--rank", type=int, help="rank of the directions; by default full-rank directions")
    parser.add_argument("--rate", help="bytes a second of a simulated slower disk, such as 1GB")
    add_sizes(parser, tokens=128)
    parser.add_argument("--labelled", type=int, help="number of labelled tokens at each row's end; by default all")


def run(options: argparse.Namespace) -> dict[str, Any]:
    columns = (options.directories, options.precision, options.dtype, options.loss_chunk)
    engines: dict[str, Engine] = {}
    with ExitStack() as opened:
        for number, (path, precision, dtype, chunk) in enumerate(zip(*columns, strict=True), 1):
            model = open_checkpoint(path, precision=precision, dtype=dtype, loss_chunk=None if chunk == "none" else chunk)
            slowed(model, options.rate)
            engine = Engine(model, zeroth_order(lr=1e-7, rank=options.rank), memory=host_memory(options.buckets))
            engines[f"{number}: {path.name} {precision} {dtype} {chunk}"] = opened.enter_context(engine)
        batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
        if options.labelled is not None:
            batch["labels"][:, : -options.labelled] = IGNORE_INDEX
        measured = alternate({name: partial(engine.step, batch) for name, engine in engines.items()}, options.steps)
        peaks = {name: peak_of_step(partial(engine.step, batch)) for name, engine in engines.items()}
    first, second = engines
    sides = {
        name: {"step": spread(side.seconds), "operations_bytes": peaks[name], **lanes_of(side.results)}
        for name, side in measured.items()
    }
    return {"first to second": times_faster(measured, second, first), "sides": sides}
