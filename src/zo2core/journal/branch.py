"""New files from a journal: branches, which start with its first steps and so undo later ones, and copies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zo2core.errors import JournalError, OutputError, reason
from zo2core.io.durable import make_directory, replace_file
from zo2core.io.record_log import Record, to_line
from zo2core.journal.journal import Journal
from zo2core.journal.records import DIGESTS, encode, json_object


def branch_journal(
    source: Journal | Path | str,
    destination: Path | str,
    step: int,
    *,
    estimator: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a new journal with the first steps of a run; an engine that opens it continues from there.

    The header is that of the new run. Its key ``branched`` lists the runs that the steps were copied from, oldest first:
    for each run the number of copied steps, the journal's checksum at that step, and its estimator's options.

    Args:
        source: The journal to branch from, or its path. It is only read, and may belong to a running engine.
        destination: Path of the new journal. It appears whole and durable, or not at all.
        step: Number of steps to copy.
        estimator: Options of the new run's estimator (``estimator.options``); None keeps the source's.
        provenance: Provenance of the new run; None keeps the source's.

    Raises:
        JournalError: if the source is not a journal, is damaged, or has fewer steps.
        OutputError: if the destination exists or cannot be written.
        OptionError: if ``provenance`` is not made of JSON values.
    """
    opened = source if isinstance(source, Journal) else Journal(source)
    try:
        if opened.header is None:
            raise JournalError(opened.name, found="no journal", expected="a run's journal", remedy="check the path")
        if not opened.is_replayable:
            raise JournalError(
                opened.name,
                found="first-order steps",
                expected="steps that can be replayed",
                remedy="start a new run from an adapter that zo2 export wrote",
            )
        lines = b"".join(to_line(record) for record in _records(opened.until(step), estimator, provenance))
    finally:
        if opened is not source:
            opened.close()
    _write(Path(destination), lines)


def copy_journal(source: Journal, destination: Path | str) -> None:
    """Write a copy of a journal to a path.

    Args:
        source: The journal, on disk or in memory.
        destination: Path of the copy; a file at this path is replaced at once, whole and durable, or not at all.

    Raises:
        JournalError: if the journal has no header.
        OutputError: if the file cannot be written.
    """
    if source.header is None:
        raise JournalError(source.name, found="no run", expected="the journal of a run", remedy="start a run first")
    _write(Path(destination), source.excerpt(0), replace=True)


def _records(
    journal: Journal, estimator: Mapping[str, Any] | None, provenance: Mapping[str, Any] | None
) -> Iterator[Record]:
    """The records of the new journal: header, digests of the base, updates."""
    assert journal.header is not None
    step, header = len(journal.updates), dict(journal.header)
    before = {"step": step, "checksum": f"{journal.chain(step):08x}", "estimator": header.get("estimator")}
    header["branched"] = [*header.get("branched", ()), before]
    if estimator is not None:
        header["estimator"] = json_object("estimator", estimator)
    if provenance is not None:
        header["provenance"] = json_object("provenance", provenance)
    yield header
    if journal.base_digests:
        yield {DIGESTS: dict(journal.base_digests)}
    yield from map(encode, journal.updates)


def _write(path: Path, content: bytes, *, replace: bool = False) -> None:
    if not replace and os.path.lexists(path):
        raise OutputError(path, found="a file", expected="a path that is free", remedy="choose another path")
    try:
        make_directory(path.absolute().parent)
        replace_file(path, content)
    except OSError as error:
        raise OutputError(
            path, found=reason(error), expected="a path that can be written", remedy="free space or choose another path"
        ) from error
