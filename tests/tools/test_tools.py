"""The tools: sparse checkpoints, command lines of benchmarks, accumulations, and the table of families and formats."""

import json
import math
import re
import struct
import sys
from pathlib import Path
from typing import Any

import bench
import families
import formats
import make_chats
import pytest
import torch
from families import small_config as small_mixture
from make_checkpoint import geometries, main, make_checkpoint, make_sparse_coded, make_sparse_gguf, save_tokenizer
from models import CONFIGS, make_batch, small_config
from synthetic import SlowReader

from zo2adapters import open_checkpoint
from zo2adapters.models.architecture import ARCHITECTURES, segment_layouts
from zo2adapters.models.skeleton import build_skeleton
from zo2core import Engine
from zo2core.encodings import GGUFRows, MatrixStack, MXFP4Stack


def head(path: Path) -> bytes:
    """A shard's header with its length; all of any other file."""
    raw = path.read_bytes()
    return raw[: 8 + struct.unpack("<Q", raw[:8])[0]] if path.suffix == ".safetensors" else raw


@pytest.mark.parametrize("max_shard", [10**9, 2000])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_sparse_checkpoint_is_a_dense_one_but_for_the_data(model_type: str, max_shard: int, tmp_path: Path) -> None:
    sizes = [
        make_checkpoint(
            small_config(model_type), tmp_path / name, dtype=torch.float16, sparse=name == "sparse", max_shard=max_shard
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


def test_opt_175b_is_sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", "opt-175b", str(tmp_path / "opt"), "--sparse"])
    main()
    assert "349.21 GB of float16" in capsys.readouterr().out
    stats = [path.stat() for path in (tmp_path / "opt").iterdir()]
    assert sum(stat.st_size for stat in stats) > 349e9
    assert max(stat.st_size for stat in stats) < 6e9
    assert sum(stat.st_blocks * 512 for stat in stats) < 2e6
    model = open_checkpoint(tmp_path / "opt")
    assert len(model.layouts) == 98
    assert sum(spec.nbytes for layout in model.layouts for spec in layout.parameters) > 349e9


def test_a_sparse_gguf_file_opens_and_takes_no_disk(tmp_path: Path) -> None:
    config = small_config("llama", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
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
        assert engine.evaluate([make_batch(config.vocab_size, [5])]).loss == pytest.approx(math.log(config.vocab_size))


@pytest.mark.parametrize(("family", "sizes"), [("qwen3_moe", {}), ("gpt_oss", {"hidden_size": 64, "intermediate_size": 32})])
def test_a_sparse_mixture_has_coded_experts_and_routes_tokens(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
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
def test_benchmarks_tell_options(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        bench.main()
    assert f"python tools/bench.py {name}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench.py", f"no-{name}"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "\ncompare\n" in capsys.readouterr().err


def test_a_slow_reader_reads_the_same(tmp_path: Path) -> None:
    make_checkpoint(small_config("opt"), tmp_path / "base", dtype=torch.float32, sparse=False)
    model = open_checkpoint(tmp_path / "base")
    slow = SlowReader(model.weights, 1e9)
    spec = model.layouts[1].parameters[0]
    ours, theirs = (torch.zeros(spec.numel) for _ in range(2))
    slow.read_into(spec.name, ours)
    model.weights.read_into(spec.name, theirs)
    assert torch.equal(ours, theirs)


@pytest.mark.long_profile
@pytest.mark.parametrize(("encoding", "tiny", "large"), [("int8", 1.15, 6.52), ("nf4", 0.70, 3.50)])
def test_encoded_checkpoints_have_p_rges_sizes(encoding: str, tiny: float, large: float, tmp_path: Path) -> None:
    for name, paper in (("tinyllama-1.1b", tiny), ("llama2-7b", large)):
        nbytes = make_sparse_coded(geometries()[name], tmp_path / name, dtype=torch.bfloat16, encoding=encoding)
        assert nbytes / 2**30 == pytest.approx(paper, rel=0.03)
        read = [spec.nbytes for layout in open_checkpoint(tmp_path / name).layouts for spec in layout.parameters]
        assert sum(read) == pytest.approx(nbytes, rel=0.01), "what is read is what was written"


def test_conversations_are_right_and_those_held_out_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "again"):
        monkeypatch.setattr(sys, "argv", ["make_chats.py", str(tmp_path / name), "--rows", "300", "--held-out", "60"])
        make_chats.main()
    files = [(tmp_path / "first" / name).read_text() for name in ("train.jsonl", "held-out.jsonl")]
    assert files == [(tmp_path / "again" / name).read_text() for name in ("train.jsonl", "held-out.jsonl")]
    train, held_out = (text.splitlines() for text in files)
    assert (len(train), len(held_out), set(train) & set(held_out)) == (300, 60, set())
    for line in train:
        answer = json.loads(line)["messages"][1]["content"]
        working, result = re.fullmatch(r"[^0-9]*(.*)\n#### ([0-9]+)", answer, re.DOTALL).groups()  # type: ignore[union-attr]
        first, sign, second = re.search(r"([0-9]+) ([-+*]) ([0-9]+)", working).groups()  # type: ignore[union-attr]
        assert {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(first), int(second)) == int(result)


@pytest.mark.long_profile
def test_runs_are_held_to_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(small_config("llama"), tmp_path / "base", dtype=torch.float32)
    save_tokenizer(tmp_path / "base", 40)
    monkeypatch.setattr(sys, "argv", ["bench.py", "train", str(tmp_path / "base"), "--tokens", "6", "--steps", "3"])
    bench.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["default"]
    assert len(found["steps"]) == 3
    assert found["planned_bytes"] > 0
    assert found["seconds"]["median"] > 0


def test_small_updates_are_lost_in_place_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--sizes", "1e-5", "--steps", "7", "120", "--side", "64", "--rank", "2"]
    monkeypatch.setattr(sys, "argv", ["bench.py", "accumulation", *arguments])
    bench.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for look in (found[f"size 1e-05, {steps} steps"] for steps in (7, 120)):
        assert look["in the weights"] is False
        float32, in_place, virtual = (look[name] for name in ("float32", "bfloat16 in place", "virtual float32"))
        assert virtual["error"] < 1e-6 < float32["error"] < 1e-3 < 0.5 < in_place["error"]
        assert in_place["moved"] < 0.6 < virtual["moved"]


@pytest.mark.few(2)
@pytest.mark.parametrize(("buckets", "more"), [(None, []), (2, []), (2, ["--journal-alone"])])
def test_a_resumed_run_is_timed_against_one_without_a_journal(
    buckets: int | None, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(small_config("llama"), tmp_path / "base", dtype=torch.float32, sparse=False)
    arguments = [str(tmp_path / "base"), "--updates", "7", "--period", "3", "--tokens", "6", "--steps", "1"]
    arguments += more if buckets is None else ["--buckets", str(buckets), *more]
    output = tmp_path / "resume.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", "resume", *arguments, "--output", str(output)])
    bench.main()
    measured = json.loads(output.read_text())
    assert measured["columns of past periods"] == 4
    assert measured["matrices that are formed"] == measured["matrices"] > 0
    assert measured["first to first"]["median"] > 0
    assert measured["kept_bytes"] > 0


@pytest.mark.parametrize(
    ("family", "form", "expected"),
    [("llama", "awq", "="), ("gpt_oss", "mxfp4", "="), ("llama", "mxfp4", ""), ("granitemoe", "awq", "equal, with experts")],
)
def test_a_cell_says_what_holds(family: str, form: str, expected: str, tmp_path: Path) -> None:
    assert formats.outcome(family, form, tmp_path).startswith(expected)


def test_steps_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "trained_by_peft", lambda *arguments, steps: ([0.0] * formats.STEPS, {}))
    assert formats.outcome("llama", "bfloat16", tmp_path) == "different"
