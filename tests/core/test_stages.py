"""One model over several processes: the bits of one process, what each holds, and refusals."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from crews import attempted, worked
from engines import assert_equal, first_order, memory, open_engine, weights, zeroth_order
from models import make_batch, save_model, small_config
from toy import ToyBlockModel

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.conversion import quantize
from zo2adapters.models.footprint import BlockBytes, PassBytes, PassPeaks
from zo2adapters.tasks.generation import Generation
from zo2adapters.tasks.objectives import PreferenceLoss
from zo2adapters.tasks.rows import preference_batch
from zo2core import (
    LOMO,
    Engine,
    FirstOrder,
    Journal,
    LowRankPerturbation,
    MeZOSGD,
    PhiloxNoise,
    Workers,
    ZerothOrder,
)
from zo2core.errors import CheckpointError, OptionError, WorkerError
from zo2core.methods.stages import Stage, divided_blocks
from zo2core.types import Batch, BlockLayout, Lane, ParameterSpec, SegmentKind

STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
LORA = peft.LoraConfig(r=3, lora_alpha=16, target_modules=["q_proj", "up_proj"])
# peft draws an adapter's first values from torch's generator, which threads of a process share
OPENING = threading.Lock()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config("llama", num_hidden_layers=4, tie_word_embeddings=True)
    return save_model(tmp_path_factory.mktemp("stages") / "base", config, torch.float32)


def opened(base: Path, config: Any = LORA, **options: Any) -> Any:
    with OPENING:
        adapter = None if config is None else Adapter(config=config, seed=0)
        return open_checkpoint(base, adapter=adapter, **options)


def rows_for(step: int, rows: int = 5) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the right."""
    return make_batch(40, [5 + (step + 2 * row) % 5 for row in range(rows)], seed=step)


def adapter_run(base: Path, workers: Workers | None = None, **options: Any) -> Any:
    """Losses and norms of a few steps, and the adapter after them."""
    model = opened(base, precision=options.pop("precision", "exact"))
    with first_order(
        model, ADAMW, workers=workers, **{"clip": 0.05, "micro_batch_size": 2, **options}
    ) as engine:
        results = [engine.step(rows_for(step)) for step in range(engine.version, STEPS)]
        losses = [(result.loss, result.grad_norm) for result in results]
        evaluated = engine.evaluate([rows_for(7), rows_for(8)]).losses
        return (
            losses,
            evaluated,
            {name: value.detach().clone() for name, value in engine.parameters.items()},
        )


@pytest.mark.parametrize("size", [2, 3])
def test_stages_train_an_adapter_as_one_process_does(base: Path, size: int) -> None:
    expected = adapter_run(base)
    for found in worked(size, lambda workers: adapter_run(base, workers), split="blocks"):
        assert found[:2] == expected[:2]
        assert_equal(found[2], expected[2])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 1, "memory": memory(1)},
        {"micro_batch_size": None, "clip": None},
        {"memory": memory(2, 1)},
    ],
    ids=["streamed", "one micro-batch", "no room for graphs"],
)
def test_memory_and_micro_batches_change_no_bit(base: Path, options: dict[str, Any]) -> None:
    expected = adapter_run(base, **options)
    for found in worked(2, lambda workers: adapter_run(base, workers, **options), split="blocks"):
        assert found[:2] == expected[:2]
        assert_equal(found[2], expected[2])


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["bfloat16", "mixed", "nf4"])
def test_hidden_states_travel_in_their_own_dtype(tmp_path: Path, form: str) -> None:
    config = small_config("llama", num_hidden_layers=3)
    stored = save_model(tmp_path / "base", config, torch.bfloat16)
    if form == "nf4":
        quantize(stored, tmp_path / "nf4", "nf4")
        stored = tmp_path / "nf4"
    options: dict[str, Any] = {"precision": "mixed"} if form == "mixed" else {}
    expected = adapter_run(stored, **options)
    for found in worked(2, lambda workers: adapter_run(stored, workers, **options), split="blocks"):
        assert found[:2] == expected[:2]
        assert_equal(found[2], expected[2])


def dense_run(base: Path, folder: Path, workers: Workers | None, **options: Any) -> Any:
    """Losses of zeroth-order steps, and the weights that this process has after them."""
    rank = "alone" if workers is None else workers.rank
    with zeroth_order(
        opened(base, None),
        MeZOSGD(lr=1e-2, zo_eps=1e-2),
        journal=folder / f"{rank}.jsonl",
        workers=workers,
        micro_batch_size=2,
        **options,
    ) as engine:
        losses = [engine.step(rows_for(step)).losses for step in range(engine.version, STEPS)]
        return losses, engine.evaluate([rows_for(7), rows_for(8)]).loss, weights(engine)


@pytest.mark.few(2)
@pytest.mark.parametrize("noise", [None, PhiloxNoise()], ids=["MeZO's", "Philox"])
@pytest.mark.parametrize("buckets", [None, 1])
def test_stages_take_zeroth_order_steps_as_one_process_does(
    base: Path, tmp_path: Path, noise: Any, buckets: int | None
) -> None:
    options = {"noise": noise, "memory": memory(buckets)}
    losses, evaluated, expected = dense_run(base, tmp_path, None, **options)
    parts = worked(2, lambda workers: dense_run(base, tmp_path, workers, **options), split="blocks")
    held: dict[str, torch.Tensor] = {}
    for found, loss, own in parts:
        assert (found, loss) == (losses, evaluated)
        assert_equal(own, {name: expected[name] for name in own})
        held |= own
    assert held.keys() == expected.keys()
    assert parts[0][2].keys() & parts[1][2].keys() == {"model.embed_tokens.weight"}, "it is tied"
    journals = [(tmp_path / f"{rank}.jsonl").read_bytes() for rank in range(2)]
    assert journals[0] == journals[1]


def test_gradients_are_added_to_earlier_ones_as_one_process_adds_them(base: Path) -> None:
    def gradients(workers: Workers | None = None) -> dict[str, Any]:
        with first_order(opened(base), None, workers=workers, micro_batch_size=2) as engine:
            for step in range(3):
                engine.gradients(rows_for(step))
            return {name: value.grad for name, value in engine.parameters.items()}

    expected = gradients()
    for found in worked(2, gradients, split="blocks"):
        assert_equal(found, expected)


def preferences(step: int) -> list[dict[str, torch.Tensor]]:
    """A batch of four preference pairs, which are two rows each."""
    prompts = [[2 + step, 3], [4, 5, 6 + step], [7], [9, 8]]
    completions = [[[8, 9], [10]], [[11], [12, 13, 14]], [[15, 16], [17, 18]], [[19], [20]]]
    references = [[-3.0, -4.0], [-2.5, -7.0], [-6.0, -5.0], [-1.0, -2.0]]
    return [preference_batch(prompts, completions, references)]


def test_losses_that_are_joined_otherwise_give_the_same_bits(base: Path) -> None:
    """The last stage has to know the losses of all micro-batches before it goes backward."""

    def run(workers: Workers | None = None) -> Any:
        model = opened(base)
        with first_order(model, ADAMW, workers=workers, micro_batch_size=2) as engine:
            loss = PreferenceLoss(model)
            losses = [engine.step(preferences(step), loss).loss for step in range(STEPS)]
            return losses, {
                name: value.detach().clone() for name, value in engine.parameters.items()
            }

    expected = run()
    for losses, parameters in worked(2, run, split="blocks"):
        assert losses == expected[0]
        assert_equal(parameters, expected[1])


@pytest.mark.parametrize("layers", [[3], [0, 1], [0, 3]], ids=["last", "first", "both"])
def test_stages_without_trained_parameters_pass_on_what_others_need(
    base: Path, layers: list[int]
) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=layers)

    def run(workers: Workers | None = None) -> Any:
        with first_order(
            opened(base, config), ADAMW, workers=workers, micro_batch_size=2
        ) as engine:
            losses = [engine.step(rows_for(step)).loss for step in range(STEPS)]
            return losses, {
                name: value.detach().clone() for name, value in engine.parameters.items()
            }

    expected = run()
    for losses, parameters in worked(2, run, split="blocks"):
        assert losses == expected[0]
        assert_equal(parameters, expected[1])


def test_each_stage_reads_its_own_blocks_once(base: Path) -> None:
    def bytes_read(workers: Workers | None = None) -> list[int]:
        with first_order(
            opened(base), ADAMW, workers=workers, memory=memory(), micro_batch_size=1
        ) as engine:
            results = [engine.step(rows_for(step)) for step in range(STEPS)]
            return [
                result.lanes[Lane.READ].nbytes if Lane.READ in result.lanes else 0
                for result in results
            ]

    [whole, *_] = bytes_read()
    first, second = worked(2, bytes_read, split="blocks")
    assert first[1:] == second[1:] == [0, 0]
    assert max(first[0], second[0]) < 0.75 * whole


def test_digests_of_the_base_are_gathered_once(base: Path, tmp_path: Path) -> None:
    def gathers(workers: Workers) -> int:
        run: dict[str, Any] = {"options": {"name": "adamw"}, "lr": lambda step: 1e-2}
        gathered = patch.object(workers, "all_gather", wraps=workers.all_gather)
        with (
            gathered as calls,
            first_order(
                opened(base), ADAMW, workers=workers, run=tmp_path / str(workers.rank), **run
            ) as engine,
        ):
            for step in range(STEPS):
                engine.step(rows_for(step))
            return sum(call.args[1:] == ("digests of the base",) for call in calls.mock_calls)

    assert worked(2, gathers, split="blocks") == [1, 1]


def test_a_run_goes_on_with_another_number_of_stages(base: Path, tmp_path: Path) -> None:
    """Snapshots have the whole adapter, and the journal says nothing of stages."""

    def run(workers: Workers | None, until: int, folder: Path) -> Any:
        rank = 0 if workers is None else workers.rank
        with first_order(
            opened(base),
            ADAMW,
            options={"name": "adamw"},
            lr=lambda step: 1e-2,
            run=folder / str(rank),
            workers=workers,
            micro_batch_size=2,
        ) as engine:
            while engine.version < until:
                engine.step(rows_for(engine.version))
                engine.take_snapshot()
            return {name: value.detach().clone() for name, value in engine.parameters.items()}

    expected = run(None, 6, tmp_path / "alone")
    stages = tmp_path / "stages"
    worked(2, lambda workers: run(workers, 2, stages), split="blocks")
    digests = Journal(stages / "1" / "journal.jsonl").base_digests
    assert digests.keys() == {layout.name for layout in opened(base).layouts}
    run(None, 3, stages)
    for found in worked(3, lambda workers: run(workers, 6, stages), split="blocks"):
        assert_equal(found, expected)
    paths = [tmp_path / "alone" / "0", *(stages / str(rank) for rank in range(3))]
    alone, *others = [Journal(path / "journal.jsonl") for path in paths]
    assert all(list(journal.commits) == list(alone.commits) for journal in others)
    assert len(alone.base_digests) == len(opened(base).layouts)
    assert all(journal.base_digests == alone.base_digests for journal in others)


def test_a_stage_refuses_a_base_that_has_changed(base: Path, tmp_path: Path) -> None:
    def engine_of(workers: Workers) -> Engine:
        run = tmp_path / str(workers.rank)
        return first_order(
            opened(base),
            ADAMW,
            options={"name": "adamw"},
            lr=lambda step: 1e-2,
            run=run,
            workers=workers,
        )

    def step(workers: Workers) -> None:
        with engine_of(workers) as engine:
            engine.journal.note_base({layouts[-1].name: "0" * 32})
        with engine_of(workers) as engine:
            engine.step(rows_for(0))

    layouts = opened(base).layouts
    first, second = attempted(2, step, split="blocks")
    assert isinstance(first, WorkerError)
    assert isinstance(second, CheckpointError)
    assert "of the base that the run was started with" in str(second)


def layouts_of(sizes: list[int]) -> list[BlockLayout]:
    kinds = [SegmentKind.EMBEDDING, *[SegmentKind.BLOCK] * (len(sizes) - 2), SegmentKind.HEAD]
    return [
        BlockLayout(
            str(index),
            kind,
            (ParameterSpec(str(index), (16 * size,), torch.float32, index, decays=True),),
        )
        for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]


@pytest.mark.parametrize(
    ("sizes", "stages", "starts"),
    [
        ([1, 1, 1, 1, 1, 1], 2, [1, 3]),
        ([8, 2, 2, 2, 2, 8], 2, [1, 3]),
        ([8, 2, 2, 2, 2, 1], 2, [1, 2]),
        ([1, 2, 2, 2, 2, 8], 2, [1, 4]),
        ([1, 2, 2, 2, 1], 3, [1, 2, 3]),
        ([1, 5, 1, 1, 1, 1], 3, [1, 2, 3]),
    ],
)
def test_the_largest_stage_is_as_small_as_can_be(
    sizes: list[int], stages: int, starts: list[int]
) -> None:
    divided = divided_blocks(layouts_of(sizes), stages)
    assert [blocks.start for blocks in divided] == starts
    assert divided[-1].stop == len(sizes) - 1
    with pytest.raises(OptionError, match="5 workers for 4 blocks"):
        divided_blocks(layouts_of([1] * 6), 5)


def fail_later(engine: Engine, workers: Workers) -> None:
    engine.step(rows_for(0))
    if workers.rank == 1:
        raise MemoryError("none left")
    engine.step(rows_for(1))


# what is done, the error of each stage, and what the first or the last one says
FAILURES: dict[str, tuple[Callable[[Engine, Workers], Any], list[type[BaseException]], str]] = {
    "a stage that fails": (fail_later, [WorkerError, MemoryError], "broken connection"),
    "another batch": (
        lambda engine, workers: engine.step(rows_for(workers.rank)),
        [WorkerError, WorkerError],
        "hidden states of another batch",
    ),
    "an export": (
        lambda engine, workers: engine.export("nowhere"),
        [OptionError, OptionError],
        "split: found blocks; expected one process, which has all blocks",
    ),
}


@pytest.mark.parametrize(("work", "kinds", "told"), FAILURES.values(), ids=FAILURES)
def test_what_one_stage_cannot_do_ends_the_step_of_all(
    base: Path, work: Any, kinds: list[type[BaseException]], told: str
) -> None:
    def run(workers: Workers) -> None:
        with first_order(opened(base), ADAMW, workers=workers, micro_batch_size=2) as engine:
            work(engine, workers)

    errors = attempted(2, run, split="blocks")
    assert [type(error) for error in errors] == kinds
    assert any(told in str(error) for error in errors), errors


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "all parameters": (FirstOrder(LOMO(), lr=1e-3), {}, "of all parameters, split rows"),
    "low rank": (
        ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3), LowRankPerturbation(rank=2)),
        {},
        "of low rank are split by directions",
    ),
}


@pytest.mark.parametrize(("method", "options", "told"), REFUSED.values(), ids=REFUSED)
def test_what_blocks_cannot_be_divided_for_is_refused(
    base: Path, method: Any, options: dict[str, Any], told: str
) -> None:
    def run(workers: Workers) -> None:
        open_engine(opened(base, None), method, workers=workers, **options).close()

    for error in attempted(2, run, split="blocks"):
        assert isinstance(error, OptionError)
        assert told in str(error)


class Beside(ToyBlockModel):
    """Its blocks read a value of the embedding beside the hidden states."""

    def embed(self, batch: Batch) -> Any:
        hidden = super().embed(batch)
        return hidden, hidden * 2

    def block(self, index: int, activations: Any) -> Any:
        hidden, beside = activations
        return super().block(index, hidden + beside), beside

    def head(self, batch: Batch, activations: Any) -> torch.Tensor:
        return super().head(batch, activations[0])


class PassedOn(ToyBlockModel):
    """Its blocks pass on a second value."""

    def embed(self, batch: Batch) -> Any:
        return super().embed(batch), None

    def block(self, index: int, activations: Any) -> Any:
        hidden = super().block(index, activations[0])
        return hidden, hidden

    def head(self, batch: Batch, activations: Any) -> torch.Tensor:
        return super().head(batch, activations[0])


@pytest.mark.parametrize("kind", [Beside, PassedOn])
def test_blocks_that_share_more_than_hidden_states_are_refused(kind: Any, tmp_path: Path) -> None:
    def run(workers: Workers) -> None:
        file = tmp_path / f"{workers.rank}.safetensors"
        model = kind(40, 8, 3, tied=False, dtype=torch.float32, file=file)
        with open_engine(model, workers=workers) as engine:
            engine.evaluate([rows_for(0)])

    errors = attempted(2, run, split="blocks")
    assert any("connected by hidden states alone" in str(error) for error in errors), errors


@pytest.mark.parametrize(
    ("owner", "name", "values"),
    [
        (torch.backends.cpu, "get_cpu_capability", ["AVX2", "AVX512"]),
        (torch, "get_num_threads", [3, 5]),
    ],
    ids=["processors", "threads"],
)
def test_machines_of_different_kinds_are_told(
    owner: Any, name: str, values: list[Any], base: Path
) -> None:
    of_stages: dict[int, Any] = {}  # each stage is a thread here

    def of_this_stage() -> Any:
        return of_stages.setdefault(threading.get_ident(), values[len(of_stages) % 2])

    with patch.object(owner, name, of_this_stage):
        errors = attempted(2, lambda workers: adapter_run(base, workers), split="blocks")
    assert "machines of different kinds" in str(errors[0])
    assert all(str(value) in str(errors[0]) for value in values)


def measured(bytes_of_token: float | None) -> PassPeaks | None:
    """What a stage's machine has measured, of forwards."""
    if bytes_of_token is None:
        return None
    block = BlockBytes([(bytes_of_token, 0.0)], None)
    return PassPeaks(PassBytes(block, block, [(1.0, 0.0)]), None)


@pytest.mark.parametrize(
    ("first", "second"), [(1.0, 3e4), (3e4, None)], ids=["the largest", "the formula"]
)
def test_stages_whose_measured_memory_differs_run_the_same_batches_together(
    first: float, second: float | None, base: Path
) -> None:
    prompts = [[5, 6, 7], [8, 9], [3, 4]]

    def outcome(workers: Workers | None, peaks: PassPeaks | None) -> Any:
        model = opened(base)
        model.pass_peaks = peaks
        with open_engine(model, workers=workers, memory=memory(None, 1 << 17)) as engine:
            evaluated = engine.evaluate([rows_for(step, 1) for step in range(3)])
            generation = Generation(
                engine, model, max_new_tokens=2, allowed=engine.activation_bytes
            )
            tokens = [sorted(sweep) for sweep in generation.sweeps(prompts)]
            return evaluated.losses, evaluated.sweeps, tokens

    of_stages = [measured(first), measured(second)]
    alone = [outcome(None, peaks) for peaks in of_stages]
    assert alone[0][1:] != alone[1][1:], "the batches are grouped otherwise"
    for stage in worked(
        2, lambda workers: outcome(workers, of_stages[workers.rank]), split="blocks"
    ):
        assert stage == alone[1], "what the second stage has measured decides, or the formula"


class Differentiated(ToyBlockModel):
    """Its embedding is trained, and is the head, too."""

    def leaves(self, index: int) -> dict[str, torch.Tensor]:
        return {spec.name: torch.empty(0) for spec in self.layouts[index].used}


def test_a_parameter_that_stages_would_train_in_two_orders_is_refused(tmp_path: Path) -> None:
    def run(workers: Workers) -> None:
        file = tmp_path / f"{workers.rank}.safetensors"
        model = Differentiated(40, 8, 3, tied=True, dtype=torch.float32, file=file)
        unused: Any = None
        Stage(model, workers).visitor(unused, unused, unused, kept_bytes=0, loss_scale=1.0)

    for error in attempted(2, run, split="blocks"):
        assert "found table.weight, which blocks of several stages train" in str(error)


def test_many_blocks_are_divided_at_once() -> None:
    assert len(divided_blocks(layouts_of([1] * 130), 16)) == 16
