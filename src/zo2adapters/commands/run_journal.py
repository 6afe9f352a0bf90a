"""Read a run's journal, and report what is missing at its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zo2adapters.trainers.metrics import align_rows
from zo2adapters.trainers.run_directory import METRICS, OPTIONS
from zo2core.errors import JournalError
from zo2core.io.durable import read_regular
from zo2core.ranges import counted

if TYPE_CHECKING:
    from zo2core import Journal


def read_journal(path: Path, *, run: Path | None = None, step: int | None = None) -> Journal:
    """Open a journal for reading, and print a line if its last record is damaged or was not written whole."""
    from zo2core import Journal

    raw = b"" if run is None else metrics_of(run)  # before the journal, which a running process writes first
    journal = Journal(path)
    journal.close()
    if journal.header is None and (path.parent / OPTIONS).exists():
        raise JournalError(
            path,
            found="no record: the process ended before the run's first step",
            expected="a run that has begun",
            remedy=f"continue it with zo2 train --resume {path.parent}",
        )
    if journal.header is None:
        raise JournalError(path, found="no journal", expected="a run's journal.jsonl", remedy="check the path")
    steps = journal.version
    if step is None or step > steps:
        journal.require_version(align_rows(raw, journal).steps_seen, METRICS)
        if journal.torn:
            print(
                f"{path}: the last record is damaged or incomplete and is ignored; the run has {counted(steps, 'step')}",
                file=sys.stderr,
            )
    return journal


def metrics_of(run: Path) -> bytes:
    """The content of a run's ``metrics.jsonl``; empty if it cannot be read, and speed and memory are then unknown."""
    try:
        return read_regular(run / METRICS)
    except OSError:
        return b""
