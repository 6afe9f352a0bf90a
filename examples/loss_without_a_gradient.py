"""A loss without a gradient: a rule that judges predicted tokens, here that they are even numbers.

A zeroth-order step compares losses at weights that are moved along random directions. It needs
numbers alone, so the loss can be anything that a program computes. The journal is the whole
result: a few numbers a step, from which the weights are computed again.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny import counting_batch, save_tiny_model

from zo2adapters import CalledForward, open_checkpoint
from zo2core import Engine, EvolutionStrategies, LowRankPerturbation, ZerothOrder

STEPS = 20


def share_of_odd_numbers(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The number to minimise. Its gradient is 0 wherever it has one."""
    predicted = model(input_ids=batch["input_ids"]).logits.argmax(-1)
    return (predicted % 2).float().mean()


def main(folder: Path) -> tuple[float, float, int]:
    """Return the share of odd numbers in the first and the last step, and the journal's bytes."""
    model = open_checkpoint(save_tiny_model(folder / "base", layers=2))
    forward = CalledForward(model, share_of_odd_numbers)
    method = ZerothOrder(
        EvolutionStrategies(lr=0.02, zo_eps=0.02, q=4, perturb_in_place=False),
        perturbation=LowRankPerturbation(rank=8),
        seed=1,
    )
    journal = folder / "journal.jsonl"
    losses = []
    with Engine(model, method, journal=journal) as engine:
        for step in range(STEPS):
            losses.append(engine.step(counting_batch(step), forward).loss)
            if step % 5 == 0:
                print(f"step {step}: {losses[-1]:.0%} of the predicted numbers are odd")
        engine.export(folder / "trained")  # a directory that from_pretrained loads
    print(f"the journal of {STEPS} steps has {journal.stat().st_size} bytes")
    return losses[0], losses[-1], journal.stat().st_size


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
