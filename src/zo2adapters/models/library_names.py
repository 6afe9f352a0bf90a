"""Names inside transformers that its releases change, found by what they name."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from torch import nn
from transformers import Cache


def cache_argument(model: nn.Module) -> str | None:
    """The argument of a model's forward for a cache of keys and values; None: it takes none.

    It is known by its type. Where the forward itself does not say so, a module in it does.
    """
    kinds: list[Any] = list(dict.fromkeys(map(type, model.modules())))
    own, *inner = (inspect.signature(kind.forward).parameters for kind in kinds)
    declared = {
        name
        for parameters in (own, *inner)
        for name, parameter in parameters.items()
        if any(
            _is_cache(option) for option in (parameter.annotation, *get_args(parameter.annotation))
        )
    }
    return next((name for name in own if name in declared), None)


def _is_cache(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Cache)
