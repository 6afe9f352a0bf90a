"""What tells a record that the journal cannot have written, and how a file is refused."""

from __future__ import annotations

from pathlib import Path

from zo2core.errors import JournalError, reason
from zo2core.io.durable import DisturbedFileError, LockedFileError

SHOWN = 80  # characters of a value that an error shows


class ImpossibleRecordError(ValueError):
    """A record whose checksum holds, and which no run of this format has written.

    Args:
        found: As in ``ZO2Error``.
        expected: As in ``ZO2Error``.
    """

    def __init__(self, found: str, expected: str) -> None:
        self.found = found
        self.expected = expected
        super().__init__(f"{found}; expected {expected}")


def shown(value: object) -> str:
    """A value's ``repr``, cut where it is long: errors stay one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, values nested too deep
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def damaged(path: Path, line: int, found: str, expected: str) -> JournalError:
    """The error of a file that is damaged in a line."""
    return JournalError(
        f"{path}, line {line}",
        found=found,
        expected=expected,
        remedy="restore the journal from a copy; what follows the damage cannot be trusted",
    )


def unwritable(name: str, error: OSError) -> JournalError:
    """The error of a file that cannot be opened for writing, or written."""
    expected, remedy = "a file that can be written and synced", "free space or mend the disk"
    if isinstance(error, LockedFileError):
        expected, remedy = "a file that no other engine writes", "close that engine, or wait until its process has ended"
    elif isinstance(error, DisturbedFileError):
        expected, remedy = "the file as it was left", "put the file back, or resume from a copy"
    remedy += "; the step was not taken and can be repeated"
    return JournalError(name, found=reason(error), expected=expected, remedy=remedy)
