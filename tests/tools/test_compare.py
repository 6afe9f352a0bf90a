"""The comparison of steps: every kind of side runs, and sides with the same arithmetic have the same losses."""

import json
import sys
from pathlib import Path
from typing import Any

import bench
import pytest
import torch
from benches.compare import sweeps_of
from make_checkpoint import make_checkpoint
from models import small_config
from runs import small_run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "llama"
    make_checkpoint(small_config("llama"), path, dtype=torch.float32, sparse=False)
    return path


def compared(model: object, sides: list[str], *more: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        out = Path(f"{model}-compared.json")
        given = ["bench.py", "compare", str(model), "--tokens", "6", "--steps", "1", "--output", str(out), "--sides"]
        patch.setattr(sys, "argv", [*given, *sides, *more])
        bench.main()
    measured = json.loads(out.read_text())
    rows: dict[str, Any] = next(rows for shape, rows in measured.items() if " x " in shape)
    return rows


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ("--noise mezo", ["--noise mezo --loss-chunk none --whole", "--noise mezo --buckets 1 --every 1 --serial"]),
        ("--rank 2", ["--rank 2 --buckets 2 --rate 100MB", "--rank 2 --bus 1"]),
        ("--lora adamw", ["--lora adamw --recompute", "--lora adamw --whole", "--lora adamw --whole --checkpointing"]),
        ("--full adamw", ["--full adamw --whole", "--full adamw --update-seconds 1e-3"]),
    ],
)
def test_sides_with_the_same_arithmetic_have_the_same_losses(first: str, others: list[str], base: Path) -> None:
    rows = compared(base, [first, *others])
    assert list(rows) == [first, *others]
    assert all(row["losses of the first"] and row["times faster"]["median"] > 0 for row in rows.values())
    assert rows[first]["share of forwards"]["median"] < 1 <= rows[first]["to the slowest lane"]["min"]


@pytest.mark.parametrize("queries", [1, 4])
def test_sweeps_have_every_evaluation_once(queries: int) -> None:
    ways = sweeps_of(queries)
    sizes = {name: {len(places) for places in way} for name, way in ways.items()}
    assert sizes == {"in-turn": {1}, "inner": {2}, "outer": {queries}, "both": {2 * queries}}
    for way in ways.values():
        assert sorted(place for places in way for place in places) == list(range(2 * queries))


def test_p_rges_variants_have_the_same_losses_and_their_shares_of_memory(tmp_path: Path) -> None:
    make_checkpoint(small_config("llama", vocab_size=1000), tmp_path / "base", dtype=torch.float32, sparse=False)
    sides = [f"--lora-fa --queries 2 --sweeps {way}" for way in sweeps_of(2)]
    others = [
        "--lora-fa --queries 2",
        "--lora-fa --queries 2 --stack 1",
        "--lora-fa --whole",
        "--lora-fa --lora sgd --whole",
    ]
    rows = compared(tmp_path / "base", [*sides, *others], "--unpadded", "--rows", "2")
    assert all(rows[side]["losses apart"] < 1e-5 for side in (*sides, *others[:2]))
    assert all(row["step"]["min"] > 0 for row in rows.values())
    logits = 2 * 6 * 1000 * 4  # bytes of a forward's; cross_entropy, one operation in inference mode, makes as many again
    assert 2 * logits <= rows[sides[0]]["operations_bytes"] < rows[sides[1]]["operations_bytes"]


def test_runs_that_share_their_base_have_the_losses_of_one_alone(base: Path) -> None:
    for first in ("--lora adamw", "--lora adamw --run 1"):
        rows = compared(base, [first, f"{first} --together 2", "--rank 2 --together 2"])
        assert rows[f"{first} --together 2"]["losses of the first"]
        assert rows["--rank 2 --together 2"]["losses apart"] > 0
    assert rows["--rank 2 --together 2"]["times faster than apart"]["median"] > 0


@pytest.mark.long_profile
def test_sides_in_processes_have_the_losses_of_one(base: Path) -> None:
    rows = compared(base, ["--queries 2", "--queries 2 --workers 2", "--queries 2 --freed returned"], "--apart")
    assert all(row["losses of the first"] and row["peak_bytes"]["min"] > 0 for row in rows.values())


def test_sides_with_other_work_run(base: Path) -> None:
    mixed = "--precision mixed --dtype bfloat16 --transfer-dtype bfloat16-back --bus 0.5 --replay device"
    sides = ["", "--queries 2", "--batches 2 --micro-rows 1", "--whole --forward --queries 2", mixed]
    rows = compared(base, [*sides, "--full adamw --delayed", "--full lomo"], "--labelled", "2")
    assert list(rows) == ["default", *sides[1:], "--full adamw --delayed", "--full lomo"]
    assert rows[mixed]["lanes"]["upload_bytes"] > 0


def test_what_a_geometry_does_not_heed_is_refused_and_a_checkpoint_of_its_name_is_the_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in ("lora adamw", "precision mixed", "rate 1GB", "loss-chunk none", "transfer-dtype bfloat16"):
        with pytest.raises(SystemExit, match=rf"^opt-125m: a geometry takes no --{option.split()[0]}; write"):
            compared("opt-125m", [f"--{option}"])
    (tmp_path / "opt-125m").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    assert list(compared("opt-125m", ["--lora adamw"])) == ["--lora adamw"]


@pytest.mark.parametrize("rank", ["", "--rank 2 "], ids=["in the weights", "beside the activations"])
def test_packed_rows_are_the_same_rows(tmp_path: Path, rank: str) -> None:
    options = small_run(tmp_path)
    rows = compared(options.model, [rank.strip(), f"{rank}--packed"], "--data", str(options.data), "--rows", "3")
    assert rows[f"{rank}--packed"]["times faster"]["min"] > 0
