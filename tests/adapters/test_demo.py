"""The demo: what it prepares is a checkpoint and a task held out from it, and what it prints is
what was measured.
"""

import json
import math
import random
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models import mean_log_likelihood
from transformers import AutoTokenizer

from zo2adapters.commands.demo import (
    LABELS,
    QUESTION,
    DemoTask,
    Recipe,
    accuracy,
    docstrings_and_code,
    prepare,
    pretraining_texts,
    question_rows,
    read_rows,
    run_demo,
    source_texts,
)
from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Batching
from zo2core.errors import DataError, OutputError

TINY = Recipe(
    vocabulary=300,
    hidden=16,
    layers=2,
    heads=2,
    characters=100_000,
    window=16,
    windows=4,
    pretraining_steps=20,
    training_rows=24,
    evaluation_rows=12,
    pairs_per_file=3,
    steps=60,
    batching=Batching(batch_size=4),
    optimization=Optimization(method="zeroth-order", lr=1e-3, zo_eps=1e-3),
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> DemoTask:
    return prepare(tmp_path_factory.mktemp("demo"), seed=0, recipe=TINY, quiet=True)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_prepared_model_opens_and_has_its_tokenizer(task: DemoTask) -> None:
    model = open_checkpoint(task.model)
    held = sum(math.prod(spec.shape) for layout in model.layouts for spec in layout.parameters)
    model.weights.close()
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    text = "def f(x):\n    return 'é \x00'"
    ids = tokenizer(text)["input_ids"]
    assert held == task.parameters
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) == TINY.vocabulary == model.config.vocab_size


def test_rows_are_balanced_as_many_as_asked_and_no_line_is_asked_about_twice(
    task: DemoTask,
) -> None:
    prompts = []
    for path, wanted in ((task.train, TINY.training_rows), (task.evaluation, TINY.evaluation_rows)):
        completions = [row["completion"] for row in read_rows(path)]
        assert [completions.count(label) for label in task.labels] == [wanted // 2] * 2
        prompts += [row["prompt"] for row in read_rows(path)]
    assert len(set(prompts)) == len(prompts) == TINY.training_rows + TINY.evaluation_rows


def test_training_evaluation_and_pretraining_share_no_source_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(200):
        lines = [f"value_{number}_{index} = '{index:020}'" for index in range(4)]
        prose = [f"Prose of file_{number}_{index} follows here." for index in range(4)]
        (tmp_path / f"m{number}.py").write_text(
            '"""' + "\n".join(prose) + '"""\n' + "\n".join(lines)
        )
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    prepared = prepare(
        tmp_path / "out", seed=0, recipe=replace(TINY, characters=10_000), quiet=True
    )
    read = pretraining_texts(source_texts(seed=0), 10_000)
    of = [
        {row["prompt"].split("_")[1] for row in read_rows(path)}
        for path in (prepared.train, prepared.evaluation)
    ]
    before = {text.split("_")[1] for text in read}
    assert len(before) > 10
    assert not of[0] & of[1]
    assert not (of[0] | of[1]) & before


def test_pretraining_reads_neither_a_line_of_the_task_nor_its_question(task: DemoTask) -> None:
    assert pretraining_texts(iter([f"a{QUESTION} text", "unused"]), 5) == ["a\n te"]
    read = "\n".join(pretraining_texts(source_texts(seed=0), TINY.characters))
    assert len(read) >= TINY.characters
    assert QUESTION not in read
    for row in read_rows(task.train) + read_rows(task.evaluation):
        assert row["prompt"].endswith(QUESTION)
        assert row["prompt"].removesuffix(QUESTION) not in read


def test_lines_are_docstrings_and_statements_by_syntax() -> None:
    text = '"""First line.\n\n>>> 1\n  Second: line.\n"""\n'
    prose, code = docstrings_and_code(
        f'{text}x = "é"; y = 2  # why\n\x0cif x:\n    z = "Not prose."\n    f(\n)\n'
    )
    assert prose == ["First line.", "Second: line."]
    assert sorted(code) == sorted(['x = "é"', "y = 2", 'z = "Not prose."'])
    assert docstrings_and_code("def (") == ([], [])
    text = '"""Explain the whole of it.\nSay nothing more of it."""\n'
    source = f"{text}value = compute(1, 2, 3, 4)\nother = compute(1, 2, 3)\n"
    known = "if value = compute(1, 2, 3, 4): Explain the whole of it."
    rows = question_rows(iter([source]), 2, pairs_per_file=3, known=known)
    assert [row["prompt"] for row in rows] == [
        "Say nothing more of it." + QUESTION,
        "other = compute(1, 2, 3)" + QUESTION,
    ]


def test_same_seed_gives_the_same_files_and_another_seed_others(
    task: DemoTask, tmp_path: Path
) -> None:
    prepare(tmp_path / "same", seed=0, recipe=TINY, quiet=True)
    prepare(tmp_path / "other", seed=1, recipe=TINY, quiet=True)
    first, same, other = (
        contents(task.model.parent),
        contents(tmp_path / "same"),
        contents(tmp_path / "other"),
    )
    assert {
        "train.jsonl",
        "evaluation.jsonl",
        "base/model.safetensors",
        "base/tokenizer.json",
    } <= set(first)
    assert first == same
    assert all(
        first[name] != other[name]
        for name in ("train.jsonl", "evaluation.jsonl", "base/model.safetensors")
    )


def test_accuracy_is_the_share_of_rows_whose_label_the_model_prefers(task: DemoTask) -> None:
    rows, right = read_rows(task.train), 0
    for row in rows:
        likelihoods = {
            label: mean_log_likelihood(task.model, row["prompt"], label) for label in LABELS
        }
        right += max(likelihoods, key=likelihoods.__getitem__) == row["completion"]
    assert accuracy(task.model, task.train, LABELS) == right / len(rows)


def test_demo_lowers_the_loss_by_zeroth_order_and_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def states() -> str:
        return json.dumps(
            [torch.get_rng_state().tolist(), repr(random.getstate()), repr(np.random.get_state())]
        )

    global_generators = states()
    before, after = run_demo(tmp_path / "new" / "demo", seed=0, recipe=TINY, quiet=True)
    assert states() == global_generators, "they are left alone"
    printed = capsys.readouterr().out
    records = read_rows(tmp_path / "new" / "demo" / "run" / "metrics.jsonl")
    evaluations = [record["evaluation_loss"] for record in records if "evaluation_loss" in record]
    assert [before.loss, after.loss] == [evaluations[0], evaluations[-1]]
    assert after.loss < before.loss - 0.1
    assert sum("projected_grads" in record for record in records) == TINY.steps
    assert f"before  accuracy {before.accuracy:6.1%}  loss {before.loss:.3f}" in printed
    assert f"after   accuracy {after.accuracy:6.1%}  loss {after.loss:.3f}" in printed
    for said in (
        f"{TINY.pretraining_steps} steps of AdamW",
        f"{TINY.steps} steps",
        "steps/s",
        "tokens/s",
        "MB",
        "zo2 init",
    ):
        assert said in printed


def test_used_directory_and_missing_sources_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        prepare(tmp_path, seed=0, recipe=TINY)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    with pytest.raises(DataError, match="source files of the standard library"):
        prepare(tmp_path / "new", seed=0, recipe=TINY)
    assert not (tmp_path / "new").exists()


@pytest.mark.long_profile
def test_full_demo_learns_the_task(tmp_path: Path) -> None:
    before, after = run_demo(tmp_path / "demo", seed=0, quiet=True)
    assert after.accuracy > max(0.8, before.accuracy + 0.1)
    assert after.loss < 0.5 < before.loss
