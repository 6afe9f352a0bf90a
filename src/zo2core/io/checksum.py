"""Checksums of large memory: made piece by piece, in whatever thread has the piece at hand, and combined in order."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def piece_checksum(piece: memoryview) -> int:
    """XXH3 of a piece's bytes, 64 bits. Other threads run in the meantime."""
    return xxhash.xxh3_64_intdigest(piece)


def combined_checksum(pieces: Iterable[int]) -> str:
    """One checksum of the checksums of pieces in their order: XXH3 of 8 bytes each, little-endian; 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(b"".join(piece.to_bytes(8, "little") for piece in pieces))
