"""Many runs over one base: each run's bits are those of it alone, whatever the others are, do, or
fail at.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from engines import assert_equal, behind_copies, first_order, outcome, weights, zeroth_order
from engines import memory as stored
from hypothesis import given
from hypothesis import strategies as st
from models import make_batch, save_model, small_config
from peft_models import lora
from profiles import examples

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.conversion import quantize
from zo2adapters.models.hf import HFBlockModel
from zo2core import (
    Engine,
    EngineOptions,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    PerRowRGE,
    SharedBase,
    ZerothOrder,
)
from zo2core.errors import (
    BusyError,
    CheckpointError,
    ClosedError,
    JournalError,
    MemoryBudgetError,
    NonFiniteLossError,
    OptionError,
)
from zo2core.schedulers.lockstep import Lockstep
from zo2core.sources import SegmentStore
from zo2core.sweep.gradient_visitor import GraphRoom
from zo2core.types import Lane

BUCKETS = (None, 1, 2)
BASES = ("opt", "llama", "llama-nf4")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    config = small_config("llama", num_hidden_layers=3, hidden_size=24, intermediate_size=32)
    made = {
        "opt": save_model(folder / "opt", small_config("opt", num_hidden_layers=3), torch.bfloat16),
        "llama": save_model(folder / "llama", config),
        "llama-nf4": folder / "llama-nf4",
    }
    quantize(made["llama"], made["llama-nf4"], "nf4")
    return made


def adapted(base: Path, number: int) -> Any:
    targets = ["q_proj", "fc1" if base.name == "opt" else "up_proj"]
    return open_checkpoint(
        base, adapter=Adapter(config=lora(r=1 + number, target_modules=targets), seed=number)
    )


def low_rank(base: Path, number: int, **options: Any) -> Engine:
    estimator = MeZOSGD(lr=1e-2 * (1 + number), zo_eps=1e-2, perturb_in_place=False)
    perturbation = LowRankPerturbation(rank=1 + number % 2, period=2)
    return zeroth_order(
        open_checkpoint(base), estimator, perturbation=perturbation, seed=number, **options
    )


def per_row(base: Path, number: int, **options: Any) -> Engine:
    estimator = PerRowRGE(lr=1e-2, zo_eps=1e-2, perturb_in_place=False, q=3)
    return zeroth_order(
        open_checkpoint(base),
        estimator,
        perturbation=LowRankPerturbation(rank=2),
        seed=number,
        **options,
    )


def exact(base: Path, number: int, **options: Any) -> Engine:
    return zeroth_order(
        adapted(base, number), MeZOSGD(lr=1e-2, zo_eps=1e-2), seed=number, **options
    )


def adamw(base: Path, number: int, **options: Any) -> Engine:
    lr = 1e-2 * (1 + number)
    if options.get("journal") is None:
        options.pop("journal", None)
        return first_order(
            adapted(base, number), partial(torch.optim.AdamW, lr=lr), clip=0.1, **options
        )
    directory = options["journal"].parent
    directory.mkdir(exist_ok=True)
    make: Any = partial(torch.optim.AdamW, lr=lr)
    return first_order(
        adapted(base, number),
        make,
        lr=lambda step: lr / (1 + step),
        options={"lr": lr},
        run=directory,
        **options,
    )


METHODS: Mapping[str, Callable[..., Any]] = {
    "low-rank": low_rank,
    "per-row": per_row,
    "exact": exact,
    "adamw": adamw,
}


def batch_of(number: int, step: int) -> dict[str, torch.Tensor]:
    return make_batch(40, [7, 4 + number % 3, 5], seed=100 * number + step)


@dataclass(frozen=True)
class Drawn:
    method: str
    joins: int  # round in which it takes its first step
    steps: int


def alone(
    base: Path, number: int, drawn: Drawn, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    made = outcome(
        METHODS[drawn.method](base, number, **options),
        [batch_of(number, step) for step in range(drawn.steps)],
    )
    return [losses[0] for losses in made[0]], made[1]


def stepped(shared: SharedBase, batches: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The results of a step of each run, none of which may fail."""
    results = shared.step(batches)
    assert not [result for result in results.values() if isinstance(result, Exception)]
    return results


memory = partial(stored, kept=0, budget=1 << 40)


def device_of(name: str) -> AbstractContextManager[Any]:
    return nullcontext("cpu") if name == "cpu" else behind_copies()


@examples(short=4, long=50)
@given(data=st.data())
def test_runs_together_are_the_runs_apart(bases: Mapping[str, Path], data: st.DataObject) -> None:
    draw = data.draw
    drawn_runs = st.builds(
        Drawn, st.sampled_from(sorted(METHODS)), st.integers(0, 2), st.integers(1, 3)
    )
    runs = draw(st.lists(drawn_runs, min_size=1, max_size=4))
    base, buckets = bases[draw(st.sampled_from(BASES))], draw(st.sampled_from(BUCKETS))
    overlap, device = draw(st.booleans()), draw(st.sampled_from(["cpu", "cpu", "threads"]))
    policy = memory(buckets, budget=draw(st.sampled_from([0, 1 << 40])))
    policy = policy if device == "threads" and overlap else MemoryPolicy(host=policy.host)
    with ExitStack() as open_runs:
        made = open_runs.enter_context(device_of(device))
        shared = open_runs.enter_context(
            SharedBase(open_checkpoint(base), device=made, memory=policy, overlap=overlap)
        )
        engines: dict[int, Any] = {}
        losses: dict[int, list[float]] = {number: [] for number in range(len(runs))}
        learned: dict[int, dict[str, torch.Tensor]] = {}
        for round_ in range(6):
            for number, drawn in enumerate(runs):
                if drawn.joins == round_:
                    engines[number] = METHODS[drawn.method](base, number, source=shared)
            results = stepped(
                shared,
                {
                    engine: batch_of(number, len(losses[number]))
                    for number, engine in engines.items()
                },
            )
            for number, engine in list(engines.items()):
                losses[number].append(results[engine].loss)
                if len(losses[number]) == runs[number].steps:
                    learned[number] = weights(engine)
                    engines.pop(number).close()
    for number, drawn in enumerate(runs):
        with device_of(device) as made:
            before = alone(base, number, drawn, device=made)
        assert losses[number] == before[0]
        assert_equal(learned[number], before[1])


def test_inputs_that_have_no_room_on_a_device_wait_in_host_memory(
    bases: Mapping[str, Path],
) -> None:
    base, little = bases["llama-nf4"], MemoryPolicy(activations=1)
    with behind_copies() as device, ExitStack() as opened:
        shared = opened.enter_context(
            SharedBase(open_checkpoint(base), device=device, memory=memory(1))
        )
        engine = opened.enter_context(adamw(base, 0, source=shared, memory=little))
        lanes = engine.step(batch_of(0, 0)).lanes
    assert lanes[Lane.ACTIVATIONS_OUT].nbytes > 0
    assert lanes[Lane.WRITE].nbytes == 0


@pytest.fixture
def four(bases: Mapping[str, Path]) -> Iterator[tuple[SharedBase, dict[str, Any]]]:
    base = bases["llama-nf4"]
    with (
        SharedBase(open_checkpoint(base), memory=MemoryPolicy(host=memory(1).host)) as shared,
        ExitStack() as opened,
    ):
        makers = METHODS.items()
        yield (
            shared,
            {name: opened.enter_context(make(base, 0, source=shared)) for name, make in makers},
        )


def test_a_step_of_all_runs_reads_a_block_once_forward_and_once_back(
    four: tuple[SharedBase, dict[str, Any]],
) -> None:
    shared, engines = four
    with patch.object(
        SegmentStore, "_begin_reads", autospec=True, side_effect=SegmentStore._begin_reads
    ) as load:
        results = stepped(shared, {engine: batch_of(0, 0) for engine in engines.values()})
    reads = [call.args[1] for call in load.mock_calls]
    # One bucket: the last block stays for the turn, and the first one of the next sweep may be read
    # ahead.
    assert sorted(reads[:7]) == [0, 1, 1, 2, 2, 3, 4]
    assert len(reads) <= 8
    for result in results.values():
        assert result.lanes[Lane.READ].nbytes > 0, "each run sees what it shares"


def test_quantised_blocks_are_decoded_once_for_all_runs(
    four: tuple[SharedBase, dict[str, Any]],
) -> None:
    shared, engines = four
    with (
        patch("zo2core.shared.decode") as decode,
        patch("zo2core.encodings.decoding.decode") as others,
    ):
        shared.step({engines["low-rank"]: batch_of(0, 0), engines["exact"]: batch_of(0, 0)})
    matrices = 7 * 3
    assert decode.call_count == matrices
    assert others.call_count == 0


def test_a_failed_run_ends_alone_and_can_go_on(
    four: tuple[SharedBase, dict[str, Any]], bases: Mapping[str, Path]
) -> None:
    shared, engines = four
    base, broken = bases["llama-nf4"], engines["exact"]
    with torch.no_grad():
        next(iter(engines["adamw"].parameters.values())).fill_(float("nan"))
    refuse = JournalError("journal", found="no space", expected="space", remedy="free some")
    failed = ArithmeticError("broken")
    with (
        patch.object(engines["per-row"].journal, "append", side_effect=refuse),
        patch.object(broken._run.model, "block", side_effect=failed),
    ):
        results = shared.step({engine: batch_of(0, 0) for engine in engines.values()})
    assert isinstance(results[engines["adamw"]], NonFiniteLossError)
    assert (results[engines["per-row"]], results[broken]) == (refuse, failed)
    losses, learned = alone(base, 0, Drawn("low-rank", 0, 1))
    assert cast("Any", results[engines["low-rank"]]).loss == losses[0]
    assert_equal(weights(engines["low-rank"]), learned)
    stepped(shared, {engines[name]: batch_of(0, 0) for name in ("per-row", "exact")})
    assert engines["per-row"].version == 1
    # The second sweep replays the first step's update into the adapter, and fails before it says
    # so.
    with patch.object(broken._run.update_loss, "sample", side_effect=failed):
        assert shared.step({broken: batch_of(0, 1)})[broken] is failed
    stepped(shared, {broken: batch_of(0, 1)})
    assert_equal(weights(broken), alone(base, 0, Drawn("exact", 0, 2))[1])


def test_functions_run_one_at_a_time_and_in_order(four: tuple[SharedBase, dict[str, Any]]) -> None:
    shared, engines = four
    events: list[str] = []

    def run(name: str) -> None:
        for step in range(2):
            events.append(name)
            time.sleep(0.01)
            events.append(name)
            engines[name].step(batch_of(0, step))

    shared.together({name: partial(run, name) for name in engines})
    assert events == [name for name in engines for _ in range(2)] * 2


def test_a_base_that_cannot_be_read_fails_all_steps_and_later_ones_go_on(
    four: tuple[SharedBase, dict[str, Any]],
) -> None:
    shared, engines = four
    with patch.object(SegmentStore, "_begin_reads", side_effect=OSError("gone")):
        results = shared.step({engine: batch_of(0, 0) for engine in engines.values()})
    assert all(isinstance(result, OSError) for result in results.values())
    assert all(engine.version == 0 for engine in engines.values())
    stepped(shared, {engine: batch_of(0, 0) for engine in engines.values()})


def test_evaluations_and_steps_of_different_runs_share_sweeps(
    four: tuple[SharedBase, dict[str, Any]],
) -> None:
    shared, engines = four
    with patch.object(shared, "_sweep", wraps=shared._sweep) as sweep:
        results = shared.together(
            {
                "evaluate": lambda: engines["low-rank"].evaluate([batch_of(0, 0)]).loss,
                "step": lambda: [
                    engines["adamw"].step(batch_of(0, step)).loss for step in range(2)
                ],
                "per-row": lambda: engines["per-row"].step(batch_of(0, 0)).loss,
            }
        )
    assert [len(call.args[0]) for call in sweep.mock_calls] == [3, 1]
    assert isinstance(results["evaluate"], float)


def test_an_interruption_ends_all_runs_and_reaches_the_caller(
    four: tuple[SharedBase, dict[str, Any]],
) -> None:
    """Within a sweep, and within one of the functions."""
    shared, engines = four
    ended = []

    def run(engine: Any) -> None:
        try:
            engine.step(batch_of(0, 0))
        finally:
            ended.append(engine)

    runs: dict[str, Callable[[], object]] = {
        name: partial(run, engine) for name, engine in engines.items()
    }
    within = patch.object(engines["exact"]._run.model, "block", side_effect=KeyboardInterrupt)
    with within, pytest.raises(KeyboardInterrupt):
        shared.together(runs)
    assert len(ended) == 4
    with pytest.raises(KeyboardInterrupt):
        shared.together(runs | {"interrupt": Mock(side_effect=KeyboardInterrupt)})
    assert all(engine.version == 0 for engine in engines.values())
    stepped(shared, {engine: batch_of(0, 0) for engine in engines.values()})


def resumable(
    base: Path, folder: Path, names: list[str], shared: SharedBase | None
) -> dict[str, Any]:
    options = {} if shared is None else {"source": shared}
    return {
        name: METHODS[name](base, 1, journal=folder / name / "journal.jsonl", **options)
        for name in names
    }


def run_of(
    engines: Mapping[str, Any], shared: SharedBase | None, steps: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Take steps, from where each run is, and return all parameters."""
    for _ in range(steps):
        batches = {engine: batch_of(1, engine.version) for engine in engines.values()}
        results = (
            {e: e.step(batch) for e, batch in batches.items()}
            if shared is None
            else stepped(shared, batches)
        )
        assert len(results) == len(engines)
    for engine in engines.values():
        if engine.journal.commits:
            engine.take_snapshot()
    learned = {name: weights(engine) for name, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    return learned


@pytest.mark.few(1)
@pytest.mark.parametrize("first_together", [True, False])
def test_runs_resume_alone_and_together(
    bases: Mapping[str, Path], tmp_path: Path, *, first_together: bool
) -> None:
    base, names = bases["llama-nf4"], sorted(METHODS)
    apart, mixed = tmp_path / "apart", tmp_path / "mixed"
    for folder in (*(apart / name for name in names), *(mixed / name for name in names)):
        folder.mkdir(parents=True)
    expected = run_of(resumable(base, apart, names, None), None, 4)
    for together in (first_together, not first_together):
        if together:
            with SharedBase(open_checkpoint(base)) as shared:
                learned = run_of(resumable(base, mixed, names, shared), shared, 2)
        else:
            learned = run_of(resumable(base, mixed, names, None), None, 2)
    for name in names:
        assert_equal(learned[name], expected[name])
        assert (mixed / name / "journal.jsonl").read_bytes() == (
            apart / name / "journal.jsonl"
        ).read_bytes(), name


def test_a_run_of_another_base_is_refused_and_the_same_may_be_named_by_other_paths(
    bases: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(bases["llama"], tmp_path / "other")
    (tmp_path / "link").symlink_to(bases["llama"])
    monkeypatch.chdir(bases["llama"].parent)
    with SharedBase(open_checkpoint(bases["llama"])) as shared:
        for path in (Path("llama"), tmp_path / "link"):
            low_rank(path, 0, source=shared).close()
        for base in (other, bases["opt"], bases["llama-nf4"]):
            with pytest.raises(OptionError, match="shared base"):
                low_rank(base, 0, source=shared)
        method, journal = ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3)), tmp_path / "journal.jsonl"
        with pytest.raises(OptionError, match="only read the base"):
            Engine(
                open_checkpoint(bases["llama"]),
                method,
                journal=journal,
                options=EngineOptions(source=shared),
            )
        assert not journal.exists()


def test_a_base_that_changed_since_a_run_began_ends_that_run_alone(
    bases: Mapping[str, Path], tmp_path: Path
) -> None:
    base = bases["llama"]
    for name in ("a", "b"):
        with low_rank(base, 0, journal=tmp_path / name) as engine:
            engine.step(batch_of(0, 0))
    with SharedBase(open_checkpoint(base)) as shared:
        opened = (low_rank(base, 0, journal=tmp_path / name, source=shared) for name in ("a", "b"))
        with next(opened) as broken, next(opened) as healthy:
            third = broken._run.model.layouts[2].name
            broken._run.segments.base_digests._expected[third] = "0" * 16
            results = shared.step({engine: batch_of(0, 1) for engine in (broken, healthy)})
            assert isinstance(results[broken], CheckpointError)
            assert not isinstance(results[healthy], Exception)


def test_memory_is_planned_for_all_runs(bases: Mapping[str, Path]) -> None:
    base = bases["llama"]
    with SharedBase(open_checkpoint(base), memory=MemoryPolicy(host="2GiB")) as shared:

        def reserved() -> int:
            # what the process holds already changes with the tests before this one
            parts = shared.host_plan.parts
            return sum(part.nbytes for part in parts if part.name != "this process at present")

        before = reserved()
        with low_rank(base, 0, source=shared, memory=MemoryPolicy(activations="100MiB")):
            assert reserved() >= before + (100 << 20)
            with pytest.raises(MemoryBudgetError):
                low_rank(base, 1, source=shared, memory=MemoryPolicy(activations="3GiB"))
            with low_rank(base, 1, source=shared, memory=MemoryPolicy(activations="100MiB")):
                assert reserved() >= before + (200 << 20)
        with pytest.raises(OptionError, match="pass it to SharedBase"):
            low_rank(base, 1, source=shared, memory=MemoryPolicy(host="1GiB"))


def test_graphs_have_the_memory_that_is_left_once_all_runs_have_joined(
    bases: Mapping[str, Path],
) -> None:
    base, forwards, little = bases["llama"], {}, MemoryPolicy(activations=1)
    for budget in (0, 1 << 40):
        policy = MemoryPolicy(host=memory(None, budget=budget).host)
        with (
            patch.object(
                HFBlockModel, "block", autospec=True, side_effect=HFBlockModel.block
            ) as block,
            SharedBase(open_checkpoint(base), memory=policy) as shared,
            adamw(base, 0, source=shared, memory=little) as first,
            adamw(base, 1, source=shared, memory=little) as second,
        ):
            shared.step({first: batch_of(0, 0), second: batch_of(1, 0)})
            forwards[budget] = block.call_count
    assert forwards == {0: 2 * (3 + 3), 1 << 40: 2 * 3}

    def run(number: int) -> None:
        with adamw(
            base, number, source=shared, memory=MemoryPolicy(activations="300MiB")
        ) as engine:
            engine.step(batch_of(0, 0))

    with (
        patch("zo2core.sweep.gradient_visitor.GraphRoom", side_effect=GraphRoom) as made,
        SharedBase(
            open_checkpoint(base), memory=MemoryPolicy(host=memory(None, budget=1 << 30).host)
        ) as shared,
    ):
        ended = shared.together({number: partial(run, number) for number in range(3)})
    assert ended == dict.fromkeys(range(3))
    rooms = [call.args[0] for call in made.mock_calls]
    assert len(rooms) == 3
    assert max(rooms) <= (300 << 20) + (1 << 30) // 3, rooms  # equal shares of what is left


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs a list of the process's threads"
)
def test_runs_that_wait_have_no_threads_of_openmp() -> None:
    """Otherwise there are more of them than processors, and each operation waits for some to wake
    up.
    """
    values = torch.ones(1 << 20)
    counts: list[int] = []

    def count(requests: object) -> None:
        counts.append(len(list(Path("/proc/self/task").iterdir())))

    lockstep: Lockstep[int] = Lockstep(count)

    def compute() -> None:
        for number in range(2):
            values.mul(2.0)
            lockstep.request(number)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        values.mul(2.0)  # the threads of this thread itself
        before = len(list(Path("/proc/self/task").iterdir()))
        lockstep.run([compute] * 3)
    finally:
        torch.set_num_threads(threads)
    assert max(counts) <= before + 3


def test_uses_that_exclude_each_other_are_refused(bases: Mapping[str, Path]) -> None:
    base = bases["llama"]
    with SharedBase(open_checkpoint(base)) as shared:
        one, two = low_rank(base, 0, source=shared), low_rank(base, 1, source=shared)
        iterator = one.parameters_now()
        next(iterator)
        result = shared.step({two: batch_of(1, 0)})[two]
        assert isinstance(result, BusyError)
        with pytest.raises(BusyError):
            low_rank(base, 2, source=shared)
        iterator.close()
        nested = shared.together({"nested": lambda: shared.step({two: batch_of(1, 0)})})
        assert isinstance(nested["nested"], BusyError)
        one.close()
        two.close()
    with pytest.raises(ClosedError):
        shared.step({two: batch_of(1, 0)})


def test_a_replayer_of_a_run_evaluates_beside_others(
    bases: Mapping[str, Path], tmp_path: Path
) -> None:
    base = bases["llama"]
    with low_rank(base, 0, journal=tmp_path / "journal") as engine:
        engine.step(batch_of(0, 0))
        expected = engine.evaluate([batch_of(0, 1)]).loss
    with Engine(open_checkpoint(base)) as untrained:
        before = untrained.evaluate([batch_of(0, 1)]).loss
    with SharedBase(open_checkpoint(base)) as shared:
        trained = Engine(
            open_checkpoint(base),
            journal=tmp_path / "journal",
            options=EngineOptions(source=shared),
        )
        plain = Engine(open_checkpoint(base), options=EngineOptions(source=shared))
        losses = shared.together(
            {engine: partial(engine.evaluate, [batch_of(0, 1)]) for engine in (trained, plain)}
        )
        assert [result.loss for result in losses.values() if not isinstance(result, Exception)] == [
            expected,
            before,
        ]
        trained.close()
        plain.close()
