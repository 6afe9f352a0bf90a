"""Errors of a journal's records and files."""

from __future__ import annotations

from pathlib import Path

from zo2core.errors import JournalError, reason
from zo2core.io.durable import DisturbedFileError, LockedFileError

SHOWN = 80  # characters of a value that an error shows


class ImpossibleRecordError(ValueError):
    """A record whose checksum is right, but which no run of this format writes."""

    def __init__(self, found: str, expected: str) -> None:
        self.found = found
        self.expected = expected
        super().__init__(f"{found}; expected {expected}")


def shown(value: object) -> str:
    """A value's ``repr``, truncated so that an error stays one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, values nested too deep
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def damaged(path: Path, line: int, found: str, expected: str) -> JournalError:
    """The error for a file with a damaged line."""
    return JournalError(
        f"{path}, line {line}",
        found=found,
        expected=expected,
        remedy="restore the journal from a copy; records after the damage cannot be trusted",
    )


def unwritable(name: str, error: OSError) -> JournalError:
    """The error for a file that cannot be opened for writing, or written."""
    expected, remedy = "a file that can be written and synced", "free space or repair the disk"
    if isinstance(error, LockedFileError):
        expected, remedy = "a file that no other engine writes", "close that engine, or wait until its process has ended"
    elif isinstance(error, DisturbedFileError):
        expected, remedy = "the file as it was left", "put the file back, or resume from a copy"
    remedy += "; the step was not taken and can be repeated"
    return JournalError(name, found=reason(error), expected=expected, remedy=remedy)
