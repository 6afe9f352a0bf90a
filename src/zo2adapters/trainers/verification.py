"""Compares the engine with the whole model on a given checkpoint and machine, bit for bit: MeZO, or torch's optimizers."""

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

from zo2adapters.models.batches import head_of
from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.footprint import activation_bytes
from zo2adapters.models.gguf_model import load_whole
from zo2adapters.models.hf import HFBlockModel, HFHeadModel
from zo2adapters.models.monolithic import MonolithicMeZO
from zo2adapters.models.peft_adapter import Adapter
from zo2adapters.models.peft_model import PeftBlockModel
from zo2adapters.optional_package import optional_package
from zo2adapters.tasks.rows import classifies, padding_of, rates_once
from zo2adapters.trainers.methods import require_finite_base
from zo2adapters.trainers.optimization import StepSize
from zo2adapters.trainers.options import ModelOptions, precision_of_run
from zo2core import Batch, Engine, FirstOrder, MeZOSGD, ZerothOrder
from zo2core.errors import MemoryBudgetError, NonFiniteLossError, OptionError
from zo2core.optimizers import OPTIMIZERS, StateMemory, make_block_update
from zo2core.planning.memory import free_memory
from zo2core.protocols import UpdateInputs
from zo2core.ranges import LARGEST, OptimizerName, counted, require_whole
from zo2core.sweep.microbatch import IGNORE_INDEX
from zo2core.types import shown_bytes, widened


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
    directory: Path,
    opening: ModelOptions,
    size: StepSize,
    batches: RandomBatches,
    *,
    method: OptimizerName | None = None,
    adapter: Adapter | None = None,
) -> tuple[int, str | None]:
    """Take steps block by block and on the whole model, and compare their numbers and what is trained.

    Returns the number of parameters that were compared, and the first difference as text; None if every bit is equal.

    Memory: the whole model twice, and what its steps take. Without a method, steps are MeZO's.
    """
    precision = precision_of_run(opening.precision, exact_mezo=True, on_cpu=True) if method is None else opening.precision
    given: Any = {"architecture": opening.architecture, "dtype": opening.dtype, "precision": precision}
    model = open_checkpoint(directory, head=opening.head, loss_chunk=None, adapter=adapter, **given)
    _require_fit(model, batches)
    whole = _whole_model(model, directory, opening.head, adapter)
    kind = _AllGradients if adapter is None else _AdapterGradients
    resident: _Mezo | _AdapterGradients | _AllGradients = _Mezo(size) if method is None else kind(size, method)
    steps, parameters = batches.steps, sum(not spec.frozen for layout in model.layouts for spec in layout.parameters)
    with Engine(model, resident.method) as engine:
        trained = _share_trained(model, whole, engine.parameters_now() if adapter is not None else whole.named_parameters())
        resident.begin(model, whole, trained)
        for step in range(steps):
            batch, seed = batches.batch(model, step), batches.seed + step
            try:
                ours = engine.step(batch, seed=seed if method is None else None)
            except NonFiniteLossError:
                require_finite_base(model, directory)
                raise
            numbers = [*ours.losses, *ours.projected_grads, *(() if ours.grad_norm is None else (ours.grad_norm,))]
            for number, (name, theirs) in zip(numbers, resident.step(step, batch, seed), strict=True):
                if number != theirs:
                    return 0, f"step {step}, {name}: block by block {number!r}, whole {theirs!r}"
        for name, tensor in engine.parameters_now():
            difference = _first_difference(tensor, trained[name].detach()) if name in trained else None
            if difference is not None:
                return parameters, f"after {counted(steps, 'step')}, {name}{difference}"
    return parameters, None


class _Mezo:
    """MeZO on the whole model."""

    def __init__(self, size: StepSize) -> None:
        self._numbers: Any = {"lr": size.rate, "zo_eps": size.zo_eps, "weight_decay": size.weight_decay}
        self.method = ZerothOrder(MeZOSGD(**self._numbers))

    def begin(self, model: HFBlockModel, whole: Any, trained: Mapping[str, nn.Parameter]) -> None:
        """Take over the whole model, which has the first values."""
        self._mezo = MonolithicMeZO(whole, autocast=model.autocast, **self._numbers)

    def step(self, step: int, batch: Batch, seed: int) -> list[tuple[str, float]]:
        """The numbers of a step, by name, in the order of the engine's."""
        taken = self._mezo.step(batch, seed)
        losses = [(f"loss {index}", loss) for index, loss in enumerate(taken.losses)]
        return [*losses, ("projected gradient", taken.projected_grads[0])]


class _Gradients:
    """Gradients of the whole model by autograd."""

    widens = False  # whether the optimizer is given gradients in float32

    def begin(self, model: HFBlockModel, whole: Any, trained: Mapping[str, nn.Parameter]) -> None:
        """See ``_Mezo``."""
        self._model, self._whole, self._trained = model, whole, trained

    def step(self, step: int, batch: Batch, seed: int) -> list[tuple[str, float]]:
        """See ``_Mezo``."""
        with torch.autocast("cpu", dtype=self._model.autocast, enabled=self._model.autocast is not None):
            loss = self._whole(**batch, use_cache=False).loss
        loss.backward()
        gradients = [parameter.grad for parameter in self._trained.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([widened(gradient) if self.widens else gradient for gradient in gradients])
        return [("loss", float(loss.detach())), ("gradient norm", norm.item())]


class _AdapterGradients(_Gradients):
    """An adapter's steps with an optimizer of torch."""

    def __init__(self, size: StepSize, method: OptimizerName) -> None:
        of_adapter = OPTIMIZERS[method].of_adapter
        assert of_adapter is not None, "others were refused with an adapter"
        self._optimizer = partial(of_adapter, lr=size.rate, weight_decay=size.weight_decay)
        self.method = FirstOrder(self._optimizer)

    def begin(self, model: HFBlockModel, whole: Any, trained: Mapping[str, nn.Parameter]) -> None:
        """See ``_Mezo``."""
        super().begin(model, whole, trained)
        self._resident = self._optimizer(list(trained.values()))

    def step(self, step: int, batch: Batch, seed: int) -> list[tuple[str, float]]:
        """See ``_Mezo``."""
        numbers = super().step(step, batch, seed)
        self._resident.step()
        self._resident.zero_grad()
        return numbers


class _AllGradients(_Gradients):
    """Steps of all parameters, with an optimizer of the engine's kind and states of its own."""

    def __init__(self, size: StepSize, method: OptimizerName) -> None:
        ours, self._update = (make_block_update(method, weight_decay=size.weight_decay, switch_every=1) for _ in range(2))
        self.method, self.widens, self._rate = FirstOrder(ours, lr=size.rate), self._update.widens_gradients, size.rate

    def begin(self, model: HFBlockModel, whole: Any, trained: Mapping[str, nn.Parameter]) -> None:
        """See ``_Mezo``."""
        super().begin(model, whole, trained)
        layouts = enumerate(model.layouts)
        self._names = {index: [spec.name for spec in layout.parameters] for index, layout in layouts if layout.parameters}
        self._states = StateMemory(self._update, model.layouts)

    def step(self, step: int, batch: Batch, seed: int) -> list[tuple[str, float]]:
        """See ``_Mezo``."""
        segments = self._update.segments(step, sorted(self._names))
        names = {name for index in segments for name in self._names[index]}
        for name, parameter in self._trained.items():
            parameter.requires_grad = name in names
        numbers = super().step(step, batch, seed)
        self._states.begin(step)
        for index in segments:
            weights = {name: self._trained[name].detach() for name in self._names[index]}
            found = {name: self._trained[name].grad for name in self._names[index]}
            gradients = {name: widened(grad) if self.widens else grad for name, grad in found.items() if grad is not None}
            self._update.apply(UpdateInputs(index, weights, gradients, self._states.of(index, ()), step, self._rate))
        self._whole.zero_grad()
        return numbers


def _require_fit(model: HFBlockModel, batches: RandomBatches) -> None:
    """Refuse batches that exceed free memory or the model's longest row."""
    tokens, longest = batches.tokens, getattr(model.config.get_text_config(), "max_position_embeddings", None)
    require_whole("tokens", tokens, 1, longest or LARGEST, otherwise=", the model's limit")
    weights = sum(layout.nbytes for layout in model.layouts)
    needed, free = 2 * weights + activation_bytes(model.config, batches.rows, tokens), free_memory()
    if needed > free:
        expected = f"at least {shown_bytes(needed)} for two copies of the model and a batch's activations"
        raise MemoryBudgetError("memory", f"{shown_bytes(free)} free", expected, "free memory, or use smaller batches")


def _whole_model(model: HFBlockModel, directory: Path, head: str, adapter: Adapter | None) -> Any:
    """The whole model as transformers loads it, with peft's modules in it if an adapter is trained."""
    loaded = head_of(head).class_of(model.config)
    if adapter is None:
        stored = model.layouts[0].parameters[0].dtype
        return load_whole(loaded, directory, stored)
    assert isinstance(model, PeftBlockModel), "it was opened with the adapter"
    config = deepcopy(model.adapter.config)  # peft writes into it
    if config.is_prompt_learning:
        expected = "an adapter whose modules stand in the model, as LoRA's"
        raise OptionError("adapter", str(config.peft_type), expected, "verify with LoRA")
    dtype = torch.float32 if model.autocast is not None else model.config.dtype
    whole = load_whole(loaded, directory, dtype)
    optional_package("peft", install="zo2core[peft]").inject_adapter_in_model(config, whole)
    for parameter in whole.parameters():
        # What is mapped from a file lies unaligned, and products round otherwise there.
        parameter.data = parameter.data.clone()
    return whole.eval()


def _share_trained(
    model: HFBlockModel, whole: nn.Module, values: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, nn.Parameter]:
    """Give the whole model the values of what is trained; only these parameters then require gradients."""
    names = {spec.name for layout in model.layouts for spec in layout.parameters if not spec.frozen}
    trained = {name: parameter for name, parameter in whole.named_parameters() if name in names}
    assert trained.keys() == names, "every trained parameter is compared"
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = name in names
    for name, value in values:
        if name in trained:
            trained[name].data = value.detach().clone()
    return trained


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


def _first_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """Text about the first element whose bits differ in two tensors of one shape; None if all bits are equal."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    unequal = (ours.contiguous().view(integer) != theirs.contiguous().view(integer)).flatten().nonzero()
    if not len(unequal):
        return None
    index = int(unequal[0])
    a, b = ours.flatten()[index].item(), theirs.flatten()[index].item()
    return f", element {index} of {ours.numel()} ({len(unequal)} differ): block by block {a!r}, whole {b!r}"
