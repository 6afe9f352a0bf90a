"""Runs that learn from rewards, killed at any moment: the undisturbed run's bits, and nothing is left behind."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import psutil
import pytest
from command_lines import Apart, done, make_place, refusal
from random_kills import WITHIN_A_STEP, KilledRuns, require_same_outcome
from runs import outcome
from strikes import JOURNAL, TRAINER, strike

from zo2adapters.models.quantizer import quantize

STEPS = 12  # the drift is measured before the first and the eleventh
REWARD = """
import hashlib, os, pathlib, signal, time

def fingerprint(prompt, completion, row):
    \"\"\"A number that differs for any two texts, so that the losses in the journal tell what was generated.\"\"\"
    time.sleep(0.001)
    strike = pathlib.Path("strike")
    if strike.exists() and pathlib.Path("run/journal.jsonl").read_bytes().count(b"seeds") == 3:
        strike.unlink()
        os.kill(int(pathlib.Path("pid").read_text()), signal.SIGKILL)
        time.sleep(600)
    return int.from_bytes(hashlib.sha256(f"{row['completion']} {completion}".encode()).digest()[:4], "big") / 2**32
"""
REWARDS = ("rewards.py:fingerprint", "length=0.1")
FILES = {"options.json", "recipe.yaml", "journal.jsonl", "metrics.jsonl", "samples.jsonl", "lock", "model"}
KEPT = {"scratch.bin", "scratch.jsonl", "factors.bin", "factors.jsonl"}  # with weights on disk, and finished periods
MEASURED = {"reward", "best", "completion", "generated", "drift"}  # first words of what the journal does not have of a step

TEMPORARY = """
import os, pathlib, tempfile
pathlib.Path("pid").write_text(str(os.getpid()))
tempfile.tempdir = os.path.abspath("temporary")
os.environ["TMPDIR"] = tempfile.tempdir
"""
TIGHT = """
import dataclasses, zo2core.planning.run_spec as spec
plan_host = spec.plan_host
def tight(*args, **kwargs):
    plan = plan_host(*args, **kwargs)
    return dataclasses.replace(plan, buckets=1, budget=plan.nbytes)
spec.plan_host = tight
"""
IN_MEMORY: tuple[object, ...] = ("--model", "base", "--rank", 2, "--temperature", 0.8, "--reward-seconds", 500)
PLACED: dict[str, tuple[str, tuple[object, ...]]] = {
    "in memory": ("", IN_MEMORY),
    "a quantised base from disk, one row at a time": (
        TIGHT,
        ("--model", "nf4", "--rank", 2, "--period", 3, "--activation-memory", 1, "--fitness", "ranks"),
    ),
    "weights written to disk": (TIGHT, ("--model", "base", "--write-back-every", 2, "--temperature", 0.8, "--top-p", 0.9)),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_long = metafunc.config.getoption("--long")
    if "kills" in metafunc.fixturenames:  # 102 in the long profile
        placed = [(name, 34) for name in PLACED] if is_long else [(list(PLACED)[-1], 1)]
        metafunc.parametrize(("placed", "kills"), placed)
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", PLACES if is_long else list(PLACES)[::3])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, the same one quantised, rows, and a reward."""
    folder = make_place(tmp_path_factory.mktemp("rewards"))
    quantize(folder / "base", folder / "nf4", "nf4")
    for path in (folder / "base").glob("tokenizer*"):
        shutil.copy(path, folder / "nf4")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "temporary").mkdir()
    return folder


def train(*more: object) -> list[object]:
    """The command of a run."""
    told = ["train", "--data", "rows.jsonl", "--output", "run", "--reward", *REWARDS]
    told += ["--estimator", "es", "--queries", "3", "--lr", "0.05", "--zo-eps", "0.1", "--max-new-tokens", "4"]
    told += ["--evaluation", "rows.jsonl", "--evaluate-every", "4", "--samples", "2"]
    return [*told, "--steps", STEPS, "--batch-size", 3, "--seed", 3, *more]


def reward_processes() -> list[psutil.Process]:
    """The processes of rewards that were started in the present directory and have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(Path.cwd()) and any(part.endswith("reward_program.py") for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def ended(run: str) -> dict[str, object]:
    """The outcome of a run, which has left no process and no file behind."""
    found = outcome(Path(run))
    found["metrics"] = [
        {key: value for key, value in row.items() if key.partition("_")[0] not in MEASURED}
        for row in found["metrics"]  # type: ignore[attr-defined]
    ]
    found["samples"] = Path(run, "samples.jsonl").read_bytes()
    names = {path.name for path in Path(run).iterdir()}
    assert names - KEPT == FILES
    assert not list(Path("temporary").iterdir())
    end = time.monotonic() + 60
    while reward_processes():
        assert time.monotonic() < end, "a reward's process outlives its run"
        time.sleep(0.01)
    return found


@pytest.mark.long_profile
def test_a_run_killed_by_the_clock_again_and_again_ends_as_the_undisturbed_one(
    placed: str, kills: int, here: Path, apart: Apart
) -> None:
    patch, options = PLACED[placed]
    runs = KilledRuns(here, apart, train(*options), STEPS, TEMPORARY + patch)
    runs.named = ("--reward", *REWARDS)
    seen = require_same_outcome(runs, ended, random.Random(placed), kills)
    within = sum(runs.hits[phase] for phase in WITHIN_A_STEP)
    print(f"{placed}: {seen}; {within} kills within a step")


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("undisturbed") / "here"
    shutil.copytree(prepared, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done(*train(*IN_MEMORY))
        return ended("run")


GENERATION, TASK = "zo2adapters.tasks.generation", "zo2adapters.tasks.reward_task"
PLACES = {
    "the base has not continued all prompts": (GENERATION, "Generation", "_advance", 2, "after"),
    "a token of all rows is generated": (GENERATION, "Generation", "_advance", 30, "after"),
    "all is generated, and no reward is computed": (TASK, "Rewards", "of", 4, "before"),
    "all rewards are computed": (TASK, "Rewards", "of", 4, "after"),
    "before the record of a step": (JOURNAL, "Journal", "append", 4, "before"),
    "a record is durable": (JOURNAL, "Journal", "append", 4, "after"),
    "the drift of the eleventh step is measured": (TASK, "RewardTask", "drift", 5, "after"),
    "samples are answered, and not written": (TRAINER, "", "replace_file", 2, "before"),
}


@pytest.mark.few(1)
def test_a_run_killed_at_any_place_ends_as_the_undisturbed_one(
    place: str, here: Path, apart: Apart, undisturbed: dict[str, object]
) -> None:
    killed = apart.run(*train(*IN_MEMORY), patch=TEMPORARY + strike(here, *PLACES[place]))
    assert killed.status == -9, killed
    done("train", "--resume", "run", "--reward", *REWARDS)
    assert ended("run") == undisturbed


def test_a_run_killed_while_its_rewards_are_computed_leaves_no_process(
    here: Path, apart: Apart, undisturbed: dict[str, object]
) -> None:
    Path("strike").touch()
    killed = apart.run(*train(*IN_MEMORY), patch=TEMPORARY)
    assert killed.status == -9, killed
    assert not Path("strike").exists(), "the reward has ended its parent"
    done("train", "--resume", "run", "--reward", *REWARDS)
    assert ended("run") == undisturbed


@pytest.mark.long_profile
def test_a_resumed_run_has_the_drift_that_ends_it(here: Path, apart: Apart) -> None:
    bounded = train(*IN_MEMORY, "--max-drift", 1e-9)
    told = refusal(*bounded)
    assert "step 10: found a drift of" in told
    shutil.move("run", "whole")
    assert apart.run(*bounded, patch=strike(here, JOURNAL, "Journal", "append", 9, "after")).status == -9
    resumed = refusal("train", "--resume", "run", "--reward", *REWARDS)
    assert resumed.partition(". What to do")[0] == told.partition(". What to do")[0]
    assert Path("run/journal.jsonl").read_bytes() == Path("whole/journal.jsonl").read_bytes()
    assert not reward_processes()
