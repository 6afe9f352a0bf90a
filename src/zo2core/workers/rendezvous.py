"""Rendezvous of the workers that ``torchrun`` started: they connect, and derive a key for this start alone.

Rank 0 opens the store that carries the workers' messages and announces its address: on one host in a file that only this
user can read, across hosts in ``torchrun``'s store, to which everyone on the network can write. An announcement may
therefore be forged, or be left over from an earlier start. A worker sends a nonce to the announced address; rank 0 of this
start answers with the same nonce under the run's key. Nothing else is sent before that answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch.distributed import DistError, QueueEmptyError

from zo2core.errors import WorkerError, reason
from zo2core.io.private_file import PrivateFile
from zo2core.workers.exchange import TCPStore, silent_worker
from zo2core.workers.seal import SEAL_BYTES, Seal

_LOOPBACK = "127.0.0.1"
_ANNOUNCED = "zo2core/workers"  # key in torchrun's store
_GREETINGS = "greetings"  # queue of rank 0's store
_GREETING = struct.Struct("<I16s")  # rank, nonce
_REFUSED = "refused"
_SECRET_BYTES = 32
_POLL = 0.01  # seconds between two polls: waiting within the store would keep signals from being handled
_CONNECTING = 5.0  # most seconds to connect to an address
_READ_AGAIN = 1.0  # seconds without an answer after which the announcement is read again


class Address(NamedTuple):
    """Address of rank 0's store, and the secret of this start."""

    host: str
    port: int
    secret: str  # hexadecimal, new for each start; empty where the user gives the key

    @classmethod
    def unpacked(cls, content: bytes) -> Address | None:
        """An address from JSON; None if the content is not an address."""
        try:
            host, port, secret = json.loads(content)
            bytes.fromhex(secret)
        except (ValueError, TypeError):
            return None
        return cls(host, port, secret) if isinstance(host, str) and type(port) is int and 0 < port < 1 << 16 else None


class Announcement(Protocol):
    """Where rank 0 writes the address of its store and the other workers read it."""

    def write(self, address: Address) -> None:
        """Write the address, replacing any other."""

    def read(self) -> Address | None:
        """The address; None if there is none."""

    def remove(self) -> None:
        """Remove the address, once all workers have read it."""


class AnnouncedInFile:
    """The announcement on one host: a file that only this user can read.

    Args:
        file: The file, the same for all workers of a start. If a start is killed, the file stays until a later start
            replaces it.
    """

    def __init__(self, file: PrivateFile) -> None:
        self._file = file

    @classmethod
    def of_start(cls) -> AnnouncedInFile:
        """The file of this start, named after the launcher's port and its number of restarts.

        Raises:
            WorkerError: if its directory cannot be made, or is open to other users.
        """
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        start = json.dumps([socket.gethostname(), *(os.environ.get(name) for name in names)])
        directory = Path(tempfile.gettempdir()) / f"zo2core-{os.geteuid()}"
        with _typed_errors(directory):
            return cls(PrivateFile(directory, hashlib.sha256(start.encode()).hexdigest()[:32]))

    def write(self, address: Address) -> None:
        """See the contract."""
        with _typed_errors(self._file.path):
            self._file.write(json.dumps(address).encode())

    def read(self) -> Address | None:
        """See the contract."""
        with _typed_errors(self._file.path):
            content = self._file.read()
            address = None if content is None else Address.unpacked(content)
            if content is not None and address is None:
                raise OSError("it does not hold an address")
            return address

    def remove(self) -> None:
        """See the contract."""
        with contextlib.suppress(OSError):
            self._file.remove()


class AnnouncedInStore:
    """The announcement across hosts: a key of the store that ``torchrun`` keeps for its workers. It is never removed.

    Args:
        store: The store of ``torchrun``.
        timeout: Seconds that the store waits for an answer, for the error.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        self._store = store
        self._timeout = timeout

    def write(self, address: Address) -> None:
        """See the contract."""
        with self._typed_errors():
            self._store.set(_ANNOUNCED, json.dumps(address))

    def read(self) -> Address | None:
        """See the contract. Other content counts as no address, since everyone on the network can write there."""
        with self._typed_errors():
            return Address.unpacked(bytes(self._store.get(_ANNOUNCED))) if self._store.check([_ANNOUNCED]) else None

    def remove(self) -> None:
        """Do nothing: workers of the next start recognize an old address."""

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise silent_worker(0, self._timeout, error) from error


def open_store(host: str | None) -> TCPStore:
    """A store whose server is in this process.

    Args:
        host: Name under which other hosts reach this one; the store then listens on all addresses. None where all workers
            are on this host; the store then listens on the loopback address alone.
    """
    if host is not None:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False)
    listening = socket.create_server((_LOOPBACK, 0), backlog=socket.SOMAXCONN)
    port = listening.getsockname()[1]
    return TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def gather_workers(
    announcement: Announcement, host: str | None, size: int, key: bytes | None, timeout: float
) -> tuple[TCPStore, Seal]:
    """Open the store of rank 0 and wait until all other workers have sent a greeting.

    Args:
        announcement: Where the other workers read the store's address.
        host: As in ``open_store``.
        size: Number of workers.
        key: Secret of the run; None takes a random one, which is announced.
        timeout: Seconds to wait for the others.

    Returns:
        The store, and the seal of this start.

    Raises:
        WorkerError: if a worker does not come in time, or has another key.
    """
    store = open_store(host)
    secret = secrets.token_bytes(_SECRET_BYTES) if key is None else b""
    seal, salt = Seal(secret if key is None else key), secrets.token_bytes(_SECRET_BYTES)
    announcement.write(Address(host or _LOOPBACK, store.port, secret.hex()))
    try:
        nonces = _greetings(store, size, seal, timeout)
    finally:
        announcement.remove()
    for nonce in nonces.values():
        name = nonce.hex()
        store.queue_push(name, seal.sealed(salt, name=f"answer {name}", sender=0))
    return store, seal.derived(salt)


def join_workers(announcement: Announcement, rank: int, key: bytes | None, timeout: float) -> tuple[TCPStore, Seal]:
    """Connect to the store of rank 0.

    Args:
        announcement: Where rank 0 writes the store's address.
        rank: Rank of this worker, at least 1.
        key: Secret of the run; None takes the one that is announced.
        timeout: Seconds to wait for rank 0.

    Returns:
        A client of the store, and the seal of this start.

    Raises:
        WorkerError: if this start's rank 0 does not answer in time, or has another key.
    """
    end = time.monotonic() + timeout
    last: Address | None = None
    while time.monotonic() < end:
        address = announcement.read()
        if address is not None:
            last = address
            seal = Seal(bytes.fromhex(address.secret) if key is None else key)
            with contextlib.suppress(DistError, OSError):  # the address of an earlier start, which has ended
                store = _connect(address)
                salt = _answer(store, rank, seal, announcement, address, end)
                if salt is not None:
                    return store, seal.derived(salt)
        time.sleep(_POLL)
    raise WorkerError(
        "worker 0",
        found="no address" if last is None else f"no answer of this start at {last.host}:{last.port}",
        expected=f"its store within {timeout:g} seconds",
        remedy="look at the output of worker 0; between hosts, open the ports of its host to the other workers",
    )


def _connect(address: Address) -> TCPStore:
    """A client of a store."""
    endpoint, limit = (address.host, address.port), timedelta(seconds=_CONNECTING)
    socket.create_connection(endpoint, _CONNECTING).close()  # where nothing listens, TCPStore would retry for seconds
    return TCPStore(*endpoint, is_master=False, timeout=limit, wait_for_workers=False)


def _greetings(store: TCPStore, size: int, seal: Seal, timeout: float) -> dict[int, bytes]:
    """The last nonce of each other worker, once all have sent one."""
    nonces: dict[int, bytes] = {}
    end = time.monotonic() + timeout
    while missing := [rank for rank in range(1, size) if rank not in nonces]:
        try:
            message = bytes(store.queue_pop(_GREETINGS, block=False))
        except QueueEmptyError as error:
            if time.monotonic() >= end:
                raise silent_worker(missing[0], timeout, error) from error
            time.sleep(_POLL)
            continue
        if len(message) != SEAL_BYTES + _GREETING.size:
            continue  # not a worker's message
        rank, nonce = _GREETING.unpack_from(message, SEAL_BYTES)
        if rank not in range(1, size) or seal.opened(message, name=_GREETINGS, sender=rank) is None:
            store.queue_push(nonce.hex(), seal.sealed(b"", name=_REFUSED, sender=0))  # the worker cannot open it
            raise _other_key(rank)
        nonces[rank] = nonce
    return nonces


def _answer(
    store: TCPStore, rank: int, seal: Seal, announcement: Announcement, address: Address, end: float
) -> bytes | None:
    """Send a greeting to a store; returns its answer, or None if another address is announced first, or time is over."""
    nonce = secrets.token_bytes(16)
    name = nonce.hex()
    store.queue_push(_GREETINGS, seal.sealed(_GREETING.pack(rank, nonce), name=_GREETINGS, sender=rank))
    read_at = time.monotonic() + _READ_AGAIN
    while (now := time.monotonic()) < end:
        try:
            salt = seal.opened(bytes(store.queue_pop(name, block=False)), name=f"answer {name}", sender=0)
        except QueueEmptyError:
            if now >= read_at:
                if announcement.read() not in (None, address):
                    return None
                read_at = now + _READ_AGAIN
            time.sleep(_POLL)
            continue
        if salt is None:
            raise _other_key(0)
        return salt
    return None


def _other_key(rank: int) -> WorkerError:
    return WorkerError(
        f"worker {rank}",
        found="a greeting that is not sealed with this run's key",
        expected="the same key on all workers",
        remedy="give all workers the same --key-file, and keep other machines off their network",
    )


@contextlib.contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of a private file into a WorkerError."""
    try:
        yield
    except OSError as error:
        raise WorkerError(
            path,
            found=reason(error),
            expected="a path that only this user can read and write, for the key of this host's workers",
            remedy="remove it, or set TMPDIR to a directory that only you can use, the same for all workers",
        ) from error
