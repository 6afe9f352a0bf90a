"""The GPU day's program: every job runs on small models on the CPU, loses nothing, and goes on where it ended."""

import json
from pathlib import Path

import gpu_day
import pytest


def run(output: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    arguments = ["gpu_day.py", "--device", "cpu", "--tiny", "--in-process", "--output", str(output), *more]
    monkeypatch.setattr("sys.argv", arguments)
    return gpu_day.main()


def test_every_check_holds_and_every_benchmark_runs_on_small_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("peft", "gguf"):
        pytest.importorskip(package)
    assert run(tmp_path, monkeypatch) == 0
    results = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results.keys() == {gpu_day.file_of(name) for name in gpu_day.JOBS}
    assert all(result.get("equal", True) and "error" not in result for result in results.values())
    assert all(result["machine"]["torch"] for result in results.values())


def test_what_has_a_result_is_left_out_and_what_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(place: gpu_day.Place) -> gpu_day.Result:
        raise ValueError("broken")

    passed: list[str] = []

    def succeed(place: gpu_day.Place) -> gpu_day.Result:
        passed.append("one")
        return {"equal": True}

    jobs = {
        "check: one": gpu_day.Job(30, succeed),
        "check: two": gpu_day.Job(30, fail),
        "bench: three": gpu_day.Job(30, lambda place: {"seconds": {"ours": 2.0}}),
    }
    monkeypatch.setattr(gpu_day, "JOBS", jobs)
    assert run(tmp_path, monkeypatch, "--only", "one") == 0
    assert run(tmp_path, monkeypatch) == 1
    assert passed == ["one"]
    assert "ValueError: broken" in json.loads((tmp_path / gpu_day.file_of("check: two")).read_text())["error"]
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert "{'ours': 2.0}" in said
    assert run(tmp_path, monkeypatch) == 0, "all have a result"
    assert run(tmp_path / "later", monkeypatch, "--minutes", "0") == 0
    assert not any((tmp_path / "later").iterdir())
