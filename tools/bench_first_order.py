"""First-order LoRA steps over the stream against transformers and peft on the whole model, all in memory.

    python tools/make_checkpoint.py smollm2-135m /tmp/smollm2-135m --dtype bfloat16
    python tools/bench_first_order.py /tmp/smollm2-135m --shapes 4x256,16x40 --output first-order.json

Four sides take turns in one process, whose allocator keeps freed memory as that of ``zo2 train`` does: the stream with
memory for the inputs of blocks alone, the stream with memory for all graphs, peft with gradient checkpointing, and peft with
its graphs kept. All have the same adapter, batch and optimizer, and their losses have to be equal. Prints a table and JSON:
medians, and ranges of ratios between neighbours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from measuring import keep, machine, spread
from transformers import AutoConfig, AutoModelForCausalLM

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.footprint import expected_held_bytes, forward_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.allocator import SMALL, keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, FirstOrder, HostPlan, MemoryPolicy
from zo2core.sweep.gradient_memory import gradient_bytes

WARM_UP = 2
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")  # of configs; checkpointing turns them on
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-4)


def adapter(rank: int) -> peft.LoraConfig:
    """LoRA on the projections of queries and values."""
    return peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"])


def room_for_inputs(model: HFBlockModel, rows: int, tokens: int) -> int:
    """Bytes that one segment's graph and the inputs of all blocks take."""
    held = expected_held_bytes(model.config, rows, tokens)
    return gradient_bytes(held, forward_bytes(model.config, rows, tokens), len(model.layouts) - 2)


class Resident:
    """The whole model with peft's adapter.

    Args:
        directory: The checkpoint.
        rank: Rank of the adapter.
        checkpointing: Whether the graphs of blocks are made again on the way back.
        values: First values of the adapter, by name.
    """

    def __init__(self, directory: Path, rank: int, values: dict[str, torch.Tensor], *, checkpointing: bool) -> None:
        config: Any = AutoConfig.from_pretrained(directory)
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype="auto")
        peft.inject_adapter_in_model(adapter(rank), self.model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad = name in values
            # What was mapped from a file lies where no allocator puts it, and products round otherwise there.
            parameter.data = values.get(name, parameter.data).clone()
        if checkpointing:
            whole: Any = self.model
            whole.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # what makes transformers checkpoint
        self.optimizer = OPTIMIZER([parameter for parameter in self.model.parameters() if parameter.requires_grad])

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        """One step; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def first_values(model: HFBlockModel) -> dict[str, torch.Tensor]:
    """The adapter's, as the stream begins with them."""
    values = {}
    for spec in (spec for layout in model.layouts for spec in layout.parameters if not spec.frozen):
        values[spec.name] = torch.empty(spec.shape, dtype=spec.dtype)
        model.weights.read_into(spec.name, values[spec.name].view(-1))
    return values


def bench(options: argparse.Namespace, rows: int, tokens: int) -> dict[str, Any]:
    """One shape of batches."""

    def opened() -> HFBlockModel:
        return open_checkpoint(options.directory, adapter=Adapter(config=adapter(options.rank), seed=0))

    def engine(room: int) -> Engine:
        host = HostPlan((), 0, None, keep_noise=False)
        return Engine(opened(), FirstOrder(OPTIMIZER), memory=MemoryPolicy(host=host, activations=room))

    probe = opened()
    batch = random_batch(probe.config.vocab_size, rows, tokens, seed=0)
    values, inputs_alone = first_values(probe), room_for_inputs(probe, rows, tokens)
    with engine(inputs_alone) as recomputing, engine(1 << 36) as keeping:
        checkpointing = Resident(options.directory, options.rank, values, checkpointing=True)
        resident = Resident(options.directory, options.rank, values, checkpointing=False)
        sides: dict[str, Callable[[], float]] = {
            "stream": lambda: recomputing.step(batch).loss,
            "stream, graphs kept": lambda: keeping.step(batch).loss,
            "peft, checkpointing": lambda: checkpointing.step(batch),
            "peft": lambda: resident.step(batch),
        }
        names = list(sides)
        measured: dict[str, list[float]] = {name: [] for name in names}
        for number in range(WARM_UP + options.steps):
            losses = {}
            for name in names if number % 2 else reversed(names):  # what a side finds in memory differs by its neighbour
                began = time.perf_counter()
                losses[name] = sides[name]()
                if number >= WARM_UP:
                    measured[name].append(time.perf_counter() - began)
            if len(set(losses.values())) > 1:
                raise SystemExit(f"losses of step {number} differ: {losses}")
    ratios = {
        "stream to peft, checkpointing": ("stream", "peft, checkpointing"),
        "stream, graphs kept to peft, checkpointing": ("stream, graphs kept", "peft, checkpointing"),
        "stream, graphs kept to peft": ("stream, graphs kept", "peft"),
    }
    return {
        "rows": rows,
        "tokens": tokens,
        "seconds": {name: spread(spans) for name, spans in measured.items()},
        "ratios": {
            name: spread([a / b for a, b in zip(measured[ours], measured[theirs], strict=True)])
            for name, (ours, theirs) in ratios.items()
        },
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rank", type=int, default=8, help="of the LoRA")
    parser.add_argument("--shapes", default="4x256,16x40", help="rows x tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write JSON here")
    options = parser.parse_args()
    keep_freed_memory(SMALL)
    measured: dict[str, Any] = {
        "machine": machine(),
        "directory": options.directory.name,
        "rank": options.rank,
        "steps": options.steps,
        "shapes": [],
    }
    for shape in options.shapes.split(","):
        rows, tokens = map(int, shape.split("x"))
        measured["dtype"] = str(open_checkpoint(options.directory).layouts[1].parameters[0].dtype)
        measured["shapes"].append(one := bench(options, rows, tokens))
        print(f"{rows} x {tokens}")
        for name, value in {**one["seconds"], **one["ratios"]}.items():
            print(f"  {name:46s}{value['median']:9.3f} [{value['min']:.3f} - {value['max']:.3f}]", flush=True)
    keep(measured, options.output)


if __name__ == "__main__":
    main()
