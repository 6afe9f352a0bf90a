"""Dataclasses of options from JSON values, whose types are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from zo2core.ranges import LARGEST

OptionsT = TypeVar("OptionsT")


def from_json(kind: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    """A dataclass from the value of each field, also of nested ones."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{type(values).__name__} in place of options")
    hints = get_type_hints(kind)
    given = {option.name: _value(values[option.name], hints[option.name], option.name) for option in fields(kind)}  # type: ignore[arg-type]
    if unknown := values.keys() - given.keys():
        raise TypeError(f"the unknown key {min(unknown)[:80]}")
    return kind(**given)


def _value(value: Any, hint: Any, name: str) -> Any:
    """The value as its field has it."""
    if is_dataclass(hint):
        return from_json(hint, value)  # type: ignore[arg-type]
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]:
        items = get_args(kind)
        if get_origin(kind) is Literal and type(value) is str and value in items:
            return value
        if get_origin(kind) is tuple and isinstance(value, list) and (items[-1] is ... or len(items) == len(value)):
            return tuple(_value(item, items[0], name) for item in value)
        if isinstance(kind, type) and issubclass(kind, Enum) and value in [member.value for member in kind]:
            return kind(value)
        if kind in (str, Path) and isinstance(value, str) and "\0" not in value:
            return kind(value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind in (int, float) and type(value) is int and abs(value) <= LARGEST:
            return value
        if kind is float and type(value) is float and math.isfinite(value):
            return value
        if kind is NoneType and value is None:
            return value
    raise TypeError(f"{type(value).__name__} {str(value)[:40]!r} as {name}")
