"""Measure two workers on one host against one.

    python tools/bench.py workers speed DIR --rows 4 --tokens 64
    python tools/bench.py workers gradients DIR --rows 16 --tokens 40

Each worker is pinned to a core of its own; one worker and two alternate with the same steps. ``speed``: two shard a step's
directions, and their losses must be equal. ``gradients``: AdamW steps of a LoRA adapter, whose rows two workers split, so
that their losses differ from one worker's by rounding.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import socket
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measuring import add_sizes, alternate, lora, seconds_of, times_faster, zeroth_order
from torch import distributed

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.trainers.allocator import SMALL, keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, FirstOrder, MemoryPolicy, Workers
from zo2core.types import Batch


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["speed", "gradients"])
    parser.add_argument("directory", type=Path, help="directory of a checkpoint")
    add_sizes(parser, rows=4, steps=7)
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--activations", default="1500MiB", help="memory for inputs and graphs, with gradients")


class Process:
    """A process that runs ``work`` with one end of a pipe, which it tells the other end about."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        context.Process(target=work, args=(theirs, *arguments), daemon=True).start()


def connected(rank: int, size: int, port: int, split: str = "directions") -> Workers:
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    return Workers(distributed.group.WORLD, split=split, neighbours=size)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def opened_engine(options: argparse.Namespace, workers: Workers | None) -> tuple[Engine, Batch]:
    """A worker's engine, and the batch of all steps."""
    adapter, given = None, dict[str, Any]()
    method: Any = zeroth_order(queries=options.queries)
    if options.what == "gradients":
        keep_freed_memory(SMALL)
        adapter = Adapter(config=lora())
        method = FirstOrder(partial(torch.optim.AdamW, lr=1e-4))
        given["memory"] = MemoryPolicy(activations=options.activations)
    else:
        given["memory"] = MemoryPolicy(activations="64MiB")
    model = open_checkpoint(options.directory, dtype=options.dtype, adapter=adapter)
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    return Engine(model, method, workers=workers, **given), batch


def serve(pipe: Connection, options: argparse.Namespace, rank: int, size: int, port: int, core: int) -> None:
    """A worker that takes a step for each message, and tells its losses."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    split = "rows" if options.what == "gradients" else "directions"
    with ExitStack() as opened:
        workers = opened.enter_context(connected(rank, size, port, split)) if size > 1 else None
        engine, batch = opened_engine(options, workers)
        opened.enter_context(engine)
        pipe.send("ready")
        while pipe.recv() == "step":
            result: Any = engine.step(batch)
            pipe.send((result.loss,) if options.what == "gradients" else result.losses)


def run(options: argparse.Namespace) -> dict[str, Any]:
    port, cores = free_port(), sorted(os.sched_getaffinity(0))[:2]
    crews = {"one": [Process(serve, options, 0, 1, 0, cores[0])]}
    crews["two"] = [Process(serve, options, rank, 2, port, core) for rank, core in enumerate(cores)]
    for worker in itertools.chain(*crews.values()):
        worker.pipe.recv()

    def step(crew: list[Process]) -> list[Any]:
        for worker in crew:
            worker.pipe.send("step")
        return [worker.pipe.recv() for worker in crew]

    # The first one reads the checkpoint.
    measured = alternate({name: partial(step, crew) for name, crew in crews.items()}, options.steps, warm_up=1)
    for worker in itertools.chain(*crews.values()):
        worker.pipe.send("stop")
    tolerance = 1e-4 if options.what == "gradients" else 0.0  # sums over halves are rounded differently
    for [one], two in zip(measured["one"].results, measured["two"].results, strict=True):
        assert two[0] == two[1], "the workers' losses differ"
        assert all(map(partial(math.isclose, rel_tol=tolerance), one, two[0])), (
            "one worker's losses differ from those of two"
        )
    return {"seconds": seconds_of(measured), "times faster": times_faster(measured, "two", "one")}
