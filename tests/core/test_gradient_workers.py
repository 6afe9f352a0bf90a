"""Several workers on first-order steps: the bits of one process that runs their rows as micro-batches."""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from crews import all_equal, attempted, worked
from engines import assert_equal, first_order, memory
from models import make_batch, save_model, small_config
from peft_models import monolithic

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.tasks.objectives import PreferenceLoss
from zo2adapters.tasks.rows import preference_batch
from zo2core import Engine, FirstOrder, Workers
from zo2core.errors import BatchError, OptionError, WorkerError
from zo2core.methods.first_order import add_up

peft: Any = pytest.importorskip("peft")

STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
LORA = peft.LoraConfig(r=3, lora_alpha=16, target_modules=["q_proj", "up_proj"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config("llama", tie_word_embeddings=True)
    return save_model(tmp_path_factory.mktemp("base") / "model", config, torch.float32)


OPENING = threading.Lock()  # peft draws an adapter's first values from torch's generator, which threads of a process share


def opened(base: Path) -> Any:
    with OPENING:
        return open_checkpoint(base, adapter=Adapter(config=LORA, seed=0))


def batch_of(step: int, rows: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the right."""
    return make_batch(40, [5 + (step + 2 * row) % 5 for row in range(rows)], seed=step)


def shards_of(batch: Mapping[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """The rows of each worker, without columns that are padding in all of them."""
    rows = len(batch["labels"])
    shards = []
    for rank in range(size):
        shard = {name: value[rank * rows // size : (rank + 1) * rows // size] for name, value in batch.items()}
        width = int(shard["attention_mask"].sum(dim=1).max())
        shards.append({name: value[:, :width].contiguous() for name, value in shard.items()})
    return shards


class Outcome(NamedTuple):
    """Losses and gradient norms of a few steps, and the parameters after them."""

    reports: list[tuple[float, float | None]]
    parameters: dict[str, torch.Tensor]


def outcome_of(engine: Engine, step: Callable[[Engine, int], Any]) -> Outcome:
    reports = [step(engine, number) for number in range(engine.version, STEPS)]
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
    base: Path, size: int, batches: Callable[[int], Any], forward: Callable[[Any], Any] = lambda model: None, **options: Any
) -> Outcome:
    """What workers make, which is the same for all of them."""
    first, *others = worked(size, lambda workers: alone(base, batches, forward, workers, **options))
    for other in others:
        assert_same(other, first)
    return first


@pytest.mark.few(2)
@pytest.mark.parametrize(("size", "rows"), [(2, 4), (3, 5), (3, 7)])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_is_one_process_accumulating_the_shards(base: Path, size: int, rows: int, clip: float | None) -> None:
    shared = together(base, size, lambda step: batch_of(step, rows), clip=clip)
    assert_same(shared, alone(base, lambda step: shards_of(batch_of(step, rows), size), clip=clip))


def plain_loop(base: Path, shards_of_workers: Callable[[int], Sequence[Sequence[Mapping[str, torch.Tensor]]]]) -> Any:
    """What transformers, peft and torch.optim make of each worker's micro-batches, whose sums are added up last."""
    with Engine(opened(base), FirstOrder(ADAMW)) as engine:
        values = {name: value.detach().clone() for name, value in engine.parameters.items()}
    resident: Any = monolithic(base, LORA, values)
    trained = {name: parameter for name, parameter in resident.named_parameters() if name in values}
    optimizer = ADAMW(list(trained.values()))
    for step in range(STEPS):
        workers = shards_of_workers(step)
        total = sum(int((shard["labels"][:, 1:] != -100).sum()) for shards in workers for shard in shards)
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
    return [{name: value[row : row + 1, :length] for name, value in shard.items()} for row, length in enumerate(lengths)]


@pytest.mark.parametrize("micro", [None, 1])
def test_a_step_is_that_of_transformers_and_peft_that_accumulate_the_shards(base: Path, micro: int | None) -> None:
    def shards(step: int) -> list[list[dict[str, torch.Tensor]]]:
        whole = shards_of(batch_of(step, 5), 3)
        return [[shard] if micro is None else rows_of(shard) for shard in whole]

    shared = together(base, 3, lambda step: batch_of(step, 5), clip=0.05, micro_batch_size=micro)
    assert_equal(shared.parameters, plain_loop(base, shards))


def test_several_batches_are_split_each(base: Path) -> None:
    def batches(step: int) -> list[dict[str, torch.Tensor]]:
        return [batch_of(step, 4), batch_of(step + 9, 5)]

    def of_workers(step: int) -> list[list[dict[str, torch.Tensor]]]:
        split = [shards_of(batch, 2) for batch in batches(step)]
        return [[shards[rank] for shards in split] for rank in range(2)]

    assert_equal(together(base, 2, batches, clip=0.05).parameters, plain_loop(base, of_workers))


def test_streamed_blocks_kept_graphs_and_micro_batches_of_a_shard_change_no_bit(base: Path) -> None:
    expected = together(base, 2, lambda step: batch_of(step, 6))
    assert_same(together(base, 2, lambda step: batch_of(step, 6), memory=memory(1, 1)), expected)
    assert_same(alone(base, lambda step: batch_of(step, 6), micro_batch_size=3), expected)


def test_a_worker_whose_rows_have_no_labels_adds_nothing(base: Path) -> None:
    def batch(step: int) -> dict[str, torch.Tensor]:
        made = batch_of(step, 4)
        made["labels"][:2] = -100
        return made

    assert_same(together(base, 2, batch), alone(base, lambda step: shards_of(batch(step), 2)[1]))


def test_gradients_are_added_to_earlier_ones_as_one_process_adds_them(base: Path) -> None:
    def gradients(workers: Workers | None) -> dict[str, Any]:
        with Engine(opened(base), FirstOrder(None), workers=workers) as engine:
            for step in range(2):
                batch = batch_of(step, 5)
                engine.gradients(batch if workers is not None else shards_of(batch, 3))
            return {name: value.grad for name, value in engine.parameters.items()}

    expected = gradients(None)
    for found in worked(3, gradients):
        assert_equal(found, expected)


def preferences(step: int) -> list[dict[str, torch.Tensor]]:
    """A batch of four preference pairs, which are two rows each."""
    prompts = [[2 + step, 3], [4, 5, 6 + step], [7], [9, 8]]
    completions = [[[8, 9], [10]], [[11], [12, 13, 14]], [[15, 16], [17, 18]], [[19], [20]]]
    return [preference_batch(prompts, completions, [[-3.0, -4.0], [-2.5, -7.0], [-6.0, -5.0], [-1.0, -2.0]])]


@pytest.mark.parametrize("size", [2, 4])
def test_an_objective_is_split_as_it_says(base: Path, size: int) -> None:
    def parts(step: int) -> list[dict[str, torch.Tensor]]:
        [whole] = preferences(step)
        return [{name: value[at : at + 8 // size] for name, value in whole.items()} for at in range(0, 8, 8 // size)]

    shared = together(base, size, preferences, PreferenceLoss)
    assert_same(shared, alone(base, parts, PreferenceLoss))


def raised(base: Path, size: int, step: Callable[[Engine, Workers], Any], **options: Any) -> list[BaseException]:
    def work(workers: Workers) -> None:
        with Engine(opened(base), FirstOrder(ADAMW), workers=workers) as engine:
            step(engine, workers)

    return [error for error in attempted(size, work, **options) if isinstance(error, BaseException)]


@pytest.mark.parametrize(
    ("split", "kinds"), [("directions", [OptionError] * 2), ("2x1", [OptionError] * 2), ("1x2", []), ("rows", [])]
)
def test_a_split_by_rows_is_taken_and_one_by_directions_refused(base: Path, split: str, kinds: list[Any]) -> None:
    errors = raised(base, 2, lambda engine, workers: engine.step(batch_of(0, 2)), split=split)
    assert [type(error) for error in errors] == kinds
    assert all(f"split: found {split}, 2 workers for one gradient" in str(error) for error in errors)


def fail_later(engine: Engine, workers: Workers) -> None:
    engine.step(batch_of(0, 4))
    if workers.rank == 1:
        raise MemoryError("none left")
    engine.step(batch_of(1, 4))


def changed(**changes: Callable[[torch.Tensor], Any]) -> Callable[[Engine, Workers], Any]:
    """A step on a batch with other columns, or without those for which None is returned."""

    def step(engine: Engine, workers: Workers) -> None:
        batch = {name: changes.get(name, torch.Tensor.clone)(value) for name, value in batch_of(0, 4).items()}
        engine.step({name: value for name, value in batch.items() if value is not None})

    return step


BROKEN = "another worker: found a broken connection"
# What is done, the error of each worker, and what worker 0's says.
REFUSED: Mapping[str, tuple[Callable[[Engine, Workers], Any], list[type[BaseException]], str]] = {
    "too few rows": (
        changed(**dict.fromkeys(("input_ids", "attention_mask", "labels"), lambda value: value[:1])),
        [BatchError] * 2,
        "found 1 rows that can be separated, and 2",
    ),
    "labels of one row": (changed(labels=lambda value: value[0]), [BatchError] * 2, "found no labels of shape"),
    "no labels": (changed(labels=lambda value: None), [BatchError] * 2, "found no labels of shape"),
    "no labelled token": (changed(labels=lambda value: value.fill_(-100)), [BatchError, WorkerError], "no token to predict"),
    "a function that does not say how parts join": (
        lambda engine, workers: engine.step(batch_of(0, 4), cast("Any", object())),
        [OptionError] * 2,
        "parts of a batch join",
    ),
    "another batch": (
        lambda engine, workers: engine.step(batch_of(int(workers.rank == 1), 4)),
        [WorkerError] * 3,
        "worker 1: found other batches than worker 0's",
    ),
    "a worker that fails": (fail_later, [WorkerError, MemoryError, WorkerError], BROKEN),
}


@pytest.mark.parametrize(("step", "kinds", "told"), REFUSED.values(), ids=REFUSED)
def test_what_one_cannot_do_ends_the_step_of_all(base: Path, step: Any, kinds: list[type[BaseException]], told: str) -> None:
    errors = raised(base, len(kinds), step)
    assert [type(error) for error in errors] == kinds
    assert told in str(errors[0])
    assert all(BROKEN in str(error) for error in errors if isinstance(error, WorkerError) and len({*kinds}) > 1)


def test_parameters_that_differ_are_found_when_a_snapshot_is_taken(base: Path, tmp_path: Path) -> None:
    def work(workers: Workers) -> None:
        with durable(base, tmp_path / str(workers.rank), workers) as engine:
            engine.step(batch_of(0, 4))
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
        workers=workers,
    )


def run(base: Path, folder: Path, workers: Workers, *, until: int, every: int = 2) -> dict[str, torch.Tensor]:
    """Take the remaining steps, with snapshots."""
    with durable(base, folder / str(workers.rank), workers) as engine:
        while engine.version < until:
            engine.step(batch_of(engine.version, 4))
            if engine.version % every == 0:
                engine.take_snapshot()
        return {name: value.detach().clone() for name, value in engine.parameters.items()}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.few(2)
@pytest.mark.parametrize("lost", ["nothing", "a snapshot", "a journal", "a directory", "damage"])
@pytest.mark.filterwarnings("ignore::zo2core.errors.ZO2Warning")
def test_a_run_goes_on_from_the_newest_snapshot_of_any_worker(base: Path, tmp_path: Path, lost: str) -> None:
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


def test_a_missing_gradient_changes_no_bit_of_the_others() -> None:
    """Not the sign of a zero either. Parameters of several dtypes lie in one message."""
    gradients: list[list[float | None]] = [[None, None, 0.5], [-0.0, None, 0.25], [None, None, None]]
    dtypes = (torch.bfloat16, torch.float32, torch.float32)

    def work(workers: Workers) -> list[torch.Tensor | None]:
        parameters = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
        for parameter, value in zip(parameters, gradients[workers.rank], strict=True):
            parameter.grad = None if value is None else torch.full_like(parameter, value)
        add_up(parameters, workers)
        return [parameter.grad for parameter in parameters]

    for first, second, third in worked(3, work):
        assert first is not None
        assert first.signbit().all()
        assert second is None
        assert third is not None
        assert third.tolist() == [0.75] * 3
