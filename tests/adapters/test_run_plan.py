"""Plans of runs on the CPU: memory is what the run reserves, and time is counted by what rows and
options ask for.
"""

import json
import math
import re
import statistics
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_lines import done
from make_checkpoint import geometries, make_checkpoint
from models import WORDS, save_model, small_config
from runs import small_run

from zo2adapters import open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models.batches import KeptLosses
from zo2adapters.models.footprint import (
    Masking,
    expected_held_bytes,
    forward_bytes,
)
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.rows import Rows, TokenizedRow
from zo2adapters.trainers import preparation, run_plan, trainer
from zo2adapters.trainers.methods import GradientRun, StepMemory, method_of
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2adapters.trainers.options import Batching, Storage, TrainOptions
from zo2adapters.trainers.preparation import FittingPlan, fitting_plan
from zo2adapters.trainers.probes import (
    GradientSeconds,
    measured_forward_seconds,
    measured_gradient_seconds,
    measured_reading_cost,
)
from zo2adapters.trainers.process import with_kept_memory
from zo2adapters.trainers.run_inputs import BatchShape, LargestBatch, RowShapes, RunInputs, RunStart
from zo2adapters.trainers.run_plan import (
    BUS,
    RunPlan,
    Together,
    duration,
    plan_of,
    plan_run,
    require_plannable,
)
from zo2adapters.trainers.trainer import Trainer, open_run
from zo2core import HostPlan
from zo2core.errors import MemoryBudgetError, OptionError, ZO2Warning
from zo2core.planning import speeds
from zo2core.planning.memory import MemoryPart
from zo2core.ranges import LARGEST_WHOLE, EstimatorName, OptimizerName, parse_size
from zo2core.sweep.activations import IN_TRANSIT
from zo2core.types import shown_bytes

NAMED: dict[str, Any] = {"model": "base", "data": Path("rows.jsonl"), "output": Path("run")}
CONFIGURATIONS = {
    "default": [],
    "rank": ["--rank", "2"],
    "rank, one evaluation at a time": ["--rank", "2", "--stack", "1", "--queries", "2"],
    "rank, per row": ["--rank", "4", "--per-row"],
    "exact": ["--precision", "exact"],
    "exact MeZO": ["--method", "mezo"],
    "packed": ["--pack"],
    "micro-batches": ["--micro-batch-size", "1"],
    "one-sided": ["--estimator", "fzoo", "--queries", "4"],
}


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    """A run on rows of three lengths, of a model that takes rows of a thousand tokens."""
    options = small_run(tmp_path, dtype=torch.bfloat16, evaluation=tmp_path / "evaluation.jsonl")
    texts = [" ".join(WORDS[5 : 5 + count]) for count in (3, 5, 4, 3)]
    options.data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"text": texts[1]}) + "\n")
    return options


def planned(options: TrainOptions, *given: str, data: bool = True) -> dict[str, Any]:
    rows = ["--data", str(options.data), "--evaluation", str(options.evaluation)] if data else []
    scratch = ["--output", str(options.output), "--batch-size", "3", "--json"]
    plan: dict[str, Any] = json.loads(
        done(
            "plan", "--method", "zeroth-order", "--model", options.model, *rows, *scratch, *given
        ).out
    )
    return plan


@pytest.mark.few(3)
@pytest.mark.parametrize("given", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_the_memory_that_is_planned_for_rows_is_what_their_run_reserves(
    given: list[str], options: TrainOptions
) -> None:
    plan = planned(options, *given, "--steps", "1")
    rows = [
        "--data",
        str(options.data),
        "--evaluation",
        str(options.evaluation),
        "--steps",
        "1",
        "--batch-size",
        "3",
    ]
    with patch.object(Trainer, "train", autospec=True, side_effect=Trainer.train) as train:
        main(
            [
                "train",
                "--method",
                "zeroth-order",
                "--model",
                options.model,
                "--output",
                str(options.output),
                "--lr",
                "1e-4",
                *rows,
                *given,
            ]
        )
    arranged = train.call_args.args[0].host_plan
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
        "--method badam --stream-blocks",
        "--rank 2 --runs 3",
        "--device-memory 1GB",
    ],
)
def test_the_first_lines_say_whether_it_fits_how_long_it_takes_and_what_it_writes(
    options: TrainOptions, given: str
) -> None:
    arguments = (
        "--model",
        options.model,
        "--memory",
        "2GB",
        "--steps",
        "7",
        "--sequence-length",
        "8",
        *given.split(),
    )
    plan = json.loads(done("plan", "--method", "zeroth-order", *arguments, "--json").out)
    on_device = "--device-memory" in given
    method, memory, *gpu, time, disk, empty, _ = done(
        "plan", "--method", "zeroth-order", *arguments
    ).out.splitlines()[: 6 + on_device]
    assert method.endswith(": 7 steps of 16 rows")
    assert memory.startswith("Memory: it fits, with ")
    assert " of 2.00 GB; all blocks stay in memory" in memory or "--stream-blocks" in given
    if not on_device:
        planned = parse_size("".join(memory.removeprefix("Memory: it fits, with ").split()[:2]))
        assert planned == pytest.approx(plan["nbytes"], rel=0.1), (
            "the process itself has grown a little"
        )
    assert [line[:19] for line in gpu] == ["GPU memory: it fits"] * on_device
    assert time.startswith("Time: compute is not predicted" if on_device else "Time: about ")
    assert disk.startswith("Disk writes: ")
    assert (
        (f", in snapshots of {shown_bytes(plan['snapshot_bytes'])} each" in disk)
        if given == "--method adamw"
        else True
    )
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


def test_the_lines_and_the_table_count_disk_writes_and_time_of_all_steps() -> None:
    durations = {
        0.0123: "12.3 ms",
        0.5: "500 ms",
        99.4: "99.4 s",
        119: "2 min",
        5000: "83 min",
        7300: "2 h 2 min",
    }
    assert {seconds: duration(seconds) for seconds in durations} == durations
    assert replace(SLOW, spilled_bytes=7_000_000).summary() == [
        "Memory: it fits, with 1.00 kB of 2.00 kB; blocks are streamed from disk, 3 at a time.",
        "Time: about 70 s in all, 2 s a step.",
        "Disk writes: 60.0 MB in all, those of a temporary file of 7.00 MB included.",
    ]
    long = replace(SLOW, steps=1000)
    assert long.disk_writes() == "Disk writes: 2.00 GB in all."
    assert re.findall(r"written per .*", long.table()) == ["written per 1,000 steps    2.00 GB"]
    assert json.loads(long.to_json())["terabytes_per_1000_steps"] == 0.002
    runs: dict[str, Any] = {
        "runs": 3,
        "most_runs": 3,
        "memory_a_run": 1,
        "seconds_a_run": 1.0,
        "decoding_seconds": 0,
    }
    three = Together(**runs, seconds_apart=3, free_runs=0)
    assert replace(long, together=three).disk_writes() == "Disk writes: 6.00 GB in all."
    for steps, told in ((1, "1.00 GB"), (20, "2.00 GB"), (3000, "6.00 GB")):
        # the first and the last step have a snapshot
        plan = replace(SLOW, steps=steps, snapshot_bytes=1_000_000_000)
        assert plan.disk_writes() == f"Disk writes: {told} in all, in snapshots of 1.00 GB each."


def test_without_rows_every_row_is_as_long_as_it_may_be(options: TrainOptions) -> None:
    def reserved(plan: dict[str, Any]) -> int:
        return next(
            int(part["nbytes"])
            for part in plan["host_plan"]["parts"]
            if part["name"] == "activations, reserved"
        )

    for more in ((), ("--rank", "2")):
        plan = planned(options, *more)
        assert plan["written_bytes"] > 0
        assert plan["terabytes_per_1000_steps"] == pytest.approx(plan["written_bytes"] / 1e9)
    short, long = planned(options), planned(options, data=False)
    assert reserved(short) < reserved(long)
    # with the end of text
    assert reserved(planned(options, "--sequence-length", "6", data=False)) == reserved(short)


def test_the_whole_run_is_its_steps_and_its_evaluations(options: TrainOptions) -> None:
    plan = planned(options, "--steps", "50", "--evaluate-every", "20")
    # before the first step, after 20, 40 and 50
    assert (plan["steps"], plan["evaluations"]) == (50, 4)
    assert (
        plan["run_seconds"]
        == 50 * plan["seconds"] + 4 * plan["evaluation_seconds"]
        > 50 * plan["seconds"]
    )
    printed = done(
        "plan",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--steps",
        7,
    ).out
    assert "expected in total" in printed
    assert "(7 steps)" in printed


@pytest.mark.parametrize(
    ("steps", "every"), [(1, None), (10, None), (10, 3), (10, 5), (10, 20), (9, 3), (1, 1)]
)
def test_evaluations_that_are_due_are_those_that_a_run_makes(steps: int, every: int | None) -> None:
    due = [
        at for at in range(steps + 1) if at in (0, steps) or (every is not None and at % every == 0)
    ]
    run: Any = {**NAMED, "steps": steps, "evaluate_every": every}
    options = TrainOptions(**run, evaluation=Path("rows.jsonl"))
    assert [at for at in range(steps + 1) if options.is_evaluated_after(at)] == due
    for version in range(steps + 2):
        assert options.evaluations_from(version) == sum(at >= version for at in due)
    assert not TrainOptions(**run).evaluations_from(0)
    assert not TrainOptions(**run).is_evaluated_after(0)
    long = TrainOptions(
        **{**run, "steps": LARGEST_WHOLE, "evaluate_every": 1}, evaluation=Path("rows.jsonl")
    )
    assert long.evaluations_from(LARGEST_WHOLE - 2) == 3, "they are counted without a list of them"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BatchShape, int | None]]:
    """The shapes of which forwards are measured, while plans are made."""
    shapes: list[tuple[BatchShape, int | None]] = []

    def measure(model: HFBlockModel, shape: BatchShape, *, running: int | None = None) -> float:
        shapes.append((shape, running))
        return 1.0

    monkeypatch.setattr("zo2adapters.trainers.probes.measured_forward_seconds", measure)
    return shapes


@pytest.mark.parametrize(
    ("optimization", "rows", "running", "seconds"),
    [
        (Optimization(method="zeroth-order"), 4, None, 2.0),
        (Optimization(method="zeroth-order", queries=3), 4, None, 6.0),
        # both sides run as one batch, and read the weights once
        (Optimization(method="zeroth-order", rank=2), 8, None, 1.0),
        (Optimization(method="zeroth-order", rank=2, queries=3), 24, None, 1.0),
        (Optimization(method="zeroth-order", rank=2, queries=3, stack=2), 8, None, 3.0),
        (Optimization(method="zeroth-order", rank=2, per_row=True), 8, None, 1.0),
        (
            Optimization(method="zeroth-order", per_row=True),
            4,
            1,
            2.0,
        ),  # a row at a time, on the weights of its direction
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
    plan = planned_with(options, optimization, tmp_path / "new")
    [(shape, at_a_time)] = measured
    assert (shape.rows, shape.tokens, at_a_time) == (rows, 7, running)
    assert plan.forward_seconds == seconds
    if optimization.rank is not None:
        assert (plan.write_back_every, plan.scratch_bytes) == (None, 0)
    assert not (tmp_path / "new").exists()


def planned_with(options: TrainOptions, optimization: Optimization, output: Path) -> RunPlan:
    batching = Batching(batch_size=4)
    options = replace(
        options, evaluation=None, optimization=optimization, batching=batching, output=output
    )
    model = open_checkpoint(options.model, precision="exact")
    method = method_of(RunStart(options))
    return run_plan.plan_run(fitting_plan(method, model, RowShapes.of_length(batching, 7)))


@pytest.mark.parametrize("method", [None, "adamw"])
def test_a_plan_lacks_the_number_whose_probe_fails_and_its_run_goes_on(
    method: OptimizerName | None,
    here: Path,
    process_memory: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no\nprobe")

    options = TrainOptions(
        **NAMED,
        steps=2,
        optimization=Optimization(
            method=method or "zeroth-order", lr=1e-3, rank=None if method else 2
        ),
        batching=Batching(batch_size=2),
        evaluation=here / "rows.jsonl",
    )
    inputs = RunInputs.read(RunStart(options))
    whole = plan_of(inputs)
    monkeypatch.setattr("zo2adapters.trainers.probes.embed_row", fails)
    with pytest.warns(ZO2Warning, match=r"measurement failed \(RuntimeError: no probe\)$"):
        plan = plan_of(inputs)
    known = json.loads(plan.to_json())
    assert (known["seconds"], known["run_seconds"], known["forward_seconds"]) == (None,) * 3
    assert known["update_seconds"] > 0
    assert known["written_bytes"] >= 0
    assert known["nbytes"] <= whole.host_plan.nbytes
    assert (known["read_bytes"], known["snapshot_bytes"]) == (
        whole.read_bytes,
        whole.snapshot_bytes,
    )
    assert "Time: about ? s in all, ? s a step." in plan.summary()
    assert "expected in total          ? s" in plan.table()
    if method is None:
        run = method_of(RunStart(inputs.options))
        fitting = fitting_plan(run, inputs.model, inputs.shapes())
        with pytest.warns(ZO2Warning, match="failed"):
            shared = plan_run(fitting, runs=2)
        assert json.loads(shared.to_json())["seconds_a_run"] is None
        assert "limited by" not in shared.table()
    with (
        pytest.warns(ZO2Warning, match="failed"),
        open_run(RunStart(options), plans=True) as trainer,
    ):
        trainer.run()
    assert (options.output / "model").exists()


def test_only_labelled_tokens_cost_logits_made_in_chunks(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[float] = []

    def head_seconds(model: HFBlockModel, shape: BatchShape) -> float:
        measured.append(shape.predictions)
        return 1.0

    monkeypatch.setattr("zo2adapters.trainers.probes._head_seconds", head_seconds)
    for precision in ("exact", "mixed"):
        model = open_checkpoint(options.model, precision=precision)
        for labels in (28, 4):
            measured_forward_seconds(model, BatchShape(4, 8, labels))
        model.weights.close()
    assert measured == [32, 32, 28, 4]


def test_the_head_is_measured_apart_from_blocks_of_which_it_may_be_a_thousandfold(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that goes on by the same at each look makes all that is measured equal."""
    looks = iter(range(10_000))
    monkeypatch.setattr("zo2adapters.trainers.probes.time.perf_counter", lambda: next(looks))
    model = open_checkpoint(options.model)
    blocks = len(model.layouts) - 2
    assert measured_forward_seconds(model, BatchShape(4, 8, 32)) == blocks + 32 / 28
    gradient = measured_gradient_seconds(model, BatchShape(4, 8, 32), None)
    assert gradient == (blocks, blocks + 32 / 28)


def shapes_of(
    options: TrainOptions, rows: Rows, evaluation: Rows | None = None, **batching: Any
) -> RowShapes:
    """The shapes of a run on these rows. They depend on neither model nor tokenizer."""
    given: dict[str, Any] = dict.fromkeys(("directory", "model", "tokenizer", "pad", "length"))
    options = replace(options, batching=Batching(**batching))
    return RunInputs(options=options, data=rows, evaluation=evaluation, **given).shapes()


def test_batches_have_the_shapes_that_their_rows_make(options: TrainOptions) -> None:
    lengths = [(9, 4), (3, 0), (5, 2), (3, 1)]
    rows = Rows(
        tuple(TokenizedRow(array("i", range(length)), prompt, 1) for length, prompt in lengths)
    )
    shapes = shapes_of(options, rows, rows, batch_size=4)
    assert shapes.largest == LargestBatch([9, 5, 3, 3], Masking.PADDING)
    assert shapes.largest.shape == BatchShape(4, 9, 32, Masking.PADDING)
    assert shapes.largest.micro_batches(2) == [(2, 9), (2, 5)]
    assert shapes.largest.micro_batches(3) == [(3, 9), (1, 5)]
    assert shapes.step == shapes.evaluation == BatchShape(4, 9.0, 5 + 2 + 3 + 2, Masking.PADDING)
    assert shapes.evaluation_batches == 1
    two = shapes_of(options, rows, rows, batch_size=2)
    assert two.evaluation == BatchShape(2, (9 + 5) / 2, (5 + 2 + 3 + 2) / 2, Masking.PADDING)
    assert two.evaluation_batches == 2
    packed = shapes_of(options, rows, batch_size=4, pack=True)
    assert packed.step == BatchShape(1, 20.0, 12, Masking.SEQUENCES)


def test_losses_are_kept_apart_from_the_memory_that_they_were_made_in() -> None:
    """A loss that is kept where it came would keep what lies before it from the next one."""
    kept = KeptLosses(3)
    made = [torch.tensor(value, dtype=torch.bfloat16) for value in (1.5, -2.0, 0.25)]
    for loss in made:
        kept.keep(loss)
    assert torch.equal(kept.losses, torch.stack(made))
    assert kept.losses.dtype == torch.bfloat16
    assert kept.losses.untyped_storage().data_ptr() not in {
        loss.untyped_storage().data_ptr() for loss in made
    }


# For a GPU that is not here: which blocks stay, what is moved, and what is not known


BLOCKS = 4
MEZO = Optimization(method="mezo")


def planned_for_gpu(
    model: HFBlockModel, optimization: Optimization = MEZO, *, rows: int = 1, **limits: Any
) -> Any:
    batching = Batching(batch_size=rows)
    sizes: dict[str, Any] = {
        "device_memory": "1GB",
        **{
            name: f"{value}B" if isinstance(value, int) else value for name, value in limits.items()
        },
    }
    given: Any = {
        "optimization": optimization,
        "batching": batching,
        "storage": Storage(device="cuda", **sizes),
    }
    options = TrainOptions(**NAMED, **given)
    require_plannable(options, None, None)
    method = method_of(RunStart(options))
    return plan_run(fitting_plan(method, model, RowShapes.of_length(batching, 8)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("base"), small_config("llama", num_hidden_layers=BLOCKS)
    )


def test_what_does_not_stay_is_moved_each_way(base: Path) -> None:
    model = open_checkpoint(base)
    block = model.layouts[1].nbytes
    kept = set()
    whole = planned_for_gpu(model).device_plan.nbytes
    for nbytes in range(whole, whole - (BLOCKS + 1) * block, -block // 2):
        try:
            plan = planned_for_gpu(model, device_memory=nbytes)
        except MemoryBudgetError:
            break
        assert plan.device_plan.nbytes <= nbytes
        assert plan.transfers.moved_bytes == (BLOCKS - plan.device_plan.kept) * block
        assert plan.transfers.transfer_seconds == plan.transfers.moved_bytes / BUS
        assert plan.read_bytes == 0, "the host holds it all"
        kept.add(plan.device_plan.kept)
    assert kept == {0, 1, BLOCKS}, (
        "one block less than all takes two slots: only a second one makes room"
    )


@pytest.mark.long_profile
def test_opt_175b_on_24_gb(tmp_path: Path) -> None:
    make_checkpoint(geometries()["opt-175b"], tmp_path / "opt", dtype=torch.float16, sparse=True)
    arguments = [
        "plan",
        "--method",
        "zeroth-order",
        "--model",
        str(tmp_path / "opt"),
        "--device-memory",
        "24GB",
        "--memory",
        "400GB",
    ]
    arguments += ["--batch-size", "1", "--sequence-length", "64"]
    table = done(*arguments).out
    assert "compute, overlapped        not predicted" in table
    assert "at 25.0 GB/s each way (assumed)" in table
    found = json.loads(done(*arguments, "--json").out)
    moved = found["moved_bytes"]
    assert found["transfer_seconds"] == moved / 25e9
    assert found["seconds"] is None, "compute is not predicted"
    assert found["blocks"] == 96
    assert 0.9 * 96 * 3.6e9 < moved + found["device_plan"]["kept"] * 3.6e9 < 1.1 * 96 * 3.6e9
    assert (
        moved / 2
        < json.loads(done(*arguments, "--json", "--memory", "100GB").out)["read_bytes"]
        < moved
    ), "some blocks stay on the host"


def test_more_queries_take_activations_and_then_wait_for_them(base: Path) -> None:
    """And one side of each takes fewer, and noise that is not kept leaves room."""
    model = open_checkpoint(base)
    running, held = forward_bytes(model.config, 8, 8), expected_held_bytes(model.config, 8, 8)
    for estimator, streams in ((EstimatorName.MEZO, 8), (EstimatorName.FZOO, 5)):
        planned = planned_for_gpu(
            model, Optimization(method="zeroth-order", estimator=estimator, queries=4), rows=8
        )
        assert planned.device_plan.activation_bytes - running == streams * held
    mezo, counted = (
        planned_for_gpu(model, Optimization(method="zeroth-order", noise=noise))
        for noise in (Noise.MEZO, Noise.RADEMACHER)
    )
    assert counted.device_plan.nbytes < mezo.device_plan.nbytes
    one, four = (planned_for_gpu(model, replace(MEZO, queries=q), rows=8) for q in (1, 4))
    assert (one.transfers.waiting_bytes, four.transfers.waiting_bytes) == (0, 0)
    more = four.device_plan.activation_bytes - one.device_plan.activation_bytes
    assert more == 3 * (one.device_plan.activation_bytes - forward_bytes(model.config, 8, 8))
    blocks = (BLOCKS - 2) * model.layouts[1].nbytes  # two slots are left
    tight_memory = four.device_plan.nbytes - blocks - more // 3
    tight = planned_for_gpu(model, replace(MEZO, queries=4), rows=8, device_memory=tight_memory)
    assert 0 < tight.transfers.waiting_bytes < more
    assert tight.device_plan.kept == 0
    assert (
        tight.transfers.transfer_seconds * BUS
        == tight.transfers.moved_bytes + (BLOCKS + 1) * tight.transfers.waiting_bytes
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_memory": "much"}, OptionError, "device_memory: found 'much'"),
        ({"device_memory": "10kB"}, OptionError, "device_memory"),
        ({"device_memory": "10KB"}, MemoryBudgetError, "device_memory: .*smallest plan.*slots"),
        ({"memory": "1MB"}, MemoryBudgetError, "memory: .*smallest plan"),
    ],
)
def test_unplannable_runs_are_refused(
    options: dict[str, Any], error: type[Exception], message: str, base: Path
) -> None:
    with pytest.raises(error, match=message):
        planned_for_gpu(open_checkpoint(base), **options)


def reserved(model: HFBlockModel, optimization: Optimization) -> StepMemory:
    """What a run of four rows of eight tokens reserves."""
    shapes = RowShapes.of_length(Batching(batch_size=4), 8)
    method = method_of(RunStart(TrainOptions(**NAMED, optimization=optimization)))
    return method.reserved_bytes(model, shapes)


def test_a_plan_reserves_what_the_run_reserves_and_at_least_counts_logits_in_chunks(
    base: Path, tmp_path: Path
) -> None:
    model = open_checkpoint(base, precision="exact")
    stacked = Optimization(method="zeroth-order", rank=4, queries=2, stack=2)
    for optimization in (
        stacked,
        Optimization(method="zeroth-order", rank=4, per_row=True),
        Optimization(method="zeroth-order", per_row=True),
    ):
        planned = planned_for_gpu(model, optimization, rows=4).device_plan
        assert planned.activation_bytes == reserved(model, optimization).nbytes
    wide = save_model(tmp_path, small_config("llama", vocab_size=1000))
    whole, chunked = open_checkpoint(wide), open_checkpoint(wide, loss_chunk=1)
    least = [
        reserved(model, Optimization(method="zeroth-order")).least for model in (whole, chunked)
    ]
    in_transit = IN_TRANSIT * expected_held_bytes(whole.config, 4, 8)
    assert least == [
        in_transit + forward_bytes(whole.config, 4, 8, loss_chunk=chunk) for chunk in (None, 1)
    ]
    assert least[1] < least[0]


pytest.importorskip("peft")

SIZE = r"[0-9.]+ [kMG]B"
TIME = r"[0-9.e-]+ m?s"
FIRST_ORDER = ["--method", "adamw", "--lora-rank", 2, "--lr", 1e-3]


def lines(*more: object) -> list[str]:
    """What a run prints about itself."""
    where = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--output",
        "run",
        "--steps",
        2,
        "--batch-size",
        3,
    ]
    return done(*where, *more).err.splitlines()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("more", "begins"),
    [
        (
            ["--lr", 1e-3, "--memory", "8GB"],
            "Zeroth-order steps train all parameters: 2 steps of 3 rows, about ",
        ),
        (
            ["--lr", 1e-3, "--lora-rank", 2],
            "Zeroth-order steps train LoRA of rank 2: 2 steps of 3 rows, about ",
        ),
        (FIRST_ORDER, "AdamW trains LoRA of rank 2: 2 steps of 3 rows, about "),
        (
            [*FIRST_ORDER, "--eval-split", 0.3],
            "AdamW trains LoRA of rank 2: 2 steps of 3 rows, 2 evaluations, about ",
        ),
    ],
    ids=str,
)
def test_the_first_line_has_time_memory_disk(here: Path, more: list[object], begins: str) -> None:
    with patch.object(
        GradientRun, "storage", autospec=True, side_effect=GradientRun.storage
    ) as storage:
        [chosen, first, *_] = lines(*more)
    assert re.fullmatch("method: (adamw|zeroth-order), as asked for", chosen)
    assert first.startswith(begins)
    writes = (
        f"snapshots of adapter and optimizer, {SIZE} each, at most one a minute"
        if "adamw" in more
        else "negligible"
    )
    kind = "allowed" if "--memory" in more else "free"
    assert re.search(
        f"about {TIME}[.] Memory: {SIZE} of {SIZE} {kind}[.] Disk writes: {writes}", first
    )
    for call in storage.mock_calls:
        assert any(part.name.startswith("graphs of") for part in call.args[2].parts)


LEFT = "about 60 s left; peak memory"


@pytest.mark.parametrize(
    ("steps", "told_step", "peak", "streams", "expected"),
    [
        (6, 20.0, 100, False, None),
        (6, 20.0, 50, False, None),  # longer rows may come
        (
            6,
            50.0,
            100,
            False,
            f"20 s a step (planned: 50 s), {LEFT} 100 bytes (planned: 100 bytes)",
        ),
        (5, 50.0, 100, False, None),  # less than a minute is left
        (6, 50.0, 100, True, None),  # later steps replay more
        (
            6,
            20.0,
            120,
            False,
            f"20 s a step (planned: 20 s), {LEFT} 120 bytes (planned: 100 bytes)",
        ),
        (6, None, 100, False, f"20 s a step, {LEFT} 100 bytes"),
        (
            6,
            math.nan,  # a measurement failed
            100,
            False,
            f"20 s a step (planned: ? s), {LEFT} 100 bytes (planned: 100 bytes)",
        ),
    ],
)
def test_measured_steps_correct_the_plan_of_a_long_run(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    told_step: float | None,
    peak: int,
    streams: bool,
    expected: str | None,
) -> None:
    planned, kept = run_plan.plan_run, with_kept_memory
    parts = (MemoryPart("all", 100),)

    def told(*given: Any, **options: Any) -> RunPlan:
        if told_step is None:
            raise OptionError(
                "plan",
                found="none",
                expected="a plan",
                remedy="go on without",
            )
        plan = replace(
            planned(*given, **options),
            forward_seconds=told_step,
            update_seconds=0.0,
            disk_seconds=0.0,
        )
        return replace(plan, host_plan=replace(plan.host_plan, parts=parts))

    def of_run(plan: HostPlan, nbytes: int) -> HostPlan:
        return replace(kept(plan, nbytes), parts=parts, buckets=2 if streams else None)

    monkeypatch.setattr(run_plan, "plan_run", told)
    monkeypatch.setattr(trainer, "with_kept_memory", of_run)
    monkeypatch.setattr(trainer, "peak_memory", lambda: peak)
    monkeypatch.setattr(statistics, "median", lambda _: 20.0)  # seconds of a step
    corrections = [
        line for line in lines("--lr", 1e-3, "--steps", steps) if line.startswith("measured")
    ]
    assert corrections == ([] if expected is None else [f"measured in 3 steps: {expected}"])


@pytest.mark.parametrize("method", [["--lr", 1e-3], FIRST_ORDER])
def test_a_run_is_measured_and_planned_once_before_its_engine(
    method: list[object], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*given, **options)

        return counted

    for name in ("plan", "measured_bytes"):
        counted = counting(name, getattr(preparation, name))
        monkeypatch.setattr(preparation, name, counted)
    monkeypatch.setattr(RunInputs, "shapes", counting("shapes", RunInputs.shapes))
    speed = counting("write_bytes_per_second", speeds.write_bytes_per_second)
    monkeypatch.setattr(speeds, "write_bytes_per_second", speed)
    lines(*method, "--write-back-every", "never") if method is not FIRST_ORDER else lines(*method)
    assert calls == ["shapes", "measured_bytes", "plan"]


def test_the_outlook_of_a_streamed_run_counts_blocks_that_stream_and_turns(here: Path) -> None:
    written = []
    options = TrainOptions(
        **NAMED,
        steps=4,
        optimization=Optimization(method="zeroth-order", lr=1e-3),
        batching=Batching(batch_size=3),
    )
    for turn in (3, 6):
        method = Optimization(method="badam", lr=1e-3, stream_blocks=True, switch_every=turn)
        inputs = RunInputs.read(RunStart(replace(options, optimization=method)))
        plan = plan_of(inputs)
        inputs.model.weights.close()
        assert plan.host_plan.buckets is not None
        assert plan.snapshot_bytes == 0
        written.append(plan.written_bytes - plan.spilled_bytes)
    assert written[0] == pytest.approx(2 * written[1], abs=1)


def test_zeroth_order_steps_count_what_reading_costs_the_computing(
    measured: list[tuple[BatchShape, int | None]],
    options: TrainOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FittingPlan, "reading_cost", lambda plan, nbytes: 5.0)
    plan = planned_with(options, Optimization(method="zeroth-order"), tmp_path / "new")
    assert plan.forward_seconds == 2.0 * len(measured) + 5.0


@pytest.mark.parametrize("streams", [True, False])
def test_what_reading_costs_the_computing_beside_it_is_part_of_a_step(
    streams: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = Optimization(method="badam", lr=1e-3, stream_blocks=streams)
    options = TrainOptions(**NAMED, steps=4, optimization=method, batching=Batching(batch_size=2))
    passes = GradientSeconds(forward=0.0, both=3.0)
    monkeypatch.setattr("zo2adapters.trainers.probes.measured_gradient_seconds", lambda *_: passes)
    monkeypatch.setattr(preparation, "measured_reading_cost", lambda *_: 10.0)  # s a byte
    inputs = RunInputs.read(RunStart(options))
    plan = plan_of(inputs)
    inputs.model.weights.close()
    read = plan.read_bytes - plan.spilled_bytes
    assert (read > 0) == streams
    assert plan.forward_seconds == 3.0 + 10.0 * read


def test_the_cost_of_a_byte_is_what_a_block_takes_longer_while_it_is_read(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([1.0, 3.0])  # alone, and beside the reading
    reads = []

    def read(name: str, out: torch.Tensor, start: int = 0) -> None:
        reads.append(out.nbytes)

    def timed(run: Callable[[], object], **_: object) -> float:
        run()
        return next(seconds)

    model = open_checkpoint(options.model)
    monkeypatch.setattr(model.weights, "read_into", read)
    monkeypatch.setattr("zo2adapters.trainers.probes.timeit.timeit", timed)
    cost = measured_reading_cost(model, BatchShape(4, 8, 32), None)
    assert cost == 2.0 / sum(reads)
    assert not [thread for thread in threading.enumerate() if "zo2-plan" in thread.name]


def test_a_step_that_measures_gradients_first_sweeps_twice(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = TrainOptions(
        **NAMED,
        steps=4,
        batching=Batching(batch_size=2),
        optimization=Optimization(method="zeroth-order"),
    )
    seconds_of_passes = GradientSeconds(forward=1.0, both=3.0)
    monkeypatch.setattr(
        "zo2adapters.trainers.probes.measured_gradient_seconds", lambda *_: seconds_of_passes
    )
    seconds = []
    cases: list[tuple[OptimizerName, float | None]] = [
        ("adamw", None),
        ("adamw", 1.0),
        ("badam", None),
        ("badam", 1.0),
    ]
    for method, norm in cases:
        optimization = Optimization(method=method, lr=1e-3, max_grad_norm=norm)
        inputs = RunInputs.read(RunStart(replace(given, optimization=optimization)))
        seconds.append(plan_of(inputs).forward_seconds)
        inputs.model.weights.close()
    assert seconds[1] == 2 * seconds[0]
    assert seconds[3] == seconds[2], "one segment has its gradients there at once"
