"""Rows of the embedding that an adapter trains, and no others: peft's ``trainable_token_indices``
beside LoRA, or its ``TrainableTokensConfig`` alone.

Peft wraps the embedding, and a tied output layer with the same rows. Its parameter holds the rows
that replace those of the weight, of which each forward makes a copy with them in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from zo2adapters.models.adapter_files import ADAPTER_NAME
from zo2core.errors import OptionError

WRAPPER = "token_adapter"  # name of peft's layer in the module that it puts around the embedding
_ROWS = "trainable_tokens_delta"


class TokenRows(NamedTuple):
    """The trained rows of one weight."""

    parameter: str  # name of the rows in the model
    weight: str  # name in the base of the weight that they replace rows of
    tokens: list[int]


def is_token_layer(module: nn.Module) -> bool:
    """Whether a module is peft's layer around an embedding, or around a tied output layer."""
    return hasattr(module, _ROWS)


def token_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path of each of these layers, and the layer."""
    return ((path, module) for path, module in model.named_modules() if is_token_layer(module))


def token_rows(model: nn.Module) -> list[TokenRows]:
    """The rows that are trained; a tied output layer has none of its own."""
    rows = []
    for path, layer in token_layers(model):
        if layer.tied_adapter is not None:
            continue
        tokens = layer.token_indices[ADAPTER_NAME]
        weight = f"{path.removesuffix(f'.{WRAPPER}')}.weight"
        rows.append(TokenRows(f"{path}.{_ROWS}.{ADAPTER_NAME}", weight, list(tokens)))
    return rows


def require_known_tokens(model: nn.Module) -> None:
    """Refuse tokens that are not the model's, or named twice."""
    for _, layer in token_layers(model):
        _require_tokens(layer.token_indices[ADAPTER_NAME], len(layer.base_layer.weight))


def _require_tokens(tokens: Any, known: int) -> None:
    """Refuse what are not different tokens of a model that has so many."""
    wrong = [token for token in tokens if type(token) is not int or not 0 <= token < known]
    if not tokens or wrong or len({*tokens}) != len(tokens):
        found = "a token twice" if not wrong else repr(wrong[0])[:40]
        raise OptionError(
            "adapter.trainable_token_indices",
            "no token" if not tokens else found,
            f"different integers from 0 to {known - 1}, the rows of the embedding",
            "name tokens of the base; add new ones with transformers' resize_token_embeddings",
        )


def own_parameters(model: nn.Module) -> None:
    """Give a tied output layer a place of its own for the rows of the embedding's layer, as other
    tied weights have, and leave out peft's copies of the base's rows.
    """
    for _, layer in token_layers(model):
        layer.trainable_tokens_original[ADAPTER_NAME] = torch.empty(0)
        if layer.tied_adapter is not None:
            rows = layer.tied_adapter.trainable_tokens_delta
            layer.trainable_tokens_delta = nn.ParameterDict(dict(rows))


def copied_bytes(model: nn.Module) -> int:
    """Bytes of the largest weight of which a forward makes a copy; 0: there is none."""
    return max((layer.base_layer.weight.nbytes for _, layer in token_layers(model)), default=0)


def is_one_change(layers: list[Any]) -> bool:
    """Whether peft's layers around one weight in several places change it alike."""
    return len({id(getattr(layer, "tied_adapter", None) or layer) for layer in layers}) == 1
