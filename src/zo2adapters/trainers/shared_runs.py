"""Runs that share their base: blocks are read once for all of them, and each trains beside them."""

from __future__ import annotations

from dataclasses import replace

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.options import TrainOptions
from zo2core import MemoryPolicy, SharedBase
from zo2core.errors import OptionError


def can_share(options: TrainOptions) -> bool:
    """Whether a run only reads its base: one with low-rank perturbations, or of an adapter by any method."""
    reads = options.optimization.rank is not None or options.model_options.trains_adapter
    return reads and not options.takes_labels


def require_shareable(options: TrainOptions) -> None:
    """Refuse a run that changes its base, or that has a new head."""
    if not can_share(options):
        found = f"--head {options.model_options.head}" if options.takes_labels else "a run that trains all weights"
        raise OptionError(
            "runs",
            found=found,
            expected="runs of a causal language model that only read its weights",
            remedy="pass --rank 8 or --lora-rank 8, or train it alone",
        )


def shared_base_model(options: TrainOptions) -> HFBlockModel:
    """Open the model of a base, without an adapter."""
    base = replace(
        options.model_options,
        precision=options.precision_asked(),
        adapter=None,
        adapter_frozen=(),
        lora_rank=None,
        lora_targets=(),
        lora_alpha=None,
    )
    return base.opened(resolve_directory(options.model), seed=options.seed)


def open_shared_base(options: TrainOptions) -> SharedBase:
    """Open the base of runs with these options. See ``shared_base_model``."""
    require_shareable(options)
    storage = options.storage
    return SharedBase(
        shared_base_model(options),
        device=storage.device,
        memory=MemoryPolicy(host=storage.memory, device=storage.device_memory),
    )
