"""The programs that compare accumulations and time a resumed run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench
import pytest
import torch
from make_checkpoint import make_checkpoint
from models import small_config


def test_small_updates_are_lost_in_place_and_kept_beside_the_base(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
