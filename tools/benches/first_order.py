"""First-order steps over the stream against transformers, peft and torch.optim with everything in memory.

    python tools/make_checkpoint.py smollm2-135m /tmp/smollm2-135m --dtype bfloat16
    python tools/bench.py first-order /tmp/smollm2-135m --shapes 4x256,16x40
    python tools/make_checkpoint.py opt-350m /tmp/opt-350m --dtype float32
    python tools/bench.py first-order /tmp/opt-350m --full adamw lomo sgd
    python tools/bench.py first-order /tmp/opt-350m --full adamw --host 0.25 0.5 1

LoRA of queries and values; with ``--full`` all parameters, by these optimizers. Sides are the stream with memory for the
inputs of blocks alone (*recomputing*) and for all graphs (*graphs kept*; of several optimizers this one only), and the whole
model, of LoRA with gradient checkpointing, too. All have the same weights and batch, and the losses of those with AdamW have
to be equal. With ``--full``, the bytes of weights, gradients and states are listed, too.

``--host`` compares late updates with prompt ones on a host that is slow beside its device: the update of a step takes so
many times what forward and backward take, in which the thread of the update sleeps. This machine's cores are the device.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from measuring import alternate, host_memory, require_equal, seconds_of, shapes, times_faster
from transformers import AutoConfig, AutoModelForCausalLM

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.footprint import expected_held_bytes, forward_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.allocator import SMALL, keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import LOMO, AdaLOMO, BAdam, BlockLayout, BlockUpdate, Delayed, Engine, FirstOrder, TorchOptimizer
from zo2core.methods.first_order import gradient_bytes as bytes_of_gradients
from zo2core.optimizer_states import state_bytes
from zo2core.protocols import UpdateInputs
from zo2core.sweep.gradient_visitor import gradient_bytes
from zo2core.types import Batch, StateSpec

LR = 1e-6
ALL_GRAPHS = 1 << 36  # bytes
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")  # of configs; checkpointing turns them on
ADAMW = partial(torch.optim.AdamW, lr=LR, fused=True)
OF_ADAPTER = partial(torch.optim.AdamW, lr=1e-4)
UPDATES: Mapping[str, Callable[[], BlockUpdate]] = {
    "adamw": lambda: TorchOptimizer(ADAMW),
    "adamw8": lambda: TorchOptimizer(partial(importlib.import_module("bitsandbytes").optim.AdamW8bit, lr=LR)),
    "sgd": lambda: TorchOptimizer(partial(torch.optim.SGD, lr=LR)),
    "lomo": LOMO,
    "adalomo": AdaLOMO,
    "badam": lambda: BAdam(ADAMW),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rank", type=int, default=8, help="rank of the LoRA")
    parser.add_argument("--full", nargs="+", choices=list(UPDATES), help="train all parameters by these optimizers")
    parser.add_argument("--host", type=float, nargs="+", help="times that the update takes on the host, for late updates")
    parser.add_argument("--shapes", type=shapes, default="4x256", help="shapes of batches, as rows x tokens")
    parser.add_argument("--steps", type=int, default=5)


def run(options: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory(SMALL)  # as zo2 train does
    measure = late_updates if options.host else bench
    measured: dict[str, Any] = {f"{rows} x {tokens}": measure(options, rows, tokens) for rows, tokens in options.shapes}
    if options.full:
        measured["bytes"] = {name: bytes_by_part(options.directory, name) for name in options.full}
        weights = measured["bytes"][options.full[0]]["weights_bytes"]
        states = state_bytes(TorchOptimizer(ADAMW), open_checkpoint(options.directory).layouts)
        measured["bytes"]["whole"] = {"weights_bytes": weights, "gradients_bytes": weights, "states_bytes": states}
    return measured


def lora(options: argparse.Namespace) -> peft.LoraConfig:
    """LoRA on the projections of queries and values."""
    return peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=["q_proj", "v_proj"])


def opened_model(options: argparse.Namespace) -> HFBlockModel:
    """The model, with the adapter unless all parameters are trained."""
    adapter = None if options.full else Adapter(config=lora(options), seed=0)
    return open_checkpoint(options.directory, adapter=adapter)


class Whole:
    """The whole model in memory.

    Args:
        options: The command line.
        first: First values of the adapter, by name; without an adapter it is empty, and all parameters are trained.
        checkpointing: Whether the graphs of blocks are made again on the way back.
    """

    def __init__(self, options: argparse.Namespace, first: Mapping[str, torch.Tensor], *, checkpointing: bool) -> None:
        config: Any = AutoConfig.from_pretrained(options.directory)
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        self.model: Any = AutoModelForCausalLM.from_pretrained(options.directory, config=config, dtype="auto")
        if first:
            peft.inject_adapter_in_model(lora(options), self.model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad = not first or name in first
            # What was mapped from a file lies where no allocator puts it, and products round otherwise there.
            parameter.data = first.get(name, parameter.data).clone()
        if checkpointing:
            whole: Any = self.model
            whole.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # what makes transformers checkpoint
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = (OF_ADAPTER if first else ADAMW)(trained)

    def step(self, batch: Batch) -> float:
        """One step; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def first_values(model: HFBlockModel) -> dict[str, torch.Tensor]:
    """The adapter's values, as the stream begins with them."""
    values = {}
    for spec in (spec for layout in model.layouts for spec in layout.parameters if not spec.frozen):
        values[spec.name] = torch.empty(spec.shape, dtype=spec.dtype)
        model.weights.read_into(spec.name, values[spec.name].view(-1))
    return values


def bench(options: argparse.Namespace, rows: int, tokens: int) -> dict[str, Any]:
    """One shape of batches."""
    probe = opened_model(options)
    batch = random_batch(probe.config.vocab_size, rows, tokens, seed=0)
    held, running = expected_held_bytes(probe.config, rows, tokens), forward_bytes(probe.config, rows, tokens)
    rooms = {"recomputing": gradient_bytes(held, running, len(probe.layouts) - 2), "graphs kept": ALL_GRAPHS}
    sides: dict[str, Callable[[], float]] = {}

    def step(engine: Engine) -> float:
        return float(engine.step(batch).loss)

    with ExitStack() as opened:
        for optimizer in options.full or ["adamw"]:
            for room, nbytes in list(rooms.items())[len(options.full or []) > 1 :]:
                method = FirstOrder(UPDATES[optimizer](), lr=LR) if options.full else FirstOrder(OF_ADAPTER)
                engine = Engine(opened_model(options), method, memory=host_memory(None, nbytes))
                sides[f"{optimizer}, {room}"] = partial(step, opened.enter_context(engine))
        first = {} if options.full else first_values(probe)
        others = ["whole"] if options.full else ["whole", "whole, checkpointing"]
        for name in others:
            sides[name] = partial(Whole(options, first, checkpointing=name != "whole").step, batch)
        measured = alternate(sides, options.steps)
    alike = {name: side for name, side in measured.items() if name.startswith(("adamw,", "whole"))}
    require_equal(alike, lambda loss: loss)
    ratios = {
        name: {f"to {other}": times_faster(measured, other, name) for other in others}
        for name in sides
        if name not in others
    }
    return {"seconds": seconds_of(measured), "times as long": ratios}


def bytes_by_part(directory: Path, name: str) -> dict[str, int]:
    """What an optimizer keeps of weights, gradients and states, in bytes, besides activations."""
    layouts, update = open_checkpoint(directory).layouts, UPDATES[name]()
    weights = sum(spec.nbytes for layout in layouts for spec in layout.parameters)
    gradients, states = bytes_of_gradients(update, layouts), state_bytes(update, layouts)
    return {"weights_bytes": weights, "gradients_bytes": gradients, "states_bytes": states}


class SlowHost(BlockUpdate):
    """AdamW on a host that takes a given time for each byte of weights."""

    def __init__(self) -> None:
        self._update = TorchOptimizer(ADAMW)
        self.seconds_a_byte = 0.0

    @property
    def options(self) -> Mapping[str, Any]:
        return self._update.options

    @property
    def widens_gradients(self) -> bool:
        return self._update.widens_gradients

    @property
    def copies(self) -> int:
        return self._update.copies

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        return self._update.states(layout)

    def apply(self, inputs: UpdateInputs) -> None:
        """Apply the update, in no less than its time. See the contract."""
        began = time.perf_counter()
        self._update.apply(inputs)
        seconds = self.seconds_a_byte * sum(weight.nbytes for weight in inputs.weights.values())
        time.sleep(max(seconds - (time.perf_counter() - began), 0.0))


def late_updates(options: argparse.Namespace, rows: int, tokens: int) -> dict[str, Any]:
    """Late updates against prompt ones, on hosts that are slower and slower."""
    probe = open_checkpoint(options.directory)
    batch = random_batch(probe.config.vocab_size, rows, tokens, seed=0)
    weights = sum(spec.nbytes for layout in probe.layouts for spec in layout.parameters)
    hosts = [SlowHost(), SlowHost()]
    updates: dict[str, BlockUpdate] = {"lomo": LOMO(), "prompt": hosts[0], "late": Delayed(hosts[1])}
    measured: dict[str, Any] = {}
    with ExitStack() as opened:
        sides = {}
        for name, update in updates.items():
            model, memory = open_checkpoint(options.directory), host_memory(None, ALL_GRAPHS)
            engine = opened.enter_context(Engine(model, FirstOrder(update, lr=LR), memory=memory))
            sides[name] = partial(engine.step, batch)
        device = statistics.median(alternate({"lomo": sides.pop("lomo")}, options.steps)["lomo"].seconds)  # has no states
        for times in options.host:
            for host in hosts:
                host.seconds_a_byte = times * device / weights
            found = alternate(sides, options.steps)
            faster = times_faster(found, "late", "prompt")
            measured[f"{times:g} times the device's {device:.3g} s"] = seconds_of(found) | {"times faster": faster}
    return measured
