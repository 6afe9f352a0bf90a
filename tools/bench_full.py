"""First-order steps of all parameters, block by block, against transformers and torch.optim with everything resident.

    python tools/make_checkpoint.py opt-350m /tmp/opt-350m --dtype float32
    python tools/bench_full.py /tmp/opt-350m --shapes 4x256 --output full.json
    python tools/bench_full.py /tmp/opt-350m --sides lomo,sgd,adamw --output lomo.json
    python tools/bench_full.py /tmp/opt-350m --sides adamw --host 0.25,0.5,1 --output delayed.json

The sides take turns in one process, whose allocator keeps freed memory as that of ``zo2 train`` does. All have the same
weights and batches, and the losses of the sides with one optimizer have to be equal. Prints a table and JSON: medians, and
ranges of ratios between neighbours; and for each side the bytes of weights, gradients and states.

``--host`` compares late updates with prompt ones on a host that is slow beside its device: the update of a step takes so
many times what forward and backward take, in which the thread of the update sleeps. This machine's cores are the device.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import keep, machine, spread
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.models.footprint import expected_held_bytes, forward_bytes
from zo2adapters.trainers.allocator import SMALL, keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    LOMO,
    AdaLOMO,
    BAdam,
    BlockLayout,
    BlockUpdate,
    Delayed,
    Engine,
    FirstOrder,
    HostPlan,
    MemoryPolicy,
    TorchOptimizer,
)
from zo2core.methods.first_order import gradient_bytes as bytes_of_gradients
from zo2core.optimizers import state_bytes
from zo2core.optimizers.lomo import EverySegment
from zo2core.protocols import UpdateInputs
from zo2core.sweep.gradient_memory import gradient_bytes
from zo2core.types import StateSpec

WARM_UP = 2
LR = 1e-6
ADAMW = partial(torch.optim.AdamW, lr=LR, fused=True)
UPDATES: Mapping[str, Callable[[], BlockUpdate]] = {
    "adamw": lambda: TorchOptimizer(ADAMW),
    "adamw8": lambda: TorchOptimizer(partial(importlib.import_module("bitsandbytes").optim.AdamW8bit, lr=LR)),
    "sgd": lambda: TorchOptimizer(partial(torch.optim.SGD, lr=LR)),
    "lomo": LOMO,
    "adalomo": AdaLOMO,
    "badam": lambda: BAdam(ADAMW),
}


class SlowHost(EverySegment):
    """An optimizer on a host that takes a given time for each byte of weights."""

    def __init__(self, update: BlockUpdate) -> None:
        self._update = update
        self.seconds_a_byte = 0.0

    @property
    def options(self) -> Mapping[str, Any]:
        """Those of the optimizer. See the contract."""
        return self._update.options

    @property
    def widens_gradients(self) -> bool:
        """As the optimizer says. See the contract."""
        return self._update.widens_gradients

    @property
    def copies(self) -> int:
        """As the optimizer says. See the contract."""
        return self._update.copies

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """Those of the optimizer. See the contract."""
        return self._update.states(layout)

    def apply(self, inputs: UpdateInputs) -> None:
        """Apply the update, in no less than its time. See the contract."""
        began = time.perf_counter()
        self._update.apply(inputs)
        seconds = self.seconds_a_byte * sum(weight.nbytes for weight in inputs.weights.values())
        time.sleep(max(seconds - (time.perf_counter() - began), 0.0))


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
    engines: dict[str, Engine] = {}
    for side in options.sides.split(","):
        method, _, kept = side.partition(":")
        policy = MemoryPolicy(host=HostPlan((), 0, None, keep_noise=False), activations=rooms[kept or "graphs"])
        engines[side] = Engine(open_checkpoint(options.directory), FirstOrder(UPDATES[method](), lr=LR), memory=policy)
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
        alike = {loss for name, loss in losses.items() if name.partition(":")[0] in ("adamw", "torch")}
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


def bytes_by_part(directory: Path, side: str) -> dict[str, int]:
    """What a side keeps of weights, gradients and optimizer states, in bytes, beside activations."""
    layouts = open_checkpoint(directory).layouts
    weights = sum(spec.nbytes for layout in layouts for spec in layout.parameters)
    if side == "torch":
        states = TorchOptimizer(ADAMW)
        return {"weights": weights, "gradients": weights, "states": state_bytes(states, layouts)}
    update = UPDATES[side.partition(":")[0]]()
    return {"weights": weights, "gradients": bytes_of_gradients(update, layouts), "states": state_bytes(update, layouts)}


def bench_host(options: argparse.Namespace, rows: int, tokens: int) -> list[dict[str, Any]]:
    """Late updates against prompt ones, on hosts that are slower and slower."""
    probe = open_checkpoint(options.directory)
    batch = random_batch(probe.config.vocab_size, rows, tokens, seed=0)
    policy = MemoryPolicy(host=HostPlan((), 0, None, keep_noise=False), activations=1 << 36)
    weights = sum(spec.nbytes for layout in probe.layouts for spec in layout.parameters)
    hosts = {"prompt": SlowHost(TorchOptimizer(ADAMW)), "late": SlowHost(TorchOptimizer(ADAMW))}
    updates: dict[str, BlockUpdate] = {"lomo": LOMO(), "prompt": hosts["prompt"], "late": Delayed(hosts["late"])}
    engines = {
        name: Engine(open_checkpoint(options.directory), FirstOrder(update, lr=LR), memory=policy)
        for name, update in updates.items()
    }

    def seconds(name: str) -> list[float]:
        return [engines[name].step(batch).seconds for _ in range(WARM_UP + options.steps)][WARM_UP:]

    device = statistics.median(seconds("lomo"))  # an update without states takes next to nothing
    measured = []
    for ratio in map(float, options.host.split(",")):
        for host in hosts.values():
            host.seconds_a_byte = ratio * device / weights
        prompt, late = seconds("prompt"), seconds("late")
        measured.append(
            {
                "host_to_device": ratio,
                "device_seconds": device,
                "prompt": spread(prompt),
                "late": spread(late),
                "times_faster": spread([a / b for a, b in zip(prompt, late, strict=True)]),
            }
        )
    for engine in engines.values():
        engine.close()
    return measured


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shapes", default="4x256", help="rows x tokens")
    parser.add_argument("--sides", default="adamw:graphs,adamw:inputs", help="optimizer, and what blocks keep")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--host", help="compare late updates, where the host takes so many times what the device takes")
    parser.add_argument("--output", type=Path, help="write JSON here")
    options = parser.parse_args()
    keep_freed_memory(SMALL)
    measured: dict[str, Any] = {
        "machine": machine(),
        "directory": options.directory.name,
        "dtype": str(open_checkpoint(options.directory).layouts[1].parameters[0].dtype),
        "steps": options.steps,
        "shapes": [],
        "bytes": {side: bytes_by_part(options.directory, side) for side in [*options.sides.split(","), "torch"]},
    }
    for shape in options.shapes.split(","):
        rows, tokens = map(int, shape.split("x"))
        if options.host is not None:
            measured["shapes"] += (hosts := bench_host(options, rows, tokens))
            for host in hosts:
                faster = host["times_faster"]
                print(
                    f"host {host['host_to_device']:g} of the device: late updates {faster['median']:.2f} times faster",
                    flush=True,
                )
            continue
        measured["shapes"].append(one := bench(options, rows, tokens))
        print(f"{rows} x {tokens}")
        for name, value in {**one["seconds"], **one["ratios"]}.items():
            print(f"  {name:30s}{value['median']:9.3f} [{value['min']:.3f} - {value['max']:.3f}]", flush=True)
    for side, parts in measured["bytes"].items():
        print(f"{side:20s}" + "".join(f"{name} {nbytes / 1e9:8.3f} GB  " for name, nbytes in parts.items()))
    keep(measured, options.output)


if __name__ == "__main__":
    main()
