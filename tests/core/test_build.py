"""Building an engine: what is asked for is heeded or refused, and what a caller passes stays the caller's."""

import contextlib
import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import Proxy, assert_equal, behind_copies, weights, zeroth_order
from models import make_batch, save_model, small_config

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2core import (
    FZOO,
    LOMO,
    AtSnapshot,
    Delayed,
    Distribution,
    Engine,
    FirstOrder,
    HostDevice,
    Journal,
    LossScaling,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    PhiloxNoise,
    SegmentStore,
    SequentialNoise,
    SerialScheduler,
    TorchOptimizer,
    Trace,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import BatchError, BusyError, JournalError, MemoryBudgetError, OptionError, OutputError, ScratchError
from zo2core.protocols import NoiseGenerator, ZOEstimator

MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-3)
BATCH = make_batch(40, [9, 5])


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
        name = PhiloxNoise(Distribution.RADEMACHER).name if estimator is not MEZO else (noise or SequentialNoise([])).name
        assert engine.journal.header["noise"] == name
    with Engine(open_checkpoint(base), journal=path) as engine:
        assert_equal(weights(engine), expected)
    with Engine(open_checkpoint(base), ZerothOrder(estimator), journal=path) as engine:  # the noise is the journal's
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
    exact = Optimization(exact_mezo=True, noise=Noise.GAUSSIAN)
    assert exact.generator() is None
    assert exact.estimator_of(1).perturb_in_place
    plain = Optimization()
    assert isinstance(plain.generator(), PhiloxNoise)
    assert not plain.estimator_of(1).perturb_in_place
    assert Optimization(noise=Noise.MEZO).generator() is None
    assert SequentialNoise([]).name == "torch-cpu-sequential"


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


def test_parts_stay_the_callers(base: Path, tmp_path: Path) -> None:
    model, device, other = open_checkpoint(base), Watched(HostDevice()), save_model(tmp_path / "b", small_config("opt"))
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


SGD = partial(torch.optim.SGD, lr=1e-2)
METHOD = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3))
ALL = FirstOrder(LOMO(), lr=1e-2)


def adapted(base: Path) -> Any:
    peft = pytest.importorskip("peft")
    return open_checkpoint(base, adapter=Adapter(config=peft.LoraConfig(r=2, target_modules=["q_proj"]), seed=1))


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "blocks written back by gradients": (ALL, {"write_back": WriteBackPolicy(directory="x")}, "write_back"),
    "commits of forwards": (METHOD, {"commit_every": 1, "run": "x"}, "commit_every"),
    "commits of an adapter": (FirstOrder(SGD), {"commit_every": 1, "run": "x"}, "commit_every"),
    "commits without a directory": (ALL, {"commit_every": 1}, "run: found None"),
    **{
        f"commits every {steps!r} steps": (ALL, {"commit_every": steps, "run": "x"}, f"commit_every: found {steps!r}")
        for steps in (0, 1.5, "3")
    },
    "a journal without a directory": (ALL, {"journal": "x"}, "run: found None, and a journal"),
    "a delayed update on disk": (
        FirstOrder(Delayed(TorchOptimizer(SGD)), lr=1e-2),
        {"commit_every": 1, "run": "x"},
        "while they are written",
    ),
    "a scheduler without its source": (METHOD, {"scheduler": object()}, "scheduler"),
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
        Engine(model, method, **options)
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
        with Engine(model, METHOD, source=source, device=device) as engine:
            with pytest.raises(BusyError, match="SegmentStore"):
                Engine(other, METHOD, source=source, device=device)
            engine.step(BATCH)
        for method in (ALL, ZerothOrder(METHOD.estimator, perturbation=LowRankPerturbation(rank=2))):
            with pytest.raises(OptionError, match="source: found a run whose weights are not replayed"):
                Engine(other, method, source=source, device=device)
