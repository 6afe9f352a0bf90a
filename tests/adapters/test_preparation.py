"""Batches that have no room are divided; the choice is told, recorded, and kept by a resume."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done, leaves, refusal, write_rows
from models import WORDS, save_model, save_tokenizer, small_config

from zo2adapters import open_checkpoint
from zo2adapters.models import token_loss
from zo2adapters.models.checkpoint import cached_chunk
from zo2adapters.models.footprint import Masking
from zo2adapters.trainers import memory_probe
from zo2adapters.trainers.memory_probe import measured_bytes
from zo2adapters.trainers.methods import method_of
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Batching, Storage, TrainOptions
from zo2adapters.trainers.preparation import divided, fitting_plan, prepare
from zo2adapters.trainers.run_inputs import Division, RunInputs, RunStart
from zo2core import Journal, LowRankPerturbation, Workers
from zo2core.errors import MemoryBudgetError, ZO2Warning

ROWS = 64
VOCABULARY = 8192  # of a head that takes most of a step's memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a large vocabulary, and rows of two lengths."""
    folder = tmp_path_factory.mktemp("divided")
    config = small_config(
        "llama", vocab_size=VOCABULARY, num_hidden_layers=2, max_position_embeddings=256
    )
    save_tokenizer(save_model(folder / "base", config))
    lengths = (20, 40)
    texts = [
        " ".join(WORDS[5 + number % 5] for number in range(lengths[row % 2])) for row in range(ROWS)
    ]
    write_rows(folder / "rows.jsonl", [{"text": text} for text in texts])
    return folder


def options_of(folder: Path, memory: int, **changes: Any) -> TrainOptions:
    options = TrainOptions(
        model=str(folder / "base"),
        data=folder / "rows.jsonl",
        output=folder / "run",
        steps=1,
        optimization=Optimization(method="zeroth-order", lr=1e-2),
        batching=Batching(batch_size=ROWS),
        storage=Storage(memory=str(memory)),
    )
    return replace(options, **changes)


def read(options: TrainOptions) -> RunInputs:
    inputs = prepare(RunStart(options)).inputs
    inputs.model.weights.close()
    return inputs


ZEROTH = Optimization(method="zeroth-order", lr=1e-2)
GRADIENT = Optimization(method="adamw", lr=1e-2)


@pytest.mark.parametrize("optimization", [ZEROTH, GRADIENT], ids=["zeroth", "first"])
def test_the_less_memory_there_is_the_more_a_batch_is_divided(
    optimization: Optimization, folder: Path, process_memory: int
) -> None:
    rows: list[int | None] = []
    for spare in (2000, 200, 100):
        memory = process_memory + (spare << 20)
        inputs = read(options_of(folder, memory, optimization=optimization))
        rows.append(inputs.options.batching.micro_batch_size)
    whole, few, fewer = rows
    assert whole is None
    assert few is not None
    assert fewer is not None
    assert ROWS > few > fewer >= 1
    too_little = options_of(folder, process_memory + (20 << 20), optimization=optimization)
    undivided = RunInputs.read(RunStart(too_little))
    with pytest.raises(MemoryBudgetError):
        divided(undivided)
    assert undivided.model.loss_chunk is None
    undivided.model.weights.close()


def test_what_the_user_has_given_is_not_changed(folder: Path, process_memory: int) -> None:
    memory = process_memory + (110 << 20)
    kept = Batching(batch_size=ROWS, micro_batch_size=ROWS, loss_chunk=1 << 20)
    with pytest.raises(MemoryBudgetError):
        prepare(RunStart(options_of(folder, memory, batching=kept)))
    exact = Optimization(method="mezo", lr=1e-2)
    with pytest.raises(MemoryBudgetError):
        prepare(RunStart(options_of(folder, memory, optimization=exact)))


def test_where_micro_batches_are_given_logits_are_computed_in_chunks(
    folder: Path, process_memory: int
) -> None:
    kept = Batching(batch_size=ROWS, micro_batch_size=ROWS)
    inputs = read(options_of(folder, process_memory + (110 << 20), batching=kept))
    chunk = cached_chunk(inputs.model.config)
    assert inputs.options.batching == replace(kept, loss_chunk=chunk)
    assert inputs.model.loss_chunk == chunk
    assert inputs.division == Division(ROWS, None, chunk)
    assert inputs.division.notice().startswith(
        f"a batch of {ROWS} rows has no room: logits of {chunk} tokens at a time"
    )


def test_a_division_is_told_recorded_and_kept_by_a_resume(
    folder: Path, tmp_path: Path, process_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = f"{(process_memory >> 20) + 110}MiB"
    common = [
        *("--model", folder / "base", "--data", folder / "rows.jsonl", "--batch-size", ROWS),
        *("--lr", "1e-2", "--memory", memory),
    ]
    plan = json.loads(
        done("plan", "--method", "zeroth-order", *common, "--output", "run", "--json").out
    )
    rows = plan["division"]["micro_batch_size"]
    assert 1 <= rows < ROWS
    assert plan["nbytes"] <= plan["host_plan"]["budget"]
    said = f"a batch of {ROWS} rows has no room: micro-batches of {rows} row"
    assert said in done("plan", "--method", "zeroth-order", *common, "--output", "run").out
    assert (
        said
        in done("train", "--method", "zeroth-order", *common, "--steps", 1, "--output", "run").err
    )
    recorded = leaves(json.loads(Path("run/options.json").read_text())["options"])
    assert recorded["micro_batch_size"] == rows
    done("train", "--resume", "run", "--steps", 2, "--memory", "auto")
    done(
        "train",
        "--method",
        "zeroth-order",
        *common,
        "--micro-batch-size",
        rows,
        "--steps",
        2,
        "--output",
        "whole",
    )
    assert Journal("run/journal.jsonl").updates == Journal("whole/journal.jsonl").updates
    whole = ("--micro-batch-size", ROWS, "--loss-chunk", 1 << 20)
    assert "memory" in refusal(
        "train", "--method", "zeroth-order", *common, *whole, "--output", "other"
    )
    assert not Path("other").exists()


class Neighbours(Workers):
    """Two workers, the other one of which has micro-batches of so many rows, chosen or recorded."""

    size = 2
    rank = 1
    neighbours = 1

    def __init__(self, rows: int | None, *, is_recorded: bool) -> None:
        self._others = [rows, None, is_recorded]

    def all_gather(self, value: Any, purpose: str = "") -> list[Any]:
        """Give what both have."""
        assert purpose == "division", "a worker that resumes gathers it, too"
        return [self._others, value]


# rows of micro-batches of this worker and of the other, which resume, and those that it then has
AGREED: list[tuple[int | None, bool, int | None, bool, int | None]] = [
    (None, False, None, False, None),
    (None, False, 4, False, 4),
    (2, False, 4, False, 2),
    (8, False, 4, True, 4),
    (2, False, 4, True, 4),
    (None, True, 4, False, None),
    (2, True, 4, True, 2),
]


@pytest.mark.parametrize(("own", "resumes", "others", "others_resume", "agreed"), AGREED)
def test_workers_divide_alike_and_as_was_recorded(
    own: int | None,
    resumes: bool,
    others: int | None,
    others_resume: bool,
    agreed: int | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batching = Batching(batch_size=ROWS, micro_batch_size=own)
    options = options_of(folder, 1 << 40, batching=batching)
    inputs = read(options)
    monkeypatch.setattr(RunInputs, "read", lambda *_, **__: inputs)
    workers = Neighbours(others, is_recorded=others_resume)
    chosen = prepare(RunStart(options, workers=workers, resumes=resumes)).inputs
    assert chosen.options.batching.micro_batch_size == agreed


def test_a_chunk_that_was_not_recorded_is_taken_back(
    folder: Path, process_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batching = Batching(batch_size=ROWS, micro_batch_size=ROWS)
    options = options_of(folder, process_memory + (110 << 20), batching=batching)
    assert read(options).model.loss_chunk is not None
    inputs = RunInputs.read(RunStart(options))
    monkeypatch.setattr(RunInputs, "read", lambda *_, **__: inputs)
    workers = Neighbours(2, is_recorded=True)
    joined = prepare(RunStart(options, workers=workers)).inputs
    inputs.model.weights.close()
    assert joined.options.batching == replace(batching, micro_batch_size=2)
    assert joined.model.loss_chunk is None


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("masking", Masking)
def test_short_rows_tell_the_memory_of_long_ones(
    masking: Masking, *, has_gradient: bool, folder: Path
) -> None:
    model = open_checkpoint(folder / "base", dtype=torch.float32)
    short, long = (
        measured_bytes(model, longest, masking, has_gradient=has_gradient) for longest in (32, 128)
    )
    model.weights.close()
    assert short is not None
    assert long is not None
    expected, measured = (peaks.both or peaks.forward for peaks in (short, long))
    for rows in (1, 4):
        block = measured.of_block(rows, 128)
        assert expected.of_block(rows, 128) == pytest.approx(block, rel=0.05)
        assert expected.of_head(rows, 128) == pytest.approx(measured.of_head(rows, 128), rel=0.05)
    if masking is Masking.PADDING:
        assert measured.of_block(2, 128) > 2 * measured.of_block(1, 128), "a mask for each row"


def test_a_run_has_memory_for_the_factors_of_all_its_steps_from_the_start(folder: Path) -> None:
    """So that a process which resumes it has room for those of earlier steps."""
    planned = []
    for steps in (10, 50):
        optimization = Optimization(method="zeroth-order", lr=1e-2, rank=2, period=1)
        options = options_of(folder, 4 << 30, steps=steps, optimization=optimization)
        inputs = read(options)
        method = method_of(RunStart(inputs.options))
        spec = fitting_plan(method, inputs.model, inputs.shapes()).spec
        parts = {part.name: part.nbytes for part in spec.host_plan.parts}
        assert parts["kept free, to resume the run"] == method.kept_free > 0
        planned.append(parts["factors of directions"])
    layouts = inputs.model.layouts
    perturbation = LowRankPerturbation(rank=2, period=1)
    assert planned == [perturbation.factor_bytes(layouts, steps) for steps in (10, 50)]
    assert planned[1] > planned[0]


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_chunks_of_any_length_are_measured(chunk: int, folder: Path) -> None:
    model = open_checkpoint(folder / "base", loss_chunk=chunk)
    peaks = measured_bytes(model, 255, Masking.NONE, has_gradient=True)
    model.weights.close()
    assert peaks is not None
    assert peaks.both is not None
    assert peaks.both.of_head(1, 10) >= 10 * VOCABULARY * 4 / 2, "half of a logit, at least"


def test_a_loss_in_the_cache_is_measured_as_the_longest_row_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (token_loss, memory_probe):
        monkeypatch.setattr(module, "SMALL", 16 * VOCABULARY)
    monkeypatch.setattr(token_loss, "_CACHED", 1)
    model = open_checkpoint(folder / "base", dtype=torch.bfloat16)
    of_heads = []
    for most in (16, 256):  # tokens of the rows on which blocks are measured
        monkeypatch.setattr(memory_probe, "_MOST_TOKENS", most)
        peaks = measured_bytes(model, 256, Masking.NONE, has_gradient=True)
        assert peaks is not None
        assert peaks.both is not None
        of_heads.append(peaks.both.of_head(1, 256))
    model.weights.close()
    assert of_heads[0] == pytest.approx(of_heads[1], rel=0.1)


def test_a_measurement_that_fails_is_told_and_the_plan_has_its_formula(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_checkpoint(folder / "base")

    def fails(*_: object) -> None:
        raise RuntimeError("no such row")

    monkeypatch.setattr(model, "block", fails)
    with pytest.warns(ZO2Warning, match="not all of the plan is known.*no such row"):
        assert measured_bytes(model, 16, Masking.NONE, has_gradient=False) is None
    model.weights.close()
