"""Compares the engine with the whole model on a given checkpoint and machine, bit for bit: MeZO, or
torch's optimizers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import struct
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from zo2adapters.models.batches import head_of
from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.footprint import activation_bytes
from zo2adapters.models.gguf_model import load_whole
from zo2adapters.models.hf import HFBlockModel, HFHeadModel
from zo2adapters.models.monolithic import MonolithicMeZO
from zo2adapters.models.peft_adapter import Adapter, is_of_adapter
from zo2adapters.models.peft_model import PeftBlockModel
from zo2adapters.optional_package import optional_package
from zo2adapters.tasks.rows import classifies, padding_of, rates_once
from zo2adapters.trainers.methods import require_finite_base
from zo2adapters.trainers.optimization import StepSize
from zo2adapters.trainers.options import ModelOptions, precision_of_run
from zo2core import Batch, Engine, FirstOrder, MeZOSGD, ZerothOrder
from zo2core.errors import MemoryBudgetError, NonFiniteLossError, OptionError
from zo2core.io.direct_file import byte_view
from zo2core.io.system_calls import processor_name
from zo2core.optimizers.registry import OPTIMIZERS, make_block_update
from zo2core.optimizers.states import StateMemory
from zo2core.planning.memory import free_memory
from zo2core.protocols import UpdateInputs
from zo2core.ranges import LARGEST_WHOLE, OptimizerName, counted, require_whole
from zo2core.sweep.microbatch import IGNORE_INDEX
from zo2core.types import shown_bytes, widened


class Verification(NamedTuple):
    """What a comparison has shown."""

    parameters: int  # that were compared
    difference: str | None  # the first one as text; None: every bit is equal
    digest: str  # of the engine's numbers and trained parameters: equal for equal bits, anywhere


class RandomSteps(NamedTuple):
    """Steps on batches of random tokens."""

    number: int
    rows: int
    tokens: int
    seed: int  # of the first step; each further one has the next

    def batch(self, config: PretrainedConfig, step: int, *, has_head: bool) -> Batch:
        """The batch of a step, with random labels for its rows if the model has a head for them."""
        seed = self.seed + step
        vocabulary = config.get_text_config().vocab_size
        batch = random_batch(vocabulary, self.rows, self.tokens, seed=seed)
        return _labelled(batch, config, seed) if has_head else batch


def verify(
    directory: Path,
    opening: ModelOptions,
    size: StepSize,
    steps: RandomSteps,
    *,
    method: OptimizerName | None = None,
    adapter: Adapter | None = None,
) -> Verification:
    """Take steps on random tokens block by block and on the whole model, and compare their numbers
    and what is trained.

    Memory: the whole model twice, and what its steps take. Without a method, steps are MeZO's.
    """
    precision = (
        precision_of_run(opening.precision, is_exact=True, on_cpu=True)
        if method is None
        else opening.precision
    )
    model = open_checkpoint(
        directory,
        head=opening.head,
        loss_chunk=None,
        adapter=adapter,
        architecture=opening.architecture,
        dtype=opening.dtype,
        precision=precision,
    )
    _require_fit(model, steps.rows, steps.tokens)
    whole = _whole_model(model, directory, opening.head, adapter)
    parameters = sum(not spec.frozen for layout in model.layouts for spec in layout.parameters)
    with Engine(model, _steps_of_engine(size, method, adapter)) as engine:
        trained = _share_trained(
            model,
            whole,
            engine.parameters_now() if adapter is not None else whole.named_parameters(),
        )
        of_whole = _steps_of_whole(model, whole, trained, size, method)
        digest = hashlib.sha256()
        for step in range(steps.number):
            seed = steps.seed + step
            batch = steps.batch(model.config, step, has_head=isinstance(model, HFHeadModel))
            try:
                ours = engine.step(batch, seed=seed if method is None else None)
            except NonFiniteLossError:
                require_finite_base(model)
                raise
            numbers = [
                *ours.losses,
                *ours.projected_grads,
                *(() if ours.grad_norm is None else (ours.grad_norm,)),
            ]
            digest.update(struct.pack(f"<{len(numbers)}d", *numbers))
            for number, (name, theirs) in zip(numbers, of_whole(step, batch, seed), strict=True):
                if number != theirs:
                    found = f"step {step}, {name}: block by block {number!r}, whole {theirs!r}"
                    return Verification(0, found, _shown(digest))
        for name, tensor in engine.parameters_now():
            if name not in trained:
                continue
            digest.update(name.encode() + byte_view(tensor.cpu().contiguous()))
            difference = _first_difference(tensor, trained[name].detach())
            if difference is not None:
                found = f"after {counted(steps.number, 'step')}, {name}{difference}"
                return Verification(parameters, found, _shown(digest))
    return Verification(parameters, None, _shown(digest))


def _shown(digest: hashlib._Hash) -> str:
    return digest.hexdigest()[:16]


def summary(result: Verification) -> str:
    """The result as a line that can be posted: versions, machine and digest."""
    packages = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("zo2core", "torch", "transformers", "peft")
        if importlib.util.find_spec(name)
    ]
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    cores = f"{processor_name()}, {counted(os.cpu_count() or 1, 'core')}"
    found = "EQUAL" if result.difference is None else "DIFFERENT"
    return f"zo2 verify: {found}, digest {result.digest}; {', '.join(packages)}; {system}; {cores}"


def _steps_of_engine(
    size: StepSize, method: OptimizerName | None, adapter: Adapter | None
) -> ZerothOrder | FirstOrder:
    """How the engine makes the steps."""
    if method is None:
        return ZerothOrder(
            MeZOSGD(lr=size.rate, zo_eps=size.zo_eps, weight_decay=size.weight_decay)
        )
    if adapter is not None:
        return FirstOrder(
            partial(_of_adapter(method), lr=size.rate, weight_decay=size.weight_decay)
        )
    return FirstOrder(
        make_block_update(method, weight_decay=size.weight_decay, switch_every=1), lr=size.rate
    )


def _of_adapter(method: OptimizerName) -> Callable[..., torch.optim.Optimizer]:
    optimizer = OPTIMIZERS[method].of_adapter
    assert optimizer is not None, "others were refused with an adapter"
    return optimizer


def _steps_of_whole(
    model: HFBlockModel,
    whole: Any,
    trained: Mapping[str, nn.Parameter],
    size: StepSize,
    method: OptimizerName | None,
) -> Callable[[int, Batch, int], list[tuple[str, float]]]:
    """A function that takes a step on the whole model: by MeZO, or by autograd and an optimizer
    with states of its own.

    It returns the step's numbers by name, in the order of the engine's.
    """
    if method is None:
        mezo = MonolithicMeZO(
            whole,
            autocast=model.autocast,
            lr=size.rate,
            zo_eps=size.zo_eps,
            weight_decay=size.weight_decay,
        )

        def evaluated(step: int, batch: Batch, seed: int) -> list[tuple[str, float]]:
            taken = mezo.step(batch, seed)
            losses = [(f"loss {index}", loss) for index, loss in enumerate(taken.losses)]
            return [*losses, ("projected gradient", taken.projected_grads[0])]

        return evaluated
    optimizer: Any = None
    update: Any = None
    if isinstance(model, PeftBlockModel):
        optimizer = _of_adapter(method)(
            list(trained.values()), lr=size.rate, weight_decay=size.weight_decay
        )
    else:
        update = make_block_update(method, weight_decay=size.weight_decay, switch_every=1)
        states = StateMemory(update, model.layouts)
    layouts = enumerate(model.layouts)
    names = {
        index: [spec.name for spec in layout.parameters]
        for index, layout in layouts
        if layout.parameters
    }
    widens = update is not None and update.widens_gradients

    def differentiated(step: int, batch: Batch, seed: int) -> list[tuple[str, float]]:
        segments = [] if update is None else update.segments(step, sorted(names))
        if update is not None:
            changed = {name for index in segments for name in names[index]}
            for name, parameter in trained.items():
                parameter.requires_grad = name in changed
        with torch.autocast("cpu", dtype=model.autocast, enabled=model.autocast is not None):
            loss = whole(**batch, use_cache=False).loss
        loss.backward()
        gradients = {
            name: parameter.grad
            for name, parameter in trained.items()
            if parameter.grad is not None
        }
        gradients = {
            name: widened(gradient) if widens else gradient for name, gradient in gradients.items()
        }
        norm = nn.utils.get_total_norm(list(gradients.values()))
        if update is None:
            optimizer.step()
        else:
            states.begin(step)
            for index in segments:
                weights = {name: trained[name].detach() for name in names[index]}
                of_segment = {name: gradients[name] for name in names[index] if name in gradients}
                update.apply(
                    UpdateInputs(index, weights, of_segment, states.of(index, ()), step, size.rate)
                )
        whole.zero_grad()
        return [("loss", float(loss.detach())), ("gradient norm", norm.item())]

    return differentiated


def _require_fit(model: HFBlockModel, rows: int, tokens: int) -> None:
    """Refuse batches that exceed free memory or the model's longest row."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    require_whole("tokens", tokens, 1, longest or LARGEST_WHOLE, otherwise=", the model's limit")
    weights = sum(layout.nbytes for layout in model.layouts)
    needed = 2 * weights + activation_bytes(model.config, rows, tokens)
    free = free_memory()
    if needed > free:
        expected = (
            f"at least {shown_bytes(needed)} for two copies of the model and a batch's activations"
        )
        raise MemoryBudgetError(
            "memory", f"{shown_bytes(free)} free", expected, "free memory, or use smaller batches"
        )


def _whole_model(model: HFBlockModel, directory: Path, head: str, adapter: Adapter | None) -> Any:
    """The whole model as transformers loads it, with peft's modules in it if an adapter is
    trained.
    """
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
    """Give the whole model the values of what is trained, and of all of an adapter; only what is
    trained then requires gradients.
    """
    names = {spec.name for layout in model.layouts for spec in layout.parameters if not spec.frozen}
    trained = {name: parameter for name, parameter in whole.named_parameters() if name in names}
    assert trained.keys() == names, "every trained parameter is compared"
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = name in names
    given = dict(trained)
    if isinstance(model, PeftBlockModel):  # what is frozen of a new adapter was drawn, too
        given |= {name: value for name, value in whole.named_parameters() if is_of_adapter(name)}
        values = chain(model.adapter.values().items(), values)
    for name, value in values:
        if name in given:
            given[name].data = value.detach().clone()
    return trained


def _labelled(batch: Batch, config: PretrainedConfig, seed: int) -> Batch:
    """The batch with random labels for its rows and the config's padding token."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(batch["input_ids"])
    classes = int(config.num_labels or 1)
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
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, IGNORE_INDEX),
    }


def _first_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """Text about the first element whose bits differ in two tensors of one shape; None if all bits
    are equal.
    """
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    unequal = (
        (ours.contiguous().view(integer) != theirs.contiguous().view(integer)).flatten().nonzero()
    )
    if not len(unequal):
        return None
    index = int(unequal[0])
    a = ours.flatten()[index].item()
    b = theirs.flatten()[index].item()
    return (
        f", element {index} of {ours.numel()} ({len(unequal)} differ): block by block {a!r}, "
        f"whole {b!r}"
    )
