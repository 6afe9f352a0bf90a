"""Prefix tuning: trained keys and values of virtual tokens, which every layer's attention sees before those of the row.

The parameter is peft's table of these keys and values, without a projection. Initial values are those of MeZO: the keys and
values that the base computes for random tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from zo2adapters.models.batches import is_packed, longest_row
from zo2adapters.models.footprint import POSITION_BYTES, cache_bytes
from zo2adapters.models.hf import Activations, HFBlockModel
from zo2adapters.models.peft_kinds import ADAPTER_NAME, AdapterKind, FirstValues, Inserted, OpenBase, PeftBlockModel
from zo2adapters.models.skeleton import LayerCall, LayerCalls
from zo2core import Batch, Engine, HostPlan, MemoryPolicy
from zo2core.errors import OptionError, UnsupportedModelError

_ENCODER = "prompt_encoder"  # name of the table's module in peft's model
_TABLE = f"{_ENCODER}.{ADAPTER_NAME}.embedding.weight"
_FILE_NAME = "prompt_embeddings"
_BASE_SIZES = ("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules")
_TASK = "CAUSAL_LM"
_SHORTEST_ROW = 2  # tokens of the shortest useful row: one to read and one to predict
_NO_LIMIT = 1 << 62  # bytes of a host plan that streams one block at a time


def _real_keys_and_values(base: HFBlockModel, config: Any, shape: torch.Size, seed: int) -> torch.Tensor:
    """Keys and values that the base computes for one row of random tokens, with one block in memory at a time."""
    tokens, heads = config.num_virtual_tokens, config.num_attention_heads
    generator, cache = torch.Generator().manual_seed(seed), DynamicCache()
    ids = torch.randint(base.config.get_text_config().vocab_size, (1, tokens), generator=generator)
    forward: Any = SimpleNamespace(  # the base's up to the last layer, which writes all keys and values to the cache
        prepared=lambda batch: batch,
        embed=lambda batch: base.prologue(**batch, past_key_values=cache, use_cache=True),
        block=base.block,
        head=lambda batch, activations: activations.hidden.new_zeros(()),
        forward_bytes=base.forward_bytes,
        held_bytes=base.held_bytes,
    )
    streamed = MemoryPolicy(host=HostPlan((), _NO_LIMIT, buckets=1, keep_noise=False))
    with Engine(base, memory=streamed) as replayer:
        list(replayer.forwards([{"input_ids": ids}], forward))
    layers: list[Any] = cache.layers  # those that share the keys of another layer have none
    states = [states for layer in layers for states in (layer.keys, layer.values) if states is not None]
    shapes = {(1, heads, tokens, config.token_dim // heads), *(tuple(one.shape) for one in states)}
    if len(shapes) > 1 or len(states) * config.token_dim != shape[1]:
        raise UnsupportedModelError(
            f"model type {base.config.model_type}",
            found=f"{len(states)} keys and values of {len(layers)} layers, or not of the same shape: {sorted(shapes)}",
            expected=f"those of every layer, {shape[1]} numbers a token, as in peft's table",
            remedy='pass init_weights="zero", or train LoRA',
        )
    return torch.cat([one[0].transpose(0, 1).reshape(tokens, -1).float() for one in states], dim=1)


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

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._wrapper = self._called = self.adapter.inserted.wrapper
        self.virtual_tokens = int(self.adapter.config.num_virtual_tokens)
        if self.longest_row is not None:
            self.longest_row -= self.virtual_tokens  # which have positions, too

    def _prepared(self, batch: Batch) -> Batch:
        if is_packed(batch):
            raise UnsupportedModelError(
                "prefix",
                found="several sequences in a row, of which only the first would have the prefix",
                expected="one sequence per row",
                remedy="pad the rows: pass an attention_mask, and leave --pack out",
            )
        return super()._prepared(batch)

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
            inputs["attention_mask"] = torch.cat([mask.new_ones(rows, self.virtual_tokens), mask], dim=1)
        if positions is not None:
            inputs["position_ids"] = positions + self.virtual_tokens
        with self._unwrapped():
            return super().prologue(**inputs)

    def _arguments(self, index: int, activations: Activations) -> LayerCall:
        """The recorded arguments, with a new cache."""
        return _with_cache(activations.calls.layer(index), index, len(self.by_token(activations.hidden)))

    def adapter_bytes(self, rows: int, streams: int) -> int:
        """Bytes of the cache of all rows while it is made, and of each evaluation's prefix. See the base class."""
        all_rows, prefix = (cache_bytes(self.config, count, self.virtual_tokens) for count in (rows, 1))
        return _COPIES * all_rows + streams * prefix

    def forward_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula. See the contract."""
        making = cache_bytes(self.config, len(batch["input_ids"]), self.virtual_tokens)
        return max(super().forward_bytes(batch), _COPIES * making)

    def held_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula. See the contract."""
        prefix, rows = cache_bytes(self.config, 1, self.virtual_tokens), len(batch["input_ids"])
        # The positions of the prefix are removed by a view, which keeps their memory.
        return super().held_bytes(batch) + prefix + rows * self.virtual_tokens * POSITION_BYTES


class _OtherLayer:
    """Placeholder for the earlier layers in a layer's cache."""

    def __getattr__(self, name: str) -> Any:
        found = f"a read of another layer's keys ({name})"
        raise _unfit("a layer's attention", found, "layers that each attend to their own keys, for a prefix")


def _unfit(where: str, found: str, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(where, found=found, expected=expected, remedy="train LoRA, or all weights")


def _with_prefix(call: LayerCall, index: int) -> LayerCall:
    """A layer's arguments with its prefix in place of the cache of all layers."""
    args, kwargs = call
    if not any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
        found = "a call without a cache of keys and values"
        raise _unfit(f"layer {index}", found, "layers that are called with a cache, for a prefix")

    def of_layer(value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        own: Any = value.layers[index]
        return LayerPrefix(own.keys[:1].clone(), own.values[:1].clone())

    return _mapped(of_layer, call)


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

    return _mapped(of_layer, call)


def _mapped(change: Callable[[Any], Any], call: LayerCall) -> LayerCall:
    args, kwargs = call
    return tuple(map(change, args)), {key: change(value) for key, value in kwargs.items()}


class PrefixKind(AdapterKind):
    """``peft.PrefixTuningConfig``."""

    model_class = PrefixBlockModel

    def __init__(self) -> None:
        own = {"init_weights", "encoder_hidden_size"}  # the latter has no effect without a projection
        super().__init__("PREFIX_TUNING", "PrefixTuningConfig", set(), own, _ENCODER, is_mixed=False)
        self.title = "a prefix"
        self.accepted = "prefix tuning of a causal language model, without prefix_projection"
        self.decisive = {"num_virtual_tokens", *_BASE_SIZES}

    def unused_options(self, config: Any) -> list[str]:
        """See the base class."""
        refused = [] if config.task_type in (None, _TASK) else ["task_type"]
        refused += [] if config.init_weights in (None, "zero") else ["init_weights"]
        is_count = type(config.num_virtual_tokens) is int and config.num_virtual_tokens >= 1
        return refused if is_count else [*refused, "num_virtual_tokens"]

    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """See the base class. Sizes that the config does not set are filled in, as in peft."""
        longest = longest_row(skeleton)
        if longest is not None and config.num_virtual_tokens > longest - _SHORTEST_ROW:
            raise OptionError(
                "adapter.num_virtual_tokens",
                found=str(config.num_virtual_tokens),
                expected=f"at most {longest - _SHORTEST_ROW}, so that rows fit in the model's {longest} positions",
                remedy="choose fewer",
            )
        wrapper, own = _wrapped(skeleton, config)
        for option in _BASE_SIZES:
            given, expected = getattr(config, option), getattr(own, option)
            if given not in (None, expected):
                raise OptionError(
                    f"adapter.{option}",
                    found=repr(given)[:80],
                    expected=f"{expected}, as in the base",
                    remedy="leave it out, or use the base that the adapter was made for",
                )
            setattr(config, option, expected)
        config.task_type, config.encoder_hidden_size = own.task_type, own.encoder_hidden_size
        skeleton.add_module(_ENCODER, wrapper.get_submodule(_ENCODER))
        return Inserted({_TABLE: _FILE_NAME}, embedding=(_ENCODER,), wrapper=wrapper)

    def first_values(self, skeleton: PreTrainedModel, config: Any, seed: int, base: OpenBase) -> FirstValues:
        """Keys and values of random tokens; zeros with ``init_weights="zero"``."""
        shape = skeleton.get_parameter(_TABLE).shape
        if config.init_weights == "zero":
            return lambda: {_TABLE: torch.zeros(shape)}
        return lambda: {_TABLE: _real_keys_and_values(base(), config, shape, seed)}


def _wrapped(skeleton: PreTrainedModel, config: Any) -> tuple[Any, Any]:
    """Peft's model around a skeleton, and a config with the base's sizes."""
    import peft

    own = deepcopy(config)
    own.task_type = _TASK
    for option in _BASE_SIZES:
        setattr(own, option, None)
    own.encoder_hidden_size = None
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):  # peft draws a table that is not used
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # peft reads it
            wrapper = peft.PeftModelForCausalLM(skeleton, own, ADAPTER_NAME)
    except Exception as error:  # any: an invalid config leads to errors inside peft
        raise OptionError(
            "adapter",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            expected="a config of a prefix for this model",
            remedy="pass num_virtual_tokens alone",
        ) from error
    return wrapper.eval(), own
