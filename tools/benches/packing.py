"""Time a step on rows of different lengths: packed (concatenated) against padded to one length.

    python tools/bench.py packing task/model task/train.jsonl --rows 16

Both sides are steps of one engine on the same rows, batch by batch, with the default precision and noise of `zo2 train`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import alternate, spread, times_faster, zeroth_order

from zo2adapters import open_checkpoint, pack
from zo2adapters.tasks.batches import collate, training_batches
from zo2adapters.tasks.row_reader import read_rows
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2core import Batch, Distribution, Engine


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rank", type=int, help="rank of the directions; by default full-rank directions")
    parser.add_argument("--steps", type=int, default=9)


def run(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer(options.model)
    dataset = read_rows(options.data, tokenizer, sequence_length=1 << 20)
    rows = training_batches(dataset, batch_size=options.rows, seed=0)
    batches = itertools.tee((collate(chosen, pad_token_id=pad_token_id(tokenizer)) for chosen in rows), 2)
    noise = Distribution.RADEMACHER if options.rank is None else Distribution.GAUSSIAN
    model = open_checkpoint(options.model, precision="auto" if options.rank is None else "exact")

    def step(batch: Batch) -> int:
        engine.step(batch)
        return batch["input_ids"].numel()

    sides: dict[str, Callable[[], int]] = {
        "padded": lambda: step(next(batches[0])),
        "packed": lambda: step(pack(next(batches[1]))),
    }
    with Engine(model, zeroth_order(rank=options.rank, noise=noise)) as engine:
        measured = alternate(sides, options.steps, warm_up=1)
    found = {name: {"step": spread(side.seconds), "tokens": spread(side.results)} for name, side in measured.items()}
    return {"packed to padded": times_faster(measured, "padded", "packed"), "sides": found}
