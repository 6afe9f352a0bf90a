"""Type checks of dataclass fields whose values were read from JSON."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from zo2core.ranges import LARGEST


def require_field_types(options: Any) -> None:
    """Check that the values of a dataclass, and of dataclasses nested in it, have the types of their fields.

    Raises:
        TypeError: naming the field.
    """
    hints = get_type_hints(type(options))
    for option in fields(options):
        value = getattr(options, option.name)
        if not _fits(value, hints[option.name]):
            raise TypeError(f"{type(value).__name__} {str(value)[:40]!r} as {option.name}")
        if is_dataclass(value):
            require_field_types(value)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return type(value) is str and value in get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return type(value) is tuple and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is int or (hint is float and type(value) is int):
        return type(value) is int and abs(value) <= LARGEST
    if hint is float:
        return type(value) is float and math.isfinite(value)
    if hint in (str, Path):
        return isinstance(value, hint) and "\0" not in str(value)
    return value is None if hint is NoneType else isinstance(value, hint)
