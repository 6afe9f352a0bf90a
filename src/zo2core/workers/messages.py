"""The messages of one all-gather. Has no clock and no network: the collecting worker drives it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

from zo2core.workers.seal import Seal

_ENTRY = struct.Struct("<II")  # rank, bytes of the message
COLLECTOR = -1  # sender of a bundle


class AllGather:
    """The messages of one all-gather, one per worker.

    Args:
        name: Name of the all-gather: its purpose and its number.
        size: Number of workers.
        seal: Seal of the run.
        accepts: Predicate on a payload; a rejected payload is treated like a message that never came.
    """

    def __init__(self, name: str, size: int, seal: Seal, accepts: Callable[[bytes], bool] = lambda payload: True) -> None:
        self._name = name
        self._size = size
        self._seal = seal
        self._accepts = accepts
        self._messages: dict[int, bytes] = {}
        self._rejected: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """Ranks of the workers whose messages have not arrived."""
        return [rank for rank in range(self._size) if rank not in self._messages and rank not in self._rejected]

    def add(self, rank: int, message: bytes) -> bool:
        """Add a worker's message.

        Returns:
            Whether this worker sealed the message for this all-gather with the run's key; other messages are not added.
        """
        payload = self._seal.opened(message, name=self._name, sender=rank)
        if payload is None or not 0 <= rank < self._size:
            return False
        if self._accepts(payload):
            self._messages.setdefault(rank, message)
        else:
            self._rejected.add(rank)
        return True

    def bundle(self) -> bytes:
        """The accepted messages in the order of ranks, sealed by the collector, as every worker receives them."""
        entries = b"".join(
            _ENTRY.pack(rank, len(self._messages[rank])) + self._messages[rank] for rank in sorted(self._messages)
        )
        return self._seal.sealed(entries, name=self._name, sender=COLLECTOR)


def unbundled(bundle: bytes, name: str, seal: Seal) -> Mapping[int, bytes] | None:
    """Payloads by rank, in the order of ranks; None if the bundle or a message in it is not of this all-gather and run."""
    entries = seal.opened(bundle, name=name, sender=COLLECTOR)
    if entries is None:
        return None
    payloads: dict[int, bytes] = {}
    for rank, message in _entries(entries):
        payload = seal.opened(message, name=name, sender=rank)
        if payload is None:
            return None
        payloads[rank] = payload
    return payloads


def _entries(entries: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset < len(entries):
        rank, nbytes = _ENTRY.unpack_from(entries, offset)
        offset += _ENTRY.size
        yield rank, entries[offset : offset + nbytes]
        offset += nbytes
