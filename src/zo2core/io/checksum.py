"""Checksums of large memory: one for each chunk, on any thread, combined in order."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def chunk_checksum(chunk: memoryview) -> int:
    """64-bit XXH3 of a chunk's bytes. Releases the GIL."""
    return xxhash.xxh3_64_intdigest(chunk)


def combined_checksum(checksums: Iterable[int]) -> str:
    """XXH3 of chunks' checksums in order, 8 bytes each, little-endian; 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(b"".join(checksum.to_bytes(8, "little") for checksum in checksums))
