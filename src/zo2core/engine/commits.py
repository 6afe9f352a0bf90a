"""The record of a first-order step: written once, and compared when the step is repeated after a snapshot."""

from __future__ import annotations

from zo2core.errors import JournalError
from zo2core.journal import Journal
from zo2core.sources.base_digests import BaseDigests
from zo2core.types import Commit


def record(journal: Journal, base_digests: BaseDigests, commit: Commit) -> None:
    """Record a step in the journal, or compare a repeated step with its record.

    Raises:
        JournalError: if the record cannot be written, or a repeated step differs from its record.
    """
    if commit.step == journal.version:
        base_digests.note(journal)
        journal.append(commit)
    elif journal.commits[commit.step] != commit:
        recorded = journal.commits[commit.step]
        raise JournalError(
            f"{journal.name}, step {commit.step}",
            found=f"loss {commit.loss!r}, gradient norm {commit.grad_norm!r} and lr {commit.lr!r} in the repeated step",
            expected=f"loss {recorded.loss!r}, gradient norm {recorded.grad_norm!r} and lr {recorded.lr!r}, as before",
            remedy="resume with the same machine, torch, transformers and number of threads",
        )
