"""Factors of ended periods on disk: a resumed run has the bits of one that was not, with them, without, and with damage."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from engines import assert_equal, outcome, weights, zeroth_order
from models import make_batch, save_model, small_config

from zo2adapters import open_checkpoint
from zo2core import Engine, LowRankPerturbation, MeZOSGD, WriteBackPolicy, perturbation
from zo2core.errors import JournalError, ZO2Warning
from zo2core.io import durable
from zo2core.io.direct_file import RangedFile
from zo2core.io.durable import RecordFile
from zo2core.journal import Journal
from zo2core.kernels import apply_drawing
from zo2core.perturbation import DATA, MANIFEST, kept_bytes_a_step, sum_elements
from zo2core.sweep.visitor import SegmentVisitor
from zo2core.types import Program

BATCH = make_batch(40, [7, 4])
STEPS, PERIOD = 8, 3  # two periods have ended at step 6, which the sweep of step 7 sees


class Counting:
    """Counts directions that are drawn to replay updates."""

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self, theta: torch.Tensor, program: Program, *arguments: Any, **options: Any) -> None:
        self.drawn += len(program.seeds)
        apply_drawing(theta, program, *arguments, **options)


def opened(base: Path, run: Path, **policy: Any) -> Engine:
    return zeroth_order(
        open_checkpoint(base),
        MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False),
        perturbation=LowRankPerturbation(rank=2, period=PERIOD),
        journal=run / "journal.jsonl",
        write_back=WriteBackPolicy(directory=run, **policy),
    )


class Stopped(NamedTuple):
    """A base, a run of eight steps that was stopped, and the weights after one more step."""

    base: Path
    run: Path
    expected: dict[str, torch.Tensor]

    def copy(self, folder: Path, *, bare: bool = False) -> Path:
        """The run, with what it keeps of ended periods or without."""
        return shutil.copytree(self.run, folder, ignore=shutil.ignore_patterns("factors.*") if bare else None)

    def resume(self, run: Path, **policy: Any) -> int:
        """Take the ninth step, hold the weights against those of the whole run, and say how many directions were drawn."""
        drawing = Counting()
        with patch.object(perturbation, "apply_drawing", drawing):
            assert_equal(outcome(opened(self.base, run, **policy), [BATCH])[1], self.expected)
        return drawing.drawn

    def directions(self, steps: int) -> int:
        """How many are drawn to replay so many steps of all parameters, by the sweep of a step and a look at the weights."""
        model = open_checkpoint(self.base)
        model.weights.close()
        return (steps + 1) * sum(len(layout.parameters) for layout in model.layouts)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    tmp = tmp_path_factory.mktemp("periods")
    base = save_model(tmp / "base", small_config("llama"), torch.bfloat16)
    expected = outcome(opened(base, tmp / "whole"), [BATCH] * (STEPS + 1))[1]
    outcome(opened(base, tmp / "run"), [BATCH] * STEPS)
    return Stopped(base, tmp / "run", expected)


@pytest.fixture
def run(stopped: Stopped, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    return stopped.copy(tmp_path / "run")


def periods(run: Path) -> list[int]:
    """The last step of each period in the manifest."""
    return [json.loads(line)["version"] for line in (run / MANIFEST).read_bytes().splitlines()[1:]]


def test_a_resumed_run_draws_the_updates_of_the_open_period_alone(stopped: Stopped, run: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in run.iterdir()) == [DATA, MANIFEST, "journal.jsonl"]
    model = open_checkpoint(stopped.base)
    model.weights.close()
    planned = kept_bytes_a_step(LowRankPerturbation(rank=2, period=PERIOD), model.layouts)
    assert (run / DATA).stat().st_size == 2 * PERIOD * planned
    assert stopped.resume(run) == stopped.directions(STEPS % PERIOD)
    assert periods(run) == [3, 6, 9], "the step after ended the third period"
    bare = stopped.copy(tmp_path / "bare", bare=True)
    assert stopped.resume(bare) == stopped.directions(STEPS)
    for name in (DATA, MANIFEST):
        assert (bare / name).read_bytes() == (run / name).read_bytes()


def flipped(at: float) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = bytearray((run / DATA).read_bytes())
        data[int(at * len(data))] ^= 1
        (run / DATA).write_bytes(data)

    return damage


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: int(len(data) * share)])

    return damage


def garbled(run: Path) -> None:
    lines = (run / MANIFEST).read_bytes().splitlines(keepends=True)
    (run / MANIFEST).write_bytes(b"".join([lines[0], lines[1].replace(b"version", b"Version"), lines[2]]))


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (flipped(0.0), 0),  # the first matrix, in the first period
        (flipped(0.4), 0),
        (flipped(0.6), 1),
        (flipped(0.9999), 1),  # a vector of the last segment: after all others were read
        (cut(DATA, 0.75), 1),
        (cut(DATA, 0.0), 0),
        (lambda run: (run / DATA).unlink(), 0),
        (garbled, 3),  # found before anything was read: the periods are kept anew
    ],
)
def test_damage_is_told_and_replayed(damage: Callable[[Path], None], left: int, stopped: Stopped, run: Path) -> None:
    damage(run)
    with pytest.warns(ZO2Warning, match=r"factors\.jsonl: .* replayed from the journal"):
        drawn = stopped.resume(run)
    assert drawn > stopped.directions(STEPS % PERIOD)
    assert len(periods(run)) == left
    outcome(opened(stopped.base, run), [BATCH])  # whose sweep ends the periods again
    assert periods(run) == [3, 6, 9]


def test_what_the_system_refuses_is_told_and_costs_time_alone(stopped: Stopped, run: Path, tmp_path: Path) -> None:
    opened_before = durable.open_regular

    def refusing(path: Path, *arguments: Any) -> Any:
        if path.name == DATA:
            raise OSError(24, "Too many open files")
        return opened_before(path, *arguments)

    with (
        patch.object(durable, "open_regular", refusing),
        pytest.warns(ZO2Warning, match=r"factors\.jsonl: Too many open files"),
    ):
        assert stopped.resume(run) == stopped.directions(STEPS)
    assert (run / MANIFEST).read_bytes() == (stopped.run / MANIFEST).read_bytes(), "it may be read the next time"
    piped = stopped.copy(tmp_path / "piped")
    (piped / DATA).unlink()
    os.mkfifo(piped / DATA)
    with pytest.warns(ZO2Warning, match="no regular file"):
        assert stopped.resume(piped) == stopped.directions(STEPS)
    bare = stopped.copy(tmp_path / "bare", bare=True)
    full = patch.object(RangedFile, "write", side_effect=OSError(28, "No space left on device"))
    with full, pytest.warns(ZO2Warning, match=r"factors\.jsonl: No space left on device"):
        assert stopped.resume(bare) == stopped.directions(STEPS)
    assert not (bare / MANIFEST).exists(), "no period counts whose bytes are not there"


def test_sums_of_ended_periods_are_written_as_they_end(stopped: Stopped, tmp_path: Path) -> None:
    bare = stopped.copy(tmp_path / "bare", bare=True)
    written: list[int] = []  # bytes
    after_embedding: list[int] = []
    write, evaluate = RangedFile.write, SegmentVisitor._evaluate

    def writing(file: RangedFile, offset: int, data: memoryview) -> None:
        written.append(len(data))
        write(file, offset, data)

    def evaluating(visitor: SegmentVisitor, index: int) -> None:
        if index == 0:
            after_embedding.append(sum(written))
        evaluate(visitor, index)

    with (
        opened(stopped.base, bare) as engine,
        patch.object(RangedFile, "write", writing),
        patch.object(SegmentVisitor, "_evaluate", evaluating),
    ):
        engine.evaluate([BATCH])
    embedding = sum_elements(open_checkpoint(stopped.base).layouts[0].parameters, 2)
    assert after_embedding == [STEPS // PERIOD * 4 * sum(embedding.values())], "nothing waits for other segments"


def test_a_period_that_ended_since_the_first_read_can_be_read(stopped: Stopped, run: Path) -> None:
    with (run / DATA).open("ab") as file:
        file.write(bytes(1 << 14))  # of a period that was not counted
    with opened(stopped.base, run) as engine:
        while engine.version <= 3 * PERIOD:
            engine.step(BATCH)
        expected = weights(engine)
        store = engine._runner.factors
        assert store is not None
        store._sums.clear()  # as after a sweep that failed
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            now = weights(engine)
    assert_equal(now, expected)


def test_a_torn_manifest_counts_as_far_as_it_goes(stopped: Stopped, run: Path) -> None:
    cut(MANIFEST, 0.99)(run)  # as a crash leaves it
    assert stopped.resume(run) == stopped.directions(STEPS - PERIOD)
    assert periods(run) == [3, 6, 9]


def test_a_journal_that_lost_steps_is_refused(stopped: Stopped, run: Path) -> None:
    steps = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (run / "journal.jsonl").write_bytes(b"".join(steps[:5]))
    with pytest.raises(JournalError, match=r"at least [36], since .*factors\.jsonl knows of step [25]"):
        opened(stopped.base, run)


def test_periods_of_a_run_on_other_data_do_not_count(stopped: Stopped, run: Path, tmp_path: Path) -> None:
    other = [make_batch(40, [3, 9])] * STEPS  # the same options, and so the same header
    outcome(opened(stopped.base, tmp_path / "other"), other)
    for name in (DATA, MANIFEST):
        shutil.copyfile(tmp_path / "other" / name, run / name)
    assert stopped.resume(run) == stopped.directions(STEPS)


def test_bytes_and_journal_are_durable_before_a_period_counts(stopped: Stopped, run: Path) -> None:
    order: list[str] = []

    def noting(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            order.append(what)
            return method(*arguments)

        return noted

    with (
        opened(stopped.base, run) as engine,
        patch.object(RangedFile, "sync", noting("bytes", RangedFile.sync)),
        patch.object(RecordFile, "append", noting("record", RecordFile.append)),
        patch.object(Journal, "chain", noting("journal", Journal.chain)),
    ):
        engine.step(BATCH)
        order.clear()
        engine.evaluate([BATCH])
    assert order[0] == "journal"
    assert order[-2:] == ["bytes", "record"]


@pytest.mark.parametrize("policy", [{"every": None}, {"terabytes_per_1000_steps": 1e-9}])
def test_what_may_not_be_written_is_read_all_the_same(
    policy: dict[str, Any], stopped: Stopped, run: Path, tmp_path: Path
) -> None:
    assert stopped.resume(run, **policy) == stopped.directions(STEPS % PERIOD)
    assert (run / MANIFEST).read_bytes() == (stopped.run / MANIFEST).read_bytes()
    bare = stopped.copy(tmp_path / "bare", bare=True)
    assert stopped.resume(bare, **policy) == stopped.directions(STEPS)
    assert [path.name for path in bare.iterdir()] == ["journal.jsonl"]
