"""The face: what is asked for is heeded or refused, and what a caller passes stays the caller's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import Proxy, behind_copies, zeroth_order
from models import make_batch, save_model, small_config

from zo2adapters import open_checkpoint
from zo2core import (
    FZOO,
    Distribution,
    Engine,
    HostDevice,
    Journal,
    MemoryPolicy,
    MeZOSGD,
    PhiloxNoise,
    SegmentStore,
    SequentialNoise,
    SerialScheduler,
    Trace,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import BatchError, JournalError, MemoryBudgetError, OptionError, OutputError, ScratchError

MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-3)
BATCH = make_batch(40, [9, 5])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("opt"))


class Watched(Proxy):
    """A part that says whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


NO_LIMITS: list[Any] = [0, -1, math.nan, math.inf, True, "1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MemoryPolicy(host="nonsense"), "memory.host: found 'nonsense'"),
        (lambda: MemoryPolicy(host=0), "memory.host: found"),
        (lambda: MemoryPolicy(device="-1GiB"), "memory.device: found"),
        (lambda: MemoryPolicy(activations=-5), "memory.activations: found"),
        (lambda: MemoryPolicy(activations=0), "memory.activations: found"),
        (lambda: MemoryPolicy(least_activations="much"), "memory.least_activations: found"),
        (lambda: WriteBackPolicy(directory="run", every=0), "write_back.every: found 0"),
        (lambda: WriteBackPolicy(directory="run", every=True), "write_back.every: found True"),
        (lambda: WriteBackPolicy(directory="run", every="often"), "write_back.every: found 'often'"),  # type: ignore[arg-type]
        (lambda: WriteBackPolicy(directory="run", snapshot_every=-3), "write_back.snapshot_every: found -3"),
        *(
            (
                partial(WriteBackPolicy, directory="run", terabytes_per_1000_steps=limit),
                "write_back.terabytes_per_1000_steps",
            )
            for limit in NO_LIMITS
        ),
    ],
)
def test_policies_check_themselves(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": MemoryPolicy(device="8GiB")}, "memory.device"),
        ({"memory": MemoryPolicy(least_activations=1)}, "memory.least_activations"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"micro_batch_size": -1}, "micro_batch_size"),
        ({"device": "abacus"}, "device"),
    ],
)
def test_an_option_that_nothing_would_heed_is_refused(base: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        zeroth_order(open_checkpoint(base), MEZO, **options)
    with pytest.raises(OptionError, match=message):
        Engine(open_checkpoint(base), **options)


@pytest.mark.parametrize("noise", ["MeZO's", "Gaussian"])
def test_noise_of_another_distribution_than_the_estimator_needs_is_refused(base: Path, tmp_path: Path, noise: str) -> None:
    model, estimator, path = open_checkpoint(base), FZOO(lr=1e-2, zo_eps=1e-3), tmp_path / "journal.jsonl"
    given = SequentialNoise(model.layouts) if noise == "MeZO's" else PhiloxNoise()
    with pytest.raises(OptionError, match=r"noise: found .*expected rademacher noise, which the estimator fzoo needs"):
        Engine(model, ZerothOrder(estimator, noise=given), journal=path)
    with contextlib.closing(HostDevice()) as device:
        source = SegmentStore(model.weights, model.layouts, device.host_memory)
        with contextlib.closing(source), pytest.raises(OptionError, match="rademacher"):
            Engine(model, ZerothOrder(estimator, noise=given), source=source, device=device, journal=path)
    assert not path.exists()


def test_a_new_run_takes_the_noise_that_its_estimator_needs(base: Path) -> None:
    results = []
    for noise in (None, PhiloxNoise(Distribution.RADEMACHER)):
        with Engine(open_checkpoint(base), ZerothOrder(FZOO(lr=1e-2, zo_eps=1e-3), noise=noise)) as engine:
            results.append((engine.step(BATCH).losses, engine.journal.header["noise"]))  # type: ignore[index]
    assert results[0] == results[1]


def test_a_run_goes_on_with_the_noise_that_its_estimator_needs(base: Path, tmp_path: Path) -> None:
    path, estimator = tmp_path / "journal.jsonl", FZOO(lr=1e-2, zo_eps=1e-3)
    rademacher = PhiloxNoise(Distribution.RADEMACHER)
    with Engine(open_checkpoint(base), ZerothOrder(estimator, noise=rademacher), journal=path) as engine:
        engine.step(BATCH)
    with Engine(open_checkpoint(base), ZerothOrder(estimator), journal=path) as engine:  # the noise is the journal's
        assert engine.step(BATCH).step == 1


def test_a_size_of_device_memory_without_overlap_is_refused(base: Path) -> None:
    with behind_copies() as device, pytest.raises(OptionError, match=r"memory\.device"):
        Engine(open_checkpoint(base), ZerothOrder(MEZO), device=device, overlap=False, memory=MemoryPolicy(device="1GiB"))


def test_after_a_refusal_the_callers_parts_and_the_model_are_of_use(base: Path, tmp_path: Path) -> None:
    model, device = open_checkpoint(base), Watched(HostDevice())
    with contextlib.closing(Journal(tmp_path / "journal.jsonl")) as journal:
        with pytest.raises(MemoryBudgetError):
            Engine(model, ZerothOrder(MEZO), device=device, journal=journal, memory=MemoryPolicy(host="1KB"))
        assert not device.closed
        assert not (tmp_path / "journal.jsonl").exists()
        with Engine(model, ZerothOrder(MEZO), device=device, journal=journal) as engine:
            engine.step(BATCH)
        assert not device.closed
        journal.append(MEZO.update(1, MEZO.evaluations(1, iter([3])), [torch.tensor(1.0), torch.tensor(2.0)], 1.0, ()))


def test_a_run_that_is_refused_binds_no_later_one(base: Path, tmp_path: Path) -> None:
    path, nowhere = tmp_path / "journal.jsonl", tmp_path / "file" / "run"
    (tmp_path / "file").write_text("in the way")
    for journal in (path, Journal(path)):
        with pytest.raises(ScratchError):
            Engine(
                open_checkpoint(base),
                ZerothOrder(MEZO),
                journal=journal,
                write_back=WriteBackPolicy(directory=nowhere, every=1),
            )
        assert not path.exists()
        with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=5e-3, zo_eps=1e-3)), journal=journal) as engine:
            engine.step(BATCH)
        if isinstance(journal, Journal):
            journal.close()
        path.unlink()


def test_parts_stay_the_callers(base: Path) -> None:
    model, device, other = open_checkpoint(base), Watched(HostDevice()), save_model(base.parent / "b", small_config("llama"))
    source = Watched(SegmentStore(model.weights, model.layouts, device.host_memory))
    method = ZerothOrder(MEZO, noise=PhiloxNoise())
    parts: dict[str, Any] = {"source": source, "device": device}
    with pytest.raises(OptionError, match="source"):
        Engine(open_checkpoint(other), method, **parts)
    with pytest.raises(OptionError, match="write_back"):
        Engine(model, method, write_back=WriteBackPolicy(directory=base), **parts)
    with pytest.raises(OutputError):
        Engine(model, method, trace=base / "config.json", **parts)
    losses = []
    for scheduler in (None, SerialScheduler(source, device)):
        with Engine(model, method, scheduler=scheduler, **parts) as engine:
            losses.append(engine.evaluate([BATCH]).losses)
            assert engine.host_plan is None
            assert engine.device_plan is None
        assert not source.closed
        assert not device.closed
    assert losses[0] == losses[1]
    assert source.acquire(0).version == 0, "it can still be used"


def test_paths_are_opened_and_closed_objects_are_left_open(base: Path, tmp_path: Path) -> None:
    path, file = tmp_path / "journal.jsonl", tmp_path / "trace.json"
    with Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=path, trace=file) as engine:
        engine.step(BATCH)
    assert file.read_text().rstrip().endswith("]"), "the trace is complete"
    with contextlib.closing(Journal(path)) as journal, Trace(tmp_path / "other.json") as trace:
        with Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=journal, trace=trace) as engine:
            engine.step(BATCH)
        with Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=journal, trace=trace) as engine:
            assert engine.step(BATCH).step == 2
    assert (tmp_path / "other.json").read_text().count('"step ') == 2


def test_a_replayer_takes_no_steps_and_makes_no_journal(base: Path, tmp_path: Path) -> None:
    missing = tmp_path / "typo.jsonl"
    with pytest.raises(JournalError, match="no journal"):
        Engine(open_checkpoint(base), journal=missing)
    assert not missing.exists()
    with Engine(open_checkpoint(base)) as replayer:
        assert replayer.version == 0
        with pytest.raises(OptionError, match="step: found an engine without a method"):
            replayer.step(BATCH)


def test_a_batch_of_something_else_than_tensors_is_refused(base: Path) -> None:
    with Engine(open_checkpoint(base), ZerothOrder(MEZO)) as engine:
        for use in (engine.step, lambda batch: engine.evaluate([batch])):
            with pytest.raises(BatchError, match=r"batch\['labels'\]: found a list"):
                use({**BATCH, "labels": [[1, 2]]})  # type: ignore[dict-item]


def test_what_an_iteration_or_a_failed_step_moved_is_not_the_next_steps(base: Path) -> None:
    model = open_checkpoint(base)
    with behind_copies() as device, Engine(model, ZerothOrder(MEZO), device=device, overlap=False) as engine:
        moved = [engine.step(BATCH, seed=seed).bytes_moved for seed in range(3)]
        assert len(list(engine.parameters_now())) > 0
        with patch.object(model, "head", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
            engine.step(BATCH)
        assert engine.step(BATCH).bytes_moved <= moved[2]
