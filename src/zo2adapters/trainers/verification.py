"""Compares the engine with monolithic MeZO on a given checkpoint and machine, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.footprint import activation_bytes
from zo2adapters.models.head_model import HFHeadModel
from zo2adapters.models.heads import head_of
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.monolithic import MonolithicMeZO
from zo2adapters.models.precision import Precision
from zo2adapters.tasks.labelled import classifies, padding_of, rates_once
from zo2adapters.trainers.base_check import require_finite_base
from zo2core import Batch, MemoryBudgetError, MeZOSGD, NonFiniteLossError, OptionError, ZOEngine
from zo2core.planning.host_budget import free_memory
from zo2core.sweep.microbatch import IGNORE_INDEX
from zo2core.types import shown_bytes


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    steps: int  # steps that were compared
    parameters: int  # parameters that were compared after the last step
    difference: str | None  # the first difference, as text; None if every bit is equal


def verify(
    directory: Path,
    *,
    head: str = "causal-lm",
    architecture: Path | None = None,
    dtype: torch.dtype | str = "auto",
    precision: Precision | str = "exact",
    lr: float,
    zo_eps: float,
    weight_decay: float,
    steps: int,
    batch_size: int,
    tokens: int,
    seed: int,
) -> Comparison:
    """Run both ways from one checkpoint over random batches and compare losses, projected gradients and all parameters.

    Memory: the whole model twice, and monolithic MeZO's temporaries.

    Args:
        directory: Model directory.
        head: As ``open_checkpoint`` takes it: that of a language model, or one for classes or numbers of rows.
        architecture: As ``open_checkpoint`` takes it.
        dtype: Dtype of the weights; in mixed precision the dtype that is computed with.
        precision: As ``open_checkpoint`` takes it.
        lr: Learning rate.
        zo_eps: Perturbation scale.
        weight_decay: Weight decay.
        steps: Steps to take both ways.
        batch_size: Rows a batch; the second half of the last one is padding, if there are several.
        tokens: Tokens a row.
        seed: Seed of batches and directions.

    Returns:
        The comparison.

    Raises:
        OptionError: if the model does not take rows of so many tokens.
        MemoryBudgetError: if model and batch do not fit into the memory that is free.
    """
    given: dict[str, Any] = {"architecture": architecture, "dtype": dtype, "precision": precision, "loss_chunk": None}
    model = open_checkpoint(directory, head=head, **given)
    _require_fit(model, batch_size, tokens)
    stored = model.layouts[0].parameters[0].dtype
    whole = head_of(head).class_of(model.config).from_pretrained(directory, dtype=stored, trust_remote_code=False)
    mono = MonolithicMeZO(whole, lr=lr, zo_eps=zo_eps, weight_decay=weight_decay, autocast=model.autocast)
    count = sum(len(layout.parameters) for layout in model.layouts)
    with ZOEngine(model, MeZOSGD(lr=lr, zo_eps=zo_eps, weight_decay=weight_decay)) as engine:
        for step in range(steps):
            batch = random_batch(model.config.get_text_config().vocab_size, batch_size, tokens, seed=seed + step)
            if isinstance(model, HFHeadModel):
                batch = _labelled(batch, model.config, seed + step)
            try:
                ours = engine.step(batch, seed=seed + step)
            except NonFiniteLossError:
                require_finite_base(model, directory)
                raise
            theirs = mono.step(batch, seed + step)
            pairs = [(f"loss {i}", a, b) for i, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))]
            pairs.append(("projected gradient", ours.projected_grads[0], theirs.projected_grads[0]))
            for name, a, b in pairs:
                if a != b:
                    return Comparison(step + 1, 0, f"step {step}, {name}: block by block {a!r}, monolithic {b!r}")
        reference = dict(whole.named_parameters())
        for name, tensor in engine.parameters_now():
            difference = first_difference(tensor, reference[name].data)
            if difference is not None:
                return Comparison(steps, count, f"after {steps} steps, {name}{difference}")
    return Comparison(steps, count, None)


def _require_fit(model: HFBlockModel, batch_size: int, tokens: int) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise OptionError(
            "tokens", found=str(tokens), expected=f"at most {longest}, the model's limit", remedy="pass a smaller value"
        )
    weights = sum(layout.nbytes for layout in model.layouts)
    needed, free = 2 * weights + activation_bytes(model.config, batch_size, tokens), free_memory()
    if needed > free:
        raise MemoryBudgetError(
            "memory",
            found=f"{shown_bytes(free)} free",
            expected=f"at least {shown_bytes(needed)} for two copies of the model and a batch's activations",
            remedy="free memory, or use smaller batches",
        )


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
