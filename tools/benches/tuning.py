"""Tune a learning rate over one base and with one trial after the other: the same rate and losses, and the seconds of both.

    python tools/bench.py real-task build task
    python tools/bench.py tuning task/model task/train.jsonl --lora-rank 8 --forwards 300

Each side tunes in a directory of its own. Ends with an error if the two differ in any trial.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from measuring import alternate, seconds_of, times_faster

from zo2adapters.trainers import tuning
from zo2adapters.trainers.methods import can_share
from zo2adapters.trainers.optimization import FirstOrder, Optimization
from zo2adapters.trainers.options import Batching, RunModelOptions, TrainOptions

SIDES = {"together": can_share, "apart": lambda options: False}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--lora-rank", type=int, help="train a LoRA by AdamW; by default steps are zeroth-order")
    parser.add_argument("--rank", type=int, default=2, help="of zeroth-order perturbations")
    parser.add_argument("--forwards", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)


def tuned(options: TrainOptions, side: str, forwards: int) -> list[tuple[float, int, float]]:
    """Tune once; returns the rate, steps and loss of each trial, from the best on."""
    rankings: list[list[tuple[float, int, float]]] = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tuning, "can_share", SIDES[side]):
        tuning.tune(
            replace(options, output=Path(folder, "tuned")),
            forwards=forwards,
            after_round=lambda trials: rankings.append([(trial.lr, trial.steps, trial.loss) for trial in trials]),
        )
    return rankings[-1]


def run(options: argparse.Namespace) -> dict[str, Any]:
    given = TrainOptions(
        model=str(options.model),
        data=options.data,
        output=Path(),
        batching=Batching(batch_size=16),
        first_order=FirstOrder(method="adamw" if options.lora_rank else None),
        model_options=RunModelOptions(lora_rank=options.lora_rank),
        optimization=Optimization() if options.lora_rank else Optimization(rank=options.rank),
    )
    sides = {side: partial(tuned, given, side, options.forwards) for side in SIDES}
    measured = alternate(sides, options.rounds, warm_up=0)
    rankings = [ranking for side in measured.values() for ranking in side.results]
    if any(ranking != rankings[0] for ranking in rankings):
        raise SystemExit(f"the trials differ: {rankings}")
    trials = rankings[0]
    faster = times_faster(measured, "together", "apart")
    return {"lr": trials[0][0], "times faster": faster, "seconds": seconds_of(measured), "trials": trials}
