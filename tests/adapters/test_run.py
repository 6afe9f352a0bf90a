"""A run's directory: going on as if nothing had happened, and what is refused."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from command_lines import ROWS, done, make_place, refusal, run_here, write_rows
from models import WORDS, make_batch, save_tokenizer
from runs import STEPS, data_sha256, finish, interrupt_after, outcome, resumable_run, small_run
from safetensors.torch import load_file, save_file

from zo2adapters import open_checkpoint
from zo2adapters.tasks import row_options, row_source
from zo2adapters.trainers import checked_json, run_directory
from zo2adapters.trainers.methods import method_of
from zo2adapters.trainers.optimization import Decay, Optimization
from zo2adapters.trainers.options import Batching, RunModelOptions, Storage, TrainOptions
from zo2adapters.trainers.process import device_kinds
from zo2adapters.trainers.run_directory import HeldRun, RunDirectory, provenance
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import QUIET, open_run
from zo2core import (
    Engine,
    EngineOptions,
    Journal,
    MeZOSGD,
    WriteBackPolicy,
    ZerothOrder,
    ZO2Error,
    branch_journal,
)
from zo2core.errors import DataError, JournalError, OptionError, OutputError
from zo2core.io.durable import open_regular, to_line
from zo2core.journal.journal import copy_journal
from zo2core.ranges import OptimizerName

SHORT_BATCH = {"input_ids": torch.tensor([[3, 4, 6]]), "labels": torch.tensor([[3, 4, 6]])}


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return resumable_run(tmp_path)


def test_an_interrupted_run_is_resumed_and_exported_at_any_past_step(
    options: TrainOptions, tmp_path: Path
) -> None:
    interrupt_after(options, 4)
    run, weights = options.output, "model.safetensors"
    done("export", "--run", run, "--at", "2", "--output", tmp_path / "two")
    done("train", "--resume", run)
    printed = done("journal", run, "--last", "2").out
    method, *identity = printed.partition(f"\n{STEPS} steps")[0].splitlines()
    assert re.fullmatch(
        r"method +zeroth-order steps, [a-z-]+, lr [0-9.e-]+, zo_eps 0.001, .*", method
    )
    told = dict(re.split(r" {2,}", line, maxsplit=1) for line in identity)
    header = Journal(run / "journal.jsonl").header
    assert header is not None
    assert told["base fingerprint"] == header["base"]
    assert told["data sha256"] == data_sha256(options.data)
    assert (told["seed"], told["batch size"]) == (
        str(options.seed),
        str(options.batching.batch_size),
    )
    assert "{" not in printed
    assert printed.splitlines()[-1].split()[0] == str(STEPS - 1)
    shutil.rmtree(run)
    interrupt_after(options, 2)
    done("export", "--run", run, "--output", tmp_path / "two again")
    assert (tmp_path / "two" / weights).read_bytes() == (
        tmp_path / "two again" / weights
    ).read_bytes()


def test_names_are_durable_before_anything_is_built_on_them(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every directory made and file put in place is followed at once by a sync of the directory
    that its name is in.
    """
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
        with open_run(RunStart(options), display=QUIET) as trainer:
            trainer.engine.step(SHORT_BATCH)
        with open_run(RunStart(options, resumes=True), display=QUIET) as trainer:
            trainer.directory.open_metrics(trainer.engine.journal).close()
    assert not names
    assert made >= {"run", "deep", "options.json", "metrics.jsonl", "scratch.jsonl"}


@pytest.mark.few(1)
@pytest.mark.parametrize("change", ["a word's number", "the padding", "the end of a row"])
def test_another_tokenizer_is_refused_with_the_difference(
    options: TrainOptions, change: str
) -> None:
    interrupt_after(options, 1)
    base, before = (
        Path(options.model),
        {path: path.read_bytes() for path in options.output.iterdir()},
    )
    words = [*WORDS[:8], WORDS[9], WORDS[8], WORDS[10]] if change == "a word's number" else WORDS
    save_tokenizer(base, words, pad="<unk>" if change == "the padding" else "<pad>")
    if change == "the end of a row":
        save_tokenizer(base, eos="<unk>")
    with pytest.raises(DataError, match="tokenizer of") as info:
        open_run(RunStart(options, resumes=True), display=QUIET)
    said = {
        "a word's number": "data sha256",
        "the padding": "padding 0",
        "the end of a row": "evaluation sha256",
    }
    assert said[change] in info.value.expected
    assert ("padding" in info.value.found) == (change == "the padding")
    assert {path: path.read_bytes() for path in options.output.iterdir()} == before, (
        "nothing was changed"
    )
    save_tokenizer(base)
    finish(options, resume=True)


def test_another_base_other_data_or_options_are_refused_with_the_difference(
    options: TrainOptions,
) -> None:
    interrupt_after(options, 1)
    other = replace(options, optimization=Optimization(method="zeroth-order", lr=1e-2, zo_eps=0.5))
    with pytest.raises(JournalError, match=r"estimator\.zo_eps 0\.001.*estimator\.zo_eps 0\.5"):
        open_run(RunStart(other, resumes=True), display=QUIET)
    with (
        open_run(RunStart(options, resumes=True), display=QUIET),
        pytest.raises(OutputError, match="another process"),
    ):
        open_run(RunStart(options, resumes=True), display=QUIET)
    rows = options.data.read_text()
    options.data.write_text(rows + '{"text": "the dog"}\n')
    with pytest.raises(
        DataError,
        match=f"^data: found {options.data}, which has the sha256 .*began with: {options.data}, ",
    ):
        open_run(RunStart(options, resumes=True), display=QUIET)
    options.data.write_text(rows)
    weights = load_file(Path(options.model) / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, Path(options.model) / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JournalError, match="base"):
        open_run(RunStart(options, resumes=True), display=QUIET)


def test_saved_options_that_have_lost_one_are_refused(options: TrainOptions) -> None:
    interrupt_after(options, 1)
    path, lost = (
        options.output / "options.json",
        ["checksums", "tokens", "options.steps", "options.seed"],
    )
    written = path.read_text()
    for place in [*lost, "options.optimization.warmup_steps", "options.storage.memory"]:
        record = group = json.loads(written)
        *groups, name = place.split(".")
        for key in groups:
            group = group[key]
        del group[name]
        path.write_text(json.dumps(record))
        with pytest.raises(OptionError, match=r"options\.json"):
            open_run(
                RunStart(
                    RunDirectory(options.output).options() if groups else options, resumes=True
                ),
                display=QUIET,
            )


def test_a_killed_exports_remains_are_cleared_and_a_refused_run_leaves_nothing(
    options: TrainOptions,
) -> None:
    with pytest.raises(Exception, match="smallest plan"):
        open_run(RunStart(replace(options, storage=Storage(memory="1MB"))), display=QUIET)
    assert not options.output.exists()
    finish(options)
    (options.output / ".model.partial-abc").mkdir()  # killed between the renaming and the end
    finish(options, resume=True)
    assert not (options.output / ".model.partial-abc").exists()


def with_entry(path: Path) -> None:
    """Edit a file of JSON, which stays one."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": 5}))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", with_entry),
        ("generation_config.json", with_entry),
        ("generation_config.json", Path.unlink),
        ("tokenizer_config.json", lambda path: path.write_text(path.read_text() + " ")),
        ("chat_template.jinja", lambda path: path.write_text("new")),
    ],
)
def test_a_base_whose_small_files_changed_after_a_run_is_refused_by_name(
    name: str, change: Callable[[Path], object], options: TrainOptions
) -> None:
    finish(options)
    run, path, out = options.output, Path(options.model) / name, options.output.parent / "out"
    before = sorted(options.output.parent.rglob("*"))
    kept = path.read_bytes() if path.exists() else None
    change(path)
    for command in (
        ("train", "--resume", run, "--steps", 6),
        ("train", "--resume", run, "--from-step", 2, "--output", out),
        ("evaluate", "--run", run, "--data", options.data),
        ("export", "--run", run, "--output", out),
        ("generate", "--run", run, "--prompt", "the", "--max-new-tokens", 1),
    ):
        assert f"{path}: found " in (line := refusal(*command)), line
        assert "as when the run began. What to do: restore the file" in line
    path.unlink(missing_ok=True)
    if kept is not None:
        path.write_bytes(kept)
    assert sorted(options.output.parent.rglob("*")) == before
    done("export", "--run", run, "--output", out)


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


def test_a_run_whose_files_moved_goes_on_with_their_new_paths(
    moved: TrainOptions, tmp_path: Path
) -> None:
    new = tmp_path / "elsewhere"
    paths = [
        "--model",
        new / "base",
        "--data",
        new / "rows.jsonl",
        "--evaluation",
        new / "evaluation.jsonl",
    ]
    assert "--data" in refusal("train", "--resume", moved.output, *paths[:2]).replace(
        str(moved.data), "--data"
    )
    branched = run_here(
        "train", "--resume", moved.output, *paths, "--from-step", 2, "--output", tmp_path / "branch"
    )
    ended = run_here("train", "--resume", moved.output, *paths)
    assert (branched.status, ended.status) == (0, 0), (branched, ended)
    record = json.loads((moved.output / "options.json").read_text())
    assert record["options"]["data"] == str(new / "rows.jsonl")
    assert set(record["checksums"]) == {str(new / "rows.jsonl"), str(new / "evaluation.jsonl")}
    # the new paths were written down
    assert run_here("train", "--resume", moved.output).status == 0
    assert run_here("export", "--run", moved.output, "--output", tmp_path / "exported").status == 0
    for name in ("base", "rows.jsonl"):
        (new / name).rename(tmp_path / name)
    expected = replace(moved, output=tmp_path / "undisturbed", evaluation=tmp_path / "rows.jsonl")
    finish(expected)
    for run in (moved.output, tmp_path / "branch"):
        assert outcome(run)["weights"] == outcome(expected.output)["weights"]


def test_other_files_than_those_that_moved_are_refused_by_name(
    moved: TrainOptions, tmp_path: Path
) -> None:
    new = tmp_path / "elsewhere"
    paths = {
        "model": new / "base",
        "data": new / "rows.jsonl",
        "evaluation": new / "evaluation.jsonl",
    }
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "the cat sat"}) + "\n")
    save_file(
        {key: value + 1 for key, value in load_file(new / "base" / "model.safetensors").items()},
        tmp_path / "changed",
    )
    shutil.copytree(new / "base", tmp_path / "other")
    shutil.copy(tmp_path / "changed", tmp_path / "other" / "model.safetensors")
    before = (moved.output / "options.json").read_bytes()
    for option, path in (
        ("data", "other.jsonl"),
        ("evaluation", "other.jsonl"),
        ("model", "other"),
    ):
        given = {**paths, option: tmp_path / path}
        line = refusal(
            "train",
            "--resume",
            moved.output,
            *[part for name in given for part in (f"--{name}", given[name])],
        )
        assert (
            "--model: found" if option == "model" else f"zo2: --{option}: found {tmp_path / path}, "
        ) in line
    assert (moved.output / "options.json").read_bytes() == before


def test_a_run_killed_before_its_first_record_says_how_to_go_on(
    options: TrainOptions, tmp_path: Path
) -> None:
    run, base = options.output, Path(options.model)
    interrupt_after(options, 1)
    (run / "journal.jsonl").unlink()
    (run / "metrics.jsonl").unlink()
    for command in (
        ["export", "--run", run, "--output", tmp_path / "new"],
        ["report", run, "--output", tmp_path / "new"],
    ):
        assert f"What to do: continue it with zo2 train --resume {run}" in refusal(*command)
    shutil.copytree(base, tmp_path / "copy")
    line = refusal("train", "--resume", run, "--model", tmp_path / "copy")
    assert (
        "of a run that took no step, so that no fingerprint tells whether it is the run's own; "
        f"expected {base}" in line
    )
    assert f"leave it out, or remove {run}" in line
    (run / "options.json").rename(run / ".options.json.partial")
    for path in run.iterdir():
        if path.name not in ("lock", ".options.json.partial"):
            path.unlink()
    assert "give the command that began the run again" in refusal("train", "--resume", run)


def test_a_run_that_another_process_has_begun_is_left(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun_and_ended(lock: Any) -> Any:
        options.output.mkdir(exist_ok=True)
        (options.output / "options.json").write_text("another's")
        return real(lock)

    real = run_directory.acquire
    monkeypatch.setattr(run_directory, "acquire", begun_and_ended)
    with pytest.raises(OutputError, match="a run that has already started"):
        open_run(RunStart(options), display=QUIET)
    assert (options.output / "options.json").read_text() == "another's"


def test_a_run_killed_as_it_was_lengthened_goes_on(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(options, optimization=Optimization(method="zeroth-order", lr=1e-2))
    finish(options)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # the former model has its new name by then
        patch.setattr(HeldRun, "_write_record", killed)
        with pytest.raises(KeyboardInterrupt):
            open_run(
                RunStart(
                    RunDirectory(options.output).options().with_steps(STEPS + 1), resumes=True
                ),
                display=QUIET,
            )
    assert run_here("train", "--resume", options.output).status == 0
    assert (options.output / "model").is_dir()
    assert (options.output / f"model-{STEPS}").is_dir()
    ended = run_here("train", "--resume", options.output, "--steps", STEPS + 1)
    assert ended.status == 0, ended
    assert (options.output / f"model-{STEPS}-2").is_dir()
    assert (
        run_here(
            "export", "--run", options.output, "--output", options.output.parent / "exported"
        ).status
        == 0
    )
    ours, theirs = (
        place / "model.safetensors"
        for place in (options.output / "model", options.output.parent / "exported")
    )
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "labels", [[], ["--prompt-template", "{prompt} it is", "--label-column", "completion"]]
)
def test_a_run_opens_its_data_once(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch, labels: list[str]
) -> None:
    opened: list[str] = []

    def noted(path: Any) -> Any:
        opened.append(os.fspath(path))
        return open_regular(path)

    rows = [
        {"prompt": f"the {word}", "completion": label}
        for word in WORDS[5:9]
        for label in ("cat", "dog")
    ]
    data = options.data.with_name("labelled.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The command has looked at the first row before.
    monkeypatch.setattr(row_options, "first_row", lambda path: None)
    monkeypatch.setattr(row_source, "open_regular", noted)
    given = (
        "--model",
        options.model,
        "--data",
        data,
        "--output",
        options.output,
        "--steps",
        2,
        "--batch-size",
        2,
    )
    assert run_here("train", "--method", "zeroth-order", *given, *labels).status == 0
    assert opened.count(str(data)) == 1


def test_a_run_that_goes_on_reads_its_journal_once(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(options, 2)
    opened: list[Path] = []
    open_file = Journal._open

    def noted(journal: Journal, path: Path) -> Any:
        opened.append(path)
        return open_file(journal, path)

    monkeypatch.setattr(Journal, "_open", noted)
    with open_run(RunStart(options, resumes=True), display=QUIET) as trainer:
        assert trainer.engine.version == 2
        assert opened == [options.output / "journal.jsonl"]


def test_an_earlier_step_is_opened_by_the_first_worker_alone(options: TrainOptions) -> None:
    workers: Any = SimpleNamespace(rank=0, size=2)
    method, running = (
        method_of(RunStart(options, workers=workers)),
        SimpleNamespace(journal=Journal(), activation_bytes=1 << 20),
    )
    with patch("zo2adapters.trainers.methods.Engine") as opened:
        method.at_step(cast("Any", running), cast("Any", None), 1 << 20, 0)
        assert opened.call_args.kwargs["options"].workers is None, (
            "the others have ended, and would be waited for"
        )
        method.open(cast("Any", None), 1 << 20)
    assert opened.call_args.kwargs["options"].workers is workers


EVALUATED_STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated after every step, without its model.

    Its last evaluation was not the best one.
    """
    place = tmp_path_factory.mktemp("best")
    options = small_run(
        place,
        evaluation=place / "rows.jsonl",
        evaluate_every=1,
        keep_best=True,
        steps=EVALUATED_STEPS,
        optimization=Optimization(method="zeroth-order", lr=3e-2),
    )
    finish(options)
    assert best_of(losses(options.output)) != EVALUATED_STEPS
    (options.output / "model").rename(place / "best")
    return options.output


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["evaluation_loss"] for row in rows if "evaluation_loss" in row}


def best_of(values: dict[int, float]) -> int:
    return min(values, key=lambda step: (values[step], step))


def with_another_best(rows: str) -> str:
    *others, last = rows.splitlines()
    return "\n".join([*others, json.dumps({**json.loads(last), "evaluation_loss": 0.5}), ""])


@pytest.mark.parametrize("damage", [None, with_another_best])
def test_damaged_metrics_do_not_change_the_export(
    finished: Path, tmp_path: Path, damage: Callable[[str], str] | None
) -> None:
    run, name = Path(shutil.copytree(finished, tmp_path / "run")), "model.safetensors"
    rows = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").unlink()
    if damage is not None:
        (run / "metrics.jsonl").write_text(damage(rows))
    done("train", "--resume", run)
    assert (run / "model" / name).read_bytes() == (finished.parent / "best" / name).read_bytes()
    assert losses(run) == losses(finished)


@pytest.mark.parametrize("dropped", [0, 2, EVALUATED_STEPS])
def test_an_evaluation_that_a_journal_has_lost_is_refused_by_what_the_metrics_know(
    dropped: int, finished: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    path, metrics = run / "journal.jsonl", run / "metrics.jsonl"
    start = b'{"evaluation":{"step":%d,' % dropped
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(start)]
    assert len(kept) == len(lines) - 1
    path.write_bytes(b"".join(kept))
    told = f"found no evaluation of step {dropped}; expected its result, since metrics.jsonl has it"
    assert told in refusal("export", "--run", run, "--output", tmp_path / "out")
    assert told in refusal("train", "--resume", run)
    metrics.unlink()
    done("export", "--run", run, "--output", tmp_path / "out")


def test_a_damaged_step_number_of_an_evaluation_is_no_lost_one(
    finished: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    path = run / "journal.jsonl"
    last = b'{"evaluation":{"step":%d,' % EVALUATED_STEPS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if not line.startswith(last)))
    metrics = run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if "loss" in row or row["step"] != EVALUATED_STEPS]
    evaluated = next(row for row in rows if "loss" not in row)
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {**evaluated, "step": 4}])
    metrics.write_text(text)
    done("export", "--run", run, "--output", tmp_path / "out")


def test_commands_take_the_best_step_unless_another_is_asked_for(
    finished: Path, tmp_path: Path
) -> None:
    best, weights = (
        best_of(losses(finished)),
        (finished.parent / "best" / "model.safetensors").read_bytes(),
    )
    said = (
        f"{finished}: step {best} (best of {EVALUATED_STEPS + 1} evaluations); --at N takes "
        "another one\n"
    )
    for command in ("export", "merge"):
        ended = run_here(command, "--run", finished, "--output", tmp_path / command)
        assert (ended.status, said in ended.err) == (0, True), ended
        assert f"after {best} " in ended.out
        assert (tmp_path / command / "model.safetensors").read_bytes() == weights
        assert f" after {best} zeroth-order steps" in (tmp_path / command / "README.md").read_text()
    evaluated = run_here("evaluate", "--run", finished)
    assert said in evaluated.err
    assert evaluated.out.splitlines()[0].split() == ["base", "step", str(best)]
    assert f"{losses(finished)[best]:.6f}" in evaluated.out
    generated = run_here(
        "generate", "--run", finished, "--prompt", "the cat", "--max-new-tokens", 2
    )
    assert said in generated.err
    asked = run_here(
        "export", "--run", finished, "--at", EVALUATED_STEPS, "--output", tmp_path / "last"
    )
    assert "best of" not in asked.err
    assert (tmp_path / "last" / "model.safetensors").read_bytes() != weights


def test_results_are_read_back_as_they_were_noted_and_are_no_update(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.begin({"noise": "z"})
    checksum = journal.checksum
    journal.note_evaluation(0, {"loss": 0.1, "accuracy": math.nan})
    journal.note_evaluation(0, {"loss": 1 / 3, "accuracy": math.nan})
    journal.close()
    again = Journal(path)
    assert again.evaluations.keys() == {0}
    assert again.evaluations[0]["loss"] == 1 / 3
    assert math.isnan(again.evaluations[0]["accuracy"])
    assert (again.checksum, list(again.updates)) == (checksum, [])
    written = path.read_bytes()
    others: list[object] = [
        {"step": 1, "loss": 1.0},
        {"loss": 1.0},
        {"step": 0, "loss": "1"},
        {"step": True, "loss": 1.0},
    ]
    for record in [*others, [0, 1.0]]:  # that no run has written
        path.write_bytes(written + to_line({"evaluation": record}))
        with pytest.raises(JournalError, match="line 4: found"):
            Journal(path)


@pytest.fixture
def told_options(tmp_path: Path) -> TrainOptions:
    place = make_place(tmp_path)
    return TrainOptions(
        model=str(place / "base"),
        data=place / "rows.jsonl",
        output=place / "run",
        steps=2,
        batching=Batching(batch_size=3),
        optimization=Optimization(method="zeroth-order", lr=1e-3),
    )


def told(told_options: TrainOptions, tokens: int = 7, length: int = 12) -> dict[str, object]:
    rows: dict[str, object] = {"padding": 0, "data tokens": tokens}
    devices = device_kinds(told_options.storage.device, None)
    data = SimpleNamespace(sha256=data_sha256(told_options.data))
    given: Any = {
        "options": told_options,
        "directory": Path(told_options.model),
        "model": open_checkpoint(told_options.model),
        "data": data,
        "tokens": rows,
    }
    facts: Any = SimpleNamespace(**given, length=length)
    return provenance(facts, devices=devices, task={})


def test_whatever_shapes_the_result_is_told_and_nothing_else(told_options: TrainOptions) -> None:
    before = told(told_options)
    assert json.loads(json.dumps(before)) == before
    batching = Batching(batch_size=3)
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"model_options": RunModelOptions(dtype="bfloat16")},
        {"batching": Batching(batch_size=4)},
        {"batching": replace(batching, micro_batch_size=2)},
        {"batching": replace(batching, loss_chunk=2)},
        {"optimization": Optimization(method="zeroth-order", lr=1e-3, decay=Decay.LINEAR)},
        {"storage": Storage(device="cuda")},
        {"evaluation": told_options.data, "evaluate_every": 1},
    ]
    others = [told(told_options, tokens=8), told(told_options, length=11)]
    others += [told(replace(told_options, **change)) for change in changes]
    write_rows(told_options.data, ROWS[1:])
    others.append(told(told_options))
    write_rows(told_options.data, ROWS)
    assert told(told_options) == before
    storage = Storage(memory="4GiB", write_back_every=3, snapshot_every=5, activation_memory="1MB")
    free: list[dict[str, Any]] = [
        {"storage": storage},
        {"keep_best": True, "report_to": "wandb", "samples": 2},
    ]
    assert [
        told(replace(told_options, **change)) for change in [*free, {"output": Path("elsewhere")}]
    ] == [before] * 3
    assert told(told_options.with_steps(5)) == before
    tokenizer = Path(told_options.model) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    others.append(told(told_options))
    with_entry(tokenizer.with_name("generation_config.json"))
    others.append(told(told_options))
    assert others[-1] != others[-2]
    assert all(other != before for other in others)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("adamw", "lr", 2e-3),
        ("adamw", "weight_decay", 0.1),
        ("adamw", "betas", [0.8, 0.9]),
        ("badam", "switch_every", 2),
        ("sgd", "lr", 2e-3),
        (None, "lr", 2e-3),
        (None, "evaluate_every", 2),
        *((None, name, 2) for name in ("batch_size", "micro_batch_size", "sequence_length")),
    ],
)
def test_what_decides_the_weights_and_was_edited_is_refused(
    told_options: TrainOptions, method: OptimizerName | None, name: str, value: object
) -> None:
    evaluated = replace(
        told_options, evaluation=told_options.data, evaluate_every=1, keep_best=True
    )
    optimization = Optimization(method=method or "zeroth-order", lr=1e-3)
    finish(replace(evaluated, optimization=optimization))
    path = told_options.output / "options.json"
    record = json.loads(path.read_text())
    groups = [
        record["options"],
        *(record["options"][part] for part in ("optimization", "batching")),
    ]
    [group] = [group for group in groups if name in group]
    group[name] = value
    path.write_text(json.dumps(record))
    with pytest.raises(OptionError, match=r"options\.json: found .*, which no run saved"):
        RunDirectory(told_options.output).options()
    del record["sha256"]
    path.write_text(json.dumps(record))
    with pytest.raises(OptionError, match=r"options\.json: found .*, which no run saved"):
        RunDirectory(told_options.output).options()
    path.write_text(checked_json.to_text(record))  # as by somebody who knows the checksum
    told = {
        "evaluate_every": "evaluated every",
        "batch_size": "batch size",
        "micro_batch_size": "micro",
    }.get(name, name)
    with pytest.raises(
        ZO2Error if name == "sequence_length" else JournalError, match=told.replace("_", ".")
    ):
        open_run(
            RunStart(RunDirectory(told_options.output).options().with_steps(3), resumes=True),
            display=QUIET,
        )


def test_the_choice_of_the_best_step_that_was_edited_is_named(told_options: TrainOptions) -> None:
    options = replace(told_options, evaluation=told_options.data, keep_best=True)
    finish(options)
    path = options.output / "options.json"
    path.write_text(path.read_text().replace('"keep_best": true', '"keep_best": false'))
    for read in (RunDirectory.options, RunDirectory.saved):
        with pytest.raises(OptionError) as refused:
            read(RunDirectory(options.output))
        assert refused.value.found.startswith("keep_best: false, which no run saved")
        assert refused.value.expected == "keep_best: true"
    with pytest.raises(OptionError, match="keep_best: false, which no run saved"):
        open_run(RunStart(replace(options, keep_best=False), resumes=True), display=QUIET)


# Branches, and how a run that diverged goes on from its best step


BATCH = make_batch(40, [9, 5])


@pytest.fixture
def parent(base: Path, tmp_path: Path) -> Path:
    with Engine(
        open_checkpoint(base),
        ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3)),
        journal=tmp_path / "parent.jsonl",
    ) as engine:
        for _ in range(5):
            engine.step(BATCH)
    return tmp_path / "parent.jsonl"


@pytest.mark.few(3)
@pytest.mark.parametrize("step", range(6))
def test_a_branch_has_its_steps_weights_and_takes_another_estimator(
    step: int, base: Path, parent: Path, tmp_path: Path
) -> None:
    slower, path = MeZOSGD(lr=1e-3, zo_eps=1e-3), tmp_path / "new" / "branch.jsonl"
    branch_journal(parent, path, step, estimator=slower.options)
    with Engine(open_checkpoint(base), journal=Journal(parent).until(step)) as then:
        expected = {name: tensor.clone() for name, tensor in then.parameters_now()}
    write_back = WriteBackPolicy(directory=path.parent, every=1)
    with Engine(
        open_checkpoint(base),
        ZerothOrder(slower),
        journal=path,
        options=EngineOptions(write_back=write_back),
    ) as engine:
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
    assert branch.chain(3) != begun.chain(3), (
        "what was written back for the one does not count for the other"
    )
    told = {"step": 4, "checksum": f"{begun.chain(4):08x}", "estimator": begun.header["estimator"]}
    assert branch.header == {
        **begun.header,
        "estimator": slower,
        "provenance": {"data": "again"},
        "branched": [told],
    }
    then = {"step": 3, "checksum": f"{branch.chain(3):08x}", "estimator": slower}
    assert branch_of_it.header == {**branch.header, "branched": [told, then]}


def test_what_cannot_be_branched_is_refused_and_nothing_is_written(
    parent: Path, tmp_path: Path
) -> None:
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
def test_branches_appear_whole_or_not(
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


def test_a_branch_that_is_told_nothing_anew_ends_as_its_parent(
    options: TrainOptions, tmp_path: Path
) -> None:
    finish(options)
    expected = outcome(options.output)
    for step in (0, 3, STEPS):
        done(
            "train",
            "--resume",
            options.output,
            "--from-step",
            step,
            "--output",
            tmp_path / f"{step}",
        )
        branch = outcome(tmp_path / f"{step}")
        assert branch["weights"] == expected["weights"]
        ours, theirs = (
            Journal(directory / "journal.jsonl")
            for directory in (tmp_path / f"{step}", options.output)
        )
        assert ours.updates == theirs.updates
    assert outcome(options.output) == expected


def test_a_branch_takes_optimisation_options_anew_and_can_itself_be_resumed(
    options: TrainOptions, tmp_path: Path
) -> None:
    finish(options)
    new = tmp_path / "new"
    anew = [
        "--lr",
        1e-3,
        "--decay",
        "constant",
        "--warmup-steps",
        0,
        "--steps",
        9,
        "--clip-grad",
        "0.5",
    ]
    done("train", "--resume", options.output, "--from-step", 2, "--output", new, *anew)
    then, now = (Journal(run / "journal.jsonl") for run in (options.output, new))
    assert now.updates[:2] == then.updates[:2]
    assert [update.lr for update in now.updates[2:]] == [1e-3] * 7
    assert now.header is not None
    assert [entry["step"] for entry in now.header["branched"]] == [2]
    told = RunDirectory(new).options()
    assert (told.steps, told.schedule_steps, told.optimization.clip_grad) == (9, None, 0.5)
    expected = outcome(new)
    # Killed on the way, and resumed.
    shutil.rmtree(new / "model")
    lines = (new / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (new / "journal.jsonl").write_bytes(b"".join(lines[:-3]))
    for name in ("metrics.jsonl", "scratch.bin", "scratch.jsonl"):
        (new / name).unlink(missing_ok=True)
    done("train", "--resume", new)
    resumed = outcome(new)
    assert (resumed["journal"], resumed["weights"]) == (expected["journal"], expected["weights"])


def test_a_branch_of_a_run_without_a_guard_may_have_one(
    options: TrainOptions, tmp_path: Path
) -> None:
    plain = replace(options, optimization=replace(options.optimization, guard=False))
    interrupt_after(plain, 3)
    done(
        "train",
        "--resume",
        options.output,
        "--from-step",
        2,
        "--output",
        tmp_path / "guarded",
        "--guard",
    )
    done("train", "--resume", options.output)
    begun, branch = (
        Journal(path / "journal.jsonl").header for path in (options.output, tmp_path / "guarded")
    )
    assert begun is not None
    assert branch is not None
    assert branch["estimator"] == {
        **begun["estimator"],
        "guard": {"window": 50, "factor": 5.0, "refusals": 5},
    }


REFUSED = {  # options of a branch at step 2, the last of which count
    f"--from-step {STEPS + 1}": (
        f"--from-step: found 7; expected at most {STEPS}, the steps of the run"
    ),
    "--from-step -1": "--from-step: found -1",
    "--from-step 4 --steps 3": "--steps: found 3; expected at least 4",
    "--output {run}": "found a run that has already started",
    "--output {new}/below --memory 1MiB": "--memory",
    "--batch-size 2": "--batch-size: found 2; expected 3",
    "--seed 4": "--seed: found 4; expected 3",
    "--noise mezo": "--noise: found mezo",
    "--method mezo": "--method: found mezo",
    "--clip-median 0.5": "--clip-median: found 0.5",
    "--memory 1MiB": "--memory",
}


def test_what_a_branch_cannot_be_told_is_refused(options: TrainOptions, tmp_path: Path) -> None:
    finish(options)
    branch = ("train", "--resume", options.output, "--from-step", 2)
    assert "--output: found nothing; expected a directory for the new run" in refusal(*branch)
    for more, expected in REFUSED.items():
        given = (
            "--output",
            tmp_path / "new",
            *more.format(new=tmp_path / "new", run=options.output).split(),
        )
        assert expected in refusal(*branch, *given)
        assert not (tmp_path / "new").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("lr", [0.01, 1.0])
@pytest.mark.filterwarnings("ignore::zo2core.errors.ZO2Warning")
def test_a_run_whose_lr_is_far_too_large_stops_and_goes_on_from_its_best(
    lr: float, options: TrainOptions, tmp_path: Path
) -> None:
    """Each loss is finite; at the end it is that of a coin, below where the run began."""
    arguments = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--output",
        options.output,
    ]
    said = refusal(*arguments, "--steps", 200, "--batch-size", 3, "--lr", lr, "--seed", 3)
    journal = Journal(options.output / "journal.jsonl")
    losses = [update.losses[0] for update in journal.updates]
    assert 0 < len(losses) <= 50
    assert all(math.isfinite(loss) for loss in losses)
    named = f"--model {options.model} --data {options.data} --output TRIALS"
    assert f"zo2 tune --method zeroth-order {named}" in said
    command = said.partition("the best so far: zo2 ")[2].partition(" --output NEW")[0].split()
    assert command[:4] == ["train", "--resume", str(options.output), "--from-step"]
    step = int(command[4])
    assert losses[step] <= losses[0]
    done(*command, "--output", tmp_path / "new", "--lr", 1e-3, "--steps", 60)
    branch = Journal(tmp_path / "new" / "journal.jsonl").updates
    assert len(branch) == 60
    assert branch[:step] == journal.updates[:step]
    assert max(update.losses[0] for update in branch[step:]) < 2 * losses[0]
    again = refusal("train", "--resume", options.output)  # a resumed run ends as this one did
    assert said.splitlines()[-1] == again.splitlines()[-1]
    assert len(Journal(options.output / "journal.jsonl").updates) == len(losses)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "precision", "warns"),
    [("bfloat16", "exact", True), ("bfloat16", "mixed", False), ("float32", "exact", False)],
)
def test_rounded_away_steps_are_told_once(
    dtype: str, precision: str, warns: bool, options: TrainOptions
) -> None:
    arguments = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--output",
        options.output,
        "--dtype",
        dtype,
    ]
    said = done(
        *arguments, "--precision", precision, "--steps", 103, "--batch-size", 3, "--lr", 1e-6
    ).err
    assert said.count("others rounded back to their old values") == warns


@pytest.mark.parametrize(
    ("chosen", "remedy"),
    [
        ("exact", "(--precision mixed, or --dtype float32)"),
        ("mixed --transfer-dtype float16-back", "(--transfer-dtype float16)"),
    ],
)
def test_what_is_proposed_against_rounding_is_what_the_run_lacks(
    chosen: str, remedy: str, options: TrainOptions
) -> None:
    """A run whose weights come back from a device in 16 bits is in mixed precision already."""
    arguments = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--output",
        options.output,
    ]
    arguments += [
        "--dtype",
        "bfloat16",
        "--steps",
        1,
        "--batch-size",
        3,
        "--lr",
        1e-9,
        "--precision",
        *chosen.split(),
    ]
    assert f"keep them in float32 {remedy}" in done(*arguments).err


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
    with pytest.raises(JournalError, match="found no journal"):
        copy_journal(Journal(), tmp_path / "empty.jsonl")
    with pytest.raises(OutputError, match="nowhere"):
        copy_journal(journal, tmp_path / "copy.jsonl" / "nowhere")
