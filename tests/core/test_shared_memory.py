"""Memory that processes share: what another process says of it opens nothing else for writing."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import pytest
from crews import attempted

from zo2core import WorkerError
from zo2core.io.shared_memory import SharedMemory


def opened(folder: Path) -> list[str]:
    """What this process has open of shared memory and of a folder's files."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(link for link in links if "memfd:" in link or link.startswith(str(folder)))


def test_what_a_worker_says_of_its_memory_opens_nothing_else(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"kept" * 1024)
    process = os.getpid()
    with victim.open("r+b") as file, contextlib.closing(SharedMemory.create(4096)) as memory:
        other = os.memfd_create("another", os.MFD_CLOEXEC)
        unsealed = os.memfd_create("zo2core", os.MFD_CLOEXEC)
        os.ftruncate(unsealed, 4096)
        before = opened(tmp_path)
        for said, complaint in [
            (("self/../..", memory.descriptor), "'self/../..'"),
            (("self", f"../../..{victim}"), "'self'"),
            ((process, f"../../..{victim}"), "'../../../"),
            ((process, True), "'True'"),
            ((float(process), memory.descriptor), "number"),
            ((process, -1), "'-1'"),
            ((process, file.fileno()), "victim' in place of memory"),
            ((process, other), "/memfd:another"),
            ((process, unsealed), "shrink"),
        ]:
            with pytest.raises(OSError, match=complaint):
                SharedMemory.attach(*said, 4096)
        with pytest.raises(OSError, match="4096 bytes of memory in place of 8192"):
            SharedMemory.attach(process, memory.descriptor, 8192)
        assert opened(tmp_path) == before
        os.close(other)
        os.close(unsealed)
    assert victim.read_bytes() == b"kept" * 1024


def test_memory_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    with contextlib.closing(SharedMemory.create(4096)) as memory, monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: own + 1)
        with pytest.raises(OSError, match=f"another user, number {own}"):
            SharedMemory.attach(os.getpid(), memory.descriptor, 4096)


def test_shared_memory_cannot_shrink_under_those_who_use_it() -> None:
    with contextlib.closing(SharedMemory.create(4096)) as memory:
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, 0)
        assert fcntl.fcntl(memory.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL


def test_a_worker_that_names_another_file_as_its_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(4096))
    monkeypatch.setattr(SharedMemory, "descriptor", f"../../..{victim}")
    [first, second] = attempted(2, lambda workers: workers.shared_memory(4096))
    assert isinstance(second, WorkerError)
    assert "worker 0: found memory that cannot be shared" in str(second)
    assert isinstance(first, WorkerError)
