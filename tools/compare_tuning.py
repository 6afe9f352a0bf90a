"""Tune a learning rate over one base and with one trial after the other: the same rate and losses, and the seconds of both.

    python tools/real_task.py build task
    python tools/compare_tuning.py task/model task/train.jsonl --lora-rank 8 --forwards 300 --output tuning.json

Each side tunes in a directory of its own, in turns, so many rounds. Ends with an error if the two differ in any trial.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from measuring import keep, machine, spread

from zo2adapters.trainers import tuning
from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.first_order import FirstOrder
from zo2adapters.trainers.model_options import RunModelOptions
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.shared_runs import can_share

SIDES = {"together": can_share, "apart": lambda options: False}


def tuned(options: TrainOptions, side: str, forwards: int) -> dict[str, Any]:
    """Tune once; returns the seconds and, for each trial from the best on, its rate, steps and loss."""
    rankings: list[list[tuple[float, int, float]]] = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tuning, "can_share", SIDES[side]):
        began = time.perf_counter()
        tuning.tune(
            replace(options, output=Path(folder, "tuned")),
            forwards=forwards,
            continues=False,
            after_round=lambda trials: rankings.append([(trial.lr, trial.steps, trial.loss) for trial in trials]),
        )
        return {"seconds": time.perf_counter() - began, "trials": rankings[-1]}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--lora-rank", type=int, help="train a LoRA by AdamW; by default steps are zeroth-order")
    parser.add_argument("--rank", type=int, default=2, help="of zeroth-order perturbations")
    parser.add_argument("--forwards", type=int, default=300)
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="file for the JSON")
    given = parser.parse_args()
    options = TrainOptions(
        model=str(given.model),
        data=given.data,
        output=Path(),
        batching=Batching(batch_size=16),
        first_order=FirstOrder(method="adamw" if given.lora_rank else None),
        model_options=RunModelOptions(lora_rank=given.lora_rank),
        optimization=Optimization() if given.lora_rank else Optimization(rank=given.rank),
    )
    sides = list(SIDES)
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(given.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            results[side].append(tuned(options, side, given.forwards))
            print(side, results[side][-1], flush=True)
    all_trials = [result["trials"] for side in sides for result in results[side]]
    if any(trials != all_trials[0] for trials in all_trials):
        raise SystemExit("the trials differ")
    seconds = {side: [result["seconds"] for result in results[side]] for side in sides}
    faster = [apart / together for apart, together in zip(seconds["apart"], seconds["together"], strict=True)]
    measured = {side: spread(seconds[side]) for side in sides} | {"times_faster": spread(faster)}
    print(f"lr {all_trials[0][0][0]:g}, both sides", {name: figures["median"] for name, figures in measured.items()})
    keep({"options": vars(given), "machine": machine(), "trials": all_trials[0], **measured}, given.output)


if __name__ == "__main__":
    main()
