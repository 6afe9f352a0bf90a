"""Time a step with low-rank directions against a step with full-rank ones, and against one plain forward.

    python tools/bench.py low-rank
    python tools/bench.py low-rank --queries 4 --dtype bfloat16 --shapes 1x2,1x16,1x64
    python tools/bench.py low-rank --gpu --geometry opt-6.7b --dtype float16 --shapes 1x64,1x2048

Low-rank directions are added to the activations, as many full-rank ones to the weights. The forward is that of transformers'
whole model on the stacked batch, a lower bound for a step. On a GPU no block stays on the device without ``--stay``; the
weights of the plain forward do. Weights are synthetic (``synthetic.py``).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from make_checkpoint import geometries
from measuring import alternate, no_block_on_device, seconds_of, shapes, times_faster, zeroth_order
from synthetic import block_model, scaled, whole_model

from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, MemoryPolicy

LOW_RANK, FULL_RANK, FORWARD = "low rank", "full rank", "one forward"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-125m")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument(
        "--shapes", type=shapes, default="1x2,1x16,1x64,1x256,16x40", help="shapes of batches, as rows x tokens"
    )
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--stay", action="store_true", help="keep as many blocks on the GPU as fit")


def run(options: argparse.Namespace) -> dict[str, Any]:
    return {f"{rows} x {tokens}": bench(options, rows, tokens) for rows, tokens in options.shapes}


def bench(options: argparse.Namespace, rows: int, tokens: int) -> dict[str, Any]:
    """Measure one shape of batches."""
    dtype, device = DTYPES[options.dtype], torch.device("cuda" if options.gpu else "cpu")
    config = scaled(geometries()[options.geometry], 1, tokens)
    memory = no_block_on_device(1 << 32) if options.gpu and not options.stay else MemoryPolicy(activations="4GiB")

    def engine(rank: int | None) -> Engine:
        method = zeroth_order(queries=options.queries, rank=rank)
        return Engine(block_model(config, dtype), method, device=device.type, memory=memory)

    batch = random_batch(config.vocab_size, rows, tokens, seed=0)
    stacked = {key: torch.cat([value] * (2 * options.queries)).to(device) for key, value in batch.items()}
    whole = whole_model(config, dtype, device, block_model(config, dtype).weights)

    @torch.inference_mode()
    def forward() -> None:
        whole(**stacked, use_cache=False)

    with engine(options.rank) as low_rank, engine(None) as full_rank:
        sides = {
            LOW_RANK: lambda: low_rank.step(batch),
            FULL_RANK: lambda: full_rank.step(batch),
            FORWARD: forward,
        }
        measured = alternate(sides, options.steps)
    faster = times_faster(measured, LOW_RANK, FULL_RANK)
    return {
        **seconds_of(measured),
        "times faster": faster,
        "share of the forward": times_faster(measured, LOW_RANK, FORWARD),
    }
