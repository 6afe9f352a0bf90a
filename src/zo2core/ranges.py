"""What options may be: the names by which users choose estimators and optimizers, and the ranges of
numbers and sizes.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from numbers import Real
from typing import Any, Literal, TypeAlias

from zo2core.errors import OptionError

OptimizerName: TypeAlias = Literal["adamw", "sgd", "lomo", "adalomo", "badam"]
MatmulPrecision: TypeAlias = Literal["highest", "high", "medium"]  # as torch names them
NormGroup: TypeAlias = Literal["all", "layer"]  # gradients whose norm is clipped together
OF_ADAPTERS: tuple[OptimizerName, ...] = ("adamw", "sgd")  # those that train an adapter, too


class EstimatorName(Enum):
    """Name of an estimator, as users choose it."""

    MEZO = "mezo"
    FZOO = "fzoo"
    ES = "es"


class Fitness(Enum):
    """How the losses of a step become weights of its directions."""

    SCALED = "scaled"
    RANKS = "ranks"


MOST_RUNS = 64  # of one base, each of which has a thread and files of its own
LARGEST_WHOLE = 2**63 - 1  # of a whole number: what seeds, sizes and torch take


def require_whole(
    option: str, value: object, least: int, most: int = LARGEST_WHOLE, *, otherwise: str = ""
) -> None:
    """Refuse what is not a whole number in a range."""
    if type(value) is not int:
        expected = f"a whole number of at least {least}{otherwise}"
        remedy = "pass such a number"
        raise OptionError(option, repr(value)[:40], expected, remedy)
    if value < least:
        raise OptionError(option, shown(value), f"at least {least}{otherwise}", f"raise `{option}`")
    if value > most:
        raise OptionError(option, shown(value), f"at most {most}{otherwise}", f"lower `{option}`")


def require_number(
    option: str,
    value: Any,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    remedy: str = "pass such a number",
) -> None:
    """Refuse what is not a finite number in a range."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and above < value < below and least <= value <= most:
        return
    bounds = [("above", above), ("of at least", least), ("below", below), ("of at most", most)]
    expected = " and ".join(f"{words} {bound:g}" for words, bound in bounds if math.isfinite(bound))
    raise OptionError(option, repr(value)[:40], f"a finite number {expected}", remedy)


def recorded_rate(lr: float | Callable[[int], float]) -> float | str:
    """A learning rate for the journal: a number, or a schedule by its ``repr`` if it is a
    dataclass, else as "a function".
    """
    if not callable(lr):
        return float(lr)
    return repr(lr) if is_dataclass(lr) else "a function"


def require_device_name(device: str) -> None:
    """Refuse what is not the name of a device."""
    kind, _, index = device.partition(":")
    if device != "cpu" and (kind != "cuda" or not (index or "0").isdecimal()):
        raise OptionError("device", repr(device), "'cpu', 'cuda' or 'cuda:N'", "pass one of these")


def shown(value: int) -> str:
    """A whole number in a few characters. Python refuses to write one of thousands of digits."""
    return str(value) if abs(value) < 10**24 else "a number of more than 24 digits"


_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}iB": 1024**_power, _prefix: 1024**_power}
_MOST = float(2**63)  # bytes, the size of the address space


_LEAST_WITHOUT_UNIT = 10**6  # bytes; a smaller number as text lacks its unit, as in --memory 6


def parse_size(size: int | str, *, option: str = "memory") -> int:
    """Parse a size such as ``6GiB``, ``500MB``, ``1.5 GiB`` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", str(size).strip())
    nbytes = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0.0
    if not 1 <= nbytes < _MOST:
        raise OptionError(
            option,
            found=reprlib.repr(size),
            expected="a size such as 6GiB or 500MB, or 'auto' for memory",
            remedy="pass a number of bytes, or one with a unit such as GiB",
        )
    if isinstance(size, str) and size.strip()[-1].isdigit() and nbytes < _LEAST_WITHOUT_UNIT:
        number = size.strip()
        meant = number + ("GB" if nbytes < 1000 else "MB")
        raise OptionError(
            option,
            found=f"{number}, which is {counted(int(nbytes), 'byte')}",
            expected=f"a size with its unit; did you mean {meant}",
            remedy=f"write {meant}, or {number}B for bytes",
        )
    return int(nbytes)


def counted(number: int, noun: str) -> str:
    """A number of things as text, such as ``1 row`` or ``2 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
