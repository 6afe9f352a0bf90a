"""How workers find each other: the key of one start, the store of one host, and what strangers put in the way."""

from __future__ import annotations

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from crews import KEY, SECONDS, client_of, opened_store

from zo2core import OptionError, WorkerError, Workers
from zo2core.io.private_file import PrivateFile
from zo2core.workers.exchange import Exchange, TCPStore
from zo2core.workers.rendezvous import (
    Address,
    AnnouncedInFile,
    AnnouncedInStore,
    Announcement,
    gather_workers,
    join_workers,
    open_store,
)
from zo2core.workers.seal import SEAL_BYTES, Seal


def announced(folder: Path, name: str = "start") -> AnnouncedInFile:
    return AnnouncedInFile(PrivateFile(folder / "private", name))


def met(places: list[Announcement], keys: list[bytes | None], host: str | None = None) -> list[Any]:
    """What each worker gets, or is refused with; one worker a place."""
    size = len(places)

    def meet(rank: int) -> Any:
        try:
            if rank == 0:
                return gather_workers(places[0], host, size, keys[0], SECONDS)
            return join_workers(places[rank], rank, keys[rank], SECONDS)
        except WorkerError as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(meet, range(size)))


def assert_met(outcomes: list[Any]) -> None:
    """That all have one store and one key."""
    (first, seal), *others = outcomes
    first.set("word", "said")
    message = seal.sealed(b"payload", name="round", sender=0)
    for store, own in others:
        assert store.get("word") == b"said"
        assert own.opened(message, name="round", sender=0) == b"payload"


def listening_addresses(port: int) -> set[str]:
    """Addresses at which this process listens on a port."""
    own = psutil.Process().net_connections("tcp")
    return {place.laddr.ip for place in own if place.status == psutil.CONN_LISTEN and place.laddr.port == port}


# --- one host


def test_the_store_of_one_host_listens_on_the_loopback_address_alone() -> None:
    store = open_store(None)
    assert listening_addresses(store.port) == {"127.0.0.1"}
    socket.create_connection(("127.0.0.1", store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))
    assert listening_addresses(open_store("localhost").port) != {"127.0.0.1"}  # what can be seen here at all


def test_workers_of_torchrun_on_one_host_have_a_random_key_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "unreachable.invalid"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    sealed: list[bytes] = []
    announce = PrivateFile.write

    def noted(file: PrivateFile, content: bytes) -> None:
        announce(file, content)
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
        address = Address.unpacked(content)
        assert address is not None
        assert listening_addresses(address.port) == {"127.0.0.1"}
        sealed.append(bytes.fromhex(address.secret))

    monkeypatch.setattr(PrivateFile, "write", noted)
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(join_workers, AnnouncedInFile.of_start(), 1, None, SECONDS)
            with Workers.from_torchrun(timeout=SECONDS) as workers:
                store, seal = joining.result()
                second = Exchange(store, 1, 2, seal, timeout=SECONDS)
                answering = thread.submit(second.all_gather, "values", 2)
                assert workers.all_gather(1) == [1, 2]
                answering.result()
                second.close()
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert len(set(sealed)) == 2
    assert all(len(secret) == 32 for secret in sealed)


def test_starts_of_other_launchers_and_restarts_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = {"TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    starts = [first, *({**first, name: "7"} for name in first)]
    for port, start in enumerate(starts, 1):
        for name, value in start.items():
            monkeypatch.setenv(name, value)
        assert AnnouncedInFile.of_start().read() is None
        AnnouncedInFile.of_start().write(Address("127.0.0.1", port, ""))
    assert AnnouncedInFile.of_start().read() == Address("127.0.0.1", len(starts), "")
    for name, value in first.items():
        monkeypatch.setenv(name, value)
    assert AnnouncedInFile.of_start().read() == Address("127.0.0.1", 1, "")


def test_workers_do_not_take_what_a_killed_start_left(tmp_path: Path) -> None:
    """Its address may even be that of a store which still listens: it does not answer the greeting."""
    place, forsaken = announced(tmp_path), opened_store()
    place.write(Address("127.0.0.1", forsaken.port, bytes(32).hex()))
    joined: list[Any] = []
    other = threading.Thread(target=lambda: joined.append(join_workers(announced(tmp_path), 1, None, SECONDS)))
    other.start()
    greeting = bytes(forsaken.queue_pop("greetings"))  # it has found the earlier start's store
    assert len(greeting) == SEAL_BYTES + 4 + 16  # rank and nonce
    first = gather_workers(place, None, 2, None, SECONDS)
    other.join()
    assert_met([first, *joined])
    assert forsaken.num_keys() == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["open to others", "link", "file"])
def test_a_directory_that_others_may_have_made_is_refused(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "private"
    (tmp_path / "theirs").mkdir(0o700)
    if kind == "link":
        directory.symlink_to(tmp_path / "theirs")
    elif kind == "file":
        directory.touch(0o600)
    else:
        directory.mkdir()
        directory.chmod(0o770)
    with pytest.raises(OSError, match=r"other users may use it|Not a directory|Too many levels"):
        PrivateFile(directory, "start")
    assert not list((tmp_path / "theirs").iterdir())


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: own + 1)
    with pytest.raises(WorkerError, match=f"it belongs to another user, number {own}.*TMPDIR"):
        AnnouncedInFile.of_start()


@pytest.mark.parametrize("kind", ["open to others", "link", "fifo", "no address"])
def test_a_key_file_that_others_may_have_made_is_refused_and_replaced_unread(tmp_path: Path, kind: str) -> None:
    place = announced(tmp_path)
    path, target = tmp_path / "private" / "start", tmp_path / "target"
    target.write_text('["127.0.0.1", 1, ""]')
    target.chmod(0o600)
    if kind == "link":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.write_text("[]" if kind == "no address" else target.read_text())
        path.chmod(0o644 if kind == "open to others" else 0o600)
    with pytest.raises(WorkerError, match="private/start"):
        place.read()
    place.write(Address("127.0.0.1", 2, "00"))
    assert place.read() == Address("127.0.0.1", 2, "00")
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert target.read_text() == '["127.0.0.1", 1, ""]'


def test_a_key_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = announced(tmp_path)

    def failing(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.rename", failing)
    with pytest.raises(WorkerError, match="no space"):
        place.write(Address("127.0.0.1", 2, "00"))
    assert not list((tmp_path / "private").iterdir())


# --- several hosts


def across_hosts(size: int) -> tuple[Any, list[Announcement]]:
    """The launcher's store, and each worker's client of it."""
    store = opened_store()
    return store, [AnnouncedInStore(client_of(store), SECONDS) for _ in range(size)]


@pytest.mark.parametrize("left", ["a store that is gone", "a store of an earlier start", "what a stranger wrote"])
def test_a_worker_does_not_take_an_earlier_starts_address(left: str) -> None:
    launchers, places = across_hosts(3)
    forsaken = opened_store()
    port = forsaken.port
    if left == "a store that is gone":
        del forsaken
    launchers.set("zo2core/workers", "?" if left == "what a stranger wrote" else f'["127.0.0.1", {port}, ""]')
    assert_met(met(places, [KEY] * 3, "127.0.0.1"))


def test_a_store_without_the_key_is_told_nothing_but_a_greeting() -> None:
    """A stranger writes its own address into the launcher's store, and answers as it can."""
    launchers, [place] = across_hosts(1)
    strangers = opened_store()
    launchers.set("zo2core/workers", f'["127.0.0.1", {strangers.port}, ""]')
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(join_workers, place, 1, KEY, SECONDS)
        greeting = bytes(strangers.queue_pop("greetings"))
        nonce = greeting[-16:].hex()
        strangers.queue_push(nonce, Seal(b"a guess").sealed(bytes(32), name=f"answer {nonce}", sender=0))
        with pytest.raises(WorkerError, match="worker 0: found a greeting that is not sealed"):
            joining.result()
    assert len(greeting) == SEAL_BYTES + 4 + 16  # rank and nonce
    assert strangers.num_keys() == 0
    assert strangers.queue_len("greetings") == 0


def test_a_store_passes_over_what_is_no_greeting(tmp_path: Path) -> None:
    place = announced(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        gathering = threads.submit(gather_workers, place, None, 2, KEY, SECONDS)
        while (address := place.read()) is None:
            assert not gathering.done()
        stranger = TCPStore(address.host, address.port, is_master=False, wait_for_workers=False)
        stranger.queue_push("greetings", b"junk")
        joining = threads.submit(join_workers, place, 1, KEY, SECONDS)
        assert_met([gathering.result(), joining.result()])


def test_a_worker_with_another_key_is_refused_by_name() -> None:
    _, places = across_hosts(2)
    refused, ended = met(places, [KEY, b"another" * 4], "127.0.0.1")
    assert isinstance(refused, WorkerError)
    assert "worker 1: found a greeting that is not sealed with this run's key" in str(refused)
    assert isinstance(ended, WorkerError)


def test_a_worker_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="worker 1"):
        gather_workers(announced(tmp_path), None, 3, None, 0.05)
    assert not list((tmp_path / "private").iterdir())
    with pytest.raises(WorkerError, match="worker 0: found no address"):
        join_workers(announced(tmp_path), 1, None, 0.05)


def test_several_workers_without_a_key_are_refused() -> None:
    for key in (None, b"", b"fifteen bytes.."):
        with pytest.raises(OptionError, match="umask 077"):
            Workers.joined(rank=0, size=2, store=None, key=key)
