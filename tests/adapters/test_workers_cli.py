"""The commands as several workers run them: the bits of one process, one speaker, a directory for
each worker.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from command_lines import (
    ROWS,
    SECONDS,
    Ended,
    environment,
    make_place,
    refusal,
    run_here,
    torchrun_command,
    write_rows,
)
from crews import Crew, attempted, worked
from runs import small_run
from safetensors.torch import load_file, save_file
from strikes import JOURNAL, arrange, beforehand, die_at_write, strike

from zo2adapters.commands.options import parse_command
from zo2adapters.commands.train import Train
from zo2adapters.trainers.metrics import LiveMetrics
from zo2adapters.trainers.options import Storage, TrackerName, TrainOptions
from zo2adapters.trainers.process import (
    WorkerOptions,
    device_kinds,
    require_same_command,
    require_same_steps,
    storage_of_one,
    worker_trace,
)
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import QUIET, open_run
from zo2adapters.trainers.tuning import Trial, tune
from zo2core import Journal, Workers
from zo2core.errors import OptionError, WorkerError
from zo2core.planning.memory import free_memory, resident_memory


def told_by(crew: Crew, *arguments: object, succeeds: bool = True) -> str:
    ended = crew.run(*arguments)
    assert all((own.status == 0) == succeeds for own in ended), ended
    return "".join(own.out + own.err for own in ended)


def asked(options: TrainOptions, **changes: Any) -> list[object]:
    rows = options.data
    given: dict[str, Any] = {
        "model": options.model,
        "data": rows,
        "evaluation": rows,
        "output": options.output,
    }
    given |= {"steps": 4, "lr": 1e-3, "batch_size": 4, "evaluate_every": 2, **changes}
    return [
        "train",
        "--method",
        "zeroth-order",
        *(word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)),
    ]


@pytest.mark.long_profile
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
    journals = [
        (path / "journal.jsonl").read_bytes() for path in (output, tmp_path / "run.worker-1")
    ]
    assert journals[0] == journals[1]
    assert (output / "model" / "model.safetensors").read_bytes() == (
        alone / "model" / "model.safetensors"
    ).read_bytes()
    assert not (tmp_path / "run.worker-1" / "model").exists()
    assert said.count("Disk writes: ") == 1


@pytest.mark.long_profile
def test_workers_find_their_journals_again_and_the_longest_counts(
    tmp_path: Path, crew: Crew
) -> None:
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
    candidates = [
        {"prompt": row["prompt"], "candidates": [" on", " mat"], "answer": 1} for row in ROWS
    ]
    (tmp_path / "candidates.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in candidates)
    )
    tuning = [
        "--model",
        options.model,
        "--data",
        options.data,
        "--forwards",
        100,
        "--learning-rates",
        1e-4,
        1e-3,
        1e-2,
    ]
    told_by(crew, "tune", "--method", "zeroth-order", *tuning, "--output", tmp_path / "together")
    assert (
        run_here("tune", "--method", "zeroth-order", *tuning, "--output", tmp_path / "alone").status
        == 0
    )
    results = [
        json.loads((tmp_path / name / "tune.json").read_text())["results"]
        for name in ("together", "alone")
    ]
    assert results[0] == results[1]
    best = tmp_path / "together" / results[0][0]["run"]
    evaluating = [
        "--run-directory",
        best,
        "--data",
        tmp_path / "candidates.jsonl",
        "--batch-size",
        2,
        "--no-base",
    ]
    said = told_by(crew, "evaluate", *evaluating)
    [line] = [line for line in said.splitlines() if line.startswith("accuracy")]
    alone = run_here("evaluate", *evaluating).out.strip()
    assert re.sub(r"\d+ sweeps?", "", line) == re.sub(r"\d+ sweeps?", "", alone)
    assert said.count("accuracy") == 1


def test_every_worker_says_once_why_it_is_refused_and_leaves_nothing(
    tmp_path: Path, crew: Crew
) -> None:
    options = small_run(tmp_path)
    said = told_by(crew, *asked(options, split="2x2"), succeeds=False)
    for speaker in ("zo2: ", "zo2, worker 1: "):
        assert f"{speaker}--split: found 2x2, 2 workers" in said
    assert {path.name for path in tmp_path.iterdir()} == {"base", "rows.jsonl"}


OTHER_COMMANDS = [  # of worker 1, and what all workers say of it
    (("--lr", "2e-3"), "found --lr 0.002; expected --lr 0.001, as worker 0"),
    (("--steps", "4"), "found --steps 4; expected --steps 6, as worker 0"),
    (("--samples", "1"), "found --samples 1; expected --samples 0, as worker 0"),
    (("--split", "rows"), "found --split rows; expected --split auto, as worker 0"),
    (("--evaluation", "f"), "found --evaluation given; expected --evaluation left out, as worker"),
    (("--clip-grad", "1"), "found --clip-grad 1.0; expected --clip-grad left"),
]


@pytest.mark.parametrize(("more", "told"), OTHER_COMMANDS, ids=str)
def test_an_option_of_another_command_is_told_to_all_workers(
    more: tuple[str, str], told: str
) -> None:
    common = ["--model", "m", "--data", "d", "--output", "o", "--lr", "1e-3", "--steps", "6"]
    commands = [parse_command("train", Train, [*common, *given]) for given in ((), more)]

    def compare(workers: Workers) -> None:
        require_same_command("train", commands[workers.rank], workers)

    for error in attempted(2, compare):
        assert isinstance(error, WorkerError)
        assert f"worker 1: {told}" in str(error)


def test_workers_may_have_files_and_memory_of_their_own_but_no_command() -> None:
    common = ["--lr", "1e-3", "--steps", "6"]
    own = [["--model", "m", "--data", "d", "--output", "o"]]
    own += [["--model", "/n", "--data", "/e", "--output", "p", "--memory", "2GiB"]]
    commands = [parse_command("train", Train, [*common, *given]) for given in own]

    def compare(workers: Workers) -> None:
        require_same_command("train", commands[workers.rank], workers)

    worked(2, compare)
    names = ["train", "evaluate"]
    outcomes = attempted(
        2, lambda workers: require_same_command(names[workers.rank], commands[0], workers)
    )
    for error in outcomes:
        assert isinstance(error, WorkerError)
        assert "worker 1: found zo2 evaluate; expected zo2 train, as worker 0 has it" in str(error)


def other_rows(options: TrainOptions) -> str:
    write_rows(options.data, ROWS[:-1])
    return rf"--data {options.data} of digest \w{{12}}"


def other_weights(options: TrainOptions) -> str:
    path = Path(options.model) / "model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    tensors[name].view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    return rf"--model {options.model} with weights of digest \w{{12}}"


def other_settings(options: TrainOptions) -> str:
    (Path(options.model) / "generation_config.json").write_text('{"eos_token_id": 3}')
    return rf"--model {options.model} with generation_config.json of digest \w{{12}}"


def other_settings_are_missing(options: TrainOptions) -> str:
    (Path(options.model) / "generation_config.json").unlink()
    return "none"


@pytest.mark.parametrize(
    "change", [other_rows, other_weights, other_settings, other_settings_are_missing]
)
def test_other_files_of_some_workers_are_told_to_all_with_both_values_and_ranks(
    change: Callable[[TrainOptions], str], tmp_path: Path
) -> None:
    own = [small_run(tmp_path / str(rank)) for rank in range(3)]
    _, found = (change(options) for options in own[:0:-1])

    def run(workers: Workers) -> None:
        open_run(RunStart(own[workers.rank], workers=workers), display=QUIET).close()

    for error in attempted(3, run):
        assert isinstance(error, WorkerError)
        told = rf"workers 1, 2: found {found}; expected --\w+ {tmp_path}/0/.* of digest \w{{12}}, "
        assert re.match(told + "as worker 0 has it", str(error)), error
    assert not any(options.output.exists() for options in own)


# what accelerate launch --cpu --num_processes sets of these: MASTER_ADDR above 1
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}
SEVERAL = {**LAUNCHED, "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"WORLD_SIZE": "1"}, None),
        (LAUNCHED, None),
        ({"SLURM_NTASKS": "2", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "host"}, None),
        ({**SEVERAL, "TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}, None),
        (SEVERAL, "accelerate launch: found one process where several were asked for"),
        ({"WORLD_SIZE": "3", "RANK": "1"}, "WORLD_SIZE: found 3 processes without the variables"),
    ],
    ids=["one", "one of accelerate", "others", "torchrun", "several of accelerate", "several"],
)
def test_a_process_that_was_meant_to_be_one_of_several_is_refused(
    environment: dict[str, str], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if named is None:
        WorkerOptions().require_workers()
    else:
        with pytest.raises(OptionError, match=f"^{named}.*torchrun .* -m zo2adapters"):
            WorkerOptions().require_workers()


def test_no_command_of_several_workers_runs_as_one_of_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = small_run(tmp_path)
    for name, value in SEVERAL.items():
        monkeypatch.setenv(name, value)
    files = ("--model", options.model, "--data", options.data)
    tuned = ("--output", tmp_path / "tuned", "--forwards", 100, "--learning-rates", 1e-3, 1e-2)
    for command in (asked(options), ["evaluate", *files], ["tune", *files, *tuned]):
        assert "accelerate launch: found one process where" in refusal(*command)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "rows.jsonl"}


@pytest.mark.long_profile
def test_workers_that_evaluate_other_rows_are_told_which(tmp_path: Path, crew: Crew) -> None:
    options = small_run(tmp_path)
    write_rows(tmp_path / "other.jsonl", ROWS[:-1])
    commands = [
        ["evaluate", "--model", options.model, "--data", data]
        for data in (options.data, tmp_path / "other.jsonl")
    ]
    for line in refused(crew.run_each(commands)):
        assert f"worker 1: found --data {tmp_path}/other.jsonl of digest " in line
        assert f"; expected --data {options.data} of digest " in line


def test_workers_with_different_commands_end_with_one_line_each(tmp_path: Path, crew: Crew) -> None:
    options = small_run(tmp_path)
    evaluating = ["evaluate", "--model", options.model, "--data", options.data]
    for line in refused(crew.run_each([asked(options), evaluating])):
        assert "worker 1: found zo2 evaluate; expected zo2 train, as worker 0 has it" in line
    assert not options.output.exists()


def test_workers_agree_on_kinds_of_devices_steps_and_files_of_traces() -> None:
    kinds = worked(
        3, lambda workers: device_kinds(["cpu", "cuda:1", "cuda"][workers.rank], workers)
    )
    assert kinds == ["cpu+cuda"] * 3
    assert device_kinds("cuda:1", None) == "cuda"
    outcomes = attempted(3, lambda workers: require_same_steps([4, 4, 5][workers.rank], workers))
    assert outcomes[:2] == [None, None]
    assert isinstance(outcomes[2], OptionError)
    assert "found 5" in str(outcomes[2])
    assert "4" in str(outcomes[2])
    require_same_steps(7, None)
    trace = Path("runs/trace.json")
    names = worked(3, lambda workers: worker_trace(trace, workers))
    assert names == [trace, Path("runs/trace.worker-1.json"), Path("runs/trace.worker-2.json")]
    assert worker_trace(trace, None) == trace
    assert worked(2, lambda workers: worker_trace(None, workers)) == [None, None]


def test_a_worker_that_runs_alone_has_its_part_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    rows = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " the"} for row in ROWS
    ]
    options.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(workers: Workers | None) -> bytes:
        output = tmp_path / ("alone" if workers is None else str(workers.rank))
        with open_run(
            RunStart(replace(options, output=output), workers=workers), display=QUIET
        ) as trainer:
            trainer.train()
        return b"".join(
            line
            for line in (output / "journal.jsonl").read_bytes().splitlines()
            if b'"step"' in line
        )

    together = worked(2, run, split="directions")
    assert together[0] == together[1]
    assert re.sub(rb',"crc32":"\w+"', b"", together[0]) == re.sub(
        rb',"crc32":"\w+"', b"", run(None)
    )


def test_the_first_worker_alone_reports_to_a_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(small_run(tmp_path), report_to="tensorboard")
    opened: list[tuple[str, Path]] = []

    class Noted(LiveMetrics):
        def __init__(self, tracker: TrackerName, folder: Path, *arguments: Any) -> None:
            opened.append((tracker, folder))
            super().__init__("none", folder, *arguments)

    monkeypatch.setitem(sys.modules, "tensorboard", MagicMock())
    monkeypatch.setattr("zo2adapters.trainers.trainer.LiveMetrics", Noted)

    def run(workers: Workers) -> None:
        own = replace(options, output=tmp_path / str(workers.rank))
        with open_run(RunStart(own, workers=workers), display=QUIET) as trainer:
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
    disks = [
        {path.name for path in (tmp_path / str(rank)).iterdir() if path.is_dir()}
        for rank in range(2)
    ]
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


peft: Any = pytest.importorskip("peft")

SIZE = 2
TAKEN = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("workers"))
    peft.LoraConfig(r=3, lora_alpha=16, target_modules=["q_proj", "up_proj"]).save_pretrained(
        folder / "lora"
    )
    return folder


def train(place: Path, output: Path, *more: object, steps: int = TAKEN) -> list[object]:
    """The command of a run; each of two workers has two rows of a batch."""
    named = [
        "train",
        "--method",
        "adamw",
        "--model",
        place / "base",
        "--adapter",
        place / "lora" / "adapter_config.json",
    ]
    named += [
        "--data",
        place / "rows.jsonl",
        "--output",
        output,
        "--steps",
        steps,
        "--lr",
        1e-2,
        "--batch-size",
        4,
    ]
    return [*named, "--max-grad-norm", "0.5", *more]


def evaluated(place: Path) -> list[object]:
    return [
        "--evaluation",
        place / "rows.jsonl",
        "--evaluate-every",
        2,
        "--keep-best",
        "--snapshot-every",
        2,
    ]


def refused(ended: Sequence[Ended]) -> list[str]:
    """The line of each worker, which says who it is."""
    assert [worker.status for worker in ended] == [2] * SIZE, ended
    return [worker.line for worker in ended]


def alone(place: Path, output: Path, *more: object, steps: int = TAKEN) -> Path:
    """The run of one process that accumulates micro-batches of as many rows as a worker has."""
    ended = run_here(*train(place, output, "--micro-batch-size", 2, *more, steps=steps))
    assert ended.status == 0, ended.err
    return output


def directories(output: Path) -> list[Path]:
    return [output, output.with_name(f"{output.name}.worker-1")]


def assert_same_run(output: Path, whole: Path) -> None:
    """Both workers have the steps and snapshots of one process, and the first one has its
    adapter.
    """
    journals = [(path / "journal.jsonl").read_bytes() for path in directories(output)]
    assert journals[0] == journals[1]
    ours, theirs = Journal(output / "journal.jsonl"), Journal(whole / "journal.jsonl")
    assert list(ours.commits) == list(theirs.commits)
    assert ours.base_digests == theirs.base_digests
    assert ours.evaluations.keys() == theirs.evaluations.keys()
    for step, results in ours.evaluations.items():  # one process evaluates in micro-batches, too
        assert results == pytest.approx(theirs.evaluations[step], rel=1e-6)
    [adapter, expected] = [
        load_file(path / "model" / "adapter_model.safetensors") for path in (output, whole)
    ]
    assert adapter.keys() == expected.keys()
    assert all(adapter[name].equal(value) for name, value in expected.items())
    assert not (directories(output)[1] / "model").exists()
    snapshots = [
        {path.name: path.read_bytes() for path in folder.glob("snapshot*")}
        for folder in directories(output)
    ]
    assert snapshots[0] == snapshots[1] != {}


def test_two_workers_make_the_run_of_one_process(place: Path, crew: Crew, tmp_path: Path) -> None:
    output = tmp_path / "run"
    said = told_by(crew, *train(place, output, *evaluated(place)))
    assert (
        said.count(f"step {TAKEN}: evaluation loss")
        == said.count("journal: ")
        == said.count("precision: ")
        == 1
    )
    assert_same_run(output, alone(place, tmp_path / "whole", *evaluated(place)))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.worker-1", "whole"}


@pytest.mark.long_profile
def test_a_run_is_lengthened_by_workers_one_of_which_lost_its_disk(
    place: Path, crew: Crew, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    told_by(crew, *train(place, output, "--snapshot-every", 2))
    for path in directories(output)[1].iterdir():
        path.unlink()
    directories(output)[1].rmdir()
    told_by(crew, *train(place, output, "--snapshot-every", 2, steps=9))
    assert_same_run(output, alone(place, tmp_path / "whole", steps=9))


@pytest.mark.long_profile
def test_preferences_are_learned_together(place: Path, crew: Crew, tmp_path: Path) -> None:
    prompts = ["the cat", "the dog", "the cat is", "the dog is"]
    write_rows(
        tmp_path / "pairs.jsonl",
        [{"prompt": prompt, "chosen": " ran", "rejected": " sat"} for prompt in prompts],
    )
    chosen = ["--data", tmp_path / "pairs.jsonl"]
    output = tmp_path / "run"
    told_by(crew, *train(place, output, *chosen))
    whole = tmp_path / "whole"
    # two prompts, of two rows each
    ended = run_here(*train(place, whole, "--micro-batch-size", 4, *chosen))
    assert ended.status == 0, ended.err
    assert_same_run(output, whole)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--split", "directions"), "--split: found directions, 2 workers for one gradient"),
        (("--pack",), "batch: found 1 rows that can be separated, and 2 workers"),
    ],
)
def test_unsplittable_work_is_refused(
    more: Sequence[object], told: str, place: Path, crew: Crew, tmp_path: Path
) -> None:
    for line in refused(crew.run(*train(place, tmp_path / "run", *more))):
        assert told in line
    assert not list(tmp_path.iterdir())


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
def test_workers_one_of_whom_was_killed_go_on_as_before(
    rank: int, place: Path, crew: Crew, tmp_path: Path
) -> None:
    output, command = tmp_path / "run", train(place, tmp_path / "run", "--snapshot-every", 2)
    ended = crew.killed(rank, strike(JOURNAL, "Journal", "append", 5, "after"), *command)
    assert ended[rank].status == -signal.SIGKILL
    assert ended[1 - rank].status == 128 + signal.SIGTERM
    assert commits(directories(output)[rank] / "journal.jsonl") == 5
    told_by(crew, *command)
    assert_same_run(output, alone(place, tmp_path / "whole", "--snapshot-every", 2))
    assert_not_torn(output, TAKEN)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("split", ["rows", "blocks"])
def test_torchrun_starts_killed_workers_again_and_they_end_with_the_same_bits(
    split: str, rank: int, place: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("processes that import everything, three times each")
    output, steps = tmp_path / "run", 60
    journal = directories(output)[rank] / "journal.jsonl"
    options = ["--snapshot-every", 7, "--micro-batch-size", 2]
    command = train(place, output, *options, "--split", split, steps=steps)
    # it starts workers again
    launcher = torchrun_command(SIZE, "--max-restarts", 9, "-m", "zo2adapters", *command)
    with (tmp_path / "output").open("ab") as file:
        process = subprocess.Popen(launcher, stdout=file, stderr=file, env=environment())
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


def train_all(place: Path, output: Path, *more: object) -> list[object]:
    """The command of a run of all parameters; each of two workers has two rows of a batch."""
    named = ["train", "--model", place / "deep" / "base", "--data", place / "deep" / "rows.jsonl"]
    named += ["--output", output, "--steps", TAKEN, "--lr", 1e-2, "--batch-size", 4]
    return [*named, *more]


@pytest.fixture(scope="module")
def deep(place: Path) -> Path:
    """A base of more blocks than a process has in memory."""
    (place / "deep").mkdir()
    make_place(place / "deep", layers=4)
    return place


# method, options, and the most calls that change files before the last step
ALL: dict[str, tuple[tuple[object, ...], int]] = {
    "adamw, streamed": (("--method", "adamw", "--stream-blocks"), 100),
    "badam, streamed": (
        ("--method", "badam", "--stream-blocks", "--switch-every", 2),
        50,
    ),
    "lomo": (("--method", "lomo", "--snapshot-every", 2), 20),
    **{
        f"{method}, divided states": (
            ("--method", *method.split(), "--divide-states", "--snapshot-every", 1),
            50,
        )
        for method in ("adamw", "adalomo", "adamw --delayed-update")
    },
}
FEW_BLOCKS = beforehand(arrange, buckets=2)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("seed", range(10))
def test_all_parameters_go_on_after_a_worker_was_killed_at_any_write(
    seed: int, kind: str, deep: Path, crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a write, or after a call that has no middle."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calls").write_bytes(bytes(8))
    options, writes = ALL[kind]
    rng = random.Random(f"{kind} {seed}")
    rank = rng.randrange(SIZE)
    command = train_all(deep, tmp_path / "run", *options)
    strikes = beforehand(die_at_write, rng.randrange(1, writes))
    if "--stream-blocks" in options:
        strikes = FEW_BLOCKS + strikes
    ended = crew.killed(rank, strikes, *command)
    assert ended[rank].status == -signal.SIGKILL, ended
    for directory in directories(tmp_path / "run"):
        if directory.exists() and not (directory / "options.json").exists():
            shutil.rmtree(directory)  # as the refusal says of one in which no run has begun
    told_by(crew, *command)
    whole = train_all(deep, tmp_path / "whole", "--micro-batch-size", 2, *options)
    ended_whole = run_here(*whole)
    assert ended_whole.status == 0, ended_whole.err
    runs = [tmp_path / "whole", *directories(tmp_path / "run")]
    journals = [Journal(run / "journal.jsonl") for run in runs]
    assert list(journals[0].commits) == list(journals[1].commits) == list(journals[2].commits)
    exported, expected = [load_file(run / "model" / "model.safetensors") for run in runs[1::-1]]
    assert all(exported[name].equal(value) for name, value in expected.items())


BY_BLOCKS = ("--split", "blocks", "--micro-batch-size", 1)


def test_stages_make_the_run_of_one_process(place: Path, crew: Crew, tmp_path: Path) -> None:
    """Of which the first one writes the adapter."""
    output, whole = tmp_path / "run", tmp_path / "whole"
    told_by(crew, *train(place, output, *BY_BLOCKS, "--verify-base", *evaluated(place)))
    ended = run_here(*train(place, whole, "--micro-batch-size", 1, *evaluated(place)))
    assert ended.status == 0, ended.err
    assert_same_run(output, whole)
    refused = crew.run(*train(place, tmp_path / "answered", *BY_BLOCKS, "--samples", 1))
    assert all("--samples: found 1 with --split blocks" in worker.err for worker in refused)
    told = [
        "evaluate",
        "--model",
        place / "base",
        "--adapter",
        whole / "model",
        "--data",
        place / "rows.jsonl",
        "--batch-size",
        4,
    ]
    assert told_by(crew, *told, "--split", "blocks").startswith(run_here(*told).out)


def test_stages_take_zeroth_order_steps(place: Path, crew: Crew, tmp_path: Path) -> None:
    output, whole = tmp_path / "run", tmp_path / "whole"
    command = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        place / "base",
        "--data",
        place / "rows.jsonl",
        "--steps",
        4,
        "--lr",
        1e-3,
        "--batch-size",
        4,
    ]
    told_by(crew, *command, "--output", output, "--split", "blocks")
    ended = run_here(*command, "--output", whole)
    assert ended.status == 0, ended.err
    journals = [Journal(path / "journal.jsonl").updates for path in (*directories(output), whole)]
    assert list(journals[0]) == list(journals[1]) == list(journals[2])
    [exported, expected] = [
        (path / "model" / "model.safetensors").read_bytes() for path in (output, whole)
    ]
    assert exported == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(30))
def test_stages_go_on_after_one_was_killed_at_any_write(
    seed: int, place: Path, crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calls").write_bytes(bytes(8))
    rng = random.Random(f"stages {seed}")
    rank = rng.randrange(SIZE)
    command = train(place, tmp_path / "run", *BY_BLOCKS, "--snapshot-every", 2)
    ended = crew.killed(rank, beforehand(die_at_write, rng.randrange(1, 20)), *command)
    assert ended[rank].status == -signal.SIGKILL, ended
    for directory in directories(tmp_path / "run"):
        if directory.exists() and not (directory / "options.json").exists():
            shutil.rmtree(directory)  # as the refusal says of one in which no run has begun
    told_by(crew, *command)
    whole = tmp_path / "whole"
    ended_whole = run_here(*train(place, whole, "--micro-batch-size", 1, "--snapshot-every", 2))
    assert ended_whole.status == 0, ended_whole.err
    assert_same_run(tmp_path / "run", whole)


GENERATED = ("--prompt", "the cat", "the dog is", "a", "--max-new-tokens", 5)


@pytest.mark.parametrize("more", [(), ("--temperature", "0.9", "--seed", 3)])
def test_stages_generate_what_one_process_does(
    more: Sequence[object], deep: Path, crew: Crew
) -> None:
    command = ["generate", "--model", deep / "deep" / "base", *GENERATED, *more]
    alone_said = run_here(*command)
    assert alone_said.status == 0, alone_said.err
    first, second = crew.run(*command, "--split", "blocks")
    assert (first.status, second.status) == (0, 0), (first, second)
    assert first.out == alone_said.out
    assert second.out == ""


def test_stages_evaluate_answers_as_one_process_does(
    deep: Path, crew: Crew, tmp_path: Path
) -> None:
    answered = [
        {"prompt": prompt, "answers": ["yes", "no cat"]} for prompt in ("the cat", "a dog is")
    ]
    write_rows(tmp_path / "answers.jsonl", answered)
    command = ["evaluate", "--model", deep / "deep" / "base", "--data", tmp_path / "answers.jsonl"]
    alone_said = run_here(*command, "--max-new-tokens", 4)
    assert alone_said.status == 0, alone_said.err
    assert told_by(crew, *command, "--max-new-tokens", 4, "--split", "blocks").startswith(
        alone_said.out
    )


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_only_blocks_are_split_without_steps(command: str, deep: Path) -> None:
    told = [command, "--model", deep / "deep" / "base", "--split", "rows"]
    told += ["--prompt", "a"] if command == "generate" else ["--data", deep / "rows.jsonl"]
    assert "--split: found rows; expected auto" in refusal(*told)


def test_a_plan_has_the_memory_of_each_stage(deep: Path) -> None:
    """Which is that of a smaller model: embedding and head are apart, and so are the blocks."""

    def planned(*more: object) -> dict[str, Any]:
        base = deep / "deep" / "base"
        told = ["plan", "--method", "lora", "--model", base, "--sequence-length", 8, "--lr", 1e-3]
        ended = run_here(*told, "--json", *more)
        assert ended.status == 0, ended.err
        plan: dict[str, Any] = json.loads(ended.out)
        return plan

    stages = planned("--stages", 3)["stages"]
    assert planned()["stages"] == []
    assert [(stage["first_block"], stage["last_block"]) for stage in stages] == [
        (1, 1),
        (2, 3),
        (4, 4),
    ]
    assert all(stage["buckets"] is None for stage in stages)
    command = ["plan", "--model", deep / "deep" / "base", "--sequence-length", 8]
    for more, told in (
        (("--stages", 5), "5 workers for 4 blocks"),
        (("--stages", 1), "--stages"),
        (("--stages", 2, "--method", "lomo"), "--stages: found 2"),
        (("--stages", 2, "--runs", 2), "--runs: found 2"),
        (("--stages", 2, "--device", "cuda", "--device-memory", "1GB"), "--stages: found 2"),
    ):
        assert told in refusal(*command, *more)


def test_stages_learn_from_rewards_as_one_process_does(
    deep: Path, crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step generates under its perturbed weights."""
    monkeypatch.chdir(tmp_path)
    command = ["train", "--model", deep / "deep" / "base", "--data", deep / "rows.jsonl"]
    command += ["--method", "zeroth-order", "--estimator", "es", "--queries", 2, "--steps", 2]
    command += ["--lr", 0.05, "--zo-eps", 0.1, "--batch-size", 2, "--max-new-tokens", 3]
    command += ["--reward", "length=0.1"]
    told_by(crew, *command, "--output", "run", "--split", "blocks")
    ended = run_here(*command, "--output", "whole")
    assert ended.status == 0, ended.err
    journals = [Journal(Path(path) / "journal.jsonl").updates for path in ("run", "whole")]
    assert list(journals[0]) == list(journals[1])
