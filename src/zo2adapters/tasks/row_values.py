"""The values of rows: JSON values, cells of CSV, and what stands for values that are neither."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

RowDict = dict[str, Any]  # a row's values by column, as JSON values

_SHOWN = 40  # characters of a value in a message


class Cell(str):
    """The text of a cell of a CSV file, which stands for a number or a list where a row's format
    has no text.
    """

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The number or list that the text is as JSON; else the text."""
        try:
            value = json.loads(self)
        except (ValueError, RecursionError):
            return str(self)
        return (
            value
            if isinstance(value, (int, float, list)) and not isinstance(value, bool)
            else str(self)
        )


class Unreadable(dict[str, str]):
    """Stands for a value that is neither text nor JSON, such as an image: an object that no row
    takes as a text, a number or a list. A column that nothing reads may have such values.
    """

    def __init__(self, what: str) -> None:
        super().__init__(unreadable=what)

    def __str__(self) -> str:
        return self["unreadable"]


def shown(value: Any) -> str:
    """A value as errors show it."""
    if isinstance(value, Unreadable):
        return str(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def arrow_rows(tables: Iterable[Any]) -> Iterator[RowDict]:
    """The rows of pyarrow's tables or batches, with JSON values.

    Note: what JSON lacks. Bytes become the text that they are in UTF-8. A decimal number is its
    digits, as a cell of CSV. Times become ISO 8601 with a space, as pandas writes them into CSV. A
    map becomes an object. A float of fewer bits becomes the shortest decimal number that it is, 0.1
    and not 0.10000000149011612. Other values, such as durations, have no text that everybody would
    write, and become ``Unreadable``.
    """
    for table in tables:
        columns = [_values(column) for column in table.columns]
        for values in zip(*columns, strict=True):
            yield dict(zip(table.column_names, values, strict=True))


def _values(column: Any) -> list[Any]:
    """The values of a column, as JSON values."""
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # of a column of texts, whose bytes nobody has checked
        values = list(map(_decoded, column))
    if str(column.type) in ("halffloat", "float"):
        values = [None if value is None else _shortest(value, column.type) for value in values]
    return list(map(_as_json, values))


def _decoded(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return Unreadable("text that is not UTF-8")


def _shortest(value: float, kind: Any) -> float:
    """The float whose digits are the fewest that stand for a number of fewer bits."""
    return float(str(kind.to_pandas_dtype()(value)))


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, Unreadable)):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return Unreadable(f"{len(value)} bytes that are not text in UTF-8")
    if isinstance(value, Decimal):
        return Cell(f"{value:f}")
    if isinstance(value, (date, datetime, time, UUID)):
        return str(value)
    if isinstance(value, dict):
        return {str(_as_json(key)): _as_json(held) for key, held in value.items()}
    if isinstance(value, list):
        is_map = bool(value) and all(type(item) is tuple for item in value)
        return _object(value) if is_map else list(map(_as_json, value))
    return Unreadable(f"a value of type {type(value).__name__}")


def _object(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The object that a map is: its pairs of a key and a value."""
    found = _as_json(dict(pairs))
    return found if len(found) == len(pairs) else Unreadable("a map with a key twice")
