"""Records of the journal, as they are in its file.

The first is the header (format version and identity of the run). Each further one is a step,
digests of the bytes of the base (the weights before training), the result of an evaluation, or what
a step has measured beside its losses. The steps of a zeroth-order run are updates,
which can be replayed. Those of a first-order run, whose header has a `method`, are commits, which
cannot.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from zo2core.errors import JournalError, OptionError, ZO2Error, system_error
from zo2core.io import durable
from zo2core.types import Commit, Evaluation, ParameterSpec, Update

SHOWN = 80  # characters of a value that an error shows


class ImpossibleRecordError(ValueError):
    """A record whose checksum is right, but which no run of this format writes."""

    def __init__(self, found: str, expected: str) -> None:
        self.found = found
        self.expected = expected
        super().__init__(f"{found}; expected {expected}")


def shown(value: object) -> str:
    """A value's ``repr``, truncated so that an error stays one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, values nested too deep
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def damaged(path: Path, line: int, found: str, expected: str | None = None) -> JournalError:
    """The error for a file with a damaged line."""
    remedy = "restore the journal from a copy; records after the damage cannot be trusted"
    expected = f"a record of format {FORMAT}" if expected is None else expected
    return JournalError(f"{path}, line {line}", found, expected, remedy)


def unwritable(name: str, error: OSError) -> ZO2Error:
    """The error for a file that cannot be opened for writing, or written."""
    expected, remedy = "a file that can be written and synced", "check the path and its disk"
    if isinstance(error, durable.LockedFileError):
        expected, remedy = (
            "a file that no other engine writes",
            "close that engine, or wait until its process has ended",
        )
    elif isinstance(error, durable.DisturbedFileError):
        expected, remedy = "the file as it was left", "put the file back, or resume from a copy"
    afterwards = "the step was not taken and can be repeated"
    return system_error(
        JournalError, name, error, expected=expected, remedy=remedy, afterwards=afterwards
    )


FORMAT = 1
METHOD = "method"  # key of first-order runs' headers only
# key of headers of torch's noise only: its version, and a checksum of what it drew; not compared
DRAWN = "drawn"

Header: TypeAlias = Mapping[str, Any]

_WORDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    type(None): "null",
}
# Types of the values that this library writes; other keys are the caller's.
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("base", "parameters", "noise", "matmul_precision"), (str,)),
    **dict.fromkeys(("model", "provenance", "perturbation", METHOD, DRAWN), (dict,)),
    "estimator": (dict, type(None)),
    "seed": (int, type(None)),
    "branched": (list,),
}
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
            name, str(error), "finite JSON values in an object", "pass strings and numbers"
        ) from error
    assert isinstance(converted, dict)
    return converted


def require_header(record: Mapping[str, Any]) -> None:
    """Refuse a record that is not a header of this format."""
    if type(record.get("format")) is not int or record["format"] != FORMAT:
        raise ImpossibleRecordError(_described(record, "format"), f"a header of format {FORMAT}")
    for key, types in _TYPES.items():
        if key in record and type(record[key]) not in types:
            raise ImpossibleRecordError(
                _described(record, key), f"{' or '.join(_WORDS[kind] for kind in types)} as {key}"
            )
    _leaves(record)


def may_be_torn_header(torn: bytes) -> bool:
    """Whether bytes may be a header whose write was interrupted: its beginning, or a sector of
    zeros.
    """
    start = b'{"format":'
    return start.startswith(torn[: len(start)]) or not torn[:512].strip(b"\0")


def differences(theirs: Header, ours: Header) -> tuple[str, str] | None:
    """The differences, leaf by leaf, between a journal's header and that of a run that would
    continue it.

    Keys of the run with the value None are not compared.
    """
    compared = {key for key, value in ours.items() if value is not None} - {DRAWN}
    journal, run = (
        _leaves({key: header[key] for key in compared if key in header})
        for header in (theirs, ours)
    )
    different = _different_keys(journal, run)
    if not different:
        return None
    for key in different:
        _tell_fields(journal, run, key)
    keys = _different_keys(journal, run)
    return _listed(journal, keys), _listed(run, keys)


def _different_keys(journal: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    return [
        key
        for key in sorted({*journal, *run})
        if not _same(journal.get(key, _ABSENT), run.get(key, _ABSENT))
    ]


def _tell_fields(journal: dict[str, Any], run: dict[str, Any], key: str) -> None:
    """Put the fields of two objects of one class, such as schedules, in place of their reprs, if
    that shows a difference.
    """
    fields_of_both = []
    for leaves in (journal, run):
        match = _REPR.fullmatch(str(leaves.get(key)))
        if match is None:
            return
        fields_of_both.append((match[1], dict(_FIELD.findall(match[2]))))
    (name, first), (other_name, second) = fields_of_both
    if name != other_name or first == second:
        return
    for leaves, texts in ((journal, first), (run, second)):
        del leaves[key]
        leaves |= {f"{key}.{field}": _of_repr(text) for field, text in texts.items()}


def digest(parameters: Iterable[ParameterSpec]) -> str:
    """Identifies a model's parameters: names, shapes, dtypes, indices, decay, transfer dtypes,
    encodings, and which are frozen.
    """
    listed = [
        [
            spec.name,
            list(spec.shape),
            str(spec.dtype),
            spec.index,
            spec.decays,
            [str(spec.transfer_dtype), spec.transfer_back] if spec.is_low_bit else None,
            repr(spec.encoding),
            spec.frozen,
        ]
        for spec in parameters
    ]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


_REPR = re.compile(r"([A-Z]\w*)\((\w+=.+)\)")  # of a dataclass: its class and its fields
# ``name=value`` pairs of a dataclass's repr, up to a comma; of ``<Kind.NAME: value>`` the value
_FIELD = re.compile(r"(\w+)=(?:<[^:>]*: )?([^,>]+)>?")


def _leaves(value: object, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested objects and lists as one flat dictionary, with dotted paths as keys."""
    if depth > _NESTING:
        raise ImpossibleRecordError(
            f"more than {_NESTING} levels in {path.split('.')[0]}", "a header that is less nested"
        )
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


def _of_repr(text: str) -> object:
    """A number, or a text, by its repr."""
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text.strip("'")


def _same(value: object, other: object) -> bool:
    """Whether two JSON values are equal: numbers by their value, and true is not a number."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _described(header: Header, key: str) -> str:
    name = key if key.isprintable() else shown(key)  # an error is one line
    return f"{name} {shown(header[key])}" if key in header else f"no {name}"


def _listed(leaves: Mapping[str, Any], keys: list[str]) -> str:
    listed = [_described(leaves, key) for key in keys[:_LISTED]]
    more = len(keys) - _LISTED
    return "; ".join([*listed, f"and {more} more"] if more > 0 else listed)


DIGESTS = "base_digests"  # the only key of a record of digests
EVALUATION = "evaluation"  # the only key of a record of an evaluation's result
MEASURED = "measured"  # the only key of a record of what a step measures beside its losses
COMMIT = "commit"  # the only key of a commit's record
DIGEST = re.compile("[0-9a-f]+")

_STEP = "step"


def decode_digests(record: durable.Record, known: Mapping[str, str]) -> dict[str, str]:
    """Digests of the base's bytes by segment, which agree with the known ones."""
    digests = record[DIGESTS]
    if len(record) != 1 or not isinstance(digests, dict):
        raise ImpossibleRecordError(
            f"{DIGESTS} {shown(digests)}", "an object of digests and no other key"
        )
    for segment, digest in digests.items():
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise ImpossibleRecordError(
                f"{shown(digest)} as digest of {shown(segment)}", "hexadecimal digits"
            )
        if known.get(segment, digest) != digest:
            raise ImpossibleRecordError(
                f"a second digest of {shown(segment)}", f"{known[segment]} again"
            )
    return digests


def encode_results(kind: str, step: int, values: Mapping[str, float]) -> durable.Record:
    """The record of results of a step; null stands for a value that is not finite, which JSON
    lacks.
    """
    assert _STEP not in values, "the name of the step is reserved"
    results = {
        name: float(value) if math.isfinite(value) else None for name, value in values.items()
    }
    return {kind: {_STEP: step, **results}}


def decode_results(
    kind: str, record: durable.Record, version: int
) -> tuple[int, Mapping[str, float]]:
    """The step whose weights gave the results, and the results by name.

    Args:
        kind: ``EVALUATION`` or ``MEASURED``.
        record: The record.
        version: Number of steps taken, which the step does not exceed.
    """
    result = record[kind]
    if len(record) != 1 or not isinstance(result, dict):
        raise ImpossibleRecordError(
            f"{kind} {shown(result)}", "an object of results and no other key"
        )
    step = result.get(_STEP)
    if type(step) is not int or not 0 <= step <= version:
        raise ImpossibleRecordError(f"{kind} of step {shown(step)}", f"a step from 0 to {version}")
    values = {
        name: math.nan if value is None else value
        for name, value in result.items()
        if name != _STEP
    }
    for name, value in values.items():
        if type(value) is not float:
            raise ImpossibleRecordError(
                f"{shown(value)} as {shown(name)} in {kind}", "a float, or null"
            )
    return step, values


_SCALARS = {
    "int": (int, "a whole number"),
    "float": (float, "a finite number"),
    "bool": (bool, "true or false"),
}


def encode(step: Update | Commit) -> dict[str, Any]:
    """The record of a step: its fields in their order."""
    values = {
        field.name: _written(str(field.type), getattr(step, field.name)) for field in fields(step)
    }
    return {COMMIT: values} if isinstance(step, Commit) else values


def decode(record: durable.Record) -> Update | Commit:
    """The step of a record."""
    kind, values = (Commit, record[COMMIT]) if COMMIT in record else (Update, record)
    kinds = {field.name: str(field.type) for field in fields(kind)}
    if kind is Commit and (
        len(record) != 1 or not isinstance(values, dict) or values.keys() != kinds.keys()
    ):
        raise ImpossibleRecordError(
            f"{COMMIT} {shown(values)}", f"an object of {', '.join(kinds)} alone"
        )
    if "workers" in values:
        raise ImpossibleRecordError(
            f"workers {shown(values['workers'])}", "an update from the losses of all workers"
        )
    for name in kinds:
        if name not in values:
            raise ImpossibleRecordError(f"no {name}", f"an update with {name}")
        if kind is Commit and kinds[name] == "float" and type(values[name]) is int:
            raise ImpossibleRecordError(f"{shown(values[name])} as {name}", "a float")
    step = kind(**{name: _read(kinds[name], values[name], name) for name in kinds})
    contradiction = step.contradiction()
    if contradiction is not None:
        raise ImpossibleRecordError(*contradiction)
    return step


def _written(kind: str, value: Any) -> object:
    """A value of a step, of the type that its field is annotated with, as JSON."""
    if kind == Evaluation.__name__:
        return [int(value.seed), float(value.shift)]
    return (
        _SCALARS[kind][0](value)
        if kind in _SCALARS
        else [_written(_item(kind), item) for item in value]
    )


def _read(kind: str, value: object, name: str) -> Any:
    """The value that ``_written`` has written."""
    if kind in _SCALARS:
        scalar, expected = _SCALARS[kind]
        if scalar is float and type(value) is int:
            with contextlib.suppress(OverflowError):
                value = float(value)
        if type(value) is not scalar:
            raise ImpossibleRecordError(f"{shown(value)} as {name}", expected)
        return value
    if kind == Evaluation.__name__:
        if not isinstance(value, list) or len(value) != 2:
            raise ImpossibleRecordError(f"{name} {shown(value)}", "[seed, shift]")
        return Evaluation(_read("int", value[0], "a seed"), _read("float", value[1], "a shift"))
    if not isinstance(value, list):
        raise ImpossibleRecordError(f"{name} {shown(value)}", f"a list as {name}")
    return tuple(_read(_item(kind), item, f"an item of {name}") for item in value)


def _item(kind: str) -> str:
    """The type of a tuple's items."""
    return kind.removeprefix("tuple[").removesuffix(", ...]")
