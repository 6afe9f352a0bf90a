"""Refuses options of optimizers that are out of their range."""

from __future__ import annotations

import math

from zo2core.errors import OptionError


def require_at_least_zero(option: str, value: float) -> None:
    """Refuse a number below 0, or one that is not finite.

    Raises:
        OptionError: naming the option.
    """
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
        raise OptionError(option, found=repr(value), expected="a finite number of at least 0", remedy="pass such a number")
