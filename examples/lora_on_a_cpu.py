"""LoRA on a CPU: train an adapter of peft by gradients, save it, and load it with peft.

The base is only read, block by block. Losses and adapter equal those of peft and torch.optim on the
whole model, bit for bit.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from tiny import counting_batch, save_tiny_model
from transformers import AutoModelForCausalLM

from zo2adapters import Adapter, open_checkpoint
from zo2core import Engine, FirstOrder

STEPS = 20


def main(folder: Path) -> tuple[float, float, float]:
    """Return the losses of held-out rows before and after, and the one that peft computes."""
    base = save_tiny_model(folder / "base")
    held_out = counting_batch(step=-1)

    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))  # reads headers only
    method = FirstOrder(partial(torch.optim.AdamW, lr=3e-2), clip=1.0)
    with Engine(model, method, memory="4GiB") as engine:
        before = engine.evaluate([held_out]).loss
        for step in range(STEPS):
            result = engine.step(counting_batch(step))
            if step % 10 == 0:
                print(f"step {step}: loss {result.loss:.3f}")
        after = engine.evaluate([held_out]).loss
        engine.export(folder / "adapter")
    print(f"held-out rows: {before:.3f} before, {after:.3f} after")

    whole = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), folder / "adapter"
    )
    with torch.no_grad():
        in_peft = whole(**held_out).loss.item()
    print(f"the adapter in peft: {in_peft:.3f}")
    return before, after, in_peft


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
