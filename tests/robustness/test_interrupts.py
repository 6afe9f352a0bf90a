"""An interrupt at any line of writing a record: memory and file agree, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import zo2core
from zo2core import Evaluation, Journal, Update
from zo2core.io.durable import RecordFile
from zo2core.perturbation import FactorFile
from zo2core.sources.slot_file import Scratch
from zo2core.types import BlockLayout, ParameterSpec, SegmentKind

HEADER = {"base": "b", "parameters": "p", "noise": "n", "estimator": {"name": "e"}, "seed": 0}
DIGESTS = {"embedding": "0a", "block 0": "0b"}
CORE = Path(zo2core.__file__).parent
WRITERS = ("journal.py", "io/durable.py", "sources/slot_file.py", "perturbation.py")
INTERRUPTED = {str(CORE / name) for name in WRITERS}
assert all(Path(name).exists() for name in INTERRUPTED), "a file that was renamed would not be interrupted"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing loses power here: the disk need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


def update(step: int) -> Update:
    return Update(
        step=step,
        evaluations=(Evaluation(7 + step, 1.0), Evaluation(7 + step, -1.0)),
        seeds=(7 + step,),
        projected_grads=(0.5,),
        lr=1e-3,
        zo_eps=1e-3,
        weight_decay=0.0,
        perturb_in_place=True,
        losses=(1.0, 2.0),
    )


def interrupted(action: Callable[[], Any], at: int) -> bool:
    """Run an action, interrupted before its line number ``at`` of files that write; say whether it came to that line."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in INTERRUPTED:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def every_line(make: Callable[[int], Callable[[], Any]], check: Callable[[int], None]) -> None:
    """Interrupt an action at its first line, made anew at its second line, and so on, and check what is left each time."""
    at = 1
    while interrupted(make(at), at):
        check(at)
        at += 1
    check(at)
    assert at > 10, "the action was traced"


def state(journal: Journal) -> tuple[object, ...]:
    version = len(journal.updates)
    chain = [journal.chain(at) for at in range(version + 2)]
    return journal.header, list(journal.updates), dict(journal.base_digests), journal.checksum, chain


class Journals:
    """A journal on disk, an action on it to interrupt, and what then has to hold."""

    def __init__(self, folder: Path, begun: bool, steps: int, act: Callable[[Journal], Any]) -> None:
        self._folder, self._begun, self._steps, self._act = folder, begun, steps, act
        self.journal = Journal()

    def make(self, at: int) -> Callable[[], Any]:
        self.path = self._folder / f"{at}.jsonl"
        self.journal = Journal(self.path)
        if self._begun:
            self.journal.begin(HEADER)
        for step in range(self._steps):
            self.journal.append(update(step))
        return lambda: self._act(self.journal)

    def check(self, at: int) -> None:
        journal = self.journal
        if journal.header is None:
            assert not self.path.exists(), f"{at}: a journal that was not begun leaves no file"
        else:
            with contextlib.closing(Journal(self.path)) as read:
                assert not read.torn, at
                assert state(read) == state(journal), at
        journal.begin(HEADER)
        for _ in range(2):
            journal.append(update(len(journal.updates)))
        journal.note_base(DIGESTS)
        journal.close()
        with contextlib.closing(Journal(self.path)) as read:
            assert state(read) == state(journal), at


ACTIONS: dict[str, tuple[bool, int, Callable[[Journal], Any]]] = {
    "begin": (False, 0, lambda journal: journal.begin(HEADER)),
    "the first append": (True, 0, lambda journal: journal.append(update(0))),
    "a later append": (True, 2, lambda journal: journal.append(update(2))),
    "note_base": (True, 1, lambda journal: journal.note_base(DIGESTS)),
    "withdraw": (True, 0, lambda journal: journal.withdraw()),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_an_interrupt_at_any_line_leaves_file_and_memory_of_a_journal_alike(action: str, tmp_path: Path) -> None:
    journals = Journals(tmp_path, *ACTIONS[action])
    every_line(journals.make, journals.check if action != "withdraw" else lambda at: withdrawn(journals, at))


def withdrawn(journals: Journals, at: int) -> None:
    """A journal whose withdrawal was interrupted is begun again and read."""
    journals.journal.begin(HEADER)
    journals.check(at)


def test_a_reopened_journal_that_is_interrupted_goes_on(tmp_path: Path) -> None:
    """The first append of a process also opens and locks the file."""
    with contextlib.closing(Journal(tmp_path / "journal.jsonl")) as begun:
        begun.begin(HEADER)
        begun.append(update(0))
    whole, opened = (tmp_path / "journal.jsonl").read_bytes(), Journal()

    def make(at: int) -> Callable[[], Any]:
        nonlocal opened
        (tmp_path / f"{at}.jsonl").write_bytes(whole)
        opened = Journal(tmp_path / f"{at}.jsonl")
        return lambda: opened.append(update(1))

    def check(at: int) -> None:
        while len(opened.updates) < 3:
            opened.append(update(len(opened.updates)))
        opened.close()
        assert list(Journal(tmp_path / f"{at}.jsonl").updates) == [update(step) for step in range(3)], at

    every_line(make, check)


def layouts() -> list[BlockLayout]:
    """Embedding, two blocks and head of a page each."""
    kinds = [SegmentKind.EMBEDDING, SegmentKind.BLOCK, SegmentKind.BLOCK, SegmentKind.HEAD]
    return [
        BlockLayout(f"segment {i}", kind, (ParameterSpec(f"p{i}", (1024,), torch.float32, i, decays=False),))
        for i, kind in enumerate(kinds)
    ]


def content(segment: int, version: int) -> torch.Tensor:
    return torch.full((4096,), 16 * segment + version, dtype=torch.uint8)


def test_an_interrupt_at_any_line_of_a_write_back_loses_no_slot_and_no_bytes(tmp_path: Path) -> None:
    scratch: Scratch

    def make(at: int) -> Callable[[], Any]:
        nonlocal scratch
        scratch = Scratch(tmp_path / str(at), layouts(), lambda version: 100 + version)
        for segment in (1, 2):
            scratch.write(segment, content(segment, 1), 1)
        return lambda: scratch.write(1, content(1, 2), 2)

    def holds(of: Scratch, at: int) -> None:
        for segment in (1, 2):
            read = torch.zeros(4096, dtype=torch.uint8)
            of.read(segment, read)
            assert torch.equal(read, content(segment, of.version(segment))), at

    def check(at: int) -> None:
        holds(scratch, at)
        versions = [scratch.version(segment) for segment in (1, 2)]
        records = {
            record["segment"]: record["version"] for record in RecordFile(tmp_path / str(at) / "scratch.jsonl").loaded[1:]
        }
        assert [records[1], records[2]] == versions, at
        for segment in (2, 1, 2):
            scratch.write(segment, content(segment, 3), 3)
            holds(scratch, at)
        scratch.close()
        again = Scratch(tmp_path / str(at), layouts(), lambda version: 100 + version)
        assert [again.version(segment) for segment in (1, 2)] == [3, 3], at
        holds(again, at)
        again.close()

    every_line(make, check)


def test_an_interrupt_at_any_line_of_keeping_a_period_leaves_a_manifest_that_counts(tmp_path: Path) -> None:
    spec = ParameterSpec("p", (3,), torch.float32, 0, decays=False)
    sums = [torch.full((3,), float(period)) for period in range(3)]
    journal = Journal()
    journal.begin(HEADER)
    for step in range(3):
        journal.append(update(step))
    file: FactorFile

    def opened(at: int) -> FactorFile:
        return FactorFile(tmp_path / str(at), {"p": 3}, period=1, journal=journal, writes=True)

    def make(at: int) -> Callable[[], Any]:
        nonlocal file
        file = opened(at)
        file.keep(spec, 0, sums[0])
        return lambda: file.keep(spec, 1, sums[1])

    def check(at: int) -> None:
        for period in range(file.periods, 3):
            file.keep(spec, period, sums[period])
        assert file.periods == 3, at
        file.close()
        with contextlib.closing(opened(at)) as again:
            assert again.periods == 3, at
            for period in range(3):
                read = again.read(spec, period)
                assert read is not None, at
                assert torch.equal(read, sums[period]), at

    every_line(make, check)
