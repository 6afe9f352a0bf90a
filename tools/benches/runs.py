"""Runs of the library's own commands: a run against its plan, and tuning of several rates over one
base.
"""

import json
import random
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

from measuring import WARM_UP, alternate, seconds_of, spread, timed, times_faster, zo2
from transformers import AutoConfig

from zo2adapters.trainers import tuning as library
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Batching, RunModelOptions, TrainOptions, can_share

MORE = 10_000  # steps of a run, which is stopped before
SIDES = {"together": can_share, "apart": lambda options: False}


def train(
    model: Path,
    *,
    data: Annotated[Path | None, "rows to train on"] = None,
    runs: Annotated[Sequence[str], "options of zo2 train for each run, quoted"] = ("",),
    evaluate: Annotated[bool, "evaluate the rows once instead of training on them"] = False,
    rows: int = 1,
    tokens: int = 64,
    steps: Annotated[int, "measured steps"] = 7,
) -> dict[str, Any]:
    """Run `zo2 train` on a checkpoint of any size, and compare time and peak memory with `zo2
    plan`.

        python tools/bench.py train opt-13b-bf16 --rows 1 --tokens 64 --steps 7
        python tools/bench.py train opt-13b-bf16 --rows 8 --tokens 256 --steps 2 --runs "--method
        adamw --lora-rank 8" python tools/bench.py train smollm2-135m --data train.jsonl --rows 16
        --runs "" "--rank 2" "--precision exact" python tools/bench.py train opt-175b --evaluate
        --rows 1 --tokens 16 --runs "--memory 14GB"

    Each run has the quoted options, and processes of its own. It is stopped after its steps, of
    which the first two do not count if there are more: they read the base and allocate memory.
    Without ``--data`` rows are random words. The peak is the kernel's count of the process's
    resident memory. ``to the slowest lane`` is the ratio of steps to the busy time of their slowest
    lane.
    """
    measured = {}
    for given in runs:
        with tempfile.TemporaryDirectory() as folder:
            file = data or write_rows(Path(folder, "rows.jsonl"), model, rows, tokens)
            common, more = (
                ["--model", model, "--data", file, "--batch-size", rows],
                shlex.split(given),
            )
            run = (
                evaluated([*common, *more])
                if evaluate
                else trained(common, more, Path(folder), steps)
            )
        measured[given.strip() or "default"] = run
    return measured


def write_rows(path: Path, model: Path, rows: int, tokens: int) -> Path:
    """Write rows of random words."""
    config = AutoConfig.from_pretrained(model.parent if model.is_file() else model)
    words = [
        map(str, random.Random(row).choices(range(3, config.vocab_size), k=tokens))
        for row in range(rows)
    ]
    path.write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in words))
    return path


def evaluated(given: list[Any]) -> dict[str, Any]:
    taken, said = timed(lambda: zo2("evaluate", *given))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"seconds with opening": taken, "peak_bytes": peak, "said": said.strip()}


def trained(common: list[Any], more: list[str], folder: Path, steps: int) -> dict[str, Any]:
    """The steps of a run, zeroth-order unless it names a method, beside its plan."""
    common = ["--method", "zeroth-order", *common]
    plan = json.loads(zo2("plan", *common, "--output", folder, "--json", *more))
    rows = steps_of(
        [*common, "--output", folder / "run", "--lr", "1e-7", *more], folder / "run", steps
    )
    settled, peak = rows[WARM_UP:] or rows, max(row["peak_rss_bytes"] for row in rows)
    seconds = spread([row["seconds"] for row in settled])
    return {
        "planned seconds": plan["seconds"],
        "seconds": seconds,
        "seconds ratio": seconds["median"] / plan["seconds"],
        "planned_bytes": plan["nbytes"],
        "peak_bytes": peak,
        "bytes ratio": peak / plan["nbytes"],
        "to the slowest lane": spread([row["seconds"] / row["bound_seconds"] for row in settled]),
        **{
            f"{lane}_bytes": statistics.median(row["lanes"][lane]["bytes"] for row in settled)
            for lane in rows[0]["lanes"]
        },
        "plan": [plan],
        "steps": rows,
    }


def steps_of(arguments: list[Any], run: Path, steps: int) -> list[dict[str, Any]]:
    """The first steps of a run as its metrics have them; no model is exported."""
    command = [sys.executable, "-m", "zo2adapters.cli", "train", *arguments, "--steps", MORE]
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
        rows: list[dict[str, Any]] = []
        while len(rows) < steps and process.poll() is None:
            time.sleep(0.05)
            lines = (
                (run / "metrics.jsonl").read_text().split("\n")[:-1]
                if (run / "metrics.jsonl").exists()
                else []
            )
            rows = [row for row in map(json.loads, lines) if "loss" in row][:steps]
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1]
    if len(rows) < steps:
        raise SystemExit(f"zo2 train ended after {len(rows)} steps:\n{said}")
    return rows


def tuning(
    model: Path,
    data: Path,
    *,
    lora_rank: Annotated[
        int | None, "train a LoRA by AdamW; by default steps are zeroth-order"
    ] = None,
    rank: Annotated[int, "of zeroth-order perturbations"] = 2,
    forwards: int = 300,
    rounds: int = 2,
) -> dict[str, Any]:
    """Tune a learning rate over one base and with one trial after the other: the same rate and
    losses, and both's seconds.

        python tools/bench.py real-task build task
        python tools/bench.py tuning task/model task/train.jsonl --lora-rank 8 --forwards 300

    Each side tunes in a directory of its own. Ends with an error if the two differ in any trial.
    """
    options = TrainOptions(
        model=str(model),
        data=data,
        output=Path(),
        batching=Batching(batch_size=16),
        model_options=RunModelOptions(lora_rank=lora_rank),
        optimization=Optimization()
        if lora_rank
        else Optimization(method="zeroth-order", rank=rank),
    )

    def tuned(side: str) -> list[tuple[float, int, float]]:
        """The rate, steps and loss of each trial, from the best on."""
        rounds: list[list[tuple[float, int, float]]] = []
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(library, "can_share", SIDES[side]),
        ):
            library.tune(
                replace(options, output=Path(folder, "tuned")),
                forwards=forwards,
                after_round=lambda trials: rounds.append(
                    [(trial.lr, trial.steps, trial.loss) for trial in trials]
                ),
            )
        return rounds[-1]

    measured = alternate({side: partial(tuned, side) for side in SIDES}, rounds, warm_up=0)
    first, *others = [ranking for side in measured.values() for ranking in side.results]
    if any(ranking != first for ranking in others):
        raise SystemExit(f"the trials differ: {[first, *others]}")
    faster = times_faster(measured, "together", "apart")
    return {
        "lr": first[0][0],
        "times faster": faster,
        "seconds": seconds_of(measured),
        "trials": first,
    }
