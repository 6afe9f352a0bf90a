"""A plan for a GPU that is not here: which blocks stay, what is moved, and what is not known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from make_checkpoint import geometries, make_checkpoint
from models import save_model, small_config

from zo2adapters import open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models.footprint import expected_held_bytes, forward_bytes, least_activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.engines import step_memory
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2adapters.trainers.options import Batching, Storage, TrainOptions
from zo2adapters.trainers.run_inputs import RowShapes
from zo2adapters.trainers.run_plan import BUS, Transfers, plan_run
from zo2core import DevicePlan
from zo2core.errors import MemoryBudgetError, OptionError
from zo2core.names import EstimatorName

BLOCKS = 4
MEZO = Optimization(exact_mezo=True)


class Planned(NamedTuple):
    device_plan: DevicePlan
    read_bytes: int
    transfers: Transfers


def planned(model: HFBlockModel, optimization: Optimization = MEZO, *, rows: int = 1, **limits: Any) -> Planned:
    batching = Batching(batch_size=rows)
    sizes: dict[str, Any] = {"device_memory": "1GB", **{name: str(value) for name, value in limits.items()}}
    given: Any = {"optimization": optimization, "batching": batching, "storage": Storage(device="cuda", **sizes)}
    options = TrainOptions(model="base", data=Path("rows"), output=Path("run"), **given)
    plan = plan_run(options, model, RowShapes.of_length(batching, 8))
    assert plan.device_plan is not None
    assert plan.transfers is not None
    return Planned(plan.device_plan, plan.read_bytes, plan.transfers)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), small_config("llama", num_hidden_layers=BLOCKS))


def test_what_does_not_stay_is_moved_each_way(base: Path) -> None:
    model = open_checkpoint(base)
    block = model.layouts[1].nbytes
    kept = set()
    whole = planned(model).device_plan.nbytes
    for nbytes in range(whole, whole - (BLOCKS + 1) * block, -block // 2):
        try:
            plan = planned(model, device_memory=nbytes)
        except MemoryBudgetError:
            break
        assert plan.device_plan.nbytes <= nbytes
        assert plan.transfers.moved_bytes == (BLOCKS - plan.device_plan.kept) * block
        assert plan.transfers.transfer_seconds == plan.transfers.moved_bytes / BUS
        assert plan.read_bytes == 0, "the host holds it all"
        kept.add(plan.device_plan.kept)
    assert kept == {0, 1, BLOCKS}, "one block less than all takes two slots: only a second one makes room"


def test_noise_that_is_not_kept_leaves_room(base: Path) -> None:
    model = open_checkpoint(base)
    mezo, counted = (planned(model, Optimization(noise=noise)) for noise in (Noise.MEZO, Noise.RADEMACHER))
    assert counted.device_plan.nbytes < mezo.device_plan.nbytes


@pytest.mark.long_profile
def test_opt_175b_on_24_gb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(geometries()["opt-175b"], tmp_path / "opt", dtype=torch.float16, sparse=True)
    arguments = ["plan", "--model", str(tmp_path / "opt"), "--device-memory", "24GB", "--memory", "400GB"]
    arguments += ["--batch-size", "1", "--sequence-length", "64"]
    main(arguments)
    table = capsys.readouterr().out
    assert "compute, overlapped        not predicted" in table
    assert "at 25.0 GB/s each way (assumed)" in table
    main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    moved = found["moved_bytes"]
    assert found["transfer_seconds"] == moved / 25e9
    assert found["seconds"] is None, "compute is not predicted"
    assert found["blocks"] == 96
    assert 0.9 * 96 * 3.6e9 < moved + found["device_plan"]["kept"] * 3.6e9 < 1.1 * 96 * 3.6e9
    main([*arguments, "--json", "--memory", "100GB"])
    assert moved / 2 < json.loads(capsys.readouterr().out)["read_bytes"] < moved, "some blocks stay on the host"


def test_more_queries_take_activations_and_then_wait_for_them(base: Path) -> None:
    model = open_checkpoint(base)
    one, four = (planned(model, replace(MEZO, queries=q), rows=8) for q in (1, 4))
    assert (one.transfers.waiting_bytes, four.transfers.waiting_bytes) == (0, 0)
    more = four.device_plan.activation_bytes - one.device_plan.activation_bytes
    assert more == 3 * (one.device_plan.activation_bytes - forward_bytes(model.config, 8, 8))
    blocks = (BLOCKS - 2) * model.layouts[1].nbytes  # two slots are left
    tight_memory = four.device_plan.nbytes - blocks - more // 3
    tight = planned(model, replace(MEZO, queries=4), rows=8, device_memory=tight_memory)
    assert 0 < tight.transfers.waiting_bytes < more
    assert tight.device_plan.kept == 0
    assert (
        tight.transfers.transfer_seconds * BUS == tight.transfers.moved_bytes + (BLOCKS + 1) * tight.transfers.waiting_bytes
    )


def test_one_side_of_each_query_takes_fewer_activations(base: Path) -> None:
    model = open_checkpoint(base)
    two_sided, one_sided = (
        planned(model, Optimization(estimator=estimator, queries=4), rows=8)
        for estimator in (EstimatorName.MEZO, EstimatorName.FZOO)
    )
    running, held = forward_bytes(model.config, 8, 8), expected_held_bytes(model.config, 8, 8)
    assert two_sided.device_plan.activation_bytes - running == 8 * held
    assert one_sided.device_plan.activation_bytes - running == 5 * held


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_memory": "much"}, OptionError, "device_memory: found 'much'"),
        ({"device_memory": "10kB"}, OptionError, "device_memory"),
        ({"device_memory": "10KB"}, MemoryBudgetError, "device_memory: .*smallest plan.*slots"),
        ({"memory": "1MB"}, MemoryBudgetError, "memory: .*smallest plan"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, base: Path
) -> None:
    with pytest.raises(error, match=message):
        planned(open_checkpoint(base), **options)


@pytest.mark.parametrize(
    "optimization",
    [Optimization(rank=4, queries=2, stack=2), Optimization(rank=4, per_row=True), Optimization(per_row=True)],
)
def test_a_plan_reserves_what_the_run_reserves(optimization: Optimization, base: Path) -> None:
    model = open_checkpoint(base, precision="exact")
    needed = step_memory(model, RowShapes.of_length(Batching(batch_size=4), 8).longest, optimization, None)
    assert planned(model, optimization, rows=4).device_plan.activation_bytes == needed.nbytes


def test_the_least_memory_counts_logits_in_chunks_where_the_loss_is_computed_in_chunks(tmp_path: Path) -> None:
    base = save_model(tmp_path, small_config("llama", vocab_size=1000))
    whole, chunked = open_checkpoint(base), open_checkpoint(base, loss_chunk=1)
    longest = RowShapes.of_length(Batching(batch_size=4), 8).longest
    least = [step_memory(model, longest, Optimization(), None).least for model in (whole, chunked)]
    assert least == [least_activation_bytes(whole.config, 4, 8, loss_chunk=chunk) for chunk in (None, 1)]
    assert least[1] < least[0]
