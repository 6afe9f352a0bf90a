"""The commands as several workers run them: the bits of one process, one speaker, a directory for each worker."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import ROWS, run_here
from crews import Crew, attempted, worked
from runs import small_run

from zo2adapters.trainers.metrics import LiveMetrics
from zo2adapters.trainers.options import Storage, TrackerName, TrainOptions
from zo2adapters.trainers.trainer import Trainer
from zo2adapters.trainers.tuning import Trial, tune
from zo2adapters.trainers.worker_options import device_kinds, require_same_steps, storage_of_one, worker_trace
from zo2core import Workers
from zo2core.errors import OptionError, WorkerError
from zo2core.planning.memory import free_memory, resident_memory


def told_by(crew: Crew, *arguments: object, succeeds: bool = True) -> str:
    """What the workers print, all of them together."""
    ended = crew.run(*arguments)
    assert all((own.status == 0) == succeeds for own in ended), ended
    return "".join(own.out + own.err for own in ended)


def asked(options: TrainOptions, **changes: Any) -> list[object]:
    """The command line of a small run."""
    rows = options.data
    given: dict[str, Any] = {"model": options.model, "data": rows, "evaluation": rows, "output": options.output}
    given |= {"steps": 4, "lr": 1e-3, "batch_size": 4, "evaluate_every": 2, **changes}
    return ["train", *(word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value))]


@pytest.mark.few(1)
@pytest.mark.parametrize("kept", [False, True], ids=["two", "one that comes later"])
def test_train_makes_the_model_of_one_process(tmp_path: Path, crew: Crew, *, kept: bool) -> None:
    options = small_run(tmp_path)
    alone, output = tmp_path / "alone", options.output
    assert run_here(*asked(options, output=alone)).status == 0
    if kept:  # the run was begun by one process
        assert run_here(*asked(options, steps=2)).status == 0
    said = told_by(crew, *asked(options))
    assert said.count("step 4: evaluation loss") == 1
    assert said.count("journal: ") == 1
    journals = [(path / "journal.jsonl").read_bytes() for path in (output, tmp_path / "run.worker-1")]
    assert journals[0] == journals[1]
    assert (output / "model" / "model.safetensors").read_bytes() == (alone / "model" / "model.safetensors").read_bytes()
    assert not (tmp_path / "run.worker-1" / "model").exists()
    assert said.count("Disk writes: ") == 1


@pytest.mark.long_profile
def test_workers_find_their_journals_again_and_the_longest_counts(tmp_path: Path, crew: Crew) -> None:
    options = small_run(tmp_path)
    told_by(crew, *asked(options, steps=2, trace=tmp_path / "first.json"))
    assert {path.name for path in tmp_path.glob("first*")} == {"first.json", "first.worker-1.json"}
    journal = (tmp_path / "run.worker-1" / "journal.jsonl").read_bytes()
    shutil.rmtree(options.output)  # the first one's disk is lost
    told_by(crew, *asked(options, steps=2))
    assert (options.output / "journal.jsonl").read_bytes() == journal
    assert (options.output / "model" / "model.safetensors").exists()
    assert {path.name for path in tmp_path.glob("run*")} == {"run", "run.worker-1"}


@pytest.mark.long_profile
def test_tune_and_evaluate_say_what_one_process_says(tmp_path: Path, crew: Crew) -> None:
    options = small_run(tmp_path)
    candidates = [{"prompt": row["prompt"], "candidates": [" on", " mat"], "answer": 1} for row in ROWS]
    (tmp_path / "candidates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in candidates))
    tuning = ["--model", options.model, "--data", options.data, "--forwards", 100, "--learning-rates", 1e-4, 1e-3, 1e-2]
    told_by(crew, "tune", *tuning, "--output", tmp_path / "together")
    assert run_here("tune", *tuning, "--output", tmp_path / "alone").status == 0
    results = [json.loads((tmp_path / name / "tune.json").read_text())["results"] for name in ("together", "alone")]
    assert results[0] == results[1]
    best = tmp_path / "together" / results[0][0]["run"]
    evaluating = ["--run-directory", best, "--data", tmp_path / "candidates.jsonl", "--batch-size", 2, "--no-base"]
    said = told_by(crew, "evaluate", *evaluating)
    [line] = [line for line in said.splitlines() if line.startswith("accuracy")]
    alone = run_here("evaluate", *evaluating).out.strip()
    assert re.sub(r"\d+ sweeps?", "", line) == re.sub(r"\d+ sweeps?", "", alone)
    assert said.count("accuracy") == 1


def test_every_worker_says_once_why_it_is_refused_and_leaves_nothing(tmp_path: Path, crew: Crew) -> None:
    options = small_run(tmp_path)
    said = told_by(crew, *asked(options, split="2x2"), succeeds=False)
    for speaker in ("zo2: ", "zo2, worker 1: "):
        assert f"{speaker}--split: found 2x2, 2 workers" in said
    assert {path.name for path in tmp_path.iterdir()} == {"base", "rows.jsonl"}


# --- what workers agree on before they begin


def test_the_kinds_of_all_devices_are_in_the_journal() -> None:
    kinds = worked(3, lambda workers: device_kinds(["cpu", "cuda:1", "cuda"][workers.rank], workers))
    assert kinds == ["cpu+cuda"] * 3
    assert device_kinds("cuda:1", None) == "cuda"


def test_another_number_of_steps_than_the_first_workers_is_refused() -> None:
    outcomes = attempted(3, lambda workers: require_same_steps([4, 4, 5][workers.rank], workers))
    assert outcomes[:2] == [None, None]
    assert isinstance(outcomes[2], OptionError)
    assert "found 5" in str(outcomes[2])
    assert "4" in str(outcomes[2])
    require_same_steps(7, None)


def test_a_worker_that_runs_alone_has_its_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    auto, given = Storage(memory="auto", device="cuda"), Storage(memory="2GiB")
    assert storage_of_one(auto, None) == auto
    for storage in worked(4, lambda workers: storage_of_one(auto, workers)):
        assert storage.device == "cuda:2"
        assert resident_memory() < int(storage.memory) < resident_memory() + 0.3 * free_memory()
    assert worked(2, lambda workers: storage_of_one(given, workers)) == [given, given]
    [single] = worked(1, lambda workers: storage_of_one(auto, workers))
    assert single.memory == "auto"


def test_a_preference_is_learned_together(tmp_path: Path) -> None:
    options = small_run(tmp_path)
    rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " the"} for row in ROWS]
    options.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(workers: Workers | None) -> bytes:
        output = tmp_path / ("alone" if workers is None else str(workers.rank))
        with Trainer(replace(options, output=output), quiet=True, workers=workers) as trainer:
            trainer.train()
        return b"".join(line for line in (output / "journal.jsonl").read_bytes().splitlines() if b'"step"' in line)

    together = worked(2, run, split="directions")
    assert together[0] == together[1]
    assert re.sub(rb',"crc32":"\w+"', b"", together[0]) == re.sub(rb',"crc32":"\w+"', b"", run(None))


def test_the_first_worker_alone_reports_to_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(small_run(tmp_path), report_to="tensorboard")
    opened: list[tuple[str, Path]] = []

    class Noted(LiveMetrics):
        def __init__(self, tracker: TrackerName, directory: Path, *arguments: Any) -> None:
            opened.append((tracker, directory))
            super().__init__("none", directory, *arguments)

    monkeypatch.setattr("zo2adapters.trainers.trainer.LiveMetrics", Noted)

    def run(workers: Workers) -> None:
        own = replace(options, output=tmp_path / str(workers.rank))
        with Trainer(own, quiet=True, workers=workers) as trainer:
            trainer.train()

    worked(2, run)
    assert sorted(opened) == [("none", tmp_path / "1"), ("tensorboard", tmp_path / "0")]


@pytest.mark.long_profile
def test_a_trial_stays_on_the_disk_of_one_worker(tmp_path: Path) -> None:
    options = small_run(tmp_path)
    learning_rates = [1e-2, 1e-3, 1e-4, 1e-5]  # so that the best ones are none of one worker alone

    def run(workers: Workers) -> Trial:
        own = replace(options, output=tmp_path / str(workers.rank))
        return tune(own, forwards=400, learning_rates=learning_rates, workers=workers)

    best = worked(2, run)
    assert best[0].lr == best[1].lr
    assert best[0].loss == best[1].loss
    disks = [{path.name for path in (tmp_path / str(rank)).iterdir() if path.is_dir()} for rank in range(2)]
    assert not disks[0] & disks[1]
    assert len(disks[0] | disks[1]) == len(learning_rates)


def test_workers_that_try_other_trials_are_refused(tmp_path: Path) -> None:
    options = small_run(tmp_path)
    learning_rates = [[1e-2, 1e-3, 1e-4], [1e-2, 1e-4, 1e-3]]

    def run(workers: Workers) -> Trial:
        own = replace(options, output=tmp_path / str(workers.rank))
        return tune(own, forwards=400, learning_rates=learning_rates[workers.rank], workers=workers)

    for error in attempted(2, run):
        assert isinstance(error, WorkerError)
        assert "other trials" in str(error)
    assert not (tmp_path / "0").exists()


def test_every_worker_traces_into_a_file_of_its_own() -> None:
    trace = Path("runs/trace.json")
    names = worked(3, lambda workers: worker_trace(trace, workers))
    assert names == [trace, Path("runs/trace.worker-1.json"), Path("runs/trace.worker-2.json")]
    assert worker_trace(trace, None) == trace
    assert worked(2, lambda workers: worker_trace(None, workers)) == [None, None]
