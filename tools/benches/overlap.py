"""Measure what overlap saves: a sweep against the slowest of its lanes, and against their sum.

    python tools/bench.py overlap --bus            # transfers over a simulated bus, as long as compute takes
    python tools/bench.py overlap --disk DIR       # blocks read from a checkpoint, written back every step
    python tools/bench.py overlap --gpu            # blocks in page-locked memory, and a GPU with its own bus

*Bus*: copies run in threads (``threaded_device.py``), at a rate at which all uploads of a sweep take about as long as its
compute. *Disk*: the serial side has one bucket, so nothing is read ahead. *GPU*: no block stays on the device. Times are of
whole steps, and the bound is the slowest lane's busy time. The losses of both sides have to be equal.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import geometries
from measuring import (
    WARM_UP,
    add_sizes,
    alternate,
    checkpoint,
    lanes_of,
    no_block_on_device,
    ratio,
    require_equal,
    spread,
    zeroth_order,
)
from synthetic import block_model, scaled
from threaded_device import ThreadedDevice, ThreadedStreams

from zo2adapters import open_checkpoint
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, HostPlan, MemoryPolicy, WriteBackPolicy
from zo2core.types import Batch, Lane, StepResult


def add_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--bus", action="store_true")
    which.add_argument("--disk", type=Path, metavar="DIR")
    which.add_argument("--gpu", action="store_true")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="dtype of the weights, with --gpu")
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-125m")
    add_sizes(parser, tokens=256, steps=7)


def compute_seconds(steps: list[StepResult]) -> list[float]:
    """The seconds of replays and forwards, which share a lane."""
    return [step.lanes[Lane.REPLAY].busy_seconds + step.lanes[Lane.EVALUATE].busy_seconds for step in steps]


def bus_rate(model: HFBlockModel, engine: Engine, batch: Batch) -> float:
    """Bytes a second at which the uploads of a sweep take as long as its compute."""
    nbytes = sum(layout.nbytes for layout in model.layouts if not layout.resident)
    return nbytes / min(compute_seconds([engine.step(batch) for _ in range(WARM_UP + 3)]))


def simulated_bus(rate: float) -> ThreadedDevice:
    """A device behind a bus of ``rate`` bytes a second in each direction."""
    return ThreadedDevice(ThreadedStreams(lambda lane, nbytes: nbytes / rate, poison=False))


def run(options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as opened:
        engines: dict[str, Engine] = {}
        rate = None
        if options.bus:
            directory = opened.enter_context(checkpoint(options.geometry, torch.float32))
            config = (model := open_checkpoint(directory)).config
            batch = random_batch(config.vocab_size, options.rows, options.tokens, seed=0)
            with Engine(model, zeroth_order()) as resident:
                rate = bus_rate(model, resident, batch)
            for name in ("serial", "overlapped"):
                device = opened.enter_context(closing(simulated_bus(rate)))
                overlap = name == "overlapped"
                memory = no_block_on_device() if overlap else MemoryPolicy()
                model = open_checkpoint(directory)
                engines[name] = Engine(model, zeroth_order(), device=device, memory=memory, overlap=overlap)
        elif options.gpu:
            config = scaled(geometries()[options.geometry], 1, options.tokens)
            for name in ("serial", "overlapped"):
                memory = no_block_on_device() if name == "overlapped" else MemoryPolicy()
                model, overlap = block_model(config, DTYPES[options.dtype]), name == "overlapped"
                engines[name] = Engine(model, zeroth_order(), memory=memory, overlap=overlap, device="cuda")
        else:
            runs = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            config = open_checkpoint(options.disk).config
            for name, buckets in (("serial", 1), ("overlapped", 4)):
                engines[name] = Engine(
                    open_checkpoint(options.disk),
                    zeroth_order(),
                    journal=runs / name / "journal.jsonl",
                    memory=MemoryPolicy(host=HostPlan((), budget=0, buckets=buckets, keep_noise=False)),
                    write_back=WriteBackPolicy(directory=runs / name, every=1),
                    overlap=name == "overlapped",
                )
        for engine in engines.values():
            opened.enter_context(engine)
        batch = random_batch(config.vocab_size, options.rows, options.tokens, seed=0)
        steps = {"serial": lambda: engines["serial"].step(batch), "overlapped": lambda: engines["overlapped"].step(batch)}
        measured = alternate(steps, options.steps)
    require_equal(measured, lambda step: step.losses)
    return {"bytes a second": rate} | {name: report(side.results) for name, side in measured.items()}


def report(steps: list[StepResult]) -> dict[str, Any]:
    """One side: seconds of steps and of their lanes, and the ratios of both."""
    seconds = [step.seconds for step in steps]
    lanes = [{lane: use.busy_seconds for lane, use in step.lanes.items()} for step in steps]
    for busy, compute in zip(lanes, compute_seconds(steps), strict=True):
        busy[Lane.EVALUATE], busy[Lane.REPLAY] = compute, 0.0
    return {
        "step": spread(seconds),
        **lanes_of(steps),
        "to the slowest lane": ratio(seconds, [max(busy.values()) for busy in lanes]),
        "to the sum of lanes": ratio(seconds, [sum(busy.values()) for busy in lanes]),
    }
