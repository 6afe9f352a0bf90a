"""A benchmark: where its rows come from, and what question each of them asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zo2core import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Prompts are those of MeZO's program (arXiv 2305.17333), or of P-RGE (arXiv 2409.15520, Table 7) where MeZO has none.

    Args:
        name: What it is called.
        hub: Its path in the hub, and the name of its configuration there.
        questions: A row in the benchmark's own format, or as ``datasets`` gives it, to rows of ``prompt``, ``candidates``
            and ``answer``, or of ``prompt``, ``completion`` and ``answers`` where the answer is to be written.
    """

    name: str
    hub: tuple[str, str | None]
    questions: Callable[[Row], Iterable[dict[str, Any]]]


def question(prompt: str, candidates: Sequence[str], answer: int | list[int]) -> list[dict[str, Any]]:
    """A row with candidates.

    Raises:
        DataError: if there are fewer than two, or none is right.
    """
    if len(candidates) < 2 or answer == []:
        raise DataError(
            "candidates",
            found=f"{len(candidates)} of them, right ones {answer}",
            expected="two at least, one of which is right",
            remedy="leave the row out",
        )
    return [{"prompt": prompt, "candidates": list(candidates), "answer": answer}]


def label(row: Row, *names: str) -> int:
    """A row's label as a number.

    Args:
        row: Its ``label`` is a number, a truth value, or one of the names.
        names: Of labels 0, 1, ...

    Raises:
        DataError: if it has none, as the rows of hidden test sets.
    """
    value = row.get("label")
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if isinstance(value, str) and value in names:
        return names.index(value)
    if isinstance(value, (bool, int)) and 0 <= int(value) < len(names):
        return int(value)
    raise DataError(
        "label", found=repr(value)[:40], expected=f"one of {', '.join(names)}, or its number", remedy="use rows with labels"
    )
