"""Bytes as people read them."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_LARGEST = 999.5  # of a unit: what would be rounded to 1000 is one of the next


def shown_bytes(nbytes: float) -> str:
    """Bytes in the decimal unit that fits, with three digits: ``0``, ``812 bytes``, ``1.45 GB``.

    Args:
        nbytes: At least 0; may be a mean.
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
