"""Figure 3 of the ZO2 paper: the peak device memory of AdamW, SGD, MeZO and this engine, counted in the same manner.

    python tools/bench_memory.py
    python tools/bench_memory.py --geometries opt-6.7b opt-13b --dtype float32 --tokens 1024 --output memory.json

The results of every operation are counted while they exist, together with weights and buffers. Whole models run on torch's
``meta`` device, which has shapes without memory, so that they are counted at full size on any machine. The engine computes,
with a bus simulated by threads, and at the true width of its blocks but with few of them (``--blocks``): its device holds
slots, embedding, head and activations for any number of blocks, which two counts with different numbers of blocks confirm.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from bench_paper import A100_MEMORY, batch_of
from make_checkpoint import geometries
from measuring import keep, machine
from paper_places import LR, Bus, Usage
from paper_tables import Variant
from paper_variants import NOISES
from synthetic import scaled
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from zo2adapters.models.checkpoint import DTYPES
from zo2core.types import Batch

BUS, HOST_MEMORY, DEVICE_MEMORY = 1e12, 10**10, 80 * 10**9  # bytes a second; bytes
EPS = 1e-3


def first_order(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[PreTrainedModel, Batch], Callable[[], None]]:
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

    def move(scale: float) -> None:
        for parameter in model.parameters():
            z = torch.normal(mean=0, std=1, size=parameter.size(), device=parameter.device, dtype=parameter.dtype)
            parameter.data = parameter.data + scale * z * EPS

    @torch.no_grad()
    def step() -> None:
        move(1)
        model(**batch)
        move(-2)
        model(**batch)
        move(1)
        move(LR)

    return step


WHOLE = {"AdamW": first_order(torch.optim.AdamW), "SGD": first_order(torch.optim.SGD), "MeZO": mezo}


def whole(config: PretrainedConfig, dtype: torch.dtype, tokens: int, trainer: Any) -> int:
    """The peak bytes of a whole model's second step, when all of the optimizer's state exists."""
    usage = Usage()
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    batch = {name: value.to("meta") for name, value in batch_of(config.vocab_size, 1, tokens, torch.device("cpu")).items()}
    for tensor in [*model.parameters(), *model.buffers()]:
        usage.hold(tensor)
        del tensor
    step = trainer(model, batch)
    with usage:
        step()
        usage.peak = usage.now
        step()
    return usage.peak


def engine(config: PretrainedConfig, dtype: torch.dtype, tokens: int, blocks: int) -> int:
    """The peak bytes of the engine's device in a step that replays updates."""
    few = deepcopy(config)
    few.num_hidden_layers = blocks
    place = Bus(HOST_MEMORY, DEVICE_MEMORY, BUS)
    model = place.model(few, dtype)
    offloaded = place.offload(model, Variant.FULL, NOISES["philox-rademacher"])
    assert offloaded is not None
    batch = batch_of(config.vocab_size, 1, tokens, place.torch_device)
    with offloaded.parts, offloaded.engine as running:
        running.step(batch)
        return place.peak_bytes(lambda: running.step(batch), batch.values())


def measured(name: str, dtype: torch.dtype, tokens: int, blocks: int) -> dict[str, Any]:
    """Measure one model: a group of bars in the figure."""
    config = scaled(geometries()[name], 1, tokens)
    sides: dict[str, Any] = {side: whole(config, dtype, tokens, trainer) for side, trainer in WHOLE.items()}
    gc.collect()
    sides["this engine"], more = (engine(config, dtype, tokens, number) for number in (blocks, blocks + 1))
    return {"model": name, "bytes": sides, "engine's bytes with a block more": more}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometries", nargs="+", choices=list(geometries()), default=["opt-6.7b", "opt-13b"])
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the batch's one row")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of the engine's model")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    rows = [measured(name, DTYPES[options.dtype], options.tokens, options.blocks) for name in options.geometries]
    print(f"| GB, {options.dtype}, 1 x {options.tokens} tokens | " + " | ".join([*WHOLE, "this engine"]) + " |")
    print("|---" * (len(WHOLE) + 2) + "|")
    for row in rows:
        cells = [f"{nbytes / 1e9:.1f}" + " X" * (nbytes > A100_MEMORY) for nbytes in row["bytes"].values()]
        print(f"| {row['model']} | " + " | ".join(cells) + " |")
    print("X: more than the 80 GB of the paper's GPU")
    keep({"dtype": options.dtype, "tokens": options.tokens, "rows": rows, "machine": machine()}, options.output)


if __name__ == "__main__":
    main()
