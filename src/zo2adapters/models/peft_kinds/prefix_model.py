"""A Hugging Face model whose layers attend to a prefix of virtual tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from zo2adapters.models.footprint import POSITION_BYTES, cache_bytes, expected_held_bytes
from zo2adapters.models.hf import Activations
from zo2adapters.models.layer_calls import LayerCall, LayerCalls
from zo2adapters.models.packing import is_packed
from zo2adapters.models.peft_kinds.block_model import PeftBlockModel
from zo2adapters.models.peft_kinds.kind import OpenedAdapter
from zo2core import Batch
from zo2core.errors import UnsupportedModelError

# Copies of all rows' keys and values while peft makes a cache, in units of the base's dtype: float32 counts as two.
_COPIES = 4


class LayerPrefix(NamedTuple):
    """The prefix of one layer, which all rows share."""

    keys: torch.Tensor  # (1, heads, virtual tokens, head size), in the base's dtype
    values: torch.Tensor  # the same


class PrefixBlockModel(PeftBlockModel):
    """A Hugging Face model with a prefix of peft.

    Peft's model calls Hugging Face's forward with the prefix as a cache, and with a mask that starts with ones for the
    prefix. Attention appends the row's keys to the cache. Therefore a batch holds each layer's keys and values as tensors,
    and each call of a layer gets a new cache made from them.
    """

    def __init__(self, adapter: OpenedAdapter, *arguments: Any, **options: Any) -> None:
        super().__init__(adapter, *arguments, **options)
        self._wrapper = adapter.inserted.wrapper
        self._called = self._wrapper
        self._tokens = int(adapter.config.num_virtual_tokens)
        if self.longest_row is not None:
            self.longest_row -= self._tokens  # virtual tokens have positions, too

    def _prepared(self, batch: Batch) -> Batch:
        if is_packed(batch):
            raise UnsupportedModelError(
                "prefix",
                found="several sequences in a row, of which only the first would have the prefix",
                expected="one sequence per row",
                remedy="pad the rows: pass an attention_mask, and leave --pack out",
            )
        return super()._prepared(batch)

    @torch.inference_mode()
    def record_branches(self, batch: Batch) -> None:
        """Record as the class above does, the stand-in tokens without a prefix, as ``logits`` passes them."""
        self.embed(batch)
        with self._without_prefix(), self._stand_in_branches:
            self.prologue(input_ids=torch.zeros_like(batch["input_ids"][:1, :1]), use_cache=False)

    def embed(self, batch: Batch) -> Activations:
        """Run HF's forward up to the first layer, and keep each layer's prefix. See the contract."""
        activations = super().embed(batch)
        calls = (_with_prefix(call, index) for index, call in enumerate(activations.calls.by_layer()))
        return activations._replace(calls=LayerCalls.of(calls))

    def prologue(self, **inputs: Any) -> Activations:
        """Run HF's forward up to the first layer. A cache of the caller gets the prefix as its first entries."""
        cache = inputs.get("past_key_values")
        if cache is None:
            return super().prologue(**inputs)
        rows = len(inputs["input_ids"])
        if cache.get_seq_length() == 0:
            for index, layer in enumerate(self._wrapper.get_prompt(rows).layers):
                cache.update(layer.keys, layer.values, index)
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        if mask is not None:
            inputs["attention_mask"] = torch.cat([mask.new_ones(rows, self._tokens), mask], dim=1)
        if positions is not None:
            inputs["position_ids"] = positions + self._tokens
        with self._without_prefix():
            return super().prologue(**inputs)

    def block(self, index: int, activations: Activations) -> Activations:
        """Run one layer with its recorded arguments, and a new cache."""
        calls = list(activations.calls.by_layer())
        calls[index] = _with_cache(calls[index], index, len(self.by_token(activations.hidden)))
        with_cache = activations._replace(calls=LayerCalls.of(calls))
        return activations._replace(hidden=super().block(index, with_cache).hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run HF's norm and head on final hidden states of single tokens. See the base class."""
        with self._without_prefix():
            return super().logits(hidden)

    def adapter_bytes(self, rows: int, streams: int) -> int:
        """Bytes of the cache of all rows while it is made, and of each evaluation's prefix. See the base class."""
        all_rows, prefix = (cache_bytes(self.config, count, self._tokens) for count in (rows, 1))
        return _COPIES * all_rows + streams * prefix

    def forward_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula. See the contract."""
        making = cache_bytes(self.config, len(batch["input_ids"]), self._tokens)
        return max(super().forward_bytes(batch), _COPIES * making)

    def held_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula. See the contract."""
        rows, tokens = batch["input_ids"].shape
        positions = batch.get("position_ids")
        held = expected_held_bytes(
            self.config,
            rows,
            tokens,
            keys=self._tokens + tokens,
            position_rows=None if positions is None else len(positions),
        )
        # The positions of the prefix are removed by a view, which keeps their memory.
        return held + cache_bytes(self.config, 1, self._tokens) + rows * self._tokens * POSITION_BYTES

    @contextlib.contextmanager
    def _without_prefix(self) -> Iterator[None]:
        """A context in which HF's forward is called directly: no prefix is needed, or the cache has it."""
        self._called = self._skeleton
        try:
            yield
        finally:
            self._called = self._wrapper


class _OtherLayer:
    """Placeholder for the earlier layers in a layer's cache."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModelError(
            "a layer's attention",
            found=f"a read of another layer's keys ({name})",
            expected="layers that each attend to their own keys, for a prefix",
            remedy="train LoRA, or all weights",
        )


def _with_prefix(call: LayerCall, index: int) -> LayerCall:
    """A layer's arguments with its prefix in place of the cache of all layers."""
    args, kwargs = call
    if not any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
        raise UnsupportedModelError(
            f"layer {index}",
            found="a call without a cache of keys and values",
            expected="layers that are called with a cache, for a prefix",
            remedy="train LoRA, or all weights",
        )

    def of_layer(value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        own: Any = value.layers[index]
        return LayerPrefix(own.keys[:1].clone(), own.values[:1].clone())

    return tuple(map(of_layer, args)), {key: of_layer(value) for key, value in kwargs.items()}


def _with_cache(call: LayerCall, index: int, rows: int) -> LayerCall:
    """A layer's arguments with a new cache that starts with its prefix, for this number of rows."""

    def of_layer(value: Any) -> Any:
        if not isinstance(value, LayerPrefix):
            return value
        layer: Any = DynamicLayer  # its constructor is untyped
        own = layer()
        own.update(*(tensor.expand(rows, -1, -1, -1) for tensor in value))
        cache = DynamicCache()
        others: list[Any] = [_OtherLayer() for _ in range(index)]
        cache.layers = [*others, own]
        return cache

    args, kwargs = call
    return tuple(map(of_layer, args)), {key: of_layer(value) for key, value in kwargs.items()}
