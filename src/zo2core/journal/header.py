"""A journal's header: JSON values that identify the run, and the differences between two headers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from zo2core.errors import OptionError
from zo2core.journal.damage import ImpossibleRecordError, shown
from zo2core.types import ParameterSpec

FORMAT = 1
METHOD = "method"  # key of first-order runs' headers only
DRAWN = "drawn"  # key of headers of torch's noise only: its version, and a checksum of what it drew; not compared

Header: TypeAlias = Mapping[str, Any]

_WORDS = {dict: "an object", list: "a list", str: "a string", int: "a whole number", type(None): "null"}
_TYPES: Mapping[str, tuple[type, ...]] = {  # types of the values that this library writes; other keys are the caller's
    "base": (str,),
    "parameters": (str,),
    "noise": (str,),
    "estimator": (dict, type(None)),
    "seed": (int, type(None)),
    "model": (dict,),
    "provenance": (dict,),
    "perturbation": (dict,),
    METHOD: (dict,),
    DRAWN: (dict,),
    "branched": (list,),
}
_LATER = {"model", "provenance"}  # keys that journals of earlier versions lack
_NESTING = 64  # most levels of nested values
_LISTED = 6  # most differences that an error lists
_ABSENT = object()


def completed(header: Header) -> Header:
    """A header as it is written and read: with its format, and with JSON values only."""
    return {"format": FORMAT, **json.loads(json.dumps(dict(header), allow_nan=False))}


def json_object(name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A caller's values as JSON values for a header."""
    try:
        converted = json.loads(json.dumps(dict(values), allow_nan=False))
        _leaves(converted, name)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            name, found=str(error), expected="finite JSON values in an object", remedy="pass strings and numbers"
        ) from error
    assert isinstance(converted, dict)
    return converted


def require_header(record: Mapping[str, Any]) -> None:
    """Refuse a record that is not a header of this format."""
    if type(record.get("format")) is not int or record["format"] != FORMAT:
        raise ImpossibleRecordError(_described(record, "format"), f"a header of format {FORMAT}")
    for key, types in _TYPES.items():
        if key in record and type(record[key]) not in types:
            raise ImpossibleRecordError(_described(record, key), f"{' or '.join(_WORDS[kind] for kind in types)} as {key}")
    _leaves(record)


def may_be_torn_header(torn: bytes) -> bool:
    """Whether bytes may be a header whose write was interrupted: its beginning, or a sector of zeros."""
    start = b'{"format":'
    if re.match(rb"[0-9a-f]", torn):  # the line format of earlier versions
        return bool(re.fullmatch(rb"[0-9a-f]{1,8}", torn[:8])) and (b" " + start).startswith(torn[8 : 9 + len(start)])
    return start.startswith(torn[: len(start)]) or not torn[:512].strip(b"\0")


def differences(theirs: Header, ours: Header) -> tuple[str, str] | None:
    """The differences, leaf by leaf, between a journal's header and that of a run that would continue it.

    Keys of the run with the value None are not compared, nor are keys that the journal is too old to have.
    """
    compared = {key for key, value in ours.items() if value is not None and (key in theirs or key not in _LATER)} - {DRAWN}
    journal, run = (_leaves({key: header[key] for key in compared if key in header}) for header in (theirs, ours))
    keys = [key for key in sorted({*journal, *run}) if not _same(journal.get(key, _ABSENT), run.get(key, _ABSENT))]
    return (_listed(journal, keys), _listed(run, keys)) if keys else None


def digest(parameters: Iterable[ParameterSpec]) -> str:
    """Identifies a model's parameters: names, shapes, dtypes, indices, decay, transfer dtypes and encodings."""
    listed: list[list[object]] = []
    for spec in parameters:
        transfer = [str(spec.transfer_dtype), spec.transfer_back] if spec.is_low_bit else []  # older journals have none
        encoded = [] if spec.encoding is None else [repr(spec.encoding)]
        frozen = ["frozen"] if spec.frozen else []
        listed.append([spec.name, list(spec.shape), str(spec.dtype), spec.index, spec.decays, *transfer, *encoded, *frozen])
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _leaves(value: object, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested objects and lists as one flat dictionary, with dotted paths as keys."""
    if depth > _NESTING:
        raise ImpossibleRecordError(f"more than {_NESTING} levels in {path.split('.')[0]}", "a header that is less nested")
    if isinstance(value, dict):
        items: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list) and value:
        items = enumerate(value)
    else:
        return {path: value}
    leaves: dict[str, Any] = {}
    for key, item in items:
        leaves |= _leaves(item, f"{path}.{key}" if path else str(key), depth + 1)
    return leaves


def _same(one: object, other: object) -> bool:
    """Whether two JSON values are equal: numbers by their value, and true is not a number."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _described(header: Header, key: str) -> str:
    name = key if key.isprintable() else shown(key)  # an error is one line
    return f"{name} {shown(header[key])}" if key in header else f"no {name}"


def _listed(leaves: Mapping[str, Any], keys: list[str]) -> str:
    listed = [_described(leaves, key) for key in keys[:_LISTED]]
    more = len(keys) - _LISTED
    return "; ".join([*listed, f"and {more} more"] if more > 0 else listed)
