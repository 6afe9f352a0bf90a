"""The files of a tokenizer, which are read and loaded within limits of time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zo2adapters.limited_process import LimitedProcessError
from zo2adapters.models.model_files import unusable_tokenizer
from zo2adapters.tasks import limited_backend
from zo2adapters.tasks.tokenizer_growth import Growth, growth_of, parsed

_DEFINITION = "tokenizer.json"
# files beside it that name further tokens, which are normalized when they are loaded
_NAMING = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
_MOST_PARTS = 1 << 23  # values or lines of a file, of which Python makes twenty times its bytes
_ROOM_OF_NAMES = 1 << 26  # characters of tokens that may be normalized when they are loaded


def require_loadable(directory: Path) -> Growth | None:
    """Refuse files of a tokenizer that cannot be loaded within limits.

    Args:
        directory: A model's directory, all of whose files are regular ones.

    Returns:
        The growth of the tokenizer; None if no tokenizer.json says it.
    """
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt"):
            _require_parts(path)
    if not (directory / _DEFINITION).is_file():
        return None
    text = _text(directory / _DEFINITION)
    definition = parsed(text)
    growth = growth_of(definition)
    names = list(_names(definition["added_tokens"])) if growth.encoding is not None else []
    for path in (directory / name for name in _NAMING):
        names += _names(parsed(_text(path))) if path.is_file() else ()
    if growth.encoding is None or growth.encoding * sum(map(len, names)) > _ROOM_OF_NAMES:
        try:
            limited_backend.define(text, names)
        except LimitedProcessError as error:
            within = f"within {limited_backend.MEMORY >> 20} MiB"
            why = f"{_DEFINITION} cannot be loaded {within}: {error}"
            raise unusable_tokenizer(directory, why) from error
    return growth


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _require_parts(path: Path) -> None:
    """Refuse a file of very many small values."""
    content = path.read_bytes()
    values = content.count(b",") + content.count(b"[") + content.count(b"{")
    parts = max(values, content.count(b"\n"))
    if parts > _MOST_PARTS:
        size = f"{path.name} of {parts} parts, where {_MOST_PARTS} are allowed"
        raise unusable_tokenizer(path.parent, size)


def _names(value: Any) -> Iterator[str]:
    """All texts in a file that may be those of tokens. In added_tokens.json they have their ids."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, dict):
        if value and all(type(index) is int for index in value.values()):
            yield from value
        for key, item in value.items():
            if key != "chat_template":
                yield from _names(item)
