"""Measure workers on one host: the speed of two against one, and the first step of a late one.

    python tools/bench_workers.py speed DIR --rows 4 --tokens 64
    python tools/bench_workers.py gradients DIR --rows 16 --tokens 40
    python tools/bench_workers.py late DIR --steps 1000

``speed`` pins each worker to a core of its own; one worker and two alternate with the same steps, and two shard a step's
directions. Their losses must be equal. ``gradients`` does the same with AdamW steps of a LoRA adapter; two workers split the
rows, so their losses differ from one worker's by rounding. ``late`` writes a journal of ``--steps`` steps and measures the
time from the start of a second worker without a journal to the end of its first step. Each prints a table and JSON.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measuring import keep
from peft import LoraConfig
from torch import distributed

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.allocator import SMALL, keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import Distribution, Engine, FirstOrder, Journal, MemoryPolicy, MultiQueryRGE, PhiloxNoise, Workers, ZerothOrder
from zo2core.types import StepResult


class Member:
    """A worker in a process of its own, which runs the functions sent to it.

    Args:
        options: The benchmark's options.
        rank: Rank of the worker, from 0.
        size: Number of workers.
        port: Port of the store, which rank 0 opens; 0 if there is one worker.
        core: CPU core to compute on; None leaves the choice to the system.
    """

    def __init__(self, options: argparse.Namespace, rank: int, size: int, port: int, core: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, options, rank, size, port, core), daemon=True)
        self.process.start()

    def send(self, *words: object) -> None:
        """Send it a request."""
        self._pipe.send(words)

    def answer(self) -> Any:
        """Wait for its answer."""
        return self._pipe.recv()


def serve(pipe: Connection, options: argparse.Namespace, rank: int, size: int, port: int, core: int | None) -> None:
    """The program of a worker's process."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    by_gradients = options.what == "gradients"
    adapter = Adapter(config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])) if by_gradients else None
    model = open_checkpoint(options.directory, dtype=options.dtype, adapter=adapter)
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    with ExitStack() as opened:
        workers = None
        if size > 1:
            split = "rows" if by_gradients else "directions"
            workers = opened.enter_context(connected(rank, size, port, split))
        engine: Engine
        engine = (first_order if by_gradients else zeroth_order)(model, options, workers)
        opened.callback(engine.close)
        pipe.send("ready")
        while (words := pipe.recv())[0] != "stop":
            if words[0] == "step":
                result = engine.step(batch)
                losses = (result.loss,) if isinstance(result, StepResult) else result.losses
                pipe.send((losses, sum(os.times()[:2])))


def zeroth_order(model: HFBlockModel, options: argparse.Namespace, workers: Workers | None) -> Engine:
    """The engine of ``speed`` and ``memory``."""
    estimator = MultiQueryRGE(lr=1e-6, zo_eps=1e-3, q=options.queries, perturb_in_place=False)
    noise, memory = PhiloxNoise(Distribution.RADEMACHER), MemoryPolicy(activations="64MiB")
    return Engine(model, ZerothOrder(estimator, noise=noise), memory=memory, workers=workers)


def first_order(model: HFBlockModel, options: argparse.Namespace, workers: Workers | None) -> Engine:
    """The engine of ``gradients``: memory for all graphs, and freed memory returned as by ``zo2 train``."""
    keep_freed_memory(SMALL)
    memory = MemoryPolicy(activations=options.activations)
    return Engine(model, FirstOrder(partial(torch.optim.AdamW, lr=1e-4)), memory=memory, workers=workers)


def connected(rank: int, size: int, port: int, split: str) -> Workers:
    """The workers of a run on this host."""
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    return Workers(distributed.group.WORLD, split=split, neighbours=size)


def free_port() -> int:
    """A free port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one worker and two on the same steps, in turn."""
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))[:2]
    alone = [Member(options, 0, 1, 0, cores[0])]
    pair = [Member(options, rank, 2, port, core) for rank, core in enumerate(cores)]
    for member in (*alone, *pair):
        member.answer()
    seconds: dict[str, list[float]] = {"one": [], "two": []}
    for number in range(options.steps + 1):
        losses = []
        for name, members in (("one", alone), ("two", pair)):
            began = time.perf_counter()
            for member in members:
                member.send("step")
            said = [member.answer() for member in members]
            if number:  # the first one reads the checkpoint
                seconds[name].append(time.perf_counter() - began)
            losses += [own for own, _ in said]
        assert losses[1] == losses[2], "the workers' losses differ"
        tolerance = 1e-4 if options.what == "gradients" else 0.0  # sums over halves are rounded differently
        pairs = zip(losses[0], losses[1], strict=True)
        assert all(math.isclose(*pair, rel_tol=tolerance) for pair in pairs), "one worker's losses differ from those of two"
    for member in (*alone, *pair):
        member.send("stop")
    ratios = [one / two for one, two in zip(seconds["one"], seconds["two"], strict=True)]
    return {"seconds": {name: spread(values) for name, values in seconds.items()}, "times_faster": spread(ratios)}


def late(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a second worker that joins, without a journal, a worker with a journal of many steps."""
    seconds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(late_seconds(options, Path(folder)))
    return {"steps_missed": options.steps, "seconds": spread(seconds)}


def late_seconds(options: argparse.Namespace, folder: Path) -> float:
    """The seconds from the second worker's start to the end of its first step, without the start of its program."""
    estimator = MultiQueryRGE(lr=1e-6, zo_eps=1e-3, q=options.queries, perturb_in_place=False)
    first, model = folder / "first.jsonl", open_checkpoint(options.directory, dtype=options.dtype)
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    noise = PhiloxNoise(Distribution.RADEMACHER)
    with Engine(model, ZerothOrder(estimator, noise=noise), journal=first) as engine:
        engine.step(batch)
        update = engine.journal.updates[0]
    journal = Journal(first)
    for step in range(1, options.steps):
        seeds = [step * 1000 + number for number in range(options.queries)]
        pairs = [side._replace(seed=seeds[number // 2]) for number, side in enumerate(update.evaluations)]
        journal.append(replace(update, step=step, evaluations=tuple(pairs), seeds=tuple(seeds)))
    journal.close()
    port = free_port()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=come_late, args=(theirs, options, port, folder / "second.jsonl"), daemon=True)
    process.start()
    pipe.recv()  # its program has started
    model = open_checkpoint(options.directory, dtype=options.dtype)
    pipe.send("begin")
    with (
        connected(0, 2, port, "directions") as workers,
        Engine(model, ZerothOrder(estimator, noise=noise), journal=first, workers=workers) as engine,
    ):
        engine.step(batch)
        taken = float(pipe.recv())
    distributed.destroy_process_group()
    process.join()
    return taken


def come_late(pipe: Connection, options: argparse.Namespace, port: int, journal: Path) -> None:
    """The worker without a journal."""
    torch.set_num_threads(1)
    pipe.send("started")
    pipe.recv()
    began = time.perf_counter()
    estimator = MultiQueryRGE(lr=1e-6, zo_eps=1e-3, q=options.queries, perturb_in_place=False)
    model = open_checkpoint(options.directory, dtype=options.dtype)
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    noise = PhiloxNoise(Distribution.RADEMACHER)
    with (
        connected(1, 2, port, "directions") as workers,
        Engine(model, ZerothOrder(estimator, noise=noise), journal=journal, workers=workers) as engine,
    ):
        engine.step(batch)
        pipe.send(time.perf_counter() - began)


def spread(values: list[float]) -> dict[str, float]:
    """The median and range of values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(measured: dict[str, Any]) -> str:
    """Format the measurements, one on each line."""
    lines = []
    for name, value in measured.items():
        if isinstance(value, dict) and "median" in value:
            lines.append(f"{name:24s} {value['median']:10.3f}   {value['min']:.3f} to {value['max']:.3f}")
        elif isinstance(value, dict):
            lines += [f"{name} {line}" for line in table(value).splitlines()]
        else:
            lines.append(f"{name:24s} {value:>10}" if isinstance(value, int) else f"{name:24s} {value:10.3f}")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "gradients", "late"])
    parser.add_argument("directory", type=Path, help="directory of a checkpoint")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--activations", default="1500MiB", help="memory for inputs and graphs, with gradients")
    parser.add_argument("--output", type=Path, default=None, help="file for the JSON")
    options = parser.parse_args()
    measured = {"speed": speed, "gradients": speed, "late": late}[options.what](options)
    print(table(measured), file=sys.stderr)
    asked = {name: getattr(options, name) for name in ("what", "rows", "tokens", "queries", "steps", "dtype")}
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    keep({**asked, "directory": options.directory.name, "machine": machine, **measured}, options.output)


if __name__ == "__main__":
    main()
