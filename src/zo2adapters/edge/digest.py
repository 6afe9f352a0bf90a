"""The digest behind a program's bytes, where the runtime does not look: its weights decide what is trained."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from zo2core import CheckpointError
from zo2core.io.durable import open_no_follow, open_regular

_MARK = b"zo2core sha256: "
_LENGTH = len(_MARK) + hashlib.sha256().digest_size


def append_digest(path: Path) -> None:
    """Write the SHA-256 of a file's bytes behind them.

    Raises:
        OSError: if it cannot be read or written.
    """
    with open(path, "r+b", opener=open_no_follow) as file:
        file.write(_MARK + _digest(file, path.stat().st_size))


def require_digest(path: Path) -> None:
    """Refuse a file whose bytes are not those that ``append_digest`` found.

    Raises:
        CheckpointError: if they are not, or there is no digest.
        OSError: if it cannot be read.
    """
    with open_regular(path) as file:
        length = max(path.stat().st_size - _LENGTH, 0)
        digest, end = _digest(file, length), file.read()
    if end != _MARK + digest:
        raise CheckpointError(
            path,
            found="bytes of another digest" if end.startswith(_MARK) else "no digest at its end",
            expected="a whole program that write_program wrote",
            remedy="write the program again, or copy it again",
        )


def _digest(file: BinaryIO, length: int) -> bytes:
    """Of a file's first bytes, behind which it then stands."""
    digest = hashlib.sha256()
    while length and (piece := file.read(min(length, 1 << 20))):
        digest.update(piece)
        length -= len(piece)
    return digest.digest()
