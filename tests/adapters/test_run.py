"""A run's directory: going on as if nothing had happened, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import refusal, run_here
from models import WORDS, save_tokenizer
from runs import STEPS, finish, interrupt_after, outcome, resumable_run
from safetensors.torch import load_file, save_file

from zo2adapters.cli import main
from zo2adapters.tasks.row_source import data_sha256
from zo2adapters.trainers import run_directory
from zo2adapters.trainers.model_options import RunModelOptions
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Storage, TrainOptions
from zo2adapters.trainers.run_directory import RunDirectory
from zo2adapters.trainers.trainer import Trainer
from zo2core import Journal
from zo2core.errors import DataError, JournalError, OptionError, OutputError

SHORT_BATCH = {"input_ids": torch.tensor([[3, 4, 6]]), "labels": torch.tensor([[3, 4, 6]])}


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return resumable_run(tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize("steps", range(STEPS))
def test_a_run_resumed_at_any_step_ends_as_the_undisturbed_one(options: TrainOptions, steps: int) -> None:
    finish(options)
    expected = outcome(options.output)
    shutil.rmtree(options.output)
    interrupt_after(options, steps)
    resumed = RunDirectory.options(options.output)
    assert resumed == replace(
        options, model_options=RunModelOptions(precision="exact")
    )  # what was chosen for weights of 32 bits
    finish(resumed, resume=True)
    assert outcome(options.output) == expected


def test_the_command_resumes_and_exports_any_past_step(
    options: TrainOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_after(options, 4)
    run = str(options.output)
    main(["export", "--run", run, "--at", "2", "--output", str(tmp_path / "two")])
    main(["train", "--resume", run])
    main(["export", "--run", run, "--output", str(tmp_path / "last")])
    capsys.readouterr()
    main(["journal", run, "--last", "2"])
    printed = capsys.readouterr().out
    assert f"{STEPS} steps" in printed
    method, *identity = printed.partition(f"\n{STEPS} steps")[0].splitlines()
    assert re.fullmatch(r"method +zeroth-order steps, [a-z-]+, lr [0-9.e-]+, zo_eps 0.001, .*", method)
    told = dict(re.split(r" {2,}", line, maxsplit=1) for line in identity)
    header = Journal(options.output / "journal.jsonl").header
    assert header is not None
    assert told["base fingerprint"] == header["base"]
    assert told["data sha256"] == data_sha256(options.data)
    assert (told["seed"], told["batch size"]) == (str(options.seed), str(options.batching.batch_size))
    assert "{" not in printed
    assert printed.splitlines()[-1].split()[0] == str(STEPS - 1)
    weights = "model.safetensors"
    assert (tmp_path / "last" / weights).read_bytes() == (options.output / "model" / weights).read_bytes()
    shutil.rmtree(options.output)
    interrupt_after(options, 2)
    main(["export", "--run", run, "--output", str(tmp_path / "two again")])
    assert (tmp_path / "two" / weights).read_bytes() == (tmp_path / "two again" / weights).read_bytes()


def test_names_are_durable_before_anything_is_built_on_them(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory made and file put in place is followed at once by a sync of the directory that its name is in."""
    options = replace(options, output=options.output / "deep" / "run")
    names: list[Path] = []  # made, not yet durable
    made, synced = set(), os.fsync

    def naming(real: Callable[..., None], path_at: int) -> Callable[..., None]:
        def named(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            names.append(Path(args[path_at]))
            made.add(Path(args[path_at]).name)

        return named

    def sync(descriptor: int) -> None:
        synced(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert path.is_dir() or not names, f"{path.name} is synced before the names of {names}"
        names[:] = [name for name in names if name.parent != path]

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", naming(os.mkdir, 0))
        patch.setattr(os, "replace", naming(os.replace, 1))
        patch.setattr(os, "fsync", sync)
        with Trainer(options, quiet=True) as trainer:
            trainer.engine.step(SHORT_BATCH)
        with Trainer(options, resume=True, quiet=True) as trainer:
            trainer._run.metrics(trainer.engine.journal)
    assert not names
    assert made >= {"run", "deep", "options.json", "metrics.jsonl", "scratch.jsonl"}


def test_two_processes_cannot_share_a_run(options: TrainOptions) -> None:
    with Trainer(options, quiet=True), pytest.raises(OutputError, match="another process"):
        Trainer(options, resume=True, quiet=True)


def test_changed_data_is_refused(options: TrainOptions) -> None:
    interrupt_after(options, 1)
    with options.data.open("a") as file:
        file.write('{"text": "the dog"}\n')
    with pytest.raises(DataError, match=f"^data: found {options.data}, which has the sha256 .*began with: {options.data}, "):
        Trainer(options, resume=True, quiet=True)


def test_changed_evaluation_rows_are_refused_by_their_own_option(options: TrainOptions) -> None:
    interrupt_after(options, 1)
    assert options.evaluation is not None
    changed = options.evaluation.with_name("changed.jsonl")
    changed.write_text(options.evaluation.read_text() + '{"text": "the dog"}\n')
    with pytest.raises(DataError, match=f"^evaluation: found {changed}, .*began with: {options.evaluation}, "):
        Trainer(replace(options, evaluation=changed), resume=True, quiet=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("change", ["a word's number", "the padding", "the end of a row"])
def test_another_tokenizer_is_refused_with_the_difference(options: TrainOptions, change: str) -> None:
    interrupt_after(options, 1)
    base, before = Path(options.model), {path: path.read_bytes() for path in options.output.iterdir()}
    words = [*WORDS[:8], WORDS[9], WORDS[8], WORDS[10]] if change == "a word's number" else WORDS
    save_tokenizer(base, words, pad="<unk>" if change == "the padding" else "<pad>")
    if change == "the end of a row":
        save_tokenizer(base, eos="<unk>")
    with pytest.raises(DataError, match="tokenizer of") as info:
        Trainer(options, resume=True, quiet=True)
    said = {"a word's number": "data sha256", "the padding": "padding 0", "the end of a row": "evaluation sha256"}
    assert said[change] in info.value.expected
    assert ("padding" in info.value.found) == (change == "the padding")
    assert {path: path.read_bytes() for path in options.output.iterdir()} == before, "nothing was changed"
    save_tokenizer(base)
    finish(options, resume=True)


def test_another_base_or_other_options_are_refused_with_the_difference(options: TrainOptions) -> None:
    interrupt_after(options, 1)
    other = replace(options, optimization=Optimization(lr=1e-2, zo_eps=0.5))
    with pytest.raises(JournalError, match=r"estimator\.zo_eps 0\.001.*estimator\.zo_eps 0\.5"):
        Trainer(other, resume=True, quiet=True)
    weights = load_file(Path(options.model) / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, Path(options.model) / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JournalError, match="base"):
        Trainer(options, resume=True, quiet=True)


@pytest.mark.parametrize("key", ["checksums", "tokens"])
def test_a_resumed_run_without_its_checksums_is_refused(options: TrainOptions, key: str) -> None:
    interrupt_after(options, 1)
    path = options.output / "options.json"
    values = json.loads(path.read_bytes())
    del values[key]
    path.write_text(json.dumps(values))
    with pytest.raises(OptionError, match=r"the options that zo2 train saved in options\.json"):
        Trainer(options, resume=True, quiet=True)


@pytest.mark.parametrize("lost", ["steps", "seed", ("optimization", "warmup_steps"), ("storage", "memory")])
def test_options_that_have_lost_one_are_refused(options: TrainOptions, lost: str | tuple[str, str]) -> None:
    with Trainer(options, quiet=True) as trainer:
        trainer.run()
    path = options.output / "options.json"
    record = json.loads(path.read_text())
    if isinstance(lost, str):
        del record["options"][lost]
    else:
        del record["options"][lost[0]][lost[1]]
    path.write_text(json.dumps(record))
    with pytest.raises(OptionError, match=r"options\.json"):
        RunDirectory.options(options.output)


def test_what_a_killed_export_has_left_behind_its_model_is_cleared_away(options: TrainOptions) -> None:
    with Trainer(options, quiet=True) as trainer:
        trainer.run()
    (options.output / ".model.partial-abc").mkdir()  # killed between the renaming and the end
    with Trainer(options, resume=True, quiet=True) as trainer:
        trainer.run()
    assert not (options.output / ".model.partial-abc").exists()


def test_a_run_that_could_not_begin_leaves_nothing(options: TrainOptions) -> None:
    tiny = replace(options, storage=Storage(memory="1MB"))
    with pytest.raises(Exception, match="smallest plan"):
        Trainer(tiny, quiet=True)
    assert not options.output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--resume", "nowhere"], "expected the directory of a run"),
        (["train", "--resume", "nowhere", "--steps", "3"], "nowhere: found no readable options.json"),
        (["export", "--run", "nowhere", "--output", "o"], "nowhere: found no readable options.json"),
        (["train", "--model", "m"], "--data: found nothing"),
        (["export", "--output", "o"], "either --model or --run"),
        (["journal", "nowhere"], "no journal"),
    ],
)
def test_what_the_commands_cannot_do_they_say(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(*arguments)


def test_exporting_a_step_that_was_not_taken_is_refused(options: TrainOptions) -> None:
    interrupt_after(options, 2)
    assert "--at: found 3; expected 0 to 2, the steps of the run" in refusal(
        "export", "--run", str(options.output), "--at", "3", "--output", "unused"
    )


@pytest.fixture
def moved(options: TrainOptions) -> TrainOptions:
    """A run that was interrupted, whose base and rows then moved to ``elsewhere``."""
    place = options.output.parent
    rows = options.data.read_bytes()
    (place / "evaluation.jsonl").write_bytes(rows)
    interrupt_after(replace(options, evaluation=place / "evaluation.jsonl"), 3)
    (place / "elsewhere").mkdir()
    for name in ("base", "rows.jsonl", "evaluation.jsonl"):
        (place / name).rename(place / "elsewhere" / name)
    return options


def test_a_run_whose_files_moved_goes_on_with_their_new_paths(moved: TrainOptions, tmp_path: Path) -> None:
    new = tmp_path / "elsewhere"
    paths = ["--model", new / "base", "--data", new / "rows.jsonl", "--evaluation", new / "evaluation.jsonl"]
    assert "--data" in refusal("train", "--resume", moved.output, *paths[:2]).replace(str(moved.data), "--data")
    branched = run_here("train", "--resume", moved.output, *paths, "--from-step", 2, "--output", tmp_path / "branch")
    ended = run_here("train", "--resume", moved.output, *paths)
    assert (branched.status, ended.status) == (0, 0), (branched, ended)
    record = json.loads((moved.output / "options.json").read_text())
    assert record["options"]["data"] == str(new / "rows.jsonl")
    assert set(record["checksums"]) == {str(new / "rows.jsonl"), str(new / "evaluation.jsonl")}
    assert run_here("train", "--resume", moved.output).status == 0  # the new paths were written down
    assert run_here("export", "--run", moved.output, "--output", tmp_path / "exported").status == 0
    for name in ("base", "rows.jsonl"):
        (new / name).rename(tmp_path / name)
    expected = replace(moved, output=tmp_path / "undisturbed", evaluation=tmp_path / "rows.jsonl")
    finish(expected)
    for run in (moved.output, tmp_path / "branch"):
        assert outcome(run)["weights"] == outcome(expected.output)["weights"]


def test_other_files_than_those_that_moved_are_refused_by_name(moved: TrainOptions, tmp_path: Path) -> None:
    new = tmp_path / "elsewhere"
    paths = {"model": new / "base", "data": new / "rows.jsonl", "evaluation": new / "evaluation.jsonl"}
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "the cat sat"}) + "\n")
    save_file({key: value + 1 for key, value in load_file(new / "base" / "model.safetensors").items()}, tmp_path / "changed")
    shutil.copytree(new / "base", tmp_path / "other")
    shutil.copy(tmp_path / "changed", tmp_path / "other" / "model.safetensors")
    before = (moved.output / "options.json").read_bytes()
    for option, path in (("data", "other.jsonl"), ("evaluation", "other.jsonl"), ("model", "other")):
        given = {**paths, option: tmp_path / path}
        line = refusal("train", "--resume", moved.output, *[part for name in given for part in (f"--{name}", given[name])])
        assert ("--model: found" if option == "model" else f"zo2: --{option}: found {tmp_path / path}, ") in line
    assert (moved.output / "options.json").read_bytes() == before


def test_a_run_killed_before_its_first_record_says_how_to_go_on(options: TrainOptions, tmp_path: Path) -> None:
    run, base = options.output, Path(options.model)
    interrupt_after(options, 1)
    (run / "journal.jsonl").unlink()
    (run / "metrics.jsonl").unlink()
    for command in (["export", "--run", run, "--output", tmp_path / "new"], ["report", run, "--output", tmp_path / "new"]):
        assert f"What to do: continue it with zo2 train --resume {run}" in refusal(*command)
    shutil.copytree(base, tmp_path / "copy")
    line = refusal("train", "--resume", run, "--model", tmp_path / "copy")
    assert f"of a run that took no step, so that no fingerprint tells whether it is the run's own; expected {base}" in line
    assert f"leave it out, or remove {run}" in line
    (run / "options.json").rename(run / ".options.json.partial")
    for path in run.iterdir():
        if path.name not in ("lock", ".options.json.partial"):
            path.unlink()
    assert "give the command that began the run again" in refusal("train", "--resume", run)


def test_a_run_that_another_process_has_begun_meanwhile_is_left_alone(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun_and_ended(lock: Any) -> Any:
        options.output.mkdir(exist_ok=True)
        (options.output / "options.json").write_text("another's")
        return real(lock)

    real = run_directory.acquire
    monkeypatch.setattr(run_directory, "acquire", begun_and_ended)
    with pytest.raises(OutputError, match="a run that has already started"):
        Trainer(options, quiet=True)
    assert (options.output / "options.json").read_text() == "another's"


def test_a_run_killed_while_it_was_lengthened_can_be_lengthened(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, optimization=Optimization(lr=1e-2))
    finish(options)

    def killed(_: RunDirectory) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "_write_record", killed)  # the former model has its new name by then
        with pytest.raises(KeyboardInterrupt):
            Trainer(RunDirectory.options(options.output).with_steps(STEPS + 1), resume=True, quiet=True)
    assert run_here("train", "--resume", options.output).status == 0
    assert (options.output / "model").is_dir()
    assert (options.output / f"model-{STEPS}").is_dir()
    ended = run_here("train", "--resume", options.output, "--steps", STEPS + 1)
    assert ended.status == 0, ended
    assert (options.output / f"model-{STEPS}-2").is_dir()
    assert run_here("export", "--run", options.output, "--output", options.output.parent / "exported").status == 0
    ours, theirs = (place / "model.safetensors" for place in (options.output / "model", options.output.parent / "exported"))
    assert ours.read_bytes() == theirs.read_bytes()
