"""Read the rows of a data file: JSONL, JSON, CSV, Parquet, a directory of ``datasets``, or a dataset of the hub."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from zo2adapters.optional_package import optional_package
from zo2core.errors import DataError, ZO2Error, reason
from zo2core.io.durable import open_regular

RowDict = dict[str, Any]  # a row's values by column, as JSON values

_HUB = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<configuration>[\w.-]+))?:(?P<split>\w+(?:\[[\w:%+-]*\])?)")
_SAVED = ("dataset_info.json", "dataset_dict.json")  # the first is in a saved Dataset, the second in a DatasetDict
_INSTALL_DATASETS, _INSTALL_PARQUET = "zo2core[data]", "pyarrow"
_JSONL = ("", ".json", ".jsonl", ".ndjson")  # endings of files that have a JSON object on each line
_LARGEST_CELL = 1 << 27  # characters of a cell in a CSV file


class Cell(str):
    """The text of a cell of a CSV file, which stands for a number or a list where a row's format has no text."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The number or list that the text is as JSON; else the text."""
        try:
            value = json.loads(self)
        except (ValueError, RecursionError):
            return str(self)
        return value if isinstance(value, (int, float, list)) and not isinstance(value, bool) else str(self)


class _Dataset(NamedTuple):
    """A dataset that the package ``datasets`` reads."""

    name: str  # a directory, or a name on the hub
    configuration: str | None
    split: str | None
    is_local: bool


def parsed_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, RowDict]]:
    """Read the rows of a data file, without values that are null.

    The name decides how a file is read: ``.json`` that begins with ``[`` is a list of rows, ``.csv`` has a header line,
    ``.parquet`` is read with pyarrow, a directory with the package ``datasets``, and every other file is JSONL. A path that
    does not exist and has a colon is a split: ``DIRECTORY:split``, or ``name:split`` or ``name:configuration:split`` of the
    hub.
    """
    number, empty = 0, True
    try:
        for number, row in _rows(Path(path)):
            empty = False
            yield number, row
    except DataError as error:
        if error.where != "row":
            raise
        raise at_row(error, path, error_row(error, number)) from error.__cause__
    except OSError as error:
        raise DataError(path, found=reason(error), expected="a readable file", remedy="check the path") from error
    if empty:
        expected = "a JSON object on each line" if _counts_lines(Path(path)) else "at least one row"
        raise DataError(path, found="no rows", expected=expected, remedy="write at least one row")


def require_there(path: Path) -> None:
    """Refuse the path of no data file; whether a dataset is there is seen when it is read."""
    if _dataset(path) is None and not path.exists():
        raise DataError(path, found="No such file or directory", expected="a readable file", remedy="check the path")


def at_row(error: DataError, path: str | os.PathLike[str], number: int) -> DataError:
    """The same error with the file and the row."""
    return DataError(location(path, number), found=error.found, expected=error.expected, remedy=error.remedy)


def location(path: str | os.PathLike[str], number: int) -> str:
    """The file and the row, for errors."""
    return f"{path}, {'line' if _counts_lines(Path(path)) else 'row'} {number}"


class _RowError(DataError):
    """An error of one row of a file."""

    number: int


def error_row(error: DataError, before: int) -> int:
    """The number of the row that an error is about."""
    return error.number if isinstance(error, _RowError) else before + 1


def _bad_row(number: int, found: str, expected: str, remedy: str) -> _RowError:
    error = _RowError("row", found=found, expected=expected, remedy=remedy)
    error.number = number
    return error


def saved_path(path: Path) -> str:
    """How a run saves the path of a data file: absolute, unless it is the name of a dataset of the hub."""
    dataset = _dataset(path)
    return str(path) if dataset is not None and not dataset.is_local else str(path.resolve())


def data_sha256(path: Path) -> str:
    """SHA-256 of a data file's bytes; of the names and bytes of all files in a directory; or of the rows from the hub."""
    dataset = _dataset(path)
    try:
        if dataset is None:
            with open_regular(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        if dataset.is_local:
            digest.update(f"{dataset.split}\n".encode())
            directory = Path(dataset.name)
            for member in sorted(member for member in directory.rglob("*") if not member.is_dir()):
                with open_regular(member) as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{member.relative_to(directory)} {content}\n".encode(errors="surrogateescape"))
        else:
            for _, row in _dataset_rows(path, dataset):
                digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()
    except OSError as error:
        raise DataError(path, found=reason(error), expected="a readable file", remedy="check the path") from error


def _dataset(path: Path) -> _Dataset | None:
    """The dataset that a path names; None if it is a file."""
    text = str(path)
    if path.is_dir():
        return _Dataset(text, None, None, is_local=True)
    if os.path.lexists(path) or ":" not in text:
        return None
    directory, _, split = text.rpartition(":")
    if Path(directory).is_dir():
        return _Dataset(directory, None, split, is_local=True)
    hub = _HUB.fullmatch(text)
    return None if hub is None else _Dataset(hub["name"], hub["configuration"], hub["split"], is_local=False)


def _counts_lines(path: Path) -> bool:
    """Whether the rows of a file are its lines."""
    if _dataset(path) is not None or path.suffix.lower() in (".csv", ".parquet"):
        return False
    return path.suffix.lower() != ".json" or not _is_list(path)


def _is_list(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(1 << 12).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    except OSError:
        return False


def _rows(path: Path) -> Iterator[tuple[int, RowDict]]:
    dataset = _dataset(path)
    if dataset is not None:
        yield from _dataset_rows(path, dataset)
        return
    with open_regular(path) as file:
        match path.suffix.lower():
            case ".csv":
                yield from _csv_rows(file)
            case ".parquet":
                yield from _parquet_rows(path, file)
            case ".json" if _is_list(path):
                yield from _list_rows(path, file)
            case _:
                yield from _jsonl_rows(file) if path.suffix.lower() in _JSONL else _unnamed_rows(path, file)


def _jsonl_rows(file: IO[bytes]) -> Iterator[tuple[int, RowDict]]:
    # Bytes are split at line feeds alone; str.splitlines would split inside a string with U+2028.
    for line, raw in enumerate(file, 1):
        if raw.strip(b"\xef\xbb\xbf \t\r\n"):  # the first three are the byte order mark
            yield line, _parsed(raw, line)


def _unnamed_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, RowDict]]:
    """The rows of a JSONL file whose name does not say that it is one."""
    is_first = True
    try:
        for number, row in _jsonl_rows(file):
            is_first = False
            yield number, row
    except DataError as error:
        if not is_first:
            raise
        raise DataError(
            path,
            found=f"a file of another format, with the ending {path.suffix}",
            expected="a data file that ends with .csv, .json, .jsonl or .parquet",
            remedy="save it as CSV in UTF-8 with commas between the cells, and name it .csv",
        ) from error


def _parsed(raw: bytes, line: int) -> RowDict:
    expected, remedy = "a JSON object", "write one JSON object per line, in UTF-8"
    try:
        row = json.loads(raw.decode("utf-8-sig").strip())
        json.dumps(row, ensure_ascii=False).encode()  # fails on half a surrogate pair, which no tokenizer takes
    except (ValueError, RecursionError) as error:
        found = f"text that is not JSON in UTF-8 ({error})".replace("line 1 ", "")  # json counts lines within this one
        raise _bad_row(line, found, expected, remedy) from error
    if not isinstance(row, dict):
        raise _bad_row(line, json.dumps(row)[:40], expected, remedy)
    return _without_null(row)


def _list_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, RowDict]]:
    try:
        rows = json.loads(file.read().decode("utf-8-sig"))
        json.dumps(rows, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(
            path,
            found=f"text that is not JSON in UTF-8 ({error})",
            expected="a list of JSON objects",
            remedy="correct the file, or write one JSON object per line and name it .jsonl",
        ) from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise _bad_row(number, json.dumps(row)[:40], "a JSON object", "write a list of JSON objects")
        yield number, _without_null(row)


def _csv_rows(file: IO[bytes]) -> Iterator[tuple[int, RowDict]]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    csv.field_size_limit(_LARGEST_CELL)
    reader, number = csv.reader(text, strict=True), 0
    try:
        header = next(reader, [])
        if len(header) == 1 and (header[0].count(";") or header[0].count("\t")):
            found = f"one column, {header[0][:80]!r}"
            between = "semicolons" if ";" in header[0] else "tabs"
            remedy = f"save the file with commas instead of {between} between the cells"
            raise _bad_row(0, found, "commas as the separator of columns", remedy)
        if any(header):  # pandas writes its index without a name, and reads it with this one
            header = [name or f"Unnamed: {column}" for column, name in enumerate(header)]
        if len(set(header)) < len(header) or not any(header):
            found = f"the header {', '.join(map(repr, header))}"
            raise _bad_row(0, found, "a first line with different names of columns", "name each column once")
        for number, cells in enumerate((cells for cells in reader if cells), 1):
            if len(cells) != len(header):
                found = f"{len(cells)} cells"
                expected = f"{len(header)}, one for each of the columns {', '.join(map(repr, header))}"
                raise _bad_row(number, found, expected, "put cells that contain commas or line breaks between quotes")
            yield number, dict(zip(header, map(Cell, cells), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        found = f"text that is not CSV in UTF-8 ({error})"
        raise _bad_row(number + 1, found, "cells with commas between them", "save the file as CSV in UTF-8") from error
    finally:
        text.detach()


def _parquet_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, RowDict]]:
    parquet = optional_package("pyarrow.parquet", install=_INSTALL_PARQUET)
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, _as_json(row, number)
    except ZO2Error:
        raise
    except Exception as error:  # pyarrow's errors have no common class
        raise _unreadable(path, error, "a Parquet file") from error


def _dataset_rows(path: Path, dataset: _Dataset) -> Iterator[tuple[int, RowDict]]:
    directory = Path(dataset.name)
    if dataset.is_local and not any((directory / name).is_file() for name in _SAVED):
        raise DataError(
            path,
            found="no regular file, but a directory that datasets has not saved",
            expected=f"a data file, or a directory with {' or '.join(_SAVED)}",
            remedy="pass a file of it, or save the rows with save_to_disk",
        )
    package = optional_package("datasets", install=_INSTALL_DATASETS)
    try:
        loaded: Any = (
            package.load_from_disk(dataset.name)
            if dataset.is_local
            else package.load_dataset(dataset.name, dataset.configuration, split=dataset.split)
        )
    except Exception as error:  # errors of the network, the hub, a file, or pyarrow
        expected = f"rows at {path}" if dataset.is_local else f"the split {dataset.split} of the dataset {dataset.name}"
        raise _unreadable(path, error, expected) from error
    if isinstance(loaded, dict):
        loaded = _split_of(path, dataset, loaded)
    elif dataset.is_local and dataset.split is not None:
        raise DataError(
            path, found="a directory of one split", expected="no split", remedy=f"pass {dataset.name} without the split"
        )
    names = {
        column: feature.names
        for column, feature in loaded.features.items()
        if type(feature).__name__ == "ClassLabel" and feature.names
    }
    try:
        for number, row in enumerate(loaded.with_format(None), 1):
            named = {column: _class_name(names.get(column), value) for column, value in row.items()}
            yield number, _as_json(named, number)
    except ZO2Error:
        raise
    except Exception as error:  # features decode images and sound with packages of their own
        raise _unreadable(path, error, "rows of text") from error


def _split_of(path: Path, dataset: _Dataset, splits: dict[str, Any]) -> Any:
    if dataset.split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if dataset.split not in splits:
        raise DataError(
            path,
            found="no split" if dataset.split is None else f"the split {dataset.split!r}",
            expected=f"one of the splits {', '.join(splits)}",
            remedy=f"pass {dataset.name}:{next(iter(splits), 'train')}",
        )
    return splits[dataset.split]


def _class_name(names: list[str] | None, value: Any) -> Any:
    """The name of a class whose number ``datasets`` stores."""
    return names[value] if names is not None and isinstance(value, int) and 0 <= value < len(names) else value


def _as_json(row: RowDict, number: int) -> RowDict:
    """A row of another format with JSON values; what JSON lacks, such as times, becomes text."""
    try:
        text = json.dumps(row, default=str)
        text.encode()
        parsed: RowDict = json.loads(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise _bad_row(number, f"a value that is not text ({error})", "texts and numbers", "correct the row") from error
    return _without_null(parsed)


def _without_null(row: RowDict) -> RowDict:
    return {key: value for key, value in row.items() if value is not None}


def _unreadable(path: Path, error: Exception, expected: str) -> DataError:
    found = (str(error).splitlines() or [""])[0]
    return DataError(
        path, found=f"{type(error).__name__}: {found}"[:200], expected=expected, remedy="check the name and the file"
    )
