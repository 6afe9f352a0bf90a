"""Hold first-order steps against transformers, peft and torch.optim on a given checkpoint and machine, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.heads import head_of
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_model import Adapter, peft_config
from zo2adapters.optional_package import optional_package
from zo2adapters.trainers.first_order import METHODS, MethodName
from zo2adapters.trainers.model_options import ModelOptions
from zo2adapters.trainers.optimization import StepSize
from zo2adapters.trainers.verification import Comparison, RandomBatches, first_difference, require_fit
from zo2core import BackpropEngine, OptionError


def verify_first_order(
    directory: Path, opening: ModelOptions, method: MethodName, adapter: Path, size: StepSize, batches: RandomBatches
) -> Comparison:
    """Train an adapter over the stream and on the whole model, and compare losses, gradient norms and the adapter.

    Memory: the whole model twice, and its activations.

    Args:
        directory: Model directory.
        opening: How the checkpoint is opened.
        method: Names the optimizer.
        adapter: Adapter of peft: a config, or a directory.
        size: The optimizer's learning rate and weight decay.
        batches: What to compare on; their seed is that of the adapter's first values, too.

    Returns:
        The comparison.

    Raises:
        OptionError: if the model does not take rows of so many tokens, or the adapter is a prefix.
        MemoryBudgetError: if model and batch do not fit into the memory that is free.
    """
    given: dict[str, Any] = {"architecture": opening.architecture, "dtype": opening.dtype, "precision": opening.precision}
    given["adapter"] = Adapter(config=adapter, seed=batches.seed)
    model = open_checkpoint(directory, head=opening.head, loss_chunk=None, **given)
    require_fit(model, batches)
    optimizer = partial(METHODS[method], lr=size.rate, weight_decay=size.weight_decay)
    with BackpropEngine(model, optimizer) as engine:
        whole = _resident(model, directory, adapter, opening.head)
        trained = {name: parameter for name, parameter in whole.named_parameters() if name in engine.parameters}
        for name, value in engine.parameters.items():
            trained[name].data = value.detach().clone()
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


def _resident(model: HFBlockModel, directory: Path, adapter: Path, head: str) -> Any:
    """The whole model with peft's modules; only the adapter requires gradients.

    Raises:
        OptionError: for an adapter that peft does not inject.
    """
    peft = optional_package("peft", install="zo2core[peft]")
    config = peft_config(Adapter(config=adapter)).config
    if config.is_prompt_learning:
        expected = "an adapter whose modules stand in the model, as LoRA's"
        raise OptionError("adapter", found=str(config.peft_type), expected=expected, remedy="verify with LoRA")
    dtype = torch.float32 if model.autocast is not None else model.config.dtype
    whole = head_of(head).class_of(model.config).from_pretrained(directory, dtype=dtype, trust_remote_code=False)
    peft.inject_adapter_in_model(config, whole)
    names = {spec.name for layout in model.layouts for spec in layout.parameters if not spec.frozen}
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = name in names
        parameter.data = (
            parameter.data.clone()
        )  # what is mapped from a file lies unaligned, and products round otherwise there
    return whole.eval()
