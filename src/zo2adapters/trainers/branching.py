"""Branching: a new run that starts with the first steps of another run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.provenance import rescheduled
from zo2adapters.trainers.run_directory import JOURNAL, OPTIONS, checksums_at, missing_directories, remove_files, require_new
from zo2core.errors import OptionError
from zo2core.io.durable import read_regular, replace_file
from zo2core.ranges import shown


@contextmanager
def branched_run(parent: Path, step: int, options: TrainOptions) -> Iterator[None]:
    """Create a run with the first steps of another one. It is then resumed like an interrupted run.

    Only journal and options are copied: blocks that the parent has written back are replayed. The new run is removed if the
    body of the context raises.
    """
    created = missing_directories(options.output)
    _branch(parent, step, options)
    try:
        yield
    except BaseException:
        remove_files(options.output, created)
        raise


def _branch(parent: Path, step: int, options: TrainOptions) -> None:
    from zo2core import Journal, branch_journal
    from zo2core.checkpoint.writer import new_directory

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
                remedy="pass a step in this range",
            )
        if options.steps < step:
            raise OptionError(
                "steps",
                found=str(options.steps),
                expected=f"at least {step}, the step to branch from",
                remedy=f"pass a value of at least {step}",
            )
        provenance = None if journal.header is None else journal.header.get("provenance")
        with new_directory(options.output) as partial:
            branch_journal(
                journal,
                partial / JOURNAL,
                step,
                estimator=estimator.options,
                provenance=None if provenance is None else rescheduled(provenance, options),
            )
            record = json.loads(read_regular(parent / OPTIONS))
            record |= {"options": options.to_json(), "checksums": checksums_at(options, record)}
            record["branch"] = {"resume": str(parent.resolve()), "from_step": step}  # for the run's recipe
            replace_file(partial / OPTIONS, (json.dumps(record, indent=2) + "\n").encode())
    finally:
        journal.close()
