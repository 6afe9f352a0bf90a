"""Byte ranges: every range of a file arrives whole, whatever its place, and nothing beside it is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zo2core import HostDevice
from zo2core.io import direct_file as ranged
from zo2core.io.direct_file import PAGE, RangedFile, byte_view

SIZE = 9 * PAGE + 123


@pytest.fixture(scope="module")
def content() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> Path:
    path = tmp_path_factory.mktemp("ranged") / "file"
    path.write_bytes(content)
    return path


@given(data=st.data())
@pytest.mark.parametrize("least", [PAGE, 1 << 20], ids=["in place", "by way of the buffer"])
def test_ranges_arrive_whole_and_nothing_beside_them_changes(
    path: Path, content: bytes, least: int, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, SIZE))
    length = data.draw(st.integers(0, SIZE - offset))
    askew = data.draw(st.sampled_from([0, 0, 1, 64]))  # of the address against the offset
    memory = HostDevice().host_memory(SIZE + 3 * PAGE)
    memory.fill_(7)
    at = PAGE + offset % PAGE + askew
    file = RangedFile(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranged, "IN_PLACE", least)
        file.read_into(offset, byte_view(memory[at : at + length]))
    file.close()
    assert memory[at : at + length].numpy().tobytes() == content[offset : offset + length]
    assert torch.all(memory[:at] == 7)
    assert torch.all(memory[at + length :] == 7)


def test_only_broken_pages_are_copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[int] = []
    read_staged = ranged._read_staged

    def counted(descriptor: int, offset: int, out: memoryview) -> int:
        staged.append(len(out))
        return read_staged(descriptor, offset, out)

    monkeypatch.setattr(ranged, "_read_staged", counted)
    monkeypatch.setattr(ranged, "IN_PLACE", 4 * PAGE)
    memory = HostDevice().host_memory(8 * PAGE)
    file = RangedFile(path)
    if file._direct is None:
        pytest.skip("this file system takes no direct I/O")
    file.read_into(100, byte_view(memory[100 : 6 * PAGE + 50]))
    file.close()
    assert staged == [PAGE - 100, 50]


@pytest.mark.parametrize("offset", [0, 100, PAGE])
def test_a_file_that_ends_early_is_told(path: Path, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged, "IN_PLACE", PAGE)
    memory = HostDevice().host_memory(SIZE + 3 * PAGE)
    file = RangedFile(path)
    with pytest.raises(EOFError, match=str(SIZE)):
        file.read_into(offset, byte_view(memory[offset : SIZE + PAGE]))
    file.close()
