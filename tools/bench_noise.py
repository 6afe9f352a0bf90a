"""Measure noise and one-pass arithmetic on this CPU: numbers a second, and bytes a second compared with memcpy.

    python tools/bench_noise.py
    python tools/bench_noise.py --dtype bfloat16

Prints a table and JSON: medians over the rounds with their range. The programs alternate, each on one thread and then on two
that share the work. Noise is drawn into a buffer that fits the cache; weights are larger than any cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from zo2adapters.models.checkpoint import DTYPES
from zo2core import Distribution
from zo2core.kernels import apply_drawing, native, philox
from zo2core.types import Descend, Perturb, Program

PIECE = 32768  # elements of noise drawn at once
SHARE = 1 << 18  # elements of weights processed at once
THREADS = 2

Work = Callable[[int, int], None]  # (thread, which piece)


def drawing(dtype: torch.dtype) -> dict[str, Work]:
    """The programs that draw ``PIECE`` elements of noise, by name."""
    outs = [torch.empty(PIECE, dtype=dtype) for _ in range(THREADS)]
    generators = [torch.Generator().manual_seed(i) for i in range(THREADS)]

    def normal(thread: int, piece: int) -> None:
        outs[thread].normal_(generator=generators[thread])

    def drawn(fill: Callable[..., None], distribution: Distribution) -> Work:
        return lambda thread, piece: fill(outs[thread], distribution, 5, 0, piece * PIECE)

    ways: dict[str, Work] = {"torch normal_": normal}
    for kind, fill in (("torch operations", philox.fill), ("compiled", native.fill)):
        if kind == "compiled" and native.library() is None:
            continue
        ways |= {f"Philox {distribution.value}, {kind}": drawn(fill, distribution) for distribution in Distribution}
    return ways


def passes(dtype: torch.dtype, elements: int) -> dict[str, Work]:
    """The programs that process weights once: copy, perturb into a work buffer, or replay MeZO's last step before that.

    Mixed precision keeps float32, and rounds what it perturbs to the dtype.
    """
    theta, work = torch.zeros(elements, dtype=dtype), torch.zeros(SHARE * THREADS, dtype=dtype)
    kept = torch.zeros(elements, dtype=torch.float32)
    perturbation = Program((1,), (), then=Perturb(0, 1.0, 1e-3))
    update = Program(
        (1, 2),
        (*(Perturb(0, shift, 1e-3) for shift in (1.0, -2.0, 1.0)), Descend(0, 0.5, lr=1e-6, weight_decay=0.0)),
        then=Perturb(1, 1.0, 1e-3),
    )

    def ranges(weights: torch.Tensor, thread: int, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = piece * SHARE % elements
        return weights[start : start + SHARE], work[thread * SHARE : (thread + 1) * SHARE]

    def copy(thread: int, piece: int) -> None:
        source, out = ranges(theta, thread, piece)
        out.copy_(source)

    def passed(weights: torch.Tensor, program: Program, distribution: Distribution) -> Work:
        def run(thread: int, piece: int) -> None:
            source, out = ranges(weights, thread, piece)
            apply_drawing(source, program, distribution, 0, piece * SHARE, out=out)

        return run

    ways: dict[str, Work] = {"copy": copy}
    for distribution in Distribution:
        ways[f"perturb, {distribution.value}"] = passed(theta, perturbation, distribution)
        ways[f"perturb float32 and round, {distribution.value}"] = passed(kept, perturbation, distribution)
        ways[f"replay and perturb, {distribution.value}"] = passed(theta, update, distribution)
    return ways


def rate(work: Work, pieces: int, size: int, threads: int) -> float:
    """The units a second of one run."""

    def share(thread: int) -> None:
        for piece in range(thread, pieces, threads):
            work(thread, piece)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(1e-3), range(threads)))  # starts the threads
        began = time.perf_counter()
        list(pool.map(share, range(threads)))
        return pieces * size / (time.perf_counter() - began)


def spread(values: list[float]) -> dict[str, float]:
    """The median and range of values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bench(dtype: torch.dtype, elements: int, rounds: int) -> dict[str, Any]:
    """Run all programs; return all measurements."""
    torch.set_num_threads(1)  # this program starts its own threads
    measured: dict[str, list[float]] = {}
    for _ in range(rounds):
        for threads in range(1, THREADS + 1):
            suffix = f"{threads} thread" + "s" * (threads > 1)
            for name, work in drawing(dtype).items():
                pieces = 20 if "torch operations" in name else 1000
                measured.setdefault(f"{name}, {suffix}: numbers", []).append(rate(work, pieces, PIECE, threads))
            for name, work in passes(dtype, elements).items():
                read = 4 if "float32" in name else dtype.itemsize
                nbytes = SHARE * (read + dtype.itemsize)  # read and written; a replay writes once more
                nbytes += SHARE * dtype.itemsize if "replay" in name else 0
                measured.setdefault(f"{name}, {suffix}: bytes", []).append(rate(work, elements // SHARE, nbytes, threads))
    return {
        "dtype": str(dtype),
        "machine": {"processor": platform.processor() or platform.machine(), "threads": THREADS},
        "torch": torch.__version__,
        "compiled_kernels": native.library() is not None,
        "weights": elements,
        "rounds": rounds,
        "per_second": {name: spread(values) for name, values in measured.items()},
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    measured = bench(DTYPES[options.dtype], options.elements, options.rounds)
    print(f"{'millions a second':56s} {'median':>8s} {'min':>8s} {'max':>8s}")
    for name, values in measured["per_second"].items():
        print(f"{name:56s} {values['median'] / 1e6:8.0f} {values['min'] / 1e6:8.0f} {values['max'] / 1e6:8.0f}")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
