"""Files that can be read to their end, and read again: no pipes, which hang, no devices, no directories."""

from __future__ import annotations

import contextlib
from pathlib import Path

from zo2core import open_regular


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: if it cannot be opened, or is no regular file.
    """
    with open_regular(path) as file:
        return file.read()


def require_regular(path: Path) -> None:
    """Refuse what is there and is no regular file; what is not there is for others to refuse.

    Raises:
        OSError: naming the path.
    """
    with contextlib.suppress(FileNotFoundError):
        open_regular(path).close()
