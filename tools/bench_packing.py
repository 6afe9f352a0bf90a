"""Time a step on rows of different lengths: packed (concatenated) against padded to one length.

    python tools/bench_packing.py task/model task/train.jsonl --rows 16

Both sides are steps of one engine on the same rows, alternating batch by batch, with the default precision and noise of `zo2
train`. Prints a table and JSON: seconds a step, tokens that run, and the ratio of consecutive steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_overlap import estimator, keep, machine, spread

from zo2adapters import open_checkpoint, pack
from zo2adapters.tasks.batches import collate, training_batches
from zo2adapters.tasks.rows import read_dataset
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2core import DensePerturbation, Distribution, Engine, LowRankPerturbation, PhiloxNoise, ZerothOrder

WARM_UP = 1


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Measure steps of both sides."""
    tokenizer = load_tokenizer(options.model)
    dataset = read_dataset(options.data, tokenizer, sequence_length=1 << 20)
    batches = training_batches(dataset, batch_size=options.rows, seed=0)
    in_weights = options.rank is None
    noise = PhiloxNoise(Distribution.RADEMACHER if in_weights else Distribution.GAUSSIAN)
    perturbation = DensePerturbation() if in_weights else LowRankPerturbation(rank=options.rank)
    seconds: dict[str, list[float]] = {"padded": [], "packed": []}
    tokens: dict[str, list[float]] = {"padded": [], "packed": []}
    model = open_checkpoint(options.model, precision="auto" if in_weights else "exact")
    with Engine(model, ZerothOrder(estimator(), noise=noise, perturbation=perturbation)) as engine:
        for number in range(WARM_UP + options.steps):
            padded = collate(next(batches), pad_token_id=pad_token_id(tokenizer))
            for side, batch in (("padded", padded), ("packed", pack(padded))):
                step = engine.step(batch)
                if number >= WARM_UP:
                    seconds[side].append(step.seconds)
                    tokens[side].append(batch["input_ids"].numel())
    pairs = zip(seconds["packed"], seconds["padded"], strict=True)
    return {
        "machine": machine(),
        "model": options.model.name,
        "rows": options.rows,
        "rank": options.rank,
        "threads": torch.get_num_threads(),
        "seconds": {side: spread(values) for side, values in seconds.items()},
        "tokens": {side: spread(values) for side, values in tokens.items()},
        "packed_to_padded": spread([own / other for own, other in pairs]),
    }


def table(measured: dict[str, Any]) -> str:
    """Format the results as a table."""
    seconds, tokens, ratio = (measured[name] for name in ("seconds", "tokens", "packed_to_padded"))
    lines = [f"{side:8s}{seconds[side]['median']:9.3f}s{tokens[side]['median']:8.0f}" for side in seconds]
    lines.append(f"packed to padded {ratio['median']:.2f} [{ratio['min']:.2f} - {ratio['max']:.2f}]")
    return "\n".join([f"{'':8s}{'a step':>10s}{'tokens':>8s}", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rank", type=int, default=None, help="rank of the directions; by default full-rank directions")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    measured = bench(options)
    print(table(measured))
    keep(measured, options.output)


if __name__ == "__main__":
    main()
