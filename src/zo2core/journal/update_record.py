"""An update as a record of the journal. Floats are written so that reading gives the same bits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from zo2core.journal.damage import ImpossibleRecordError, shown
from zo2core.types import Evaluation, Update

_MOST_WORKERS = 1 << 24
_RANGES = re.compile(r"\d{1,8}(-\d{1,8})?(,\d{1,8}(-\d{1,8})?)*", re.ASCII)


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
        **({"workers": _ranges(update.workers)} if update.workers else {}),
    }


def decode(record: Mapping[str, Any]) -> Update:
    """The update of a record.

    Raises:
        ImpossibleRecordError: if it is none that an estimator can have made.
    """
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
        workers=_ranks(record["workers"]) if "workers" in record else (),
    )
    contradiction = update.contradiction()
    if contradiction is not None:
        raise ImpossibleRecordError(*contradiction)
    return update


def _ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks as ranges, such as ``0-2,5``: there may be thousands of them, in each record."""
    ends = [at for at in range(len(ranks)) if at + 1 == len(ranks) or ranks[at + 1] != ranks[at] + 1]
    begins = [0, *(end + 1 for end in ends)][: len(ends)]
    return ",".join(
        str(ranks[begin]) if begin == end else f"{ranks[begin]}-{ranks[end]}"
        for begin, end in zip(begins, ends, strict=True)
    )


def _ranks(ranges: object) -> tuple[int, ...]:
    """Undo ``_ranges``."""
    if not isinstance(ranges, str) or not _RANGES.fullmatch(ranges):
        raise ImpossibleRecordError(f"workers {shown(ranges)}", "ranks in ascending order, as 0-2,5")
    parts = [tuple(map(int, part.split("-"))) for part in ranges.split(",")]
    count = sum(part[-1] - part[0] + 1 for part in parts)
    ranks = [rank for part in parts for rank in range(part[0], part[-1] + 1)] if 0 < count <= _MOST_WORKERS else []
    if _ranges(ranks) != ranges:
        raise ImpossibleRecordError(f"workers {shown(ranges)}", "ranks in ascending order, as 0-2,5")
    return tuple(ranks)


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
