"""Time the first step of a run that is resumed from a long journal against a step of a run without a journal.

    python tools/bench.py resume opt-125m --rank 2
    python tools/bench.py resume opt-1.3b-bf16 --buckets 3 --rank 2 --tokens 64
    python tools/bench.py resume opt-125m --rank 2 --journal-alone

The journal has updates of low-rank directions, made from synthetic losses, and one step that saves its ended periods. A side
opens an engine with or without a copy of the run and takes two steps; with ``--journal-alone`` the copy has no saved
periods, and all updates are replayed. The second step of the side without a journal is the time of a sweep.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from measuring import add_sizes, alternate, memory_of, ratio, spread, timed, zeroth_order

from benches.compare import Measured, side_parser
from zo2adapters import HFBlockModel
from zo2adapters.trainers.process import keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import Distribution, Engine, WriteBackPolicy
from zo2core.perturbation import BESIDE_UP_TO
from zo2core.types import Batch, Lane, trained


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint, or geometry with synthetic weights in float32")
    parser.add_argument("--buckets", type=int, help="number of blocks in host memory; by default all")
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--period", type=int, default=100)
    parser.add_argument("--updates", type=int, default=1000, help="updates in the journal")
    parser.add_argument("--journal-alone", action="store_true", help="resume without the saved periods")
    add_sizes(parser)


def opened_model(options: argparse.Namespace) -> HFBlockModel:
    return Measured(options, side_parser().parse_args([]), options.rows, options.tokens).model()


def opened_engine(model: HFBlockModel, options: argparse.Namespace, run: Path | None) -> Engine:
    """An engine with low-rank directions and the options that both sides share."""
    return Engine(
        model,
        zeroth_order(rank=options.rank, period=options.period, noise=Distribution.GAUSSIAN),
        journal=None if run is None else run / "journal.jsonl",
        write_back=None if run is None else WriteBackPolicy(directory=run),
        memory=memory_of(options.buckets),
    )


def write_run(run: Path, options: argparse.Namespace, batch: Batch) -> None:
    """Add updates with synthetic losses, without a sweep, and then a step that ends the periods."""
    losses, model = random.Random(0), opened_model(options)
    with closing(model.weights), opened_engine(model, options, run) as engine:
        for _ in range(options.updates - 1):
            engine.ask()
            engine.tell([5 + losses.gauss(0, 1e-2), 5 + losses.gauss(0, 1e-2)])
        engine.step(batch)
        engine.evaluate([batch])  # ends the last period


def started(options: argparse.Namespace, run: Path | None, batch: Batch) -> dict[str, float]:
    """Open an engine and take two steps; the seconds of each, and of replaying in the first step."""
    model = opened_model(options)
    with closing(model.weights):
        opening, engine = timed(lambda: opened_engine(model, options, run))
        with engine:
            first, result = timed(lambda: engine.step(batch))
            second, _ = timed(lambda: engine.step(batch))
    replay = result.lanes[Lane.REPLAY].busy_seconds
    return {"open": opening, "first step": first, "second step": second, "replay in the first": replay}


def run(options: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()  # as zo2 train does
    model = opened_model(options)
    inputs = [spec.shape[1] for spec in trained(model.layouts) if len(spec.shape) == 2]
    model.weights.close()
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    columns = options.updates // options.period * options.rank  # of past periods
    with tempfile.TemporaryDirectory() as folder:
        original, copy = Path(folder, "run"), Path(folder, "copy")
        seconds, _ = timed(lambda: write_run(original, options, batch))
        kept = sum(path.stat().st_size for path in original.glob("factors.*"))

        def resumed() -> dict[str, float]:
            left_out = shutil.ignore_patterns("factors.*") if options.journal_alone else None
            shutil.copytree(original, copy, ignore=left_out)
            try:
                return started(options, copy, batch)
            finally:
                shutil.rmtree(copy)

        measured = alternate(
            {"without": lambda: started(options, None, batch), "resumed": resumed}, options.steps, warm_up=1
        )
    found = {
        name: {key: [result[key] for result in side.results] for key in side.results[0]} for name, side in measured.items()
    }
    without, resumed_ = found["without"], found["resumed"]
    from_opening = [[a + b for a, b in zip(side["open"], side["first step"], strict=True)] for side in (resumed_, without)]
    return {
        "columns of past periods": columns,
        "matrices": len(inputs),
        "matrices that are formed": sum(columns > BESIDE_UP_TO * inputs_ for inputs_ in inputs),
        "seconds of writing the run": seconds,
        "kept_bytes": kept,
        "first to first": ratio(resumed_["first step"], without["first step"]),
        "first to sweep": ratio(resumed_["first step"], without["second step"]),
        "from opening": ratio(*from_opening),
        "second to second": ratio(resumed_["second step"], without["second step"]),
        "seconds": {name: {key: spread(values) for key, values in side.items()} for name, side in found.items()},
    }
