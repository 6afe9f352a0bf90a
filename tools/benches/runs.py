"""Measure runs that share their base: a step of 1, 2, 4 and 8 runs against as many steps of one run alone.

    python tools/bench.py runs opt-13b-nf4 --buckets 3 --rate 1GB --tokens 64
    python tools/bench.py runs opt-13b-nf4 --buckets 3 --rate 1GB --tokens 64 --method adamw
    python tools/bench.py runs opt-1.3b-nf4 --tokens 64

``--rate`` slows the reads to those of a slower disk; without ``--buckets`` all blocks are in memory. ``--halving`` takes the
steps of successive halving: all runs, then half of them, and so on, together and one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import add_sizes, alternate, memory_of, ratio, spread, timed, zeroth_order
from peft import LoraConfig
from synthetic import slowed

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, FirstOrder, SharedBase
from zo2core.types import Batch, Lane


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path)
    parser.add_argument("--method", choices=["low-rank", "adamw"], default="low-rank", help="adamw trains LoRA adapters")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of runs")
    parser.add_argument("--rank", type=int, default=2, help="rank of the perturbations, or of the adapters")
    parser.add_argument("--buckets", type=int, help="number of blocks in host memory; by default all")
    parser.add_argument("--rate", help="bytes a second of a simulated slower disk, such as 1GB")
    add_sizes(parser, steps=3)
    parser.add_argument("--halving", action="store_true", help="measure successive halving, too")


def opened_model(options: argparse.Namespace, adapter: Adapter | None = None) -> HFBlockModel:
    return slowed(open_checkpoint(options.directory, precision="exact", adapter=adapter), options.rate)


def engine_of(options: argparse.Namespace, number: int, **given: Any) -> Engine:
    """A run with a learning rate and a seed of its own."""
    if options.method == "low-rank":
        method = zeroth_order(lr=1e-7 * (1 + number), rank=options.rank, seed=number)
        return Engine(opened_model(options), method, **given)
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    model = opened_model(options, Adapter(config=config, seed=number))
    return Engine(model, FirstOrder(partial(torch.optim.AdamW, lr=1e-5 * (1 + number))), **given)


class Together:
    """So many runs that share their base, and one that does not."""

    def __init__(self, options: argparse.Namespace, runs: int, opened: ExitStack) -> None:
        memory = memory_of(options.buckets)
        self._shared = opened.enter_context(SharedBase(opened_model(options), memory=memory))
        self._engines = [opened.enter_context(engine_of(options, number, shared=self._shared)) for number in range(runs)]
        self.single = opened.enter_context(engine_of(options, 0, memory=memory))

    def step(self, batch: Batch, runs: int | None = None) -> int:
        """Take a step of all runs, or of the first of them; returns the bytes read."""
        nbytes = 0
        for result in self._shared.step(dict.fromkeys(self._engines[:runs], batch)).values():
            if isinstance(result, Exception):
                raise result
            nbytes = max(nbytes, result.lanes[Lane.READ].nbytes)
        return nbytes


def run(options: argparse.Namespace) -> dict[str, Any]:
    vocabulary = open_checkpoint(options.directory).config.vocab_size
    batch = random_batch(vocabulary, options.rows, options.tokens, seed=0)
    measured = {}
    for runs in options.runs:
        with ExitStack() as opened:
            runs_together = Together(options, runs, opened)
            works: dict[str, Callable[[], Any]] = {
                "together": partial(runs_together.step, batch),
                "alone": partial(runs_together.single.step, batch),
            }
            sides = alternate(works, options.steps, warm_up=1)
        seconds, apart = sides["together"].seconds, [runs * one for one in sides["alone"].seconds]
        measured[f"{runs} runs"] = {
            "step of all": spread(seconds),
            "step of one alone": spread(sides["alone"].seconds),
            "times faster than apart": ratio(apart, seconds),
            "read_bytes": max(sides["together"].results),
        }
    return measured | ({"halving": halving(options, batch)} if options.halving else {})


def halving(options: argparse.Namespace, batch: Batch) -> dict[str, Any]:
    """Seconds of successive halving, together and one run after the other; the latter's runs are one run's repeated."""
    left = [max(options.runs)]
    while left[-1] > 1:
        left.append(-(-left[-1] // 2))
    with ExitStack() as opened:
        together = Together(options, left[0], opened)
        together.step(batch)
        together.single.step(batch)
        seconds, _ = timed(lambda: [together.step(batch, runs) for runs in left for _ in range(options.steps)])
        apart, _ = timed(lambda: [together.single.step(batch) for _ in range(sum(left) * options.steps)])
    return {"runs in rounds": left, "seconds": seconds, "seconds apart": apart, "times faster": apart / seconds}
