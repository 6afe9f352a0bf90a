"""Branches: a new run that begins with the first steps of another one, and how a run that diverged goes on from its best."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_lines import done, refusal
from models import make_batch, save_model, small_config
from runs import STEPS, finish, interrupt_after, outcome, resumable_run

from zo2adapters import open_checkpoint
from zo2adapters.cli import main
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_directory import RunDirectory
from zo2core import Engine, Journal, MeZOSGD, WriteBackPolicy, ZerothOrder, branch_journal
from zo2core.errors import JournalError, OutputError
from zo2core.journal import copy_journal

BATCH = make_batch(40, [9, 5])


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return resumable_run(tmp_path)


def run(*arguments: object) -> None:
    main([str(argument) for argument in arguments])


def records(path: Path) -> list[dict[str, object]]:
    """The journal's records without their checksums."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [{key: value for key, value in line.items() if key != "crc32"} for line in lines]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base of its own", small_config("opt"))


@pytest.fixture
def parent(base: Path, tmp_path: Path) -> Path:
    """A journal of five steps."""
    with Engine(
        open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3)), journal=tmp_path / "parent.jsonl"
    ) as engine:
        for _ in range(5):
            engine.step(BATCH)
    return tmp_path / "parent.jsonl"


# ---- as a function of the library


@pytest.mark.few(3)
@pytest.mark.parametrize("step", range(6))
def test_a_branch_has_the_weights_of_its_step_and_goes_on_with_another_estimator(
    step: int, base: Path, parent: Path, tmp_path: Path
) -> None:
    slower, path = MeZOSGD(lr=1e-3, zo_eps=1e-3), tmp_path / "new" / "branch.jsonl"
    branch_journal(parent, path, step, estimator=slower.options)
    with Engine(open_checkpoint(base), journal=Journal(parent).until(step)) as then:
        expected = {name: tensor.clone() for name, tensor in then.parameters_now()}
    write_back = WriteBackPolicy(directory=path.parent, every=1)
    with Engine(open_checkpoint(base), ZerothOrder(slower), journal=path, write_back=write_back) as engine:
        assert engine.version == step
        assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.parameters_now())
        assert engine.step(BATCH).lr == 1e-3
    journal = Journal(path)
    assert journal.updates[:step] == Journal(parent).updates[:step]
    assert journal.base_digests == Journal(parent).base_digests != {}


def test_the_header_says_what_was_taken_over_from_where(parent: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    slower = MeZOSGD(lr=1e-3, zo_eps=1e-3).options
    branch_journal(parent, first, 4, estimator=slower, provenance={"data": "again"})
    branch_journal(first, second, 3)
    begun, branch, branch_of_it = (Journal(path) for path in (parent, first, second))
    assert begun.header is not None
    assert branch.header is not None
    assert branch_of_it.header is not None
    told = {"step": 4, "checksum": f"{begun.chain(4):08x}", "estimator": begun.header["estimator"]}
    assert branch.header == {**begun.header, "estimator": slower, "provenance": {"data": "again"}, "branched": [told]}
    then = {"step": 3, "checksum": f"{branch.chain(3):08x}", "estimator": slower}
    assert branch_of_it.header == {**branch.header, "branched": [told, then]}


def test_a_branch_is_another_run(base: Path, parent: Path, tmp_path: Path) -> None:
    """What was written back for the one does not count for the other."""
    branch_journal(parent, tmp_path / "branch.jsonl", 5)
    assert Journal(tmp_path / "branch.jsonl").chain(3) != Journal(parent).chain(3)


def test_what_cannot_be_branched_is_refused_and_nothing_is_written(parent: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.jsonl"
    with pytest.raises(JournalError, match="found 5 steps; expected at least 6"):
        branch_journal(parent, new, 6)
    with pytest.raises(JournalError, match="found no journal"):
        branch_journal(tmp_path / "absent.jsonl", new, 0)
    assert not new.exists()
    with pytest.raises(OutputError, match=r"parent.jsonl: found a file"):
        branch_journal(parent, parent, 2)
    assert len(Journal(parent).updates) == 5


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_branch_appears_whole_or_not_at_all(
    call: str, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    new = tmp_path / "new.jsonl"
    with monkeypatch.context() as patched:
        if call == "replace":
            patched.setattr(Path, "replace", failing)
        elif call == "fsync":
            patched.setattr(os, "fsync", failing)
        else:
            patched.setattr("zo2core.io.durable.create_file", failing)
        with pytest.raises(OutputError, match="No space left"):
            branch_journal(parent, new, 2)
        assert not new.exists()
    branch_journal(parent, new, 2)  # what was left is in nobody's way
    assert {path.name for path in tmp_path.iterdir() if path.suffix in (".jsonl", ".partial")} == {
        "parent.jsonl",
        "new.jsonl",
    }


# ---- by the command


def test_a_branch_that_is_told_nothing_anew_ends_as_its_parent(options: TrainOptions, tmp_path: Path) -> None:
    finish(options)
    expected = outcome(options.output)
    for step in (0, 3, STEPS):
        run("train", "--resume", options.output, "--from-step", step, "--output", tmp_path / f"{step}")
        branch = outcome(tmp_path / f"{step}")
        assert branch["weights"] == expected["weights"]
        ours, theirs = (Journal(directory / "journal.jsonl") for directory in (tmp_path / f"{step}", options.output))
        assert ours.updates == theirs.updates
    assert outcome(options.output) == expected


def test_a_branch_takes_optimisation_options_anew_and_can_itself_be_resumed(options: TrainOptions, tmp_path: Path) -> None:
    finish(options)
    new = tmp_path / "new"
    anew = ["--lr", 1e-3, "--decay", "constant", "--warmup-steps", 0, "--steps", 9, "--clip", "projected=0.5"]
    run("train", "--resume", options.output, "--from-step", 2, "--output", new, *anew)
    then, now = records(options.output / "journal.jsonl"), records(new / "journal.jsonl")
    updates = [record for record in now if "step" in record and "losses" in record]
    assert updates[:2] == [record for record in then if "losses" in record][:2]
    assert [update["lr"] for update in updates[2:]] == [1e-3] * 7
    branched = now[0]["branched"]
    assert isinstance(branched, list)
    assert [entry["step"] for entry in branched] == [2]
    told = RunDirectory.options(new)
    assert (told.steps, told.schedule_steps, told.optimization.clip_grad) == (9, None, 0.5)
    expected = outcome(new)
    # Killed on the way, and resumed.
    shutil.rmtree(new / "model")
    lines = (new / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (new / "journal.jsonl").write_bytes(b"".join(lines[:-3]))
    for name in ("metrics.jsonl", "scratch.bin", "scratch.jsonl"):
        (new / name).unlink(missing_ok=True)
    run("train", "--resume", new)
    resumed = outcome(new)
    assert (resumed["journal"], resumed["weights"]) == (expected["journal"], expected["weights"])


def test_a_branch_of_a_run_without_a_guard_may_have_one(options: TrainOptions, tmp_path: Path) -> None:
    plain = replace(options, optimization=replace(options.optimization, guard=False))
    interrupt_after(plain, 3)
    run("train", "--resume", options.output, "--from-step", 2, "--output", tmp_path / "guarded", "--guard")
    run("train", "--resume", options.output)
    begun, branch = (records(path / "journal.jsonl")[0]["estimator"] for path in (options.output, tmp_path / "guarded"))
    assert isinstance(begun, dict)
    assert branch == {**begun, "guard": {"window": 50, "factor": 5.0, "refusals": 5}}


REFUSED = [
    (["--from-step", "7", "--output", "{new}"], f"--from-step: found 7; expected 0 to {STEPS}, the steps of the run"),
    (["--from-step", "-1", "--output", "{new}"], "--from-step: found -1"),
    (["--from-step", "2"], "--output: found nothing; expected a directory for the new run"),
    (["--from-step", "2", "--output", "{run}"], "found a run that has already started"),
    (["--from-step", "2", "--output", "{new}", "--batch-size", "2"], "--batch-size: found 2; expected 3"),
    (["--from-step", "2", "--output", "{new}", "--seed", "4"], "--seed: found 4; expected 3"),
    (["--from-step", "2", "--output", "{new}", "--noise", "mezo"], '--noise: found "mezo"'),
    (["--from-step", "2", "--output", "{new}", "--estimator", "mezo:exact"], "exact of --estimator: found true"),
    (["--from-step", "4", "--output", "{new}", "--steps", "3"], "--steps: found 3; expected at least 4"),
    (["--from-step", "2", "--output", "{new}", "--clip", "median=0.5"], "median of --clip: found 0.5"),
    (["--from-step", "2", "--output", "{new}", "--memory", "1MiB"], "--memory"),
    (["--from-step", "2", "--output", "{new}/below", "--memory", "1MiB"], "--memory"),
]


def test_what_a_branch_cannot_be_told_is_refused(options: TrainOptions, tmp_path: Path) -> None:
    finish(options)
    for arguments, expected in REFUSED:
        told = [argument.format(new=tmp_path / "new", run=options.output) for argument in arguments]
        assert expected in refusal("train", "--resume", options.output, *told)
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("lr", [0.01, 1.0])
@pytest.mark.filterwarnings("ignore::zo2core.errors.ZO2Warning")
def test_a_run_whose_lr_is_a_hundred_times_too_large_stops_and_goes_on_from_its_best_step(
    lr: float, options: TrainOptions, tmp_path: Path
) -> None:
    """Each loss is finite; at the end it is that of a coin, below where the run began."""
    arguments = ["train", "--model", options.model, "--data", options.data, "--output", options.output]
    said = refusal(*arguments, "--steps", 200, "--batch-size", 3, "--lr", lr, "--seed", 3)
    journal = Journal(options.output / "journal.jsonl")
    losses = [update.losses[0] for update in journal.updates]
    assert 0 < len(losses) <= 50
    assert all(math.isfinite(loss) for loss in losses)
    assert f"zo2 tune --model {options.model} --data {options.data} --output TRIALS" in said
    command = said.partition("the best so far: zo2 ")[2].partition(" --output NEW")[0].split()
    assert command[:4] == ["train", "--resume", str(options.output), "--from-step"]
    step = int(command[4])
    assert losses[step] <= losses[0]
    run(*command, "--output", tmp_path / "new", "--lr", 1e-3, "--steps", 60)
    branch = Journal(tmp_path / "new" / "journal.jsonl").updates
    assert len(branch) == 60
    assert branch[:step] == journal.updates[:step]
    assert max(update.losses[0] for update in branch[step:]) < 2 * losses[0]
    again = refusal("train", "--resume", options.output)  # a resumed run ends as this one did
    assert said.splitlines()[-1] == again.splitlines()[-1]
    assert len(Journal(options.output / "journal.jsonl").updates) == len(losses)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "precision", "warns"), [("bfloat16", "exact", True), ("bfloat16", "mixed", False), ("float32", "exact", False)]
)
def test_a_run_whose_steps_are_rounded_away_says_so_once(
    dtype: str, precision: str, warns: bool, options: TrainOptions
) -> None:
    arguments = ["train", "--model", options.model, "--data", options.data, "--output", options.output, "--dtype", dtype]
    assert (
        done(*arguments, "--precision", precision, "--steps", 103, "--batch-size", 3, "--lr", 1e-6).err.count(
            "others rounded back to their old values"
        )
        == warns
    )


@pytest.mark.parametrize(
    ("chosen", "remedy"),
    [
        (["--precision", "exact"], "(--precision mixed, or --dtype float32)"),
        (["--precision", "mixed:transfer=float16-back"], "(--precision mixed:transfer=float16)"),
    ],
)
def test_what_is_proposed_against_rounded_away_updates_is_what_the_run_lacks(
    chosen: list[str], remedy: str, options: TrainOptions
) -> None:
    """A run whose weights come back from a device in 16 bits is in mixed precision already."""
    arguments = ["train", "--model", options.model, "--data", options.data, "--output", options.output]
    assert (
        f"keep them in float32 {remedy}"
        in done(*arguments, *chosen, "--dtype", "bfloat16", "--steps", 1, "--batch-size", 3, "--lr", 1e-9).err
    )


def test_a_copy_is_the_journal_as_it_is(parent: Path, tmp_path: Path) -> None:
    journal = Journal(parent)
    copy_journal(journal, tmp_path / "copy.jsonl")
    assert journal.base_digests
    assert Journal(tmp_path / "copy.jsonl").base_digests == journal.base_digests
    assert Journal(tmp_path / "copy.jsonl").updates == journal.updates
    copy_journal(journal.until(2), tmp_path / "copy.jsonl")  # in the place of the first one
    copied = Journal(tmp_path / "copy.jsonl")
    assert copied.header == journal.header
    assert copied.updates == journal.updates[:2]
    with pytest.raises(JournalError, match="found no run"):
        copy_journal(Journal(), tmp_path / "empty.jsonl")
    with pytest.raises(OutputError, match="nowhere"):
        copy_journal(journal, tmp_path / "copy.jsonl" / "nowhere")
