"""Damage at random to every file of a run, and copies of a live one: the undisturbed bits or one typed line."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_lines import assert_typed, run_here
from damages import IN_LINES, damage_file, flip
from runs import small_run

from zo2adapters.trainers.options import Storage
from zo2adapters.trainers.trainer import Trainer
from zo2core import StepResult

STEPS = 6
SNAPSHOTS = (2, 3, 5)  # steps after which the live run is copied
EXAMPLES = {"short": 14, "long": 10_000}


class Runs(NamedTuple):
    """Copies of a run that was under way, and what it came to."""

    copies: dict[int, Path]  # by the steps that were taken
    model: bytes  # of the undisturbed run, after all steps
    half: bytes  # and after the first two


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    place = tmp_path_factory.mktemp("runs")
    options = small_run(place, steps=STEPS, storage=Storage(write_back_every=2))
    copies: dict[int, Path] = {}
    with Trainer(options, quiet=True) as trainer:
        step: Any = trainer.engine.step

        def copying(*arguments: object, **others: object) -> StepResult:
            result: StepResult = step(*arguments, **others)
            if result.step + 1 in SNAPSHOTS:
                copies[result.step + 1] = place / f"copy-{result.step + 1}"
                shutil.copytree(options.output, copies[result.step + 1])
            return result

        trainer.engine.step = copying
        trainer.run()
    half = run_here("export", "--run", options.output, "--at", 2, "--output", place / "half")
    assert half.status == 0, half
    return Runs(copies, weights(options.output / "model"), weights(place / "half"))


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


def files(run: Path) -> list[Path]:
    return sorted(path for path in run.iterdir() if path.is_file())


def damaged(rng: random.Random, runs: Runs, run: Path) -> Iterator[str]:
    """Copy a run, damage it, and say what was done; files of copies of other moments and of each other are mixed up, too."""
    taken = rng.choice(SNAPSHOTS)
    shutil.copytree(runs.copies[taken], run)
    yield f"after {taken} steps"
    for _ in range(rng.choice([1, 1, 2, 3])):
        file, other, partner = rng.choice(files(run)), runs.copies[rng.choice(SNAPSHOTS)], rng.choice(files(run))
        kind = rng.choice([flip, *IN_LINES, "from another copy", "exchange", "remove"])
        if callable(kind):
            damage_file(file, kind, rng)
        elif kind == "remove":
            file.unlink()
        elif kind == "exchange":
            ours, theirs = file.read_bytes(), partner.read_bytes()
            file.write_bytes(theirs)
            partner.write_bytes(ours)
        elif (other / file.name).exists():
            shutil.copyfile(other / file.name, file)
        yield f"{kind} {file.name}"


def test_damage_ends_in_the_undisturbed_bits_or_in_one_typed_line(
    runs: Runs, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    examples = EXAMPLES["long" if request.config.getoption("--long") else "short"]
    silent = []
    outcomes = {0: 0, 2: 0}
    for number in range(examples):
        rng, run, out = random.Random(number), tmp_path / "run", tmp_path / "out"
        done = list(damaged(rng, runs, run))
        exported = run_here("export", "--run", run, "--at", 2, "--output", out)
        if exported.status == 0:
            if weights(out) != runs.half:
                silent.append(f"{number}, exported: {', '.join(done)}")
            shutil.rmtree(out)
        else:
            assert_typed(exported)
        resumed = run_here("train", "--resume", run)
        outcomes[resumed.status] += 1
        if resumed.status != 0:
            assert_typed(resumed)
        elif weights(run / "model") != runs.model:
            silent.append(f"{number}, resumed: {', '.join(done)}")
        shutil.rmtree(run)
    assert not silent
    assert min(outcomes.values()) > 0, "both ends were seen"
