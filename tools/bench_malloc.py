"""Time steps whose freed memory stays with the allocator against steps whose freed memory returns to the system.

    python tools/bench_malloc.py --rounds 3 --steps 10

A Llama of 135 million parameters in bfloat16, 16 rows of 40 tokens, all blocks in memory. Both sides alternate, in processes
of their own. Prints a table and JSON: seconds, CPU seconds in the kernel and page faults a step, resident memory after the
last step and its peak.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from make_checkpoint import make_checkpoint
from transformers import LlamaConfig

from zo2adapters import open_checkpoint
from zo2adapters.models.footprint import activation_bytes
from zo2adapters.trainers.allocator import keep_freed_memory, peak_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import Distribution, Engine, MeZOSGD, PhiloxNoise, ZerothOrder

GEOMETRY: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
GEOMETRY |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 2048}
SIDES = {"given back": False, "kept": True}


def side(directory: Path, *, keep: bool, rows: int, tokens: int, steps: int) -> dict[str, Any]:
    """Take steps in this process; the first two warm up."""
    model = open_checkpoint(directory)
    batch = random_batch(model.config.vocab_size, rows, tokens, seed=0)
    seconds: list[float] = []
    with Engine(
        model, ZerothOrder(MeZOSGD(lr=1e-6, zo_eps=1e-3, perturb_in_place=False), noise=PhiloxNoise(Distribution.RADEMACHER))
    ) as engine:
        if keep:
            assert keep_freed_memory(), "no glibc"
        for step in range(-2, steps):
            if step == 0:
                before = resource.getrusage(resource.RUSAGE_SELF)
            began = time.perf_counter()
            loss = engine.step(batch, seed=step + 2).loss
            if step >= 0:
                seconds.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": seconds,
            "kernel_seconds_a_step": (after.ru_stime - before.ru_stime) / steps,
            "page_faults_a_step": (after.ru_minflt - before.ru_minflt) / steps,
            "resident_bytes": psutil.Process().memory_info().rss,
            "peak_bytes": peak_memory(),
            "activation_bytes": activation_bytes(model.config, rows, tokens),
            "loss": loss,
        }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = {"rows": options.rows, "tokens": options.tokens, "steps": options.steps}
    if options.checkpoint is not None:
        print(json.dumps(side(options.checkpoint, keep=options.keep, **size)))
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(LlamaConfig(**GEOMETRY, tie_word_embeddings=True), Path(folder) / "base", dtype=torch.bfloat16)
        for _ in range(options.rounds):
            for name, keep in SIDES.items():
                command = [
                    sys.executable,
                    __file__,
                    "--checkpoint",
                    str(Path(folder) / "base"),
                    *(["--keep"] if keep else []),
                ]
                for option, value in size.items():
                    command += [f"--{option}", str(value)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs[name].append(json.loads(output.splitlines()[-1]))
    assert len({run["loss"] for side_runs in runs.values() for run in side_runs}) == 1, "another result"
    table: dict[str, dict[str, float]] = {}
    for name, side_runs in runs.items():
        table[name] = {"seconds a step": statistics.median(second for run in side_runs for second in run["seconds"])}
        for key in ("kernel_seconds_a_step", "page_faults_a_step", "resident_bytes", "peak_bytes"):
            table[name][key.replace("_", " ")] = statistics.median(run[key] for run in side_runs)
    print(f"{'':28s}" + "".join(f"{name:>16s}" for name in table))
    for row in table["kept"]:
        print(f"{row:28s}" + "".join(f"{table[name][row]:16.4g}" for name in table))
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    print(
        json.dumps(
            {"geometry": GEOMETRY, **size, "machine": machine, "torch": torch.__version__, "medians": table, "runs": runs}
        )
    )


if __name__ == "__main__":
    main()
