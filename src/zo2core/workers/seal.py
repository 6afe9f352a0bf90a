"""Authentication of messages under the run's key, each bound to its all-gather and sender.

The store has no authentication: everyone who reaches its port may read and write.
"""

from __future__ import annotations

import hmac

from zo2core.errors import OptionError

KEY_BYTES = 16  # fewest bytes of a key
SEAL_BYTES = 12  # HMAC-SHA-256 truncated to 96 bits, as IPsec does (RFC 4868 names the risk: one guess in 2 ** 96)


class Seal:
    """Seals and opens messages under one key.

    Args:
        key: Secret of the run, the same on all workers.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def derived(self, salt: bytes) -> Seal:
        """Seals under a key derived from this one and a salt that is never used twice."""
        return Seal(hmac.digest(self._key, b"zo2core workers/" + salt, "sha256"))

    def sealed(self, payload: bytes, *, name: str, sender: int) -> bytes:
        """A message: the seal followed by the payload.

        Args:
            payload: Content of the message.
            name: Name of the all-gather that the message belongs to.
            sender: Rank of the sending worker, or a negative number for other senders.
        """
        return self._seal(payload, name, sender) + payload

    def opened(self, message: bytes, *, name: str, sender: int) -> bytes | None:
        """A message's payload; None if it was not sealed for this all-gather by this sender under this key."""
        seal, payload = message[:SEAL_BYTES], message[SEAL_BYTES:]
        return payload if hmac.compare_digest(seal, self._seal(payload, name, sender)) else None

    def _seal(self, payload: bytes, name: str, sender: int) -> bytes:
        return hmac.digest(self._key, f"{name}/{sender}/".encode() + payload, "sha256")[:SEAL_BYTES]


def require_key(key: bytes | None) -> None:
    """Refuse a key that is missing or too short.

    Raises:
        OptionError: saying how to make a key.
    """
    if key is None or len(key) < KEY_BYTES:
        raise OptionError(
            "key",
            found="no key" if key is None else f"{len(key)} bytes",
            expected=f"a secret of at least {KEY_BYTES} bytes: only the workers of one torchrun on one host make their own",
            remedy="make one with (umask 077; head -c 32 /dev/urandom > KEY), copy it to every host with scp, and start all "
            "workers with --key-file KEY; a program passes its bytes as key=",
        )
