"""Time the first step of a run that is resumed from a long journal against a step of a run without a journal.

    python tools/bench_resume.py --rank 2 --output resume.json
    python tools/bench_resume.py --rank 8 --tokens 256
    python tools/bench_resume.py --directory opt-1.3b-bf16 --buckets 3 --rank 2 --tokens 64
    python tools/bench_resume.py --rank 2 --journal-alone

The journal has updates of low-rank directions, made from synthetic losses, and one step that saves its ended periods. Both
sides alternate in one process: an engine is opened with or without a copy of the run and takes two steps; with
``--journal-alone`` the copy has no saved periods, and all updates are replayed. The second step of the side without a
journal is the time of a sweep. Weights are synthetic (``paper_models.py``) unless ``--directory`` is given. Prints a table
and JSON: medians, and ranges of the ratios of consecutive measurements.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from make_checkpoint import geometries
from measuring import keep, machine, spread
from synthetic import block_model, scaled

from zo2adapters import HFBlockModel, open_checkpoint
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.allocator import keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    Distribution,
    Engine,
    HostPlan,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    PhiloxNoise,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.perturbation.factor_store import BESIDE_UP_TO
from zo2core.types import Batch, Lane, trained

JOURNAL = "journal.jsonl"


class Begin(NamedTuple):
    """The seconds of a run's start."""

    open: float  # opening the engine with its journal
    first: float  # first step
    second: float
    replay: float  # busy replaying in the first step


def opened_model(options: argparse.Namespace) -> HFBlockModel:
    """The model of the checkpoint, or one with synthetic weights."""
    if options.directory is not None:
        return open_checkpoint(options.directory)
    return block_model(scaled(geometries()[options.geometry], options.scale, options.tokens), DTYPES[options.dtype])


def opened_engine(model: HFBlockModel, options: argparse.Namespace, run: Path | None) -> Engine:
    """An engine with low-rank directions and the options that both sides share."""
    few = MemoryPolicy(host=HostPlan((), 1 << 40, buckets=options.buckets, keep_noise=False))
    return Engine(
        model,
        ZerothOrder(
            MeZOSGD(lr=1e-6, zo_eps=1e-3, perturb_in_place=False),
            noise=PhiloxNoise(Distribution(options.noise)),
            perturbation=LowRankPerturbation(rank=options.rank, period=options.period),
        ),
        journal=None if run is None else run / JOURNAL,
        write_back=None if run is None else WriteBackPolicy(directory=run),
        memory=MemoryPolicy() if options.buckets is None else few,
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


def begin(options: argparse.Namespace, run: Path | None, batch: Batch) -> Begin:
    """Open an engine and take two steps."""
    model = opened_model(options)
    with closing(model.weights):
        began = time.perf_counter()
        with opened_engine(model, options, run) as engine:
            opened = time.perf_counter()
            result = engine.step(batch)
            first = time.perf_counter()
            engine.step(batch)
            return Begin(opened - began, first - opened, time.perf_counter() - first, result.lanes[Lane.REPLAY].busy_seconds)


def columns(options: argparse.Namespace) -> dict[str, int]:
    """The number of past periods when the run is resumed, and of the matrices that are formed for them."""
    past = options.updates // options.period * options.rank
    model = opened_model(options)
    with closing(model.weights):
        inputs = [spec.shape[1] for spec in trained(model.layouts) if len(spec.shape) == 2]
    formed = sum(past > BESIDE_UP_TO * columns for columns in inputs)
    return {"columns": past, "matrices": len(inputs), "formed": formed}


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turn."""
    resumed: list[Begin] = []
    fresh: list[Begin] = []
    model = opened_model(options)
    model.weights.close()
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run, copy = Path(folder) / "run", Path(folder) / "copy"
        began = time.perf_counter()
        write_run(run, options, batch)
        written, kept = time.perf_counter() - began, sum(path.stat().st_size for path in run.glob("factors.*"))
        for number in range(1 + options.rounds):
            shutil.copytree(run, copy, ignore=shutil.ignore_patterns("factors.*") if options.journal_alone else None)
            pair = begin(options, None, batch), begin(options, copy, batch)
            shutil.rmtree(copy)
            if number > 0:  # the first round warms up
                fresh.append(pair[0])
                resumed.append(pair[1])
    sides = {
        name: {field: spread([getattr(begun, field) for begun in side]) for field in Begin._fields}
        for name, side in (("without", fresh), ("resumed", resumed))
    }
    pairs = list(zip(resumed, fresh, strict=True))
    return {
        **sides,
        "run_seconds": written,
        "kept_bytes": kept,
        "first_to_first": spread([own.first / other.first for own, other in pairs]),
        "first_to_sweep": spread([own.first / other.second for own, other in pairs]),
        "from_opening": spread([(own.open + own.first) / (other.open + other.first) for own, other in pairs]),
        "second_to_second": spread([own.second / other.second for own, other in pairs]),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-125m")
    parser.add_argument("--scale", type=int, default=1, help="divides width, heads and vocabulary")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="dtype of synthetic weights")
    parser.add_argument("--directory", type=Path, help="checkpoint to use instead of synthetic weights")
    parser.add_argument("--buckets", type=int, help="number of blocks in host memory; by default all")
    parser.add_argument("--noise", choices=[kind.value for kind in Distribution], default=Distribution.GAUSSIAN.value)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--period", type=int, default=100)
    parser.add_argument("--updates", type=int, default=1000, help="updates in the journal")
    parser.add_argument("--journal-alone", action="store_true", help="resume without the saved periods")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="number of torch threads; by default all cores")
    parser.add_argument("--folder", type=Path, help="folder for the journals; a temporary one by default")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    keep_freed_memory()  # as zo2 train does
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    measured: dict[str, Any] = {"machine": machine(), **columns(options), **bench(options)}
    measured |= {key: value for key, value in vars(options).items() if key not in ("output", "folder", "columns")}
    print(f"{'':10s}{'open':>9s}{'first':>9s}{'second':>9s}{'replay':>9s}")
    for name in ("without", "resumed"):
        print(f"{name:10s}" + "".join(f"{measured[name][field]['median']:8.3f}s" for field in Begin._fields))
    for name in ("first_to_first", "first_to_sweep", "from_opening", "second_to_second"):
        ratio = measured[name]
        print(f"{name:18s}{ratio['median']:7.3f} [{ratio['min']:.3f} - {ratio['max']:.3f}]")
    keep(measured, options.output)


if __name__ == "__main__":
    main()
