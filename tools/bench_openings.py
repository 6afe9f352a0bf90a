"""Compare steps of two checkpoints or options of opening: dtypes, precisions, encodings, or logits for labels only.

    python tools/bench_openings.py opt-1.3b opt-1.3b-bf16 --precision mixed mixed
    python tools/bench_openings.py opt-1.3b opt-1.3b-bf16 --precision mixed mixed --buckets 3
    python tools/bench_openings.py task/model task/model --loss-chunk auto none --rows 16 --tokens 40 --labelled 2
    python tools/bench_openings.py opt-1.3b-bf16 opt-1.3b-nf4 --precision exact exact --rank 2 --buckets 3 --rate 1GB

Both sides alternate; ``--rate`` slows their reads to the rate of a slower disk. Prints a table and JSON: seconds a step, the
ratio of consecutive steps, bytes read, and the peak bytes of a step's operations without weights and buffers.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_overlap import keep, machine, spread
from bench_queries import SlowReader
from paper_places import Usage

from zo2adapters import open_checkpoint
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    DensePerturbation,
    Distribution,
    Engine,
    HostPlan,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    PhiloxNoise,
    ZerothOrder,
)
from zo2core.ranges import parse_size
from zo2core.sweep.microbatch import IGNORE_INDEX
from zo2core.types import Batch, Lane

WARM_UP = 2


def peak_bytes(engine: Engine, batch: Batch) -> int:
    """The peak bytes of a step's operations, without those that remain after the step."""
    usage = Usage()
    with usage:
        engine.step(batch)
        usage.peak = usage.now
        engine.step(batch)
    return usage.peak - usage.now


def bench(sides: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turn."""
    seconds: list[list[float]] = [[] for _ in sides]
    moved: list[tuple[list[int], list[int]]] = [
        ([], []) for _ in sides
    ]  # for each side, the bytes that each step read and wrote
    host = HostPlan((), 1 << 40, buckets=options.buckets, keep_noise=False)
    with ExitStack() as opened:
        engines = []
        for side in sides:
            model = open_checkpoint(**side)
            if options.rate is not None:
                model.weights = SlowReader(model.weights, parse_size(options.rate))
            engines.append(
                opened.enter_context(
                    Engine(
                        model,
                        ZerothOrder(
                            MeZOSGD(lr=1e-7, zo_eps=1e-3, perturb_in_place=False),
                            noise=PhiloxNoise(Distribution.RADEMACHER),
                            perturbation=DensePerturbation()
                            if options.rank is None
                            else LowRankPerturbation(rank=options.rank),
                        ),
                        memory=MemoryPolicy(host=host),
                    )
                )
            )
        batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
        if options.labelled is not None:
            batch["labels"][:, : -options.labelled] = IGNORE_INDEX
        for number in range(WARM_UP + options.steps):
            for engine, spans, (read, written) in zip(engines, seconds, moved, strict=True):
                result = engine.step(batch)
                if number >= WARM_UP:
                    spans.append(result.seconds)
                    read.append(result.lanes[Lane.READ].nbytes)
                    written.append(result.lanes[Lane.WRITE].nbytes)
        peaks = [peak_bytes(engine, batch) for engine in engines]
    return {
        "seconds": [spread(spans) for spans in seconds],
        "first_to_second": spread([first / second for first, second in zip(*seconds, strict=True)]),
        "operations_bytes": peaks,
        "read_bytes": [statistics.median(read) for read, _ in moved],
        "written_bytes": [sum(written) for _, written in moved],
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs=2)
    parser.add_argument("--precision", choices=["exact", "mixed"], nargs=2, default=["mixed", "mixed"])
    parser.add_argument("--dtype", nargs=2, default=None)
    parser.add_argument(
        "--loss-chunk",
        nargs=2,
        default=["auto", "auto"],
        help="labelled tokens at a time of either side: auto, none or a number",
    )
    parser.add_argument("--buckets", type=int, default=None, help="number of blocks in host memory; by default all")
    parser.add_argument("--rank", type=int, default=None, help="rank of the directions; by default full-rank directions")
    parser.add_argument("--rate", default=None, help="bytes a second of a simulated slower disk, such as 1GB")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--labelled", type=int, default=None, help="number of labelled tokens at each row's end; by default all"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    chunks = {"auto": "auto", "none": None}
    sides: list[dict[str, Any]] = [
        {"path": path, "precision": precision, "loss_chunk": chunks[chunk] if chunk in chunks else int(chunk)}
        for path, precision, chunk in zip(options.directories, options.precision, options.loss_chunk, strict=True)
    ]
    for side, dtype in zip(sides, options.dtype or (), strict=False):
        side["dtype"] = dtype
    measured = {"sides": sides, **bench(sides, options), "machine": machine()}
    measured |= {key: getattr(options, key) for key in ("buckets", "rank", "rate", "rows", "tokens", "labelled", "steps")}
    columns = (measured[name] for name in ("seconds", "operations_bytes", "read_bytes"))
    for side, seconds, nbytes, read in zip(sides, *columns, strict=True):
        told = f"{side['path'].name} {side['precision']} {side['loss_chunk']}"
        print(
            f"{told:40s}{seconds['median']:8.3f} s [{seconds['min']:.3f} - {seconds['max']:.3f}]{nbytes / 1e6:10.1f} MB"
            f"{read / 1e9:8.3f} GB read"
        )
    ratio = measured["first_to_second"]
    print(f"first to second {ratio['median']:.3f} [{ratio['min']:.3f} - {ratio['max']:.3f}]")
    keep(measured, options.output)


if __name__ == "__main__":
    main()
