"""First-order runs by several workers on the command line: the bits of one process, whatever kills a worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_lines import SECONDS, Ended, environment, make_place, run_here, torchrun_command, write_rows
from crews import Crew
from safetensors.torch import load_file
from strikes import JOURNAL, strike

from zo2core import Journal

peft: Any = pytest.importorskip("peft")

SIZE = 2
STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, rows, and the config of an adapter."""
    folder = make_place(tmp_path_factory.mktemp("workers"))
    peft.LoraConfig(r=3, lora_alpha=16, target_modules=["q_proj", "up_proj"]).save_pretrained(folder / "lora")
    return folder


def train(place: Path, output: Path, *more: object, steps: int = STEPS) -> list[object]:
    """The command of a run; each of two workers has two rows of a batch."""
    named = ["train", "--method", "adamw", "--model", place / "base", "--adapter", place / "lora" / "adapter_config.json"]
    named += ["--data", place / "rows.jsonl", "--output", output, "--steps", steps, "--lr", 1e-2, "--batch-size", 4]
    return [*named, "--clip", "norm=0.5", *more]


def evaluated(place: Path) -> list[object]:
    return ["--evaluation", place / "rows.jsonl", "--evaluate-every", 2, "--keep-best", "--snapshot-every", 2]


def together(crew: Crew, *arguments: object) -> str:
    """What the workers print, all of them together."""
    ended = crew.run(*arguments)
    assert all(worker.status == 0 for worker in ended), ended
    return "".join(worker.out + worker.err for worker in ended)


def refused(ended: Sequence[Ended]) -> list[str]:
    """The line of each worker, which says who it is."""
    assert [worker.status for worker in ended] == [2] * SIZE, ended
    return [worker.line for worker in ended]


def alone(place: Path, output: Path, *more: object, steps: int = STEPS) -> Path:
    """The run of one process that accumulates micro-batches of as many rows as a worker has."""
    ended = run_here(*train(place, output, "--micro-batch-size", 2, *more, steps=steps))
    assert ended.status == 0, ended.err
    return output


def directories(output: Path) -> list[Path]:
    return [output, output.with_name(f"{output.name}.worker-1")]


def assert_same_run(output: Path, whole: Path) -> None:
    """Both workers have the steps and snapshots of one process, and the first one has its adapter."""
    journals = [(path / "journal.jsonl").read_bytes() for path in directories(output)]
    assert journals[0] == journals[1]
    ours, theirs = Journal(output / "journal.jsonl"), Journal(whole / "journal.jsonl")
    assert list(ours.commits) == list(theirs.commits)
    assert ours.evaluations.keys() == theirs.evaluations.keys()
    for step, results in ours.evaluations.items():  # one process evaluates in micro-batches, too
        assert results == pytest.approx(theirs.evaluations[step], rel=1e-6)
    [adapter, expected] = [load_file(path / "model" / "adapter_model.safetensors") for path in (output, whole)]
    assert adapter.keys() == expected.keys()
    assert all(adapter[name].equal(value) for name, value in expected.items())
    assert not (directories(output)[1] / "model").exists()
    snapshots = [{path.name: path.read_bytes() for path in folder.glob("snapshot*")} for folder in directories(output)]
    assert snapshots[0] == snapshots[1] != {}


def test_two_workers_make_the_run_of_one_process(place: Path, crew: Crew, tmp_path: Path) -> None:
    output = tmp_path / "run"
    said = together(crew, *train(place, output, *evaluated(place)))
    assert said.count(f"step {STEPS}: evaluation loss") == said.count("journal: ") == said.count("precision: ") == 1
    assert_same_run(output, alone(place, tmp_path / "whole", *evaluated(place)))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.worker-1", "whole"}


@pytest.mark.long_profile
def test_a_run_is_lengthened_by_workers_one_of_which_lost_its_disk(place: Path, crew: Crew, tmp_path: Path) -> None:
    output = tmp_path / "run"
    together(crew, *train(place, output, "--snapshot-every", 2))
    for path in directories(output)[1].iterdir():
        path.unlink()
    directories(output)[1].rmdir()
    together(crew, *train(place, output, "--snapshot-every", 2, steps=9))
    assert_same_run(output, alone(place, tmp_path / "whole", steps=9))


@pytest.mark.long_profile
def test_preferences_are_learned_together(place: Path, crew: Crew, tmp_path: Path) -> None:
    prompts = ["the cat", "the dog", "the cat is", "the dog is"]
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": prompt, "chosen": " ran", "rejected": " sat"} for prompt in prompts])
    chosen = ["--data", tmp_path / "pairs.jsonl"]
    output = tmp_path / "run"
    together(crew, *train(place, output, *chosen))
    whole = tmp_path / "whole"
    ended = run_here(*train(place, whole, "--micro-batch-size", 4, *chosen))  # two prompts, of two rows each
    assert ended.status == 0, ended.err
    assert_same_run(output, whole)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--split", "directions"), "--split: found directions, 2 workers for one gradient"),
        (("--pack",), "batch: found 1 rows that can be separated, and 2 workers"),
    ],
)
def test_what_workers_cannot_split_is_refused_by_name(
    more: Sequence[object], told: str, place: Path, crew: Crew, tmp_path: Path
) -> None:
    for line in refused(crew.run(*train(place, tmp_path / "run", *more))):
        assert told in line
    assert not list(tmp_path.iterdir())


def launched(arguments: Sequence[object], output: Path) -> subprocess.Popen[bytes]:
    """``torchrun`` with two workers that it starts again after a failure."""
    command = torchrun_command(SIZE, "--max-restarts", 9, "-m", "zo2adapters", *arguments)
    with output.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment())


def worker_of(launcher: int, rank: int) -> psutil.Process | None:
    """The process of a rank, if the launcher has started it."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(launcher).children():
            if process.environ().get("RANK") == str(rank):
                return process
    return None


def commits(path: Path) -> int:
    return path.read_bytes().count(b'"commit"') if path.exists() else 0


def assert_not_torn(output: Path, steps: int) -> None:
    """The metrics have each step once."""
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == list(range(steps))


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_workers_one_of_which_was_killed_go_on_with_the_same_bits(
    rank: int, place: Path, crew: Crew, tmp_path: Path
) -> None:
    output, command = tmp_path / "run", train(place, tmp_path / "run", "--snapshot-every", 2)
    ended = crew.killed(rank, strike(JOURNAL, "Journal", "append", 5, "after"), *command)
    assert ended[rank].status == -signal.SIGKILL
    assert ended[1 - rank].status == 128 + signal.SIGTERM
    assert commits(directories(output)[rank] / "journal.jsonl") == 5
    together(crew, *command)
    assert_same_run(output, alone(place, tmp_path / "whole", "--snapshot-every", 2))
    assert_not_torn(output, STEPS)


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_killed_workers_again_and_they_end_with_the_same_bits(
    rank: int, place: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("processes that import everything, three times each")
    output, steps = tmp_path / "run", 60
    process = launched(train(place, output, "--snapshot-every", 7, steps=steps), tmp_path / "output")
    journal = directories(output)[rank] / "journal.jsonl"
    kills = 0
    try:
        end = time.monotonic() + SECONDS
        while process.poll() is None and time.monotonic() < end:
            worker = worker_of(process.pid, rank)
            if kills < 1 and worker is not None and 10 < commits(journal) < steps - 10:
                os.kill(worker.pid, signal.SIGKILL)
                kills += 1
            time.sleep(0.005)
        assert process.poll() == 0, (tmp_path / "output").read_text()[-3000:]
    finally:
        process.kill()
    assert kills == 1
    assert_same_run(output, alone(place, tmp_path / "whole", "--snapshot-every", 7, steps=steps))
    assert_not_torn(output, steps)
