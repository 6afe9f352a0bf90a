"""Several workers on one run, by forwards and by gradients: the bits of one worker, and journals
that are equal.
"""

import itertools
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from crews import all_equal, attempted, worked
from engines import assert_equal, first_order, inner, memory, weights, zeroth_order
from hypothesis import given, settings
from hypothesis import strategies as st
from models import make_batch, save_model, small_config
from peft_models import lora, monolithic
from safetensors.torch import load_file
from toy import ToyBlockModel

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.peft_adapter import is_of_adapter
from zo2adapters.tasks.objectives import PreferenceLoss
from zo2adapters.tasks.rows import preference_batch
from zo2core import (
    FZOO,
    LOMO,
    AdaLOMO,
    BAdam,
    Delayed,
    Distribution,
    Engine,
    EngineOptions,
    FirstOrder,
    Guarded,
    Journal,
    LossScaling,
    LowRankPerturbation,
    MeZOSGD,
    MultiQueryRGE,
    PerRowRGE,
    PhiloxNoise,
    TorchOptimizer,
    Update,
    Workers,
    WriteBackPolicy,
    ZerothOrder,
    ZOEstimator,
)
from zo2core.build import RunInputs, request_of
from zo2core.errors import (
    BatchError,
    ClosedError,
    JournalError,
    NonFiniteLossError,
    OptionError,
    WorkerError,
)
from zo2core.journal.records import ImpossibleRecordError, decode, encode
from zo2core.optimizers.adapter_and_base import AdapterAndBase
from zo2core.planning.memory import free_memory, resident_memory
from zo2core.workers.gradients import summed
from zo2core.workers.workers import Report, Split, choose_split, combined

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


def trained(
    folder: Path, estimator: ZOEstimator, workers: Workers | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Run a few steps on the toy in a folder of its own; the journal stays there."""
    steps = options.pop("steps", STEPS)
    with zeroth_order(
        toy(folder), estimator, journal=folder / "journal.jsonl", workers=workers, **options
    ) as engine:
        for step in range(engine.version, steps):
            engine.step(batch_of(step))
        return weights(engine)


def crew(
    folder: Path, size: int, estimator: ZOEstimator, split: str = "auto", **options: Any
) -> dict[str, torch.Tensor]:
    """The same by workers; journals and weights are compared."""
    made = worked(
        size,
        lambda workers: trained(folder / str(workers.rank), estimator, workers, **options),
        split=split,
    )
    assert all_equal([(folder / str(rank) / "journal.jsonl").read_bytes() for rank in range(size)])
    for own in made[1:]:
        assert_equal(own, made[0])
    return made[0]


def updates_of(folder: Path) -> list[Update]:
    return list(Journal(folder / "journal.jsonl").updates)


@given(size=st.integers(1, 12), evaluations=st.integers(1, 20), rows=st.integers(1, 12))
def test_every_row_of_every_evaluation_is_one_workers(
    size: int, evaluations: int, rows: int
) -> None:
    try:
        split = choose_split("auto", size, evaluations, rows)
    except OptionError:
        divisors = [groups for groups in range(1, size + 1) if size % groups == 0]
        assert not any(groups <= evaluations and size // groups <= rows for groups in divisors)
        return
    taken = [
        (place, row)
        for rank in range(size)
        for place in split.evaluations(rank, evaluations)
        for row in range(*split.rows(rank, rows).indices(rows))
    ]
    assert sorted(taken) == list(itertools.product(range(evaluations), range(rows)))
    assert all(split.evaluations(rank, evaluations) for rank in range(size))


def test_a_split_is_the_one_that_was_asked_for_or_the_one_with_the_least_to_do() -> None:
    assert choose_split("directions", 2, 8, 4) == Split(2, 1)
    assert choose_split("rows", 2, 8, 4) == Split(1, 2)
    assert choose_split("2x3", 6, 8, 4) == Split(2, 3)
    assert choose_split("auto", 4, 8, 4) == Split(4, 1)  # of equal ones that by directions
    assert choose_split("auto", 4, 2, 4) == Split(2, 2)
    assert choose_split("auto", 3, 2, 9) == Split(1, 3)
    for asked, size, units, rows in [
        ("directions", 4, 2, 9),
        ("rows", 4, 9, 2),
        ("rows", 2, 2, None),
        ("2x3", 4, 9, 9),
    ]:
        with pytest.raises(OptionError, match="split"):
            choose_split(asked, size, units, rows)
    for name in ["columns", "0x2", "2x", "", "2X2"]:
        with pytest.raises(OptionError, match="split"):
            choose_split(name, 1, 1, 1)


@settings(max_examples=8)
@given(data=st.data())
def test_by_directions_all_bits_are_one_workers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder, draw = tmp_path_factory.mktemp("run"), data.draw
    name = draw(st.sampled_from(sorted(ESTIMATORS)))
    estimator = ESTIMATORS[name]
    size = min(draw(st.sampled_from([2, 3, 4])), len(estimator.evaluations(0, iter(range(99)))))
    storage, stops = (
        draw(st.sampled_from(["planned", "resident", "streamed", "written"])),
        draw(st.booleans()),
    )
    options: dict[str, Any] = {}
    if draw(st.booleans()) or name == "fzoo":
        options["noise"] = PhiloxNoise(Distribution.RADEMACHER)
    alone = trained(folder / "alone", estimator, **options)
    if storage in ("streamed", "resident"):
        options["memory"] = memory(1 if storage == "streamed" else None, budget=2**28)
    if storage == "written":

        def work(workers: Workers) -> dict[str, torch.Tensor]:
            own = folder / str(workers.rank)
            return trained(
                own,
                estimator,
                workers,
                write_back=WriteBackPolicy(directory=own, every=2),
                **options,
            )

        together = worked(size, work, split="directions")[0]
    else:
        if stops:
            crew(folder, size, estimator, "directions", steps=2, **options)
        together = crew(folder, size, estimator, "directions", **options)
    assert_equal(together, alone)
    assert updates_of(folder / "0") == updates_of(folder / "alone")


def of_models(
    folder: Path,
    base: Path,
    size: int,
    estimator: ZOEstimator,
    split: str = "auto",
    *,
    precision: str = "exact",
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights that one process and workers make of a checkpoint in three steps; journals of
    workers are compared.
    """
    ranks: tuple[str | int, ...] = ("alone", *range(size))
    models = {
        rank: open_checkpoint(
            base, precision=precision, dtype="auto" if precision == "exact" else "bfloat16"
        )
        for rank in ranks
    }

    def run(workers: Workers | None) -> dict[str, torch.Tensor]:
        rank = "alone" if workers is None else workers.rank
        told = {"journal": folder / f"{rank}.jsonl", "workers": workers, **options}
        with zeroth_order(models[rank], estimator, **told) as engine:
            for _ in range(3):
                engine.step(make_batch(40, [6, 3, 5, 4]))
            return weights(engine)

    alone, made = run(None), worked(size, run, split=split)
    assert all_equal([(folder / f"{rank}.jsonl").read_bytes() for rank in range(size)])
    for own in made[1:]:
        assert_equal(own, made[0])
    return alone, made[0]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("split", "precision", "buckets"),
    [
        ("directions", "exact", None),
        ("directions", "mixed", None),
        ("2x2", "exact", None),
        ("2x2", "exact", 1),
    ],
)
@pytest.mark.parametrize("kind", ["opt", "llama", "qwen2", "qwen3"])
def test_adapters_deal_directions_and_rows(
    tmp_path: Path, kind: str, split: str, precision: str, buckets: int | None
) -> None:
    base = save_model(
        tmp_path / "base",
        small_config(kind),
        torch.bfloat16 if split == "directions" else torch.float32,
    )
    options: dict[str, Any] = {
        "memory": memory(buckets, budget=2**28),
        "noise": PhiloxNoise(Distribution.GAUSSIAN),
    }
    alone, made = of_models(
        tmp_path, base, 4, replace(RGE, q=2), split, precision=precision, **options
    )
    if split == "directions":
        assert_equal(made, alone)
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, alone[name], atol=1e-3, rtol=1e-3)


def literal_by_rows(folder: Path, parts: int, estimator: ZOEstimator) -> dict[str, torch.Tensor]:
    """One worker that runs each part of the rows apart, and joins the losses as the definition
    says.
    """
    with Engine(toy(folder), ZerothOrder(estimator), journal=folder / "journal.jsonl") as engine:
        for step in range(STEPS):
            batch = batch_of(step)
            cuts = [slice(part * 4 // parts, (part + 1) * 4 // parts) for part in range(parts)]
            pieces = [{name: tensor[rows] for name, tensor in batch.items()} for rows in cuts]
            tokens = [int((piece["labels"][:, 1:] != -100).sum()) for piece in pieces]
            losses = []
            for at in engine.ask():
                own = [
                    loss.double().item()
                    for sweep in engine.forwards(pieces, at=at)
                    for loss in sweep
                ]
                total = 0.0
                for loss, count in zip(own, tokens, strict=True):
                    total += loss * count
                losses.append(total / sum(tokens))
            engine.tell(losses)
        return weights(engine)


@pytest.mark.parametrize("split", ["1x2", "1x4", "2x2", "3x1"])
def test_by_rows_losses_are_means_over_all_tokens_in_double_precision(
    tmp_path: Path, split: str
) -> None:
    groups, parts = map(int, split.split("x"))
    together = crew(tmp_path, groups * parts, RGE, split)
    if parts == 1:
        assert_equal(together, trained(tmp_path / "alone", RGE))
        return
    assert_equal(together, literal_by_rows(tmp_path / "alone", parts, RGE))
    single = trained(tmp_path / "single", RGE)
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, single[name], atol=1e-4, rtol=1e-4)


def test_a_part_without_a_labelled_token_says_nothing(tmp_path: Path) -> None:
    batch = batch_of(0)
    batch["labels"][:2] = -100
    kept = {name: tensor[2:] for name, tensor in batch.items()}

    def run(workers: Workers | None, own: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
        folder = tmp_path / ("alone" if workers is None else str(workers.rank))
        with Engine(
            toy(folder),
            ZerothOrder(RGE),
            journal=folder / "journal.jsonl",
            options=EngineOptions(workers=workers),
        ) as engine:
            return engine.step(own).losses

    by_rows = worked(2, lambda workers: run(workers, batch), split="rows")
    assert by_rows[0] == by_rows[1] == run(None, kept)
    assert (tmp_path / "0" / "journal.jsonl").read_bytes() == (
        tmp_path / "1" / "journal.jsonl"
    ).read_bytes()


def test_beside_the_activations_stacks_of_one_size_give_the_same_bits(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    estimator = replace(RGE, q=2, perturb_in_place=False, weight_decay=0.0)
    alone, made = of_models(
        tmp_path, base, 2, estimator, perturbation=LowRankPerturbation(rank=2, stack=2)
    )
    assert_equal(made, alone)


def test_losses_that_a_caller_makes_are_shared_out_by_directions(tmp_path: Path) -> None:
    def run(workers: Workers | None) -> dict[str, torch.Tensor]:
        folder = tmp_path / ("alone" if workers is None else str(workers.rank))
        with Engine(
            toy(folder),
            ZerothOrder(RGE),
            journal=folder / "journal.jsonl",
            options=EngineOptions(workers=workers),
        ) as engine:
            for step in range(2):
                asked = engine.ask()
                assert len(asked) == (6 if workers is None else 3)
                losses = [
                    loss
                    for at in asked
                    for sweep in engine.forwards([batch_of(step)], at=at)
                    for loss in sweep
                ]
                engine.tell(losses)
            return weights(engine)

    alone = run(None)
    for own in worked(2, run):
        assert_equal(own, alone)
    [error, _] = attempted(2, run, split="rows")
    assert isinstance(error, OptionError)
    assert "cannot be sharded" in str(error)


def test_an_evaluation_is_that_of_one_worker(tmp_path: Path) -> None:
    batches = [batch_of(seed, rows=1 + seed % 3) for seed in range(5)]

    def run(
        workers: Workers | None, estimator: ZOEstimator | None = RGE
    ) -> tuple[float, tuple[float, ...], int]:
        folder = tmp_path / ("alone" if workers is None else str(workers.rank))
        with Engine(
            toy(folder),
            None if estimator is None else ZerothOrder(estimator),
            options=EngineOptions(workers=workers),
        ) as engine:
            result = engine.evaluate(batches)
            return result.loss, result.losses, result.tokens

    alone = run(None)
    for size in (2, 3, 7):  # of seven, two have nothing to do
        assert worked(size, run) == [alone] * size
    assert worked(2, lambda workers: run(workers, None)) == [alone] * 2


def test_parts_of_rows_are_summed_in_the_order_of_ranks_and_other_shares_are_refused() -> None:
    parts = [(1e16, 1), (1.0, 1), (-1e16, 1), (3.0, 5)]
    reports = [Report(0, tokens, "float64", [loss]) for loss, tokens in parts]
    total = 0.0
    for loss, tokens in parts:
        total += loss * tokens
    [joined] = combined(reports, Split(1, 4), 1)
    assert joined.dtype == torch.float64
    assert joined.item() == total / 8
    assert total != sum(loss * tokens for loss, tokens in reversed(parts))
    with pytest.raises(WorkerError, match="worker 1"):
        combined(
            [Report(0, 1, "float64", [1.0]), Report(0, 1, "float64", [1.0, 2.0])], Split(2, 1), 2
        )
    reports = [Report(0, 1, dtype, [1.0]) for dtype in ("float32", "float32", "bfloat16")]
    with pytest.raises(WorkerError, match="worker 2: found losses in"):
        combined(reports, Split(3, 1), 3)


def test_a_late_worker_takes_what_it_missed_and_goes_on(tmp_path: Path) -> None:
    """Whether it has no journal, a longer one than worker 0, or one whose last record was torn when
    it was killed.
    """
    alone = trained(tmp_path / "alone", RGE, steps=6)
    crew(tmp_path, 2, RGE, "directions", steps=3)
    (tmp_path / "2").mkdir()
    worked(
        3,
        lambda workers: trained(tmp_path / str(workers.rank), RGE, workers, steps=4),
        split="directions",
    )
    (tmp_path / "0" / "journal.jsonl").unlink()  # the longest is another's now
    torn = tmp_path / "1" / "journal.jsonl"
    *lines, last = torn.read_bytes().splitlines(keepends=True)
    torn.write_bytes(b"".join(lines) + last[:40])
    together = crew(tmp_path, 3, RGE, "directions", steps=6)
    assert_equal(together, alone)
    assert updates_of(tmp_path / "0") == updates_of(tmp_path / "alone")


def test_a_journal_of_another_run_is_refused_and_left_and_other_options_spelled_out(
    tmp_path: Path,
) -> None:
    one, other = replace(RGE, lr=1e-2), replace(RGE, lr=5e-3)
    errors = attempted(
        2, lambda own: trained(tmp_path / str(own.rank), (one, other)[own.rank], own)
    )
    assert isinstance(errors[1], JournalError)
    assert "estimator.lr 0.01" in str(errors[1])
    assert "estimator.lr 0.005" in str(errors[1])
    assert not (tmp_path / "1" / "journal.jsonl").exists()
    shutil.rmtree(tmp_path / "0")
    trained(tmp_path / "0", RGE, steps=3)
    trained(tmp_path / "1", RGE, steps=2, seed=5)
    before = (tmp_path / "1" / "journal.jsonl").read_bytes()
    for error in attempted(2, lambda workers: trained(tmp_path / str(workers.rank), RGE, workers)):
        assert isinstance(error, WorkerError)
        assert "worker 1" in str(error)
        assert "does not belong to worker 0's run" in str(error)
    assert (tmp_path / "1" / "journal.jsonl").read_bytes() == before


DISAGREEMENTS: dict[str, tuple[Callable[[Engine, int], object], type[Exception], str]] = {
    "another batch": (
        lambda engine, rank: engine.step(batch_of(rank)),
        WorkerError,
        "another batch",
    ),
    "another seed": (
        lambda engine, rank: engine.step(batch_of(0), seed=rank),
        WorkerError,
        "another batch",
    ),
    "other batches of an evaluation": (
        lambda engine, rank: engine.evaluate([batch_of(10 * rank), batch_of(10 * rank + 1)]),
        WorkerError,
        "other batches",
    ),
    "a step and an evaluation": (
        lambda engine, rank: (
            engine.step(batch_of(0)) if rank == 0 else engine.evaluate([batch_of(0)])
        ),
        WorkerError,
        "worker 1: found batches where worker 0 sent losses.*same order",
    ),
    "a loss that is not finite": (
        lambda engine, rank: engine.tell(
            [float("nan") if rank == 1 else 1.0 for _ in engine.ask()]
        ),
        NonFiniteLossError,
        "",
    ),
    "a batch that cannot be dealt": (
        lambda engine, rank: engine.step({"input_ids": [1, 2]}),  # type: ignore[dict-item]
        BatchError,
        "",
    ),
}


@pytest.mark.parametrize(("do", "error", "told"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_what_workers_cannot_do_together_ends_on_all_of_them_and_is_not_recorded(
    do: Callable[[Engine, int], object], error: type[Exception], told: str, tmp_path: Path
) -> None:
    def run(workers: Workers) -> None:
        folder = tmp_path / str(workers.rank)
        with Engine(
            toy(folder),
            ZerothOrder(RGE),
            journal=folder / "journal.jsonl",
            options=EngineOptions(workers=workers),
        ) as engine:
            do(engine, workers.rank)

    for outcome in attempted(2, run, split="directions"):
        assert isinstance(outcome, error)
        assert re.search(told, str(outcome), re.DOTALL)
    assert updates_of(tmp_path / "0") == updates_of(tmp_path / "1") == []


def test_what_is_closed_or_not_started_by_torchrun_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(OptionError, match="torchrun"):
        Workers.from_torchrun()

    def run(workers: Workers) -> None:
        with Engine(
            toy(tmp_path / str(workers.rank)),
            ZerothOrder(RGE),
            options=EngineOptions(workers=workers),
        ) as engine:
            engine.step(batch_of(0))
            workers.close()
            with pytest.raises(ClosedError, match="Workers"):
                engine.step(batch_of(1))
            with pytest.raises(ClosedError, match="Workers"):
                engine.evaluate([batch_of(1)])

    worked(2, run)


@pytest.mark.parametrize("leaver", [0, 1])
def test_nobody_waits_for_a_worker_that_has_ended(tmp_path: Path, leaver: int) -> None:
    def run(workers: Workers) -> None:
        with Engine(
            toy(tmp_path / str(workers.rank)),
            ZerothOrder(RGE),
            options=EngineOptions(workers=workers),
        ) as engine:
            engine.step(batch_of(0))
            if workers.rank == leaver:
                raise ZeroDivisionError("its disk is full")
            engine.step(batch_of(1))

    outcomes = attempted(2, run)
    assert isinstance(outcomes[leaver], ZeroDivisionError)
    assert isinstance(outcomes[1 - leaver], WorkerError)
    assert "another worker: found a broken connection" in str(outcomes[1 - leaver])


def test_a_late_worker_of_another_run_keeps_nothing_and_can_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path / "0", RGE, steps=2)
    journals = [Journal(tmp_path / str(rank) / "journal.jsonl") for rank in range(2)]

    def run(workers: Workers) -> None:
        method, journal = ZerothOrder(RGE, seed=5 * workers.rank), journals[workers.rank]
        with Engine(
            toy(tmp_path / str(workers.rank)),
            method,
            journal=journal,
            options=EngineOptions(workers=workers),
        ):
            pass

    assert isinstance(attempted(2, run)[1], JournalError)
    assert not (tmp_path / "1" / "journal.jsonl").exists()
    assert len(updates_of(tmp_path / "0")) == 2
    late = journals[1]
    assert (late.header, late.updates, late.base_digests, late.checksum) == (None, [], {}, 0)
    with Engine(toy(tmp_path / "anew"), ZerothOrder(RGE), journal=late) as engine:
        assert engine.step(batch_of(0)).step == 0
    for journal in journals:
        journal.close()


def test_workers_of_a_host_plan_with_their_part_of_what_is_free(tmp_path: Path) -> None:
    def budget(workers: Workers) -> float:
        with Engine(
            toy(tmp_path / str(workers.rank)),
            ZerothOrder(RGE),
            options=EngineOptions(workers=workers),
        ) as engine:
            assert engine.host_plan is not None
            return (engine.host_plan.budget - resident_memory()) / free_memory()

    assert all(share < 0.3 for share in worked(4, budget))


def test_a_record_of_the_losses_of_some_workers_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, RGE, steps=1)
    [update] = updates_of(tmp_path)
    with pytest.raises(ImpossibleRecordError, match="workers '0-1'"):
        decode({**encode(update), "workers": "0-1"})


peft: Any = pytest.importorskip("peft")

GRADIENT_STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
ALL_ADAMW = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1)
LORA = peft.LoraConfig(r=3, lora_alpha=16, target_modules=["q_proj", "up_proj"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config("llama", tie_word_embeddings=True)
    return save_model(tmp_path_factory.mktemp("base") / "model", config, torch.float32)


# peft draws an adapter's first values from torch's generator, which threads of a process share
OPENING = threading.Lock()


def opened(base: Path) -> Any:
    with OPENING:
        return open_checkpoint(base, adapter=Adapter(config=LORA, seed=0))


def rows_for(step: int, rows: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the right."""
    return make_batch(40, [5 + (step + 2 * row) % 5 for row in range(rows)], seed=step)


def shards_of(batch: Mapping[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """The rows of each worker, without columns that are padding in all of them."""
    rows = len(batch["labels"])
    shards = []
    for rank in range(size):
        shard = {
            name: value[rank * rows // size : (rank + 1) * rows // size]
            for name, value in batch.items()
        }
        width = int(shard["attention_mask"].sum(dim=1).max())
        shards.append({name: value[:, :width].contiguous() for name, value in shard.items()})
    return shards


class Outcome(NamedTuple):
    """Losses and gradient norms of a few steps, and the parameters after them."""

    reports: list[tuple[float, float | None]]
    parameters: dict[str, torch.Tensor]


def outcome_of(engine: Engine, step: Callable[[Engine, int], Any]) -> Outcome:
    reports = [step(engine, number) for number in range(engine.version, GRADIENT_STEPS)]
    parameters = {name: value.detach().clone() for name, value in engine.parameters.items()}
    return Outcome([(report.loss, report.grad_norm) for report in reports], parameters)


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert ours.reports == theirs.reports
    assert_equal(ours.parameters, theirs.parameters)


def alone(
    base: Path,
    batches: Callable[[int], Any],
    forward: Callable[[Any], Any] = lambda model: None,
    workers: Workers | None = None,
    **options: Any,
) -> Outcome:
    model = opened(base)
    with first_order(model, ADAMW, workers=workers, **options) as engine:
        return outcome_of(engine, lambda engine, step: engine.step(batches(step), forward(model)))


def together(
    base: Path,
    size: int,
    batches: Callable[[int], Any],
    forward: Callable[[Any], Any] = lambda model: None,
    **options: Any,
) -> Outcome:
    """What workers make, which is the same for all of them."""
    first, *others = worked(size, lambda workers: alone(base, batches, forward, workers, **options))
    for other in others:
        assert_same(other, first)
    return first


@pytest.mark.few(2)
@pytest.mark.parametrize(("size", "rows"), [(2, 4), (3, 5), (3, 7)])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_is_one_process_accumulating_the_shards(
    base: Path, size: int, rows: int, clip: float | None
) -> None:
    shared = together(base, size, lambda step: rows_for(step, rows), clip=clip)
    assert_same(shared, alone(base, lambda step: shards_of(rows_for(step, rows), size), clip=clip))


def plain_loop(
    base: Path, shards_of_workers: Callable[[int], Sequence[Sequence[Mapping[str, torch.Tensor]]]]
) -> Any:
    """What transformers, peft and torch.optim make of each worker's micro-batches, whose sums are
    added up last.
    """
    with Engine(opened(base), FirstOrder(ADAMW)) as engine:
        values = {name: value.detach().clone() for name, value in engine.parameters.items()}
    resident: Any = monolithic(base, LORA, values)
    trained = {name: parameter for name, parameter in resident.named_parameters() if name in values}
    optimizer = ADAMW(list(trained.values()))
    for step in range(GRADIENT_STEPS):
        workers = shards_of_workers(step)
        total = sum(
            int((shard["labels"][:, 1:] != -100).sum()) for shards in workers for shard in shards
        )
        sums: dict[str, torch.Tensor] = {}
        for shards in workers:
            for shard in shards:
                count = int((shard["labels"][:, 1:] != -100).sum())
                (resident(**shard, use_cache=False).loss * (count / total)).backward()
            for name, parameter in trained.items():
                assert parameter.grad is not None
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.clone()
            optimizer.zero_grad()
        for name, parameter in trained.items():
            parameter.grad = sums[name]
        torch.nn.utils.clip_grad_norm_(list(trained.values()), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in trained.items()}


def rows_of(shard: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each row alone, without padding."""
    lengths = shard["attention_mask"].sum(dim=1).tolist()
    return [
        {name: value[row : row + 1, :length] for name, value in shard.items()}
        for row, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("micro", [None, 1])
def test_a_step_is_that_of_transformers_and_peft_that_accumulate_the_shards(
    base: Path, micro: int | None
) -> None:
    def shards(step: int) -> list[list[dict[str, torch.Tensor]]]:
        whole = shards_of(rows_for(step, 5), 3)
        return [[shard] if micro is None else rows_of(shard) for shard in whole]

    shared = together(base, 3, lambda step: rows_for(step, 5), clip=0.05, micro_batch_size=micro)
    assert_equal(shared.parameters, plain_loop(base, shards))


def test_several_batches_are_split_each(base: Path) -> None:
    def batches(step: int) -> list[dict[str, torch.Tensor]]:
        return [rows_for(step, 4), rows_for(step + 9, 5)]

    def of_workers(step: int) -> list[list[dict[str, torch.Tensor]]]:
        split = [shards_of(batch, 2) for batch in batches(step)]
        return [[shards[rank] for shards in split] for rank in range(2)]

    assert_equal(together(base, 2, batches, clip=0.05).parameters, plain_loop(base, of_workers))


def test_streamed_blocks_kept_graphs_and_micro_batches_of_a_shard_change_no_bit(base: Path) -> None:
    expected = together(base, 2, lambda step: rows_for(step, 6))
    assert_same(together(base, 2, lambda step: rows_for(step, 6), memory=memory(1, 1)), expected)
    assert_same(alone(base, lambda step: rows_for(step, 6), micro_batch_size=3), expected)


def test_a_worker_whose_rows_have_no_labels_adds_nothing(base: Path) -> None:
    def batch(step: int) -> dict[str, torch.Tensor]:
        made = rows_for(step, 4)
        made["labels"][:2] = -100
        return made

    assert_same(together(base, 2, batch), alone(base, lambda step: shards_of(batch(step), 2)[1]))


def test_gradients_are_added_to_earlier_ones_as_one_process_adds_them(base: Path) -> None:
    def gradients(workers: Workers | None) -> dict[str, Any]:
        with Engine(
            opened(base), FirstOrder(None), options=EngineOptions(workers=workers)
        ) as engine:
            for step in range(2):
                batch = rows_for(step, 5)
                engine.gradients(batch if workers is not None else shards_of(batch, 3))
            return {name: value.grad for name, value in engine.parameters.items()}

    expected = gradients(None)
    for found in worked(3, gradients):
        assert_equal(found, expected)


def preferences(step: int) -> list[dict[str, torch.Tensor]]:
    """A batch of four preference pairs, which are two rows each."""
    prompts = [[2 + step, 3], [4, 5, 6 + step], [7], [9, 8]]
    completions = [[[8, 9], [10]], [[11], [12, 13, 14]], [[15, 16], [17, 18]], [[19], [20]]]
    return [
        preference_batch(
            prompts, completions, [[-3.0, -4.0], [-2.5, -7.0], [-6.0, -5.0], [-1.0, -2.0]]
        )
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_an_objective_is_split_as_it_says(base: Path, size: int) -> None:
    def parts(step: int) -> list[dict[str, torch.Tensor]]:
        [whole] = preferences(step)
        return [
            {name: value[at : at + 8 // size] for name, value in whole.items()}
            for at in range(0, 8, 8 // size)
        ]

    shared = together(base, size, preferences, PreferenceLoss)
    assert_same(shared, alone(base, parts, PreferenceLoss))


def raised(
    base: Path, size: int, step: Callable[[Engine, Workers], Any], **options: Any
) -> list[BaseException]:
    def work(workers: Workers) -> None:
        with Engine(
            opened(base), FirstOrder(ADAMW), options=EngineOptions(workers=workers)
        ) as engine:
            step(engine, workers)

    return [error for error in attempted(size, work, **options) if isinstance(error, BaseException)]


@pytest.mark.parametrize(
    ("split", "kinds"),
    [("directions", [OptionError] * 2), ("2x1", [OptionError] * 2), ("1x2", []), ("rows", [])],
)
def test_a_split_by_rows_is_taken_and_one_by_directions_refused(
    base: Path, split: str, kinds: list[Any]
) -> None:
    errors = raised(base, 2, lambda engine, workers: engine.step(rows_for(0, 2)), split=split)
    assert [type(error) for error in errors] == kinds
    assert all(
        f"split: found {split}, 2 workers for one gradient" in str(error) for error in errors
    )


def fail_later(engine: Engine, workers: Workers) -> None:
    engine.step(rows_for(0, 4))
    if workers.rank == 1:
        raise MemoryError("none left")
    engine.step(rows_for(1, 4))


def changed(**changes: Callable[[torch.Tensor], Any]) -> Callable[[Engine, Workers], Any]:
    """A step on a batch with other columns, or without those for which None is returned."""

    def step(engine: Engine, workers: Workers) -> None:
        batch = {
            name: changes.get(name, torch.Tensor.clone)(value)
            for name, value in rows_for(0, 4).items()
        }
        engine.step({name: value for name, value in batch.items() if value is not None})

    return step


BROKEN = "another worker: found a broken connection"
# What is done, the error of each worker, and what worker 0's says.
REFUSED: Mapping[str, tuple[Callable[[Engine, Workers], Any], list[type[BaseException]], str]] = {
    "too few rows": (
        changed(
            **dict.fromkeys(("input_ids", "attention_mask", "labels"), lambda value: value[:1])
        ),
        [BatchError] * 2,
        "found 1 rows that can be separated, and 2",
    ),
    "labels of one row": (
        changed(labels=lambda value: value[0]),
        [BatchError] * 2,
        "found no labels of shape",
    ),
    "no labels": (changed(labels=lambda value: None), [BatchError] * 2, "found no labels of shape"),
    "no labelled token": (
        changed(labels=lambda value: value.fill_(-100)),
        [BatchError, WorkerError],
        "no token to predict",
    ),
    "a function that does not say how parts join": (
        lambda engine, workers: engine.step(rows_for(0, 4), cast("Any", object())),
        [OptionError] * 2,
        "parts of a batch join",
    ),
    "another batch": (
        lambda engine, workers: engine.step(rows_for(int(workers.rank == 1), 4)),
        [WorkerError] * 3,
        "worker 1: found other batches than worker 0's",
    ),
    "a worker that fails": (fail_later, [WorkerError, MemoryError, WorkerError], BROKEN),
}


@pytest.mark.parametrize(("step", "kinds", "told"), REFUSED.values(), ids=REFUSED)
def test_what_one_cannot_do_ends_the_step_of_all(
    base: Path, step: Any, kinds: list[type[BaseException]], told: str
) -> None:
    errors = raised(base, len(kinds), step)
    assert [type(error) for error in errors] == kinds
    assert told in str(errors[0])
    assert all(
        BROKEN in str(error)
        for error in errors
        if isinstance(error, WorkerError) and len({*kinds}) > 1
    )


def test_parameters_that_differ_are_found_when_a_snapshot_is_taken(
    base: Path, tmp_path: Path
) -> None:
    def work(workers: Workers) -> None:
        with durable(base, tmp_path / str(workers.rank), workers) as engine:
            engine.step(rows_for(0, 4))
            if workers.rank == 1:
                with torch.no_grad():
                    next(iter(engine.parameters.values())).view(-1)[0] += 1e-3
            engine.take_snapshot()

    errors = attempted(2, work)
    assert all(isinstance(error, WorkerError) for error in errors), errors
    assert "worker 1: found other trained parameters than worker 0's" in str(errors[0])
    assert not list(tmp_path.glob("*/snapshot*"))


def durable(base: Path, folder: Path, workers: Workers | None) -> Engine:
    return Engine(
        opened(base),
        FirstOrder(ADAMW, lr=lambda step: 1e-2, options={"name": "adamw"}),
        run=folder,
        journal=folder / "journal.jsonl",
        options=EngineOptions(workers=workers),
    )


def run(
    base: Path, folder: Path, workers: Workers, *, until: int, every: int = 2
) -> dict[str, torch.Tensor]:
    """Take the remaining steps, with snapshots."""
    with durable(base, folder / str(workers.rank), workers) as engine:
        while engine.version < until:
            engine.step(rows_for(engine.version, 4))
            if engine.version % every == 0:
                engine.take_snapshot()
        return {name: value.detach().clone() for name, value in engine.parameters.items()}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.few(2)
@pytest.mark.parametrize("lost", ["nothing", "a snapshot", "a journal", "a directory", "damage"])
@pytest.mark.filterwarnings("ignore::zo2core.errors.ZO2Warning")
def test_a_run_goes_on_from_the_newest_snapshot_of_any_worker(
    base: Path, tmp_path: Path, lost: str
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        for rank in range(2):
            (folder / str(rank)).mkdir(parents=True)
    expected = worked(2, lambda workers: run(base, whole, workers, until=7))
    worked(2, lambda workers: run(base, stopped, workers, until=5))
    last = stopped / "1" / "snapshot-4.safetensors"
    if lost == "a snapshot":
        last.unlink()
    elif lost == "damage":
        last.write_bytes(b"x" + last.read_bytes()[1:])
    elif lost == "a journal":
        (stopped / "0" / "journal.jsonl").unlink()
        for path in (stopped / "0").glob("snapshot*"):
            path.unlink()
    elif lost == "a directory":
        shutil.rmtree(stopped / "1")
        (stopped / "1").mkdir()
    found = worked(2, lambda workers: run(base, stopped, workers, until=7))
    for parameters in found:
        assert_equal(parameters, expected[0])
    assert all_equal([files(stopped / "0"), files(stopped / "1"), files(whole / "0")])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 4, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_add_the_workers_in_their_order(size: int, length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    # of such different sizes that another order has other bits
    scales = 10.0 ** torch.arange(size)[:, None]
    tensors = (torch.randn(size, length, generator=generator) * scales).to(dtype)
    expected = tensors[0].clone()
    for tensor in tensors[1:]:
        expected += tensor
    for total in worked(size, lambda workers: workers.sum_tensors(tensors[workers.rank])):
        assert torch.equal(total, expected)


def test_a_missing_gradient_changes_no_bit_of_the_others() -> None:
    """Not the sign of a zero either, in parameters of several dtypes."""
    gradients: list[list[float | None]] = [
        [None, None, 0.5],
        [-0.0, None, 0.25],
        [None, None, None],
    ]
    dtypes = (torch.bfloat16, torch.float32, torch.float32)

    forms = {str(number): (torch.Size([3]), dtype) for number, dtype in enumerate(dtypes)}

    def work(workers: Workers) -> dict[str, torch.Tensor]:
        own = {
            name: torch.full(shape, value, dtype=dtype)
            for (name, (shape, dtype)), value in zip(
                forms.items(), gradients[workers.rank], strict=True
            )
            if value is not None
        }
        return summed(own, forms, workers, torch.device("cpu"))

    for sums in worked(3, work):
        assert list(sums) == ["0", "2"]
        assert sums["0"].signbit().all()
        assert sums["2"].tolist() == [0.75] * 3


UPDATES: dict[str, Callable[[], Any]] = {
    "lomo": lambda: LOMO(weight_decay=0.1),
    "adalomo": lambda: AdaLOMO(weight_decay=0.1),
    "adamw": lambda: TorchOptimizer(ALL_ADAMW),
    "sgd": lambda: TorchOptimizer(partial(torch.optim.SGD, lr=1.0, momentum=0.9)),
    "badam": lambda: BAdam(ALL_ADAMW, every=2, seed=3),
    "delayed": lambda: Delayed(TorchOptimizer(ALL_ADAMW)),
    "lora and lomo": lambda: AdapterAndBase(
        TorchOptimizer(ALL_ADAMW), LOMO(), base_lr=1e-2, is_of_adapter=is_of_adapter
    ),
}
# what a step does with gradients beside the update
LIMITS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "clipped by norm": {"clip": 0.05},
    "clipped by norms of layers": {"clip": 0.05, "clip_per": "layer"},
    "scaled, and in bfloat16": {"scaling": LossScaling(), "dtype": torch.bfloat16},
}
ALL_STEPS = 5
DRAWING = threading.Lock()  # workers are threads here, and share the generator that peft draws with


def all_parameters(
    base: Path, update: str, workers: Workers | None = None, **options: Any
) -> Engine:
    adapter = None
    if update == "lora and lomo":
        adapter = Adapter(config=lora(init_lora_weights=False), seed=1, trains_base=True)
    with DRAWING:
        model = open_checkpoint(base, adapter=adapter, dtype=options.pop("dtype", "auto"))
    return first_order(
        model, UPDATES[update](), lr=lambda step: 1e-2 / (step + 1), workers=workers, **options
    )


def all_outcome(engine: Engine, batches: Callable[[int], Any], until: int = ALL_STEPS) -> Any:
    """Losses and norms of the remaining steps, and the weights after them."""
    with engine:
        results = [engine.step(batches(step)) for step in range(engine.version, until)]
        return [(result.loss, result.grad_norm) for result in results], weights(engine)


@pytest.mark.few(4)
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("update", UPDATES)
def test_all_parameters_are_trained_as_by_one_process_that_accumulates_the_shards(
    base: Path, update: str, limits: str
) -> None:
    def batch(step: int) -> dict[str, torch.Tensor]:
        made = rows_for(step, 4)
        if step == 3:
            made["labels"][2:] = -100  # the second worker has nothing to add
        return made

    def shards(step: int) -> Any:
        return [shard for shard in shards_of(batch(step), 2) if (shard["labels"] >= 0).any()]

    expected = all_outcome(all_parameters(base, update, **LIMITS[limits]), shards)
    for found in worked(
        2,
        lambda workers: all_outcome(all_parameters(base, update, workers, **LIMITS[limits]), batch),
    ):
        assert found[0] == expected[0]
        assert_equal(found[1], expected[1])


DIVIDED = ("adamw", "adalomo", "delayed", "lora and lomo")  # optimizers with states of all segments


def of_rows(step: int) -> dict[str, torch.Tensor]:
    return rows_for(step, 4)


def state_names(engine: Engine) -> list[str]:
    """Names of the optimizer's states that a worker keeps."""
    states = inner(engine)._state.states.state_dict()
    return [f"{segment} {name}" for segment, of_segment in states.items() for name in of_segment]


@pytest.mark.few(2)
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("update", DIVIDED)
def test_divided_states_change_no_bit(base: Path, update: str, limits: str) -> None:
    def work(workers: Workers | None, *, divides: bool) -> Any:
        options = {**LIMITS[limits], "divide_states": divides}
        engine = all_parameters(base, update, workers, **options)
        return *all_outcome(engine, of_rows), state_names(engine)

    whole = worked(2, partial(work, divides=False))[0]
    parts = worked(2, partial(work, divides=True))
    for results, found, _ in parts:
        assert results == whole[0]
        assert_equal(found, whole[1])
    names = [own_names for *_, own_names in parts]
    assert sorted(names[0] + names[1]) == sorted(whole[2]), "each state is with one worker"
    assert all(names) or update == "lora and lomo", "an adapter is in one segment"


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("update", ["adamw", "delayed"])
def test_a_snapshot_of_divided_states_is_whole_and_any_number_of_workers_goes_on(
    base: Path, update: str, size: int, tmp_path: Path
) -> None:
    def run(count: int, until: int, *, divides: bool) -> list[Any]:
        def work(workers: Workers) -> Any:
            folder = tmp_path / str(divides) / str(workers.rank)
            with all_parameters(base, update, workers, run=folder, divide_states=divides) as engine:
                losses = [engine.step(of_rows(step)).loss for step in range(engine.version, until)]
                engine.take_snapshot()
                return losses, load_file(folder / f"snapshot-{until}.safetensors")

        return worked(count, work)

    for count, until in ((2, 2), (size, 4)):
        parts, wholes = (run(count, until, divides=divides) for divides in (True, False))
        for (losses, snapshot), (expected_losses, expected) in zip(parts, wholes, strict=True):
            assert losses == expected_losses
            assert_equal(snapshot, expected)
    of_first, of_second = (tmp_path / "True" / rank / "snapshot-2.safetensors" for rank in "01")
    assert of_first.read_bytes() == of_second.read_bytes()


# during what a worker ends, and at which tensor that it sends or receives then
ENDS = {
    "the first step": ("step 0", 7),
    "the first snapshot": ("snapshot 0", 20),
    "a step": ("step 1", 1),
    "a snapshot": ("snapshot 1", 1),
    "the middle of a snapshot": ("snapshot 1", 30),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("end", ENDS)
def test_workers_of_whom_one_ended_while_states_were_divided_go_on(
    base: Path, end: str, rank: int, tmp_path: Path
) -> None:
    phase, number = ENDS[end]

    def work(workers: Workers, *, ends: bool) -> Any:
        present, calls, real = "", itertools.count(1), workers.broadcast_tensor

        def strike(tensor: torch.Tensor, owner: int) -> None:
            if present == phase and next(calls) == number:
                raise KeyboardInterrupt
            real(tensor, owner)

        if ends and workers.rank == rank:
            workers.broadcast_tensor = strike  # type: ignore[method-assign]
        folder = tmp_path / str(workers.rank)
        with all_parameters(base, "adamw", workers, run=folder, divide_states=True) as engine:
            for step in range(engine.version, 3):
                present = f"step {step}"
                engine.step(of_rows(step))
                present = f"snapshot {step}"
                engine.take_snapshot()
            return weights(engine)

    ended = attempted(2, partial(work, ends=True))
    assert isinstance(ended[rank], KeyboardInterrupt), ended
    assert isinstance(ended[1 - rank], WorkerError), ended
    expected = worked(2, lambda of: all_outcome(all_parameters(base, "adamw", of), of_rows, 3))
    for found in worked(2, partial(work, ends=False)):
        assert_equal(found, expected[0][1])


def test_each_worker_is_planned_with_its_share_of_the_states(base: Path) -> None:
    method = FirstOrder(UPDATES["adamw"](), lr=1.0, divide_states=True)

    def planned(workers: Workers | None) -> int:
        options = EngineOptions(workers=workers)
        inputs = RunInputs(model=open_checkpoint(base), method=method, options=options)
        return request_of(inputs).optimizer_bytes

    whole = planned(None)
    shares = worked(3, planned)
    assert sum(shares) == whole
    assert max(shares) < 0.6 * whole, "the head alone is more than a third"


@pytest.mark.parametrize(
    ("optimizer", "options", "told"),
    [
        ("lomo", {}, "divide_states: found lomo, which has no states"),
        (
            "badam",
            {},
            "divide_states: found True; expected an optimizer that has the states of all",
        ),
        (
            "adamw",
            {"commit_every": 1, "run": "run"},
            "divide_states: found True; expected states in",
        ),
    ],
)
def test_states_that_cannot_be_divided_are_refused(
    base: Path, optimizer: str, options: Any, told: str, tmp_path: Path
) -> None:
    options = options | ({"run": tmp_path} if "run" in options else {})

    def work(workers: Workers) -> None:
        all_parameters(base, optimizer, workers, divide_states=True, **options)

    for error in attempted(2, work):
        assert told in str(error)


def test_workers_of_whom_some_divide_their_states_are_refused(base: Path) -> None:
    def work(workers: Workers) -> None:
        all_parameters(base, "adamw", workers, divide_states=workers.rank == 1)

    for error in attempted(2, work):
        assert "worker 1: found other divide_states than worker 0's" in str(error)


def test_a_worker_with_a_share_of_the_states_has_no_state_dict(base: Path) -> None:
    def work(workers: Workers) -> None:
        with all_parameters(base, "adamw", workers, divide_states=True) as engine:
            engine.state_dict()

    for error in attempted(2, work):
        assert "take_snapshot() on all workers, or leave divide_states out" in str(error)


@pytest.fixture(scope="module")
def deep_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config("llama", num_hidden_layers=5, tie_word_embeddings=True)
    return save_model(tmp_path_factory.mktemp("deep") / "base", config, torch.float32)


# worker, function, which call of it, and whether it is made before the worker ends
STOPS = {
    "before any commit": (1, "write", 3, True),
    "before the first commit, which the other has made": (1, "commit", 1, False),
    "before a commit, which the other has made": (0, "commit", 3, False),
    "after a commit, which the other has not made": (1, "commit", 3, True),
    "while blocks of a step are written": (0, "write", 25, True),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("update", ["adamw", "badam"])
@pytest.mark.parametrize("stop", STOPS)
def test_weights_on_disk_go_on_from_a_step_that_all_workers_have(
    deep_base: Path, update: str, stop: str, tmp_path: Path
) -> None:
    rank, name, call, is_made = STOPS[stop]
    steps = 9 if update == "badam" else ALL_STEPS
    call = min(call, 4) if (name, update) == ("write", "badam") else call

    def streamed(workers: Workers | None) -> Engine:
        folder = tmp_path / ("alone" if workers is None else str(workers.rank))
        return all_parameters(
            deep_base, update, workers, run=folder, commit_every=1, memory=memory(2)
        )

    def struck(workers: Workers) -> Any:
        engine = streamed(workers)
        slots = inner(engine)._run.segments.committed.generations
        real, calls = getattr(slots, name), itertools.count(1)

        def strike(*arguments: Any) -> None:
            is_last = next(calls) == call
            if not is_last or is_made:
                real(*arguments)
            if is_last:
                raise KeyboardInterrupt

        if workers.rank == rank:
            setattr(slots, name, strike)
        return all_outcome(engine, lambda step: rows_for(step, 4), steps)

    ended = attempted(2, struck)
    assert isinstance(ended[rank], KeyboardInterrupt), ended
    assert isinstance(ended[1 - rank], WorkerError), ended
    expected = all_outcome(streamed(None), lambda step: shards_of(rows_for(step, 4), 2), steps)
    for losses, found in worked(
        2, lambda workers: all_outcome(streamed(workers), lambda step: rows_for(step, 4), steps)
    ):
        assert losses == expected[0][steps - len(losses) :]
        assert_equal(found, expected[1])


def test_a_worker_without_the_weights_of_a_run_on_disk_is_refused(
    deep_base: Path, tmp_path: Path
) -> None:
    def work(workers: Workers, until: int) -> Any:
        folder = tmp_path / str(workers.rank)
        engine = all_parameters(
            deep_base, "lomo", workers, run=folder, commit_every=1, memory=memory(2)
        )
        return all_outcome(engine, lambda step: rows_for(step, 4), until)

    worked(2, lambda workers: work(workers, 3))
    shutil.rmtree(tmp_path / "1")
    kept = files(tmp_path / "0")
    for error in attempted(2, lambda workers: work(workers, 4)):
        assert isinstance(error, WorkerError)
        assert "worker 1: found weights of step 0; expected those of step 3" in str(error)
    assert files(tmp_path / "0").keys() == kept.keys()
    shutil.copytree(tmp_path / "0", tmp_path / "1", dirs_exist_ok=True)
    assert [len(losses) for losses, _ in worked(2, lambda workers: work(workers, 4))] == [1, 1]
