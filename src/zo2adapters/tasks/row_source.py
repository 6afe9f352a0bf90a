"""Read the rows of a data file: JSONL, JSON, CSV, Parquet, plain text, a directory of texts or of
``datasets``, or a dataset of the hub.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from zo2adapters.optional_package import optional_package
from zo2adapters.tasks.row_values import Cell, Row, RowDict, arrow_rows
from zo2core.errors import DataError, ZO2Error, system_errors_as
from zo2core.io.durable import open_regular

_HUB = re.compile(
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<configuration>[\w.-]+))?:(?P<split>\w+(?:\[[\w:%+-]*\])?)"
)
# the first is in a saved Dataset, the second in a DatasetDict
_SAVED = ("dataset_info.json", "dataset_dict.json")
_INSTALL_DATASETS, _INSTALL_PARQUET = "zo2core[data]", "pyarrow"
_JSONL = ("", ".json", ".jsonl", ".ndjson")  # endings of files that have a JSON object on each line
_TEXT = ".txt"  # ending of files that are one text each
_UNREADABLE = {"expected": "a readable file", "remedy": "check the path"}
_BLANK = b"\xef\xbb\xbf \t\r\n"  # the byte order mark, and space
_LARGEST_CELL = 1 << 27  # characters of a cell in a CSV file
_SHORT_LIST = 1 << 24  # bytes of a list of rows that takes less than a second to read
_BATCH = 1024  # rows that are read at a time from a file of columns


class _Dataset(NamedTuple):
    """A dataset that the package ``datasets`` reads."""

    name: str  # a directory, or a name on the hub
    configuration: str | None = None
    split: str | None = None
    is_local: bool = True


class DataFile:
    """An open data file, whose rows may be read several times.

    The name decides how a file is read: ``.json`` that begins with ``[`` is a list of rows,
    ``.csv`` has a header line, ``.txt`` is one text, ``.parquet`` is read with pyarrow, and every
    other file is JSONL; a further ending ``.gz`` says that it is compressed. A directory is read
    with the package ``datasets``, or has texts, each in a file. A path that does not exist and has
    a colon is a split: ``DIRECTORY:split``, or ``name:split`` or ``name:configuration:split`` of
    the hub.

    Note: why ``datasets`` reads no CSV and no JSON. It infers one type for a column of CSV, so that
    the label 0 of a column with 0.5 becomes 0.0 and the text NA none, takes a cell too many for an
    index, copies each file into a cache, and tells of a malformed row without its line. Importing
    it takes a second and 140 MB.

    Args:
        path: The data file, the directory or the name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._dataset = _dataset(self.path)
        self._file: BufferedReader | None = None
        if self._dataset is None and not self.path.is_dir():
            with self._typed_failures():
                self._file = open_regular(self.path)

    @property
    def has_whole_texts(self) -> bool:
        """Whether each row is the text of a whole file."""
        return bool(_text_files(self.path)) or _ending(self.path) == _TEXT

    def rows(self) -> Iterator[tuple[int, Row]]:
        """Read the rows from the first one on: number and values."""
        number = 0
        with self._typed_failures():
            for number, values in self._values():
                yield number, Row.of(values)
        if not number:
            expected = (
                "a JSON object on each line" if _counts_lines(self.path) else "at least one row"
            )
            raise DataError(self.path, "no rows", expected, "write at least one row")

    def sha256(self) -> str:
        """SHA-256 of a file's bytes, of the names and bytes of all files in a directory, or of the
        rows from the hub.
        """
        digest = hashlib.sha256()
        with self._typed_failures():
            if self._file is not None:
                self._file.seek(0)
                hashlib.file_digest(self._file, lambda: digest)
            elif self._dataset is None:
                _add_files(digest, self.path, _text_files(self.path))
            elif self._dataset.is_local:
                digest.update(f"{self._dataset.split}\n".encode())
                directory = Path(self._dataset.name)
                members = sorted(path for path in directory.rglob("*") if not path.is_dir())
                _add_files(digest, directory, members)
            else:
                for _, row in self.rows():
                    digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def _values(self) -> Iterator[tuple[int, RowDict]]:
        path = self.path
        if self._dataset is not None:
            yield from _numbered(
                path, _dataset_rows(path, self._dataset), f"rows of text at {path}"
            )
            return
        if self._file is None:
            for number, text in enumerate(_text_files(path), 1):
                yield from _text_row(number, text, text.read_bytes())
            return
        self._file.seek(0)
        with _decompressed(path, self._file) as file:
            yield from self._values_of(file)

    def _values_of(self, file: IO[bytes]) -> Iterator[tuple[int, RowDict]]:
        """The rows of an open file, after its decompression."""
        path = self.path
        is_list = _begins_list(file)
        file.seek(0)
        match _ending(path):
            case ".txt":
                yield from _text_row(1, path, file.read())
            case ".csv":
                yield from _csv_rows(path, file)
            case ".parquet":
                parquet = optional_package("pyarrow.parquet", install=_INSTALL_PARQUET)
                rows = _parquet_rows(path, parquet, file)
                yield from _numbered(path, rows, "a Parquet file")
            case ".json" if is_list:
                yield from _list_rows(path, file)
            case _:
                yield from _jsonl_rows(path, file)

    def _typed_failures(self) -> AbstractContextManager[None]:
        return system_errors_as(DataError, self.path, **_UNREADABLE)


def parsed_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, Row]]:
    """Read the rows of a data file once. See ``DataFile``."""
    with DataFile(path) as file:
        yield from file.rows()


def first_row(path: Path) -> tuple[int, Row] | None:
    """Number and values of a data file's first row.

    Refused is a path that has none. None: the rows are those of a dataset, or of a long list, of
    which reading one takes as long as reading all.
    """
    if (dataset := _dataset(path)) is not None:
        _require_saved(path, dataset)
        return None
    with DataFile(path) as file:
        is_list = _ending(path) == ".json" and not _counts_lines(path)
        if is_list and path.stat().st_size > _SHORT_LIST:
            return None
        return next(file.rows())


def row_error(found: str, expected: str, remedy: str) -> DataError:
    """An error of a row, to which its reader adds file and row."""
    return DataError("row", found, expected, remedy)


@contextmanager
def at_row(path: Path, number: int) -> Iterator[None]:
    """A context in which errors of a row are given its file and number."""
    try:
        yield
    except DataError as error:
        raise _bad_row(path, number, error.found, error.expected, error.remedy) from error.__cause__


def _bad_row(path: Path, number: int, found: str, expected: str, remedy: str) -> DataError:
    where = f"{path}, {'line' if _counts_lines(path) else 'row'} {number}"
    texts = _text_files(path)
    if texts:
        where = str(texts[number - 1])
    return DataError(where, found, expected, remedy)


def saved_path(path: Path) -> str:
    """How a run saves the path of a data file: absolute, unless it is the name of a dataset of the
    hub.
    """
    dataset = _dataset(path)
    return str(path) if dataset is not None and not dataset.is_local else str(path.resolve())


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with system_errors_as(DataError, path, **_UNREADABLE), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ending(path: Path) -> str:
    """The ending that says how a file is read, in small letters, without that of compression."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def _text_files(path: Path) -> list[Path]:
    """The texts in a directory and its subdirectories, in the order of their names; none if it is
    no directory of texts.
    """
    if not path.is_dir() or any((path / name).is_file() for name in _SAVED):
        return []
    return sorted(member for member in path.rglob(f"*{_TEXT}") if member.is_file())


def _text_row(number: int, path: Path, content: bytes) -> Iterator[tuple[int, RowDict]]:
    """The row of a text with its number, unless the text is blank."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = "save the file as text in UTF-8"
        raise DataError(path, f"bytes that are no UTF-8 ({error})", "text", remedy) from error
    if text.strip():
        yield number, {"text": text}


def _add_files(digest: Any, directory: Path, files: Iterable[Path]) -> None:
    """Add the names and contents of files in a directory to a digest."""
    for file in files:
        line = f"{file.relative_to(directory)} {file_sha256(file)}\n"
        digest.update(line.encode(errors="surrogateescape"))


@contextmanager
def _decompressed(path: Path, file: BufferedReader) -> Iterator[IO[bytes]]:
    """The content of a file, which is compressed if its name says so."""
    if path.suffix.lower() != ".gz":
        yield file
        return
    try:
        with gzip.GzipFile(fileobj=file) as content:
            yield io.BufferedReader(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        expected = "a file that gzip has written, as its name says"
        raise DataError(path, f"damaged data ({error})", expected, "restore the file") from error


def _dataset(path: Path) -> _Dataset | None:
    """The dataset that a path names; None if it is a file, or a directory of texts."""
    text = str(path)
    directory, _, split = text.rpartition(":")
    if path.is_dir():
        return None if _text_files(path) else _Dataset(text)
    if os.path.lexists(path) or not directory:
        return None
    if Path(directory).is_dir():
        return _Dataset(directory, split=split)
    hub = _HUB.fullmatch(text)
    return (
        None
        if hub is None
        else _Dataset(hub["name"], hub["configuration"], hub["split"], is_local=False)
    )


def _counts_lines(path: Path) -> bool:
    """Whether the rows of a file are its lines."""
    if path.is_dir() or _dataset(path) is not None or _ending(path) in (".csv", ".parquet"):
        return False
    if _ending(path) != ".json":
        return True
    with (
        suppress(OSError, DataError),
        open_regular(path) as file,
        _decompressed(path, file) as json,
    ):
        return not _begins_list(json)
    return True


def _begins_list(file: IO[bytes]) -> bool:
    file.seek(0)
    return file.read(1 << 12).lstrip(_BLANK).startswith(b"[")


def _parsed(text: bytes) -> Any:
    parsed = json.loads(text.decode("utf-8-sig").strip())
    # fails on half a surrogate pair, which no tokenizer takes
    json.dumps(parsed, ensure_ascii=False).encode()
    return parsed


def _jsonl_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, RowDict]]:
    # until a row shows that the file is one of JSONL
    is_unnamed = _ending(path) not in _JSONL
    # Bytes are split at line feeds alone; str.splitlines would split inside a string with U+2028.
    for line, raw in enumerate(file, 1):
        if not raw.strip(_BLANK):
            continue
        try:
            row = _parsed(raw)
            cause = None
            found = json.dumps(row)[:40]
        except (ValueError, RecursionError) as error:
            row, cause = None, error
            # json counts lines within this one
            found = f"text that is not JSON in UTF-8 ({error})".replace("line 1 ", "")
        if isinstance(row, dict):
            is_unnamed = False
            yield line, row
        elif is_unnamed:
            found = f"a file of another format, with the ending {path.suffix}"
            remedy = "save it as CSV in UTF-8 with commas between the cells, and name it .csv"
            raise DataError(
                path,
                found,
                "a data file that ends with .csv, .json, .jsonl, .parquet or .txt",
                remedy,
            ) from cause
        else:
            raise _bad_row(
                path, line, found, "a JSON object", "write one JSON object per line, in UTF-8"
            ) from cause


def _list_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, RowDict]]:
    try:
        rows = _parsed(file.read())
    except (ValueError, RecursionError) as error:
        remedy = "correct the file, or write one JSON object per line and name it .jsonl"
        raise DataError(
            path, f"text that is not JSON in UTF-8 ({error})", "a list of JSON objects", remedy
        ) from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise _bad_row(
                path, number, json.dumps(row)[:40], "a JSON object", "write a list of JSON objects"
            )
        yield number, row


def _csv_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, RowDict]]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    csv.field_size_limit(_LARGEST_CELL)
    reader = csv.reader(text, strict=True)
    number = 0
    try:
        header = next(reader, [])
        if not header:
            remedy = "write a line with the columns' names, and rows below it"
            raise DataError(path, "an empty file", "a header line and rows", remedy)
        if len(header) == 1 and {*";\t"} & {*header[0]}:
            remedy = (
                "save the file with commas instead of "
                f"{'semicolons' if ';' in header[0] else 'tabs'} between the cells"
            )
            raise _bad_row(
                path,
                0,
                f"one column, {header[0][:80]!r}",
                "commas as the separator of columns",
                remedy,
            )
        if any(header):  # pandas writes its index without a name, and reads it with this one
            header = [name or f"Unnamed: {column}" for column, name in enumerate(header)]
        if len(set(header)) < len(header) or not any(header):
            found = f"the header {', '.join(map(repr, header))}"
            raise _bad_row(
                path,
                0,
                found,
                "a first line with different names of columns",
                "name each column once",
            )
        for number, cells in enumerate((cells for cells in reader if cells), 1):
            if len(cells) != len(header):
                expected = (
                    f"{len(header)}, one for each of the columns {', '.join(map(repr, header))}"
                )
                remedy = "put cells that contain commas or line breaks between quotes"
                raise _bad_row(path, number, f"{len(cells)} cells", expected, remedy)
            yield number, dict(zip(header, map(Cell, cells), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        found = f"text that is not CSV in UTF-8 ({error})"
        remedy = "save the file as CSV in UTF-8"
        raise _bad_row(path, number + 1, found, "cells with commas between them", remedy) from error
    finally:
        text.detach()


def _numbered(path: Path, rows: Iterable[RowDict], expected: str) -> Iterator[tuple[int, RowDict]]:
    """Rows that a package reads, with their numbers."""
    try:
        yield from enumerate(rows, 1)
    except ZO2Error:
        raise
    except Exception as error:
        # of pyarrow, whose errors have no common class, the network or the hub
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
        raise DataError(
            path, found, expected, "check the name, the file and the network"
        ) from error


def _parquet_rows(path: Path, parquet: Any, file: IO[bytes]) -> Iterator[RowDict]:
    stored = parquet.ParquetFile(file)
    names = stored.schema_arrow.names
    if len(set(names)) < len(names):
        raise DataError(
            path,
            f"the columns {', '.join(map(repr, names))}",
            "different names of columns",
            "name each column once",
        )
    yield from arrow_rows(stored.iter_batches(batch_size=_BATCH))


def _require_saved(path: Path, dataset: _Dataset) -> None:
    """Refuse a directory that datasets has not saved."""
    directory = Path(dataset.name)
    if dataset.is_local and not any((directory / name).is_file() for name in _SAVED):
        found = "no regular file, but a directory that datasets has not saved, without texts"
        expected = f"a data file, or a directory with {' or '.join(_SAVED)}, or with .txt files"
        remedy = "pass a file of it, or save the rows with save_to_disk"
        raise DataError(path, found, expected, remedy)


def _dataset_rows(path: Path, dataset: _Dataset) -> Iterator[RowDict]:
    _require_saved(path, dataset)
    package = optional_package("datasets", install=_INSTALL_DATASETS)
    loaded: Any = (
        package.load_from_disk(dataset.name)
        if dataset.is_local
        else package.load_dataset(dataset.name, dataset.configuration, split=dataset.split)
    )
    if isinstance(loaded, dict):
        loaded = _split_of(path, dataset, loaded)
    elif dataset.is_local and dataset.split is not None:
        raise DataError(
            path, "a directory of one split", "no split", f"pass {dataset.name} without the split"
        )
    # of a ClassLabel
    names = {column: getattr(feature, "names", None) for column, feature in loaded.features.items()}
    # As Arrow holds them: datasets would decode images and sounds, and open the paths and URLs that
    # rows have for them.
    for row in arrow_rows(loaded.with_format("arrow").iter(batch_size=_BATCH)):
        yield {column: _class_name(names.get(column), value) for column, value in row.items()}


def _split_of(path: Path, dataset: _Dataset, splits: dict[str, Any]) -> Any:
    if dataset.split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if dataset.split not in splits:
        found = "no split" if dataset.split is None else f"the split {dataset.split!r}"
        names = [*splits, "train"]
        raise DataError(
            path, found, f"one of the splits {', '.join(splits)}", f"pass {dataset.name}:{names[0]}"
        )
    return splits[dataset.split]


def _class_name(names: list[str] | None, value: Any) -> Any:
    """The name of a class whose number ``datasets`` stores."""
    return (
        names[value]
        if names is not None and isinstance(value, int) and 0 <= value < len(names)
        else value
    )
