"""Numbers that have a least value, or a least and a largest one."""

from __future__ import annotations

from zo2core import OptionError

LARGEST = 2**63 - 1  # of a whole number: what seeds, sizes and torch take


def require_at_least(option: str, value: int, least: int) -> None:
    """Refuse a number that is too small.

    Raises:
        OptionError: naming the option.
    """
    require_between(option, value, least, LARGEST)


def require_between(option: str, value: int, least: int, most: int) -> None:
    """Refuse a number that is out of its range.

    Raises:
        OptionError: naming the option.
    """
    if value < least:
        raise OptionError(option, found=shown(value), expected=f"at least {least}", remedy=f"raise `{option}`")
    if value > most:
        raise OptionError(option, found=shown(value), expected=f"at most {most}", remedy=f"lower `{option}`")


def shown(value: int) -> str:
    """A whole number in a few characters. Python refuses to write one of thousands of digits."""
    return str(value) if abs(value) < 10**24 else "a number of more than 24 digits"
