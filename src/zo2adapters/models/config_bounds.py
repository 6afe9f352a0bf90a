"""Sizes that a config may name, looked at before transformers makes anything of them.

A size is known under its own name and under the one that a model's config class has for it (``n_layer`` of GPT-2), in the
config and in the configs inside it (``text_config``). What other names ask for is bounded as the model is built: ``Bounds``
in ``skeleton``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from zo2core import CheckpointError, UnsupportedModelError

_LARGEST = {"num_hidden_layers": 1 << 10, "hidden_size": 1 << 20, "head_dim": 1 << 20, "num_labels": 1 << 20}


def refuse_oversized(path: Path) -> None:
    """Refuse sizes for which transformers would take time or memory before any of them is compared with the weights.

    Args:
        path: A model's ``config.json``.

    Raises:
        UnsupportedModelError: if it is no JSON object.
        CheckpointError: naming a size that is too large.
    """
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(
            path,
            found=(str(error).splitlines() or [type(error).__name__])[0][:200],
            expected="a readable JSON file",
            remedy="get config.json again",
        ) from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(
            path, found=f"a {type(config).__name__}", expected="a JSON object", remedy="get config.json again"
        )
    waiting: list[tuple[str, dict[str, Any], Any]] = [("", config, _class_of(config, None))]
    while waiting:  # no recursion: how deep a stranger's file goes is not known
        prefix, values, kind = waiting.pop()
        largest = _largest(kind)
        inner = getattr(kind, "sub_configs", None) or {}
        for name, value in values.items():
            if isinstance(value, dict):
                waiting.append((f"{prefix}{name}.", value, _class_of(value, inner.get(name))))
            elif name in largest and isinstance(value, (int, float)) and value > largest[name]:
                raise CheckpointError(
                    f"{path}: {prefix}{name}",
                    found=str(value)[:40],
                    expected=f"at most {largest[name]}",
                    remedy="get config.json again",
                )


def _class_of(values: dict[str, Any], declared: Any) -> Any:
    """The class of a config's values: by its model type, or the one that the config around it declares."""
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    return declared


def _largest(kind: Any) -> dict[str, int]:
    """The bounds by all names that a config class has for them."""
    largest = dict(_LARGEST)
    for name, other in (getattr(kind, "attribute_map", None) or {}).items():
        for one, same in ((name, other), (other, name)):
            if one in _LARGEST:
                largest[same] = _LARGEST[one]
    return largest
