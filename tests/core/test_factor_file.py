"""Factors of ended periods on disk: a resumed run has the bits of one that was not, with them, without, and with damage."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import weights, zeroth_order
from models import make_batch, save_model, small_config
from parity import assert_same_weights

from zo2adapters import open_checkpoint
from zo2core import Engine, LowRankPerturbation, MeZOSGD, WriteBackPolicy, ZerothOrder, factors
from zo2core.errors import JournalError, ZO2Warning
from zo2core.factors import DATA, MANIFEST, kept_bytes_a_step, sum_elements
from zo2core.io.direct_file import RangedFile
from zo2core.io.record_log import RecordFile
from zo2core.journal import Journal
from zo2core.kernels import apply_drawing
from zo2core.sweep.visitor import SegmentVisitor
from zo2core.types import Program

Stopped = tuple[Path, Path, dict[str, torch.Tensor]]
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


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A base, a run of eight steps that was stopped, and the weights after one more step."""
    tmp = tmp_path_factory.mktemp("periods")
    base = save_model(tmp / "base", small_config("llama"), torch.bfloat16)
    with opened(base, tmp / "whole") as engine:
        for _ in range(STEPS + 1):
            engine.step(BATCH)
        expected = weights(engine)
    with opened(base, tmp / "run") as engine:
        for _ in range(STEPS):
            engine.step(BATCH)
    return base, tmp / "run", expected


def resumed(base: Path, run: Path, expected: dict[str, torch.Tensor], **policy: Any) -> int:
    """Take the ninth step, hold the weights against those of the whole run, and say how many directions were drawn."""
    drawing = Counting()
    with patch.object(factors, "apply_drawing", drawing), opened(base, run, **policy) as engine:
        engine.step(BATCH)
        assert_same_weights(weights(engine).items(), expected.items())
    return drawing.drawn


def directions(base: Path, steps: int) -> int:
    """How many are drawn to replay so many steps of all parameters, by the sweep of a step and a look at the weights."""
    model = open_checkpoint(base)
    model.weights.close()
    return (steps + 1) * sum(len(layout.parameters) for layout in model.layouts)


def test_a_resumed_run_draws_the_updates_of_the_open_period_alone(stopped: Stopped, tmp_path: Path) -> None:
    base, run, expected = stopped
    assert sorted(path.name for path in run.iterdir()) == [DATA, MANIFEST, "journal.jsonl"]
    model = open_checkpoint(base)
    model.weights.close()
    planned = kept_bytes_a_step(LowRankPerturbation(rank=2, period=PERIOD), model.layouts)
    assert (run / DATA).stat().st_size == 2 * PERIOD * planned
    kept = shutil.copytree(run, tmp_path / "kept")
    assert resumed(base, kept, expected) == directions(base, STEPS % PERIOD)
    assert len((kept / MANIFEST).read_bytes().splitlines()) == 1 + 3, "the step after ended the third period"
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("factors.*"))
    assert resumed(base, bare, expected) == directions(base, STEPS)
    assert (bare / DATA).read_bytes() == (kept / DATA).read_bytes()
    assert (bare / MANIFEST).read_bytes() == (kept / MANIFEST).read_bytes()


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
def test_damage_is_told_and_replayed(damage: Callable[[Path], None], left: int, stopped: Stopped, tmp_path: Path) -> None:
    base, run, expected = stopped
    run = shutil.copytree(run, tmp_path / "run")
    damage(run)
    with pytest.warns(ZO2Warning, match=r"factors\.jsonl: .* replayed from the journal"):
        drawn = resumed(base, run, expected)
    assert drawn > directions(base, STEPS % PERIOD)
    assert len((run / MANIFEST).read_bytes().splitlines()) == 1 + left
    with opened(base, run) as engine:  # whose sweep ends the periods again
        engine.step(BATCH)
    records = [json.loads(line) for line in (run / MANIFEST).read_bytes().splitlines()]
    assert [record["version"] for record in records[1:]] == [3, 6, 9]


def test_what_the_system_refuses_is_told_and_costs_time_alone(stopped: Stopped, tmp_path: Path) -> None:
    base, run, expected = stopped
    kept = shutil.copytree(run, tmp_path / "kept")
    refused = patch("zo2core.factors.open_regular", side_effect=OSError(24, "Too many open files"))
    with refused, pytest.warns(ZO2Warning, match=r"factors\.jsonl: Too many open files"):
        assert resumed(base, kept, expected) == directions(base, STEPS)
    assert (kept / MANIFEST).read_bytes() == (run / MANIFEST).read_bytes(), "it may be read the next time"
    piped = shutil.copytree(run, tmp_path / "piped", ignore=shutil.ignore_patterns(DATA))
    os.mkfifo(piped / DATA)
    with pytest.warns(ZO2Warning, match="no regular file"):
        assert resumed(base, piped, expected) == directions(base, STEPS)
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("factors.*"))
    full = patch.object(RangedFile, "write", side_effect=OSError(28, "No space left on device"))
    with full, pytest.warns(ZO2Warning, match=r"factors\.jsonl: No space left on device"):
        assert resumed(base, bare, expected) == directions(base, STEPS)
    again = shutil.copytree(bare, tmp_path / "again")
    assert not (again / MANIFEST).exists(), "no period counts whose bytes are not there"


def test_sums_of_ended_periods_are_written_as_they_end(stopped: Stopped, tmp_path: Path) -> None:
    base, run, _ = stopped
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("factors.*"))
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
        opened(base, bare) as engine,
        patch.object(RangedFile, "write", writing),
        patch.object(SegmentVisitor, "_evaluate", evaluating),
    ):
        engine.evaluate([BATCH])
    embedding = sum_elements(open_checkpoint(base).layouts[0].parameters, 2)
    assert after_embedding == [STEPS // PERIOD * 4 * sum(embedding.values())], "nothing waits for other segments"


def test_a_period_that_ended_since_the_first_read_can_be_read(stopped: Stopped, tmp_path: Path) -> None:
    base, run, _ = stopped
    run = shutil.copytree(run, tmp_path / "run")
    with (run / DATA).open("ab") as file:
        file.write(bytes(1 << 14))  # of a period that was not counted
    with opened(base, run) as engine:
        while engine.version <= 3 * PERIOD:
            engine.step(BATCH)
        expected = weights(engine)
        store = engine._runner.factors
        assert store is not None
        store._sums.clear()  # as after a sweep that failed
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            now = weights(engine)
    assert_same_weights(now.items(), expected.items())


def test_a_torn_manifest_counts_as_far_as_it_goes(stopped: Stopped, tmp_path: Path) -> None:
    base, run, expected = stopped
    run = shutil.copytree(run, tmp_path / "run")
    cut(MANIFEST, 0.99)(run)  # as a crash leaves it
    drawn = resumed(base, run, expected)
    assert drawn == directions(base, STEPS - PERIOD)
    assert len((run / MANIFEST).read_bytes().splitlines()) == 1 + 3


def test_a_journal_that_lost_steps_is_refused(stopped: Stopped, tmp_path: Path) -> None:
    base, run, _ = stopped
    run = shutil.copytree(run, tmp_path / "run")
    steps = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (run / "journal.jsonl").write_bytes(b"".join(steps[:5]))
    with pytest.raises(JournalError, match=r"at least [36], since .*factors\.jsonl knows of step [25]"):
        opened(base, run)


def test_periods_of_a_run_on_other_data_do_not_count(stopped: Stopped, tmp_path: Path) -> None:
    base, run, expected = stopped
    with opened(base, tmp_path / "other") as engine:  # the same options, and so the same header
        for _ in range(STEPS):
            engine.step(make_batch(40, [3, 9]))
    run = shutil.copytree(run, tmp_path / "run")
    for name in (DATA, MANIFEST):
        shutil.copyfile(tmp_path / "other" / name, run / name)
    assert resumed(base, run, expected) == directions(base, STEPS)


def test_bytes_and_journal_are_durable_before_a_period_counts(stopped: Stopped, tmp_path: Path) -> None:
    base, run, _ = stopped
    order: list[str] = []

    def noting(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            order.append(what)
            return method(*arguments)

        return noted

    with (
        opened(base, shutil.copytree(run, tmp_path / "run")) as engine,
        patch.object(RangedFile, "sync", noting("bytes", RangedFile.sync)),
        patch.object(RecordFile, "append", noting("record", RecordFile.append)),
        patch.object(Journal, "chain", noting("journal", Journal.chain)),
    ):
        engine.step(BATCH)
        order.clear()
        engine.evaluate([BATCH])
    assert order[0] == "journal"
    assert order[-2:] == ["bytes", "record"]


def test_periods_of_another_run_do_not_count(stopped: Stopped, tmp_path: Path) -> None:
    base, run, expected = stopped
    run = shutil.copytree(run, tmp_path / "run")
    (run / "journal.jsonl").unlink()
    with Engine(
        open_checkpoint(base),
        ZerothOrder(
            MeZOSGD(lr=2e-2, zo_eps=1e-2, perturb_in_place=False),
            seed=1,
            perturbation=LowRankPerturbation(rank=2, period=PERIOD),
        ),
        journal=run / "journal.jsonl",
        write_back=WriteBackPolicy(directory=run),
    ) as engine:
        for _ in range(PERIOD + 1):
            engine.step(BATCH)
        others = weights(engine)
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in others.items())
    header, *records = map(json.loads, (run / MANIFEST).read_bytes().splitlines())
    assert [record["version"] for record in records] == [PERIOD]
    assert header["chain"] != json.loads((stopped[1] / MANIFEST).read_bytes().splitlines()[0])["chain"]


@pytest.mark.parametrize("policy", [{"every": None}, {"terabytes_per_1000_steps": 1e-9}])
def test_what_may_not_be_written_is_read_all_the_same(policy: dict[str, Any], stopped: Stopped, tmp_path: Path) -> None:
    base, run, expected = stopped
    kept = shutil.copytree(run, tmp_path / "kept")
    assert resumed(base, kept, expected, **policy) == directions(base, STEPS % PERIOD)
    assert (kept / MANIFEST).read_bytes() == (run / MANIFEST).read_bytes()
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("factors.*"))
    assert resumed(base, bare, expected, **policy) == directions(base, STEPS)
    assert [path.name for path in bare.iterdir()] == ["journal.jsonl"]
