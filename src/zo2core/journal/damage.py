"""What tells a record that the journal cannot have written."""

from __future__ import annotations

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
