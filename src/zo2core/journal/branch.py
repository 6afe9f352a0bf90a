"""New files of a journal: branches, which begin with its first steps and are how steps are undone, and copies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zo2core.errors import JournalError, OutputError, reason
from zo2core.io.durable import make_directory, replace_file
from zo2core.io.record_log import Record, to_line
from zo2core.journal.header import json_object
from zo2core.journal.journal import Journal
from zo2core.journal.side_records import DIGESTS
from zo2core.journal.update_record import encode


def branch_journal(
    source: Journal | Path | str,
    destination: Path | str,
    step: int,
    *,
    estimator: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a new journal with the first steps of a run; an engine that is given its path goes on from there.

    The header is that of the run to come. Its key ``branched`` lists the runs that the steps were taken over from, oldest
    first: for each one the step up to which they were, the journal's checksum at that step, and its estimator's options.

    Args:
        source: The journal to branch from, or its path. It is only read, and may belong to a run that goes on.
        destination: Path of the new one. It appears whole and durable, or not at all.
        step: How many steps are taken over.
        estimator: Options of the estimator of the run to come (``estimator.options``); None: the same as before.
        provenance: Provenance of the run to come; None: the same as before.

    Raises:
        JournalError: if the source is none, is damaged, or has fewer steps.
        OutputError: if something is at the destination, or it cannot be written.
        OptionError: if ``provenance`` is none of JSON.
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
                remedy="begin a new run, from an adapter that zo2 export wrote",
            )
        lines = b"".join(to_line(record) for record in _records(opened.until(step), estimator, provenance))
    finally:
        if opened is not source:
            opened.close()
    _put(Path(destination), lines)


def copy_journal(source: Journal, destination: Path | str) -> None:
    """Write a journal as it is to another path, in whose place it then is: of a journal in memory, its first file.

    Args:
        source: The journal; it was begun.
        destination: A path; a file that is there is replaced at once, whole and durable, or not at all.

    Raises:
        JournalError: if the journal was not begun.
        OutputError: if the file cannot be written.
    """
    if source.header is None:
        raise JournalError(source.name, found="no run", expected="a journal that was begun", remedy="begin a run first")
    _put(Path(destination), source.excerpt(0), replaces=True)


def _records(
    journal: Journal, estimator: Mapping[str, Any] | None, provenance: Mapping[str, Any] | None
) -> Iterator[Record]:
    """The records of the new journal: header, what is known of the base, updates."""
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


def _put(path: Path, content: bytes, *, replaces: bool = False) -> None:
    if not replaces and os.path.lexists(path):
        raise OutputError(path, found="a file", expected="a path that is free", remedy="choose another path")
    try:
        make_directory(path.absolute().parent)
        replace_file(path, content)
    except OSError as error:
        raise OutputError(
            path, found=reason(error), expected="a path that can be written", remedy="free space or choose another path"
        ) from error
