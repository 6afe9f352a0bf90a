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


JUDGED: dict[str, tuple[list[dict[str, Any]], set[str]]] = {  # rows, and what is measured on them
    "candidates": (CANDIDATES, {"choice_loss", "accuracy"}),
    "labels": (LABELS, {"choice_loss", "accuracy"}),
    "answers": (ANSWERS, {"f1", "exact_match"}),
}


@pytest.mark.parametrize(("rows", "measured"), JUDGED.values(), ids=JUDGED)
def test_a_run_on_completions_is_evaluated_on_other_rows(
    rows: list[dict[str, Any]], measured: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = small_run(tmp_path)
    finish(plain)
    evaluation, judged = write(tmp_path / "evaluation.jsonl", rows), tmp_path / "judged"
    finish(replace(plain, output=judged, evaluation=evaluation, evaluate_every=2, keep_best=True, samples=1))
    best = "f1" if "f1" in measured else "choice loss"
    assert f"step 3: evaluation {best} " in capsys.readouterr().err
    journals = [Journal(path / "journal.jsonl") for path in (plain.output, judged)]
    assert journals[0].updates == journals[1].updates, "steps take no notice of it"
    assert journals[1].evaluations.keys() == {0, 2, 3}
    for step, values in journals[1].evaluations.items():
        assert values.keys() == measured, "steps minimise another loss"
        shown = ("F1", "exact match") if best == "f1" else ("accuracy",)
        expected = ", ".join(f"{name} {values[name.lower().replace(' ', '_')]:.1%}" for name in shown)
        arguments = ("--at", step, "--data", evaluation, "--no-base", "--max-new-tokens", 6)
        assert f"{expected}," in run_here("evaluate", "--run", judged, *arguments).out
    written = [json.loads(line) for line in (judged / "samples.jsonl").read_text().splitlines()]
    assert [(sample["prompt"], sample["expected"].strip()) for sample in written] == [("the cat", "sat")] * 2
    assert "evaluation_loss" not in (judged / "metrics.jsonl").read_text()
    assert f"| step | {best} |" in (judged / "model" / "README.md").read_text()
    pytest.importorskip("matplotlib")
    report = page([read_run(judged)])
    assert f"evaluation {best}, first and last" in report
    assert "evaluation loss" not in report


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
