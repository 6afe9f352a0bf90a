"""First-order steps of all parameters, block by block, against transformers and torch.optim with everything resident.

    python tools/make_checkpoint.py opt-350m /tmp/opt-350m --dtype float32
    python tools/bench_full.py /tmp/opt-350m --shapes 4x256 --output full.json

The sides take turns in one process, whose allocator keeps freed memory as that of ``zo2 train`` does. All have the same
weights and batches, and the losses of the sides with one optimizer have to be equal. Prints a table and JSON: medians, and
ranges of ratios between neighbours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_overlap import keep, machine, spread
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.models.footprint import expected_held_bytes, forward_bytes
from zo2adapters.trainers.allocator import SMALL, keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import LOMO, BAdam, BlockUpdate, FullBackpropEngine, HostPlan, MemoryPolicy, TorchOptimizer
from zo2core.sweep.gradient_memory import gradient_bytes

WARM_UP = 2
LR = 1e-6
ADAMW = partial(torch.optim.AdamW, lr=LR, fused=True)
UPDATES: Mapping[str, Callable[[], BlockUpdate]] = {
    "adamw": lambda: TorchOptimizer(ADAMW),
    "lomo": LOMO,
    "badam": lambda: BAdam(ADAMW),
}


class Resident:
    """The whole model, all gradients, and AdamW."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        for parameter in self.model.parameters():
            # What was mapped from a file lies where no allocator puts it, and products round otherwise there.
            parameter.data = parameter.data.clone()
        self.optimizer = ADAMW(list(self.model.parameters()))

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        """One step; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def bench(options: argparse.Namespace, rows: int, tokens: int) -> dict[str, Any]:
    """One shape of batches."""
    probe = open_checkpoint(options.directory)
    batch = random_batch(probe.config.vocab_size, rows, tokens, seed=0)
    blocks = len(probe.layouts) - 2
    held, running = expected_held_bytes(probe.config, rows, tokens), forward_bytes(probe.config, rows, tokens)
    rooms = {"inputs": gradient_bytes(held, running, blocks), "graphs": 1 << 36}
    engines: dict[str, FullBackpropEngine] = {}
    for side in options.sides.split(","):
        method, _, kept = side.partition(":")
        policy = MemoryPolicy(host=HostPlan((), 0, None, keep_noise=False), activations=rooms[kept or "graphs"])
        engines[side] = FullBackpropEngine(open_checkpoint(options.directory), UPDATES[method](), lr=LR, memory=policy)
    resident = Resident(options.directory)
    sides: dict[str, Callable[[], float]] = {
        **{name: lambda engine=engine: engine.step(batch).loss for name, engine in engines.items()},  # type: ignore[misc]
        "torch": lambda: resident.step(batch),
    }
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(WARM_UP + options.steps):
        losses = {}
        for name, step in sides.items():
            began = time.perf_counter()
            losses[name] = step()
            if number >= WARM_UP:
                measured[name].append(time.perf_counter() - began)
        alike = {loss for name, loss in losses.items() if name.startswith("adamw") or name == "torch"}
        if len(alike) > 1:
            raise SystemExit(f"losses of step {number} differ: {losses}")
    for engine in engines.values():
        engine.close()
    return {
        "rows": rows,
        "tokens": tokens,
        "seconds": {name: spread(spans) for name, spans in measured.items()},
        "ratios": {
            f"{name} to torch": spread([a / b for a, b in zip(measured[name], measured["torch"], strict=True)])
            for name in engines
        },
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shapes", default="4x256", help="rows x tokens")
    parser.add_argument("--sides", default="adamw:graphs,adamw:inputs", help="optimizer, and what blocks keep")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write JSON here")
    options = parser.parse_args()
    keep_freed_memory(SMALL)
    measured: dict[str, Any] = {
        "machine": machine(),
        "directory": options.directory.name,
        "dtype": str(open_checkpoint(options.directory).layouts[1].parameters[0].dtype),
        "steps": options.steps,
        "shapes": [],
    }
    for shape in options.shapes.split(","):
        rows, tokens = map(int, shape.split("x"))
        measured["shapes"].append(one := bench(options, rows, tokens))
        print(f"{rows} x {tokens}")
        for name, value in {**one["seconds"], **one["ratios"]}.items():
            print(f"  {name:30s}{value['median']:9.3f} [{value['min']:.3f} - {value['max']:.3f}]", flush=True)
    keep(measured, options.output)


if __name__ == "__main__":
    main()
