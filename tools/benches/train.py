"""Run `zo2 train` on a checkpoint of any size, and compare time and peak memory with `zo2 plan`.

    python tools/bench.py train opt-13b-bf16 --rows 1 --tokens 64 --steps 7
    python tools/bench.py train opt-13b-bf16 --rows 8 --tokens 256 --steps 2 --runs "--method adamw --lora-rank 8"
    python tools/bench.py train smollm2-135m --data train.jsonl --rows 16 --runs "" "--rank 2" "--precision exact"
    python tools/bench.py train opt-175b --evaluate --rows 1 --tokens 16 --runs "--memory 14GB"

Each run has the quoted options, and processes of its own. It is stopped after its steps, of which the first two do not count
if there are more: they read the base and allocate memory. Without ``--data`` rows are random words. The peak is the kernel's
count of the process's resident memory. ``to the slowest lane`` is the ratio of steps to the busy time of their slowest lane.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

from measuring import WARM_UP, add_sizes, spread, timed, zo2
from transformers import AutoConfig

MORE = 10_000  # steps of a run, which is stopped before


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, help="rows to train on")
    parser.add_argument("--runs", nargs="+", default=[""], help="options of zo2 train for each run, quoted")
    parser.add_argument("--evaluate", action="store_true", help="evaluate the rows once instead of training on them")
    add_sizes(parser, rows=1, steps=7)


def run(options: argparse.Namespace) -> dict[str, Any]:
    measured = {}
    for given in options.runs:
        with tempfile.TemporaryDirectory() as folder:
            measured[given.strip() or "default"] = bench(options, shlex.split(given), Path(folder))
    return measured


def bench(options: argparse.Namespace, given: list[str], folder: Path) -> dict[str, Any]:
    data = options.data
    if data is None:
        config = AutoConfig.from_pretrained(options.model.parent if options.model.is_file() else options.model)
        words = [
            map(str, random.Random(row).choices(range(3, config.vocab_size), k=options.tokens))
            for row in range(options.rows)
        ]
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in words))
    common = ["--model", options.model, "--data", data, "--batch-size", options.rows]
    if options.evaluate:
        taken, said = timed(lambda: zo2("evaluate", *common, *given))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return {"seconds with opening": taken, "peak_bytes": peak, "said": said.strip()}
    plan = json.loads(zo2("plan", *common, "--output", folder, "--json", *given))
    rows = steps_of([*common, "--output", folder / "run", "--lr", "1e-7", *given], folder / "run", options.steps)
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
        **{f"{lane}_bytes": statistics.median(row["lanes"][lane]["bytes"] for row in settled) for lane in rows[0]["lanes"]},
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
            lines = (run / "metrics.jsonl").read_text().split("\n")[:-1] if (run / "metrics.jsonl").exists() else []
            rows = [row for row in map(json.loads, lines) if "loss" in row][:steps]
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1]
    if len(rows) < steps:
        raise SystemExit(f"zo2 train ended after {len(rows)} steps:\n{said}")
    return rows
