"""Damaged files of a run, a journal that lost its end, and checked runs: the undisturbed bits or
one typed line.
"""

import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_lines import Ended, assert_typed, done, refusal, run_here
from damages import IN_LINES, damage_file, flip
from runs import finish, small_run

from zo2adapters.cli import main
from zo2adapters.commands.export import Export
from zo2adapters.trainers.options import Execution, Storage, TrainOptions
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import QUIET, open_run
from zo2core import Journal, StepResult
from zo2core.checkpoint.shards import SafetensorsReader, parse_header
from zo2core.errors import CheckpointError, JournalError, OptionError
from zo2core.planning.speeds import terabytes_written

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
    with open_run(RunStart(options), display=QUIET) as trainer:
        step: Any = trainer.engine.step

        def copying(*arguments: object, **others: object) -> StepResult:
            result: StepResult = step(*arguments, **others)
            if result.step + 1 in SNAPSHOTS:
                copies[result.step + 1] = place / f"copy-{result.step + 1}"
                shutil.copytree(options.output, copies[result.step + 1])
            return result

        engine: Any = trainer.engine
        engine.step = copying
        trainer.run()
    done("export", "--run", options.output, "--at", 2, "--output", place / "half")
    return Runs(copies, weights(options.output / "model"), weights(place / "half"))


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


def files(run: Path) -> list[Path]:
    return sorted(path for path in run.iterdir() if path.is_file())


def damaged_copy(rng: random.Random, runs: Runs, run: Path) -> Iterator[str]:
    """Copy a run, damage it, and say what was done; files of copies of other moments and of each
    other are mixed up, too.
    """
    taken = rng.choice(SNAPSHOTS)
    shutil.copytree(runs.copies[taken], run)
    yield f"after {taken} steps"
    for _ in range(rng.choice([1, 1, 2, 3])):
        file, other, partner = (
            rng.choice(files(run)),
            runs.copies[rng.choice(SNAPSHOTS)],
            rng.choice(files(run)),
        )
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


def test_damage_ends_in_the_same_bits_or_a_typed_line(
    runs: Runs, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    examples = EXAMPLES["long" if request.config.getoption("--long") else "short"]
    silent = []
    outcomes = {0: 0, 2: 0}
    for number in range(examples):
        rng, run, out = random.Random(number), tmp_path / "run", tmp_path / "out"
        damages = list(damaged_copy(rng, runs, run))
        exported = run_here("export", "--run", run, "--at", 2, "--output", out)
        if exported.status == 0:
            if weights(out) != runs.half:
                silent.append(f"{number}, exported: {', '.join(damages)}")
            shutil.rmtree(out)
        else:
            assert_typed(exported)
        resumed = run_here("train", "--resume", run)
        outcomes[resumed.status] += 1
        if resumed.status != 0:
            assert_typed(resumed)
        elif weights(run / "model") != runs.model:
            silent.append(f"{number}, resumed: {', '.join(damages)}")
        shutil.rmtree(run)
    assert not silent
    assert min(outcomes.values()) > 0, "both ends were seen"


COMMANDS = ("export", "evaluate", "generate", "report")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = small_run(tmp_path_factory.mktemp("end"))
    finish(options)
    return options.output


def damage(short_run: Path, kind: str) -> None:
    """The last record has another digit, is torn, or is gone as a whole."""
    raw = (short_run / "journal.jsonl").read_bytes()
    at = raw.rindex(b'"lr":') + 6
    flipped = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    left = {"damaged": flipped, "torn": raw[:-30], "cut": raw[: raw[:-1].rindex(b"\n") + 1]}
    (short_run / "journal.jsonl").write_bytes(left[kind])


def used(command: str, short_run: Path, folder: Path, *more: object) -> Ended:
    options: dict[str, list[object]] = {
        "export": ["--run", short_run, "--output", folder / "model"],
        "evaluate": ["--run", short_run, "--data", short_run.parent / "rows.jsonl"],
        "generate": ["--run", short_run, "--prompt", "the cat", "--max-new-tokens", 1],
        "report": [short_run, "--output", folder / "page.html"],
        "journal": [short_run],
    }
    return run_here(command, *options[command], *more)


@pytest.fixture
def short_run(finished_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished_run, tmp_path / "run")
    shutil.copy(finished_run.parent / "rows.jsonl", tmp_path / "rows.jsonl")
    return tmp_path / "run"


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["damaged", "torn", "cut"])
@pytest.mark.parametrize("command", [*COMMANDS, "journal"])
def test_a_lost_step_is_refused_if_the_metrics_know_it_and_said_otherwise(
    short_run: Path, tmp_path: Path, command: str, kind: str
) -> None:
    damage(short_run, kind)
    if command != "journal":
        ended = used(command, short_run, tmp_path)
        assert ended.status == 2
        assert_typed(ended)
        assert "expected at least 3, since metrics.jsonl knows of step 2" in ended.line
        assert not (tmp_path / "model").exists()
    (short_run / "metrics.jsonl").unlink()
    ended = used(command, short_run, tmp_path)
    assert ended.status == 0, ended
    told = (
        "journal.jsonl: the last record is damaged or incomplete and is ignored; the run has 2 "
        "steps"
    )
    assert (told in ended.err) == (kind != "cut")


def test_a_damaged_end_is_said_without_a_run_and_not_where_an_earlier_step_is_exported(
    finished_run: Path, short_run: Path, tmp_path: Path
) -> None:
    damage(short_run, "damaged")
    base, journal = finished_run.parent / "base", short_run / "journal.jsonl"
    ended = done("export", "--model", base, "--journal", journal, "--output", tmp_path / "whole")
    assert (
        "the last record is damaged or incomplete and is ignored; the run has 2 steps" in ended.err
    )
    ended = used("export", short_run, tmp_path, "--at", 2)
    assert (ended.status, "damaged" in ended.err) == (0, False), ended


def test_a_header_of_a_stranger_cannot_change_a_terminal(tmp_path: Path) -> None:
    values = {
        "note": "\x1b[31m",
        "\x1b[2J": [{"a": "\r"}],
        "nothing": None,
        "model": {"model_type": "\x07"},
    }
    journal = Journal(tmp_path / "journal.jsonl")
    journal.begin({"base": "0", "seed": 0, **values})
    journal.close()
    ended = done("journal", tmp_path)
    assert all(line.isprintable() for line in ended.out.splitlines())
    assert "nothing" not in ended.out


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return small_run(tmp_path, storage=Storage(write_back_every=2))


def test_the_first_line_says_how_many_terabytes_are_written_and_a_limit_is_kept_to(
    options: TrainOptions,
) -> None:
    with open_run(RunStart(options), display=QUIET) as trainer:
        assert re.search(
            r"Disk writes: negligible, [0-9.]+ MB in 1,000 steps", trainer.first_lines()[0]
        )
    beside = replace(
        options, optimization=replace(options.optimization, rank=2, period=2), storage=Storage()
    )
    rows = (
        (Storage(), r"factors of finished periods, [0-9.]+ [kM]B in 1,000 steps"),
        (
            Storage(write_limit_tb=1e-12),
            "no factors of finished periods, because of --write-limit-tb",
        ),
        (
            Storage(write_back_every="never"),
            "no factors of finished periods, because of --write-back-every never",
        ),
    )
    for number, (storage, kept) in enumerate(rows):
        told = replace(beside, storage=storage, output=options.output.with_name(f"beside {number}"))
        with open_run(RunStart(told), display=QUIET) as trainer:
            assert re.search(f"Disk writes: {kept}", trainer.first_lines()[0])
            trainer.train()
        assert (told.output / "factors.bin").exists() == (storage == Storage())
    storage = replace(options.storage, write_limit_tb=1e-6)
    with pytest.raises(
        OptionError, match=r"write_back: found writing every 2 steps.*MB in 1,000; expected at most"
    ):
        open_run(
            RunStart(replace(options, output=options.output.with_name("other"), storage=storage)),
            display=QUIET,
        )
    storage = replace(storage, write_back_every="auto")
    with open_run(
        RunStart(replace(options, output=options.output.with_name("third"), storage=storage)),
        display=QUIET,
    ) as trainer:
        every = trainer.engine.write_back_every
        assert every is not None
        layouts = trainer.engine._run.segments.layouts
        assert terabytes_written(layouts, every) <= 1e-6


def test_the_whole_base_is_compared_when_that_is_asked_for(
    options: TrainOptions,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = str(options.output)
    finish(options)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # bars are drawn in terminals
    main(["train", "--resume", run, "--verify-base"])
    main(["export", "--run", run, "--output", str(tmp_path / "out"), "--verify-base"])
    main(["evaluate", "--run", run, "--data", str(tmp_path / "rows.jsonl"), "--verify-base"])
    assert capsys.readouterr().err.count("base: 100%") >= 3
    with pytest.raises(OptionError, match="verify_base: found no journal"):
        Export(model=options.model, output=tmp_path / "more", verify_base=True).run()
    shard = Path(options.model) / "model.safetensors"
    entry = max(parse_header(shard).values(), key=lambda entry: entry.nbytes)
    data = bytearray(shard.read_bytes())
    data[entry.start + entry.nbytes // 3] ^= 1
    with pytest.MonkeyPatch.context() as patch:  # as if no sample had met it
        patch.setattr(
            SafetensorsReader,
            "fingerprint",
            Journal(options.output / "journal.jsonl").header["base"],  # type: ignore[index]
        )
        shard.write_bytes(data)
        for verify in (True, False):
            with pytest.raises(
                CheckpointError, match=r"model\.safetensors: .*: found content of digest"
            ):
                Export(
                    run_directory=options.output, output=tmp_path / "more", verify_base=verify
                ).run()
    assert not (tmp_path / "more").exists()


def test_a_journal_without_digests_cannot_verify_a_base(
    options: TrainOptions, tmp_path: Path
) -> None:
    with open_run(RunStart(options), display=QUIET):
        pass
    with pytest.raises(JournalError, match="no digest for 5 of 5 segments of the base"):
        Export(run_directory=options.output, output=tmp_path / "out", verify_base=True).run()
    with open_run(
        RunStart(options, resumes=True),
        display=QUIET,
        execution=Execution(verify_base=True),
    ) as trainer:
        assert len(trainer.engine.journal.base_digests) == 5
    Export(run_directory=options.output, output=tmp_path / "out", verify_base=True).run()


def test_a_plan_says_how_many_terabytes_are_written(options: TrainOptions) -> None:
    plan = (
        "plan",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--output",
        options.data.parent,
        "--batch-size",
        1,
    )
    assert re.search(r"written per 1,000 steps +[0-9.]+ [kM]B", done(*plan).out)
    for more in ((), ("--device-memory", "1GB")):
        plans = (
            done(*plan, *more, *limit, "--json").out for limit in ((), ("--write-limit-tb", "1e-8"))
        )
        unlimited, limited = (json.loads(planned)["terabytes_per_1000_steps"] for planned in plans)
        assert 0 < limited <= 1e-8 < unlimited
    assert "found 0.0; expected a finite number above 0" in refusal(*plan, "--write-limit-tb", "0")
