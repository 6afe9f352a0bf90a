"""Compares the engine with monolithic MeZO on a given checkpoint and machine, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.footprint import activation_bytes
from zo2adapters.models.gguf_model import load_whole
from zo2adapters.models.heads import head_of
from zo2adapters.models.hf import HFBlockModel, HFHeadModel
from zo2adapters.models.monolithic import MonolithicMeZO
from zo2adapters.models.peft_adapter import Adapter
from zo2adapters.models.peft_kinds import PeftBlockModel
from zo2adapters.optional_package import optional_package
from zo2adapters.tasks.row_reader import classifies, padding_of, rates_once
from zo2adapters.trainers.base_check import require_finite_base
from zo2adapters.trainers.model_options import ModelOptions, precision_of_run
from zo2adapters.trainers.optimization import StepSize
from zo2core import Batch, Engine, FirstOrder, MeZOSGD, StepResult, ZerothOrder
from zo2core.errors import MemoryBudgetError, NonFiniteLossError, OptionError
from zo2core.names import OptimizerName
from zo2core.optimizer_states import StateMemory
from zo2core.optimizers import OPTIMIZERS, make_block_update
from zo2core.planning.memory import free_memory
from zo2core.protocols import UpdateInputs
from zo2core.ranges import counted
from zo2core.sweep.microbatch import IGNORE_INDEX
from zo2core.types import shown_bytes, widened


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    steps: int  # steps that were compared
    parameters: int  # parameters that were compared after the last step
    difference: str | None  # the first difference, as text; None if every bit is equal


@dataclass(frozen=True, kw_only=True)
class RandomBatches:
    """The batches to compare on: random tokens, one batch per step."""

    steps: int
    rows: int  # rows per batch; if there are several, the second half of the last one is padding
    tokens: int  # tokens per row
    seed: int

    def batch(self, model: HFBlockModel, step: int) -> Batch:
        """The batch of a 0-based step, with labels for the model's head."""
        vocabulary = model.config.get_text_config().vocab_size
        batch = random_batch(vocabulary, self.rows, self.tokens, seed=self.seed + step)
        return _labelled(batch, model.config, self.seed + step) if isinstance(model, HFHeadModel) else batch


def verify(
    directory: Path, opening: ModelOptions, size: StepSize, batches: RandomBatches, adapter: Adapter | None = None
) -> Comparison:
    """Take steps with both from one checkpoint, and compare losses, projected gradients and all parameters.

    Memory: the whole model twice, and monolithic MeZO's temporaries.
    """
    precision = precision_of_run(opening.precision, exact_mezo=True, on_cpu=True)
    given: dict[str, Any] = {"architecture": opening.architecture, "dtype": opening.dtype, "precision": precision}
    model = open_checkpoint(directory, head=opening.head, loss_chunk=None, adapter=adapter, **given)
    require_fit(model, batches)
    whole = whole_model(model, directory, opening.head, adapter)
    numbers: Any = {"lr": size.rate, "zo_eps": size.zo_eps, "weight_decay": size.weight_decay}
    count = sum(not spec.frozen for layout in model.layouts for spec in layout.parameters)
    with Engine(model, ZerothOrder(MeZOSGD(**numbers))) as engine:
        if adapter is not None:
            copy_trained(model, whole, dict(engine.parameters_now()))
        mono = MonolithicMeZO(whole, autocast=model.autocast, **numbers)
        for step in range(batches.steps):
            batch, seed = batches.batch(model, step), batches.seed + step
            try:
                ours = engine.step(batch, seed=seed)
            except NonFiniteLossError:
                require_finite_base(model, directory)
                raise
            theirs = mono.step(batch, seed)
            pairs = [(f"loss {i}", a, b) for i, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))]
            pairs.append(("projected gradient", ours.projected_grads[0], theirs.projected_grads[0]))
            for name, a, b in pairs:
                if a != b:
                    return Comparison(step + 1, 0, f"step {step}, {name}: block by block {a!r}, monolithic {b!r}")
        reference = dict(whole.named_parameters())
        for name, tensor in engine.parameters_now():
            difference = first_difference(tensor, reference[name].data)
            if difference is not None:
                return Comparison(batches.steps, count, f"after {counted(batches.steps, 'step')}, {name}{difference}")
    return Comparison(batches.steps, count, None)


def require_fit(model: HFBlockModel, batches: RandomBatches) -> None:
    """Refuse batches that exceed free memory or the model's longest row."""
    tokens, longest = batches.tokens, getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise OptionError(
            "tokens", found=str(tokens), expected=f"at most {longest}, the model's limit", remedy="pass a smaller value"
        )
    weights = sum(layout.nbytes for layout in model.layouts)
    needed, free = 2 * weights + activation_bytes(model.config, batches.rows, tokens), free_memory()
    if needed > free:
        raise MemoryBudgetError(
            "memory",
            found=f"{shown_bytes(free)} free",
            expected=f"at least {shown_bytes(needed)} for two copies of the model and a batch's activations",
            remedy="free memory, or use smaller batches",
        )


def whole_model(model: HFBlockModel, directory: Path, head: str, adapter: Adapter | None) -> Any:
    """The whole model as transformers loads it, with peft's modules in it if an adapter is trained."""
    loaded = head_of(head).class_of(model.config)
    if adapter is None:
        stored = model.layouts[0].parameters[0].dtype
        return load_whole(loaded, directory, stored)
    assert isinstance(model, PeftBlockModel), "it was opened with the adapter"
    config = deepcopy(model.adapter.config)  # peft writes into it
    if config.is_prompt_learning:
        expected = "an adapter whose modules stand in the model, as LoRA's"
        raise OptionError("adapter", found=str(config.peft_type), expected=expected, remedy="verify with LoRA")
    dtype = torch.float32 if model.autocast is not None else model.config.dtype
    whole = load_whole(loaded, directory, dtype)
    optional_package("peft", install="zo2core[peft]").inject_adapter_in_model(config, whole)
    for parameter in whole.parameters():
        # What is mapped from a file lies unaligned, and products round otherwise there.
        parameter.data = parameter.data.clone()
    return whole.eval()


def copy_trained(model: HFBlockModel, whole: nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """Give the whole model the values of what is trained; only these parameters then require gradients."""
    names = {spec.name for layout in model.layouts for spec in layout.parameters if not spec.frozen}
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = name in names
        if name in names:
            parameter.data = values[name].detach().clone()
    return {name: parameter for name, parameter in whole.named_parameters() if name in names}


def _labelled(batch: Batch, config: PretrainedConfig, seed: int) -> Batch:
    """The batch with random labels for its rows and the config's padding token."""
    generator, rows, classes = torch.Generator().manual_seed(seed), len(batch["input_ids"]), int(config.num_labels or 1)
    shape = (rows,) if rates_once(config) else (rows, classes)
    numbers = torch.rand(shape, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator) if classifies(config) else numbers
    ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, padding_of(config))
    return {**batch, "input_ids": ids, "labels": labels}


def random_batch(vocab_size: int, batch_size: int, tokens: int, *, seed: int) -> Batch:
    """Random tokens with right padding: int64 (batch_size, tokens) ids, mask and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (batch_size, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if batch_size > 1:
        mask[-1, max(tokens // 2, 2) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORE_INDEX)}


def first_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """Text about the first element whose bits differ in two tensors of one shape; None if all bits are equal."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    unequal = (ours.contiguous().view(integer) != theirs.contiguous().view(integer)).flatten().nonzero()
    if not len(unequal):
        return None
    index = int(unequal[0])
    a, b = ours.flatten()[index].item(), theirs.flatten()[index].item()
    return f", element {index} of {ours.numel()} ({len(unequal)} differ): block by block {a!r}, monolithic {b!r}"


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
