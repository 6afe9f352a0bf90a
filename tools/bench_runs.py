"""Measure runs that share their base: seconds a step of 1, 2, 4 and 8 runs, and of tuning as many learning rates.

    python tools/bench_runs.py opt-13b-nf4 --buckets 3 --rate 1GB --tokens 64
    python tools/bench_runs.py opt-13b-nf4 --buckets 3 --rate 1GB --tokens 64 --method adamw
    python tools/bench_runs.py opt-1.3b-nf4 --tokens 64

``--rate`` slows the reads to those of a slower disk; without ``--buckets`` all blocks are in memory. A step of so many runs
together and a step of one run alone alternate. ``--halving`` takes the steps of successive halving: all runs, then half of
them, and so on, together and one after the other. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_overlap import keep, machine, spread
from bench_queries import SlowReader

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.optional_package import optional_package
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, FirstOrder, HostPlan, LowRankPerturbation, MemoryPolicy, MeZOSGD, SharedBase, ZerothOrder
from zo2core.ranges import parse_size
from zo2core.types import Batch, Lane

RUNS = (1, 2, 4, 8)
WARM_UP = 1


def low_rank(options: argparse.Namespace, number: int, given: Mapping[str, Any]) -> Engine:
    """A run of zeroth-order steps with low-rank perturbations."""
    estimator = MeZOSGD(lr=1e-7 * (1 + number), zo_eps=1e-3, perturb_in_place=False)
    model = opened(options)
    return Engine(model, ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=options.rank), seed=number), **given)


def adamw(options: argparse.Namespace, number: int, given: Mapping[str, Any]) -> Engine:
    """A run of first-order steps of a LoRA adapter on all linear layers."""
    peft = optional_package("peft", install="zo2core[peft]")
    config = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    model = opened(options, adapter=Adapter(config=config, seed=number))
    return Engine(model, FirstOrder(partial(torch.optim.AdamW, lr=1e-5 * (1 + number))), **given)


METHODS: Mapping[str, Callable[..., Any]] = {"low-rank": low_rank, "adamw": adamw}


def opened(options: argparse.Namespace, **more: Any) -> HFBlockModel:
    """The model, whose reads are slowed."""
    model = open_checkpoint(options.directory, precision="exact", **more)
    if options.rate is not None:
        model.weights = SlowReader(model.weights, parse_size(options.rate))
    return model


class Together:
    """So many runs that share their base.

    Args:
        options: The command line.
        runs: Number of runs.
        opening: Closes them.
    """

    def __init__(self, options: argparse.Namespace, runs: int, opening: ExitStack) -> None:
        host = HostPlan((), 1 << 40, buckets=options.buckets, keep_noise=False)
        self._shared = opening.enter_context(SharedBase(opened(options), memory=MemoryPolicy(host=host)))
        make, given = METHODS[options.method], {"shared": self._shared}
        self._engines = [opening.enter_context(make(options, number, given)) for number in range(runs)]

    def step(self, batch: Batch, runs: int | None = None) -> tuple[float, int]:
        """Take a step of all runs, or of the first of them; returns seconds and bytes read."""
        began = time.perf_counter()
        results = self._shared.step(dict.fromkeys(self._engines[:runs], batch)).values()
        seconds = time.perf_counter() - began
        for result in results:
            if isinstance(result, Exception):
                raise result
        return seconds, max(result.lanes[Lane.READ].nbytes for result in results if not isinstance(result, Exception))


def alone(options: argparse.Namespace, opening: ExitStack) -> Any:
    """A run that does not share its base."""
    host = HostPlan((), 1 << 40, buckets=options.buckets, keep_noise=False)
    return opening.enter_context(METHODS[options.method](options, 0, {"memory": MemoryPolicy(host=host)}))


def bench(options: argparse.Namespace, batch: Batch) -> list[dict[str, Any]]:
    """Measure each number of runs, beside a run alone."""
    measured = []
    for runs in options.runs:
        with ExitStack() as opening:
            together, single = Together(options, runs, opening), alone(options, opening)
            seconds, apart, read = list[float](), list[float](), list[int]()
            for number in range(WARM_UP + options.steps):
                taken, nbytes = together.step(batch)
                began = time.perf_counter()
                single.step(batch)
                if number >= WARM_UP:
                    seconds.append(taken)
                    read.append(nbytes)
                    apart.append(time.perf_counter() - began)
        faster = [runs * one / all_ for one, all_ in zip(apart, seconds, strict=True)]
        measured.append(
            {
                "runs": runs,
                "seconds": spread(seconds),
                "seconds_of_one_alone": spread(apart),
                "times_faster_than_apart": spread(faster),
                "read_bytes": max(read),
            }
        )
    return measured


def halving(options: argparse.Namespace, batch: Batch) -> dict[str, Any]:
    """Seconds of successive halving, together and one run after the other; the latter's runs are one run's repeated."""
    left = [max(options.runs)]
    while left[-1] > 1:
        left.append(-(-left[-1] // 2))
    with ExitStack() as opening:
        together, single = Together(options, left[0], opening), alone(options, opening)
        for _ in range(WARM_UP):
            together.step(batch)
            single.step(batch)
        seconds = sum(together.step(batch, runs)[0] for runs in left for _ in range(options.steps))
        began = time.perf_counter()
        for _ in range(sum(left) * options.steps):
            single.step(batch)
        apart = time.perf_counter() - began
    return {"runs_in_rounds": left, "steps": options.steps, "seconds": seconds, "seconds_apart": apart}


def table(measured: Sequence[Mapping[str, Any]]) -> str:
    """The measurements as text."""
    lines = [f"{'runs':>4s} {'s a step of all':>24s} {'alone':>8s} {'times faster':>13s} {'read, GB':>9s}"]
    for row in measured:
        seconds, one, faster = (row[name] for name in ("seconds", "seconds_of_one_alone", "times_faster_than_apart"))
        shown = f"{seconds['median']:.3f} [{seconds['min']:.3f} - {seconds['max']:.3f}]"
        lines.append(
            f"{row['runs']:4d} {shown:>24s} {one['median']:8.3f} {faster['median']:13.2f} {row['read_bytes'] / 1e9:9.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--method", choices=sorted(METHODS), default="low-rank")
    parser.add_argument("--runs", type=int, nargs="+", default=RUNS, help="numbers of runs")
    parser.add_argument("--rank", type=int, default=2, help="rank of the perturbations, or of the adapters")
    parser.add_argument("--buckets", type=int, default=None, help="number of blocks in host memory; by default all")
    parser.add_argument("--rate", default=None, help="bytes a second of a simulated slower disk, such as 1GB")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--halving", action="store_true", help="measure successive halving, too")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    vocabulary = open_checkpoint(options.directory).config.vocab_size
    batch = random_batch(vocabulary, options.rows, options.tokens, seed=0)
    measured: dict[str, Any] = {"options": vars(options), "machine": machine(), "runs": bench(options, batch)}
    print(table(measured["runs"]))
    if options.halving:
        measured["halving"] = tuned = halving(options, batch)
        times = tuned["seconds_apart"] / tuned["seconds"]
        rounds = ", ".join(map(str, tuned["runs_in_rounds"]))
        print(
            f"rounds of {rounds} runs: {tuned['seconds']:.1f} s, one after the other {tuned['seconds_apart']:.1f} s: "
            f"{times:.2f} times faster"
        )
    keep(measured, options.output)


if __name__ == "__main__":
    main()
