"""Footprints: the bytes expected of a batch between segments are those that embedding it gives;
nothing is run for them.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import families
import psutil
import pytest
import torch
from command_lines import done
from engines import check_held_bytes, really_held
from hypothesis import given
from hypothesis import strategies as st
from models import (
    BLOOM,
    BLOOM_CONFIG,
    CONFIGS,
    batches,
    make_batch,
    save_model,
    save_tokenizer,
    small_config,
)
from profiles import examples
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from zo2adapters import open_checkpoint, score
from zo2adapters.commands import train
from zo2adapters.models.batches import BranchCache
from zo2adapters.models.footprint import (
    KeptGraph,
    activation_bytes,
    expected_held_bytes,
    forward_bytes,
)
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.generation import STREAM, NextToken
from zo2adapters.tasks.objectives import ChoiceLoss, LogLikelihood
from zo2adapters.tasks.rows import choice_batch
from zo2adapters.trainers.methods import StepMemory, method_of
from zo2adapters.trainers.metrics import progress
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Batching, TrainOptions
from zo2adapters.trainers.preparation import fitting_plan
from zo2adapters.trainers.process import (
    KEPT,
    keep_freed_memory,
    keeps_memory,
    with_kept_memory,
)
from zo2adapters.trainers.run_inputs import RowShapes, RunStart
from zo2adapters.trainers.run_plan import plan_run
from zo2core import (
    LOMO,
    Distribution,
    Engine,
    FirstOrder,
    HostPlan,
    MeZOSGD,
    MultiQueryRGE,
    PhiloxNoise,
    ZerothOrder,
)
from zo2core.errors import OptionError, UnsupportedModelError
from zo2core.io.process_memory import peak_memory
from zo2core.planning.memory import MemoryPart, free_memory
from zo2core.ranges import OptimizerName
from zo2core.sweep.gradient_visitor import KeptSize

WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
SHAPES: dict[str, PretrainedConfig] = {
    "opt": small_config("opt"),
    "llama": small_config("llama"),
    "qwen2": small_config("qwen2"),
    "qwen2 with a window": small_config("qwen2", **WINDOW),
    "qwen3": small_config("qwen3", head_dim=4),
    "qwen3 with wide heads": small_config("qwen3"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_what_a_batch_holds_is_known_before_it_runs(
    config: PretrainedConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = open_checkpoint(save_model(tmp_path, config, dtype))
    with Engine(model):
        for lengths in ([12], [2], [9, 9], [9, 4], [12, 3, 5, 2]):
            for left in (False, True):
                batch = make_batch(model.config.vocab_size, lengths, left=left)
                check_held_bytes(model, model, batch)
                check_held_bytes(model, LogLikelihood(model), batch)
        unmasked = {key: value for key, value in batch.items() if key != "attention_mask"}
        check_held_bytes(model, model, {**unmasked, "labels": unmasked["input_ids"]})


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_what_the_newest_tokens_hold_is_known_without_running_them(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    model = open_checkpoint(save_model(tmp_path, config))
    with Engine(model) as engine:
        for pads in (0, 3):
            forward, stream = NextToken(model), {STREAM: torch.zeros(2, dtype=torch.int64)}
            mask = torch.ones(2, 6, dtype=torch.int64)
            mask[0, :pads] = 0
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            first = {
                "input_ids": torch.ones_like(mask),
                "attention_mask": mask,
                "position_ids": positions,
                **stream,
            }
            newest = torch.ones(2, 1, dtype=torch.int64)
            second = {
                "input_ids": newest,
                "attention_mask": torch.cat([mask, newest], dim=1),
                "position_ids": positions[:, -1:] + 1,
                **stream,
            }
            check_held_bytes(model, forward, first)
            list(engine.forwards([first], forward))  # fills the cache
            check_held_bytes(model, forward, second)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "deepseek_v4", "gemma3_text"])
def test_several_vectors_a_token_and_several_tables_of_rotations_are_counted(
    model_type: str, tmp_path: Path
) -> None:
    families.small_model(families.small_config(model_type)).save_pretrained(tmp_path)
    model = open_checkpoint(tmp_path)
    with Engine(model):
        for lengths in ([12], [9, 4]):
            check_held_bytes(model, model, make_batch(40, lengths))


def test_masks_that_are_added_to_the_scores_are_counted_as_such(tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path, BLOOM_CONFIG), architecture=BLOOM)
    with Engine(model):
        for lengths in ([9, 9], [9, 4]):
            batch = make_batch(40, lengths)
            planned = model.held_bytes(batch)
            with torch.inference_mode():
                held = really_held(model.embed(batch))
            # what else an unknown architecture hands on is not in the formula
            assert 0.8 * held < planned <= 2 * held


def reserved_bytes(
    model: HFBlockModel, micro_rows: int | None, method: OptimizerName = "lomo"
) -> StepMemory:
    """What a first-order step of four rows of eight tokens reserves."""
    given: Any = {
        "optimization": Optimization(method=method, lr=1e-3),
        "batching": Batching(micro_batch_size=micro_rows),
    }
    options = TrainOptions(model="base", data=Path("rows"), output=Path("run"), **given)
    shapes = RowShapes.of_length(Batching(batch_size=4), 8)
    return method_of(RunStart(options)).reserved_bytes(model, shapes)


def test_a_first_order_step_has_gradients_of_tied_weights_for_each_micro_batch(
    tmp_path: Path,
) -> None:
    opened = [
        open_checkpoint(
            save_model(tmp_path / str(tied), small_config("llama", tie_word_embeddings=tied))
        )
        for tied in (True, False)
    ]
    embedding = opened[0].layouts[0].nbytes
    for micro_rows, micro_batches in ((None, 1), (4, 1), (2, 2), (3, 2)):
        tied, untied = (reserved_bytes(model, micro_rows) for model in opened)
        assert (tied[0] - untied[0], tied[1] - untied[1]) == (
            micro_batches * embedding,
            micro_batches * embedding,
        )


def test_in_the_turn_of_a_block_tied_weights_have_no_gradients(tmp_path: Path) -> None:
    """Only an embedding whose turn takes more than that of any block needs memory beside it."""
    sizes: list[list[int]] = []
    for vocabulary in (64, 4096):
        config = small_config(
            "llama", tie_word_embeddings=True, vocab_size=vocabulary, intermediate_size=256
        )
        model = open_checkpoint(save_model(tmp_path / str(vocabulary), config))
        sizes.append([reserved_bytes(model, 1, method).least for method in ("lomo", "badam")])
    embedding = model.layouts[0].nbytes
    (small, small_in_turns), (large, large_in_turns) = sizes
    assert small_in_turns < small
    assert large_in_turns == large > 4 * embedding


MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-2)


@pytest.mark.few(2)
@pytest.mark.parametrize("model_type", CONFIGS)
@examples(short=10, long=100)
@given(
    data=st.data(), chunk=st.integers(1, 40), dtype=st.sampled_from([torch.float32, torch.float64])
)
def test_the_loss_is_hugging_faces_within_summation(
    model_type: str,
    data: st.DataObject,
    chunk: int,
    dtype: torch.dtype,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = data.draw(CONFIGS[model_type])
    batch = data.draw(batches(config.vocab_size))
    base = save_model(tmp_path_factory.mktemp("base"), config, dtype)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    with (
        Engine(open_checkpoint(base, loss_chunk=chunk), ZerothOrder(MEZO)) as engine,
        torch.inference_mode(),
    ):
        assert engine.evaluate([batch]).loss == pytest.approx(whole(**batch).loss.item(), rel=2e-6)


def test_no_forward_sees_more_tokens_than_a_chunk(base: Path) -> None:
    wrong: list[Any] = [0, -5, 2.5, "many"]
    for chunk in wrong:
        with pytest.raises(OptionError, match="loss_chunk"):
            open_checkpoint(base, loss_chunk=chunk)
    model = open_checkpoint(base, loss_chunk=4)
    seen: list[int] = []
    model.skeleton.lm_head.register_forward_hook(
        lambda _, inputs, out: seen.append(out[..., 0].numel())
    )
    with Engine(model, ZerothOrder(MEZO)) as engine:
        engine.evaluate([make_batch(40, [9, 3])])
    assert seen == [4, 4, 2]  # 8 + 2 labelled tokens; the others' logits are not computed at all


CHOICES = choice_batch([[3, 4], [5]], [[[6, 9, 4], [7, 8]], [[9, 4, 6], [1, 2]]], [0, 1])


@pytest.mark.parametrize(
    ("batch", "objective"),
    [(make_batch(40, [9, 3]), None), (CHOICES, ChoiceLoss)],
    ids=["tokens", "candidates"],
)
def test_a_step_by_gradients_keeps_the_logits_of_no_chunk_and_has_the_bits_of_keeping_them(
    batch: Any, objective: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept ones are all logits of the batch: a head that is most of a model broke its limit."""
    taken: dict[bool, Any] = {}
    for keeps in (False, True):
        if keeps:
            for place in ("models.batches", "tasks.objectives"):
                monkeypatch.setattr(
                    f"zo2adapters.{place}.recomputed", lambda call, *values, keeps: call(*values)
                )
        model = open_checkpoint(base, loss_chunk=4)
        seen: list[int] = []

        def see(module: object, inputs: object, out: torch.Tensor, seen: Any = seen) -> None:
            seen.append(out[..., 0].numel())

        model.skeleton.lm_head.register_forward_hook(see)
        method = FirstOrder(LOMO(), lr=1e-2)
        with Engine(model, method) as engine:
            result = engine.step(batch, None if objective is None else objective(model))
            weights = {name: value.clone() for name, value in engine.parameters_now()}
        taken[keeps] = (result.loss, result.grad_norm), weights
        assert seen == [4, 4, 2] + ([] if keeps else [2, 4, 4])
    (numbers, weights), (kept_numbers, kept_weights) = taken[False], taken[True]
    assert numbers == kept_numbers
    assert all(torch.equal(kept_weights[name], value) for name, value in weights.items())


def test_a_chunked_step_is_the_plain_one_within_summation(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("qwen2"), torch.float64)
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=2)
    found = []
    for chunk, rows in ((None, None), (3, None), (3, 1)):
        with Engine(
            open_checkpoint(base, loss_chunk=chunk), ZerothOrder(estimator), micro_batch_size=rows
        ) as engine:
            found.append(
                [
                    loss
                    for seed in range(2)
                    for loss in engine.step(make_batch(40, [9, 3]), seed=seed).losses
                ]
            )
    assert found[1] == pytest.approx(found[0], rel=3e-6)
    assert found[2] == pytest.approx(found[0], rel=3e-6)
    base, losses = save_model(tmp_path / "bloom", BLOOM_CONFIG), []  # whose layers return tuples
    for chunk in (None, 3):
        with Engine(
            open_checkpoint(base, architecture=BLOOM, loss_chunk=chunk), ZerothOrder(MEZO)
        ) as engine:
            losses.append(engine.evaluate([make_batch(40, [7, 4])]).loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_pieces_chunks_and_micro_batches_are_counted() -> None:
    config = small_config("llama")
    held = expected_held_bytes(config, 4, 12) + expected_held_bytes(config, 1, 12)
    assert activation_bytes(config, 5, 12, streams=3, micro_rows=4) == 3 * held + forward_bytes(
        config, 4, 12
    )
    config = small_config("llama", vocab_size=10_000)
    # logits, and what log-softmax makes of them
    assert forward_bytes(config, 4, 100) == 400 * 10_000 * (4 + 4)
    # converted to float32 in between
    assert forward_bytes(config, 4, 100, loss_chunk=50) == 50 * 10_000 * (4 + 4 + 4)
    assert forward_bytes(config, 4, 100, loss_chunk=999) == forward_bytes(
        config, 4, 100, loss_chunk=400
    )
    # one loss after another
    assert forward_bytes(config, 4, 100, loss_rows=1) == 400 * 10_000 * 4 + 100 * 10_000 * 4
    held = activation_bytes(config, 4, 100, streams=2) - forward_bytes(config, 4, 100)
    assert activation_bytes(config, 4, 100, streams=6) - forward_bytes(config, 4, 100) == 3 * held
    alone = activation_bytes(config, 1, 100, streams=2) - forward_bytes(config, 1, 100)
    assert (
        held
        < 4 * alone
        == activation_bytes(config, 4, 100, micro_rows=1) - forward_bytes(config, 1, 100)
    )


WAITING = {
    "_local_scalar_dense",
    "is_nonzero",
    "item",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
}


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations for whose result the host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.names += [name] if name in WAITING else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss_chunk", [None, 3])
@pytest.mark.parametrize("lengths", [[5, 5], [5, 3]], ids=["full", "padded"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_sweeps_ask_the_device_for_nothing(
    model_type: str, lengths: list[int], loss_chunk: int | None, tmp_path: Path
) -> None:
    base = save_model(tmp_path, small_config(model_type))
    model = open_checkpoint(base, loss_chunk=loss_chunk)
    batch = make_batch(model.config.vocab_size, lengths)
    prepared = model.prepared

    def ahead(given: Any) -> Any:
        """As for a GPU."""
        learned = prepared(given)
        model.record_branches(learned)
        return learned

    noise = PhiloxNoise(Distribution.RADEMACHER)
    with (
        Engine(model, ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3), noise=noise)) as engine,
        patch.object(model, "prepared", ahead),
    ):
        sweep = engine._run.segments.scheduler.sweep
        waits = Waits()

        def watched(*arguments: Any) -> None:
            with waits:
                sweep(*arguments)

        with patch.object(engine._run.segments.scheduler, "sweep", watched):
            for _ in range(2):
                engine.step(batch)
            losses = engine.evaluate([batch]).losses
            score(engine, model, [[3, 4], [5]], [[[6], [7, 8]], [[9, 4, 6], [1]]])
        assert waits.names == []
        with patch.object(model, "prepared", lambda given: given):  # asks each time
            assert engine.evaluate([batch]).losses == losses
            with patch.object(engine._run.segments.scheduler, "sweep", watched):
                engine.evaluate([batch])
        assert waits.names != [], "what is looked for is there to be found"


def asked(question: Callable[[], Any], branches: BranchCache) -> Any:
    with branches:
        return question()


def test_answers_are_those_of_the_first_time_and_in_order_and_what_is_not_known_is_asked() -> None:
    values = torch.tensor([1, 0, 7])
    branches = BranchCache()

    def questions() -> list[Any]:
        return [bool(values[0]), bool(values[1]), values[2].item(), int(values[2]), values.tolist()]

    assert asked(questions, branches) == [True, False, 7, 7, [1, 0, 7]]
    values.zero_()
    assert asked(questions, branches) == [True, False, 7, 7, [1, 0, 7]]
    values, weights, branches = torch.tensor([1, 2]), torch.tensor([0.5]), BranchCache()
    assert asked(lambda: (int(values[0]), weights.item()), branches) == (1, 0.5)
    values.add_(10)
    weights.add_(10)
    assert asked(lambda: (int(values[0]), weights.item(), int(values[1])), branches) == (
        1,
        10.5,
        12,
    )
    values.add_(10)
    assert asked(lambda: (int(values[0]), weights.item(), int(values[1])), branches) == (
        1,
        10.5,
        22,
    ), "not learned late"


OTHER_QUESTIONS: dict[str, Callable[[], object]] = {
    "another order": lambda: (torch.tensor(7).item(), bool(torch.tensor(data=True))),
    "another function": lambda: torch.tensor(data=True).item(),
    "another shape": lambda: bool(torch.tensor([True])),
    "another dtype": lambda: bool(torch.tensor(1)),
}


@pytest.mark.parametrize("questions", OTHER_QUESTIONS.values(), ids=OTHER_QUESTIONS)
def test_another_question_is_never_given_the_answer_to_the_first(
    questions: Callable[[], object],
) -> None:
    branches = BranchCache()
    assert asked(lambda: (bool(torch.tensor(data=True)), torch.tensor(7).item()), branches) == (
        True,
        7,
    )
    with pytest.raises(
        UnsupportedModelError, match=r"read 0 .*expected __bool__ of a tensor of shape"
    ):
        asked(questions, branches)
    assert asked(lambda: bool(torch.tensor(data=False)), branches) is True, (
        "the same question is answered again"
    )


# Freed memory: kept by a training process whose budget has room for it, and never kept by the
# library


MIB = 1 << 20
glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")

FAULTS = """
import resource, sys
import torch
from zo2adapters.trainers.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    blocks = [torch.zeros(2 * 2**20) for _ in range(8)]
    return torch.cat(blocks).sum()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

LEFT = """
import sys
import psutil
import torch
from zo2adapters.trainers import process
assert process.keep_freed_memory(getattr(process, sys.argv[1]))
torch.ones(2**20)
before = psutil.Process().memory_info().rss
block = torch.ones(2**24)
del block
print(psutil.Process().memory_info().rss - before)
"""


RETURNED = """
import psutil
import torch
from zo2adapters.trainers.process import return_freed_memory_at_once
assert return_freed_memory_at_once()
larger = torch.ones(2**22)
del larger  # by default, blocks below its size are kept from now on
def grown():
    before = psutil.Process().memory_info().rss
    pairs = [[torch.ones(2**21), torch.ones(2**17)] for _ in range(16)]
    for pair in pairs:
        pair.pop(0)
    return psutil.Process().memory_info().rss - before - 16 * 2**19
print(max(grown() for _ in range(3)))
"""


def host_plan(*, budget: int) -> HostPlan:
    return HostPlan((MemoryPart("blocks", 60 * MIB),), budget * MIB, None, False)


@pytest.mark.parametrize(("budget", "kept"), [(100, 40), (99, 0), (60, 0), (1000, 40)])
def test_memory_is_kept_where_the_budget_has_room_for_activations_twice(
    budget: int, kept: int
) -> None:
    plan = with_kept_memory(host_plan(budget=budget), 40 * MIB)
    assert plan.nbytes == (60 + kept) * MIB
    assert plan.nbytes <= plan.budget
    assert keeps_memory(plan) is (kept > 0)
    assert (f"{KEPT}: none, returned to the system" in plan.table()) is (kept == 0)


@pytest.mark.long_profile
@glibc
def test_a_process_that_returns_freed_memory_has_none_of_it_left() -> None:
    """16 blocks of 8 MiB each, with smaller ones between them."""
    program = [sys.executable, "-c", RETURNED]
    left = int(subprocess.run(program, check=True, stdout=subprocess.PIPE).stdout)
    assert left < 8 * MIB


@pytest.mark.long_profile
@glibc
def test_a_process_that_keeps_freed_memory_has_hardly_any_page_fault() -> None:
    """Blocks of 8 and 64 MiB, which glibc gives back by default."""
    faults = {
        name: int(
            subprocess.run(
                [sys.executable, "-c", FAULTS, name], check=True, stdout=subprocess.PIPE
            ).stdout
        )
        for name in ("keep", "give back")
    }
    assert faults["keep"] * 5 < faults["give back"], faults


@pytest.mark.few(1)
@glibc
@pytest.mark.parametrize(("largest", "is_kept"), [("LARGEST_KEPT", True), ("SMALL", False)])
def test_blocks_above_the_largest_that_is_kept_return_to_the_system(
    largest: str, is_kept: bool
) -> None:
    """A block of 64 MiB, as logits are: kept ones have made a first-order run larger than its
    plan.
    """
    left = int(
        subprocess.run(
            [sys.executable, "-c", LEFT, largest], check=True, stdout=subprocess.PIPE
        ).stdout
    )
    assert (left > 48 * MIB) is is_kept
    assert (left < 16 * MIB) is not is_kept


def test_the_peak_is_not_forgotten_and_shown_and_without_glibc_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = peak_memory()
    block = bytearray(200 * MIB)
    assert len(block) == 200 * MIB
    held = psutil.Process().memory_info().rss
    del block
    assert peak_memory() >= max(before, held - 10 * MIB)
    record = {
        "loss": 1.5,
        "tokens_per_second": 12.3,
        "rss_bytes": 2_000_000_000,
        "peak_rss_bytes": 2_750_000_000,
    }
    assert progress(record) == "loss 1.5000, 12 tokens/s, 2.00 GB (peak 2.75 GB)"
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert keep_freed_memory() is False


@pytest.mark.parametrize("is_tight", [False, True])
def test_the_command_alone_keeps_memory_and_plans_it(
    is_tight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(train, "keep_freed_memory", lambda: calls.append(True))
    monkeypatch.setattr(train, "return_freed_memory_at_once", lambda: calls.append(False))
    save_tokenizer(save_model(tmp_path / "base", small_config()))
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n')
    options = [
        "--model",
        tmp_path / "base",
        "--data",
        tmp_path / "rows.jsonl",
        "--output",
        tmp_path / "run",
    ]
    options += ["--steps", 1, "--batch-size", 1]
    options += ["--activation-memory", f"{int(0.6 * free_memory())}B"] if is_tight else []
    done("train", "--method", "zeroth-order", *options)
    assert calls == [not is_tight]
    sources = Path(train.__file__).parents[2]
    texts = {path.name: path.read_text().replace("def keep", "") for path in sources.rglob("*.py")}
    assert [name for name, text in texts.items() if "keep_freed_memory()" in text] == ["train.py"]
    model = open_checkpoint(tmp_path / "base")
    given = TrainOptions(
        model="base",
        data=tmp_path,
        output=tmp_path,
        batching=Batching(batch_size=2),
        optimization=Optimization(method="zeroth-order"),
    )
    shapes = RowShapes.of_length(given.batching, 8)
    planned = plan_run(fitting_plan(method_of(RunStart(given)), model, shapes))
    peaks = model.pass_peaks
    assert peaks is not None
    reserved = activation_bytes(model.config, 2, 8, measured=peaks.forward)
    assert planned.host_plan.parts[-1] == MemoryPart(KEPT, reserved)
    assert KEPT in planned.table()


@pytest.mark.parametrize(("of_token", "of_pair"), [(6.0, 0.0), (0.0, 2.0), (6.0, 2.0)])
def test_activations_of_longer_rows_follow_from_two_short_ones(
    of_token: float, of_pair: float
) -> None:
    def kept(tokens: int) -> KeptSize:
        return KeptSize(of_token * tokens + of_pair * tokens**2, on_host=True)

    graph = KeptGraph.of((32, 64), [kept(32)], [kept(64)])
    [size] = graph.of_rows(3, 1000)
    assert size.nbytes == pytest.approx(3 * kept(1000).nbytes)
