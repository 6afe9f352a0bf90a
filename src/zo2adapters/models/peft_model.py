"""Hugging Face models with an adapter of peft. Exports are the adapter, in peft's files, and the
base if it was trained, too.

A prefix is trained keys and values of virtual tokens, which every layer's attention sees before
those of the row. Other adapters are modules around layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from transformers import Cache, DynamicCache

from zo2adapters.models import fused_lora
from zo2adapters.models.adapter_files import CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE
from zo2adapters.models.batches import is_packed
from zo2adapters.models.footprint import POSITION_BYTES, PassBytes, cache_bytes
from zo2adapters.models.hf import NO_FILES, Activations, Files, HFBlockModel, HFHeadModel
from zo2adapters.models.library_names import DynamicLayer
from zo2adapters.models.model_files import ADAPTER_FOLDER, BASE_FOLDER
from zo2adapters.models.peft_adapter import OpenedAdapter, base_form
from zo2adapters.models.skeleton import LayerCall, LayerCalls
from zo2adapters.models.token_rows import is_token_layer
from zo2core import Batch
from zo2core.checkpoint.export import (
    is_finite,
    new_directory,
    not_finite,
    write_checkpoint,
    write_companions,
)
from zo2core.errors import UnsupportedModelError


def write_adapter(
    directory: Path,
    config: Mapping[str, Any],
    values: dict[str, torch.Tensor],
    files: Files = NO_FILES,
) -> None:
    """Write an adapter."""
    for name, value in values.items():
        if not is_finite(value):
            raise not_finite(f"the adapter: {name}", value, value)
    with new_directory(directory) as partial:
        (partial / WEIGHTS_FILE).write_bytes(save(values, {"format": "pt"}))
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (partial / CONFIG_FILE).write_text(text, encoding="utf-8")
        write_companions(partial, files)


def plain_config(config: Any) -> dict[str, Any]:
    """Peft's config as JSON values, as peft saves it."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=_listed))
    return {**values, "inference_mode": True}


def _listed(value: object) -> object:
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


class PeftBlockModel(HFBlockModel):
    """A Hugging Face model with an adapter of peft."""

    def __init__(self, *arguments: Any, adapter: OpenedAdapter, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.adapter = adapter
        fused_lora.fuse(self.modules.values())

    @property
    def description(self) -> Mapping[str, Any]:
        """The values that determine the forward, including the adapter's config."""
        plain = plain_config(self.adapter.config)
        decisive = {key: plain[key] for key in sorted(self.adapter.kind.decisive & plain.keys())}
        for key in ("modules_to_save", "target_parameters", "trainable_token_indices"):
            # earlier runs have no entry
            if not decisive.get(key):
                decisive.pop(key, None)
        if self.adapter.constants_digest is not None:
            decisive["constants"] = self.adapter.constants_digest
        return {**super().description, "adapter": decisive}

    @property
    def exported_parameters(self) -> frozenset[str]:
        """The adapter's parameters, and those of the base that were saved beside them; all, if the
        base is trained, too.
        """
        if self.adapter.trains_base:
            return frozenset(spec.name for layout in self.layouts for spec in layout.parameters)
        return frozenset([*self.adapter.parameters, *self.adapter.beside])

    def write(
        self, directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], files: Files
    ) -> None:
        """Write the adapter's config and its tensors among these as peft does, the base's
        tokenizer, and further files.

        A base that was trained, too, gets a directory beside the adapter's: without it the adapter
        is of no use.
        """
        if self.adapter.trains_base:
            with new_directory(directory) as partial_directory:
                self._write_both(directory, partial_directory, tensors)
                write_companions(partial_directory, files)
            return
        names = {name: f"{FILE_PREFIX}{name}" for name in self.adapter.beside}
        names |= self.adapter.parameters
        saved = {names[name]: tensor.clone() for name, tensor in tensors if name in names}
        saved |= self._saved_constants()
        write_adapter(
            directory, plain_config(self.adapter.config), saved, {**self.tokenizer_files, **files}
        )

    def _write_both(
        self, directory: Path, written: Path, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Write the present base and the adapter into directories in ``written``, which will be
        ``directory``.
        """
        values: dict[str, torch.Tensor] = {}

        def of_base() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if name in self.adapter.parameters:
                    values[self.adapter.parameters[name]] = tensor.clone()
                else:
                    yield base_form(name), tensor

        specs = [
            replace(spec, name=base_form(spec.name))
            for layout in self.layouts
            for spec in layout.parameters
            if spec.name not in self.adapter.parameters
        ]
        write_checkpoint(
            written / BASE_FOLDER,
            specs,
            of_base(),
            self.companions,
            dtype=self.export_dtype,
            form=self.saved_form,
        )
        config = plain_config(self.adapter.config)
        config["base_model_name_or_path"] = str((directory / BASE_FOLDER).resolve())
        values |= self._saved_constants()
        write_adapter(written / ADAPTER_FOLDER, config, values, self.tokenizer_files)

    def _saved_constants(self) -> dict[str, torch.Tensor]:
        """The tensors that the adapter's file has and nothing trains."""
        if not getattr(self.adapter.config, "save_projection", False):
            return {}
        return {name: value.cpu().clone() for name, value in self.adapter.constants.items()}

    def require_stackable(self) -> None:
        """Patch the modules for low-rank perturbations."""
        title = self._not_stacked()
        if title is not None:
            found = f"{title} with low-rank perturbations"
            expected = "LoRA, whose matrices are linear layers"
            raise UnsupportedModelError("adapter", found, expected, "choose `DensePerturbation()`")
        # streams have factors of their own beside each matrix
        fused_lora.unfuse(self.modules.values())
        super().require_stackable()

    def _not_stacked(self) -> str | None:
        """The part of the adapter that takes no low-rank perturbations; None: there is none."""
        config = self.adapter.config
        title = self.adapter.kind.not_stacked(config)
        if title is not None:
            return title
        if any(is_token_layer(module) for module in self.modules.values()):
            return "trained tokens"
        if config.modules_to_save:
            return "modules_to_save"
        has_embedding = any(".lora_embedding_A." in name for name in self.adapter.parameters)
        return "LoRA of an embedding" if has_embedding else None

    def adapter_bytes(self, rows: int, streams: int) -> int:
        """Expected bytes of memory that the adapter adds to a sweep of the base."""
        return self.adapter.forward_bytes if self.pass_peaks is None else 0

    def pass_bytes(self, batch: Batch, measured: PassBytes | None) -> int:
        """Estimate the bytes, with what the adapter adds. See the base class."""
        beside = self.adapter.forward_bytes if measured is None else 0
        return super().pass_bytes(batch, measured) + beside


class PeftHeadModel(PeftBlockModel, HFHeadModel):
    """A Hugging Face model with another head than a causal language model's, and an adapter."""


# Copies of all rows' keys and values while peft makes a cache, in units of the base's dtype:
# float32 counts as two.
_COPIES = 4


class LayerPrefix(NamedTuple):
    """The prefix of one layer, which all rows share."""

    keys: torch.Tensor  # (1, heads, virtual tokens, head size), in the base's dtype
    values: torch.Tensor  # the same


class PrefixBlockModel(PeftBlockModel):
    """A Hugging Face model with a prefix of peft.

    As in peft, Hugging Face's forward is called with the prefix as a cache, and with a mask
    that starts with ones for the prefix. Attention appends the row's keys to the cache. Therefore a
    batch holds each layer's keys and values as tensors, and each call of a layer gets a new cache
    made from them.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.cache_argument is None:
            found = "a forward that takes no cache of keys and values"
            raise _unfit(f"model type {self.config.model_type}", found, "one that takes it")
        self._cache_argument = self.cache_argument
        self._peft_model = self.adapter.wrapper
        self._called = self._behind_prefix
        self.virtual_tokens = int(self.adapter.config.num_virtual_tokens)
        if self.longest_row is not None:
            self.longest_row -= self.virtual_tokens  # which have positions, too

    def _prepared(self, batch: Batch) -> Batch:
        if is_packed(batch):
            raise UnsupportedModelError(
                "prefix",
                "several sequences in a row, of which only the first would have the prefix",
                "one sequence per row",
                "pad the rows: pass an attention_mask, and leave --pack out",
            )
        return super()._prepared(batch)

    def embed(self, batch: Batch) -> Activations:
        """Run HF's forward up to the first layer, and keep each layer's prefix."""
        activations = super().embed(batch)
        calls = (
            _with_prefix(call, index) for index, call in enumerate(activations.calls.by_layer())
        )
        return activations._replace(calls=LayerCalls.of(calls))

    def _behind_prefix(self, **inputs: Any) -> Any:
        """Run HF's forward behind the prefix, as peft's model does.

        An empty cache of the caller gets the prefix as its first entries.
        """
        rows = len(inputs["input_ids"])
        cache = inputs.get(self._cache_argument)
        if cache is None:
            cache = self._peft_model.get_prompt(rows)
        elif cache.get_seq_length() == 0:
            for index, layer in enumerate(self._peft_model.get_prompt(rows).layers):
                cache.update(layer.keys, layer.values, index)
        mask = inputs.get("attention_mask")
        positions = inputs.get("position_ids")
        if mask is not None:
            prefix = mask.new_ones(rows, self.virtual_tokens)
            inputs["attention_mask"] = torch.cat([prefix, mask], dim=1)
        if positions is not None:
            inputs["position_ids"] = positions + self.virtual_tokens
        return self.skeleton(**{**inputs, self._cache_argument: cache})

    def _arguments(self, index: int, activations: Activations) -> LayerCall:
        """The recorded arguments, with a new cache."""
        return _with_cache(
            activations.calls.layer(index), index, len(self.by_token(activations.hidden))
        )

    def adapter_bytes(self, rows: int, streams: int) -> int:
        """Bytes of the cache of all rows while it is made, and of each evaluation's prefix.

        See the base class.
        """
        all_rows, prefix = (
            cache_bytes(self.config, count, self.virtual_tokens) for count in (rows, 1)
        )
        return _COPIES * all_rows + streams * prefix

    def pass_bytes(self, batch: Batch, measured: PassBytes | None) -> int:
        """Estimate the bytes, with those of making the cache. See the base class."""
        making = cache_bytes(self.config, len(batch["input_ids"]), self.virtual_tokens)
        return max(super().pass_bytes(batch, measured), _COPIES * making)

    def held_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula."""
        prefix = cache_bytes(self.config, 1, self.virtual_tokens)
        rows = len(batch["input_ids"])
        # The positions of the prefix are removed by a view, which keeps their memory.
        return super().held_bytes(batch) + prefix + rows * self.virtual_tokens * POSITION_BYTES


class _OtherLayer:
    """Placeholder for the earlier layers in a layer's cache."""

    def __getattr__(self, name: str) -> Any:
        found = f"a read of another layer's keys ({name})"
        raise _unfit(
            "a layer's attention", found, "layers that each attend to their own keys, for a prefix"
        )


def _unfit(where: str, found: str, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(where, found, expected, "train LoRA, or all weights")


def _with_prefix(call: LayerCall, index: int) -> LayerCall:
    """A layer's arguments with its prefix in place of the cache of all layers."""
    args, kwargs = call
    if not any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
        found = "a call without a cache of keys and values"
        raise _unfit(f"layer {index}", found, "layers that are called with a cache, for a prefix")

    def of_layer(cache: Any) -> LayerPrefix:
        layer = cache.layers[index]
        return LayerPrefix(layer.keys[:1].clone(), layer.values[:1].clone())

    return _replaced(Cache, of_layer, call)


def _with_cache(call: LayerCall, index: int, rows: int) -> LayerCall:
    """A layer's arguments with a new cache that starts with its prefix, for this number of rows."""

    def of_layer(prefix: LayerPrefix) -> DynamicCache:
        layer: Any = DynamicLayer  # its constructor is untyped
        layer_cache = layer()
        cache = DynamicCache()
        layer_cache.update(*(tensor.expand(rows, -1, -1, -1) for tensor in prefix))
        others: list[Any] = [_OtherLayer() for _ in range(index)]
        cache.layers = [*others, layer_cache]
        return cache

    return _replaced(LayerPrefix, of_layer, call)


def _replaced(kind: type, change: Callable[[Any], Any], call: LayerCall) -> LayerCall:
    """A layer's arguments, with those of one type changed."""
    args, kwargs = call
    changed_kwargs = {
        key: change(value) if isinstance(value, kind) else value for key, value in kwargs.items()
    }
    return tuple(
        change(value) if isinstance(value, kind) else value for value in args
    ), changed_kwargs
