"""Hugging Face models with an adapter of peft. Exports are the adapter, in peft's files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zo2adapters.models.head_model import HFHeadModel
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds.files import plain_config, write_adapter
from zo2adapters.models.peft_kinds.kind import OpenedAdapter
from zo2adapters.models.vision import HFVisionModel
from zo2core import Batch
from zo2core.errors import UnsupportedModelError


class PeftBlockModel(HFBlockModel):
    """A Hugging Face model with an adapter of peft."""

    def __init__(self, adapter: OpenedAdapter, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.adapter = adapter

    @property
    def description(self) -> Mapping[str, Any]:
        """The values that determine the forward, including the adapter's config."""
        plain = plain_config(self.adapter.config)
        decisive = {key: plain[key] for key in sorted(self.adapter.kind.decisive & plain.keys())}
        for key in ("modules_to_save", "target_parameters"):  # earlier runs have no entry
            if not decisive.get(key):
                decisive.pop(key, None)
        return {**super().description, "adapter": decisive}

    @property
    def exported_parameters(self) -> frozenset[str]:
        """The adapter's parameters."""
        return frozenset(self.adapter.inserted.parameters)

    def write(self, directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], files: Mapping[str, Path | bytes]) -> None:
        """Write the adapter's config and its tensors among these as peft does, the base's tokenizer, and further files."""
        names = self.adapter.inserted.parameters
        saved = {names[name]: tensor.clone() for name, tensor in tensors if name in names}
        write_adapter(directory, plain_config(self.adapter.config), saved, {**self.tokenizer_files, **files})

    def module_at(self, path: str) -> nn.Module:
        """A module of the model, such as peft's around a layer, by its path."""
        module: nn.Module = self._modules[path]
        return module

    def require_stackable(self) -> None:
        """Patch the modules for low-rank perturbations. See the contract."""
        title = self.adapter.kind.why_not_stacked(self.adapter.config)
        if title is None and self.adapter.config.modules_to_save:
            title = "modules_to_save"
        if title is not None:
            raise UnsupportedModelError(
                "adapter",
                found=f"{title} with low-rank perturbations",
                expected="LoRA, whose matrices are linear layers",
                remedy="leave --rank out, or use DensePerturbation()",
            )
        super().require_stackable()

    def adapter_bytes(self, rows: int, streams: int) -> int:
        """Expected bytes of memory that the adapter adds to a sweep of the base."""
        return self.adapter.inserted.forward_bytes

    def forward_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula. See the contract."""
        return super().forward_bytes(batch) + self.adapter.inserted.forward_bytes


class PeftHeadModel(PeftBlockModel, HFHeadModel):
    """A Hugging Face model with another head than a causal language model's, and an adapter."""


class PeftVisionModel(PeftBlockModel, HFVisionModel):
    """A Hugging Face language model that also reads images, and an adapter."""


WITH_ADAPTER: Mapping[type[HFBlockModel], Callable[..., HFBlockModel]] = {  # by the class without an adapter
    HFBlockModel: PeftBlockModel,
    HFHeadModel: PeftHeadModel,
    HFVisionModel: PeftVisionModel,
}
