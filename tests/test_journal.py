"""The journal: what it gives back, what it refuses, what a failed write leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zo2core import Evaluation, Journal, JournalError, Update
from zo2core.io.record_log import RecordFile

HEADER = {"base": "b", "noise": "n"}
floats = st.floats(allow_nan=False, allow_infinity=False)
seeds = st.integers(0, 2**63 - 1)


@st.composite
def updates(draw: st.DrawFn, step: int) -> Update:
    probes = draw(st.integers(1, 3))
    return Update(
        step=step,
        evaluations=tuple(Evaluation(draw(seeds), draw(floats)) for _ in range(2 * probes)),
        seeds=tuple(draw(seeds) for _ in range(probes)),
        projected_grads=tuple(draw(floats) for _ in range(probes)),
        lr=draw(floats),
        zo_eps=draw(floats),
        weight_decay=draw(floats),
        perturb_in_place=draw(st.booleans()),
        losses=tuple(draw(floats) for _ in range(2 * probes)),
    )


def simple(step: int) -> Update:
    evaluations = (Evaluation(step, 1.0), Evaluation(step, -1.0))
    return Update(step, evaluations, (step,), (0.1 * step,), 1e-6, 1e-3, 0.0, True, (1.5, 1.25))


def written(path: Path, count: int = 3) -> list[Update]:
    journal = Journal(path)
    journal.begin(HEADER)
    for step in range(count):
        journal.append(simple(step))
    journal.close()
    return [simple(step) for step in range(count)]


@given(data=st.data())
def test_every_bit_comes_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    expected = [data.draw(updates(step)) for step in range(data.draw(st.integers(0, 4)))]
    journal = Journal(path)
    journal.begin(HEADER)
    for update in expected:
        journal.append(update)
    journal.close()
    again = Journal(path)
    assert repr(list(again.updates)) == repr(expected)  # repr tells 0.0 from -0.0
    again.begin(HEADER)


def test_a_torn_last_record_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    expected = written(path)
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        journal = Journal(path)
        assert list(journal.updates) == expected[:2]
    path.write_bytes(whole[: start + 20])
    journal = Journal(path)
    journal.append(simple(2))
    journal.close()
    assert path.read_bytes() == whole


def test_zeros_where_the_last_record_should_be_are_a_torn_record(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    expected = written(path)
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert list(Journal(path).updates) == expected


def test_damage_elsewhere_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for number in range(len(lines) - 1):
        damaged = [*lines]
        damaged[number] = damaged[number].replace(b'"', b"'", 1)
        path.write_bytes(b"".join(damaged))
        with pytest.raises(JournalError, match=f"line {number + 1}"):
            Journal(path)
    path.write_bytes(b"".join([lines[0], lines[2], lines[3]]))  # a record is missing
    with pytest.raises(JournalError, match="step 1 instead of 0"):
        Journal(path)


@given(data=st.data())
def test_a_mutated_journal_is_refused_or_a_prefix(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "journal.jsonl"
    expected = written(path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        found = list(Journal(path).updates)
    except JournalError:
        return
    assert found == expected[: len(found)]


def test_another_header_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    with pytest.raises(JournalError) as info:
        Journal(path).begin({"base": "other", "noise": "n"})
    assert "'b'" in info.value.found
    assert "'other'" in info.value.expected
    assert "noise" not in info.value.found


def test_a_failed_append_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    before = path.read_bytes()
    journal = Journal(path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(JournalError, match="No space left"):
            journal.append(simple(3))
    assert list(journal.updates) == [simple(step) for step in range(3)]
    journal.append(simple(3))
    journal.close()
    assert path.read_bytes().startswith(before)
    assert list(Journal(path).updates) == [simple(step) for step in range(4)]


def test_a_reopened_journal_is_durable_before_a_version_of_it_counts_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    real, synced = os.fsync, list[str]()

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    journal = Journal(path)  # whose last record nobody may have synced
    assert list(journal.updates) == [simple(step) for step in range(3)]
    assert synced == [], "reading changes nothing"
    assert journal.chain(3) is not None
    assert synced == [str(path), str(tmp_path)]
    assert journal.chain(2) is not None
    journal.append(simple(3))
    assert journal.chain(4) is not None
    assert synced == [str(path), str(tmp_path), str(path)]
    journal.close()


def test_a_reopened_journal_that_cannot_be_synced_vouches_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "journal.jsonl")
    journal = Journal(tmp_path / "journal.jsonl")

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(JournalError, match="Input/output error"):
            journal.chain(3)
    assert journal.chain(3) is not None


def test_a_file_has_one_writer_and_a_killed_one_lets_go_of_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    code = f"""
import pathlib, time
from zo2core.io.record_log import RecordFile
file = RecordFile(pathlib.Path({str(path)!r}))
file.append({{"held": True}})
print("held", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        before = path.read_bytes()
        with pytest.raises(OSError, match="a file that another engine writes"):
            RecordFile(path).append({"mine": 1})
        assert path.read_bytes() == before
        other.kill()
    file = RecordFile(path)
    file.append({"mine": 1})
    file.close()
    assert len(path.read_bytes()) > len(before)
    assert [found.name for found in tmp_path.iterdir()] == [path.name], "no other file is left"
