"""Compare the plan of `zo2 plan` with a short run: seconds a step, and peak memory.

    python tools/bench_plan.py smollm2-135m train.jsonl --steps 12 --output plan.json
    python tools/bench_plan.py smollm2-135m train.jsonl --runs "rank 2" exact

Each configuration is planned with ``--data`` and then run for a few steps, each in a process of its own. The first two steps
do not count: they read the base and allocate memory. ``streamed`` gets a ``--memory`` that holds about half of the blocks.
Prints a table and JSON: planned, measured, and measured over planned.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import keep, machine, spread

RUNS: dict[str, list[str]] = {
    "default": [],
    "rank 2": ["--rank", "2"],
    "rank 8, per row": ["--rank", "8", "--per-row"],
    "exact": ["--precision", "exact"],
    "float32": ["--dtype", "float32"],
    "exact MeZO": ["--exact-mezo"],
    "streamed": [],
    "streamed, rank 2": ["--rank", "2"],
}
_SETTLES = 2  # steps that do not count


def zo2(*arguments: object) -> str:
    """Run a command in a process of its own; return its output."""
    command = [sys.executable, "-m", "zo2adapters.cli", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"zo2 {arguments[0]} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def planned(options: argparse.Namespace, folder: Path, given: list[str]) -> dict[str, Any]:
    """The plan's numbers."""
    where = ["--model", options.directory, "--data", options.data, "--output", folder]
    plan: dict[str, Any] = json.loads(zo2("plan", *where, *shape(options), "--steps", options.steps, "--json", *given))
    return plan


def shape(options: argparse.Namespace) -> list[object]:
    """The options that plan and run share."""
    return ["--batch-size", options.rows]


def bench(options: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """Plan and run one configuration."""
    given = RUNS[name]
    if name.startswith("streamed"):
        parts = planned(options, folder, given)["host_plan"]["parts"]
        blocks = next(part["nbytes"] for part in parts if "blocks" in part["name"])
        others = sum(part["nbytes"] for part in parts if "kept by the allocator" not in part["name"]) - blocks
        given = [*given, "--memory", str(others + blocks // 2)]
    plan = planned(options, folder, given)
    run = folder / name.replace(" ", "-")
    where = ["--model", options.directory, "--data", options.data, "--output", run]
    load = os.getloadavg()[0]
    zo2("train", *where, *shape(options), "--steps", options.steps, "--lr", "1e-7", *given)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = spread([row["seconds"] for row in rows][_SETTLES:])
    peak = max(row["peak_rss_bytes"] for row in rows)
    return {
        "options": given,
        "plan": plan,
        "step_seconds": seconds,
        "peak_bytes": peak,
        "seconds_over_planned": seconds["median"] / plan["seconds"],
        "bytes_over_planned": peak / plan["nbytes"],
        "load_before": load,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--folder", type=Path, default=None, help="folder for the runs' files; a temporary one by default")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.steps <= _SETTLES:
        parser.error(f"--steps: expected more than {_SETTLES}, since the first ones do not count")
    measured: dict[str, Any] = {"machine": machine(), "rows": options.rows, "steps": options.steps, "runs": {}}
    print(f"{'':18s} {'planned':>9s} {'measured':>9s} {'ratio':>6s}   {'planned':>9s} {'measured':>9s} {'ratio':>6s}   load")
    for name in options.runs:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            run = bench(options, name, Path(folder))
        measured["runs"][name] = run
        plan = run["plan"]
        print(
            f"{name:18s} {plan['seconds']:7.2f} s {run['step_seconds']['median']:7.2f} s "
            f"{run['seconds_over_planned']:6.2f}   "
            f"{plan['nbytes'] / 1e9:6.2f} GB {run['peak_bytes'] / 1e9:6.2f} GB {run['bytes_over_planned']:6.2f}   "
            f"{run['load_before']:4.1f}",
            flush=True,
        )
    keep(measured, options.output)


if __name__ == "__main__":
    main()
