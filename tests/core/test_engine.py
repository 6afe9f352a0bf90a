"""The engine: how it is built, what a step leaves, refuses and never touches, how batches are cut,
and what is reported.
"""

import contextlib
import gc
import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from engines import (
    Proxy,
    assert_equal,
    behind_copies,
    fails_at,
    first_order,
    kernels_in,
    open_engine,
    weights,
    zeroth_order,
)
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, make_batch, save_model, small_config
from profiles import each_choice, needs_threads
from toy import ToyBlockModel
from transformers import AutoModelForCausalLM

import zo2core.sweep.perturbers
from zo2adapters import Adapter, HFBlockModel, MonolithicMeZO, open_checkpoint
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2core import (
    FZOO,
    LOMO,
    CustomSource,
    Delayed,
    Distribution,
    Engine,
    EngineOptions,
    FirstOrder,
    HostDevice,
    Journal,
    LossScaling,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    OverlappedScheduler,
    PhiloxNoise,
    SegmentStore,
    SequentialNoise,
    SerialScheduler,
    SharedBase,
    TorchOptimizer,
    Trace,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import (
    BatchError,
    BusyError,
    ClosedError,
    JournalError,
    MemoryBudgetError,
    NonFiniteLossError,
    OptionError,
    OutputError,
    ScratchError,
)
from zo2core.kernels import parallel
from zo2core.kernels.dispatch import Kernel
from zo2core.methods.first_order import AtSnapshot
from zo2core.protocols import NoiseGenerator, ZOEstimator
from zo2core.run import Run
from zo2core.sources.slot_file import Scratch
from zo2core.sweep.microbatch import combined_loss, labelled_tokens, split_rows

MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-3)


@pytest.fixture
def engine(base: Path) -> Iterator[Engine]:
    with Engine(open_checkpoint(base), ZerothOrder(MEZO)) as made:
        yield made


BATCH = make_batch(40, [9, 5])


@pytest.mark.parametrize("noise", [None, PhiloxNoise(), PhiloxNoise(Distribution.RADEMACHER)])
def test_global_random_state_is_untouched(
    base: Path, tmp_path: Path, noise: PhiloxNoise | None
) -> None:
    def state() -> tuple[object, ...]:
        """Of torch, Python and numpy."""
        of_numpy = np.random.get_state(legacy=False)["state"]
        return (
            torch.random.get_rng_state().tolist(),
            random.getstate(),
            of_numpy["key"].tolist(),
            of_numpy["pos"],
        )

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
            assert engine.step(BATCH, seed=0).seeds == (0,)
            for seed in (-1, 2**63):
                with pytest.raises(OptionError, match="seed"):
                    engine.step(BATCH, seed=seed)
            assert engine.version == 5
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 4


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


@needs_threads
@pytest.mark.parametrize("noise", [PhiloxNoise, None], ids=["drawn by kernels", "MeZO's"])
def test_threads_share_a_segment_and_a_failure_leaves_none_behind(
    base: Path, noise: type[PhiloxNoise] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def method() -> ZerothOrder:
        return ZerothOrder(MEZO, noise=None if noise is None else noise())

    monkeypatch.setattr(zo2core.sweep.perturbers, "PARALLEL_FROM", 0)
    monkeypatch.setattr(zo2core.sweep.perturbers, "RANGE", 64)
    monkeypatch.setattr(parallel, "thread_count", lambda: 2)
    expected = []
    threads: set[int] = set()
    has_both = threading.Event()
    failing = False

    class FailureError(Exception):
        pass

    def watch(kernel: Kernel, *arguments: Any) -> None:
        threads.add(threading.get_ident())
        if len(threads) == 2:
            has_both.set()
            if failing:
                raise FailureError
        has_both.wait(0.05)  # for the other thread, which may still be asleep
        kernel(*arguments)

    with (
        kernels_in(watch),
        Engine(open_checkpoint(base), method()) as engine,
    ):
        expected += [engine.step(BATCH).losses for _ in range(2)]
        threads.clear()
        has_both.clear()
        expected.append(engine.step(BATCH).losses)
        assert len(threads) == 2
        failing = True
        with pytest.raises(FailureError):
            engine.step(BATCH)
        failing = False
        expected.append(engine.step(BATCH).losses)
    monkeypatch.undo()
    with Engine(open_checkpoint(base), method()) as alone:
        assert [alone.step(BATCH).losses for _ in range(4)] == expected


def test_a_loss_that_is_not_finite_stops_the_step(engine: Engine) -> None:
    engine.step(BATCH)
    before = weights(engine)
    infinite: Any = Proxy(engine._run.model, head=lambda head, *given: head(*given) * math.inf)
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
    "a label at the first token only": {
        "labels": torch.full((2, 9), -100).index_fill(1, torch.tensor([0]), 1)
    },
    "longer than the model takes": dict(make_batch(40, [13, 2])),
}


@pytest.mark.parametrize("rows", [None, 1], ids=["whole", "cut"])
@pytest.mark.parametrize("changes", BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_bad_batches_are_refused_and_nothing_changes(
    base: Path, changes: dict[str, Any], rows: int | None
) -> None:
    batch = {key: value for key, value in {**BATCH, **changes}.items() if value is not None}
    with Engine(open_checkpoint(base), ZerothOrder(MEZO), micro_batch_size=rows) as engine:
        engine.step(BATCH)
        before = weights(engine)
        for use in (engine.step, lambda batch: engine.evaluate([batch])):
            with pytest.raises(BatchError, match="batch"):
                use(batch)
        assert engine.version == 1
        assert_equal(weights(engine), before)


def test_learning_rate_may_be_a_function_of_the_step_and_numbers_of_another_library(
    base: Path, tmp_path: Path
) -> None:
    rates, path = [1e-2, 5e-3, -1e-3], tmp_path / "journal.jsonl"
    options = {"zo_eps": np.float64(1e-3), "weight_decay": np.float64(0.1)}
    estimator = MeZOSGD(lr=lambda step: np.float64(rates[step]), **options)  # type: ignore[arg-type]
    with Engine(open_checkpoint(base), ZerothOrder(estimator), journal=path) as engine:
        assert [engine.step(BATCH).lr for _ in range(2)] == rates[:2]
        assert [update.lr for update in engine.journal.updates] == rates[:2]
        with pytest.raises(OptionError, match="lr at step 2"):
            engine.step(BATCH)
        assert engine.version == 2
    assert len(Journal(path).updates) == 2, "as Python reads them"


@pytest.mark.parametrize("in_place", [True, False])
def test_a_warm_up_may_begin_at_zero(base: Path, tmp_path: Path, *, in_place: bool) -> None:
    """Such a step is recorded like any other; of MeZO's walk there and back its rounding stays, as
    in MeZO.
    """
    rates = [0.0, 1e-2]
    estimator = MeZOSGD(lr=lambda step: rates[step], zo_eps=1e-3, perturb_in_place=in_place)
    whole = AutoModelForCausalLM.from_pretrained(base)
    with Engine(
        open_checkpoint(base), ZerothOrder(estimator), journal=tmp_path / "journal.jsonl"
    ) as engine:
        before = weights(engine)
        first = engine.step(BATCH)
        assert first.share_applied is None
        assert in_place or all(
            torch.equal(value, before[name]) for name, value in weights(engine).items()
        )
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
    with Engine(
        open_checkpoint(base), ZerothOrder(MEZO), memory=MemoryPolicy(activations=15_000)
    ) as engine:
        engine.step(BATCH)
        together = engine.evaluate(iter(many))
        alone = [engine.evaluate([batch]) for batch in many]
    assert 1 < together.sweeps < 7
    assert together.losses == tuple(result.loss for result in alone)
    assert together.tokens == sum(result.tokens for result in alone)
    assert together.loss == pytest.approx(
        sum(r.loss * r.tokens for r in alone) / together.tokens, rel=1e-12
    )


def test_an_interrupted_replay_loses_nothing(base: Path) -> None:
    interrupt: Callable[[], object] = Mock()

    def interruptible(kernel: Kernel, *arguments: Any) -> None:
        interrupt()
        kernel(*arguments)

    with kernels_in(interruptible):
        engine = Engine(open_checkpoint(base), ZerothOrder(MEZO))
    undisturbed = Engine(open_checkpoint(base), ZerothOrder(MEZO))
    with engine, undisturbed:
        for each in (engine, undisturbed):
            for seed in range(3):
                each.step(BATCH, seed=seed)
        interrupt = fails_at(Mock(), 17, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.flush()
        assert_equal(weights(engine), weights(undisturbed))
        assert engine.step(BATCH, seed=9).losses == undisturbed.step(BATCH, seed=9).losses


def test_a_closed_engine_leaves_nothing_open_and_use_of_it_is_refused(
    base: Path, tmp_path: Path
) -> None:
    def open_files() -> set[str]:
        return {str(link.resolve()) for link in Path("/proc/self/fd").iterdir() if link.exists()}

    threads, files = set(threading.enumerate()), open_files()
    model: HFBlockModel = open_checkpoint(base)
    engine = Engine(model, ZerothOrder(MEZO))
    views = {id(p): p.data_ptr() for p in model.skeleton.parameters()}
    for _ in range(3):
        engine.step(BATCH)
    assert {id(p): p.data_ptr() for p in model.skeleton.parameters()} == views, (
        "the work buffer is allocated once"
    )
    assert any(str(base) in file for file in open_files())
    engine.close()
    engine.close()
    assert set(threading.enumerate()) == threads
    assert open_files() <= files
    for use in (
        lambda: engine.step(BATCH),
        lambda: engine.evaluate([BATCH]),
        engine.flush,
        lambda: list(engine.parameters_now()),
        lambda: engine.export(tmp_path / "out"),
    ):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.parametrize("wrong", [MeZOSGD, 1e-6], ids=repr)
def test_what_is_no_estimator_is_refused_before_a_journal_is_begun(
    base: Path, tmp_path: Path, wrong: Any
) -> None:
    model, journal = open_checkpoint(base), tmp_path / "journal.jsonl"
    with pytest.raises(
        OptionError, match=r"estimator: found .*expected an estimator, such as MeZOSGD"
    ):
        Engine(model, ZerothOrder(wrong), journal=journal)
    assert not journal.exists()
    with Engine(model, ZerothOrder(MEZO), journal=journal):
        pass  # the model can be used


def test_a_batch_without_labels_does_not_count(base: Path, tmp_path: Path) -> None:
    model = ToyBlockModel(
        9, 4, 2, tied=False, dtype=torch.float32, file=tmp_path / "toy.safetensors"
    )
    batch = {key: value for key, value in make_batch(9, [5]).items() if key != "attention_mask"}
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with Engine(model, ZerothOrder(MEZO)) as engine:
        assert engine.evaluate([batch, empty]).loss == engine.evaluate([batch]).loss
        for batches, told in (([empty], "no labelled token"), ([], "batches")):
            with pytest.raises(BatchError, match=told):
                engine.evaluate(batches)


def test_the_engine_is_used_once_at_a_time(engine: Engine) -> None:
    engine.step(BATCH)
    iterator = engine.parameters_now()
    next(iterator)
    for use in (lambda: engine.step(BATCH), lambda: engine.evaluate([BATCH]), engine.flush):
        with pytest.raises(BusyError, match="close"):
            use()
    iterator.close()
    assert engine.step(BATCH).step == 1


def test_an_export_that_fails_lets_go_of_the_engine(engine: Engine, tmp_path: Path) -> None:
    engine.step(BATCH)
    before = weights(engine)
    (tmp_path / "mine").touch()
    with pytest.raises(OutputError):
        engine.export(tmp_path)
    with (
        patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")),
        pytest.raises(OutputError),
    ):
        engine.export(tmp_path / "out")
    assert_equal(weights(engine), before)


def test_a_sweep_frees_the_generators_of_directions_that_it_did_not_draw(base: Path) -> None:
    model = open_checkpoint(base)
    noise = SequentialNoise(model.layouts)
    with Engine(model, ZerothOrder(MEZO, noise=noise)) as engine:
        for seed in (5, 6, 7):
            engine.step(BATCH, seed=seed)
        assert set(noise._streams) == {6, 7}, "the update before is replayed in a step's sweep"
        list(engine.parameters_now())
        assert set(noise._streams) == {7}


@pytest.mark.parametrize("kept", [0, 2])
def test_a_source_that_was_passed_gets_all_blocks_to_write(
    base: Path, tmp_path: Path, kept: int
) -> None:
    model, run = open_checkpoint(base), tmp_path / "run"
    with behind_copies() as device, contextlib.closing(Journal(run / "journal.jsonl")) as journal:
        scratch = Scratch(run, model.layouts, journal.chain)
        source = SegmentStore(
            model.weights, model.layouts, device.host_memory, scratch=scratch, write_back_every=2
        )
        custom = CustomSource(source, OverlappedScheduler(source, device, kept=kept))
        options = EngineOptions(source=custom)
        method = ZerothOrder(MEZO, noise=SequentialNoise(model.layouts))
        with (
            contextlib.closing(source),
            Engine(model, method, device=device, journal=journal, options=options) as engine,
        ):
            assert engine.write_back_every == 2
            for _ in range(7):
                engine.step(BATCH)
        assert min(scratch.version(index) for index in range(len(model.layouts))) >= 3, (
            "also of what stays on the device"
        )


@pytest.mark.parametrize("second", ["replayer", "engine", "source", "shared base"])
def test_a_model_of_an_open_engine_is_refused_to_another_and_the_open_one_goes_on(
    base: Path, second: str
) -> None:
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
        with contextlib.closing(
            SegmentStore(model.weights, model.layouts, device.host_memory)
        ) as source:
            openings["source"] = lambda: Engine(
                model,
                ZerothOrder(MEZO),
                device=device,
                options=EngineOptions(source=CustomSource(source)),
            )
            with pytest.raises(BusyError, match="open on it"):
                openings[second]()
        losses.append(engine.step(batch).losses)
    assert losses == expected
    with Engine(model) as replayer:  # once the first is closed
        replayer.evaluate([batch])


def test_an_engine_that_is_dropped_without_being_closed_leaves_its_model_to_another_one(
    base: Path,
) -> None:
    model = open_checkpoint(base)
    engine = Engine(model, ZerothOrder(MEZO))
    engine.step(make_batch(40, [7]))
    del engine
    gc.collect()
    Engine(model).close()


def test_groups_at_one_evaluation_have_their_own_outputs(base: Path) -> None:
    model, first, second = (
        open_checkpoint(base),
        make_batch(40, [7]),
        make_batch(40, [5, 3], seed=1),
    )
    with Engine(model, ZerothOrder(MEZO)) as engine:
        at, *_ = engine.ask()
        apart = [
            engine.forwards_at([(one, [batch])], model)[0]
            for one in (at, None)
            for batch in (first, second)
        ]
        together = engine.forwards_at(
            [(at, [first]), (None, [first]), (at, [second]), (None, [second])], model
        )
    assert [together[0], together[2], together[1], together[3]] == apart


def test_forwards_at_an_evaluation_pass_no_other_where_weights_are_not_perturbed_in_place(
    base: Path,
) -> None:
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-3, q=4, perturb_in_place=False)
    with Engine(open_checkpoint(base), ZerothOrder(estimator)) as engine:
        batch, asked = make_batch(40, [7]), engine.ask()
        with patch.object(Run, "evaluate", autospec=True, side_effect=Run.evaluate) as sweep:
            for at in asked:
                list(engine.forwards([batch], at=at))
    assert [len(call.args[2]) for call in sweep.mock_calls] == [1] * len(asked)


SEGMENTS = 4  # embedding, two blocks, head


def of_forwards(base: Path, **options: Any) -> Engine:
    estimator = MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False)
    return zeroth_order(
        open_checkpoint(base), estimator, noise=PhiloxNoise(Distribution.GAUSSIAN), **options
    )


def of_gradients(base: Path, **options: Any) -> Engine:
    config = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"])
    model = open_checkpoint(base, adapter=Adapter(config=config))
    return first_order(model, partial(torch.optim.SGD, lr=1e-2), **options)


ENGINES: dict[str, Any] = {
    "zeroth-order": of_forwards,
    "serial": partial(of_forwards, overlap=False),
    "low-rank": partial(of_forwards, perturbation=LowRankPerturbation(rank=2)),
    "first-order": of_gradients,
}


@pytest.mark.parametrize("kind", ENGINES)
def test_each_visit_of_a_sweep_is_reported_once(kind: str, base: Path) -> None:
    losses = []
    for is_watched in (True, False):
        seen: list[tuple[int, int]] = []
        with ENGINES[kind](base) as engine:
            engine.watch(
                (lambda done, total, seen=seen: seen.append((done, total))) if is_watched else None
            )
            losses.append(
                [engine.step(BATCH).loss, engine.step(BATCH).loss, engine.evaluate([BATCH]).loss]
            )
        if is_watched:
            sweeps = [[visit] for visit in seen if visit[0] == 1]
            assert len(sweeps) == 3
            assert seen == [
                (done, total) for [(_, total)] in sweeps for done in range(1, total + 1)
            ]
            assert {total for _, total in seen} >= {SEGMENTS}
        else:
            assert seen == []
    assert losses[0] == losses[1]


def test_a_sweep_after_one_that_failed_counts_from_its_start(base: Path) -> None:
    seen: list[int] = []

    def visited(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with of_forwards(base) as engine:
        engine.watch(visited)
        with pytest.raises(KeyboardInterrupt):
            engine.evaluate([BATCH])
        engine.evaluate([BATCH])
    assert seen == [1, 2, 1, 2, 3, 4]


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=6),
    rows=st.integers(1, 6),
    left=st.booleans(),
    unlabelled=st.sets(st.integers(0, 5)),
)
def test_pieces_hold_each_labelled_row_once(
    lengths: list[int], rows: int, left: bool, unlabelled: set[int]
) -> None:
    batch = make_batch(40, lengths, left=left)
    for row in unlabelled & set(range(len(lengths))):
        batch["labels"][row] = -100
    pieces = split_rows(batch, rows)
    if len(lengths) <= rows or labelled_tokens(batch) == 0:
        assert pieces == [batch]
        return
    assert sum(labelled_tokens(piece) for piece in pieces) == labelled_tokens(batch)
    assert all(labelled_tokens(piece) for piece in pieces)
    for piece in pieces:
        assert len({value.shape for value in piece.values()}) == 1
        assert len(piece["labels"]) <= rows
        assert piece["attention_mask"][:, -1].any()
    kept = [
        row[mask == 1].tolist()
        for p in pieces
        for row, mask in zip(p["input_ids"], p["attention_mask"], strict=True)
    ]
    whole = [
        row[mask == 1].tolist()
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert kept == [
        row
        for i, row in enumerate(whole)
        if not set(range(i - i % rows, i - i % rows + rows))
        <= (unlabelled | set(range(len(lengths), 99)))
    ]


def test_columns_are_cut_where_all_rows_of_a_piece_are_padded() -> None:
    """Not those of patches of images, of positions that all rows share, and of a label on
    padding.
    """
    batch = {
        "input_ids": torch.ones(4, 5, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0]] * 4),
        "labels": torch.tensor([[1, 1, 1, -100, -100]] * 4),
        "pixel_values": torch.ones(32, 5),
        "position_ids": torch.arange(5)[None],
    }
    for piece in split_rows(batch, 2):
        assert [tuple(piece[name].shape) for name in batch] == [
            (2, 3),
            (2, 3),
            (2, 3),
            (32, 5),
            (1, 3),
        ]
    batch = {**make_batch(40, [5, 2, 2]), "position_ids": torch.arange(5)[None]}
    batch["labels"][2, 3] = 7
    for name in ("labels", "position_ids"):
        assert [tuple(piece[name].shape) for piece in split_rows(batch, 1)] == [
            (1, 5),
            (1, 2),
            (1, 4),
        ]
    batch = {**make_batch(40, [5, 5, 2]), "position_ids": torch.arange(5)[None]}
    assert [tuple(piece["position_ids"].shape) for piece in split_rows(batch, 1)] == [
        (1, 5),
        (1, 5),
        (1, 2),
    ]


def test_losses_count_by_their_labelled_tokens() -> None:
    losses = [torch.tensor(value) for value in (1.0, 2.0, 4.0)]
    joined = combined_loss(losses, [1, 2, 5])
    assert joined.item() == 25 / 8
    assert joined.dtype is torch.float32
    assert combined_loss(losses[:1], [3]) is losses[0]


@pytest.mark.few(2)
@pytest.mark.parametrize(("model_type", "left"), each_choice(list(CONFIGS), [False, True]))
def test_the_loss_does_not_depend_on_the_cutting(
    model_type: str, left: bool, tmp_path: Path
) -> None:
    precise_base = save_model(tmp_path / "base", small_config(model_type), torch.float64)
    batch = make_batch(40, [9, 3, 12, 2, 7], left=left)
    batch["labels"][1] = -100
    found = []
    for rows in (None, 1, 2, 3, 4, 5, 99):
        with Engine(
            open_checkpoint(precise_base),
            ZerothOrder(MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=2)),
            micro_batch_size=rows,
        ) as engine:
            steps = [engine.step(batch, seed=seed) for seed in range(2)]
            result = engine.evaluate([batch, batch])
            found.append([*steps[0].losses, *steps[1].losses, *result.losses, result.loss])
            assert result.tokens == 2 * labelled_tokens(batch)
    assert found[5] == found[6] == found[0]  # one piece is the plain step, bit for bit
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=3e-6)  # Hugging Face takes the loss in float32


def test_the_trainers_own_way_of_counting_gives_the_same_loss(tmp_path: Path) -> None:
    precise_base, batch = (
        save_model(tmp_path / "base", small_config("opt"), torch.float64),
        make_batch(40, [9, 3, 12]),
    )
    whole = AutoModelForCausalLM.from_pretrained(precise_base, dtype="auto")
    count = labelled_tokens(batch)
    with torch.inference_mode():
        rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(3)]
        expected = sum(whole(**row, num_items_in_batch=count).loss.item() for row in rows)
    with Engine(open_checkpoint(precise_base), ZerothOrder(MEZO), micro_batch_size=1) as engine:
        assert engine.evaluate([batch]).loss == pytest.approx(expected, rel=1e-6)


def test_every_segment_is_visited_once_a_step(base: Path) -> None:
    model = open_checkpoint(base)
    with Engine(
        model, ZerothOrder(MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=3)), micro_batch_size=1
    ) as engine:
        engine.step(make_batch(40, [9, 3]))
        source: Any = engine._run.segments.source
        with patch.object(source, "acquire", wraps=source.acquire) as acquire:
            engine.step(make_batch(40, [9, 3]))
    assert [call.args[0] for call in acquire.mock_calls] == list(range(len(model.layouts)))


def test_a_piece_whose_loss_is_not_finite_stops_the_step(base: Path) -> None:
    model, far = open_checkpoint(base, dtype="float64"), MeZOSGD(lr=1e-2, zo_eps=1e306)
    with Engine(model, ZerothOrder(far), micro_batch_size=1) as engine:
        with pytest.raises(NonFiniteLossError):
            engine.step(make_batch(40, [9, 3]))
        assert engine.version == 0


class Watched(Proxy):
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
        (lambda: MemoryPolicy(host="6"), "memory.host: found 6, which .* did you mean 6GB"),
        (
            lambda: MemoryPolicy(device=" 16000 "),
            "memory.device: found 16000, .* did you mean 16000MB",
        ),
        (lambda: MemoryPolicy(activations="0.5"), "memory.activations: found '0.5'"),
        (lambda: MemoryPolicy(activations="1.5"), "memory.activations: .* did you mean 1.5GB"),
        (lambda: MemoryPolicy(activations=-5), "memory.activations: found"),
        (lambda: MemoryPolicy(activations=0), "memory.activations: found"),
        (lambda: MemoryPolicy(least_activations="much"), "memory.least_activations: found"),
        (lambda: WriteBackPolicy(directory="run", every=0), "write_back.every: found 0"),
        (lambda: WriteBackPolicy(directory="run", every=True), "write_back.every: found True"),
        (
            lambda: WriteBackPolicy(directory="run", every="often"),  # type: ignore[arg-type]
            "write_back.every: found 'often'",
        ),
        (
            lambda: WriteBackPolicy(directory="run", snapshot_every=-3),
            "write_back.snapshot_every: found -3",
        ),
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
def test_an_option_that_nothing_would_heed_is_refused(
    base: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        zeroth_order(open_checkpoint(base), MEZO, **options)
    with pytest.raises(OptionError, match=message):
        Engine(open_checkpoint(base), **options)


@pytest.mark.parametrize("noise", ["MeZO's", "Gaussian"])
def test_noise_of_another_distribution_than_the_estimator_needs_is_refused(
    base: Path, tmp_path: Path, noise: str
) -> None:
    model, estimator, path = (
        open_checkpoint(base),
        FZOO(lr=1e-2, zo_eps=1e-3),
        tmp_path / "journal.jsonl",
    )
    given = SequentialNoise(model.layouts) if noise == "MeZO's" else PhiloxNoise()
    with pytest.raises(
        OptionError,
        match=r"noise: found .*expected rademacher noise, which the estimator fzoo needs",
    ):
        Engine(model, ZerothOrder(estimator, noise=given), journal=path)
    with contextlib.closing(HostDevice()) as device:
        source = SegmentStore(model.weights, model.layouts, device.host_memory)
        with contextlib.closing(source), pytest.raises(OptionError, match="rademacher"):
            Engine(
                model,
                ZerothOrder(estimator, noise=given),
                device=device,
                journal=path,
                options=EngineOptions(source=CustomSource(source)),
            )
    assert not path.exists()


@pytest.mark.parametrize(
    ("estimator", "noise"),
    [
        (MEZO, None),
        *((MEZO, PhiloxNoise(distribution)) for distribution in Distribution),
        (FZOO(lr=1e-2, zo_eps=1e-3), None),
        (FZOO(lr=1e-2, zo_eps=1e-3), PhiloxNoise(Distribution.RADEMACHER)),
    ],
    ids=["mezo", "gaussian", "rademacher", "fzoo", "fzoo, given"],
)
def test_a_run_has_the_noise_that_its_estimator_needs_and_goes_on_with_it(
    estimator: ZOEstimator, noise: NoiseGenerator | None, base: Path, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    with Engine(open_checkpoint(base), ZerothOrder(estimator, noise=noise), journal=path) as engine:
        engine.step(BATCH)
        expected = weights(engine)
        assert engine.journal.header is not None
        name = (
            PhiloxNoise(Distribution.RADEMACHER).name
            if estimator is not MEZO
            else (noise or SequentialNoise([])).name
        )
        assert engine.journal.header["noise"] == name
    with Engine(open_checkpoint(base), journal=path) as engine:
        assert_equal(weights(engine), expected)
    with Engine(open_checkpoint(base), ZerothOrder(estimator), journal=path) as engine:
        # the noise is the journal's
        assert engine.step(BATCH).step == 1


def test_a_journal_of_ones_own_noise_needs_it_again(base: Path, tmp_path: Path) -> None:
    class Own(PhiloxNoise):
        @property
        def name(self) -> str:
            return "own"

    path = tmp_path / "journal.jsonl"
    Engine(open_checkpoint(base), ZerothOrder(MEZO, noise=Own()), journal=path).close()
    with pytest.raises(OptionError, match=r"noise: found 'own'.*philox4x32-10-rademacher"):
        Engine(open_checkpoint(base), journal=path)
    with Engine(open_checkpoint(base), ZerothOrder(None, noise=Own()), journal=path) as engine:
        engine.flush()


def test_exact_mezo_is_its_noise_and_its_walk_whatever_else_is_said() -> None:
    exact = Optimization(method="mezo", lr=1e-6, noise=Noise.GAUSSIAN)
    assert exact.generator() is None
    assert exact.scheduled_estimator(1).perturb_in_place
    plain = Optimization(method="zeroth-order", lr=1e-6)
    assert isinstance(plain.generator(), PhiloxNoise)
    assert not plain.scheduled_estimator(1).perturb_in_place
    assert Optimization(method="zeroth-order", noise=Noise.MEZO).generator() is None
    assert SequentialNoise([]).name == "torch-cpu-sequential"


def test_a_size_of_device_memory_without_overlap_is_refused(base: Path) -> None:
    with behind_copies() as device, pytest.raises(OptionError, match=r"memory\.device"):
        Engine(
            open_checkpoint(base),
            ZerothOrder(MEZO),
            device=device,
            memory=MemoryPolicy(device="1GiB"),
            options=EngineOptions(overlap=False),
        )


def test_after_a_refusal_the_callers_parts_and_the_model_are_of_use(
    base: Path, tmp_path: Path
) -> None:
    model, device = open_checkpoint(base), Watched(HostDevice())
    with contextlib.closing(Journal(tmp_path / "journal.jsonl")) as journal:
        with pytest.raises(MemoryBudgetError):
            Engine(
                model,
                ZerothOrder(MEZO),
                device=device,
                journal=journal,
                memory=MemoryPolicy(host="1KB"),
            )
        assert not device.closed
        assert not (tmp_path / "journal.jsonl").exists()
        with Engine(model, ZerothOrder(MEZO), device=device, journal=journal) as engine:
            engine.step(BATCH)
        assert not device.closed
        journal.append(
            MEZO.update(
                1, MEZO.evaluations(1, iter([3])), [torch.tensor(1.0), torch.tensor(2.0)], 1.0, ()
            )
        )


def test_a_run_that_is_refused_binds_no_later_one(base: Path, tmp_path: Path) -> None:
    path, nowhere = tmp_path / "journal.jsonl", tmp_path / "file" / "run"
    (tmp_path / "file").write_text("in the way")
    for journal in (path, Journal(path)):
        with pytest.raises(ScratchError):
            Engine(
                open_checkpoint(base),
                ZerothOrder(MEZO),
                journal=journal,
                options=EngineOptions(write_back=WriteBackPolicy(directory=nowhere, every=1)),
            )
        assert not path.exists()
        with Engine(
            open_checkpoint(base), ZerothOrder(MeZOSGD(lr=5e-3, zo_eps=1e-3)), journal=journal
        ) as engine:
            engine.step(BATCH)
        if isinstance(journal, Journal):
            journal.close()
        path.unlink()


def test_parts_stay_the_callers(base: Path, tmp_path: Path) -> None:
    model, device, other = (
        open_checkpoint(base),
        Watched(HostDevice()),
        save_model(tmp_path / "b", small_config("opt")),
    )
    source = Watched(SegmentStore(model.weights, model.layouts, device.host_memory))
    method = ZerothOrder(MEZO, noise=PhiloxNoise())
    custom = CustomSource(source)
    alone = EngineOptions(source=custom)
    with pytest.raises(OptionError, match="source"):
        Engine(open_checkpoint(other), method, device=device, options=alone)
    written = EngineOptions(source=custom, write_back=WriteBackPolicy(directory=base))
    with pytest.raises(OptionError, match="write_back"):
        Engine(model, method, device=device, options=written)
    traced = EngineOptions(source=custom, trace=base / "config.json")
    with pytest.raises(OutputError):
        Engine(model, method, device=device, options=traced)
    losses = []
    for scheduler in (None, SerialScheduler(source, device)):
        options = EngineOptions(source=CustomSource(source, scheduler))
        with Engine(model, method, device=device, options=options) as engine:
            losses.append(engine.evaluate([BATCH]).losses)
            assert engine.host_plan is None
            assert engine.device_plan is None
        assert not source.closed
        assert not device.closed
    assert losses[0] == losses[1]
    assert source.acquire(0).version == 0, "it can still be used"


def test_paths_are_opened_and_closed_objects_are_left_open(base: Path, tmp_path: Path) -> None:
    path, file = tmp_path / "journal.jsonl", tmp_path / "trace.json"
    with Engine(
        open_checkpoint(base), ZerothOrder(MEZO), journal=path, options=EngineOptions(trace=file)
    ) as engine:
        engine.step(BATCH)
    assert file.read_text().rstrip().endswith("]"), "the trace is complete"
    with contextlib.closing(Journal(path)) as journal, Trace(tmp_path / "other.json") as trace:
        with Engine(
            open_checkpoint(base),
            ZerothOrder(MEZO),
            journal=journal,
            options=EngineOptions(trace=trace),
        ) as engine:
            engine.step(BATCH)
        with Engine(
            open_checkpoint(base),
            ZerothOrder(MEZO),
            journal=journal,
            options=EngineOptions(trace=trace),
        ) as engine:
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
    with (
        behind_copies() as device,
        Engine(
            model, ZerothOrder(MEZO), device=device, options=EngineOptions(overlap=False)
        ) as engine,
    ):
        moved = [engine.step(BATCH, seed=seed).bytes_moved for seed in range(3)]
        assert len(list(engine.parameters_now())) > 0
        with (
            patch.object(model, "head", side_effect=ZeroDivisionError),
            pytest.raises(ZeroDivisionError),
        ):
            engine.step(BATCH)
        assert engine.step(BATCH).bytes_moved <= moved[2]


SGD = partial(torch.optim.SGD, lr=1e-2)
METHOD = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3))
ALL = FirstOrder(LOMO(), lr=1e-2)


def adapted(base: Path) -> Any:
    peft = pytest.importorskip("peft")
    return open_checkpoint(
        base, adapter=Adapter(config=peft.LoraConfig(r=2, target_modules=["q_proj"]), seed=1)
    )


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "blocks written back by gradients": (
        ALL,
        {"write_back": WriteBackPolicy(directory="x")},
        "write_back",
    ),
    "commits of forwards": (METHOD, {"commit_every": 1, "run": "x"}, "commit_every"),
    "commits of an adapter": (FirstOrder(SGD), {"commit_every": 1, "run": "x"}, "commit_every"),
    "commits without a directory": (ALL, {"commit_every": 1}, "run: found None"),
    **{
        f"commits every {steps!r} steps": (
            ALL,
            {"commit_every": steps, "run": "x"},
            f"commit_every: found {steps!r}",
        )
        for steps in (0, 1.5, "3")
    },
    "a journal without a directory": (ALL, {"journal": "x"}, "run: found None, and a journal"),
    "a delayed update on disk": (
        FirstOrder(Delayed(TorchOptimizer(SGD)), lr=1e-2),
        {"commit_every": 1, "run": "x"},
        "while they are written",
    ),
    "a journal beside a snapshot": (AtSnapshot(0, None), {"journal": "x"}, "journal"),
    "a directory beside a snapshot": (AtSnapshot(0, None), {"run": "x"}, "run"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_method_cannot_heed_is_refused_and_leaves_nothing(
    case: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    method, options, message = REFUSED[case]
    model = open_checkpoint(base)
    with pytest.raises(OptionError, match=message):
        open_engine(model, method, **options)
    assert not any(tmp_path.iterdir())
    with Engine(model, METHOD) as engine:  # the model was not taken
        engine.step(BATCH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": LOMO()}, "lr: found None"),
        ({"optimizer": SGD, "clip": 0.0}, "clip: found 0.0"),
        ({"optimizer": LOMO(), "lr": 1.0, "clip_value": float("nan")}, "clip_value: found nan"),
        ({"optimizer": SGD, "scaling": LossScaling()}, "scaling: found an optimizer of an adapter"),
        ({"optimizer": SGD, "clip_value": 1.0}, "clip_value: found an optimizer of an adapter"),
    ],
)
def test_a_method_checks_itself(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FirstOrder(**options)


def test_what_belongs_to_another_state_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    with Engine(open_checkpoint(base), METHOD) as engine:
        for asked in (
            lambda: engine.optimizer,
            lambda: engine.parameters,
            lambda: engine.gradients(BATCH),
            engine.state_dict,
            lambda: engine.load_state_dict({}),
            lambda: engine.load_parameters({}),
            engine.take_snapshot,
            engine.commit,
            lambda: engine.committed,
        ):
            with pytest.raises(OptionError, match=r"expected|FirstOrder"):
                asked()
        assert engine.step(BATCH).grad_norm is None
    with Engine(adapted(base), FirstOrder(SGD), run=tmp_path / "run") as engine:
        for asked in (engine.ask, lambda: engine.tell([1.0]), engine.commit):
            with pytest.raises(OptionError):
                asked()
        with pytest.raises(OptionError, match="a seed of a first-order step"):
            engine.step(BATCH, seed=1)
        result = engine.step(BATCH)
        assert result.projected_grads == ()
        assert result.losses == (result.loss,)
        assert result.lr == 1e-2


def test_a_source_serves_one_engine_at_a_time_and_zeroth_order_alone(base: Path) -> None:
    model, other, device = open_checkpoint(base), open_checkpoint(base), HostDevice()
    with closing(SegmentStore(model.weights, model.layouts, device.host_memory)) as source:
        with Engine(
            model, METHOD, device=device, options=EngineOptions(source=CustomSource(source))
        ) as engine:
            with pytest.raises(BusyError, match="SegmentStore"):
                Engine(
                    other, METHOD, device=device, options=EngineOptions(source=CustomSource(source))
                )
            engine.step(BATCH)
        for method in (
            ALL,
            ZerothOrder(METHOD.estimator, perturbation=LowRankPerturbation(rank=2)),
        ):
            with pytest.raises(
                OptionError, match="source: found a run whose weights are not replayed"
            ):
                Engine(
                    other, method, device=device, options=EngineOptions(source=CustomSource(source))
                )
