"""An own training loop: the engine computes losses and gradients, and all else is yours.

``engine.gradients`` stands where ``loss.backward()`` does. Optimizer, schedule, clipping and
accumulation are torch's, on the parameters of an adapter.
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig
from tiny import counting_batch, save_tiny_model

from zo2adapters import Adapter, open_checkpoint
from zo2core import Engine, FirstOrder

STEPS = 20
ACCUMULATED = 2  # batches a step


def main(folder: Path) -> list[float]:
    """Return the losses of all steps."""
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    base = save_tiny_model(folder / "base")
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    losses = []
    with Engine(model, FirstOrder(None)) as engine:
        parameters = list(engine.parameters.values())
        optimizer = torch.optim.RAdam(parameters, lr=3e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-2, total_steps=STEPS)
        for step in range(STEPS):
            batches = [counting_batch(step * ACCUMULATED + at) for at in range(ACCUMULATED)]
            losses.append(engine.gradients(batches))  # one pass over the blocks for all of them
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 5 == 0:
                print(f"step {step}: loss {losses[-1]:.3f}, gradient norm {norm:.3f}")
        engine.export(folder / "adapter")
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
