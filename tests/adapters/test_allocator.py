"""Freed memory: kept by a training process whose budget has room for it, counted, and never kept by the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from command_lines import done
from models import save_model, save_tokenizer, small_config

from zo2adapters import open_checkpoint
from zo2adapters.commands import train
from zo2adapters.models.footprint import activation_bytes
from zo2adapters.trainers.allocator import KEPT, keep_freed_memory, keeps_memory, peak_memory, with_kept_memory
from zo2adapters.trainers.metrics import progress
from zo2adapters.trainers.options import Batching, TrainOptions
from zo2adapters.trainers.run_inputs import RowShapes
from zo2adapters.trainers.run_plan import plan_run
from zo2core import HostPlan
from zo2core.planning.memory import MemoryPart, free_memory

MIB = 1 << 20
glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")

FAULTS = """
import resource, sys
import torch
from zo2adapters.trainers.allocator import keep_freed_memory
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
from zo2adapters.trainers import allocator
assert allocator.keep_freed_memory(getattr(allocator, sys.argv[1]))
torch.ones(2**20)
before = psutil.Process().memory_info().rss
block = torch.ones(2**24)
del block
print(psutil.Process().memory_info().rss - before)
"""


def host_plan(*, budget: int) -> HostPlan:
    return HostPlan((MemoryPart("blocks", 60 * MIB),), budget * MIB, None, False)


@pytest.mark.parametrize(("budget", "kept"), [(100, 40), (99, 0), (60, 0), (1000, 40)])
def test_memory_is_kept_where_the_budget_has_room_for_activations_twice(budget: int, kept: int) -> None:
    plan = with_kept_memory(host_plan(budget=budget), 40 * MIB)
    assert plan.nbytes == (60 + kept) * MIB
    assert plan.nbytes <= plan.budget
    assert keeps_memory(plan) is (kept > 0)
    assert (f"{KEPT}: none, returned to the system" in plan.table()) is (kept == 0)


@pytest.mark.long_profile
@glibc
def test_a_process_that_keeps_freed_memory_has_hardly_any_page_fault() -> None:
    """Blocks of 8 and 64 MiB, which glibc gives back by default."""
    faults = {
        name: int(subprocess.run([sys.executable, "-c", FAULTS, name], check=True, stdout=subprocess.PIPE).stdout)
        for name in ("keep", "give back")
    }
    assert faults["keep"] * 5 < faults["give back"], faults


@pytest.mark.few(1)
@glibc
@pytest.mark.parametrize(("largest", "is_kept"), [("LARGEST", True), ("SMALL", False)])
def test_blocks_above_the_largest_that_is_kept_return_to_the_system(largest: str, is_kept: bool) -> None:
    """A block of 64 MiB, as logits are: kept ones have made a first-order run larger than its plan."""
    left = int(subprocess.run([sys.executable, "-c", LEFT, largest], check=True, stdout=subprocess.PIPE).stdout)
    assert (left > 48 * MIB) is is_kept
    assert (left < 16 * MIB) is not is_kept


def test_where_there_is_no_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert keep_freed_memory() is False


def test_the_peak_is_not_forgotten() -> None:
    before = peak_memory()
    block = bytearray(200 * MIB)
    assert len(block) == 200 * MIB
    held = psutil.Process().memory_info().rss
    del block
    assert peak_memory() >= max(before, held - 10 * MIB)


def test_the_progress_line_shows_the_peak_beside_the_present() -> None:
    record = {"loss": 1.5, "tokens_per_second": 12.3, "rss_bytes": 2_000_000_000, "peak_rss_bytes": 2_750_000_000}
    assert progress(record) == "loss 1.5000, 12 tokens/s, 2.00 GB (peak 2.75 GB)"


def test_the_plan_shows_and_counts_what_is_kept(tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config()))
    shapes = RowShapes.of_length(Batching(batch_size=2), 8)
    options = TrainOptions(model="base", data=tmp_path, output=tmp_path, batching=Batching(batch_size=2))
    planned = plan_run(options, model, shapes)
    assert planned.host_plan.parts[-1] == MemoryPart(KEPT, activation_bytes(model.config, 2, 8))
    assert KEPT in planned.table()


@pytest.mark.parametrize("is_tight", [False, True])
def test_the_command_keeps_memory_within_the_budget_alone(
    is_tight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(train, "keep_freed_memory", lambda: calls.append(True))
    save_tokenizer(save_model(tmp_path / "base", small_config()))
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n')
    options = ["--model", tmp_path / "base", "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "run"]
    options += ["--steps", 1, "--batch-size", 1]
    options += ["--memory", f"activations={int(0.6 * free_memory())}"] if is_tight else []
    done("train", *map(str, options))
    assert calls == ([] if is_tight else [True])


def test_no_module_but_the_command_keeps_memory() -> None:
    sources = Path(train.__file__).parents[2]
    callers = [
        path.name for path in sources.rglob("*.py") if "keep_freed_memory()" in path.read_text().replace("def keep", "")
    ]
    assert callers == ["train.py"]
