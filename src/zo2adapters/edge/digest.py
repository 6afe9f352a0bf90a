"""The digest at the end of a program's file, which the runtime ignores. It detects damage of the program's weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from zo2core import CheckpointError
from zo2core.io.durable import open_no_follow, open_regular

_MARK = b"zo2core sha256: "
_LENGTH = len(_MARK) + hashlib.sha256().digest_size


def append_digest(path: Path) -> None:
    """Append the SHA-256 of a file's bytes to the file.

    Raises:
        OSError: if the file cannot be read or written.
    """
    with open(path, "r+b", opener=open_no_follow) as file:
        file.write(_MARK + _digest(file, path.stat().st_size))


def require_digest(path: Path) -> None:
    """Refuse a file whose bytes have changed since ``append_digest``.

    Raises:
        CheckpointError: if they have changed, or there is no digest.
        OSError: if the file cannot be read.
    """
    with open_regular(path) as file:
        length = max(path.stat().st_size - _LENGTH, 0)
        digest, end = _digest(file, length), file.read()
    if end != _MARK + digest:
        raise CheckpointError(
            path,
            found="bytes with another digest" if end.startswith(_MARK) else "no digest at its end",
            expected="a whole program that write_program wrote",
            remedy="write the program again, or copy it again",
        )


def _digest(file: BinaryIO, length: int) -> bytes:
    """Compute the digest of a file's first ``length`` bytes, and leave the file's position after them."""
    digest = hashlib.sha256()
    while length and (data := file.read(min(length, 1 << 20))):
        digest.update(data)
        length -= len(data)
    return digest.digest()
