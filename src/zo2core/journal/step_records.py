"""Updates and commits (first-order steps) as records of the journal. Reading gives every float with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zo2core.journal.damage import ImpossibleRecordError, shown
from zo2core.types import Commit, Evaluation, Update

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
