"""An interrupt at any line of writing a record: memory and file agree, and the run goes on."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from segments import segments
from updates import update_of

import zo2core
from zo2core import Journal
from zo2core.estimators.factors import FactorFile
from zo2core.io.durable import RecordFile
from zo2core.sources.slot_file import Scratch
from zo2core.types import ParameterSpec

HEADER = {"base": "b", "parameters": "p", "noise": "n", "estimator": {"name": "e"}, "seed": 0}
DIGESTS = {"embedding": "0a", "block 0": "0b"}
CORE = Path(zo2core.__file__).parent
WRITERS = (
    "journal/journal.py",
    "journal/records.py",
    "io/durable.py",
    "sources/slot_file.py",
    "estimators/factors.py",
)
INTERRUPTED = {str(CORE / name) for name in WRITERS}
assert all(Path(name).exists() for name in INTERRUPTED), (
    "a file that was renamed would not be interrupted"
)

pytestmark = pytest.mark.usefixtures("no_power_loss")


def interrupted(action: Callable[[], Any], at: int) -> bool:
    """Run an action, interrupted before its line number ``at`` of files that write; say whether it
    came to that line.
    """
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
    """Interrupt an action at its first line, made anew at its second line, and so on, and check
    what is left each time.
    """
    at = 1
    while interrupted(make(at), at):
        check(at)
        at += 1
    check(at)
    assert at > 10, "the action was traced"


def state(journal: Journal) -> tuple[object, ...]:
    version = len(journal.updates)
    chain = [journal.chain(at) for at in range(version + 2)]
    return (
        journal.header,
        list(journal.updates),
        dict(journal.base_digests),
        journal.checksum,
        chain,
    )


# Whether the journal was begun, how many steps it has, whether it is opened anew, and what is
# interrupted.
ACTIONS: dict[str, tuple[bool, int, bool, Callable[[Journal], Any]]] = {
    "begin": (False, 0, False, lambda journal: journal.begin(HEADER)),
    "the first append": (True, 0, False, lambda journal: journal.append(update_of(0))),
    "a later append": (True, 2, False, lambda journal: journal.append(update_of(2))),
    "an append that also opens and locks": (
        True,
        1,
        True,
        lambda journal: journal.append(update_of(1)),
    ),
    "note_base": (True, 1, False, lambda journal: journal.note_base(DIGESTS)),
    "withdraw": (True, 0, False, lambda journal: journal.withdraw()),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_an_interrupt_at_any_line_leaves_file_and_memory_of_a_journal_alike(
    action: str, tmp_path: Path
) -> None:
    begun, steps, reopens, act = ACTIONS[action]
    journal = Journal()

    def path(at: int) -> Path:
        return tmp_path / f"{at}.jsonl"

    def make(at: int) -> Callable[[], Any]:
        nonlocal journal
        journal = Journal(path(at))
        if begun:
            journal.begin(HEADER)
        for step in range(steps):
            journal.append(update_of(step))
        if reopens:
            journal.close()
            journal = Journal(path(at))
        return lambda: act(journal)

    def check(at: int) -> None:
        if action == "withdraw":
            journal.begin(HEADER)
        if journal.header is None:
            assert not path(at).exists(), f"{at}: a journal that was not begun leaves no file"
        else:
            require_read(at)
        journal.begin(HEADER)
        for _ in range(2):
            journal.append(update_of(len(journal.updates)))
        journal.note_base(DIGESTS)
        journal.close()
        require_read(at)

    def require_read(at: int) -> None:
        """What is read back is what is in memory."""
        with contextlib.closing(Journal(path(at))) as read:
            assert not read.torn, at
            assert state(read) == state(journal), at

    every_line(make, check)


LAYOUTS = segments([1024] * 4)  # a page each


def content(segment: int, version: int) -> torch.Tensor:
    return torch.full((4096,), 16 * segment + version, dtype=torch.uint8)


def test_an_interrupt_at_any_line_of_a_write_back_loses_no_slot_and_no_bytes(
    tmp_path: Path,
) -> None:
    scratch: Scratch

    def make(at: int) -> Callable[[], Any]:
        nonlocal scratch
        scratch = Scratch(tmp_path / str(at), LAYOUTS, lambda version: 100 + version)
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
            record["segment"]: record["version"]
            for record in RecordFile(tmp_path / str(at) / "scratch.jsonl").loaded[1:]
        }
        assert [records[1], records[2]] == versions, at
        for segment in (2, 1, 2):
            scratch.write(segment, content(segment, 3), 3)
            holds(scratch, at)
        scratch.close()
        again = Scratch(tmp_path / str(at), LAYOUTS, lambda version: 100 + version)
        assert [again.version(segment) for segment in (1, 2)] == [3, 3], at
        holds(again, at)
        again.close()

    every_line(make, check)


def test_an_interrupt_at_any_line_of_keeping_a_period_leaves_a_manifest_that_counts(
    tmp_path: Path,
) -> None:
    spec = ParameterSpec("p", (3,), torch.float32, 0, decays=False)
    sums = [torch.full((3,), float(period)) for period in range(3)]
    journal = Journal()
    journal.begin(HEADER)
    for step in range(3):
        journal.append(update_of(step))
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
