"""Numbers that an estimator takes, each refused by its name if it is out of its range."""

from __future__ import annotations

import math

from zo2core.errors import OptionError


def require_positive(name: str, value: float) -> None:
    """Refuse a number that is not positive and finite.

    Raises:
        OptionError: naming the option.
    """
    if not (math.isfinite(value) and value > 0):
        raise OptionError(name, found=repr(value), expected="a positive finite number", remedy=f"choose `{name}` > 0")


def require_scheduled_lr(name: str, value: float) -> None:
    """Refuse a learning rate of a schedule that is negative or not finite.

    Raises:
        OptionError: naming the option.
    """
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(
            name,
            found=repr(value),
            expected="a finite number of at least 0",
            remedy="mend the learning rate's schedule",
        )


def require_weight_decay(value: float) -> None:
    """Refuse a weight decay that is negative or not finite.

    Raises:
        OptionError: naming the option.
    """
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(
            "weight_decay",
            found=repr(value),
            expected="a finite number of at least 0",
            remedy="pass 0 for no weight decay",
        )


def require_query_count(q: int, *, least: int) -> None:
    """Refuse a number of directions that is too small or no whole number.

    Raises:
        OptionError: naming the option.
    """
    if not isinstance(q, int) or q < least:
        raise OptionError("q", found=repr(q), expected=f"a whole number of at least {least}", remedy=f"choose q >= {least}")
