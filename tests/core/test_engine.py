"""The engine: what a step leaves, what it refuses, what it never touches."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Proxy, assert_equal, behind_copies, weights
from models import make_batch, save_model, small_config
from toy import ToyBlockModel
from transformers import AutoModelForCausalLM

import zo2core.kernels
import zo2core.sweep.perturbers
from zo2adapters import HFBlockModel, MonolithicMeZO, open_checkpoint
from zo2core import (
    Distribution,
    Engine,
    HostDevice,
    Journal,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    OverlappedScheduler,
    PhiloxNoise,
    SegmentStore,
    SequentialNoise,
    SharedBase,
    ZerothOrder,
)
from zo2core.errors import BatchError, BusyError, ClosedError, JournalError, NonFiniteLossError, OptionError, OutputError
from zo2core.sources.slot_file import Scratch

MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-3)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("opt"))


@pytest.fixture
def engine(base: Path) -> Iterator[Engine]:
    with Engine(open_checkpoint(base), ZerothOrder(MEZO)) as made:
        yield made


BATCH = make_batch(40, [9, 5])


@pytest.mark.parametrize("noise", [None, PhiloxNoise(), PhiloxNoise(Distribution.RADEMACHER)])
def test_global_random_state_is_untouched(base: Path, tmp_path: Path, noise: PhiloxNoise | None) -> None:
    def state() -> tuple[object, ...]:
        """Of torch, Python and numpy."""
        of_numpy = np.random.get_state(legacy=False)["state"]
        return torch.random.get_rng_state().tolist(), random.getstate(), of_numpy["key"].tolist(), of_numpy["pos"]

    before = state()
    with Engine(open_checkpoint(base), ZerothOrder(MEZO, noise=noise)) as engine:
        engine.step(BATCH)
        engine.step(BATCH, seed=3)
        engine.evaluate([BATCH])
        engine.export(tmp_path / "out")
    assert state() == before


def test_runs_of_one_seed_are_equal_and_of_two_are_not(base: Path) -> None:
    seeds = []
    for run_seed in (0, 0, 1):
        with Engine(open_checkpoint(base), ZerothOrder(MEZO, seed=run_seed)) as engine:
            seeds.append([engine.step(BATCH).seeds for _ in range(4)])
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 4


def test_seeds_are_from_0_on_and_have_63_bits(engine: Engine) -> None:
    assert engine.step(BATCH, seed=0).seeds == (0,)
    for seed in (-1, 2**63):
        with pytest.raises(OptionError, match="seed"):
            engine.step(BATCH, seed=seed)
    assert engine.version == 1


def test_a_journal_on_disk_continues_bit_for_bit(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    with Engine(open_checkpoint(base), ZerothOrder(MEZO)) as whole:
        results = [whole.step(BATCH) for _ in range(6)]
        expected = weights(whole)
    for stop in (2, 3, 6):
        with Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=path) as part:
            continued = [part.step(BATCH) for _ in range(part.version, stop)]
            assert [r.losses for r in continued] == [r.losses for r in results[part.version - len(continued) : stop]]
    with Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=path) as replayed:
        assert_equal(weights(replayed), expected)


def test_a_journal_of_another_base_seed_or_noise_is_refused(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=path) as engine:
        engine.step(BATCH)
    other = save_model(tmp_path / "other", small_config("opt", vocab_size=41))
    with pytest.raises(JournalError, match="base"):
        Engine(open_checkpoint(other), ZerothOrder(MEZO), journal=path)
    with pytest.raises(JournalError, match="parameters"):
        Engine(open_checkpoint(base, dtype="bfloat16"), ZerothOrder(MEZO), journal=path)
    with pytest.raises(JournalError, match="seed 0"):
        Engine(open_checkpoint(base), ZerothOrder(MEZO, seed=7), journal=path)

    class OtherNoise(SequentialNoise):
        name = "other"

    model = open_checkpoint(base)
    for noise in (OtherNoise(model.layouts), PhiloxNoise(), PhiloxNoise(Distribution.RADEMACHER)):
        with pytest.raises(JournalError, match="noise"):
            Engine(open_checkpoint(base), ZerothOrder(MEZO, noise=noise), journal=path)


def test_threads_share_a_segment_and_a_failure_leaves_none_behind(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zo2core.sweep.perturbers, "PARALLEL_FROM", 0)
    monkeypatch.setattr(zo2core.sweep.perturbers, "RANGE", 64)
    expected = []
    with Engine(open_checkpoint(base), ZerothOrder(MEZO, noise=PhiloxNoise())) as engine:
        expected += [engine.step(BATCH).losses for _ in range(2)]
        threads: set[str] = set()
        failing = False

        class FailureError(Exception):
            pass

        def watched(*args: Any, **options: Any) -> None:
            threads.add(threading.current_thread().name)
            if failing and len(threads) == 2:
                raise FailureError
            zo2core.kernels.apply_drawing(*args, **options)

        monkeypatch.setattr(zo2core.sweep.perturbers, "apply_drawing", watched)
        expected.append(engine.step(BATCH).losses)
        assert len(threads) == 2
        failing = True
        with pytest.raises(FailureError):
            engine.step(BATCH)
        failing = False
        expected.append(engine.step(BATCH).losses)
    monkeypatch.undo()
    with Engine(open_checkpoint(base), ZerothOrder(MEZO, noise=PhiloxNoise())) as alone:
        assert [alone.step(BATCH).losses for _ in range(4)] == expected


def test_a_loss_that_is_not_finite_stops_the_step(engine: Engine) -> None:
    engine.step(BATCH)
    before = weights(engine)
    infinite: Any = Proxy(engine._runner.model, head=lambda head, *given: head(*given) * math.inf)
    with pytest.raises(NonFiniteLossError, match="step 1"):
        engine.step(BATCH, infinite)
    assert engine.version == 1
    assert_equal(weights(engine), before)
    assert engine.step(BATCH).step == 1


BAD_BATCHES: dict[str, dict[str, Any]] = {
    "no labels": {"labels": None},
    "no input_ids": {"input_ids": None},
    "one dimension": {"input_ids": torch.ones(5, dtype=torch.int64)},
    "floats": {"input_ids": torch.ones(2, 9)},
    "mask of another shape": {"attention_mask": torch.ones(2, 8, dtype=torch.int64)},
    "labels of another shape": {"labels": torch.ones(2, 8, dtype=torch.int64)},
    "token outside the vocabulary": {"input_ids": torch.full((2, 9), 40)},
    "negative token": {"input_ids": torch.full((2, 9), -1)},
    "label outside the vocabulary": {"labels": torch.full((2, 9), 40)},
    "nothing to predict": {"labels": torch.full((2, 9), -100)},
    "a label at the first token only": {"labels": torch.full((2, 9), -100).index_fill(1, torch.tensor([0]), 1)},
    "longer than the model takes": dict(make_batch(40, [13, 2])),
}


@pytest.mark.parametrize("rows", [None, 1], ids=["whole", "cut"])
@pytest.mark.parametrize("changes", BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_bad_batches_are_refused_and_nothing_changes(base: Path, changes: dict[str, Any], rows: int | None) -> None:
    batch = {key: value for key, value in {**BATCH, **changes}.items() if value is not None}
    with Engine(open_checkpoint(base), ZerothOrder(MEZO), micro_batch_size=rows) as engine:
        engine.step(BATCH)
        before = weights(engine)
        for use in (engine.step, lambda batch: engine.evaluate([batch])):
            with pytest.raises(BatchError, match="batch"):
                use(batch)
        assert engine.version == 1
        assert_equal(weights(engine), before)


def test_learning_rate_may_be_a_function_of_the_step(base: Path) -> None:
    rates = [1e-2, 5e-3, -1e-3]
    with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=lambda step: rates[step], zo_eps=1e-3))) as engine:
        assert [engine.step(BATCH).lr for _ in range(2)] == rates[:2]
        assert [update.lr for update in engine.journal.updates] == rates[:2]
        with pytest.raises(OptionError, match="lr at step 2"):
            engine.step(BATCH)
        assert engine.version == 2


@pytest.mark.parametrize("in_place", [True, False])
def test_a_warm_up_may_begin_at_zero(base: Path, tmp_path: Path, *, in_place: bool) -> None:
    """Such a step is recorded like any other; of MeZO's walk there and back its rounding stays, as in MeZO."""
    rates = [0.0, 1e-2]
    estimator = MeZOSGD(lr=lambda step: rates[step], zo_eps=1e-3, perturb_in_place=in_place)
    whole = AutoModelForCausalLM.from_pretrained(base)
    with Engine(open_checkpoint(base), ZerothOrder(estimator), journal=tmp_path / "journal.jsonl") as engine:
        before = weights(engine)
        first = engine.step(BATCH)
        assert first.share_applied is None
        assert in_place or all(torch.equal(value, before[name]) for name, value in weights(engine).items())
        engine.step(BATCH)
        for update in engine.journal.updates:
            literal = MonolithicMeZO(whole, lr=update.lr, zo_eps=1e-3, perturb_in_place=in_place)
            assert literal.step(BATCH, *update.seeds).losses == update.losses
        assert_equal(weights(engine), dict(whole.named_parameters()))
    assert [update.lr for update in Journal(tmp_path / "journal.jsonl").updates] == rates


def test_as_many_batches_share_a_sweep_as_the_activation_budget_holds(base: Path) -> None:
    many = [make_batch(40, [6, 2], seed=i) for i in range(7)]
    model = open_checkpoint(base)
    with Engine(model, ZerothOrder(MEZO)) as engine, torch.inference_mode():
        held, running = model.held_bytes(many[0]), model.forward_bytes(many[0])
        assert engine.evaluate(many).sweeps == 1
    assert held >= 2 * 6 * 12 * 4  # a hidden state
    for fitting in (1, 2, 3, 6, 7, 8):
        for short in (0, 1):  # one byte less, and one batch less fits
            memory = MemoryPolicy(activations=fitting * held + running - short)
            with Engine(open_checkpoint(base), ZerothOrder(MEZO), memory=memory) as engine:
                assert engine.evaluate(iter(many)).sweeps == math.ceil(7 / max(fitting - short, 1))


def test_batches_of_a_shared_sweep_are_each_as_alone(base: Path) -> None:
    many = [make_batch(40, [3 + i, 2], seed=i) for i in range(7)]
    with Engine(open_checkpoint(base), ZerothOrder(MEZO), memory=MemoryPolicy(activations=15_000)) as engine:
        engine.step(BATCH)
        together = engine.evaluate(iter(many))
        alone = [engine.evaluate([batch]) for batch in many]
    assert 1 < together.sweeps < 7
    assert together.losses == tuple(result.loss for result in alone)
    assert together.tokens == sum(result.tokens for result in alone)
    assert together.loss == pytest.approx(sum(r.loss * r.tokens for r in alone) / together.tokens, rel=1e-12)


def test_evaluating_nothing_is_refused(engine: Engine) -> None:
    with pytest.raises(BatchError, match="batches"):
        engine.evaluate([])


def test_an_interrupted_replay_loses_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Engine(open_checkpoint(base), ZerothOrder(MEZO)) as engine,
        Engine(open_checkpoint(base), ZerothOrder(MEZO)) as undisturbed,
    ):
        for each in (engine, undisturbed):
            for seed in range(3):
                each.step(BATCH, seed=seed)
        calls = 0
        apply = zo2core.kernels.apply

        def interrupted(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 17:
                raise KeyboardInterrupt
            apply(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(zo2core.sweep.perturbers, "apply", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.flush()
        assert_equal(weights(engine), weights(undisturbed))
        assert engine.step(BATCH, seed=9).losses == undisturbed.step(BATCH, seed=9).losses


def test_closing_twice_is_fine_and_use_after_it_is_refused(base: Path, tmp_path: Path) -> None:
    engine = Engine(open_checkpoint(base), ZerothOrder(MEZO))
    engine.step(BATCH)
    engine.close()
    engine.close()
    for use in (
        lambda: engine.step(BATCH),
        lambda: engine.evaluate([BATCH]),
        engine.flush,
        lambda: list(engine.parameters_now()),
        lambda: engine.export(tmp_path / "out"),
    ):
        with pytest.raises(ClosedError):
            use()


def test_no_thread_and_no_descriptor_stays(base: Path) -> None:
    def open_files() -> set[str]:
        return {str(link.resolve()) for link in Path("/proc/self/fd").iterdir() if link.exists()}

    threads, files = set(threading.enumerate()), open_files()
    with Engine(open_checkpoint(base), ZerothOrder(MEZO)) as engine:
        engine.step(BATCH)
        assert any(str(base) in file for file in open_files())
    assert set(threading.enumerate()) == threads
    assert open_files() <= files


@pytest.mark.parametrize("wrong", [MeZOSGD, 1e-6], ids=repr)
def test_what_is_no_estimator_is_refused_before_a_journal_is_begun(base: Path, tmp_path: Path, wrong: Any) -> None:
    model, journal = open_checkpoint(base), tmp_path / "journal.jsonl"
    with pytest.raises(OptionError, match=r"estimator: found .*expected an estimator, such as MeZOSGD"):
        Engine(model, ZerothOrder(wrong), journal=journal)
    assert not journal.exists()
    with Engine(model, ZerothOrder(MEZO), journal=journal):
        pass  # the model can be used


def test_the_work_buffer_is_allocated_once_and_views_stay(base: Path) -> None:
    model: HFBlockModel = open_checkpoint(base)
    with Engine(model, ZerothOrder(MEZO)) as engine:
        before = {id(p): p.data_ptr() for p in model.skeleton.parameters()}
        for _ in range(3):
            engine.step(BATCH)
        assert {id(p): p.data_ptr() for p in model.skeleton.parameters()} == before


def test_a_batch_without_labels_does_not_count(base: Path, tmp_path: Path) -> None:
    model = ToyBlockModel(9, 4, 2, tied=False, dtype=torch.float32, file=tmp_path / "toy.safetensors")
    batch = {key: value for key, value in make_batch(9, [5]).items() if key != "attention_mask"}
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with Engine(model, ZerothOrder(MEZO)) as engine:
        assert engine.evaluate([batch, empty]).loss == engine.evaluate([batch]).loss
        with pytest.raises(BatchError, match="no labelled token"):
            engine.evaluate([empty])


def test_the_engine_is_used_once_at_a_time(engine: Engine) -> None:
    engine.step(BATCH)
    iterator = engine.parameters_now()
    next(iterator)
    for use in (lambda: engine.step(BATCH), lambda: engine.evaluate([BATCH]), engine.flush):
        with pytest.raises(BusyError, match="close"):
            use()
    iterator.close()
    assert engine.step(BATCH).step == 1


def test_an_export_that_fails_lets_go_of_the_engine(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.step(BATCH)
    before = weights(engine)
    with pytest.raises(OutputError):
        engine.export(tmp_path)  # where something is
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OutputError):
            engine.export(tmp_path / "out")
    assert_equal(weights(engine), before)


def broken(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_numbers_of_other_libraries_are_journalled_as_python_reads_them(base: Path, tmp_path: Path) -> None:
    estimator = MeZOSGD(lr=lambda step: np.float64(1e-2), zo_eps=np.float64(1e-3), weight_decay=np.float64(0.1))
    with Engine(open_checkpoint(base), ZerothOrder(estimator), journal=tmp_path / "journal.jsonl") as engine:
        engine.step(BATCH)
    assert len(Journal(tmp_path / "journal.jsonl").updates) == 1


@pytest.mark.parametrize("kept", [0, 2])
def test_a_source_that_was_passed_gets_all_blocks_to_write(base: Path, tmp_path: Path, kept: int) -> None:
    model, run = open_checkpoint(base), tmp_path / "run"
    with behind_copies() as device, contextlib.closing(Journal(run / "journal.jsonl")) as journal:
        scratch = Scratch(run, model.layouts, journal.chain)
        source = SegmentStore(model.weights, model.layouts, device.host_memory, scratch=scratch, write_back_every=2)
        parts: dict[str, Any] = {"source": source, "device": device, "journal": journal}
        parts["scheduler"] = OverlappedScheduler(source, device, kept=kept)
        method = ZerothOrder(MEZO, noise=SequentialNoise(model.layouts))
        with contextlib.closing(source), Engine(model, method, **parts) as engine:
            assert engine.write_back_every == 2
            for _ in range(7):
                engine.step(BATCH)
        assert min(scratch.version(index) for index in range(len(model.layouts))) >= 3, "also of what stays on the device"


@pytest.mark.parametrize("second", ["replayer", "engine", "source", "shared base"])
def test_a_model_of_an_open_engine_is_refused_to_another_and_the_open_one_goes_on(base: Path, second: str) -> None:
    batch, model = make_batch(40, [7]), open_checkpoint(base)
    with Engine(open_checkpoint(base), ZerothOrder(MEZO)) as alone:
        expected = [alone.step(batch).losses for _ in range(2)]
    openings: dict[str, Any] = {
        "replayer": lambda: Engine(model),
        "engine": lambda: Engine(model, ZerothOrder(MEZO)),
        "shared base": lambda: SharedBase(model),
    }
    with Engine(model, ZerothOrder(MEZO)) as engine:
        losses = [engine.step(batch).losses]
        device = HostDevice()
        with contextlib.closing(SegmentStore(model.weights, model.layouts, device.host_memory)) as source:
            openings["source"] = lambda: Engine(model, ZerothOrder(MEZO), source=source, device=device)
            with pytest.raises(BusyError, match="open on it"):
                openings[second]()
        losses.append(engine.step(batch).losses)
    assert losses == expected
    with Engine(model) as replayer:  # once the first is closed
        replayer.evaluate([batch])


def test_an_engine_that_is_dropped_without_being_closed_leaves_its_model_to_another_one(base: Path) -> None:
    model = open_checkpoint(base)
    engine = Engine(model, ZerothOrder(MEZO))
    engine.step(make_batch(40, [7]))
    del engine
    gc.collect()
    Engine(model).close()


def test_groups_at_one_evaluation_have_their_own_outputs(base: Path) -> None:
    model, first, second = open_checkpoint(base), make_batch(40, [7]), make_batch(40, [5, 3], seed=1)
    with Engine(model, ZerothOrder(MEZO)) as engine:
        at, *_ = engine.ask()
        apart = [engine.forwards_at([(one, [batch])], model)[0] for one in (at, None) for batch in (first, second)]
        together = engine.forwards_at([(at, [first]), (None, [first]), (at, [second]), (None, [second])], model)
    assert [together[0], together[2], together[1], together[3]] == apart


def test_forwards_at_an_evaluation_pass_no_other_where_weights_are_not_perturbed_in_place(base: Path) -> None:
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-3, q=4, perturb_in_place=False)
    with Engine(open_checkpoint(base), ZerothOrder(estimator)) as engine:
        batch, asked, swept = make_batch(40, [7]), engine.ask(), []
        sweep = engine._runner.sweep

        def counted(version: int, groups: Any, forward: Any) -> Any:
            swept.append(len(groups))
            return sweep(version, groups, forward)

        engine._runner.sweep = counted  # type: ignore[method-assign]
        for at in asked:
            list(engine.forwards([batch], at=at))
    assert swept == [1] * len(asked)
