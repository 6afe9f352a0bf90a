"""Numbers that have a least value."""

from __future__ import annotations

from zo2core import OptionError


def require_at_least(option: str, value: int, least: int) -> None:
    """Refuse a number that is too small.

    Raises:
        OptionError: naming the option.
    """
    if value < least:
        raise OptionError(option, found=repr(value), expected=f"at least {least}", remedy=f"raise {option}")
