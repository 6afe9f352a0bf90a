"""The tools: sparse checkpoints, benchmarks and their command lines, the table of families and
formats, and the GPU day.
"""

import json
import math
import re
import struct
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import bench
import families
import formats
import gpu_day
import make_chats
import options_page
import pytest
import torch
from benches.compare import sweeps_of
from command_lines import Ended, run_tool
from families import small_config as small_mixture
from make_checkpoint import (
    geometries,
    main,
    make_checkpoint,
    make_sparse_coded,
    make_sparse_gguf,
    save_tokenizer,
)
from models import CONFIGS, make_batch, small_config
from runs import small_run

from zo2adapters import open_checkpoint
from zo2adapters.models.architecture import ARCHITECTURES, segment_layouts
from zo2adapters.models.skeleton import build_skeleton
from zo2core import Engine
from zo2core.encodings.forms import GGUFRows, MatrixStack, MXFP4Stack


def head(path: Path) -> bytes:
    """A shard's header with its length; all of any other file."""
    raw = path.read_bytes()
    return raw[: 8 + struct.unpack("<Q", raw[:8])[0]] if path.suffix == ".safetensors" else raw


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "llama"
    make_checkpoint(small_config("llama"), path, dtype=torch.float32, sparse=False)
    return path


def measured(*arguments: object) -> Any:
    """The JSON of a benchmark's last line."""
    return json.loads(run_tool(bench.main, *arguments).out.splitlines()[-1])


@pytest.mark.parametrize("max_shard", [10**9, 2000])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_sparse_checkpoint_is_a_dense_one_but_for_the_data(
    model_type: str, max_shard: int, tmp_path: Path
) -> None:
    sizes = [
        make_checkpoint(
            small_config(model_type),
            tmp_path / name,
            dtype=torch.float16,
            sparse=name == "sparse",
            max_shard=max_shard,
        )
        for name in ("dense", "sparse")
    ]
    assert sizes[0] == sizes[1]
    dense, sparse = (sorted((tmp_path / name).iterdir()) for name in ("dense", "sparse"))
    assert [path.name for path in dense] == [path.name for path in sparse]
    assert len(dense) == 2 if max_shard == 10**9 else len(dense) > 4
    for one, other in zip(dense, sparse, strict=True):
        assert one.stat().st_size == other.stat().st_size
        assert head(one) == head(other), one.name
    first, second = (open_checkpoint(tmp_path / name) for name in ("dense", "sparse"))
    assert first.layouts == second.layouts
    assert first.weights.fingerprint != second.weights.fingerprint
    for spec in (spec for layout in second.layouts for spec in layout.parameters):
        value = torch.ones(spec.numel, dtype=spec.dtype)
        second.weights.read_into(spec.name, value)
        assert not value.any(), "a hole reads as zeros"


@pytest.mark.long_profile
def test_opt_175b_is_sparse(tmp_path: Path) -> None:
    assert "349.21 GB of float16" in run_tool(main, "opt-175b", tmp_path / "opt", "--sparse").out
    stats = [path.stat() for path in (tmp_path / "opt").iterdir()]
    assert sum(stat.st_size for stat in stats) > 349e9
    assert max(stat.st_size for stat in stats) < 6e9
    assert sum(stat.st_blocks * 512 for stat in stats) < 2e6
    model = open_checkpoint(tmp_path / "opt")
    assert len(model.layouts) == 98
    assert sum(spec.nbytes for layout in model.layouts for spec in layout.parameters) > 349e9


def test_a_sparse_gguf_file_opens_and_takes_no_disk(tmp_path: Path) -> None:
    config = small_config(
        "llama",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    written = make_sparse_gguf(config, tmp_path / "sparse", "Q4_K")
    stat = (tmp_path / "sparse" / "model.gguf").stat()
    assert stat.st_blocks * 512 < written
    model = open_checkpoint(tmp_path / "sparse" / "model.gguf")
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    shapes = {
        spec.name: spec.shape
        for layout in segment_layouts(build_skeleton(config, torch.float32), ARCHITECTURES["llama"])
        for spec in layout.parameters
    }
    assert {spec.name: spec.shape for spec in specs} == shapes
    assert {spec.encoding.name for spec in specs if isinstance(spec.encoding, GGUFRows)} == {"Q4_K"}
    with Engine(model) as engine:
        assert engine.evaluate([make_batch(config.vocab_size, [5])]).loss == pytest.approx(
            math.log(config.vocab_size)
        )


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3_moe", {}), ("gpt_oss", {"hidden_size": 64, "intermediate_size": 32})],
)
def test_a_sparse_mixture_has_coded_experts_and_routes_tokens(
    family: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    config: Any = small_mixture(family)
    for name, value in sizes.items():
        setattr(config, name, value)
    layers = config.num_hidden_layers
    make_sparse_coded(config, tmp_path / "sparse", dtype=torch.bfloat16)
    model = open_checkpoint(tmp_path / "sparse")
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    assert len(model.layouts) == layers + 2
    assert sum(isinstance(spec.encoding, MatrixStack | MXFP4Stack) for spec in specs) == 2 * layers
    with Engine(model) as engine:
        assert math.isfinite(engine.evaluate([make_batch(config.vocab_size, [5])]).loss)


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_benchmarks_tell_options(name: str) -> None:
    assert f"python tools/bench.py {name}" in run_tool(bench.main, name, "--help").out
    unknown = run_tool(bench.main, f"no-{name}")
    assert (unknown.status, "\ncompare\n" in unknown.err) == (2, True)


@pytest.mark.long_profile
@pytest.mark.parametrize(("encoding", "tiny", "large"), [("int8", 1.15, 6.52), ("nf4", 0.70, 3.50)])
def test_encoded_checkpoints_have_p_rges_sizes(
    encoding: str, tiny: float, large: float, tmp_path: Path
) -> None:
    for name, paper in (("tinyllama-1.1b", tiny), ("llama2-7b", large)):
        nbytes = make_sparse_coded(
            geometries()[name], tmp_path / name, dtype=torch.bfloat16, encoding=encoding
        )
        assert nbytes / 2**30 == pytest.approx(paper, rel=0.03)
        read = [
            spec.nbytes
            for layout in open_checkpoint(tmp_path / name).layouts
            for spec in layout.parameters
        ]
        assert sum(read) == pytest.approx(nbytes, rel=0.01), "what is read is what was written"


def test_conversations_are_right_and_those_held_out_are_others(tmp_path: Path) -> None:
    for name in ("first", "again"):
        run_tool(make_chats.main, tmp_path / name, "--rows", 300, "--held-out", 60)
    files = [(tmp_path / "first" / name).read_text() for name in ("train.jsonl", "held-out.jsonl")]
    assert files == [
        (tmp_path / "again" / name).read_text() for name in ("train.jsonl", "held-out.jsonl")
    ]
    train, held_out = (text.splitlines() for text in files)
    assert (len(train), len(held_out), set(train) & set(held_out)) == (300, 60, set())
    for line in train:
        answer = json.loads(line)["messages"][1]["content"]
        working, result = re.fullmatch(r"[^0-9]*(.*)\n#### ([0-9]+)", answer, re.DOTALL).groups()  # type: ignore[union-attr]
        first, sign, second = re.search(r"([0-9]+) ([-+*]) ([0-9]+)", working).groups()  # type: ignore[union-attr]
        assert {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](
            int(first), int(second)
        ) == int(result)


@pytest.mark.long_profile
def test_runs_are_held_to_plans(tmp_path: Path) -> None:
    make_checkpoint(small_config("llama"), tmp_path / "base", dtype=torch.float32)
    save_tokenizer(tmp_path / "base", 40)
    found = measured("train", tmp_path / "base", "--tokens", 6, "--steps", 3)["default"]
    assert len(found["steps"]) == 3
    assert found["planned_bytes"] > 0
    assert found["seconds"]["median"] > 0


def test_small_updates_are_lost_in_place_alone() -> None:
    found = measured(
        "accumulation", "--sizes", "1e-5", "--steps", 7, 120, "--side", 64, "--rank", 2
    )
    for look in (found[f"size 1e-05, {steps} steps"] for steps in (7, 120)):
        assert look["in the weights"] is False
        float32, in_place, virtual = (
            look[name] for name in ("float32", "bfloat16 in place", "virtual float32")
        )
        assert virtual["error"] < 1e-6 < float32["error"] < 1e-3 < 0.5 < in_place["error"]
        assert in_place["moved"] < 0.6 < virtual["moved"]


@pytest.mark.few(2)
@pytest.mark.parametrize("more", ["", "--buckets 2", "--buckets 2 --journal-alone"])
def test_a_resumed_run_is_timed_against_one_without_a_journal(
    more: str, base: Path, tmp_path: Path
) -> None:
    given = (
        "--updates",
        7,
        "--period",
        3,
        "--tokens",
        6,
        "--steps",
        1,
        "--output",
        tmp_path / "resume.json",
    )
    run_tool(bench.main, "resume", base, *given, *more.split())
    found = json.loads((tmp_path / "resume.json").read_text())
    assert found["columns of past periods"] == 4
    assert found["matrices that are formed"] == found["matrices"] > 0
    assert found["first to first"]["median"] > 0
    assert found["kept_bytes"] > 0


@pytest.mark.parametrize(
    ("family", "form", "expected"),
    [
        ("llama", "awq", "="),
        ("gpt_oss", "mxfp4", "="),
        ("llama", "mxfp4", ""),
        ("granitemoe", "awq", "equal, with experts"),
    ],
)
def test_a_cell_says_what_holds(family: str, form: str, expected: str, tmp_path: Path) -> None:
    assert formats.outcome(family, form, tmp_path).startswith(expected)


def test_a_model_that_reads_images_is_compared_as_the_class_of_its_checkpoint() -> None:
    assert families.try_family("mllama", ["auto"])["float32"]["outcome"] == "equal"


def test_steps_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        families, "trained_by_peft", lambda *arguments, steps: ([0.0] * formats.STEPS, {})
    )
    assert formats.outcome("llama", "bfloat16", tmp_path) == "different"


def compared(model: object, sides: list[str], *more: str) -> dict[str, Any]:
    """The rows of the sides."""
    shapes = measured("compare", model, "--tokens", 6, "--steps", 1, "--sides", *sides, *more)
    rows: dict[str, Any] = next(rows for shape, rows in shapes.items() if " x " in shape)
    return rows


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (
            "--noise mezo",
            [
                "--noise mezo --loss-chunk none --whole",
                "--noise mezo --buckets 1 --every 1 --serial",
            ],
        ),
        ("--rank 2", ["--rank 2 --buckets 2 --rate 100MB", "--rank 2 --bus 1"]),
        (
            "--lora adamw",
            [
                "--lora adamw --recompute",
                "--lora adamw --whole",
                "--lora adamw --whole --checkpointing",
            ],
        ),
        ("--full adamw", ["--full adamw --whole", "--full adamw --update-seconds 1e-3"]),
    ],
)
def test_sides_with_the_same_arithmetic_have_the_same_losses(
    first: str, others: list[str], base: Path
) -> None:
    rows = compared(base, [first, *others])
    assert list(rows) == [first, *others]
    assert all(
        row["losses of the first"] and row["times faster"]["median"] > 0 for row in rows.values()
    )
    assert (
        rows[first]["share of forwards"]["median"] < 1 <= rows[first]["to the slowest lane"]["min"]
    )


@pytest.mark.parametrize("queries", [1, 4])
def test_sweeps_have_every_evaluation_once(queries: int) -> None:
    ways = sweeps_of(queries)
    sizes = {name: {len(places) for places in way} for name, way in ways.items()}
    assert sizes == {"in-turn": {1}, "inner": {2}, "outer": {queries}, "both": {2 * queries}}
    for way in ways.values():
        assert sorted(place for places in way for place in places) == list(range(2 * queries))


@pytest.mark.long_profile
def test_p_rges_variants_have_the_same_losses_and_their_shares_of_memory(tmp_path: Path) -> None:
    make_checkpoint(
        small_config("llama", vocab_size=1000), tmp_path / "base", dtype=torch.float32, sparse=False
    )
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
    # bytes of a forward's; cross_entropy, one operation in inference mode, makes as many again
    logits = 2 * 6 * 1000 * 4
    assert 2 * logits <= rows[sides[0]]["operations_bytes"] < rows[sides[1]]["operations_bytes"]


def test_runs_that_share_their_base_have_the_losses_of_one_alone(base: Path) -> None:
    for first in ("--lora adamw", "--lora adamw --run 1"):
        rows = compared(base, [first, f"{first} --together 2", "--rank 2 --together 2"])
        assert rows[f"{first} --together 2"]["losses of the first"]
        assert rows["--rank 2 --together 2"]["losses apart"] > 0
    assert rows["--rank 2 --together 2"]["times faster than apart"]["median"] > 0


@pytest.mark.long_profile
def test_sides_in_processes_have_the_losses_of_one(base: Path) -> None:
    rows = compared(
        base, ["--queries 2", "--queries 2 --workers 2", "--queries 2 --freed returned"], "--apart"
    )
    assert all(row["losses of the first"] and row["peak_bytes"]["min"] > 0 for row in rows.values())


def test_sides_with_other_work_run(base: Path) -> None:
    mixed = (
        "--precision mixed --dtype bfloat16 --transfer-dtype bfloat16-back --bus 0.5 --replay "
        "device"
    )
    sides = [
        "",
        "--queries 2",
        "--batches 2 --micro-rows 1",
        "--whole --forward --queries 2",
        mixed,
    ]
    rows = compared(base, [*sides, "--full adamw --delayed", "--full lomo"], "--labelled", "2")
    assert list(rows) == ["default", *sides[1:], "--full adamw --delayed", "--full lomo"]
    assert rows[mixed]["lanes"]["upload_bytes"] > 0


def test_what_a_geometry_does_not_heed_is_refused_and_a_checkpoint_of_its_name_is_the_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in (
        "lora adamw",
        "precision mixed",
        "rate 1GB",
        "loss-chunk none",
        "transfer-dtype bfloat16",
    ):
        with pytest.raises(
            SystemExit, match=rf"^opt-125m: a geometry takes no --{option.split()[0]}; write"
        ):
            compared("opt-125m", [f"--{option}"])
    (tmp_path / "opt-125m").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    assert list(compared("opt-125m", ["--lora adamw"])) == ["--lora adamw"]


@pytest.mark.parametrize(
    "rank", ["", "--rank 2 "], ids=["in the weights", "beside the activations"]
)
def test_packed_rows_are_the_same_rows(tmp_path: Path, rank: str) -> None:
    options = small_run(tmp_path)
    rows = compared(
        options.model, [rank.strip(), f"{rank}--packed"], "--data", str(options.data), "--rows", "3"
    )
    assert rows[f"{rank}--packed"]["times faster"]["min"] > 0


def gpu_day_of(output: Path, *more: object) -> Ended:
    return run_tool(
        gpu_day.main, "--device", "cpu", "--tiny", "--in-process", "--output", output, *more
    )


def test_a_check_and_a_benchmark_run_on_small_models(tmp_path: Path) -> None:
    names = ["check: lora, nf4", "bench: mezo, opt-1.3b"]
    for name in names:
        assert gpu_day_of(tmp_path, "--only", name).status == 0
    check, bench = (json.loads((tmp_path / gpu_day.file_of(name)).read_text()) for name in names)
    assert check["equal"]
    assert bench["machine"]["torch"]
    assert "error" not in bench


@pytest.mark.long_profile
def test_every_check_holds_and_every_benchmark_runs_on_small_models(tmp_path: Path) -> None:
    assert gpu_day_of(tmp_path).status == 0
    results = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results.keys() == {gpu_day.file_of(name) for name in gpu_day.JOBS}
    assert all(result.get("equal", True) and "error" not in result for result in results.values())
    assert all(result["machine"]["torch"] for result in results.values())


def test_what_has_a_result_is_left_out_and_what_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed = MagicMock(return_value={"equal": True})
    jobs = {
        "check: one": gpu_day.Job(30, succeed),
        "check: two": gpu_day.Job(30, MagicMock(side_effect=ValueError("broken"))),
        "bench: three": gpu_day.Job(30, lambda place: {"seconds": {"ours": 2.0}}),
    }
    monkeypatch.setattr(gpu_day, "JOBS", jobs)
    assert gpu_day_of(tmp_path, "--only", "one").status == 0
    failed = gpu_day_of(tmp_path)
    assert failed.status == 1
    assert succeed.call_count == 1
    assert (
        "ValueError: broken"
        in json.loads((tmp_path / gpu_day.file_of("check: two")).read_text())["error"]
    )
    assert "FAILED" in failed.out
    assert "{'ours': 2.0}" in failed.out
    assert gpu_day_of(tmp_path).status == 0, "all have a result"
    assert gpu_day_of(tmp_path / "later", "--minutes", "0").status == 0
    assert not any((tmp_path / "later").iterdir())


def test_the_page_of_options_is_made_from_their_tree() -> None:
    assert options_page.PAGE.read_text() == options_page.page(), "python tools/options_page.py"
