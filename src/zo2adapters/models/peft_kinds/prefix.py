"""Prefix tuning: trained keys and values of virtual tokens, which every layer's attention sees before those of the row.

The parameter is peft's table of these keys and values, without a projection. Initial values are those of MeZO: the keys and
values that the base computes for random tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from transformers import DynamicCache, PreTrainedModel

from zo2adapters.models.hf import Activations, HFBlockModel
from zo2adapters.models.peft_kinds.kind import ADAPTER_NAME, AdapterKind, FirstValues, Inserted, OpenBase
from zo2adapters.models.peft_kinds.prefix_model import PrefixBlockModel
from zo2adapters.models.prepared_batch import longest_row
from zo2core import Batch, Engine, HostPlan, MemoryPolicy
from zo2core.errors import OptionError, UnsupportedModelError

_ENCODER = "prompt_encoder"  # name of the table's module in peft's model
_TABLE = f"{_ENCODER}.{ADAPTER_NAME}.embedding.weight"
_FILE_NAME = "prompt_embeddings"
_BASE_SIZES = ("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules")
_TASK = "CAUSAL_LM"
_SHORTEST_ROW = 2  # tokens of the shortest useful row: one to read and one to predict
_NO_LIMIT = 1 << 62  # bytes of a host plan that streams one block at a time


class PrefixKind(AdapterKind):
    """``peft.PrefixTuningConfig``."""

    peft_type = "PREFIX_TUNING"
    title = "a prefix"
    config_class = "PrefixTuningConfig"
    decisive = frozenset({"num_virtual_tokens", *_BASE_SIZES})
    supported = frozenset({"init_weights", "encoder_hidden_size"})  # the latter has no effect without a projection
    accepted = "prefix tuning of a causal language model, without prefix_projection"
    part_of_names = _ENCODER
    model_classes: ClassVar[Mapping[type[HFBlockModel], Callable[..., HFBlockModel]]] = {HFBlockModel: PrefixBlockModel}

    def unused_options(self, config: Any) -> list[str]:
        """See the contract."""
        refused = [] if config.task_type in (None, _TASK) else ["task_type"]
        refused += [] if config.init_weights in (None, "zero") else ["init_weights"]
        is_count = type(config.num_virtual_tokens) is int and config.num_virtual_tokens >= 1
        return refused if is_count else [*refused, "num_virtual_tokens"]

    def insert(self, skeleton: PreTrainedModel, config: Any) -> Inserted:
        """See the contract. Sizes that the config does not set are filled in, as in peft."""
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


class _KeysAndValues:
    """The base's forward up to the last layer, which writes every layer's keys and values to a cache."""

    def __init__(self, model: HFBlockModel) -> None:
        self.cache = DynamicCache()
        self._model = model
        self.block = model.block
        self.forward_bytes = model.forward_bytes
        self.held_bytes = model.held_bytes

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch unchanged."""
        return batch

    def embed(self, batch: Batch) -> Activations:
        """Run HF's forward up to the first layer, with the cache."""
        return self._model.prologue(**batch, past_key_values=self.cache, use_cache=True)

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Return a placeholder: the result is in the cache."""
        return activations.hidden.new_zeros(())


def _real_keys_and_values(base: HFBlockModel, config: Any, shape: torch.Size, seed: int) -> torch.Tensor:
    """Keys and values that the base computes for one row of random tokens, with one block in memory at a time."""
    tokens, heads = config.num_virtual_tokens, config.num_attention_heads
    expected = (1, heads, tokens, config.token_dim // heads)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(base.config.get_text_config().vocab_size, (1, tokens), generator=generator)
    forward = _KeysAndValues(base)
    streamed = MemoryPolicy(host=HostPlan((), _NO_LIMIT, buckets=1, keep_noise=False))
    with Engine(base, memory=streamed) as replayer:
        list(replayer.forwards([{"input_ids": ids}], forward))
    columns: list[torch.Tensor] = []
    layers: list[Any] = forward.cache.layers
    for index, layer in enumerate(layers):
        for states in (layer.keys, layer.values):
            if states is None or tuple(states.shape) != expected:
                raise UnsupportedModelError(
                    f"layer {index}",
                    found="no keys" if states is None else f"keys or values of shape {list(states.shape)}",
                    expected=f"shape {list(expected)}, as for every layer in peft's table",
                    remedy='pass init_weights="zero", or train LoRA',
                )
            columns.append(states[0].transpose(0, 1).reshape(tokens, -1).float())
    table = torch.cat(columns, dim=1)
    if table.shape != shape:  # layers that share the keys of another layer have none
        raise UnsupportedModelError(
            f"model type {base.config.model_type}",
            found=f"keys and values of {len(layers)} layers, {table.shape[1]} numbers for a token",
            expected=f"those of every layer, {shape[1]} numbers, as in peft's table",
            remedy='pass init_weights="zero", or train LoRA',
        )
    return table
