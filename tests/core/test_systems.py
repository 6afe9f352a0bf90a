"""Systems: what runs without the calls that only Linux has, and where nothing runs at all."""

import ast
import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from system_runs import KINDS, bits

from zo2core.io import direct_file, system_calls
from zo2core.io.direct_file import PAGE, RangedFile, anonymous_memory

TESTS = Path(__file__).parent.parent
SUPPORT = TESTS / "support"
SOURCE = TESTS.parent / "src"
# Names of calls that Linux or macOS lacks or does otherwise, and the modules that may use them.
OF_ONE_SYSTEM = re.compile(
    r"O_DIRECT|O_TMPFILE|posix_fa\w+|f(?:data)?sync|fcntl|sched_\w+affinity|memfd_create|pipe2|"
    r"copy_file_range|splice|eventfd|mallopt|malloc_trim|prctl|getrusage|MADV_HUGEPAGE|inotify\w*"
)
THEIR_MODULES = {
    "zo2core/io/system_calls.py",
    "zo2core/io/process_memory.py",
    "zo2adapters/limited_process.py",  # a child that imports nothing of this package
}


@pytest.mark.long_profile
def test_without_the_calls_of_linux_every_kind_of_run_has_the_same_bits(tmp_path: Path) -> None:
    folders = (SUPPORT / "simulated_mac", SUPPORT, TESTS.parent / "tools")
    program = [sys.executable, str(SUPPORT / "system_runs.py"), str(tmp_path / "mac")]
    (tmp_path / "mac").mkdir()
    ended = subprocess.run(
        program,
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
    )
    on_macos = json.loads(ended.stdout)
    assert on_macos["bits"] == {kind: bits(tmp_path, kind) for kind in KINDS}
    assert on_macos["controls"].keys() == {"F_NOCACHE", "F_FULLFSYNC"}


def test_writes_are_durable_where_only_a_command_of_macos_reaches_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    answers: list[int] = [0, errno.ENOTSUP, errno.EIO]

    def control(descriptor: int, command: int, argument: int) -> int:
        calls.append(command)
        if number := answers.pop(0):
            raise OSError(number, os.strerror(number))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    monkeypatch.delattr(os, "fdatasync", raising=False)
    with (tmp_path / "file").open("wb") as file:
        system_calls.sync_data(file.fileno())
        system_calls.sync(file.fileno())  # a file system that does not know the command
        with pytest.raises(OSError, match="Input/output"):
            system_calls.sync(file.fileno())
    assert calls == [51, 51, "fsync", 51]


@pytest.mark.parametrize("name", ["O_DIRECT", None])
def test_no_call_transfers_more_than_every_system_can(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_file, "MOST_OF_A_CALL", PAGE)
    if name is not None:
        monkeypatch.delattr(os, name, raising=False)
    sizes = []
    preadv, pwrite = os.preadv, os.pwrite

    def reading(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return preadv(descriptor, buffers, offset)

    def writing(descriptor: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "preadv", reading)
    monkeypatch.setattr(os, "pwrite", writing)
    data = memoryview(anonymous_memory(3 * PAGE))
    data[:] = os.urandom(len(data))
    out = memoryview(anonymous_memory(len(data)))
    file = RangedFile(tmp_path / "file", writable=True)
    file.write(0, data)
    file.read_into(0, out)
    file.close()
    assert out == data
    assert max(sizes) == PAGE
    assert len(sizes) >= 6


@pytest.mark.parametrize(
    ("names", "loopback"),
    [(["lo", "eth0"], "lo"), (["en0", "lo0", "lowpan0"], "lo0"), (["eth0"], "lo")],
    ids=["Linux", "macOS", "none"],
)
def test_workers_of_one_host_meet_at_its_loopback_interface(
    names: list[str], loopback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    assert system_calls.loopback_interface() == loopback


def test_calls_of_one_system_stand_where_others_have_something_instead() -> None:
    users = {}
    for path in SOURCE.rglob("*.py"):
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (getattr(node, key, "") for key in ("attr", "id", "value"))
            if isinstance(name, str) and OF_ONE_SYSTEM.fullmatch(name)
        }
        if names:
            users[str(path.relative_to(SOURCE))] = names
    assert users.keys() == THEIR_MODULES, users


@pytest.mark.parametrize("module", ["zo2core", "zo2adapters.cli", "zo2core.io.durable"])
def test_windows_is_refused_by_name(module: str) -> None:
    code = f"import ast, sys; sys.platform = 'win32'; import {module}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "zo2core.errors.UnsupportedSystemError: the operating system: found Windows; expected "
        "Linux or macOS. What to do: install zo2core in WSL "
        "(https://learn.microsoft.com/windows/wsl), which is Linux."
    )
