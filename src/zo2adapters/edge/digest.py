"""A SHA-256 appended to a program's file, where the runtime does not read: damaged weights would go unnoticed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from zo2core.errors import CheckpointError
from zo2core.io.durable import open_no_follow, open_regular

_MARK = b"zo2core sha256: "
_LENGTH = len(_MARK) + hashlib.sha256().digest_size


def append_digest(path: Path) -> None:
    """Append the SHA-256 of a file's bytes to the file."""
    with open(path, "r+b", opener=open_no_follow) as file:
        file.write(_MARK + _digest(file, path.stat().st_size))


def require_digest(path: Path) -> None:
    """Refuse a file whose bytes do not match the digest that ``append_digest`` wrote."""
    with open_regular(path) as file:
        length = max(path.stat().st_size - _LENGTH, 0)
        digest, end = _digest(file, length), file.read()
    if end != _MARK + digest:
        raise CheckpointError(
            path,
            found="bytes that do not match the digest" if end.startswith(_MARK) else "no digest at its end",
            expected="a complete program from write_program",
            remedy="write the program again, or copy it again",
        )


def _digest(file: BinaryIO, length: int) -> bytes:
    """The digest of a file's first ``length`` bytes. The file's position is then behind them."""
    digest = hashlib.sha256()
    while length and (piece := file.read(min(length, 1 << 20))):
        digest.update(piece)
        length -= len(piece)
    return digest.digest()
