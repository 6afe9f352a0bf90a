"""Hold first-order steps against transformers, peft and torch.optim on a given checkpoint and machine, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.peft_model import Adapter
from zo2adapters.trainers.first_order import METHODS, MethodName
from zo2adapters.trainers.model_options import ModelOptions
from zo2adapters.trainers.optimization import StepSize
from zo2adapters.trainers.verification import (
    Comparison,
    RandomBatches,
    copy_trained,
    first_difference,
    require_fit,
    whole_model,
)
from zo2core import BackpropEngine


def verify_first_order(
    directory: Path, opening: ModelOptions, method: MethodName, adapter: Adapter, size: StepSize, batches: RandomBatches
) -> Comparison:
    """Train an adapter over the stream and on the whole model, and compare losses, gradient norms and the adapter.

    Memory: the whole model twice, and its activations.

    Args:
        directory: Model directory.
        opening: How the checkpoint is opened.
        method: Names the optimizer.
        adapter: The adapter that is trained.
        size: The optimizer's learning rate and weight decay.
        batches: What to compare on.

    Returns:
        The comparison.

    Raises:
        OptionError: if the model does not take rows of so many tokens, or the adapter is a prefix.
        MemoryBudgetError: if model and batch do not fit into the memory that is free.
    """
    given: dict[str, Any] = {"architecture": opening.architecture, "dtype": opening.dtype, "precision": opening.precision}
    model = open_checkpoint(directory, head=opening.head, loss_chunk=None, adapter=adapter, **given)
    require_fit(model, batches)
    optimizer = partial(METHODS[method], lr=size.rate, weight_decay=size.weight_decay)
    with BackpropEngine(model, optimizer) as engine:
        whole = whole_model(model, directory, opening.head, adapter)
        trained = copy_trained(model, whole, engine.parameters)
        resident = optimizer(list(trained.values()))
        for step in range(batches.steps):
            batch = batches.batch(model, step)
            ours = engine.step(batch)
            with torch.autocast("cpu", dtype=model.autocast, enabled=model.autocast is not None):
                loss = whole(**batch, use_cache=False).loss
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in trained.values() if p.grad is not None])
            for name, a, b in (("loss", ours.loss, loss.item()), ("gradient norm", ours.grad_norm, norm.item())):
                if a != b:
                    return Comparison(step + 1, 0, f"step {step}, {name}: block by block {a!r}, whole {b!r}")
            resident.step()
            resident.zero_grad()
        for name, value in engine.parameters.items():
            place = first_difference(value.detach(), trained[name].detach())
            if place is not None:
                return Comparison(batches.steps, len(trained), f"after {batches.steps} steps, {name}{place}")
    return Comparison(batches.steps, len(trained), None)
