"""A model larger than memory: a limit holds, and the result has the same bits as without one.

The blocks that fit stay in memory; the others are read from the checkpoint's files in each step,
while the block before computes. This model has 126 MB. In place of a small computer, the limit
leaves room for half of it.
"""

import tempfile
from functools import partial
from pathlib import Path

import psutil
import torch
from peft import LoraConfig
from tiny import counting_batch, save_tiny_model

from zo2adapters import Adapter, open_checkpoint
from zo2core import Engine, FirstOrder, MemoryPolicy

STEPS = 2
ACTIVATIONS = 8 << 20  # bytes for what a step computes


def train(base: Path, memory: MemoryPolicy) -> tuple[list[float], int | None]:
    """Return the losses of some steps, and how many blocks memory has room for; None: for all."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    with Engine(model, FirstOrder(partial(torch.optim.AdamW, lr=1e-2)), memory=memory) as engine:
        assert engine.host_plan is not None
        print(engine.host_plan.table())  # before the first step: what takes how much
        losses = [engine.step(counting_batch(step)).loss for step in range(STEPS)]
        return losses, engine.host_plan.buckets


def main(folder: Path) -> tuple[int | None, list[float], list[float]]:
    """Return the room for blocks within the limit, and the losses within it and without."""
    base = save_tiny_model(folder / "base", width=512, layers=12)
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))

    limit = psutil.Process().memory_info().rss + size // 2 + ACTIVATIONS
    limited, blocks = train(base, MemoryPolicy(host=limit, activations=ACTIVATIONS))
    print(f"{size / 1e6:.0f} MB of weights, {blocks} blocks in memory at a time: {limited}")

    unlimited, _ = train(base, MemoryPolicy(host="auto", activations=ACTIVATIONS))
    print(f"all in memory: {unlimited}")
    return blocks, limited, unlimited


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
