"""Models of any geometry without files, block by block and whole, with the same synthetic weights,
and a slower disk.

Matrices repeat a table of numbers drawn from N(0, 0.02), norms are ones, biases zeros: losses are
finite, as for a newly initialised model, and filling a bucket costs a copy.
"""

import threading
import time
import zlib
from collections.abc import Collection
from copy import deepcopy

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from zo2adapters import HFBlockModel
from zo2adapters.models.architecture import ARCHITECTURES, parameter_names
from zo2adapters.models.skeleton import build_skeleton
from zo2core.protocols import TensorReader
from zo2core.ranges import parse_size
from zo2core.types import ParameterSpec

_TABLE = 1_000_003  # numbers; prime, so that rows of a matrix are not alike


class PatternReader:
    """The checkpoint of a model with synthetic weights; ``vectors`` are the names of its norms and
    biases.
    """

    fingerprint = "a repeated table"

    def __init__(self, dtype: torch.dtype, vectors: Collection[str]) -> None:
        table = torch.empty(_TABLE).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
        self._table = table.to(dtype)
        self._vectors = frozenset(vectors)

    def page_offset(self, spec: ParameterSpec) -> int | None:
        return None

    def itemsize(self, parameter: str) -> int:
        return self._table.itemsize

    def origin(self, parameter: str) -> str:
        return self.fingerprint

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        if parameter in self._vectors:
            out.fill_(0.0 if "bias" in parameter else 1.0)
            return
        at, done = (zlib.crc32(parameter.encode()) + start) % _TABLE, 0
        while done < out.numel():
            part = self._table[at : at + out.numel() - done]
            out[done : done + part.numel()] = part
            at, done = 0, done + part.numel()

    def close(self) -> None:
        """Do nothing, because no file is open."""


class SlowReader:
    """A reader that takes at least the time of a slower disk, of so many bytes a second for all
    threads together.
    """

    def __init__(self, inner: TensorReader, rate: float) -> None:
        self._inner, self._rate, self._lock = inner, rate, threading.Lock()
        self._free = 0.0  # time at which the disk is free again
        self.fingerprint, self.origin, self.close = inner.fingerprint, inner.origin, inner.close
        self.page_offset, self.itemsize = inner.page_offset, inner.itemsize

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        with self._lock:
            self._free = until = max(self._free, time.perf_counter()) + out.nbytes / self._rate
        self._inner.read_into(parameter, out, start)
        time.sleep(max(until - time.perf_counter(), 0))


def slowed(model: HFBlockModel, rate: str | None) -> HFBlockModel:
    """A model with the reads of a slower disk, of so many bytes a second; None leaves it as
    it is.
    """
    if rate is not None:
        model.weights = SlowReader(model.weights, parse_size(rate))
    return model


def scaled(config: PretrainedConfig, by: int, tokens: int) -> PretrainedConfig:
    """Divide width, heads and vocabulary of a geometry, for sequences of at least ``tokens``
    tokens.

    Depth stays: blocks, embedding, activations and logits then keep their shares of the memory.
    """
    small = deepcopy(config)
    small.max_position_embeddings = max(config.max_position_embeddings // by, tokens)
    if by == 1:
        return small
    small.hidden_size, small.vocab_size = config.hidden_size // by, config.vocab_size // by
    small.num_attention_heads = _divisor(small.hidden_size, config.num_attention_heads // by)
    if config.model_type == "opt":
        small.ffn_dim, small.word_embed_proj_dim = config.ffn_dim // by, small.hidden_size
    else:
        small.intermediate_size = config.intermediate_size // by
        small.num_key_value_heads = _divisor(
            small.num_attention_heads, config.num_key_value_heads // by
        )
    for special in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(small, special, None)
        if isinstance(token, int) and token >= small.vocab_size:
            setattr(small, special, None)
    return small


def _divisor(of: int, most: int) -> int:
    """The largest divisor of a number that is at most ``most``, or 1."""
    return next((divisor for divisor in range(min(most, of), 0, -1) if of % divisor == 0), 1)


def block_model(config: PretrainedConfig, dtype: torch.dtype) -> HFBlockModel:
    """A model in segments, whose checkpoint is the pattern. The config's dtype is set."""
    config.dtype = dtype
    skeleton = build_skeleton(config, dtype)
    vectors = [name for name, parameter in skeleton.named_parameters() if parameter.dim() == 1]
    return HFBlockModel(
        skeleton, ARCHITECTURES[config.model_type], PatternReader(dtype, vectors), {}
    )


def whole_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, weights: TensorReader
) -> PreTrainedModel:
    """The whole model on a device with a checkpoint's weights, which pass through host memory one
    by one.
    """
    config.dtype = dtype
    model = build_skeleton(config, dtype)
    modules = dict(model.named_modules())
    for name, aliases in parameter_names(model).items():
        value = torch.empty(model.get_parameter(name).shape, dtype=dtype)
        weights.read_into(name, value.view(-1))
        parameter = nn.Parameter(value.to(device))
        for alias in aliases:
            path, _, leaf = alias.rpartition(".")
            modules[path]._parameters[leaf] = parameter
    for module in modules.values():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model
