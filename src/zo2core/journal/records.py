"""Errors of a journal's records and files.

A journal's header: JSON values that identify the run, and the differences between two headers.

Records of a journal that are not steps: digests of the base's bytes, and the results of evaluations.

Updates and commits (first-order steps) as records of the journal. Reading gives every float with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from zo2core.errors import JournalError, OptionError, reason
from zo2core.io.durable import DisturbedFileError, LockedFileError
from zo2core.io.record_log import Record
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


def damaged(path: Path, line: int, found: str, expected: str) -> JournalError:
    """The error for a file with a damaged line."""
    return JournalError(
        f"{path}, line {line}",
        found=found,
        expected=expected,
        remedy="restore the journal from a copy; records after the damage cannot be trusted",
    )


def unwritable(name: str, error: OSError) -> JournalError:
    """The error for a file that cannot be opened for writing, or written."""
    expected, remedy = "a file that can be written and synced", "free space or repair the disk"
    if isinstance(error, LockedFileError):
        expected, remedy = "a file that no other engine writes", "close that engine, or wait until its process has ended"
    elif isinstance(error, DisturbedFileError):
        expected, remedy = "the file as it was left", "put the file back, or resume from a copy"
    remedy += "; the step was not taken and can be repeated"
    return JournalError(name, found=reason(error), expected=expected, remedy=remedy)


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


DIGESTS = "base_digests"  # the only key of a record of digests
EVALUATION = "evaluation"  # the only key of a record of an evaluation's result
DIGEST = re.compile("[0-9a-f]+")

_STEP = "step"


class SideRecords:
    """A journal's digests and evaluations, which the weights do not depend on."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}  # segment name -> hexadecimal digest of the base's bytes
        self.evaluations: dict[int, Mapping[str, float]] = {}  # number of updates -> results by name

    def add(self, record: Record, version: int) -> bool:
        """Add a record if it holds digests or an evaluation."""
        if DIGESTS in record:
            self._add_digests(record)
        elif EVALUATION in record:
            self._add_evaluation(record, version)
        else:
            return False
        return True

    def digest_records(self) -> list[Record]:
        """One record of all digests; empty if there are none."""
        return [{DIGESTS: dict(self.digests)}] if self.digests else []

    def until(self, step: int) -> SideRecords:
        """A copy without evaluations of later steps."""
        copy = SideRecords()
        copy.digests = {**self.digests}
        copy.evaluations = {version: values for version, values in self.evaluations.items() if version <= step}
        return copy

    def clear(self) -> None:
        """Remove all digests and evaluations."""
        self.digests.clear()
        self.evaluations.clear()

    def _add_digests(self, record: Record) -> None:
        digests = record[DIGESTS]
        if len(record) != 1 or not isinstance(digests, dict):
            raise ImpossibleRecordError(f"{DIGESTS} {shown(digests)}", "an object of digests and no other key")
        for segment, digest in digests.items():
            if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                raise ImpossibleRecordError(f"{shown(digest)} as digest of {shown(segment)}", "hexadecimal digits")
            if self.digests.setdefault(segment, digest) != digest:
                raise ImpossibleRecordError(f"a second digest of {shown(segment)}", f"{self.digests[segment]} again")

    def _add_evaluation(self, record: Record, version: int) -> None:
        result = record[EVALUATION]
        if len(record) != 1 or not isinstance(result, dict):
            raise ImpossibleRecordError(f"{EVALUATION} {shown(result)}", "an object of results and no other key")
        step = result.get(_STEP)
        if type(step) is not int or not 0 <= step <= version:
            raise ImpossibleRecordError(f"an evaluation of step {shown(step)}", f"a step from 0 to {version}")
        values = {name: math.nan if value is None else value for name, value in result.items() if name != _STEP}
        for name, value in values.items():
            if type(value) is not float:
                raise ImpossibleRecordError(f"{shown(value)} as {shown(name)} of an evaluation", "a float, or null")
        self.evaluations[step] = values  # replaces an earlier result


def evaluation_record(step: int, values: Mapping[str, float]) -> Record:
    """The record of an evaluation's result; null stands for a value that is not finite, which JSON lacks."""
    assert _STEP not in values, "the name of the step is reserved"
    results = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
    return {EVALUATION: {_STEP: step, **results}}


COMMIT = "commit"  # the only key of a commit's record

_COMMIT_FLOATS = ("loss", "grad_norm", "lr")


def encode(update: Update) -> dict[str, Any]:
    """The record of an update."""
    return {
        "step": update.step,
        "evaluations": [[int(evaluation.seed), float(evaluation.shift)] for evaluation in update.evaluations],
        "seeds": [int(seed) for seed in update.seeds],
        "projected_grads": [float(grad) for grad in update.projected_grads],
        "lr": float(update.lr),
        "zo_eps": float(update.zo_eps),
        "weight_decay": float(update.weight_decay),
        "perturb_in_place": bool(update.perturb_in_place),
        "losses": [float(loss) for loss in update.losses],
    }


def decode(record: Mapping[str, Any]) -> Update:
    """The update of a record."""
    if "workers" in record:
        raise ImpossibleRecordError(f"workers {shown(record['workers'])}", "an update from the losses of all workers")
    update = Update(
        step=_integer(_member(record, "step"), "step"),
        evaluations=tuple(_evaluation(pair) for pair in _list(record, "evaluations")),
        seeds=tuple(_integer(seed, "a seed") for seed in _list(record, "seeds")),
        projected_grads=tuple(_real(grad, "a projected gradient") for grad in _list(record, "projected_grads")),
        lr=_real(_member(record, "lr"), "lr"),
        zo_eps=_real(_member(record, "zo_eps"), "zo_eps"),
        weight_decay=_real(_member(record, "weight_decay"), "weight_decay"),
        perturb_in_place=_boolean(_member(record, "perturb_in_place"), "perturb_in_place"),
        losses=tuple(_real(loss, "a loss") for loss in _list(record, "losses")),
    )
    contradiction = update.contradiction()
    if contradiction is not None:
        raise ImpossibleRecordError(*contradiction)
    return update


def encode_commit(commit: Commit) -> dict[str, Any]:
    """The record of a first-order step."""
    return {COMMIT: {"step": commit.step, **{name: float(getattr(commit, name)) for name in _COMMIT_FLOATS}}}


def decode_commit(record: Mapping[str, Any]) -> Commit:
    """The commit of a record."""
    values = record[COMMIT]
    if len(record) != 1 or not isinstance(values, dict) or values.keys() != {"step", *_COMMIT_FLOATS}:
        raise ImpossibleRecordError(f"{COMMIT} {shown(values)}", f"an object of step, {', '.join(_COMMIT_FLOATS)} alone")
    if type(values["step"]) is not int:
        raise ImpossibleRecordError(f"{shown(values['step'])} as step", "a whole number")
    for name in _COMMIT_FLOATS:
        if type(values[name]) is not float:
            raise ImpossibleRecordError(f"{shown(values[name])} as {name}", "a float")
    commit = Commit(**values)
    contradiction = commit.contradiction()
    if contradiction is not None:
        raise ImpossibleRecordError(*contradiction)
    return commit


def _member(record: Mapping[str, Any], key: str) -> object:
    if key not in record:
        raise ImpossibleRecordError(f"no {key}", f"an update with {key}")
    return record[key]


def _list(record: Mapping[str, Any], key: str) -> list[object]:
    value = _member(record, key)
    if not isinstance(value, list):
        raise ImpossibleRecordError(f"{key} {shown(value)}", f"a list as {key}")
    return value


def _evaluation(value: object) -> Evaluation:
    if not isinstance(value, list) or len(value) != 2:
        raise ImpossibleRecordError(f"the evaluation {shown(value)}", "[seed, shift]")
    seed, shift = value
    return Evaluation(_integer(seed, "a seed"), _real(shift, "a shift"))


def _integer(value: object, name: str) -> int:
    if type(value) is not int:
        raise ImpossibleRecordError(f"{shown(value)} as {name}", "a whole number")
    return value


def _real(value: object, name: str) -> float:
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            pass
    elif type(value) is float:
        return value
    raise ImpossibleRecordError(f"{shown(value)} as {name}", "a finite number")


def _boolean(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise ImpossibleRecordError(f"{shown(value)} as {name}", "true or false")
    return value
