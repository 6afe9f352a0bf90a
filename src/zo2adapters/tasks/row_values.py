"""The values of rows: JSON values, cells of CSV, and what stands for values that are neither."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

RowDict = dict[str, Any]  # a row's values by column, as JSON values

_SHOWN = 40  # characters of a value in a message
_LISTED = 6  # columns without a value in a message


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


class Row(dict[str, Any]):
    """A row's values by column, or by what a row of its format calls them, as JSON values.

    Values that are null are left out, and so is NaN, which pandas writes for an empty cell of
    numbers.

    Args:
        values: The values.
        empty: The columns whose values are left out, with null or NaN.
        columns: All columns of the row in order; None: those of the values.
        origins: What errors call a value that is not that of a column of its own name.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        empty: Mapping[str, str] = MappingProxyType({}),
        columns: Sequence[str] | None = None,
        origins: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(values)
        self.empty = empty
        self.columns = list(values if columns is None else columns)
        self._origins = origins

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Row:
        """The row of these values, some of which may be null or NaN."""
        empty = {column: "null" for column, value in values.items() if value is None}
        empty |= {column: "NaN" for column, value in values.items() if _is_nan(value)}
        present = {column: value for column, value in values.items() if column not in empty}
        return cls(present, empty=empty, columns=list(values))

    @property
    def contents(self) -> str:
        """Which values there are, and which are left out, as errors tell it."""
        present = f"the keys {', '.join(map(repr, self)) or '(none)'}"
        absent = [f"{word} in the column {column!r}" for column, word in self.empty.items()]
        return ", and ".join([present, *absent[:_LISTED]])

    def named(self, key: str) -> str:
        """What errors call a value."""
        return self._origins.get(key, f"the column {key!r}")

    def at(self, key: str) -> str:
        """A value and where it stands, as errors tell it."""
        return f"{shown(self[key])} in {self.named(key)}"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


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
