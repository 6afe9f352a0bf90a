"""Plans of runs on the CPU: memory is what the run reserves, and time is counted by what rows and options ask for."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done, refusal
from models import WORDS
from runs import small_run

from zo2adapters import open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.losses import KeptLosses
from zo2adapters.tasks.rows import Rows, TokenizedRow
from zo2adapters.trainers import run_plan
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Batching, TrainOptions, evaluations_due
from zo2adapters.trainers.probes import measured_forward_seconds
from zo2adapters.trainers.run_inputs import BatchShape, RowShapes, RunInputs
from zo2adapters.trainers.run_plan import RunPlan, Together, duration
from zo2adapters.trainers.trainer import Trainer
from zo2core import HostPlan
from zo2core.planning.memory import MemoryPart
from zo2core.ranges import parse_size
from zo2core.types import shown_bytes

CONFIGURATIONS = {
    "default": [],
    "rank": ["--rank", "2"],
    "rank, one evaluation at a time": ["--rank", "2:stack=1", "--queries", "2"],
    "rank, per row": ["--rank", "4", "--per-row"],
    "exact": ["--precision", "exact"],
    "exact MeZO": ["--estimator", "mezo:exact"],
    "packed": ["--pack"],
    "micro-batches": ["--micro-batch-size", "1"],
}


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    """A run on rows of three lengths, of a model that takes rows of a thousand tokens."""
    options = small_run(tmp_path, dtype=torch.bfloat16, evaluation=tmp_path / "evaluation.jsonl")
    texts = [" ".join(WORDS[5 : 5 + count]) for count in (3, 5, 4, 3)]
    options.data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"text": texts[1]}) + "\n")
    return options


def planned(capsys: pytest.CaptureFixture[str], options: TrainOptions, *given: str, data: bool = True) -> dict[str, Any]:
    """What the command prints."""
    rows = ["--data", str(options.data), "--evaluation", str(options.evaluation)] if data else []
    scratch = ["--output", str(options.output), "--batch-size", "3", "--json"]
    capsys.readouterr()
    main(["plan", "--model", options.model, *rows, *scratch, *given])
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


@pytest.mark.few(3)
@pytest.mark.parametrize("given", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_the_memory_that_is_planned_for_rows_is_what_their_run_reserves(
    given: list[str], options: TrainOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    plan = planned(capsys, options, *given)
    rows = ["--data", str(options.data), "--evaluation", str(options.evaluation), "--steps", "1", "--batch-size", "3"]
    train = Trainer.train

    def noting(trainer: Trainer) -> None:
        plans.append(trainer.host_plan)
        train(trainer)

    monkeypatch.setattr(Trainer, "train", noting)
    main(["train", "--model", options.model, "--output", str(options.output), "--lr", "1e-4", *rows, *given])
    [arranged] = plans
    parts = {part["name"]: part["nbytes"] for part in plan["host_plan"]["parts"]}
    del parts["this process at present"]
    assert {part.name: part.nbytes for part in arranged.parts[1:]} == parts


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "given",
    [
        "",
        "--rank 2",
        "--lora-rank 2",
        "--method adamw --lora-rank 2",
        "--method adamw",
        "--method badam:stream_blocks",
        "--rank 2 --runs 3",
        "--device-memory 1GB",
    ],
)
def test_the_first_lines_say_whether_it_fits_how_long_it_takes_and_what_it_writes(options: TrainOptions, given: str) -> None:
    arguments = ("--model", options.model, "--memory", "2GB", "--steps", "7", "--sequence-length", "8", *given.split())
    plan = json.loads(done("plan", *arguments, "--json").out)
    on_device = "--device-memory" in given
    method, memory, *gpu, time, disk, empty, _ = done("plan", *arguments).out.splitlines()[: 6 + on_device]
    assert method.endswith(": 7 steps of 16 rows")
    assert memory.startswith("Memory: it fits, with ")
    assert " of 2.00 GB; all blocks stay in memory" in memory or "stream_blocks" in given
    if not on_device:
        planned = parse_size("".join(memory.removeprefix("Memory: it fits, with ").split()[:2]))
        assert planned == pytest.approx(plan["nbytes"], rel=0.1), "the process itself has grown a little"
    assert [line[:19] for line in gpu] == ["GPU memory: it fits"] * on_device
    assert time.startswith("Time: compute is not predicted" if on_device else "Time: about ")
    assert disk.startswith("Disk writes: ")
    assert (f", in snapshots of {shown_bytes(plan['snapshot_bytes'])} each" in disk) if given == "--method adamw" else True
    assert empty == ""


SLOW = RunPlan(
    host_plan=HostPlan((MemoryPart("all", 1000),), 2000, 3, keep_noise=False),
    write_back_every=1,
    scratch_bytes=0,
    read_bytes=0,
    written_bytes=2_000_000.0,
    forward_seconds=1.0,
    update_seconds=0.5,
    disk_seconds=2.0,
    steps=30,
    evaluations=2,
    evaluation_seconds=5.0,
)


def test_the_lines_on_disk_writes_and_time_are_those_of_all_steps() -> None:
    plan = replace(SLOW, spilled_bytes=7_000_000)
    assert plan.summary() == [
        "Memory: it fits, with 1.00 kB of 2.00 kB; blocks are streamed from disk, 3 at a time.",
        "Time: about 70 s in all, 2 s a step.",
        "Disk writes: 60.0 MB in all, those of a temporary file of 7.00 MB included.",
    ]


def test_lines_and_table_have_one_count_of_disk_writes() -> None:
    long = replace(SLOW, steps=1000)
    assert long.disk_writes() == "Disk writes: 2.00 GB in all."
    assert re.findall(r"written per .*", long.table()) == ["written per 1,000 steps    2.00 GB"]
    assert json.loads(long.to_json())["terabytes_per_1000_steps"] == 0.002
    three = Together(
        runs=3, most_runs=3, memory_a_run=1, seconds_a_run=1.0, decoding_seconds=0, seconds_apart=3, free_runs=0
    )
    assert replace(long, together=three).disk_writes() == "Disk writes: 6.00 GB in all."


@pytest.mark.parametrize(("steps", "told"), [(1, "1.00 GB"), (20, "2.00 GB"), (3000, "6.00 GB")])
def test_the_first_and_the_last_step_have_a_snapshot_in_a_short_run_too(steps: int, told: str) -> None:
    plan = replace(SLOW, steps=steps, snapshot_bytes=1_000_000_000)
    assert plan.disk_writes() == f"Disk writes: {told} in all, in snapshots of 1.00 GB each."


@pytest.mark.parametrize("more", [(), ("--rank", "2")])
def test_a_zeroth_order_plan_counts_the_pages_that_a_step_writes(
    options: TrainOptions, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    plan = planned(capsys, options, *more)
    assert plan["written_bytes"] > 0
    assert plan["terabytes_per_1000_steps"] == pytest.approx(plan["written_bytes"] / 1e9)


def test_without_rows_every_row_is_as_long_as_it_may_be(options: TrainOptions, capsys: pytest.CaptureFixture[str]) -> None:
    def reserved(plan: dict[str, Any]) -> int:
        return next(int(part["nbytes"]) for part in plan["host_plan"]["parts"] if part["name"] == "activations, reserved")

    short, long = planned(capsys, options), planned(capsys, options, data=False)
    assert reserved(short) < reserved(long)
    assert reserved(planned(capsys, options, "--sequence-length", "6", data=False)) == reserved(
        short
    )  # with the end of text


def test_the_whole_run_is_its_steps_and_its_evaluations(options: TrainOptions, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, options, "--steps", "50", "--evaluate-every", "20")
    assert (plan["steps"], plan["evaluations"]) == (50, 4)  # before the first step, after 20, 40 and 50
    assert plan["run_seconds"] == 50 * plan["seconds"] + 4 * plan["evaluation_seconds"] > 50 * plan["seconds"]
    main(["plan", "--model", options.model, "--data", str(options.data), "--steps", "7"])
    assert "expected in total" in (printed := capsys.readouterr().out)
    assert "(7 steps)" in printed


@pytest.mark.parametrize("given", [["--evaluate-every", "5"], ["--evaluation", "rows.jsonl"]])
def test_evaluations_of_rows_that_are_not_named_are_refused(given: list[str], options: TrainOptions) -> None:
    assert f"{given[0]}: found {given[1]} without the rows" in refusal("plan", "--model", options.model, *given)


@pytest.mark.parametrize(("steps", "every"), [(1, None), (10, None), (10, 3), (10, 5), (10, 20), (9, 3), (1, 1)])
def test_evaluations_that_are_due_are_those_that_a_run_makes(steps: int, every: int | None) -> None:
    due = [at for at in range(steps + 1) if at in (0, steps) or (every is not None and at % every == 0)]
    for version in range(steps + 2):
        assert evaluations_due(steps, every, version=version) == sum(at >= version for at in due)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BatchShape, int | None]]:
    """The shapes of which forwards are measured, while plans are made."""
    shapes: list[tuple[BatchShape, int | None]] = []

    def measure(model: HFBlockModel, shape: BatchShape, *, running: int | None = None) -> float:
        shapes.append((shape, running))
        return 1.0

    monkeypatch.setattr(run_plan, "measured_forward_seconds", measure)
    return shapes


@pytest.mark.parametrize(
    ("optimization", "rows", "running", "seconds"),
    [
        (Optimization(), 4, None, 2.0),
        (Optimization(queries=3), 4, None, 6.0),
        (Optimization(rank=2), 8, None, 1.0),  # both sides run as one batch, and read the weights once
        (Optimization(rank=2, queries=3), 24, None, 1.0),
        (Optimization(rank=2, queries=3, stack=2), 8, None, 3.0),
        (Optimization(rank=2, per_row=True), 8, None, 1.0),
        (Optimization(per_row=True), 4, 1, 2.0),  # a row at a time, on the weights of its direction
    ],
)
def test_forwards_are_counted_as_they_run(
    optimization: Optimization,
    rows: int,
    running: int | None,
    seconds: float,
    measured: list[tuple[BatchShape, int | None]],
    options: TrainOptions,
    tmp_path: Path,
) -> None:
    plan = planned_with(options, optimization, tmp_path)
    [(shape, at_a_time)] = measured
    assert (shape.rows, shape.tokens, at_a_time) == (rows, 7, running)
    assert plan.forward_seconds == seconds


def planned_with(options: TrainOptions, optimization: Optimization, output: Path) -> RunPlan:
    """The plan of steps of four rows of seven tokens."""
    batching = Batching(batch_size=4)
    options = replace(options, evaluation=None, optimization=optimization, batching=batching, output=output)
    model = open_checkpoint(options.model, precision="exact")
    return run_plan.plan_run(options, model, RowShapes.of_length(batching, 7))


def test_a_low_rank_writes_no_weights_and_draws_factors_alone(options: TrainOptions, tmp_path: Path) -> None:
    plan = planned_with(options, Optimization(rank=1), tmp_path / "new")
    assert (plan.write_back_every, plan.scratch_bytes) == (None, 0)
    assert not (tmp_path / "new").exists()


def test_only_tokens_with_labels_cost_logits_where_these_are_made_in_chunks(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that goes on by the same at each look makes all that is measured equal."""
    looks = iter(range(1000))
    monkeypatch.setattr("zo2adapters.trainers.probes.time.perf_counter", lambda: next(looks))
    of: Callable[[Any, float], float] = lambda model, labels: measured_forward_seconds(model, BatchShape(4, 8, labels))  # noqa: E731
    exact, mixed = (open_checkpoint(options.model, precision=precision) for precision in ("exact", "mixed"))
    assert of(exact, 28) == of(exact, 4) == of(mixed, 32)
    assert of(mixed, 4) < of(mixed, 28)


def shapes_of(options: TrainOptions, rows: Rows, evaluation: Rows | None = None, **batching: Any) -> RowShapes:
    """The shapes of a run on these rows. They depend on neither model nor tokenizer."""
    given: dict[str, Any] = dict.fromkeys(("directory", "model", "tokenizer", "pad", "length"))
    options = replace(options, batching=Batching(**batching))
    return RunInputs(options=options, data=rows, evaluation=evaluation, **given).shapes()


def test_batches_have_the_shapes_that_their_rows_make(options: TrainOptions) -> None:
    lengths = [(9, 4), (3, 0), (5, 2), (3, 1)]
    rows = Rows(tuple(TokenizedRow(array("i", range(length)), prompt, 1) for length, prompt in lengths))
    shapes = shapes_of(options, rows, rows, batch_size=4)
    assert shapes.longest == BatchShape.whole(4, 9)
    assert shapes.step == shapes.evaluation == BatchShape(4, 9.0, 5 + 2 + 3 + 2)
    assert shapes.evaluation_batches == 1
    two = shapes_of(options, rows, rows, batch_size=2)
    assert two.evaluation == BatchShape(2, (9 + 5) / 2, (5 + 2 + 3 + 2) / 2)
    assert two.evaluation_batches == 2
    packed = shapes_of(options, rows, batch_size=4, pack=True)
    assert packed.step == BatchShape(1, 20.0, 12)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0123, "12.3 ms"), (0.5, "500 ms"), (99.4, "99.4 s"), (119, "2 min"), (5000, "83 min"), (7300, "2 h 2 min")],
)
def test_durations_are_said_in_the_unit_that_fits(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_losses_are_kept_apart_from_the_memory_that_they_were_made_in() -> None:
    """A loss that is kept where it came would keep what lies before it from the next one."""
    kept = KeptLosses(3)
    made = [torch.tensor(value, dtype=torch.bfloat16) for value in (1.5, -2.0, 0.25)]
    for loss in made:
        kept.keep(loss)
    assert torch.equal(kept.losses, torch.stack(made))
    assert kept.losses.dtype == torch.bfloat16
    assert kept.losses.untyped_storage().data_ptr() not in {loss.untyped_storage().data_ptr() for loss in made}
