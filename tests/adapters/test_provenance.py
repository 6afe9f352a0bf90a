"""What a run's journal says of its data and options: all that shapes the result, and nothing that does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import ROWS, make_place, write_rows

from zo2adapters.tasks.row_source import data_sha256
from zo2adapters.trainers.model_options import RunModelOptions
from zo2adapters.trainers.optimization import Decay, FirstOrder, Optimization
from zo2adapters.trainers.options import Batching, Storage, TrainOptions
from zo2adapters.trainers.provenance import provenance
from zo2adapters.trainers.run_directory import RunDirectory
from zo2adapters.trainers.trainer import Trainer
from zo2adapters.trainers.worker_options import device_kinds
from zo2core import ZO2Error
from zo2core.errors import JournalError
from zo2core.names import OptimizerName


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    place = make_place(tmp_path)
    given = {"data": place / "rows.jsonl", "output": place / "run", "batching": Batching(batch_size=3)}
    return TrainOptions(model=str(place / "base"), steps=2, optimization=Optimization(lr=1e-3), **given)  # type: ignore[arg-type]


def told(options: TrainOptions, tokens: int = 7, length: int = 12) -> dict[str, object]:
    rows: dict[str, object] = {"padding": 0, "data tokens": tokens}
    devices = device_kinds(options.storage.device, None)
    given: Any = {"data_sha256": data_sha256(options.data), "sequence_length": length, "devices": devices}
    return provenance(options, Path(options.model), rows, **given)


def test_whatever_shapes_the_result_is_told(options: TrainOptions) -> None:
    before = told(options)
    assert json.loads(json.dumps(before)) == before
    others = [
        told(options, tokens=8),
        told(options, length=11),
        told(replace(options, seed=1)),
        told(replace(options, model_options=RunModelOptions(dtype="bfloat16"))),
        told(replace(options, batching=Batching(batch_size=4))),
        told(replace(options, batching=Batching(batch_size=3, micro_batch_size=2))),
        told(replace(options, batching=Batching(batch_size=3, loss_chunk=2))),
        told(replace(options, optimization=Optimization(lr=1e-3, decay=Decay.LINEAR))),
        told(replace(options, storage=Storage(device="cuda"))),
        told(replace(options, evaluation=options.data, evaluate_every=1)),
        told(replace(options, first_order=FirstOrder(method="adamw"))),
    ]
    write_rows(options.data, ROWS[1:])
    others.append(told(options))
    write_rows(options.data, ROWS)
    assert told(options) == before
    tokenizer = Path(options.model) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    others.append(told(options))
    assert all(other != before for other in others)


def test_nothing_else_is_told(options: TrainOptions) -> None:
    before = told(options)
    for other in (
        replace(options, storage=Storage(memory="4GiB", write_back_every=3, snapshot_every=5, activation_memory="1MB")),
        replace(options, keep_best=True, report_to="wandb", samples=2),
        replace(options, output=Path("elsewhere")),
        options.with_steps(5),
    ):
        assert told(other) == before


@pytest.mark.parametrize("name", ["batch_size", "micro_batch_size", "sequence_length"])
def test_options_that_were_changed_on_disk_are_refused(options: TrainOptions, name: str) -> None:
    with Trainer(options, quiet=True) as trainer:
        trainer.run()
    path = options.output / "options.json"
    record = json.loads(path.read_text())
    record["options"]["batching"][name] = 2
    path.write_text(json.dumps(record))
    changed = replace(options, batching=Batching(**record["options"]["batching"]))
    with pytest.raises(ZO2Error) as info:
        Trainer(changed, resume=True, quiet=True)
    assert isinstance(info.value, JournalError) or name == "sequence_length"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("adamw", "lr", 2e-3),
        ("adamw", "weight_decay", 0.1),
        ("adamw", "betas", [0.8, 0.9]),
        ("badam", "switch_every", 2),
        ("sgd", "lr", 2e-3),
        (None, "lr", 2e-3),
        (None, "evaluate_every", 2),
    ],
)
def test_what_decides_the_weights_and_was_edited_is_refused(
    options: TrainOptions, method: OptimizerName | None, name: str, value: object
) -> None:
    evaluated = replace(options, evaluation=options.data, evaluate_every=1, keep_best=True)
    with Trainer(replace(evaluated, first_order=FirstOrder(method=method)), quiet=True) as trainer:
        trainer.run()
    path = options.output / "options.json"
    record = json.loads(path.read_text())
    groups = (record["options"], record["options"]["optimization"], record["options"]["first_order"])
    [group] = [group for group in groups if name in group]
    group[name] = value
    path.write_text(json.dumps(record))
    with pytest.raises(JournalError, match=name if name != "evaluate_every" else "evaluated every"):
        Trainer(RunDirectory.options(options.output).with_steps(3), resume=True, quiet=True)
