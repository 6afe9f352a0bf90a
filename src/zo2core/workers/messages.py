"""A round: what all workers say, collected by one of them. No clock and no network: whoever collects drives it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

from zo2core.workers.seal import Seal

_ENTRY = struct.Struct("<II")  # rank, bytes of the message
COLLECTOR = -1  # sender of what was collected


class Round:
    """Messages of one round, one a worker.

    Args:
        name: Name of the exchange: its purpose and its number.
        size: Workers that are expected to say something.
        seal: Seal of the run.
        counts: Whether a payload counts; what does not is treated like a message that never came.
    """

    def __init__(self, name: str, size: int, seal: Seal, counts: Callable[[bytes], bool] = lambda payload: True) -> None:
        self._name = name
        self._size = size
        self._seal = seal
        self._counts = counts
        self._messages: dict[int, bytes] = {}
        self._discounted: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """Ranks of those that have said nothing yet."""
        return [rank for rank in range(self._size) if rank not in self._messages and rank not in self._discounted]

    def offer(self, rank: int, message: bytes) -> bool:
        """Take in a message.

        Returns:
            Whether it is one of this worker, for this round, under the run's key.
        """
        payload = self._seal.opened(message, name=self._name, sender=rank)
        if payload is None or not 0 <= rank < self._size:
            return False
        if self._counts(payload):
            self._messages.setdefault(rank, message)
        else:
            self._discounted.add(rank)
        return True

    def bundle(self) -> bytes:
        """All that was said, in the order of ranks, as it goes to every worker: under the seal of the collector."""
        entries = b"".join(
            _ENTRY.pack(rank, len(self._messages[rank])) + self._messages[rank] for rank in sorted(self._messages)
        )
        return self._seal.sealed(entries, name=self._name, sender=COLLECTOR)


def unbundled(bundle: bytes, name: str, seal: Seal) -> Mapping[int, bytes] | None:
    """Payloads by rank, in the order of ranks; None if the bundle, or a message in it, is not of this round and this run."""
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
    at = 0
    while at < len(entries):
        rank, nbytes = _ENTRY.unpack_from(entries, at)
        at += _ENTRY.size
        yield rank, entries[at : at + nbytes]
        at += nbytes
