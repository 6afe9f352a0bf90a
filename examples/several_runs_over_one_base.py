"""Several runs over one base: three learning rates, and each block is read once for all of them.

Where a model streams from disk, the reads take most of a step: three runs then take little longer
than one. Each has the bits of the run alone.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from tiny import counting_batch, save_tiny_model

from zo2adapters import Adapter, open_checkpoint
from zo2core import Engine, EngineOptions, FirstOrder, SharedBase

STEPS = 15
RATES = (1e-3, 1e-2, 3e-2)


def open_run(base: Path, rate: float, shared: SharedBase | None) -> Engine:
    """A run with an adapter of its own."""
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    return Engine(
        open_checkpoint(base, adapter=Adapter(config=config, seed=1)),
        FirstOrder(partial(torch.optim.AdamW, lr=rate)),
        options=EngineOptions(source=shared),
    )


def main(folder: Path) -> tuple[dict[float, float], float]:
    """Return the last losses by learning rate, and that of the best run when it runs alone."""
    base = save_tiny_model(folder / "base")
    with SharedBase(open_checkpoint(base)) as shared:
        runs = {rate: open_run(base, rate, shared) for rate in RATES}
        for step in range(STEPS):
            batch = counting_batch(step)
            results = shared.step(dict.fromkeys(runs.values(), batch))
        losses = {rate: results[run].loss for rate, run in runs.items()}
        best = min(losses, key=losses.__getitem__)
        runs[best].export(folder / "adapter")
        for run in runs.values():
            run.close()
    print(f"losses after {STEPS} steps: {losses}; the adapter of {best} is kept")

    with open_run(base, best, None) as alone:
        for step in range(STEPS):
            loss = alone.step(counting_batch(step)).loss
    print(f"alone, the run of {best} ends at {loss}")
    return losses, loss


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
