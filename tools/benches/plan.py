"""Compare the plan of `zo2 plan` with a short run: seconds a step, and peak memory.

    python tools/bench.py plan smollm2-135m train.jsonl --steps 12
    python tools/bench.py plan smollm2-135m train.jsonl --runs "rank 2" exact

Each configuration is planned with ``--data`` and then run for a few steps, each in a process of its own. The first two steps
do not count: they read the base and allocate memory. ``streamed`` gets a ``--memory`` that holds about half of the blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from measuring import WARM_UP, spread, zo2

RUNS: dict[str, list[str]] = {
    "default": [],
    "rank 2": ["--rank", "2"],
    "rank 8, per row": ["--rank", "8", "--per-row"],
    "exact": ["--precision", "exact"],
    "float32": ["--dtype", "float32"],
    "exact MeZO": ["--estimator", "mezo:exact"],
    "streamed": [],
    "streamed, rank 2": ["--rank", "2"],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12, help="more than two")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))


def bench(options: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """Plan and run one configuration."""
    given, run = RUNS[name], folder / "run"
    common = ["--model", options.directory, "--data", options.data, "--batch-size", options.rows, "--steps", options.steps]
    plan = json.loads(zo2("plan", *common, "--output", folder, "--json", *given))
    if name.startswith("streamed"):
        parts = plan["host_plan"]["parts"]
        blocks = next(part["nbytes"] for part in parts if "blocks" in part["name"])
        others = sum(part["nbytes"] for part in parts if "kept by the allocator" not in part["name"]) - blocks
        given = [*given, "--memory", str(others + blocks // 2)]
        plan = json.loads(zo2("plan", *common, "--output", folder, "--json", *given))
    load = os.getloadavg()[0]
    zo2("train", *common, "--output", run, "--lr", "1e-7", *given)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds, peak = spread([row["seconds"] for row in rows][WARM_UP:]), max(row["peak_rss_bytes"] for row in rows)
    return {
        "planned seconds": plan["seconds"],
        "seconds": seconds,
        "seconds ratio": seconds["median"] / plan["seconds"],
        "planned_bytes": plan["nbytes"],
        "peak_bytes": peak,
        "bytes ratio": peak / plan["nbytes"],
        "load before": load,
        "given": " ".join(given),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    measured = {}
    for name in options.runs:
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = bench(options, name, Path(folder))
    return measured
