"""Readable sizes in bytes."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_LARGEST = 999.5  # a number that rounds to 1000 is written as 1 of the next unit


def shown_bytes(nbytes: float) -> str:
    """Write a size in a decimal unit, with three digits: ``0``, ``812 bytes``, ``1.45 GB``.

    Args:
        nbytes: Number of bytes, at least 0; may be a fraction.
    """
    if nbytes <= 0:
        return "0"
    for unit in _UNITS:
        if nbytes < _LARGEST or unit == _UNITS[-1]:
            break
        nbytes /= 1000
    if unit == "bytes":
        return f"{nbytes:.3g} bytes"
    digits = 2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0
    return f"{nbytes:.{digits}f} {unit}"
