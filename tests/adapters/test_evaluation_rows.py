"""Runs that train on completions and are evaluated on candidates, labels or answers, and samples of what a model writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import refusal, run_here
from runs import finish, small_run

from zo2adapters.commands.report import page, read_run
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.trainers.model_options import RunModelOptions
from zo2adapters.trainers.optimization import FirstOrder
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.trainer import Trainer
from zo2core import Journal
from zo2core.errors import OptionError

CANDIDATES = [{"prompt": "the cat", "candidates": [" sat", " ran"], "answer": index} for index in (0, 1, 0)]
LABELS = [{"prompt": "the cat", "label": label} for label in ("sat", "ran", "sat")]
ANSWERS = [{"prompt": "the cat", "answers": ["sat", "ran"]}, {"prompt": "the dog", "answers": ["ran"]}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluations(options: TrainOptions) -> dict[int, dict[str, float]]:
    return {step: dict(results) for step, results in Journal(options.output / "journal.jsonl").evaluations.items()}


def printed_accuracy(options: TrainOptions, step: int, *more: object) -> str:
    ended = run_here("evaluate", "--run", options.output, "--at", step, "--data", options.evaluation, "--no-base", *more)
    assert ended.status == 0, ended
    return ended.out


@pytest.mark.parametrize("rows", [CANDIDATES, LABELS], ids=["candidates", "labels"])
def test_a_run_on_completions_is_evaluated_by_accuracy(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    options = small_run(tmp_path, evaluation=write(tmp_path / "evaluation.jsonl", rows), keep_best=True)
    finish(options)
    results = evaluations(options)
    assert results.keys() == {0, 3}
    for step, values in results.items():
        assert values.keys() == {"choice_loss", "accuracy"}, "steps minimise another loss"
        assert f"accuracy {values['accuracy']:.1%}," in printed_accuracy(options, step)


def test_a_run_on_completions_is_evaluated_by_the_answers_it_writes(tmp_path: Path) -> None:
    options = small_run(tmp_path, evaluation=write(tmp_path / "evaluation.jsonl", ANSWERS), evaluate_every=2)
    finish(options)
    results = evaluations(options)
    assert results.keys() == {0, 2, 3}
    for step, values in results.items():
        assert values.keys() == {"f1", "exact_match"}
        line = printed_accuracy(options, step, "--max-new-tokens", 6)
        assert f"F1 {values['f1']:.1%}, exact match {values['exact_match']:.1%}" in line


@pytest.mark.parametrize(("rows", "best"), [(CANDIDATES, "choice loss"), (ANSWERS, "f1")], ids=["candidates", "answers"])
def test_what_an_evaluation_measures_has_its_own_name_everywhere(
    rows: list[dict[str, Any]], best: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = small_run(tmp_path, evaluation=write(tmp_path / "evaluation.jsonl", rows), keep_best=True)
    finish(options)
    assert f"step 3: evaluation {best} " in capsys.readouterr().err
    assert "evaluation_loss" not in (options.output / "metrics.jsonl").read_text()
    assert f"| step | {best} |" in (options.output / "model" / "README.md").read_text()
    pytest.importorskip("matplotlib")
    report = page([read_run(options.output)])
    assert f"evaluation {best}, first and last" in report
    assert "evaluation loss" not in report


def test_evaluating_on_other_rows_changes_no_step(tmp_path: Path) -> None:
    options = small_run(tmp_path)
    finish(options)
    steps = Journal(options.output / "journal.jsonl").updates
    for name, rows in (("candidates", CANDIDATES), ("answers", ANSWERS)):
        evaluation = write(tmp_path / f"{name}.jsonl", rows)
        other = replace(options, output=tmp_path / name, evaluation=evaluation, evaluate_every=1, samples=2)
        finish(other)
        assert Journal(other.output / "journal.jsonl").updates == steps


def test_rows_that_cannot_evaluate_a_run_are_refused(tmp_path: Path) -> None:
    preferences = write(tmp_path / "p.jsonl", [{"prompt": "the cat", "chosen": " sat", "rejected": " ran"}])
    with pytest.raises(OptionError, match="prompt, chosen and rejected"):
        Trainer(small_run(tmp_path, evaluation=preferences), quiet=True)
    assert not (tmp_path / "run").exists()
    choices = write(tmp_path / "c.jsonl", CANDIDATES)
    with pytest.raises(OptionError, match="prompt and answers"):
        Trainer(small_run(tmp_path, data=choices, evaluation=write(tmp_path / "a.jsonl", ANSWERS)), quiet=True)


def test_the_columns_of_a_run_are_those_of_both_files(tmp_path: Path) -> None:
    rows = [{"text": "the cat", "completion": f"{word} on", "label": word} for word in ("sat", "ran", "sat")]
    labels = [{"text": row["text"], "label": row["label"]} for row in rows]
    data, evaluation = write(tmp_path / "all.jsonl", rows), write(tmp_path / "labels.jsonl", labels)
    options = small_run(tmp_path, data=data, evaluation=evaluation, rows=RowOptions(prompt_template="{text}"))
    finish(options)
    assert evaluations(options)[3].keys() == {"choice_loss", "accuracy"}


# Samples


def samples(options: TrainOptions) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (options.output / "samples.jsonl").read_text().splitlines()]


def test_samples_are_what_generate_writes_before_and_after_training(tmp_path: Path) -> None:
    options = small_run(tmp_path, samples=2)
    finish(options)
    written = samples(options)
    assert [(sample["step"], sample["row"]) for sample in written] == [(0, 0), (0, 1), (3, 0), (3, 1)]
    first_row = json.loads(options.data.read_text().splitlines()[0])
    assert written[0]["prompt"] == first_row["prompt"]
    assert written[0]["expected"].strip() == first_row["completion"].strip()
    for sample in written:
        arguments = ("--prompt", sample["prompt"], "--max-new-tokens", 9, "--at", sample["step"])
        ended = run_here("generate", "--run", options.output, *arguments)
        assert ended.out.split() == f"{sample['prompt']} {sample['generated']}".split()


def test_a_resumed_run_adds_the_samples_that_are_missing(tmp_path: Path) -> None:
    options = small_run(tmp_path, samples=1)
    finish(options)
    whole = samples(options)
    (options.output / "samples.jsonl").write_text(json.dumps(whole[0]) + '\n{"step": 3, "ro')
    for _ in range(2):  # the second time nothing is missing
        finish(options, resume=True)
        assert samples(options) == whole
    finish(replace(options, steps=5, schedule_steps=3), resume=True)
    assert [sample["step"] for sample in samples(options)] == [0, 3, 5]


@pytest.mark.parametrize("rows", [CANDIDATES, ANSWERS], ids=["candidates", "answers"])
def test_samples_are_taken_from_the_rows_to_evaluate_on(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    options = small_run(tmp_path, evaluation=write(tmp_path / "evaluation.jsonl", rows), samples=1)
    finish(options)
    assert [(sample["prompt"], sample["expected"].strip()) for sample in samples(options)] == [("the cat", "sat")] * 2


def test_a_first_order_run_has_samples(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    peft.LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(tmp_path / "lora")
    options = small_run(
        tmp_path,
        samples=1,
        model_options=RunModelOptions(adapter=tmp_path / "lora" / "adapter_config.json"),
        first_order=FirstOrder(method="adamw"),
    )
    finish(options)
    assert [sample["step"] for sample in samples(options)] == [0, 3]


def test_a_report_shows_the_samples(tmp_path: Path) -> None:
    options = small_run(tmp_path, samples=1)
    finish(options)
    run_here("report", options.output, "--output", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Samples of run" in page
    for sample in samples(options):
        assert sample["generated"] in page
    assert "after 0 steps" in page
    assert "after 3 steps" in page


def test_samples_of_texts_without_prompts_are_refused(tmp_path: Path) -> None:
    options = small_run(tmp_path)
    texts = write(tmp_path / "texts.jsonl", [{"text": "the cat sat"}])
    arguments = ("train", "--model", options.model, "--data", texts, "--output", tmp_path / "new")
    assert "--samples: found rows without a prompt" in refusal(*arguments, "--samples", 1)
    assert "--samples" in refusal(*arguments, "--samples", -1)
    assert not (tmp_path / "new").exists()
