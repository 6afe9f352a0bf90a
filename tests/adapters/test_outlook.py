"""The first lines of a run: method, time, memory and disk from its plan, and what it counts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import make_place, run_here

from zo2adapters.trainers.methods import GradientRun
from zo2adapters.trainers.optimization import FirstOrder, Optimization
from zo2adapters.trainers.options import Batching, TrainOptions
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.run_plan import plan_of
from zo2core import HostPlan
from zo2core.names import OptimizerName

pytest.importorskip("peft")

SIZE = r"[0-9.]+ [kMG]B"
TIME = r"[0-9.e-]+ m?s"
FIRST_ORDER = ["--method", "adamw", "--lora-rank", 2, "--lr", 1e-3]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base and rows."""
    return make_place(tmp_path_factory.mktemp("outlook"))


def lines(*more: object) -> list[str]:
    """What a run prints about itself."""
    where = ["train", "--model", "base", "--data", "rows.jsonl", "--output", "run", "--steps", 2, "--batch-size", 3]
    ended = run_here(*where, *more)
    assert ended.status == 0, ended.err
    return ended.err.splitlines()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("more", "begins"),
    [
        (["--lr", 1e-3], "Zeroth-order steps train all parameters: 2 steps of 3 rows, about "),
        (["--lr", 1e-3, "--lora-rank", 2], "Zeroth-order steps train LoRA of rank 2: 2 steps of 3 rows, about "),
        (FIRST_ORDER, "AdamW trains LoRA of rank 2: 2 steps of 3 rows, about "),
        ([*FIRST_ORDER, "--evaluation", 0.3], "AdamW trains LoRA of rank 2: 2 steps of 3 rows, 2 evaluations, about "),
    ],
    ids=str,
)
def test_the_first_line_has_method_time_memory_and_disk(here: Path, more: list[object], begins: str) -> None:
    [first, *_] = lines(*more)
    assert first.startswith(begins)
    writes = f"snapshots of adapter and optimizer, {SIZE} each, at most one a minute" if "--method" in more else "negligible"
    assert re.search(f"about {TIME}[.] Memory: {SIZE} of {SIZE} free[.] Disk writes: {writes}", first)


def test_memory_that_is_limited_is_called_so(here: Path) -> None:
    assert re.search(f"Memory: {SIZE} of 8.00 GB allowed", lines("--lr", 1e-3, "--memory", "8GB")[0])


def test_the_first_line_counts_graphs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[HostPlan] = []
    storage = GradientRun.storage

    def noted(self: GradientRun, engine: Any, host: HostPlan, model: Any) -> str:
        told.append(host)
        return storage(self, engine, host, model)

    monkeypatch.setattr(GradientRun, "storage", noted)
    lines(*FIRST_ORDER)
    assert any(part.name.startswith("graphs of") for part in told[0].parts)


def test_the_outlook_of_a_streamed_run_counts_blocks_that_stream_and_turns(here: Path) -> None:
    written = []
    for turn in (3, 6):
        options = TrainOptions(
            model="base",
            data=Path("rows.jsonl"),
            output=Path("run"),
            steps=4,
            first_order=FirstOrder(method="badam", stream_blocks=True, switch_every=turn),
            optimization=Optimization(lr=1e-3),
            batching=Batching(batch_size=3),
        )
        inputs = RunInputs.read(options)
        plan = plan_of(inputs)
        inputs.model.weights.close()
        assert plan.host_plan.buckets is not None
        assert plan.snapshot_bytes == 0
        written.append(plan.written_bytes - plan.spilled_bytes)
    assert written[0] == pytest.approx(2 * written[1], abs=1)


def test_a_step_that_measures_gradients_first_sweeps_twice(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = TrainOptions(model="base", data=Path("rows.jsonl"), output=Path("run"), steps=4, batching=Batching(batch_size=2))
    monkeypatch.setattr("zo2adapters.trainers.run_plan.measured_forward_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr("zo2adapters.trainers.run_plan.measured_backward", lambda *_: 3.0)
    seconds = []
    cases: list[tuple[OptimizerName, float | None]] = [("adamw", None), ("adamw", 1.0), ("badam", None), ("badam", 1.0)]
    for method, norm in cases:
        inputs = RunInputs.read(replace(given, first_order=FirstOrder(method=method, max_grad_norm=norm)))
        seconds.append(plan_of(inputs).forward_seconds)
        inputs.model.weights.close()
    assert seconds[1] == 2 * seconds[0]
    assert seconds[3] == seconds[2], "one segment has its gradients there at once"
