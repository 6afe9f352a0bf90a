"""Time a step with low-rank directions against a step with full-rank ones, and against one plain forward.

    python tools/bench_low_rank.py --output low-rank.json
    python tools/bench_low_rank.py --queries 4 --dtype bfloat16 --shapes 1x2,1x16,1x64
    python tools/bench_low_rank.py --gpu --geometry opt-6.7b --dtype float16 --shapes 1x64,1x2048

Three programs alternate in one process: a step with low-rank directions, which are added to the activations; a step with as
many full-rank directions, which are added to the weights, with Rademacher noise; and a forward of Hugging Face's whole model
on the stacked batch, a lower bound for a step. On a GPU no block stays on the device without ``--stay``; the weights of the
plain forward do. Weights are synthetic (``paper_models.py``). Prints a table and JSON: medians, and ranges of the ratios of
consecutive measurements. In the JSON the low-rank step is called ``beside``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_overlap import keep, machine, spread
from make_checkpoint import geometries
from paper_models import block_model, scaled, whole_model

from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    DensePerturbation,
    DevicePlan,
    Distribution,
    Engine,
    LowRankPerturbation,
    MemoryPolicy,
    MultiQueryRGE,
    PhiloxNoise,
    ZerothOrder,
)
from zo2core.perturbation import Perturbation

WARM_UP = 2


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The seconds that a function takes, including the work that it leaves on the device."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def bench(options: argparse.Namespace, rows: int, tokens: int) -> dict[str, Any]:
    """Measure one shape of batches."""
    dtype, device = DTYPES[options.dtype], torch.device("cuda" if options.gpu else "cpu")
    config = scaled(geometries()[options.geometry], 1, tokens)
    memory = MemoryPolicy(activations="4GiB")
    if options.gpu and not options.stay:
        memory = MemoryPolicy(device=DevicePlan((), 1 << 40, kept=0, activation_bytes=1 << 32), activations="4GiB")

    def engine(perturbation: Perturbation) -> Engine:
        estimator = MultiQueryRGE(lr=1e-6, zo_eps=1e-3, perturb_in_place=False, q=options.queries)
        noise = PhiloxNoise(Distribution.RADEMACHER)
        model = block_model(config, dtype)
        return Engine(
            model, ZerothOrder(estimator, noise=noise, perturbation=perturbation), device=device.type, memory=memory
        )

    batch = random_batch(config.vocab_size, rows, tokens, seed=0)
    stacked = {key: torch.cat([value] * (2 * options.queries)).to(device) for key, value in batch.items()}
    whole = whole_model(config, dtype, device, block_model(config, dtype).weights)
    measured: dict[str, list[float]] = {"beside": [], "in weights": [], "one forward": []}
    with (
        engine(LowRankPerturbation(rank=options.rank)) as low_rank,
        engine(DensePerturbation()) as dense,
        torch.inference_mode(),
    ):
        for number in range(WARM_UP + options.steps):
            spans = {
                "beside": seconds(lambda: low_rank.step(batch), device),
                "in weights": seconds(lambda: dense.step(batch), device),
                "one forward": seconds(lambda: whole(**stacked, use_cache=False), device),
            }
            for name, span in spans.items() if number >= WARM_UP else ():
                measured[name].append(span)
    triples = list(zip(measured["beside"], measured["in weights"], measured["one forward"], strict=True))
    return {
        "rows": rows,
        "tokens": tokens,
        **{name: spread(spans) for name, spans in measured.items()},
        "times_faster": spread([dense / low_rank for low_rank, dense, _ in triples]),
        "share_of_floor": spread([forward / low_rank for low_rank, _, forward in triples]),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-125m")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--shapes", default="1x2,1x16,1x64,1x256,16x40", help="shapes of batches, as rows x tokens")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, help="number of torch threads; by default all cores")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--stay", action="store_true", help="keep as many blocks on the GPU as fit")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    measured: dict[str, Any] = {
        "machine": machine() | ({"gpu": torch.cuda.get_device_name(0)} if options.gpu else {}),
        **{key: getattr(options, key) for key in ("geometry", "dtype", "rank", "queries", "steps", "threads", "stay")},
        "shapes": [],
    }
    print(f"{'rows x tokens':>14s}{'low rank':>10s}{'full rank':>12s}{'one forward':>13s}{'times':>8s}{'of floor':>10s}")
    for rows, tokens in shapes:
        shape = bench(options, rows, tokens)
        measured["shapes"].append(shape)
        cells = [shape[name]["median"] for name in ("beside", "in weights", "one forward")]
        ratios = [shape[name]["median"] for name in ("times_faster", "share_of_floor")]
        spans = f"{cells[0]:9.4f}s{cells[1]:11.4f}s{cells[2]:12.4f}s"
        print(f"{f'{rows} x {tokens}':>14s}{spans}{ratios[0]:8.2f}{ratios[1]:10.2f}", flush=True)
    keep(measured, options.output)


if __name__ == "__main__":
    main()
