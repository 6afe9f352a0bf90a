"""Files of a run that others hold, link or block: one engine writes them at a time, and nothing is
written through links.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from engines import memory, zeroth_order
from models import make_batch
from parity import assert_same_weights
from toy import ToyBlockModel

from zo2adapters import open_checkpoint
from zo2adapters.commands.journal import ShowJournal
from zo2adapters.trainers.run_directory import replace_file as replace_text
from zo2core import (
    Engine,
    EngineOptions,
    Journal,
    LowRankPerturbation,
    MeZOSGD,
    PhiloxNoise,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import JournalError, ScratchError, ZO2Warning
from zo2core.estimators.factors import DATA as FACTORS
from zo2core.io import durable
from zo2core.io.durable import (
    DisturbedFileError,
    LockedFileError,
    RecordFile,
    close_locked,
    open_locked,
)
from zo2core.journal.journal import copy_journal
from zo2core.sources.slot_file import DATA, MANIFEST

IDS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def toy(run: Path) -> ToyBlockModel:
    return ToyBlockModel(
        50, 40, 4, tied=True, dtype=torch.float32, file=run.parent / "toy.safetensors"
    )


def engine(
    run: Path, *, journal: Journal | Path | None = None, every: int = 1, lr: float = 1e-2
) -> Engine:
    return zeroth_order(
        toy(run),
        MeZOSGD(lr=lr, zo_eps=1e-3),
        noise=PhiloxNoise(),
        journal=journal,
        memory=memory(1, budget=2**28),
        write_back=WriteBackPolicy(directory=run, every=every),
    )


def beside(base: Path, run: Path, journal: Path) -> Engine:
    estimator = MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False)
    method = ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2, period=2))
    return Engine(
        open_checkpoint(base),
        method,
        journal=journal,
        options=EngineOptions(write_back=WriteBackPolicy(directory=run)),
    )


@contextlib.contextmanager
def held_by_another_process(path: Path) -> Iterator[None]:
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


def test_a_second_engine_on_the_directory_of_a_live_one_is_refused_and_changes_no_bit(
    tmp_path: Path,
) -> None:
    run, path, copy = tmp_path / "run", tmp_path / "journal.jsonl", tmp_path / "copy.jsonl"
    with engine(tmp_path / "alone", every=3) as alone:
        expected = [alone.step(BATCH).losses for _ in range(10)]
    with engine(run, journal=path, every=3) as first:
        losses = [first.step(BATCH).losses for _ in range(8)]
        shutil.copy(path, copy)
        before = contents(run)
        with (
            pytest.raises(
                ScratchError,
                match=r"scratch\.bin: found a file that another engine writes.*choose another",
            ),
            engine(run, journal=copy, every=1) as second,
        ):
            second.evaluate([BATCH])
        assert contents(run) == before
        losses += [first.step(BATCH).losses for _ in range(2)]
        assert losses == expected
    with engine(run, journal=path, every=3):
        pass  # the lock ended with the engine


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with engine(tmp_path / "run", journal=tmp_path / "journal.jsonl") as first:
        for _ in range(2):
            first.step(BATCH)
    return tmp_path / "run"


def resume(run: Path, version: int = 3) -> None:
    with engine(run, journal=run.parent / "journal.jsonl") as again:
        again.step(BATCH)
        assert again.version == version


def test_a_directory_that_another_process_uses_is_refused_until_that_process_is_killed(
    run: Path,
) -> None:
    before = contents(run)
    with held_by_another_process(run / DATA), pytest.raises(ScratchError, match="another engine"):
        resume(run)
    assert contents(run) == before
    resume(run)


def test_a_training_engine_locks_its_journal_when_it_opens(run: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    with engine(run, journal=journal):  # takes no step
        before = journal.read_bytes()
        with pytest.raises(
            JournalError,
            match=r"journal\.jsonl: found a file that another engine writes.*close that",
        ):
            engine(tmp_path / "other", journal=journal)
        assert journal.read_bytes() == before
        assert not (tmp_path / "other").exists()
    with held_by_another_process(journal), pytest.raises(JournalError, match="another engine"):
        resume(run)
    resume(run)


def test_a_run_is_read_while_it_trains(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with engine(run, journal=path) as training:
        training.step(BATCH)
        loss = training.evaluate([BATCH]).loss
        with Engine(toy(run), journal=path) as replayer:
            assert replayer.version == 3
            assert replayer.evaluate([BATCH]).loss == loss
            training.step(BATCH)
        with contextlib.closing(Journal(path)) as reading:
            assert len(reading.updates) == 4


def test_a_refused_engine_leaves_no_lock_and_no_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "in the way").write_bytes(b"")
    with pytest.raises(ScratchError):
        engine(tmp_path / "in the way", journal=tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()
    journal = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(JournalError, match=r"estimator\.lr"):
        engine(run, journal=journal, lr=1e-3)
    resume(run)  # though the refused one's journal was not closed by its owner
    journal.close()


def test_a_file_that_its_last_writer_moved_before_its_lock_was_free_is_not_taken(
    tmp_path: Path,
) -> None:
    path, moved = tmp_path / "file", tmp_path / "moved"
    path.touch()
    with (
        patch.object(
            durable, "lock_descriptor", side_effect=lambda *given, **named: path.rename(moved)
        ),
        pytest.raises(DisturbedFileError),
    ):
        open_locked(path)
    assert str(moved) not in [os.readlink(f"/proc/self/fd/{held}") for held in durable._locked]


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
        with pytest.raises(
            ScratchError, match=rf"{FACTORS}: found a file that another engine writes"
        ):
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


SECRET = b"correct horse battery staple"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(SECRET)
    return path


@pytest.mark.parametrize("name", ["scratch.bin", "scratch.jsonl"])
def test_written_back_blocks_are_not_opened_through_a_fifo(name: str, run: Path) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ScratchError, match=rf"{name}: found no regular file"):
        resume(run)


def test_written_back_blocks_are_not_written_through_a_link_but_a_directory_may_be_one(
    run: Path, victim: Path
) -> None:
    partial, data, manifest = (
        run / name for name in (".scratch.jsonl.partial", "scratch.bin", "scratch.jsonl")
    )
    data.rename(run / "kept")
    data.symlink_to(victim)
    with pytest.raises(ScratchError, match=r"scratch\.bin: found a symbolic link"):
        resume(run)
    data.unlink()
    (run / "kept").rename(data)
    partial.symlink_to(victim)
    (run.parent / "link").symlink_to(run)
    resume(run.parent / "link")
    assert not os.path.lexists(partial)
    data.unlink()
    manifest.unlink()
    manifest.symlink_to(victim)
    os.mkfifo(partial)  # which is not waited for
    resume(run, 4)  # the link itself is replaced
    assert victim.read_bytes() == SECRET


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to(path.parent.parent / "victim")]
)
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
@pytest.mark.parametrize(
    "content", [SECRET, b'{"format":' + SECRET, b'{"key": "%s"}' % SECRET, b"01234567 " + SECRET]
)
def test_an_error_about_a_file_that_is_no_journal_prints_nothing_of_it(
    content: bytes, ending: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal.jsonl").write_bytes(content + ending)
    with pytest.raises(JournalError) as info:
        ShowJournal(run_directory=tmp_path).run()
    assert "horse" not in str(info.value)
    assert "horse" not in capsys.readouterr().out


def test_replaced_files_replace_links_and_leave_files_of_the_same_stem(
    run: Path, victim: Path, tmp_path: Path
) -> None:
    for name in ("options.json", ".options.json.partial"):
        (tmp_path / name).symlink_to(victim)
    for name in ("options.partial", "options.json.partial"):
        (tmp_path / name).write_text("a download")
    replace_text(tmp_path / "options.json", "{}\n")
    assert (tmp_path / "options.json").read_text() == "{}\n"
    names = {"options.json", "options.partial", "options.json.partial"}
    assert {path.name for path in tmp_path.iterdir() if "options" in path.name} == names
    (tmp_path / "copy.jsonl").symlink_to(victim)
    (tmp_path / ".copy.jsonl.partial").symlink_to(victim)
    with contextlib.closing(Journal(tmp_path / "journal.jsonl")) as journal:
        copy_journal(journal, tmp_path / "copy.jsonl")
    assert len(Journal(tmp_path / "copy.jsonl").updates) == 2
    assert victim.read_bytes() == SECRET
