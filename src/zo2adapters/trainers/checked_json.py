"""JSON files that end with a checksum of their values, so that an edit or a damage is noticed.

The checksum is the member ``sha256``: the SHA-256 of the other members as compact JSON in ASCII,
with sorted keys. White space and the order of members may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECKSUM = "sha256"


class ChecksumError(ValueError):
    """The values of a file are not those that were written."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values  # as they are found, without the checksum
        super().__init__("values that do not match the file's checksum")


def to_text(values: Mapping[str, Any]) -> str:
    """The text of a file with these values."""
    return json.dumps({**values, CHECKSUM: _checksum(values)}, indent=2) + "\n"


def from_bytes(raw: bytes) -> dict[str, Any]:
    """The values of a file.

    Raises:
        ChecksumError: if they are not those that were written, or the checksum is missing.
        ValueError, RecursionError: if the file is no JSON object.
    """
    values = json.loads(raw)
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__}, and no object")
    if values.pop(CHECKSUM, None) != _checksum(values):
        raise ChecksumError(values)
    return values


def _checksum(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
