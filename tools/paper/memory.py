"""Figure 3 of the ZO2 paper: the peak device memory of AdamW, SGD, MeZO and this engine, counted in the same manner.

    python tools/bench.py memory
    python tools/bench.py memory --geometries opt-6.7b opt-13b --dtype float32 --tokens 1024

The results of every operation are counted while they exist, together with weights and buffers. Whole models run on torch's
``meta`` device, which has shapes without memory, so that they are counted at full size on any machine. The engine computes,
with a bus simulated by threads, and at the true width of its blocks but with few of them (``--blocks``): its device holds
slots, embedding, head and activations for any number of blocks, which a second count, with a block more, confirms.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
from benches.compare import Measured, side_parser
from make_checkpoint import geometries
from measuring import Usage
from synthetic import scaled
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paper.zo2 import A100_MEMORY, LR
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.verification import random_batch
from zo2core.types import Batch

EPS = 1e-3

Trainer = Callable[[PreTrainedModel, Batch], Callable[[], None]]  # makes a model's step


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometries", nargs="+", choices=list(geometries()), default=["opt-6.7b", "opt-13b"])
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the batch's one row")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of the engine's model")


def run(options: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    for name in options.geometries:
        config = scaled(geometries()[name], 1, options.tokens)
        sides = {f"{side}_bytes": whole(config, options, trainer) for side, trainer in WHOLE.items()}
        gc.collect()
        sides["this engine_bytes"] = engine(name, options, options.blocks)
        sides["this engine with a block more_bytes"] = engine(name, options, options.blocks + 1)
        measured[name] = sides | {"more than the paper's GPU has": sum(nbytes > A100_MEMORY for nbytes in sides.values())}
    return measured


def first_order(optimizer: Callable[..., torch.optim.Optimizer]) -> Trainer:
    """A first-order trainer that keeps gradients between steps, as torch's examples do."""

    def trainer(model: PreTrainedModel, batch: Batch) -> Callable[[], None]:
        rule = optimizer(model.parameters(), lr=LR)

        def step() -> None:
            model(**batch).loss.backward()
            rule.step()
            rule.zero_grad()

        return step

    return trainer


def mezo(model: PreTrainedModel, batch: Batch) -> Callable[[], None]:
    """MeZO's loop: one parameter's z at a time, no gradients. ``MonolithicMeZO`` reads its losses: ``meta`` has none."""

    def perturb(scale: float) -> None:
        for parameter in model.parameters():
            z = torch.normal(mean=0, std=1, size=parameter.size(), device=parameter.device, dtype=parameter.dtype)
            parameter.data = parameter.data + scale * z * EPS

    @torch.no_grad()
    def step() -> None:
        perturb(1)
        model(**batch)
        perturb(-2)
        model(**batch)
        perturb(1)
        perturb(LR)

    return step


WHOLE: dict[str, Trainer] = {"AdamW": first_order(torch.optim.AdamW), "SGD": first_order(torch.optim.SGD), "MeZO": mezo}


def whole(config: PretrainedConfig, options: argparse.Namespace, trainer: Trainer) -> int:
    """The peak bytes of a whole model's second step, when all of the optimizer's state exists."""
    usage = Usage()
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=DTYPES[options.dtype], attn_implementation="sdpa")
    model.config.use_cache = False
    batch = random_batch(config.vocab_size, 1, options.tokens, seed=0)
    step = trainer(model, {name: value.to("meta") for name, value in batch.items() if name != "attention_mask"})
    usage.peak_of(step, (tensor for part in (model.parameters(), model.buffers()) for tensor in part))
    return usage.peak_of(step)


def engine(name: str, options: argparse.Namespace, blocks: int) -> int:
    """The peak bytes of the engine's device in a step that replays updates."""
    side = side_parser().parse_args(["--dtype", options.dtype, "--bus", "1TB"])
    given = argparse.Namespace(model=name, data=None, labelled=None, unpadded=True)
    made = Measured(given, side, 1, options.tokens, layers=blocks)
    with made.opened() as step:
        step()
        return made.device_bytes(step)
