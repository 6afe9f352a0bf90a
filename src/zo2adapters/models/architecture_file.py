"""Reading an ``Architecture`` from a JSON file."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from zo2adapters.models.architecture import Architecture
from zo2core.errors import OptionError, reason
from zo2core.io.durable import open_regular

_MAX_BYTES = 1 << 20
_NAME_LISTS = ("embedding", "head", "ignored")
_MAX_AXES = 8  # axes of hidden states
_EXPECTED = {"returned": "an integer from 0 to 3", "axes": f"a list of two different integers from 0 to {_MAX_AXES - 1}"}


def read_architecture(path: Path) -> Architecture:
    """Read a declaration."""
    try:
        with open_regular(path) as file:
            values = json.loads(file.read(_MAX_BYTES))
    except OSError as error:
        raise _refused(path, reason(error), "a readable file") from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"invalid JSON ({error})", "a JSON object") from error
    if not isinstance(values, dict):
        raise _refused(path, f"a {type(values).__name__}", "a JSON object")
    known = {field.name for field in fields(Architecture)}
    needed = known - {"returned", "axes", "ignored"}
    if not needed <= values.keys() <= known:
        wrong = sorted(needed - values.keys()) or sorted(values.keys() - known)
        raise _refused(path, f"{'no' if needed - values.keys() else 'a field'} {wrong[0][:40]!r}", ", ".join(sorted(known)))
    for name, value in values.items():
        if not _is_valid(name, value):
            expected = _EXPECTED.get(name, "a list of names" if name in _NAME_LISTS else "a name")
            raise _refused(f"{path}: {name}", f"{str(value)[:40]!r}", expected)
    declared: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Architecture(**declared)


def _is_valid(name: str, value: Any) -> bool:
    if name == "returned":
        return type(value) is int and 0 <= value <= 3
    if name == "axes":
        is_list = isinstance(value, list) and len(value) == 2 and value[0] != value[1]
        return is_list and all(type(axis) is int and 0 <= axis < _MAX_AXES for axis in value)
    if name in _NAME_LISTS:
        return isinstance(value, list) and all(isinstance(item, str) and item for item in value)
    return isinstance(value, str) and value != ""


def _refused(where: object, found: str, expected: str) -> OptionError:
    return OptionError(str(where), found=found, expected=expected, remedy="see the example in docs/models.md")
