"""Seals of messages: who does not have the run's key cannot make one, and one of another moment does not fit.

The store that carries the messages authenticates nobody: whoever reaches its port may read and write.
"""

from __future__ import annotations

import hmac

from zo2core.errors import OptionError

KEY_BYTES = 16  # of the shortest key
SEAL_BYTES = 12  # of HMAC-SHA-256: 96 bits, as IPsec cuts it (RFC 4868 names the risk: a guess in 2 ** 96)


class Seal:
    """Seals and opens messages under one key.

    Args:
        key: Secret of the run; all workers have the same.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def derived(self, salt: bytes) -> Seal:
        """Seals of a key made of this one and something that is never used twice."""
        return Seal(hmac.digest(self._key, b"zo2core workers/" + salt, "sha256"))

    def sealed(self, payload: bytes, *, name: str, sender: int) -> bytes:
        """A message: the seal, and the payload behind it.

        Args:
            payload: What is said.
            name: Name of the exchange that the message belongs to.
            sender: Rank of the worker that says it.
        """
        return self._seal(payload, name, sender) + payload

    def opened(self, message: bytes, *, name: str, sender: int) -> bytes | None:
        """A message's payload; None if it was not sealed for this round by this sender under this key."""
        seal, payload = message[:SEAL_BYTES], message[SEAL_BYTES:]
        return payload if hmac.compare_digest(seal, self._seal(payload, name, sender)) else None

    def _seal(self, payload: bytes, name: str, sender: int) -> bytes:
        said = f"{name}/{sender}/".encode() + payload
        return hmac.digest(self._key, said, "sha256")[:SEAL_BYTES]


def require_key(key: bytes | None) -> None:
    """Refuse a key that is missing or that could be guessed.

    Raises:
        OptionError: saying how to make one.
    """
    if key is None or len(key) < KEY_BYTES:
        raise OptionError(
            "key",
            found="no key" if key is None else f"{len(key)} bytes",
            expected=f"a secret of {KEY_BYTES} bytes at least: only the workers of one torchrun on one host make their own",
            remedy="make one with (umask 077; head -c 32 /dev/urandom > KEY), copy it to every host over a safe way such as "
            "scp, and start all workers with --key-file KEY; a program passes its bytes as key=",
        )
