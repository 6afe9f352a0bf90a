"""Whatever is asked for is heeded or refused, and whatever goes wrong is one typed line."""

import errno
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import (
    Apart,
    Ended,
    assert_typed,
    environment,
    make_place,
    refusal,
    run_here,
    write_rows,
)
from safetensors.torch import load_file, save_file

from zo2adapters.cli import COMMANDS
from zo2adapters.commands.options import as_zo2_error
from zo2adapters.trainers import checked_json
from zo2core import Engine, Journal
from zo2core.errors import (
    DivergenceError,
    MemoryBudgetError,
    MissingPackageError,
    OptionError,
    ZO2Error,
)

HUGE = "9" * 400


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with base, rows and a finished run of six steps."""
    folder = make_place(tmp_path_factory.mktemp("refusals"))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    ended = run_here(*train(folder), "--steps", 6, "--lr", 1e-2)
    assert ended.status == 0, ended
    return folder


@pytest.fixture
def place(prepared: Path, tmp_path: Path) -> Path:
    """A folder of one's own with base and rows, whose run is not there yet."""
    for name in ("base", "rows.jsonl", "choices.jsonl"):
        (shutil.copytree if (prepared / name).is_dir() else shutil.copy)(
            prepared / name, tmp_path / name
        )
    return tmp_path


@pytest.fixture
def run(prepared: Path, place: Path) -> Path:
    shutil.copytree(prepared / "run", place / "run")
    move_options(place / "run", prepared, place)
    return place / "run"


def train(folder: Path, output: str = "run") -> list[object]:
    places = [
        "--model",
        folder / "base",
        "--data",
        folder / "rows.jsonl",
        "--output",
        folder / output,
    ]
    return ["train", "--method", "zeroth-order", *places, "--batch-size", 3]


def move_options(run: Path, before: Path, after: Path) -> None:
    """Let a copied run have its model and its rows elsewhere."""
    path = run / "options.json"
    record = json.loads(path.read_text().replace(str(before), str(after)))
    del record["sha256"]
    path.write_text(checked_json.to_text(record))
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(before), str(after)))


def unfinish(run: Path) -> None:
    """Take the exported model away, so that a resumed run has something to do."""
    shutil.rmtree(run / "model")


def spoil(place: Path, name: str, at: int, value: float) -> None:
    path = place / "base/model.safetensors"
    weights = {key: tensor.clone() for key, tensor in load_file(path).items()}
    weights[name].view(-1)[at] = value
    save_file(weights, path, metadata={"format": "pt"})


def refused_apart(ended: Ended) -> str:
    assert ended.status == 2, ended
    assert_typed(ended)
    return ended.line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "--model", "{base}", "--steps", "0"], "--steps: found 0; expected at least 1"),
        (
            ["verify", "--model", "{base}", "--batch-size", "0"],
            "--batch-size: found 0; expected at least 1",
        ),
        (
            ["verify", "--model", "{base}", "--tokens", "1"],
            "--tokens: found 1; expected at least 2",
        ),
        (
            ["verify", "--model", "{base}", "--tokens", "13"],
            "--tokens: found 13; expected at most 12",
        ),
        (
            ["verify", "--model", "{base}", "--lr", "1e6"],
            "--lr: found 1000000.0; expected at most 1",
        ),
        (
            ["verify", "--model", "{base}", "--seed", HUGE],
            "--seed: found a number of more than 24 digits",
        ),
        (
            ["plan", "--method", "zeroth-order", "--model", "{base}", "--memory", HUGE],
            "--memory: found '9999999999",
        ),
        (
            ["evaluate", "--model", "{base}", "--data", "{rows}", "--at", "3"],
            "--at: found 3; expected none without --run",
        ),
        (
            ["evaluate", "--run", "{run}", "--data", "{rows}", "--at", "-1"],
            "--at: found -1; expected at least 0",
        ),
        (
            ["evaluate", "--run", "{run}", "--data", "{rows}", "--activation-memory", HUGE],
            "--activation-memory: found '99",
        ),
        (
            ["evaluate", "--model", "{base}", "--data", "{rows}", "--trace", "{rows}"],
            "something at this path",
        ),
        (
            ["export", "--run", "{run}", "--at", HUGE, "--output", "{new}"],
            "--at: found a number of more than 24 digits",
        ),
        (
            ["export", "--run", "{run}", "--dtype", "bfloat16", "--output", "{new}"],
            "--dtype: found bfloat16; expected auto",
        ),
        (["export", "--run", "{base}", "--output", "{new}"], "found no readable options.json"),
        (
            ["evaluate", "--model", "{adapter}", "--data", "{rows}"],
            "found an adapter; expected the directory of a whole model",
        ),
        (["evaluate", "--run", "{adapter}"], "What to do: this is an adapter: pass --adapter"),
        (["evaluate", "--run", "{base}"], "What to do: this is a model: pass --model"),
        (
            ["generate", "--model", "{base}", "--prompt", ""],
            "found an empty prompt; expected at least one token",
        ),
        (
            ["generate", "--model", "{base}", "--prompt", "the", "--max-new-tokens", HUGE],
            "--max-new-tokens: found",
        ),
        (
            ["generate", "--model", "{base}", "--prompt", "the", "--top-p", "0.5"],
            "--top-p: found 0.5; expected --temperature",
        ),
        (
            ["generate", "--model", "{base}", "--prompt", "the", "--temperature", "-1"],
            "--temperature: found -1.0",
        ),
        (["export", "{run}", "--output", "{new}"], "did you mean --run {run}"),
        (
            ["export", "{base}", "--output", "{new}"],
            "without an option; expected options of zo2 export",
        ),
        (["init", "--model", "{base}"], "command line: found no --data; expected --data PATH"),
        (
            ["init"],
            "command line: found no --model, no --data; expected --model TEXT and --data PATH",
        ),
        (["merge", "--run", "{run}"], "command line: found no --output; expected --output"),
        (["journal"], "command line: found no RUN_DIRECTORY; expected RUN_DIRECTORY"),
        (["journal", "{run}", "--last", "0"], "--last: found 0; expected at least 1"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_what_cannot_be_heeded_is_refused_by_its_name(
    prepared: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    places = {name: prepared / name for name in ("base", "run", "adapter")}
    places |= {"rows": prepared / "rows.jsonl", "new": tmp_path / "new"}
    assert said.format(**places) in refusal(*(argument.format(**places) for argument in arguments))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "1.5"], "found '1.5' as --steps; expected a whole number"),
        (["--lr", "fast"], "found 'fast' as --lr; expected a number or auto"),
        (["--zo-eps", "small"], "found 'small' as --zo-eps; expected a number"),
        (
            ["--method", "adam"],
            "found 'adam' as --method; expected one of adalomo, adamw, badam, lomo, lora, "
            "lora+lomo, mezo, sgd, zeroth-order; did you mean adamw",
        ),
        (["--steps"], "found no value after --steps; expected a value"),
        (
            ["--lr", "1e6"],
            "--lr: found 1000000.0; expected at most 1: an update moves each weight by",
        ),
        (["--zo-eps", "50"], "--zo-eps: found 50.0; expected at most 1: weights are perturbed"),
        (
            ["--lr", "0.1", "--weight-decay", "11"],
            "--weight-decay: found 11.0; expected at most 10",
        ),
        (
            ["--stepz", "3"],
            "command line: found the unknown option --stepz; expected an option of zo2 train; did "
            "you mean --steps",
        ),
        (["--memory", "8B"], "--memory: found 8 bytes; expected at least"),
        (
            ["--memory", "8"],
            "--memory: found 8, which is 8 bytes; expected a size with its unit; did you mean 8GB",
        ),
        (
            ["--memory", "300MB", "--batch-size", "60000"],
            "with --micro-batch-size, --loss-chunk, --sequence-length",
        ),
        (["--output", "{long}"], "File name too long"),
        (["--data", "{long}"], "File name too long"),
        (["--model", "./{long}"], "File name too long"),
        (["--output", "/dev/null/run"], "Not a directory"),
        (["--trace", "/dev/full"], "/dev/full: found"),
        (["--trace", "{rows}"], "something at this path"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_run_that_is_refused_leaves_nothing(place: Path, arguments: list[str], said: str) -> None:
    before = sorted(place.rglob("*"))
    arguments = [
        argument.format(long="n" * 300, rows=place / "rows.jsonl") for argument in arguments
    ]
    assert said in refusal(*train(place), *arguments)
    assert sorted(place.rglob("*")) == before


def test_an_absurd_learning_rate_and_a_batch_larger_than_the_data_end_with_a_warning(
    place: Path,
) -> None:
    ended = run_here(*train(place), "--steps", 30, "--lr", 1.0, "--no-guard", "--batch-size", 100)
    assert (
        ended.err.count("the data has 9 rows: a batch of 100 contains the same ones more than once")
        == 1
    )
    if ended.status == 0:
        assert "the steps were too large and destroyed the model; zo2 tune" in ended.err
    else:
        assert_typed(ended)


def test_a_run_refused_at_its_first_step_can_be_given_again(place: Path) -> None:
    before = (place / "base/model.safetensors").read_bytes()
    spoil(place, "model.layers.1.mlp.up_proj.weight", 38, float("nan"))
    said = refusal(*train(place, "deep/run"), "--steps", 2)
    assert (
        "model.layers.1.mlp.up_proj.weight: found nan at element 38; expected finite weights in "
        "the checkpoint" in said
    )
    assert "lower" not in said
    assert not (place / "deep").exists()
    (place / "base/model.safetensors").write_bytes(before)
    assert run_here(*train(place, "deep/run"), "--steps", 2).status == 0


@pytest.mark.parametrize("command", ["evaluate", "choose", "verify", "generate"])
def test_a_checkpoint_that_holds_infinity_is_named(place: Path, command: str) -> None:
    spoil(place, "model.norm.weight", 1, float("inf"))
    data = place / ("choices.jsonl" if command == "choose" else "rows.jsonl")
    arguments: dict[str, list[object]] = {
        "verify": ["verify", "--model", place / "base", "--tokens", 9],
        "generate": [
            "generate",
            "--model",
            place / "base",
            "--prompt",
            "the cat",
            "--max-new-tokens",
            3,
        ],
    }
    said = refusal(*arguments.get(command, ["evaluate", "--model", place / "base", "--data", data]))
    assert "model.norm.weight: found inf at element 1" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--memory", "1MB"],
        ["--lr", "1e6"],
        ["--steps", 2],
        ["--steps", 2, "--evaluation", "choices.jsonl"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_a_refused_run_keeps_a_users_directory(
    place: Path, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "run").mkdir()
    if "--steps" in arguments:  # refused at its first step
        spoil(place, "model.norm.weight", 1, float("nan"))
    refusal(*train(place), *arguments)
    assert (place / "run").is_dir()
    assert not any((place / "run").iterdir())


METRICS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "empty": lambda lines: [],
    "torn": lambda lines: [*lines[:-1], lines[-1][:20]],
    "bytes that are no text": lambda lines: [lines[0], b"\xff\xfe\x00" * 40, *lines[1:]],
    "a zeroed page": lambda lines: [bytes(4096)],
    "no objects": lambda lines: [b"[1, 2]\n", b"7\n", b"null\n", *lines],
    "a step that is a word": lambda lines: [
        lines[0].replace(b'"step": 0', b'"step": "0"'),
        *lines[1:],
    ],
    "a step that is a list": lambda lines: [
        lines[0].replace(b'"step": 0', b'"step": [0]'),
        *lines[1:],
    ],
    "losses that are an object": lambda lines: [
        b'{"step": 2, "loss": 1.0, "losses": {}, "projected_grads": null}\n',
        *lines,
    ],
    "a number of 400 digits": lambda lines: [
        *lines,
        b'{"step": %b, "loss": 1.0}\n' % HUGE.encode(),
    ],
    "a number of 5000 digits": lambda lines: [*lines, b'{"step": %b}\n' % (b"9" * 5000)],
    "a deep nest": lambda lines: [*lines, b"[" * 100_000 + b"\n"],
    "rows of a far step": lambda lines: [*lines, lines[-1].replace(b'"step": 5', b'"step": 95')],
    "a row whose step was damaged": lambda lines: [
        *lines[:-1],
        lines[-1].replace(b'"step": 5', b'"step": 6'),
    ],
    "rows twice": lambda lines: [*lines, *lines],
    "rows in disorder": lambda lines: lines[::-1],
    "another loss": lambda lines: [lines[0].replace(b'"loss": 2', b'"loss": 3'), *lines[1:]],
    "an infinite evaluation": lambda lines: [*lines, b'{"step": 2, "evaluation_loss": Infinity}\n'],
}


@pytest.mark.few(6)
@pytest.mark.parametrize("damage", METRICS)
def test_damaged_metrics_block_no_resume_and_are_made_up_from_the_journal(
    run: Path, damage: str
) -> None:
    unfinish(run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(METRICS[damage](lines)))
    assert run_here("train", "--resume", run).status == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = Journal(run / "journal.jsonl").updates
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["losses"] for row in rows] == [list(update.losses) for update in updates]
    assert (run / "model/model.safetensors").exists()


def test_metrics_that_are_no_file_do_not_hang(run: Path) -> None:
    unfinish(run)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl: found Is a directory" in refusal("train", "--resume", run)
    (run / "metrics.jsonl").rmdir()
    os.mkfifo(run / "metrics.jsonl")
    assert run_here("train", "--resume", run).status == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6


def test_rows_that_the_journal_has_lost_are_told_and_kept(run: Path) -> None:
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (run / "journal.jsonl").write_bytes(b"".join(lines[:-2]))
    metrics = (run / "metrics.jsonl").read_bytes()
    said = refusal("train", "--resume", run)
    assert (
        "journal.jsonl: found 4 steps; expected at least 6, since metrics.jsonl knows of step 5"
        in said
    )
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert (run / "journal.jsonl").read_bytes() == b"".join(lines[:-2])
    (run / "metrics.jsonl").unlink()
    unfinish(run)
    assert run_here("train", "--resume", run).status == 0


WRONG: dict[str, list[object]] = {
    "options": [None, 7],
    "options.steps": ["6", None, True, 6.0, 0, int(HUGE), float("inf")],
    "options.seed": [int(HUGE), []],
    "options.model": [3, "a\0b"],
    "options.data": [{}, "n" * 300],
    "options.dtype": ["int8", ["auto"]],
    "options.evaluation": [5],
    "options.evaluate_every": ["often"],
    "options.optimization": [[]],
    "options.optimization.lr": ["1e-6", int(HUGE)],
    "options.optimization.decay": ["steep", []],
    "options.optimization.queries": [2.5],
    "options.optimization.estimator": ["adam", []],
    "options.optimization.method": ["yes"],
    "options.batching.batch_size": [None, -3],
    "options.batching.sequence_length": ["long"],
    "options.storage": ["here"],
    "options.storage.memory": [8, HUGE],
    "options.storage.write_back_every": ["sometimes", 0],
    "options.storage.device": [None],
    "checksums": [3, ["a"]],
    "tokens": [None, "ab"],
}
OPTIONS = [(key, value) for key, values in WRONG.items() for value in values]


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("key", "value"), OPTIONS, ids=[f"{key} {str(value)[:12]!r}" for key, value in OPTIONS]
)
def test_wrong_types_in_the_options_of_a_run_are_told(run: Path, key: str, value: object) -> None:
    record = json.loads((run / "options.json").read_text())
    del record["sha256"]
    *groups, name = key.split(".")
    place = record
    for group in groups:
        place = place[group]
    place[name] = value
    (run / "options.json").write_text(checked_json.to_text(record))
    refusal("train", "--resume", run)


EDITED = [
    ("batching.batch_size", 2, "batch_size: 2", "batch_size: 3"),
    ("optimization.lr", 2e-2, "lr: 0.02", "lr: 0.01"),
    ("samples", 3, "samples: 3", "samples: 0"),
    ("steps", 7, "steps: 7", "steps: 6"),
    ("optimization.lr", "much", "values", "the options that zo2 train saved in options.json"),
]


@pytest.mark.parametrize(("key", "value", "now", "before"), EDITED, ids=[row[2] for row in EDITED])
def test_options_that_were_edited_in_their_file_are_named(
    run: Path, key: str, value: object, now: str, before: str
) -> None:
    path = run / "options.json"
    text = path.read_text()
    record = json.loads(text)
    *groups, name = key.split(".")
    group = record["options"][groups[0]] if groups else record["options"]
    group[name] = value
    path.write_text(json.dumps(record))
    lines = [
        refusal("train", "--resume", run),
        refusal("train", "--resume", run, "--from-step", 1, "--output", run.parent / "branch"),
        refusal("export", "--run", run, "--output", run.parent / "new"),
        refusal("report", run, "--output", run.parent / "page.html"),
    ]
    found = f"zo2: {path}: found {now}, which no run saved: the file was edited or damaged; "
    for line in lines:
        assert line.startswith(f"{found}expected {before}. What to do: undo the edit")
    assert not (run.parent / "branch").exists()
    path.write_text(json.dumps(json.loads(text), sort_keys=True))  # the same values
    assert run_here("train", "--resume", run).status == 0


def test_options_that_are_none_are_told_and_do_not_hang(run: Path) -> None:
    path, export = run / "options.json", ["export", "--run", run, "--output", run.parent / "new"]
    for content in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"options": {}}',
        bytes(99),
    ):
        path.write_bytes(content)
        for arguments in (["train", "--resume", run], export):
            assert "options.json" in refusal(*arguments)
    path.unlink()
    os.mkfifo(path)
    assert "no regular file" in refusal("train", "--resume", run)
    path.unlink()
    path.mkdir()
    assert "no readable options.json" in refusal(*export)


def test_a_header_without_noise_is_told(run: Path) -> None:
    from zo2core.io.durable import to_line

    first, *lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    header = json.loads(first)
    del header["noise"], header["crc32"]
    (run / "journal.jsonl").write_bytes(b"".join([to_line(header), *lines]))
    assert "noise" in refusal("train", "--resume", run)
    assert "noise" in refusal("export", "--run", run, "--output", run.parent / "new")
    assert run_here("journal", run).status == 0


def test_a_damaged_tokenizer_is_told(place: Path) -> None:
    for content in (
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"model": 3}',
        b'{"version": "1.0", "model": {"type": "BPE"}}',
    ):
        (place / "base/tokenizer.json").write_bytes(content)
        refusal(*train(place))
        refusal("generate", "--model", place / "base", "--prompt", "the")
        assert not (place / "run").exists()


def test_pipes_directories_and_numbers_of_many_digits_in_place_of_data_are_told(
    place: Path,
) -> None:
    os.mkfifo(place / "pipe")
    (place / "folder").mkdir()
    for name, said in (("pipe", "no regular file"), ("folder", "no regular file")):
        for option in ("--data", "--evaluation"):
            assert said in refusal(*train(place), option, place / name)
        assert said in refusal("evaluate", "--model", place / "base", "--data", place / name)
    (place / "many.jsonl").write_text('{"text": ' + "9" * 5000 + "}\n")
    assert "many.jsonl, line 1" in refusal(*train(place), "--data", place / "many.jsonl")
    write_rows(
        place / "few.jsonl",
        [{"prompt": "the", "candidates": [" cat", " dog"], "answer": int(HUGE)}],
    )
    assert "few.jsonl, line 1" in refusal(
        "evaluate", "--model", place / "base", "--data", place / "few.jsonl"
    )
    (place / "base/tokenizer.json").unlink()
    os.mkfifo(place / "base/tokenizer.json")
    assert "base/tokenizer.json" in refusal(*train(place))


def test_a_model_that_is_none_is_told_and_a_directory_that_is_empty_filled(run: Path) -> None:
    told, model = "found files that are not a complete model", run / "model"
    (model / "model.safetensors").unlink()
    assert told in refusal("train", "--resume", run)
    unfinish(run)
    for make in (lambda: model.write_text("no model"), lambda: model.symlink_to("nowhere")):
        make()
        assert told in refusal("train", "--resume", run)
        model.unlink()
    model.mkdir()
    assert run_here("train", "--resume", run).status == 0
    assert (model / "model.safetensors").exists()


def test_a_base_that_vanishes_is_named(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinish(run)
    (place / "base").rename(place / "elsewhere")
    said = refusal("train", "--resume", run)
    assert f"{place / 'base'}: found no directory" in said
    (place / "elsewhere").rename(place / "base")
    real = Engine.export

    def export(self: Engine, directory: Path, **options: Any) -> None:
        (place / "base/tokenizer.json").unlink()
        real(self, directory, **options)

    monkeypatch.setattr(Engine, "export", export)
    said = refusal("export", "--run", run, "--output", place / "new")
    assert f"{place / 'base/tokenizer.json'}: found No such file or directory" in said
    assert not (place / "new").exists()


def test_a_resumed_run_takes_memory_and_write_backs_anew(run: Path) -> None:
    unfinish(run)
    journal = (run / "journal.jsonl").read_bytes()
    anew = [
        "--memory",
        "4GiB",
        "--activation-memory",
        "64MB",
        "--write-back-every",
        "never",
        "--snapshot-every",
        2,
    ]
    assert run_here("train", "--resume", run, *anew).status == 0
    options = json.loads((run / "options.json").read_text())["options"]["storage"]
    assert [options[name] for name in ("memory", "write_back_every", "snapshot_every")] == [
        "4GiB",
        "never",
        2,
    ]
    assert run_here("train", "--resume", run, "--memory", "auto").status == 0
    assert json.loads((run / "options.json").read_text())["options"]["storage"]["memory"] == "auto"
    assert (run / "journal.jsonl").read_bytes() == journal


def test_a_resumed_run_refuses_what_decides_its_result(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    options = (run / "options.json").read_bytes()
    for option, value, said in (
        ("--lr", "1e-3", "found 0.001; expected 0.01, as in the run"),
        ("--batch-size", "4", "found 4; expected 3, as in the run"),
        ("--device", "cuda", "found cuda; expected cpu, as in the run"),
        ("--adapter-frozen", "lora_A", "found lora_A; expected none, as in the run"),
        ("--lora-rank", "2", "found 2; expected none, as in the run"),
        ("--steps", "5", "found 5; expected at least 6, the steps that the run has already taken"),
        ("--output", "elsewhere", "found elsewhere; expected none beside --resume"),
    ):
        assert f"{option}: {said}" in refusal("train", "--resume", run, option, value)
        if "expected none, as" in said:
            assert f"{option}: {said}" in refusal(
                *("evaluate", "--run", run, "--data", "rows.jsonl", option, value)
            )
        assert (run / "options.json").read_bytes() == options
    assert (
        run_here(
            "train", "--resume", run, "--lr", "1e-2", "--data", "rows.jsonl", "--model", "base"
        ).status
        == 0
    )


def test_a_journal_of_other_options_is_told_by_its_flags(run: Path, place: Path) -> None:
    others = ["--steps", 6, "--lr", 2e-2, "--decay", "cosine", "--queries", 2, "--seed", 7]
    assert run_here(*train(place, "other"), *others).status == 0
    shutil.copy(place / "other" / "journal.jsonl", run)
    unfinish(run)
    line = refusal("train", "--resume", run)
    theirs, ours = line.split(" found ")[1].split("; expected ")
    for told in ("--decay 'cosine'", "--lr 0.02", "--queries 2", "--seed 7"):
        assert told in theirs
    for told in ("--decay 'constant'", "--lr 0.01", "--seed 0"):
        assert told in ours
    assert "schedule" not in line


def test_more_steps_lengthen_a_run_as_if_it_had_had_them_but_for_one_whose_schedule_ends(
    run: Path, place: Path
) -> None:
    assert run_here("train", "--resume", run, "--steps", 9).status == 0
    assert run_here(*train(place, "whole"), "--steps", 9, "--lr", 1e-2).status == 0
    ours, theirs = (Journal(place / name / "journal.jsonl").updates for name in ("run", "whole"))
    assert list(ours) == list(theirs)
    for name in ("model", "model-6"):
        assert (run / name / "model.safetensors").exists()
    weights = [(place / name / "model/model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]
    assert run_here("train", "--resume", run).status == 0
    assert run_here(*train(place, "ends"), "--steps", 2, "--decay", "cosine").status == 0
    said = refusal("train", "--resume", place / "ends", "--steps", 4)
    assert "--steps: found 4; expected 2, the steps of this run's cosine schedule" in said


REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOSPC: "free space on its disk, or choose a path on another one",
    errno.EIO: "check the disk, whose errors are in the system's log (dmesg)",
    errno.EROFS: "choose a path on a file system that can be written",
    errno.EACCES: "change its permissions, or choose another path",
}


@pytest.mark.parametrize("number", REMEDIES, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("call", ["preadv", "fsync", "rename", "mkdir"])
def test_the_number_of_an_error_of_the_system_decides_what_to_do(
    call: str, number: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def rename(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(os, call, rename if call == "rename" else fail)
    line = refusal("export", "--model", place / "base", "--output", place / "out")
    at = place / ("base/model.safetensors" if call == "preadv" else "out")
    assert line.startswith(f"zo2: {at}: ")
    assert f": found {os.strerror(number)}" in line
    assert line.endswith(f"What to do: {REMEDIES[number]}.")
    if call == "rename":
        assert f"/out to {place / 'out'});" in line, "both names are told"
    if call == "fsync":
        assert f"({place}/.out.partial-" in line, "whose bytes could not be made durable"
    assert not list(place.glob(".out*"))


def test_an_error_of_the_system_without_a_name_is_not_told_as_one_of_the_output() -> None:
    with pytest.raises(OSError, match="Bad file") as raised:
        os.fsync(1 << 20)
    told = as_zo2_error(raised.value)
    assert str(told).startswith("test_an_error_of_the_system_without_a_name")
    assert " (test_refusals.py, line " in str(told)
    assert "found Bad file descriptor; expected a call of the system that succeeds" in str(told)
    for name in (b"out/.model.partial", "out/.model.partial"):
        told = as_zo2_error(OSError(errno.EXDEV, "Invalid cross-device link", name))
        assert str(told).startswith("out/.model.partial: found Invalid cross-device link; expected")


@pytest.mark.long_profile
def test_output_that_nobody_takes_is_told(run: Path, apart: Apart) -> None:
    ended = apart.run("journal", run, out="/dev/full")
    assert "standard output: found No space left on device" in refused_apart(ended)


def test_a_reader_that_has_seen_enough_is_no_error(run: Path, apart: Apart) -> None:
    ended = apart.run(
        "journal", run, patch="import os; r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w)"
    )
    assert ended.status == 141
    assert not ended.err


def test_a_path_called_as_an_option_is_none(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    line = refusal("evaluate", "--model", "run", "--data", place / "rows.jsonl")
    assert line.startswith("zo2: run: found no config.json")


def test_what_libraries_say_of_kernels_that_nothing_uses_is_left_out(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("bitsandbytes")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    refusal("plan", "--method", "zeroth-order", "--model", place / "base", "--memory", "1MB")
    assert logger.level == logging.ERROR


def test_no_more_threads_is_told(place: Path, apart: Apart) -> None:
    patch = """
import threading
def start(self): raise RuntimeError("can't start new thread")
threading.Thread.start = start
"""
    assert "threads: found that no more can be started" in refused_apart(
        apart.run(*train(place), patch=patch)
    )
    assert not (place / "run").exists()


@pytest.mark.parametrize("room", [1 << 20, 32 << 20])
def test_a_limit_on_the_address_space_is_told(place: Path, apart: Apart, room: int) -> None:
    # Modules were imported before: what Python has no memory to compile it may call a syntax error.
    patch = f"""
import psutil, resource
limit = psutil.Process().memory_info().vms + {room}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
    arguments = [
        "--batch-size",
        20_000,
        "--activation-memory",
        "1MB",
        "--queries",
        40,
        "--steps",
        1,
    ]
    refused_apart(apart.run(*train(place), *arguments, patch=patch))
    assert not (place / "run").exists()


def test_an_error_is_told_where_no_memory_is_left(place: Path, apart: Apart) -> None:
    patch = """
import psutil, resource
from zo2adapters.commands.train import Train
held = []
def run(self):
    limit = psutil.Process().memory_info().vms + (32 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for nbytes in (1 << 20, 1 << 16, 1 << 12, 1 << 9, 1 << 6):
        try:
            while True: held.append(bytearray(nbytes))
        except MemoryError:
            pass
    raise MemoryError
Train.run = run
"""
    assert "host memory: found none left" in refused_apart(apart.run(*train(place), patch=patch))


def test_no_more_memory_is_told() -> None:
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        SystemError("error return without exception set"),
        SystemError("<function f at 0x7f> returned NULL without setting an exception"),
        SyntaxError("expected ':'", ("<unknown>", 1, 1, "def f():", 1, 8)),
    ):
        told = as_zo2_error(error)
        assert isinstance(told, MemoryBudgetError)
        assert told.where == (
            "device memory" if isinstance(error, torch.OutOfMemoryError) else "host memory"
        )
    for defect in (
        ZeroDivisionError(),
        SyntaxError("expected ':'", ("own.py", 1, 1, "def f()", 1, 8)),
    ):
        assert as_zo2_error(defect) is None, "a defect of this program keeps its traceback"


IMPORTS = """
import sys
from zo2adapters.cli import main
for line in sys.argv[1:]:
    try: main(line.split())
    except SystemExit: pass
    imported = {unused} & set(sys.modules)
    assert not imported, (line, imported)
"""


def test_what_is_seen_by_the_look_of_it_waits_for_no_slow_import(prepared: Path) -> None:
    asked = [
        *(f"{name} --help-all" for name in COMMANDS),
        *(f"{name} --unknown" for name in COMMANDS),
        "",
        "--help",
        "none",
    ]
    run = "train --method zeroth-order --model base --data {rows} --output new"
    refused = [
        "train --method zeroth-order --steps x",
        f"{run} --method adam",
        f"{run} --steps 0",
        f"{run} --method adamw --queries 2",
        f"{run} --estimator fzoo --queries 1",
        f"{run} --lora-rank 8 --adapter there",
        f"{run} --evaluation nowhere.jsonl",
        "train nowhere.yaml",
        "train --resume nowhere",
        "tune --method zeroth-order --model base",
        "init --model base --data {rows} --memory 1XB",
        "init --model base --data nowhere.jsonl",
    ]
    given = [line.format(rows=prepared / "rows.jsonl") for line in (*asked, *refused)]
    code = IMPORTS.format(unused={"torch", "transformers", "numpy"})
    ended = subprocess.run(
        [sys.executable, "-c", code, *given],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert ended.stderr.count("What to do:") == len(COMMANDS) + 1 + len(refused)


NEW = "train --method zeroth-order --model base --data rows.jsonl --output new"
# What the file system shows: lines, and what is told of each.
SEEN: list[tuple[str, str]] = [
    (f"{NEW} --output run", "run: found a run that has already started"),
    (f"{NEW} --output base", "base: found something at this path"),
    (f"{NEW} --trace rows.jsonl", "rows.jsonl: found something at this path"),
    (f"{NEW} --data rows.html", "rows.html: found a file of another format"),
    (f"{NEW} --data nowhere.jsonl", "nowhere.jsonl: found No such file"),
    (f"{NEW} --model modle", "modle: found neither a directory nor a model of the hub"),
    ("chat --model modle", "modle: found neither a directory nor a model of the hub"),
    (f"{NEW} --data base", "base: found no regular file, but a directory"),
    (f"{NEW} --completion-column answer", "line 1: found no value in a column 'answer'"),
    (f"{NEW} --prompt-template {{question}}", "line 1: found no value in a column 'question'"),
    (f"{NEW} --evaluation rows.html", "rows.html: found a file of another format"),
    (f"{NEW} --data choices.jsonl --pack", "--pack: found the objective choice-loss"),
    (f"{NEW} --data choices.jsonl --objective dpo", "--objective: found dpo for rows with"),
    (f"{NEW} --objective accuracy --method adamw --lr 1e-3", "which has no gradient"),
    (f"{NEW} --objective own.py:gone", "own.py without gone, but with calm"),
    (f"{NEW} --reward own.py:gone --rank 2", "own.py without gone, but with calm"),
    (f"{NEW} --model bare", "bare: found no safetensors weights"),
    (f"{NEW} --model pickled", "pickled/pytorch_model.bin: found pickled weights"),
    (f"{NEW} --model sharded", "sharded/two.safetensors: found No such file"),
    (f"{NEW} --model mute", "mute: found no usable tokenizer"),
    (f"{NEW} --model adapter", "adapter: found an adapter"),
    (f"{NEW} --model ./nowhere", "./nowhere: found no directory"),
    (f"{NEW} --model nowhere.gguf", "nowhere.gguf: found No such file"),
    (f"{NEW} --adapter nowhere", "nowhere: found No such file"),
    (f"{NEW} --device cuda", "--device: found cuda, and 0 CUDA device(s)"),
    (f"{NEW} --device gpu", "--device: found 'gpu'"),
    (f"{NEW} --device-memory 8GB", "--device-memory: found 8GB; expected --device cuda"),
    (f"{NEW} --report-to wandb", "wandb: found no such package"),
    (f"{NEW} --runs none.yaml", "none.yaml: found No such file"),
    (f"{NEW} --split rows", "--split: found rows"),
    (f"{NEW} --task sst2 --output base", "base: found something at this path"),
    ("plan --method zeroth-order --model bare", "bare: found no safetensors weights"),
    ("plan --method zeroth-order --model base --objective f2", "--objective: found 'f2'"),
    ("train --resume base", "base: found no readable options.json"),
    (
        "tune --method zeroth-order --model bare --data rows.jsonl --output new",
        "bare: found no safetensors weights",
    ),
    (
        "tune --method zeroth-order --model base --data rows.jsonl --output base",
        "base: found something at this path",
    ),
    ("init --model bare --data rows.jsonl", "bare: found no safetensors weights"),
    ("init --model base --data rows.html", "rows.html: found a file of another format"),
    ("init --model base --data rows.jsonl --label-column of", "no value in a column 'of'"),
    ("evaluate --run nowhere", "nowhere: found no readable options.json"),
    ("evaluate --model base --data rows.html", "rows.html: found a file of another format"),
    ("evaluate --model base", "--data: found none"),
    ("evaluate --model mute --data rows.jsonl", "mute: found no usable tokenizer"),
    ("evaluate --run run --data rows.jsonl --device cuda", "0 CUDA device(s)"),
    ("generate --run nowhere --prompt the", "nowhere: found no readable options.json"),
    ("generate --model mute --prompt the", "mute: found no usable tokenizer"),
    ("chat nowhere", "nowhere: found no readable options.json"),
    ("chat --model mute", "mute: found no usable tokenizer"),
    ("chat --model base --adapter nowhere", "--adapter: found nowhere"),
    ("export --run run --output base", "base: found something at this path"),
    ("export --run run --output new.gguf", "new.gguf: found the name of a file"),
    ("export --run nowhere --output new", "nowhere: found no readable options.json"),
    ("export --model base --journal none --output new", "none: found no journal"),
    ("merge --model base --adapter nowhere --output new", "--adapter: found nowhere"),
    ("convert --model bare --output base", "base: found something at this path"),
    ("convert --model ./nowhere --output new", "nowhere: found no directory"),
    ("verify --model bare", "bare: found no safetensors weights"),
    ("journal nowhere", "nowhere/journal.jsonl: found no journal"),
    ("report nowhere -o page.html", "nowhere/journal.jsonl: found no journal"),
    ("report run -o rows.html", "rows.html: found something else at this path"),
    ("rows --task sst2 --output base", "base: found something at this path"),
    ("rows --task sst2 --output new --data nowhere", "nowhere: found No such file"),
    ("demo --keep base", "base: found something at this path"),
]


def test_what_the_file_system_shows_is_told_before_anything_slow_is_imported(
    prepared: Path, place: Path
) -> None:
    shutil.copytree(prepared / "run", place / "run")
    move_options(place / "run", prepared, place)
    (place / "rows.txt").write_text("The cat sat.\n")
    (place / "rows.html").write_text("<p>")
    (place / "own.py").write_text("def calm(model, batch): ...\n")
    without = {"bare": "*.safetensors", "pickled": "*.safetensors", "sharded": "model.s*"}
    for name, pattern in {**without, "mute": "tokenizer*", "adapter": "config.json"}.items():
        shutil.copytree(place / "base", place / name, ignore=shutil.ignore_patterns(pattern))
    (place / "pickled" / "pytorch_model.bin").touch()
    (place / "sharded" / "one.safetensors").touch()
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (place / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "adapter" / "adapter_config.json").write_text("{}")
    before = sorted(place.rglob("*"))
    code = IMPORTS.format(unused={"torch", "transformers", "numpy"})
    blocked = "import sys; sys.modules['wandb'] = None\n"
    ended = subprocess.run(
        [sys.executable, "-c", blocked + code, *(line for line, _ in SEEN)],
        capture_output=True,
        text=True,
        env=environment(CUDA_VISIBLE_DEVICES=""),
        cwd=place,
        check=False,
    )
    lines = ended.stderr.splitlines()
    for (line, told), found in zip(SEEN, lines, strict=False):
        assert told in found, line
    assert (len(lines), ended.returncode) == (len(SEEN), 0), ended.stderr[-2000:]
    assert sorted(place.rglob("*")) == before


COMPLETED: dict[str, set[str]] = {
    "zo2 tr": {"train"},
    "zo2 ": set(COMMANDS),
    "zo2 train --method zeroth-order --lora-r": {"--lora-rank"},
    "zo2 train --resume run --no-pa": {"--no-pack"},
    "zo2 train --method zeroth-order --dtype b": {"bfloat16"},
    "zo2 train --method zeroth-order --pack ": set(),
    "zo2 train --method zeroth-order --data ro": set(),
    "zo2 nothing --o": set(),
    "zo2": set(),
}
COMPLETE = """
import os, sys
from zo2adapters.cli import main
for line in sys.argv[1:]:
    os.environ |= {"COMP_LINE": line + "after the cursor", "COMP_POINT": str(len(line))}
    try: main([])
    except SystemExit: pass
    print("=", flush=True)
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""


def test_the_shell_completes_commands_options_and_values() -> None:
    code = [sys.executable, "-c", COMPLETE, *COMPLETED]
    ended = subprocess.run(code, capture_output=True, text=True, env=environment(), check=True)
    *offered, _ = ended.stdout.split("=\n")
    assert {
        line: set(words.split()) for line, words in zip(COMPLETED, offered, strict=True)
    } == COMPLETED


def test_a_command_imports_what_it_uses(prepared: Path) -> None:
    code = IMPORTS.format(unused={"transformers", "matplotlib"})
    line = f"journal {prepared / 'run'}"
    subprocess.run(
        [sys.executable, "-c", code, line], check=True, capture_output=True, env=environment()
    )


def test_the_help_is_what_people_need_first() -> None:
    ended = run_here()
    assert ended.status == 0
    commands = [line.split()[1] for line in ended.out.splitlines() if line.startswith("  zo2 ")]
    assert commands == ["demo", "init", "train", "chat"]
    short, whole = (run_here("train", option).out for option in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 50
    assert short.count("\n  --") == 12
    assert "more options: zo2 train --help-all" in short
    assert all(option in whole for option in ("--snapshot-every", "--loss-chunk", "--trace"))
    said = refusal("trian")
    assert "command: found 'trian'; expected one of demo, init, train" in said
    assert "; did you mean train." in said


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("kind", [ZO2Error, OptionError, MissingPackageError, DivergenceError])
def test_an_error_of_another_process_arrives_with_its_message_and_fields(
    kind: Any, protocol: int
) -> None:
    more = {"best_step": 7} if kind is DivergenceError else {}
    error = kind(Path("rows.jsonl"), found="7", expected="8", remedy="wait", **more)
    arrived = pickle.loads(pickle.dumps(error, protocol))
    assert (type(arrived), str(arrived), vars(arrived)) == (kind, str(error), vars(error))
