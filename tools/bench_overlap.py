"""Measure what overlap saves: a sweep against the slowest of its lanes, and against their sum.

    python tools/bench_overlap.py --bus            # transfers over a simulated bus, as long as compute takes
    python tools/bench_overlap.py --disk DIR       # blocks read from a checkpoint, written back every step
    python tools/bench_overlap.py --gpu            # blocks in page-locked memory, and a GPU with its own bus

*Bus*: copies run in threads at a rate (``threaded_device.py``) at which all uploads of a sweep take about as long as its
compute. *Disk*: blocks are read from a checkpoint and written back to a scratch file; with the chosen tokens disk and
compute take about equally long. The serial side has one bucket, so nothing is read ahead. *GPU*: no block stays on the
device; the number of tokens decides whether the bus or compute is slower. Both sides alternate in one process. Prints a
table and JSON; times are of whole steps, and the bound is the slowest lane's busy time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import geometries, make_checkpoint
from paper_models import block_model, scaled
from threaded_device import ThreadedDevice, ThreadedStreams

from zo2adapters import open_checkpoint
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    DevicePlan,
    Distribution,
    Engine,
    HostPlan,
    MemoryPolicy,
    MeZOSGD,
    PhiloxNoise,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.types import Batch, Lane, StepResult

WARM_UP = 2  # steps


def machine() -> dict[str, Any]:
    """The machine that this runs on, as JSON values."""
    return {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}


def estimator() -> MeZOSGD:
    """The estimator of both sides."""
    return MeZOSGD(lr=1e-6, zo_eps=1e-3, perturb_in_place=False)


@contextmanager
def on_a_bus(directory: Path, rate: float, *, overlap: bool) -> Iterator[Engine]:
    """An engine with a simulated bus of ``rate`` bytes a second in each direction."""
    device = ThreadedDevice(ThreadedStreams(lambda lane, nbytes: nbytes / rate, poison=False))
    noise = PhiloxNoise(Distribution.RADEMACHER)
    with (
        closing(device),
        Engine(open_checkpoint(directory), ZerothOrder(estimator(), noise=noise), device=device, overlap=overlap) as engine,
    ):
        yield engine


def from_disk(directory: Path, run: Path, *, overlap: bool) -> Engine:
    """An engine whose blocks are read from disk and written back in every step."""
    buckets = 4 if overlap else 1
    return Engine(
        open_checkpoint(directory),
        ZerothOrder(estimator(), noise=PhiloxNoise(Distribution.RADEMACHER)),
        journal=run / "journal.jsonl",
        memory=MemoryPolicy(host=HostPlan((), budget=0, buckets=buckets, keep_noise=False)),
        write_back=WriteBackPolicy(directory=run, every=1),
        overlap=overlap,
    )


def lanes_of(step: StepResult) -> dict[str, float]:
    """The busy seconds of lanes; replay and forwards are one lane, as are reads and writes of the disk."""
    busy = {lane: use.busy_seconds for lane, use in step.lanes.items()}
    return {
        "compute": busy[Lane.REPLAY] + busy[Lane.EVALUATE],
        "upload": busy[Lane.UPLOAD],
        "offload": busy[Lane.OFFLOAD],
        "read": busy[Lane.READ],
        "write": busy[Lane.WRITE],
    }


def spread(values: list[float]) -> dict[str, float]:
    """The median and range of values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def keep(measured: dict[str, Any], output: Path | None, *, indent: int | None = None) -> None:
    """Write the measurements as JSON, or print them if there is no file."""
    text = json.dumps(measured, indent=indent, default=str)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")


def compare(serial: Engine, overlapped: Engine, batch: Batch, steps: int) -> dict[str, Any]:
    """Take steps on both sides in turn; their losses must be equal."""
    measured: dict[str, list[StepResult]] = {"serial": [], "overlapped": []}
    for number in range(WARM_UP + steps):
        for name, engine in (("serial", serial), ("overlapped", overlapped)):
            result = engine.step(batch)
            if number >= WARM_UP:
                measured[name].append(result)
        if measured["serial"]:
            assert measured["serial"][-1].losses == measured["overlapped"][-1].losses, "the schedulers differ"
    report: dict[str, Any] = {}
    for name, results in measured.items():
        lanes = [lanes_of(result) for result in results]
        report[name] = {
            "seconds": spread([result.seconds for result in results]),
            "lanes": {lane: spread([seconds[lane] for seconds in lanes]) for lane in lanes[0]},
            "against_slowest_lane": spread(
                [result.seconds / max(busy.values()) for result, busy in zip(results, lanes, strict=True)]
            ),
            "against_sum_of_lanes": spread(
                [result.seconds / sum(busy.values()) for result, busy in zip(results, lanes, strict=True)]
            ),
        }
    return report


def bench_bus(geometry: str, rows: int, tokens: int, steps: int) -> dict[str, Any]:
    """Measure a bus whose transfers take about as long as compute."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        make_checkpoint(geometries()[geometry], directory, dtype=torch.float32)
        model = open_checkpoint(directory)
        nbytes = sum(layout.nbytes for layout in model.layouts if not layout.resident)
        batch = random_batch(model.config.vocab_size, rows, tokens, seed=0)
        with Engine(model, ZerothOrder(estimator(), noise=PhiloxNoise(Distribution.RADEMACHER))) as engine:
            compute = min(lanes_of(engine.step(batch))["compute"] for _ in range(WARM_UP + 3))
        rate = nbytes / compute
        with (
            on_a_bus(directory, rate, overlap=False) as serial,
            on_a_bus(directory, rate, overlap=True) as overlapped,
        ):
            measured = compare(serial, overlapped, batch, steps)
    return {
        "what": "simulated bus",
        "geometry": geometry,
        "rows": rows,
        "tokens": tokens,
        "bytes_per_second": rate,
        **measured,
    }


def bench_disk(directory: Path, rows: int, tokens: int, steps: int, folder: Path | None) -> dict[str, Any]:
    """Measure blocks that are read from a checkpoint and written back to scratch."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as runs,
        from_disk(directory, Path(runs) / "serial", overlap=False) as serial,
        from_disk(directory, Path(runs) / "overlapped", overlap=True) as overlapped,
    ):
        batch = random_batch(open_checkpoint(directory).config.vocab_size, rows, tokens, seed=0)
        measured = compare(serial, overlapped, batch, steps)
    return {"what": "disk", "directory": directory.name, "rows": rows, "tokens": tokens, **measured}


def bench_gpu(geometry: str, rows: int, tokens: int, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """Measure a GPU to which all blocks are copied, and back, in each step."""
    config = scaled(geometries()[geometry], 1, tokens)

    def engine(*, overlap: bool) -> Engine:
        plan = DevicePlan((), 1 << 40, kept=0, activation_bytes=1 << 30)
        return Engine(
            block_model(config, dtype),
            ZerothOrder(estimator(), noise=PhiloxNoise(Distribution.RADEMACHER)),
            memory=MemoryPolicy(device=plan if overlap else "auto"),
            overlap=overlap,
            device="cuda",
        )

    with engine(overlap=False) as serial, engine(overlap=True) as overlapped:
        measured = compare(serial, overlapped, random_batch(config.vocab_size, rows, tokens, seed=0), steps)
    gpu = torch.cuda.get_device_name(0)
    return {"what": gpu, "geometry": geometry, "dtype": str(dtype), "rows": rows, "tokens": tokens, **measured}


def table(measured: dict[str, Any]) -> str:
    """Format the results as a table."""
    lines = [
        f"{'':12s}{'step':>8s}"
        + "".join(f"{lane:>10s}" for lane in measured["serial"]["lanes"])
        + f"{'/ slowest':>11s}{'/ sum':>8s}"
    ]
    for name in ("serial", "overlapped"):
        side = measured[name]
        lanes = "".join(f"{lane['median']:10.3f}" for lane in side["lanes"].values())
        slowest, whole = side["against_slowest_lane"]["median"], side["against_sum_of_lanes"]["median"]
        lines.append(f"{name:12s}{side['seconds']['median']:8.3f}{lanes}{slowest:11.3f}{whole:8.3f}")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--bus", action="store_true")
    which.add_argument("--disk", type=Path, metavar="DIR")
    which.add_argument("--gpu", action="store_true")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="dtype of the weights, with --gpu")
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-125m")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="folder for the runs' files; a temporary one by default")
    options = parser.parse_args()
    if options.bus:
        measured = bench_bus(options.geometry, options.rows, options.tokens, options.steps)
    elif options.gpu:
        measured = bench_gpu(options.geometry, options.rows, options.tokens, options.steps, DTYPES[options.dtype])
    else:
        measured = bench_disk(options.disk, options.rows, options.tokens, options.steps, options.folder)
    measured["machine"] = machine()
    print(table(measured))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
