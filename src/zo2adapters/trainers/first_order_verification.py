"""Compare first-order steps with transformers, peft and torch.optim on a given checkpoint and machine, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_adapter import Adapter
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
from zo2core import Batch, Engine, FirstOrder, StepResult
from zo2core.names import OptimizerName
from zo2core.optimizer_states import StateMemory
from zo2core.optimizers import OPTIMIZERS, make_block_update
from zo2core.protocols import UpdateInputs
from zo2core.ranges import counted
from zo2core.types import widened


def verify_first_order(
    directory: Path,
    opening: ModelOptions,
    method: OptimizerName,
    adapter: Adapter | None,
    size: StepSize,
    batches: RandomBatches,
) -> Comparison:
    """Train block by block and on the whole model, and compare losses, gradient norms and what is trained.

    Memory: the whole model twice, its activations and, for all parameters, gradients and optimizer states.
    """
    given: dict[str, Any] = {"architecture": opening.architecture, "dtype": opening.dtype, "precision": opening.precision}
    model = open_checkpoint(directory, head=opening.head, loss_chunk=None, adapter=adapter, **given)
    require_fit(model, batches)
    if adapter is None:
        return _verify_all(directory, model, opening.head, method, size, batches)
    of_adapter = OPTIMIZERS[method].of_adapter
    assert of_adapter is not None, "others were refused with an adapter"
    optimizer = partial(of_adapter, lr=size.rate, weight_decay=size.weight_decay)
    with Engine(model, FirstOrder(optimizer)) as engine:
        whole = whole_model(model, directory, opening.head, adapter)
        trained = copy_trained(model, whole, engine.parameters)
        resident = optimizer(list(trained.values()))
        for step in range(batches.steps):
            batch = batches.batch(model, step)
            difference = _difference(step, engine.step(batch), _backward(model, whole, batch), trained, widens=False)
            if difference is not None:
                return Comparison(step + 1, 0, difference)
            resident.step()
            resident.zero_grad()
        return _compared(batches.steps, engine.parameters.items(), trained)


def _verify_all(
    directory: Path, model: HFBlockModel, head: str, method: OptimizerName, size: StepSize, batches: RandomBatches
) -> Comparison:
    """Train all parameters both ways: the whole model by autograd, with an optimizer of its own."""
    ours, theirs = (make_block_update(method, weight_decay=size.weight_decay, switch_every=1) for _ in range(2))
    whole = whole_model(model, directory, head, None).eval()
    values = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    everything = copy_trained(model, whole, values)
    names = {
        index: [spec.name for spec in layout.parameters] for index, layout in enumerate(model.layouts) if layout.parameters
    }
    states = StateMemory(theirs, model.layouts)
    with Engine(model, FirstOrder(ours, lr=size.rate)) as engine:
        for step in range(batches.steps):
            segments = theirs.segments(step, sorted(names))
            trained = {name: everything[name] for name in everything if any(name in names[index] for index in segments)}
            for name, parameter in everything.items():
                parameter.requires_grad = name in trained
            batch = batches.batch(model, step)
            loss, widens = _backward(model, whole, batch), theirs.widens_gradients
            difference = _difference(step, engine.step(batch), loss, trained, widens=widens)
            if difference is not None:
                return Comparison(step + 1, 0, difference)
            states.begin(step)
            for index in segments:
                weights = {name: trained[name].detach() for name in names[index]}
                gradients = {
                    name: widened(grad) if widens else grad
                    for name in names[index]
                    if (grad := trained[name].grad) is not None
                }
                theirs.apply(UpdateInputs(index, weights, gradients, states.of(index, ()), step, size.rate))
            whole.zero_grad()
        return _compared(batches.steps, engine.parameters_now(), everything)


def _backward(model: HFBlockModel, whole: Any, batch: Batch) -> float:
    """Run the whole model forward and backward; returns its loss."""
    with torch.autocast("cpu", dtype=model.autocast, enabled=model.autocast is not None):
        loss = whole(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def _difference(
    step: int, ours: StepResult, loss: float, trained: Mapping[str, nn.Parameter], *, widens: bool
) -> str | None:
    """The first difference between a step's numbers and the whole model's, as text; None: there is none."""
    gradients = [parameter.grad for parameter in trained.values() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([widened(gradient) if widens else gradient for gradient in gradients])
    for name, a, b in (("loss", ours.loss, loss), ("gradient norm", ours.grad_norm, norm.item())):
        if a != b:
            return f"step {step}, {name}: block by block {a!r}, whole {b!r}"
    return None


def _compared(steps: int, ours: Iterable[tuple[str, torch.Tensor]], trained: Mapping[str, nn.Parameter]) -> Comparison:
    """Compare what was trained, after so many equal steps."""
    for name, value in ours:
        place = first_difference(value.detach(), trained[name].detach())
        if place is not None:
            return Comparison(steps, len(trained), f"after {counted(steps, 'step')}, {name}{place}")
    return Comparison(steps, len(trained), None)
