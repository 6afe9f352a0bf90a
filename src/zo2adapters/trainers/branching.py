"""Branching a run from one of its steps: a new run that begins with the first steps of another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zo2adapters.ranges import shown
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.provenance import rescheduled
from zo2adapters.trainers.run_directory import JOURNAL, OPTIONS, checksums_at, missing_directories, remove_files, require_new
from zo2core import Journal, OptionError, branch_journal
from zo2core.checkpoint.writer import new_directory
from zo2core.io.durable import read_regular, replace_file


@contextmanager
def branched_run(parent: Path, step: int, options: TrainOptions) -> Iterator[None]:
    """Make a run that has taken the first steps of another one; it is then gone on with as one that was interrupted.

    Nothing else is taken over: blocks that the parent has written back are replayed. The new run is taken back if it is
    refused within the context.

    Args:
        parent: Directory of the run to branch from. It is only read.
        step: How many of its steps are taken over.
        options: Options of the new run, in ``options.output``: the parent's, but for how steps are taken from here on.

    Raises:
        OptionError: if the parent has no such step, or fewer steps were asked for.
        OutputError: if the output directory is in use or cannot be written; it appears whole or not at all.
        JournalError: if the parent's journal cannot be read.
    """
    made = missing_directories(options.output)
    _branch(parent, step, options)
    try:
        yield
    except BaseException:
        remove_files(options.output, made)
        raise


def _branch(parent: Path, step: int, options: TrainOptions) -> None:
    options.require_valid()
    estimator = options.estimator()
    require_new(options.output)
    journal = Journal(parent / JOURNAL)
    try:
        taken = len(journal.updates)
        if not 0 <= step <= taken:
            raise OptionError(
                "from_step",
                found=shown(step),
                expected=f"0 to {taken}, the steps of the run",
                remedy="name a step that was taken",
            )
        if options.steps < step:
            raise OptionError(
                "steps", found=str(options.steps), expected=f"at least {step}, the steps taken over", remedy="raise it"
            )
        told = None if journal.header is None else journal.header.get("provenance")
        with new_directory(options.output) as partial:
            branch_journal(
                journal,
                partial / JOURNAL,
                step,
                estimator=estimator.options,
                provenance=None if told is None else rescheduled(told, options),
            )
            record = json.loads(read_regular(parent / OPTIONS))
            record |= {"options": options.to_json(), "checksums": checksums_at(options, record)}
            replace_file(partial / OPTIONS, (json.dumps(record, indent=2) + "\n").encode())
    finally:
        journal.close()
