"""Links, FIFOs and files of others where a run's files stand: nothing is written through them, waited for or printed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from locked_engines import BATCH, beside, engine, small_llama, toy

from zo2adapters.commands.journal import ShowJournal
from zo2adapters.trainers.run_directory import replace_file as replace_text
from zo2core import Engine, Journal
from zo2core.errors import JournalError, ScratchError, ZO2Warning
from zo2core.journal import copy_journal

SECRET = b"correct horse battery staple"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return small_llama(tmp_path)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with written-back blocks."""
    with engine(tmp_path / "run", journal=tmp_path / "journal.jsonl") as first:
        for _ in range(2):
            first.step(BATCH)
    return tmp_path / "run"


def resume(run: Path) -> None:
    with engine(run, journal=run.parent / "journal.jsonl") as again:
        again.step(BATCH)
        assert again.version == 3


def test_a_link_at_the_partial_manifest_is_replaced(run: Path, victim: Path) -> None:
    (run / ".scratch.jsonl.partial").symlink_to(victim)
    resume(run)
    assert victim.read_bytes() == SECRET
    assert not os.path.lexists(run / ".scratch.jsonl.partial")


def test_a_fifo_at_the_partial_manifest_is_not_waited_for(run: Path) -> None:
    os.mkfifo(run / ".scratch.jsonl.partial")
    resume(run)


@pytest.mark.parametrize("name", ["scratch.bin", "scratch.jsonl"])
def test_written_back_blocks_are_not_opened_through_a_fifo(name: str, run: Path) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ScratchError, match=rf"{name}: found no regular file"):
        resume(run)


def test_written_back_blocks_are_not_written_through_a_link(run: Path, victim: Path) -> None:
    (run / "scratch.bin").unlink()
    (run / "scratch.bin").symlink_to(victim)
    with pytest.raises(ScratchError, match=r"scratch\.bin: found a symbolic link"):
        resume(run)
    (run / "scratch.bin").unlink()
    (run / "scratch.jsonl").unlink()
    (run / "scratch.jsonl").symlink_to(victim)
    resume(run)  # the link itself is replaced
    assert victim.read_bytes() == SECRET


def test_a_directory_of_a_run_may_be_a_link(run: Path) -> None:
    (run.parent / "link").symlink_to(run)
    with engine(run.parent / "link", journal=run.parent / "journal.jsonl") as again:
        again.step(BATCH)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.parent.parent / "victim")])
@pytest.mark.parametrize("name", ["factors.bin", ".factors.jsonl.partial"])
def test_ended_periods_are_not_written_through_links_and_fifos(
    name: str, make: Callable[[Path], None], base: Path, victim: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "periods"
    directory.mkdir()
    make(directory / name)
    told = (
        pytest.warns(ZO2Warning, match="a symbolic link|no regular file")
        if name == "factors.bin"
        else contextlib.nullcontext()
    )
    with told, beside(base, directory, tmp_path / "journal.jsonl") as training:
        for _ in range(4):
            training.step({key: value % 40 for key, value in BATCH.items()})
    assert victim.read_bytes() == SECRET
    assert (directory / "factors.jsonl").exists() == (name == ".factors.jsonl.partial")


def test_a_journal_is_read_through_a_link_and_not_written(run: Path, tmp_path: Path) -> None:
    """The hub's cache has links; a run that goes on has a file of its own."""
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "journal.jsonl")
    before = (tmp_path / "journal.jsonl").read_bytes()
    with Engine(toy(run), journal=link) as replayer:
        assert replayer.version == 2
    with pytest.raises(JournalError, match=r"link\.jsonl: found a symbolic link"):
        engine(tmp_path / "other", journal=link)
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    missing = tmp_path / "missing.jsonl"
    missing.symlink_to(tmp_path / "made")
    with pytest.raises(JournalError):
        engine(tmp_path / "other", journal=missing)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("ending", [b"", b"\n", b"\nmore\n", b"\n" + bytes(9)])
@pytest.mark.parametrize("content", [SECRET, b'{"format":' + SECRET, b'{"key": "%s"}' % SECRET, b"01234567 " + SECRET])
def test_an_error_about_a_file_that_is_no_journal_prints_nothing_of_it(
    content: bytes, ending: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal.jsonl").write_bytes(content + ending)
    with pytest.raises(JournalError) as info:
        ShowJournal(run_directory=tmp_path).run()
    assert "horse" not in str(info.value)
    assert "horse" not in capsys.readouterr().out


def test_replaced_files_replace_links(run: Path, victim: Path, tmp_path: Path) -> None:
    for name in ("options.json", ".options.json.partial"):
        (tmp_path / name).symlink_to(victim)
    replace_text(tmp_path / "options.json", "{}\n")
    assert (tmp_path / "options.json").read_text() == "{}\n"
    (tmp_path / "copy.jsonl").symlink_to(victim)
    (tmp_path / ".copy.jsonl.partial").symlink_to(victim)
    with contextlib.closing(Journal(tmp_path / "journal.jsonl")) as journal:
        copy_journal(journal, tmp_path / "copy.jsonl")
    assert len(Journal(tmp_path / "copy.jsonl").updates) == 2
    assert victim.read_bytes() == SECRET


def test_replacing_a_file_leaves_files_of_the_same_stem(tmp_path: Path) -> None:
    for name in ("report.partial", "report.html.partial"):
        (tmp_path / name).write_text("a download")
    replace_text(tmp_path / "report.html", "<p>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.html.partial", "report.partial"]
