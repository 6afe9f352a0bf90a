"""One engine at a time writes a journal and a directory of written-back blocks; reading them needs no lock."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from locked_engines import BATCH, beside, engine, small_llama, toy
from models import make_batch
from parity import assert_same_weights

from zo2core import Engine, Journal
from zo2core.errors import JournalError, ScratchError, ZO2Warning
from zo2core.io.durable import LockedFileError, RecordFile, close_locked, open_locked
from zo2core.perturbation import DATA as FACTORS
from zo2core.sources.slot_file import DATA, MANIFEST


@contextlib.contextmanager
def held_by_another_process(path: Path) -> Iterator[None]:
    """Another process has the file open for writing."""
    code = "import sys; from pathlib import Path; from zo2core.io.durable import open_locked\n"
    code += "open_locked(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        yield
        other.kill()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_a_second_engine_on_the_directory_of_a_live_one_is_refused_and_changes_no_bit(tmp_path: Path) -> None:
    run, path, copy = tmp_path / "run", tmp_path / "journal.jsonl", tmp_path / "copy.jsonl"
    with engine(tmp_path / "alone", every=3) as alone:
        expected = [alone.step(BATCH).losses for _ in range(10)]
    with engine(run, journal=path, every=3) as first:
        losses = [first.step(BATCH).losses for _ in range(8)]
        shutil.copy(path, copy)
        before = contents(run)
        with (
            pytest.raises(ScratchError, match=r"scratch\.bin: found a file that another engine writes.*choose another"),
            engine(run, journal=copy, every=1) as second,
        ):
            second.evaluate([BATCH])
        assert contents(run) == before
        losses += [first.step(BATCH).losses for _ in range(2)]
        assert losses == expected
    with engine(run, journal=path, every=3):
        pass  # the lock ended with the engine


def test_a_directory_that_another_process_uses_is_refused_until_that_process_is_killed(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "journal.jsonl"
    with engine(run, journal=path) as first:
        first.step(BATCH)
    before = contents(run)
    with held_by_another_process(run / DATA), pytest.raises(ScratchError, match="another engine"):
        engine(run, journal=path)
    assert contents(run) == before
    with engine(run, journal=path) as again:
        again.step(BATCH)


def test_a_training_engine_locks_its_journal_when_it_opens(tmp_path: Path) -> None:
    run, journal = tmp_path / "run", tmp_path / "journal.jsonl"
    with engine(run, journal=journal) as first:
        first.step(BATCH)
    with engine(run, journal=journal):  # takes no step
        before = journal.read_bytes()
        with pytest.raises(JournalError, match=r"journal\.jsonl: found a file that another engine writes.*close that"):
            engine(tmp_path / "other", journal=journal)
        assert journal.read_bytes() == before
        assert not (tmp_path / "other").exists()
    with held_by_another_process(journal), pytest.raises(JournalError, match="another engine"):
        engine(run, journal=journal)
    with engine(run, journal=journal) as again:
        again.step(BATCH)


def test_a_run_is_read_while_it_trains(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "journal.jsonl"
    with engine(run, journal=path) as training:
        for _ in range(3):
            training.step(BATCH)
        loss = training.evaluate([BATCH]).loss
        with Engine(toy(run), journal=path) as replayer:
            assert replayer.version == 3
            assert replayer.evaluate([BATCH]).loss == loss
            training.step(BATCH)
        with contextlib.closing(Journal(path)) as reading:
            assert len(reading.updates) == 4


def test_a_refused_engine_leaves_no_lock_and_no_file(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "journal.jsonl"
    (tmp_path / "in the way").write_bytes(b"")
    with pytest.raises(ScratchError):
        engine(tmp_path / "in the way", journal=path)
    assert not path.exists()
    with engine(run, journal=path) as first:
        first.step(BATCH)
    journal = Journal(path)
    with pytest.raises(JournalError, match=r"estimator\.lr"):
        engine(run, journal=journal, lr=1e-3)
    with engine(run, journal=path) as again:  # though the refused one's journal was not closed by its owner
        again.step(BATCH)
    journal.close()


def test_a_journal_that_grew_between_reading_and_locking_is_refused(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "journal.jsonl"
    with engine(run, journal=path) as first:
        early = Journal(path)
        first.step(BATCH)
    with pytest.raises(JournalError, match="bytes, where this process left"):
        engine(run, journal=early)
    early.close()
    assert len(Journal(path).updates) == 1


def test_the_manifest_is_locked_with_the_data(tmp_path: Path) -> None:
    with engine(tmp_path / "run"), pytest.raises(LockedFileError):
        RecordFile(tmp_path / "run" / MANIFEST).append({"segment": 0})


def test_a_forked_child_does_not_keep_the_lock_of_a_process_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = """
import os, signal, sys
from pathlib import Path
from zo2core.io.durable import close_locked, open_locked
descriptor = open_locked(Path(sys.argv[1]), os.O_CREAT)
parent = os.getpid()
if os.fork() == 0:
    try:
        os.write(descriptor, b"by the child")
    except OSError:
        close_locked(descriptor)
        os.kill(parent, signal.SIGKILL)
        print(flush=True)
    sys.stdin.read()
else:
    signal.pause()
"""
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"\n"
        assert parent.wait() == -signal.SIGKILL
        close_locked(open_locked(path))  # while the child still runs
    assert path.read_bytes() == b""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("locks"))


def test_ended_periods_have_one_writer(base: Path, tmp_path: Path) -> None:
    batch = make_batch(40, [7, 4])
    run = tmp_path / "run"
    with beside(base, tmp_path / "alone", tmp_path / "alone.jsonl") as alone:
        for _ in range(6):
            alone.step(batch)
        expected = {name: tensor.clone() for name, tensor in alone.parameters_now()}
    late = beside(base, run, tmp_path / "late.jsonl")  # it opened before there was a file
    with beside(base, run, tmp_path / "one.jsonl") as one:
        for _ in range(4):
            one.step(batch)
        before = contents(run)
        with pytest.raises(ScratchError, match=rf"{FACTORS}: found a file that another engine writes"):
            beside(base, run, tmp_path / "two.jsonl")
        assert not (tmp_path / "two.jsonl").exists()
        with late, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ZO2Warning)
            for _ in range(6):
                late.step(batch)
            assert_same_weights(late.parameters_now(), expected.items())
        assert ["another engine writes" in str(warning.message) for warning in warned] == [True]
        assert contents(run) == before
    with beside(base, run, tmp_path / "one.jsonl") as one:
        assert one.version == 4
