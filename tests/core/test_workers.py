"""Several workers on one run: the bits of one worker, journals that are equal byte for byte, and nothing nearly right."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import simulate_workers
import torch
from crews import KEY, all_equal, attempted, client_of, opened_store, processes, worked
from hypothesis import given, settings
from hypothesis import strategies as st
from models import make_batch, save_model, small_config
from parity import assert_same_bits
from toy import ToyBlockModel

from zo2adapters import open_checkpoint
from zo2core import (
    FZOO,
    BatchError,
    ClosedError,
    Distribution,
    Guarded,
    Journal,
    JournalError,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    NonFiniteLossError,
    OptionError,
    OutrunError,
    PerRowRGE,
    PhiloxNoise,
    Replayer,
    Update,
    WorkerError,
    Workers,
    WriteBackPolicy,
    ZOEngine,
    ZOEstimator,
)
from zo2core.io.shared_memory import SharedMemory
from zo2core.journal.damage import ImpossibleRecordError
from zo2core.journal.step_records import decode, encode
from zo2core.planning.host_budget import free_memory, resident_memory
from zo2core.planning.host_plan import HostPlan
from zo2core.sources.shared import SharedSource
from zo2core.types import Evaluation
from zo2core.workers import Split
from zo2core.workers.exchange import TCPStore
from zo2core.workers.messages import COLLECTOR, AllGather, unbundled
from zo2core.workers.report import Report, combined
from zo2core.workers.seal import SEAL_BYTES, Seal
from zo2core.workers.shards import choose_split, evaluations_apart

STEPS = 4
RGE = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=3, weight_decay=0.1)
ESTIMATORS: dict[str, ZOEstimator] = {
    "mezo": MeZOSGD(lr=1e-2, zo_eps=1e-2),
    "rge": RGE,
    "rge from the weights": replace(RGE, perturb_in_place=False),
    "fzoo": FZOO(lr=1e-2, zo_eps=1e-2, q=3),
    "a row each": PerRowRGE(lr=1e-2, zo_eps=1e-2, q=4, perturb_in_place=False),
    "guarded": Guarded(estimator=RGE),
}


def toy(folder: Path, *, dtype: torch.dtype = torch.float32, tied: bool = True) -> ToyBlockModel:
    folder.mkdir(parents=True, exist_ok=True)
    return ToyBlockModel(11, 8, 3, tied=tied, dtype=dtype, file=folder / "toy.safetensors")


def batch_of(seed: int, rows: int = 4) -> dict[str, torch.Tensor]:
    """Rows of which each has another number of labelled tokens."""
    ids = torch.randint(0, 11, (rows, 7), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 1 + row % 5] = -100
    return {"input_ids": ids, "labels": labels}


def weights(engine: ZOEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.parameters_now()}


def trained(folder: Path, estimator: ZOEstimator, workers: Workers | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """Run a few steps on the toy in a folder of its own; the journal stays there."""
    steps = options.pop("steps", STEPS)
    with ZOEngine(toy(folder), estimator, journal=folder / "journal.jsonl", workers=workers, **options) as engine:
        for step in range(engine.version, steps):
            engine.step(batch_of(step))
        return weights(engine)


def crew(folder: Path, size: int, estimator: ZOEstimator, split: str = "auto", **options: Any) -> dict[str, torch.Tensor]:
    """The same by workers; journals and weights are compared."""
    made = worked(size, lambda workers: trained(folder / str(workers.rank), estimator, workers, **options), split=split)
    assert all_equal([(folder / str(rank) / "journal.jsonl").read_bytes() for rank in range(size)])
    for own in made[1:]:
        assert_equal_weights(own, made[0])
    return made[0]


def assert_equal_weights(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert_same_bits(name, tensor, theirs[name])


def updates_of(folder: Path) -> list[Update]:
    return list(Journal(folder / "journal.jsonl").updates)


# --- shares


@given(size=st.integers(1, 12), evaluations=st.integers(1, 20), rows=st.integers(1, 12), unit=st.sampled_from([1, 2]))
def test_every_row_of_every_evaluation_is_one_workers(size: int, evaluations: int, rows: int, unit: int) -> None:
    evaluations *= unit
    try:
        split = choose_split("auto", size, evaluations // unit, rows)
    except OptionError:
        divisors = [groups for groups in range(1, size + 1) if size % groups == 0]
        assert not any(groups <= evaluations // unit and size // groups <= rows for groups in divisors)
        return
    taken = [
        (place, row)
        for rank in range(size)
        for share in [split.shard(rank, evaluations, unit)]
        for place in share.evaluations
        for row in range(*share.rows(rows).indices(rows))
    ]
    assert sorted(taken) == list(itertools.product(range(evaluations), range(rows)))
    assert all(split.shard(rank, evaluations, unit).evaluations for rank in range(size))
    assert all(split.shard(rank, evaluations, unit).evaluations.start % unit == 0 for rank in range(size))


def test_a_split_is_the_one_that_was_asked_for_or_the_one_with_the_least_to_do() -> None:
    assert choose_split("directions", 2, 8, 4) == Split(2, 1)
    assert choose_split("rows", 2, 8, 4) == Split(1, 2)
    assert choose_split("2x3", 6, 8, 4) == Split(2, 3)
    assert choose_split("auto", 4, 8, 4) == Split(4, 1)  # of equal ones that by directions
    assert choose_split("auto", 4, 2, 4) == Split(2, 2)
    assert choose_split("auto", 3, 2, 9) == Split(1, 3)
    for asked, size, units, rows in [("directions", 4, 2, 9), ("rows", 4, 9, 2), ("rows", 2, 2, None), ("2x3", 4, 9, 9)]:
        with pytest.raises(OptionError, match="split"):
            choose_split(asked, size, units, rows)
    for name in ["columns", "0x2", "2x", "", "2X2"]:
        with pytest.raises(OptionError, match="split"):
            choose_split(name, 1, 1, 1)


def test_directions_stay_whole_where_a_worker_may_be_left_out() -> None:
    pairs = [Evaluation(seed, shift) for seed in (1, 2) for shift in (1.0, -1.0)]
    assert evaluations_apart(pairs, whole=False) == 1
    assert evaluations_apart(pairs, whole=True) == 2
    with pytest.raises(OptionError, match="deadline"):
        evaluations_apart([Evaluation(1, 0.0), *pairs], whole=True)
    with pytest.raises(OptionError, match="deadline"):
        evaluations_apart([Evaluation(1, 0.0), Evaluation(2, 1.0)], whole=True)


# --- the bits of one worker


@settings(max_examples=12)
@given(
    name=st.sampled_from(sorted(ESTIMATORS)),
    size=st.sampled_from([2, 3, 4]),
    counter=st.booleans(),
    storage=st.sampled_from(["shared", "resident", "streamed", "written"]),
    stops=st.booleans(),
)
def test_by_directions_every_bit_is_that_of_one_worker(
    tmp_path_factory: pytest.TempPathFactory, name: str, size: int, counter: bool, storage: str, stops: bool
) -> None:
    folder = tmp_path_factory.mktemp("run")
    estimator = ESTIMATORS[name]
    units = len(estimator.evaluations(0, iter(range(99))))
    size = min(size, units)
    options: dict[str, Any] = {}
    if counter or name == "fzoo":
        options["noise"] = PhiloxNoise(Distribution.RADEMACHER)
    alone = trained(folder / "alone", estimator, **options)
    if storage in ("streamed", "resident"):
        buckets = 1 if storage == "streamed" else None
        options["memory"] = MemoryPolicy(host=HostPlan((), budget=2**28, buckets=buckets, keep_noise=False))
    if storage == "written":
        made = worked(
            size,
            lambda workers: trained(
                folder / str(workers.rank),
                estimator,
                workers,
                write_back=WriteBackPolicy(directory=folder / str(workers.rank), every=2),
                **options,
            ),
            split="directions",
        )
        together = made[0]
    else:
        if stops:
            crew(folder, size, estimator, "directions", steps=2, **options)
        together = crew(folder, size, estimator, "directions", **options)
    assert_equal_weights(together, alone)
    for ours, theirs in zip(updates_of(folder / "0"), updates_of(folder / "alone"), strict=True):
        assert replace(ours, workers=()) == theirs
        assert ours.workers == tuple(range(size))


@pytest.mark.parametrize("precision", ["exact", "mixed"])
@pytest.mark.parametrize("kind", ["opt", "llama", "qwen2", "qwen3"])
def test_every_adapter_gives_the_bits_of_one_worker(tmp_path: Path, kind: str, precision: str) -> None:
    base = save_model(tmp_path / "base", small_config(kind), torch.bfloat16)
    batch = make_batch(40, [6, 3, 5, 4])

    def run(workers: Workers | None) -> dict[str, torch.Tensor]:
        rank = "alone" if workers is None else workers.rank
        with ZOEngine(models[rank], replace(RGE, q=2), journal=tmp_path / f"{rank}.jsonl", workers=workers) as engine:
            for _ in range(3):
                engine.step(batch)
            return weights(engine)

    models = {rank: open_checkpoint(base, precision=precision, dtype="bfloat16") for rank in ("alone", 0, 1, 2, 3)}
    alone = run(None)
    for own in worked(4, run, split="directions"):
        assert_equal_weights(own, alone)
    assert all_equal([(tmp_path / f"{rank}.jsonl").read_bytes() for rank in range(4)])


@pytest.mark.parametrize("buckets", [None, 1], ids=["resident", "streamed"])
@pytest.mark.parametrize("kind", ["opt", "llama", "qwen2", "qwen3"])
def test_every_adapter_deals_rows_and_directions(tmp_path: Path, kind: str, buckets: int | None) -> None:
    base = save_model(tmp_path / "base", small_config(kind))
    batch = make_batch(40, [6, 3, 5, 4])
    models = {rank: open_checkpoint(base) for rank in ("alone", 0, 1, 2, 3)}
    memory = MemoryPolicy(host=HostPlan((), budget=2**28, buckets=buckets, keep_noise=False))

    def run(workers: Workers | None) -> dict[str, torch.Tensor]:
        rank = "alone" if workers is None else workers.rank
        options: dict[str, Any] = {"journal": tmp_path / f"{rank}.jsonl", "memory": memory, "workers": workers}
        with ZOEngine(models[rank], replace(RGE, q=2), noise=PhiloxNoise(Distribution.GAUSSIAN), **options) as engine:
            for _ in range(3):
                engine.step(batch)
            return weights(engine)

    alone = run(None)
    made = worked(4, run, split="2x2")
    assert all_equal([(tmp_path / f"{rank}.jsonl").read_bytes() for rank in range(4)])
    for own in made:
        assert_equal_weights(own, made[0])
    for name, tensor in made[0].items():
        torch.testing.assert_close(tensor, alone[name], atol=1e-3, rtol=1e-3)


def literal_by_rows(folder: Path, parts: int, estimator: ZOEstimator) -> dict[str, torch.Tensor]:
    """One worker that runs each part of the rows apart, and joins the losses as the definition says."""
    with ZOEngine(toy(folder), estimator, journal=folder / "journal.jsonl") as engine:
        for step in range(STEPS):
            batch = batch_of(step)
            cuts = [slice(part * 4 // parts, (part + 1) * 4 // parts) for part in range(parts)]
            pieces = [{name: tensor[rows] for name, tensor in batch.items()} for rows in cuts]
            tokens = [int((piece["labels"][:, 1:] != -100).sum()) for piece in pieces]
            losses = []
            for at in engine.ask():
                own = [loss.double().item() for sweep in engine.forwards(pieces, at=at) for loss in sweep]
                total = 0.0
                for loss, count in zip(own, tokens, strict=True):
                    total += loss * count
                losses.append(total / sum(tokens))
            engine.tell(losses)
        return weights(engine)


@pytest.mark.parametrize("split", ["1x2", "1x4", "2x2", "3x1"])
def test_by_rows_losses_are_means_over_all_tokens_in_double_precision(tmp_path: Path, split: str) -> None:
    groups, parts = map(int, split.split("x"))
    together = crew(tmp_path, groups * parts, RGE, split)
    if parts == 1:
        assert_equal_weights(together, trained(tmp_path / "alone", RGE))
        return
    assert_equal_weights(together, literal_by_rows(tmp_path / "alone", parts, RGE))
    single = trained(tmp_path / "single", RGE)
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, single[name], atol=1e-4, rtol=1e-4)


def test_a_part_without_a_labelled_token_says_nothing(tmp_path: Path) -> None:
    batch = batch_of(0)
    batch["labels"][:2] = -100
    kept = {name: tensor[2:] for name, tensor in batch.items()}

    def run(workers: Workers | None, own: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
        folder = tmp_path / ("alone" if workers is None else str(workers.rank))
        with ZOEngine(toy(folder), RGE, journal=folder / "journal.jsonl", workers=workers) as engine:
            return engine.step(own).losses

    by_rows = worked(2, lambda workers: run(workers, batch), split="rows")
    assert by_rows[0] == by_rows[1] == run(None, kept)
    assert (tmp_path / "0" / "journal.jsonl").read_bytes() == (tmp_path / "1" / "journal.jsonl").read_bytes()


def test_beside_the_activations_stacks_of_one_size_give_the_same_bits(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    batch = make_batch(40, [6, 3])
    models = {rank: open_checkpoint(base) for rank in ("alone", 0, 1)}
    estimator = replace(RGE, q=2, perturb_in_place=False, weight_decay=0.0)

    def run(workers: Workers | None) -> dict[str, torch.Tensor]:
        rank = "alone" if workers is None else workers.rank
        options: dict[str, Any] = {"perturbation": LowRankPerturbation(rank=2, stack=2), "workers": workers}
        with ZOEngine(models[rank], estimator, journal=tmp_path / f"{rank}.jsonl", **options) as engine:
            for _ in range(3):
                engine.step(batch)
            return weights(engine)

    alone = run(None)
    for own in worked(2, run):
        assert_equal_weights(own, alone)


def test_losses_that_a_caller_makes_are_shared_out_by_directions(tmp_path: Path) -> None:
    def run(workers: Workers | None) -> dict[str, torch.Tensor]:
        folder = tmp_path / ("alone" if workers is None else str(workers.rank))
        with ZOEngine(toy(folder), RGE, journal=folder / "journal.jsonl", workers=workers) as engine:
            for step in range(2):
                asked = engine.ask()
                assert len(asked) == (6 if workers is None else 3)
                losses = [loss for at in asked for sweep in engine.forwards([batch_of(step)], at=at) for loss in sweep]
                engine.tell(losses)
            return weights(engine)

    alone = run(None)
    for own in worked(2, run):
        assert_equal_weights(own, alone)
    [error, _] = attempted(2, run, split="rows")
    assert isinstance(error, OptionError)
    assert "cannot be sharded" in str(error)


def test_an_evaluation_is_that_of_one_worker(tmp_path: Path) -> None:
    batches = [batch_of(seed, rows=1 + seed % 3) for seed in range(5)]

    def run(workers: Workers | None) -> tuple[float, tuple[float, ...], int]:
        folder = tmp_path / ("alone" if workers is None else str(workers.rank))
        with ZOEngine(toy(folder), RGE, workers=workers) as engine:
            result = engine.evaluate(batches)
            return result.loss, result.losses, result.tokens

    alone = run(None)
    for size in (2, 3, 7):  # of seven, two have nothing to do
        assert worked(size, run) == [alone] * size

    def looked_at(workers: Workers) -> tuple[float, tuple[float, ...], int]:
        with Replayer(toy(tmp_path / f"looked at {workers.rank}"), workers=workers) as replayer:
            result = replayer.evaluate(batches)
            return result.loss, result.losses, result.tokens

    assert worked(2, looked_at) == [alone] * 2


def test_workers_of_a_host_have_one_copy_of_the_model(tmp_path: Path) -> None:
    def run(workers: Workers) -> tuple[int, list[int]]:
        folder = tmp_path / str(workers.rank)
        with ZOEngine(toy(folder), RGE, workers=workers) as engine:
            engine.step(batch_of(0))
            source = engine._parts.source
            assert isinstance(source, SharedSource)
            assert engine.host_plan is not None
            assert any("2 workers share" in part.name for part in engine.host_plan.parts)
            return os.fstat(source._memory.descriptor).st_ino, source._marks.tolist()

    (inode, marks), (other, same_marks) = worked(2, run)
    assert inode == other
    assert marks == same_marks
    assert set(marks) == {1}  # read, and not yet replayed

    def alone(workers: Workers) -> bool:
        folder = tmp_path / f"written {workers.rank}"
        policy = WriteBackPolicy(directory=folder, every=1)
        with ZOEngine(toy(folder), RGE, workers=workers, write_back=policy) as engine:
            return isinstance(engine._parts.source, SharedSource)

    assert worked(2, alone) == [False, False]

    def mixed(workers: Workers) -> bool:
        folder = tmp_path / f"mixed {workers.rank}"
        policy = WriteBackPolicy(directory=folder, every=1) if workers.rank == 0 else None
        with ZOEngine(toy(folder), RGE, workers=workers, write_back=policy) as engine:
            return isinstance(engine._parts.source, SharedSource)

    assert worked(2, mixed) == [False, False]


def test_memory_that_cannot_be_shared_is_refused_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    before = sorted(os.listdir("/proc/self/fd"))
    for name in ("os.ftruncate", "mmap.mmap"):
        with monkeypatch.context() as patch:
            patch.setattr(name, failing)
            with pytest.raises(OSError, match="no memory"):
                SharedMemory.create(4096)
    assert sorted(os.listdir("/proc/self/fd")) == before

    def run(workers: Workers) -> SharedMemory:
        with monkeypatch.context() as patch:
            if workers.rank == 0:
                patch.setattr(SharedMemory, "create", failing)
            return workers.shared_memory(4096)

    for error in attempted(2, run):
        assert isinstance(error, WorkerError)
        assert "worker 0: found memory that cannot be shared" in str(error)


def test_a_source_that_cannot_be_made_closes_what_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    closed: list[SharedMemory] = []
    close = SharedMemory.close

    def noted(memory: SharedMemory) -> None:
        closed.append(memory)
        close(memory)

    monkeypatch.setattr("zo2core.sources.segment_source.SegmentLoader", failing)
    monkeypatch.setattr(SharedMemory, "close", noted)
    outcomes = attempted(2, lambda workers: trained(tmp_path / str(workers.rank), RGE, workers))
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 2
    assert len(closed) == 2


def test_bytes_that_a_worker_lost_in_the_middle_of_a_replay_are_made_again(tmp_path: Path) -> None:
    """One worker fails half-way through a segment; the bytes were changed already. Another one then finds them marked."""
    alone = trained(tmp_path / "alone", RGE)
    failed = threading.Event()

    def fail(source: SharedSource) -> None:
        with contextlib.suppress(ZeroDivisionError), source.turn(1) as turn, turn.changing(1):
            source._pages[1].fill_(77)
            raise ZeroDivisionError

    def run(workers: Workers) -> dict[str, torch.Tensor]:
        folder = tmp_path / str(workers.rank)
        with ZOEngine(toy(folder), RGE, workers=workers, journal=folder / "journal.jsonl") as engine:
            engine.step(batch_of(0))
            source = engine._parts.source
            assert isinstance(source, SharedSource)
            if workers.rank == 0:
                fail(source)
                failed.set()
            assert failed.wait(20)
            for step in range(1, STEPS):
                engine.step(batch_of(step))
            return weights(engine)

    for own in worked(2, run):
        assert_equal_weights(own, alone)


# --- what is told


def test_a_report_is_what_was_told_and_weighs_nine_bytes_and_eight_a_loss() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        losses = [torch.tensor(value, dtype=dtype) for value in (0.1, -3.0, float("inf"))]
        report = Report.of(losses, tokens=7, context=2**32 - 1)
        assert Report.unpacked(report.packed(), 0) == report
        assert len(report.packed()) == 9 + 8 * 3
        assert [torch.tensor(value, dtype=dtype) for value in report.losses] == losses
    for damaged in (b"", report.packed()[:-1], report.packed() + b"\0", bytes(8) + b"\xff"):
        with pytest.raises(WorkerError, match="worker 5"):
            Report.unpacked(damaged, 5)


def test_losses_of_another_share_are_refused() -> None:
    split = Split(2, 1)
    with pytest.raises(WorkerError, match="worker 1"):
        combined({0: Report(1, 0, (1.0,)), 1: Report(1, 0, (1.0, 2.0))}, split, 2, 1)


def test_losses_of_several_dtypes_are_refused() -> None:
    reports = {
        rank: Report(1, 0, (1.0,), dtype) for rank, dtype in enumerate([torch.float32, torch.float32, torch.bfloat16])
    }
    with pytest.raises(WorkerError, match="worker 2: found losses in"):
        combined(reports, Split(3, 1), 3, 1)


def test_parts_of_the_rows_are_summed_in_the_order_of_ranks() -> None:
    parts = [(1e16, 1), (1.0, 1), (-1e16, 1), (3.0, 5)]
    reports = {rank: Report(tokens, 0, (loss,)) for rank, (loss, tokens) in reversed(list(enumerate(parts)))}
    total = 0.0
    for loss, tokens in parts:
        total += loss * tokens
    [joined] = combined(reports, Split(1, 4), 1, 1).values()
    assert joined.dtype == torch.float64
    assert joined.item() == total / 8
    assert total != sum(loss * tokens for loss, tokens in reversed(parts))


def sent_bytes() -> int:
    """Bytes that this process's sockets have sent and that have arrived, as the kernel counts them (tcpi_bytes_acked)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as own:
                    own.getpeername()
                    total += struct.unpack_from("Q", own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 120)[0]
    return total


def worker_alone(port: int, rank: int, size: int, folder: Path, steps: int, told: Any) -> None:
    """A worker in a process of its own, which tells how many bytes a step it sent."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with (
        Workers.joined(rank=rank, size=size, store=store, key=KEY, timeout=60.0, split="directions") as workers,
        ZOEngine(toy(folder), replace(RGE, q=2), workers=workers) as engine,
    ):
        engine.step(batch_of(0))
        before = sent_bytes()
        for step in range(steps):
            engine.step(batch_of(step))
        told.put((sent_bytes() - before) / steps)


@pytest.mark.parametrize("size", [2, 4])
def test_a_worker_sends_few_bytes_a_step(tmp_path: Path, size: int) -> None:
    """Measured at its socket, and so with all that the store adds: at most 64 and 16 a loss."""
    store, steps = opened_store(), 20
    context = processes()
    told = context.Queue()
    others = [
        context.Process(target=worker_alone, args=(store.port, rank, size, tmp_path / str(rank), steps, told))
        for rank in range(1, size)
    ]
    for process in others:
        process.start()
    with (
        Workers.joined(rank=0, size=size, store=store, key=KEY, timeout=60.0, split="directions") as workers,
        ZOEngine(toy(tmp_path / "0"), replace(RGE, q=2), workers=workers) as engine,
    ):
        for step in (0, *range(steps)):
            engine.step(batch_of(step))
    for process in others:
        process.join()
    sent = [told.get(timeout=10) for _ in others]
    losses = 4 // size
    assert all(0 < own <= 64 + 16 * losses for own in sent), sent


# --- journals


def test_a_late_worker_takes_what_it_missed_and_goes_on(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", RGE, steps=6)
    crew(tmp_path, 2, RGE, "directions", steps=3)
    (tmp_path / "2").mkdir()
    worked(3, lambda workers: trained(tmp_path / str(workers.rank), RGE, workers, steps=4), split="directions")
    Path(tmp_path / "0" / "journal.jsonl").unlink()  # the longest is another's now
    together = crew(tmp_path, 3, RGE, "directions", steps=6)
    assert_equal_weights(together, alone)
    assert [len(update.workers) for update in updates_of(tmp_path / "0")] == [2, 2, 2, 3, 3, 3]


def test_a_worker_killed_before_its_record_takes_it_from_the_others(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", RGE)
    crew(tmp_path, 2, RGE, "directions", steps=3)
    path = tmp_path / "0" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    assert_equal_weights(crew(tmp_path, 2, RGE, "directions"), alone)


def test_a_journal_of_another_run_is_refused_and_left(tmp_path: Path) -> None:
    trained(tmp_path / "0", RGE, steps=3)
    trained(tmp_path / "1", RGE, steps=2, seed=5)
    before = (tmp_path / "1" / "journal.jsonl").read_bytes()
    for error in attempted(2, lambda workers: trained(tmp_path / str(workers.rank), RGE, workers)):
        assert isinstance(error, WorkerError)
        assert "worker 1" in str(error)
        assert "does not belong to worker 0's run" in str(error)
    assert (tmp_path / "1" / "journal.jsonl").read_bytes() == before


def test_other_options_are_spelled_out(tmp_path: Path) -> None:
    estimators = [RGE, replace(RGE, lr=5e-3)]
    errors = attempted(
        2, lambda workers: trained(tmp_path / str(workers.rank), estimators[workers.rank], workers), timeout=3.0
    )
    assert isinstance(errors[1], JournalError)
    assert "estimator.lr 0.01" in str(errors[1])
    assert "estimator.lr 0.005" in str(errors[1])
    assert not (tmp_path / "1" / "journal.jsonl").exists()


@pytest.mark.parametrize("what", ["batch", "seed"])
def test_workers_on_other_steps_are_refused(tmp_path: Path, what: str) -> None:
    def run(workers: Workers) -> None:
        folder = tmp_path / str(workers.rank)
        with ZOEngine(toy(folder), RGE, journal=folder / "journal.jsonl", workers=workers) as engine:
            seed = workers.rank if what == "seed" else None
            engine.step(batch_of(workers.rank if what == "batch" else 0), seed=seed)

    for error in attempted(2, run, split="directions"):
        assert isinstance(error, WorkerError)
        assert "another batch" in str(error)
    assert updates_of(tmp_path / "0") == updates_of(tmp_path / "1") == []


def test_a_loss_that_is_not_finite_ends_the_step_on_all_workers(tmp_path: Path) -> None:
    def run(workers: Workers) -> None:
        folder = tmp_path / str(workers.rank)
        with ZOEngine(toy(folder), RGE, journal=folder / "journal.jsonl", workers=workers) as engine:
            losses = [float("nan") if workers.rank == 1 else 1.0 for _ in engine.ask()]
            engine.tell(losses)

    for error in attempted(2, run, split="directions"):
        assert isinstance(error, NonFiniteLossError)


# --- seals


def test_a_message_counts_for_its_sender_its_round_and_its_key_alone() -> None:
    seal, other = Seal(b"key"), Seal(b"another")
    message = seal.sealed(b"said", name="3", sender=1)
    assert seal.opened(message, name="3", sender=1) == b"said"
    assert seal.opened(message, name="4", sender=1) is None
    assert seal.opened(message, name="3", sender=0) is None
    assert other.opened(message, name="3", sender=1) is None
    assert seal.derived(b"a").opened(message, name="3", sender=1) is None
    for place in range(len(message)):
        damaged = bytearray(message)
        damaged[place] ^= 1
        assert seal.opened(bytes(damaged), name="3", sender=1) is None
    assert seal.opened(b"", name="3", sender=1) is None


def test_a_bundle_has_what_was_said_or_is_none() -> None:
    seal = Seal(b"key")
    collected = AllGather("7", 4, seal)
    for rank in (2, 0, 3):
        assert collected.add(rank, seal.sealed(bytes([rank]), name="7", sender=rank))
    assert not collected.add(1, seal.sealed(b"x", name="6", sender=1))
    assert not collected.add(1, seal.sealed(b"x", name="7", sender=2))
    assert not collected.add(9, seal.sealed(b"x", name="7", sender=9))
    assert collected.missing == [1]
    bundle = collected.bundle()
    assert unbundled(bundle, "7", seal) == {0: b"\0", 2: b"\2", 3: b"\3"}
    assert list(unbundled(bundle, "7", seal) or ()) == [0, 2, 3]
    assert unbundled(bundle, "8", seal) is None
    assert unbundled(bundle[:-1], "7", seal) is None
    altered = bytearray(bundle[SEAL_BYTES:])
    altered[-1] ^= 1  # by the collector itself, which has the key
    assert unbundled(seal.sealed(bytes(altered), name="7", sender=COLLECTOR), "7", seal) is None
    forged = Seal(b"guess")
    entries = AllGather("7", 1, forged)
    entries.add(0, forged.sealed(b"x", name="7", sender=0))
    assert unbundled(entries.bundle(), "7", seal) is None


def test_a_worker_without_the_key_is_refused(tmp_path: Path) -> None:
    outcomes = attempted(2, lambda workers: workers.all_gather(1.0), key=[b"one" * 8, b"two" * 8], timeout=3.0)
    assert isinstance(outcomes[0], WorkerError)
    assert "key" in str(outcomes[0])
    assert isinstance(outcomes[1], WorkerError)


def test_who_is_silent_is_named() -> None:
    store = opened_store()
    client_of(store)
    workers = Workers.joined(rank=0, size=2, store=store, key=KEY, timeout=0.3)
    with pytest.raises(WorkerError, match="worker 1"):
        workers.all_gather(1.0)
    workers.close("the test has ended")


# --- a deadline


def test_what_comes_too_late_does_not_count_and_the_record_says_so(tmp_path: Path) -> None:
    decided, caught_up = threading.Event(), threading.Event()

    def run(workers: Workers) -> dict[str, torch.Tensor]:
        folder = tmp_path / str(workers.rank)
        with ZOEngine(toy(folder), replace(RGE, q=2), journal=folder / "journal.jsonl", workers=workers) as engine:
            for step in range(5):
                losses = [
                    loss for at in engine.ask() for sweep in engine.forwards([batch_of(step)], at=at) for loss in sweep
                ]
                if workers.rank == 1 and step == 2:
                    assert decided.wait(60)
                engine.tell(losses)
                if step == 2:
                    (caught_up if workers.rank == 1 else decided).set()
                    assert caught_up.wait(60)
            return weights(engine)

    made = worked(2, run, split="directions", deadline=3.0)
    assert_equal_weights(*made)
    updates = updates_of(tmp_path / "0")
    assert updates == updates_of(tmp_path / "1")
    assert [update.workers for update in updates] == [(0, 1), (0, 1), (0,), (0, 1), (0, 1)]
    assert [len(update.seeds) for update in updates] == [2, 2, 1, 2, 2]
    assert [update.lr for update in updates] == [5e-3, 5e-3, 1e-2, 5e-3, 5e-3]
    replayed = Journal(tmp_path / "0" / "journal.jsonl")
    with ZOEngine(toy(tmp_path / "replayed"), replace(RGE, q=2), journal=replayed) as engine:
        assert_equal_weights(weights(engine), made[0])


def test_a_worker_that_fell_behind_skips_what_is_decided(tmp_path: Path) -> None:
    asked: list[int] = []
    went_on, caught_up = threading.Event(), threading.Event()

    def run(workers: Workers) -> int:
        folder = tmp_path / str(workers.rank)
        with ZOEngine(toy(folder), replace(RGE, q=2), journal=folder / "journal.jsonl", workers=workers) as engine:
            for step in range(6):
                if workers.rank == 0 and step == 4:
                    went_on.set()
                    assert caught_up.wait(60)
                own = engine.ask()
                if workers.rank == 1:
                    asked.append(len(own))
                losses = [loss for at in own for sweep in engine.forwards([batch_of(step)], at=at) for loss in sweep]
                if workers.rank == 1 and step == 1:
                    assert went_on.wait(60)
                engine.tell(losses)
                if workers.rank == 1 and step == 3:
                    caught_up.set()
            return engine.version

    assert worked(2, run, split="directions", deadline=0.1) == [6, 6]
    assert (tmp_path / "0" / "journal.jsonl").read_bytes() == (tmp_path / "1" / "journal.jsonl").read_bytes()
    assert asked == [2, 2, 0, 0, 2, 2]
    assert [update.workers for update in updates_of(tmp_path / "0")[1:4]] == [(0,)] * 3


def test_what_is_not_finite_does_not_count_where_others_do(tmp_path: Path) -> None:
    def run(workers: Workers, broken: Sequence[int]) -> tuple[int, ...]:
        folder = tmp_path / f"{broken} {workers.rank}"
        with ZOEngine(toy(folder), replace(RGE, q=2), journal=folder / "journal.jsonl", workers=workers) as engine:
            engine.tell([float("inf") if workers.rank in broken else 1.0 for _ in engine.ask()])
            return engine.journal.updates[-1].workers

    assert worked(2, lambda workers: run(workers, [1]), deadline=30.0) == [(0,), (0,)]
    assert worked(2, lambda workers: run(workers, [0]), deadline=30.0) == [(1,), (1,)]
    for error in attempted(2, lambda workers: run(workers, [0, 1]), deadline=30.0):
        assert isinstance(error, NonFiniteLossError)
        assert "no finite loss" in str(error)


@pytest.mark.parametrize("deadline", [-1.0, float("nan"), float("inf")])
def test_a_deadline_is_a_number_of_seconds(deadline: float) -> None:
    with pytest.raises(OptionError, match="deadline"):
        Workers.joined(rank=0, size=1, store=None, deadline=deadline)


def test_a_record_lists_its_workers_and_older_ones_none(tmp_path: Path) -> None:
    crew(tmp_path, 2, RGE, steps=1)
    lines = (tmp_path / "0" / "journal.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["workers"] == "0-1"
    trained(tmp_path / "alone", RGE, steps=1)
    assert "workers" not in json.loads((tmp_path / "alone" / "journal.jsonl").read_text().splitlines()[-1])
    [update] = updates_of(tmp_path / "0")
    assert replace(update, workers=(1, 0)).contradiction() is not None
    assert replace(update, workers=(-1,)).contradiction() is not None


@given(st.sets(st.integers(0, 30), min_size=1).map(sorted))
def test_ranks_of_a_record_are_read_as_they_were_written(ranks: list[int]) -> None:
    update = Update(
        step=0,
        evaluations=(Evaluation(1, 1.0),),
        seeds=(1,),
        projected_grads=(0.5,),
        lr=0.1,
        zo_eps=0.1,
        weight_decay=0.0,
        perturb_in_place=False,
        losses=(1.0,),
        workers=tuple(ranks),
    )
    assert decode(encode(update)) == update
    for wrong in ("1,0", "0,1", "2-1", "0-", "", "a", "0,,2", "00", [0, 1], "0-99999999"):
        with pytest.raises(ImpossibleRecordError, match="workers"):
            decode({**encode(update), "workers": wrong})


def test_a_batch_that_cannot_be_dealt_is_refused_before_anything_is_told(tmp_path: Path) -> None:
    def run(workers: Workers) -> None:
        folder = tmp_path / str(workers.rank)
        with ZOEngine(toy(folder), RGE, workers=workers) as engine:
            engine.step({"input_ids": [1, 2]})  # type: ignore[dict-item]

    for error in attempted(2, run):
        assert isinstance(error, BatchError)


def test_a_process_that_torchrun_did_not_start_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(OptionError, match="torchrun"):
        Workers.from_torchrun()


def test_the_simulation_runs_the_same_rounds_each_time() -> None:
    runs = [simulate_workers.simulated(12, 4, simulate_workers.World(session_seconds=20.0), seed=1) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0]["left"] > 0
    assert 0 < runs[0]["lost_share"] < 1
    assert runs[0]["sent_bytes_a_worker_and_step"] <= 64 + 16 * 2
    slower = simulate_workers.simulated(12, 4, simulate_workers.World(evaluation_seconds=2.0), seed=1)
    faster = simulate_workers.simulated(12, 4, simulate_workers.World(evaluation_seconds=0.5), seed=1)
    assert slower["steps_an_hour"] < faster["steps_an_hour"]
    assert simulate_workers.near(3, 2, seed=0, seconds=0.001)["workers"] == 3


# --- workers that do not keep together


@pytest.mark.parametrize("looks", ["parameters", "forwards", "evaluation"])
def test_who_looks_at_weights_that_others_take_further_is_told_so(tmp_path: Path, looks: str) -> None:
    went_on = threading.Event()

    def look(engine: ZOEngine) -> None:
        if looks == "parameters":
            weights(engine)
        elif looks == "forwards":
            list(engine.forwards([batch_of(0)]))
        else:
            engine.evaluate([batch_of(0)])

    def run(workers: Workers) -> None:
        folder = tmp_path / str(workers.rank)
        with ZOEngine(toy(folder), replace(RGE, q=2), journal=folder / "journal.jsonl", workers=workers) as engine:
            for step in range(2):
                engine.step(batch_of(step))
            if workers.rank == 1:
                assert went_on.wait(60)
                look(engine)
            for step in range(2, 4):
                engine.step(batch_of(step))
            went_on.set()

    [_, error] = attempted(2, run, split="directions", deadline=0.3)
    assert isinstance(error, WorkerError)
    assert isinstance(error, OutrunError) or looks == "evaluation"


def test_a_step_that_others_overtake_counts_as_decided(tmp_path: Path) -> None:
    """The second worker's sweep ends on bytes of a later version: what it made of them is nothing."""
    went_on = threading.Event()
    waited: list[int] = []

    class Waiting(ToyBlockModel):
        waits = False

        def head(self, batch: Mapping[str, torch.Tensor], activations: torch.Tensor) -> torch.Tensor:
            if self.waits:
                self.waits = False
                waited.append(1)
                assert went_on.wait(60)
            return super().head(batch, activations)

    def run(workers: Workers) -> dict[str, torch.Tensor]:
        folder = tmp_path / str(workers.rank)
        folder.mkdir(parents=True, exist_ok=True)
        model = Waiting(11, 8, 3, tied=True, dtype=torch.float32, file=folder / "toy.safetensors")
        with ZOEngine(model, replace(RGE, q=2), journal=folder / "journal.jsonl", workers=workers) as engine:
            for step in range(4):
                model.waits = workers.rank == 1 and step == 1
                engine.step(batch_of(step))
                if workers.rank == 0 and step == 2:
                    went_on.set()
            return weights(engine)

    made = worked(2, run, split="directions", deadline=0.3)
    assert waited == [1]
    assert_equal_weights(*made)
    assert (tmp_path / "0" / "journal.jsonl").read_bytes() == (tmp_path / "1" / "journal.jsonl").read_bytes()
    assert [update.workers for update in updates_of(tmp_path / "0")[1:3]] == [(0,), (0,)]


def test_what_is_closed_is_not_used(tmp_path: Path) -> None:
    def run(workers: Workers) -> None:
        with ZOEngine(toy(tmp_path / str(workers.rank)), RGE, workers=workers) as engine:
            engine.step(batch_of(0))
            workers.close()
            with pytest.raises(ClosedError, match="Workers"):
                engine.step(batch_of(1))
            with pytest.raises(ClosedError, match="Workers"):
                engine.evaluate([batch_of(1)])

    worked(2, run)


def test_other_batches_of_an_evaluation_are_refused(tmp_path: Path) -> None:
    def run(workers: Workers) -> None:
        with ZOEngine(toy(tmp_path / str(workers.rank)), RGE, workers=workers) as engine:
            engine.evaluate([batch_of(10 * workers.rank), batch_of(10 * workers.rank + 1)])

    for error in attempted(2, run):
        assert isinstance(error, WorkerError)
        assert "other batches" in str(error)


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_says_why_and_nobody_waits(tmp_path: Path, leaver: int) -> None:
    def run(workers: Workers) -> None:
        with ZOEngine(toy(tmp_path / str(workers.rank)), RGE, workers=workers) as engine:
            engine.step(batch_of(0))
            if workers.rank == leaver:
                raise ZeroDivisionError("its disk is full")
            engine.step(batch_of(1))

    outcomes = attempted(2, run, timeout=60.0)
    assert isinstance(outcomes[leaver], ZeroDivisionError)
    assert isinstance(outcomes[1 - leaver], WorkerError)
    assert "its disk is full" in str(outcomes[1 - leaver])


def waiting_worker(port: int, rank: int, told: Any) -> None:
    """A worker in a process of its own that waits for another one, which does not come."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background ignores it
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with Workers.joined(rank=rank, size=2, store=store, key=KEY, timeout=600.0) as workers:
        told.set()
        workers.all_gather(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_interrupted_while_it_waits_says_so_and_goes(rank: int) -> None:
    context = processes()
    store, begun = opened_store(), context.Event()
    process = context.Process(target=waiting_worker, args=(store.port, rank, begun), daemon=True)
    process.start()
    assert begun.wait(60)
    time.sleep(0.5)  # it waits within the store now, or is about to
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 1
    other = Workers.joined(rank=1 - rank, size=2, store=store, key=KEY, timeout=60.0)
    if rank == 1:
        other.all_gather(1)  # what it said before it was interrupted counts
    with pytest.raises(WorkerError, match=f"worker {rank}: found that it has left: KeyboardInterrupt"):
        other.all_gather(1)
    other.close("the test has ended")


def test_workers_that_do_different_things_are_told_so(tmp_path: Path) -> None:
    def run(workers: Workers) -> None:
        with ZOEngine(toy(tmp_path / str(workers.rank)), RGE, workers=workers) as engine:
            if workers.rank == 0:
                engine.step(batch_of(0))
            else:
                engine.evaluate([batch_of(0)])

    outcomes = attempted(2, run, timeout=5.0)
    assert isinstance(outcomes[0], WorkerError)
    assert "same order" in str(outcomes[0])
    assert isinstance(outcomes[1], WorkerError)


def test_a_late_worker_of_another_run_keeps_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "0", RGE, steps=2)
    seeds = [0, 5]
    errors = attempted(
        2, lambda workers: trained(tmp_path / str(workers.rank), RGE, workers, seed=seeds[workers.rank]), timeout=5.0
    )
    assert isinstance(errors[1], JournalError)
    assert not (tmp_path / "1" / "journal.jsonl").exists()
    assert len(updates_of(tmp_path / "0")) == 2


def test_a_journal_that_was_taken_over_and_refused_can_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path / "0", RGE, steps=2)
    late = Journal()

    def run(workers: Workers) -> None:
        folder = tmp_path / str(workers.rank)
        journal = late if workers.rank == 1 else Journal(folder / "journal.jsonl")
        with ZOEngine(toy(folder), RGE, journal=journal, workers=workers, seed=[0, 5][workers.rank]):
            pass

    assert isinstance(attempted(2, run, timeout=5.0)[1], JournalError)
    assert (late.header, late.updates, late.base_digests, late.checksum) == (None, [], {}, 0)
    with ZOEngine(toy(tmp_path / "anew"), RGE, journal=late) as engine:
        assert engine.step(batch_of(0)).step == 0


def test_workers_of_a_host_plan_with_their_part_of_what_is_free(tmp_path: Path) -> None:
    def budget(workers: Workers, every: int | None) -> float:
        folder = tmp_path / f"{every} {workers.rank}"
        policy = None if every is None else WriteBackPolicy(directory=folder, every=every)
        with ZOEngine(toy(folder), RGE, workers=workers, write_back=policy) as engine:
            assert engine.host_plan is not None
            return (engine.host_plan.budget - resident_memory()) / free_memory()

    for every in (None, 1):  # shared, and each with a copy of its own
        assert all(share < 0.3 for share in worked(4, partial(budget, every=every)))
