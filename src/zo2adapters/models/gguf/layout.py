"""The names and the order of rows that llama.cpp gives a model's tensors, by transformers' reader of GGUF files."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from zo2adapters.optional_package import optional_package
from zo2core.encodings import GGUFRows
from zo2core.errors import CheckpointError, UnsupportedModelError
from zo2core.kernels.gguf import row_order

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3")  # llama.cpp's names; all are tested
GGUF_EXTRA = "zo2core[gguf]"
ROTARY_FACTORS = "rope_freqs.weight"  # Llama 3.1's scaling of rotary frequencies, which is not in the metadata


class LlamaCppLayout:
    """Names, order of rows and values of a model's tensors in GGUF files."""

    def __init__(self, architecture: str, config: PretrainedConfig) -> None:
        self.architecture = architecture
        self._config = config

    @cached_property
    def _processor(self) -> Any:
        """Transformers' reader of tensors, which undoes what llama.cpp did to them."""
        kind: Any = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)
        return kind(config=self._config.to_dict())

    def names(self, parameters: Iterable[str]) -> dict[str, str]:
        """The names of parameters in the model, by llama.cpp's names; parameters without such a name are left out."""
        gguf = optional_package("gguf", install=GGUF_EXTRA)
        number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == self.architecture)
        known, names = gguf.get_tensor_name_map(number, self._config.num_hidden_layers), dict[str, str]()
        for name in parameters:
            path, _, leaf = name.rpartition(".")
            found = known.get_name(path)
            if found is not None:
                names[f"{found}.{leaf}"] = name
        return names

    def heads(self, name: str, shape: tuple[int, ...]) -> int:
        """Number of heads whose rows llama.cpp stores in pairs; 0 for vectors and for matrices in the model's order."""
        if len(shape) != 2:
            return 0
        rows = shape[0]
        probe = np.arange(rows, dtype=np.float32)[:, None]
        result = self._processed(name, probe.copy())
        if result.weights is not None and result.name == name and np.shape(result.weights) == probe.shape:
            if np.array_equal(result.weights, probe):
                return 0
            for heads in {self._config.num_attention_heads, self._config.num_key_value_heads} - {0}:
                if rows % (2 * heads) == 0 and np.array_equal(result.weights[_order(rows, heads).numpy()], probe):
                    return int(heads)
        raise UnsupportedModelError(
            name,
            found="a matrix whose values transformers' reader changes",
            expected="matrices that are stored row by row",
            remedy="use the model in the Hugging Face layout",
        )

    def changes(self, name: str, length: int) -> bool:
        """Whether a vector has other values in the file than in the model."""
        probe = torch.arange(length, dtype=torch.float32)
        return not self.read(name, probe).equal(probe)

    def read(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Convert a vector from the file's values to the model's: float32."""
        processed = self._processed(name, stored.numpy().copy()).weights
        return torch.from_numpy(np.ascontiguousarray(processed, dtype=np.float32))

    def _processed(self, name: str, values: Any) -> Any:
        """The tensor as transformers' reader converts it."""
        try:
            return self._processor.process(weights=values, name=name)
        except (ValueError, ArithmeticError, TypeError) as error:
            raise CheckpointError(
                name,
                found=f"{len(values)} rows, which do not fit the metadata ({error})",
                expected="as many rows as the heads of the metadata have",
                remedy="download the file again",
            ) from error

    def write(self, name: str, weights: torch.Tensor) -> torch.Tensor:
        """Convert a tensor from the model's values to the file's, float32: the inverse of reading."""
        if len(weights.shape) == 2:
            heads = self.heads(name, tuple(weights.shape))
            return weights[_order(len(weights), heads)] if heads else weights
        zeros = torch.zeros_like(weights)
        added = self.read(name, zeros)
        if not added.equal(zeros):  # Gemma's norms
            return weights - added
        places = self.read(name, torch.arange(len(weights), dtype=torch.float32)).long()
        return torch.empty_like(weights).index_copy_(0, places, weights)


def _order(rows: int, heads: int) -> torch.Tensor:
    """For each stored row, its index in the model's matrix."""
    return row_order(GGUFRows("F32", heads), rows, torch.device("cpu"))
