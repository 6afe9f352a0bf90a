"""Time steps whose freed memory stays with the allocator against steps whose freed memory returns to the system.

    python tools/bench.py malloc --rounds 3 --steps 10

SmolLM2-135M's geometry in bfloat16, all blocks in memory. Both sides alternate, in processes of their own, and their losses
have to be equal. Memory is that after the last step, and the peak.
"""

from __future__ import annotations

import argparse
import resource
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import add_sizes, alternate, checkpoint, in_process, require_equal, spread, timed, zeroth_order

from zo2adapters import open_checkpoint
from zo2adapters.trainers.allocator import keep_freed_memory, peak_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine

WARM_UP = 2  # steps of a process


def add_options(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, rows=16, tokens=40, steps=10)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")


def steps_of(directory: Path, rows: int, tokens: int, steps: int, *, keeps: bool) -> dict[str, float]:
    model = open_checkpoint(directory)
    batch = random_batch(model.config.vocab_size, rows, tokens, seed=0)
    with Engine(model, zeroth_order()) as engine:
        if keeps:
            assert keep_freed_memory(), "no glibc"
        for _ in range(WARM_UP):
            engine.step(batch)
        before = resource.getrusage(resource.RUSAGE_SELF)
        seconds, losses = timed(lambda: [engine.step(batch).loss for _ in range(steps)])
        after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step": seconds / steps,
        "kernel's CPU seconds a step": (after.ru_stime - before.ru_stime) / steps,
        "page faults a step": (after.ru_minflt - before.ru_minflt) / steps,
        "resident_bytes": psutil.Process().memory_info().rss,
        "peak_bytes": peak_memory(),
        "loss": losses[-1],
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    with checkpoint("smollm2-135m", torch.bfloat16) as base:
        work = partial(in_process, steps_of, base, options.rows, options.tokens, options.steps)
        sides = {"given back": partial(work, keeps=False), "kept": partial(work, keeps=True)}
        measured = alternate(sides, options.rounds, warm_up=0)
    require_equal(measured, lambda found: found["loss"])
    return {
        name: {key: spread([found[key] for found in side.results]) for key in side.results[0]}
        for name, side in measured.items()
    }
