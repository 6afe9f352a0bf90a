"""A first-order step as a record of the journal. Floats are written so that reading gives the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zo2core.journal.damage import ImpossibleRecordError, shown
from zo2core.types import Commit

COMMIT = "commit"  # the one member of such a record

_NUMBERS = ("loss", "grad_norm", "lr")


def encode_commit(commit: Commit) -> dict[str, Any]:
    """The record of a first-order step."""
    return {COMMIT: {"step": commit.step, **{name: float(getattr(commit, name)) for name in _NUMBERS}}}


def decode_commit(record: Mapping[str, Any]) -> Commit:
    """The step of a record.

    Raises:
        ImpossibleRecordError: if no first-order step can have made it.
    """
    values = record[COMMIT]
    if len(record) != 1 or not isinstance(values, dict) or values.keys() != {"step", *_NUMBERS}:
        raise ImpossibleRecordError(f"{COMMIT} {shown(values)}", f"an object of step, {', '.join(_NUMBERS)} alone")
    if type(values["step"]) is not int:
        raise ImpossibleRecordError(f"{shown(values['step'])} as step", "a whole number")
    for name in _NUMBERS:
        if type(values[name]) is not float:
            raise ImpossibleRecordError(f"{shown(values[name])} as {name}", "a float")
    commit = Commit(**values)
    contradiction = commit.contradiction()
    if contradiction is not None:
        raise ImpossibleRecordError(*contradiction)
    return commit
