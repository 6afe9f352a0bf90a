"""``zo2 evaluate``: base and fine-tuned model in one table with standard errors, and what a run's
directory knows.
"""

import csv
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from command_lines import done, make_place, refusal, run_here, write_rows
from hypothesis import given
from hypothesis import strategies as st
from models import WORDS, save_classifier, save_model, save_tokenizer, small_config
from runs import finish, small_run
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from zo2adapters.commands.report_page import page, read_run
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.tasks.task import _losses_and_right, f1_of_words, normalized, standard_error
from zo2adapters.trainers.options import TrainOptions
from zo2core import Journal

TEXTS = [{"prompt": "the cat", "completion": f" {word}"} for word in WORDS[2:8]]
CHOICES = [
    {"prompt": f"the {word} is", "candidates": [" yes", " no"], "answer": " yes"}
    for word in WORDS[2:9]
]
ANSWERS = [{"prompt": f"the {word}", "answers": ["sat", "ran"]} for word in WORDS[2:5]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("evaluate"))
    for name, rows in (("texts", TEXTS), ("choices", CHOICES), ("answers", ANSWERS)):
        write_rows(folder / f"{name}.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("run")
    return folder


def train(output: str, *more: object, data: str = "texts.jsonl", model: str = "base") -> None:
    common = (
        "--model",
        model,
        "--data",
        data,
        "--output",
        output,
        "--steps",
        4,
        "--lr",
        1e-2,
        "--batch-size",
        2,
    )
    done("train", "--method", "zeroth-order", *common, *more)


def cells(told: str) -> dict[str, list[str]]:
    """The table by its measures: the columns' values without standard errors; the names of the
    columns under "".
    """
    names, *rows, _ = told.splitlines()
    table = {"": names.split("  ")}
    table[""] = [name.strip() for name in table[""] if name.strip()]
    for row in rows:
        name, *values = re.split(r"\s{2,}", row)
        table[name] = [value.partition(" ")[0] for value in values]
    return table


@pytest.mark.parametrize("rows", ["texts", "choices", "answers"])
def test_a_run_stands_beside_its_base(rows: str, here: Path) -> None:
    more = ("--data", f"{rows}.jsonl", "--batch-size", 2, "--max-new-tokens", 4)
    table = cells(done("evaluate", "--run", "run", *more).out)
    lines = [
        done("evaluate", *model, *more).out
        for model in (("--model", "base"), ("--run", "run", "--no-base"))
    ]
    assert table.pop("") == ["base", "step 4"]
    assert len(table) == (1 if rows == "choices" else 2)
    for name, values in table.items():
        assert [re.search(rf"{name} ([\d.%]+)", line)[1] for line in lines] == values  # type: ignore[index]
    if rows == "texts":
        assert table["loss"][0] != table["loss"][1], "the run has changed the weights"


def test_a_classifier_stands_beside_its_base(here: Path) -> None:
    save_classifier(Path("classifier"))
    labelled = [
        {"text": f"the {word}", "label": number % 2} for number, word in enumerate(WORDS[2:7])
    ]
    write_rows(Path("labels.jsonl"), labelled)
    train("classes", "--head", "sequence-classification", data="labels.jsonl", model="classifier")
    table = cells(
        done("evaluate", "--run", "classes", "--data", "labels.jsonl", "--batch-size", 2).out
    )
    line = done(
        "evaluate",
        "--model",
        "classifier",
        "--head",
        "sequence-classification",
        "--data",
        "labels.jsonl",
    ).out
    assert f"accuracy {table['accuracy'][0]}" in line
    assert float(table["loss"][0]) == pytest.approx(float(line.split()[1].strip(",")), abs=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "more", [("--lora-rank", 2), ("--rank", 2), ("--lora-rank", 2, "--method", "adamw")], ids=str
)
def test_an_adapter_stands_beside_its_base(more: tuple[object, ...], here: Path) -> None:
    train("tuned", *more)
    base = (
        done("evaluate", "--model", "base", "--data", "texts.jsonl", "--batch-size", 2)
        .out.split()[1]
        .strip(",")
    )
    commands = [("--run", "tuned")]
    if "--lora-rank" in more:
        commands.append(("--adapter", "tuned/model"))
    tables = [
        cells(done("evaluate", *command, "--data", "texts.jsonl", "--batch-size", 2).out)
        for command in commands
    ]
    assert [table[""] for table in tables] == [["base", "step 4"], ["base", "tuned"]][: len(tables)]
    assert {table["loss"][0] for table in tables} == {base}
    assert len({table["loss"][1] for table in tables} - {base}) == 1


def test_rows_stand_below_the_table_and_a_model_alone_has_no_base_beside_it(here: Path) -> None:
    told = done("evaluate", "--run", "run", "--data", "choices.jsonl", "--trace", "trace.json").out
    assert (
        told.splitlines()[-1]
        == "7 rows, 14 candidates, 1 sweep; \N{PLUS-MINUS SIGN} is the standard error"
    )
    assert json.loads(Path("trace.json").read_text())
    for command in (("--run", "run", "--at", 0), ("--model", "run/model"), ("--model", "base")):
        told = done("evaluate", *command, "--data", "texts.jsonl").out
        assert told.startswith("loss ")
        assert len(told.splitlines()) == 1
    told = done("evaluate", "--model", "base", "--data", "choices.jsonl").out
    share = float(re.match(r"accuracy ([\d.]+)%", told)[1]) / 100  # type: ignore[index]
    error = float(re.search(r"standard error ([\d.]+)%", told)[1]) / 100  # type: ignore[index]
    assert error == pytest.approx(math.sqrt(share * (1 - share) / (len(CHOICES) - 1)), abs=2e-3)
    assert "--data: found none, for a run without rows" in refusal("evaluate", "--run", "run")
    assert "--data: found none; expected a file of rows" in refusal("evaluate", "--model", "base")


def test_the_standard_error_of_a_loss_is_that_of_its_rows(here: Path) -> None:
    told = done("evaluate", "--model", "base", "--data", "texts.jsonl", "--batch-size", 4).out
    losses = []
    for row in TEXTS:  # each has one labelled token
        write_rows(Path("one.jsonl"), [row])
        line = done("evaluate", "--model", "base", "--data", "one.jsonl").out
        assert "standard error" not in line, "of one row there is none"
        losses.append(float(line.split()[1].strip(",")))
    expected = statistics.stdev(losses) / math.sqrt(len(losses))
    assert float(told.split("standard error ")[1]) == pytest.approx(expected, abs=2e-6)


UNEVEN: dict[str, list[dict[str, Any]]] = {
    "texts": [{"text": " ".join(WORDS[2 : 4 + count])} for count in (1, 6, 2, 4, 3)],
    "pairs": [
        {"prompt": "the cat", "completion": " ".join(WORDS[2 : 3 + count])} for count in (1, 5, 2)
    ],
    "classes": [{"text": " ".join(WORDS[2:count]), "label": count % 2} for count in (4, 7, 9)],
    "regression": [{"text": " ".join(WORDS[2:count]), "label": count / 7} for count in (4, 7, 9)],
    "several": [
        {"text": " ".join(WORDS[2:count]), "label": [float(count > 4), 1.0]} for count in (4, 7, 9)
    ],
}
MEASURED = {  # a file of rows, a model, and further options
    **{name: (name, "base", ()) for name in ("choices", "answers", "pairs", "texts")},
    "packed": ("texts", "base", ("--pack",)),
    "micro-batches": ("texts", "base", ("--micro-batch-size", 1)),
    "routers": ("texts", "mixture", ()),
    **{
        name: (name, name, ("--head", "sequence-classification"))
        for name in ("classes", "regression", "several")
    },
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("measured"))
    for name, rows in {**UNEVEN, "choices": CHOICES, "answers": ANSWERS}.items():
        write_rows(folder / f"{name}.jsonl", rows)
    save_classifier(folder / "classes")
    save_classifier(folder / "regression", labels=1)
    save_classifier(folder / "several", problem_type="multi_label_classification")
    config: Any = families.small_config("qwen3_moe")
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    families.small_model(config).save_pretrained(folder / "mixture")
    save_tokenizer(folder / "mixture")
    return folder


@pytest.mark.parametrize(("rows", "model", "more"), MEASURED.values(), ids=MEASURED)
def test_no_number_depends_on_the_batch_size(
    rows: str, model: str, more: tuple[object, ...], measured: Path
) -> None:
    lines = [
        done(
            *("evaluate", "--model", measured / model, "--data", measured / f"{rows}.jsonl"),
            *("--batch-size", size, "--max-new-tokens", 3, *more),
        ).out
        for size in (1, 2, 5)
    ]
    numbers = [
        [float(number) for number in re.findall(r"[\d.]+", re.sub(r"\d+ sweeps?", "", line))]
        for line in lines
    ]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-5)
    assert numbers[2] == pytest.approx(numbers[0], rel=1e-5)
    assert "standard error" in lines[0]


def test_the_loss_of_classes_is_the_mean_of_its_rows(measured: Path) -> None:
    """As the standard error takes it, which is tried with the loss of transformers' forward."""
    for name in ("classes", "regression", "several"):
        loss = AutoModelForSequenceClassification.from_pretrained(measured / name)
        batch = {
            "input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]),
            "labels": torch.tensor([row["label"] for row in UNEVEN[name][:2]]),
        }
        whole, _, *rows = _losses_and_right(loss, batch).tolist()
        assert sum(rows) == pytest.approx(whole, rel=1e-5)


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 9)), min_size=2, max_size=8))
def test_the_standard_error_of_groups_is_that_of_a_ratio(groups: list[tuple[float, int]]) -> None:
    """Against the jackknife, which drops one group at a time, up to its own error for groups of
    different sizes.
    """
    sums, weights = (
        [value * weight for value, weight in groups],
        [float(weight) for _, weight in groups],
    )
    error = standard_error(sums, weights)
    assert error is not None
    mean = sum(sums) / sum(weights)
    residuals = [value - mean * weight for value, weight in zip(sums, weights, strict=True)]
    assert error == pytest.approx(
        statistics.stdev(residuals) * math.sqrt(len(groups)) / sum(weights), abs=1e-9
    )
    assert standard_error([1.0], [3.0]) is None, (
        "there is none of one group, and none of an infinite loss"
    )
    assert standard_error([1.0, math.inf], [1.0, 1.0]) is None
    equal = standard_error(sums, [1.0] * len(sums))
    assert equal == pytest.approx(statistics.stdev(sums) / math.sqrt(len(sums)), abs=1e-9)


def save_csv(path: str) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["subject", "mood"])
        writer.writerows(
            [f"the {word}", "yes" if number % 2 else "no"] for number, word in enumerate(WORDS[2:8])
        )


COLUMNS = ("--prompt-template", "{subject} is", "--label-column", "mood")


def test_a_run_knows_columns_template_labels_and_how_long_its_rows_may_be(here: Path) -> None:
    write_rows(
        Path("mixed.jsonl"), [{"text": "the cat"}, {"text": "the cat sat"}, {"text": "the dog ran"}]
    )
    train("short", "--sequence-length", 3, "--too-long", "drop", data="mixed.jsonl")
    short = done("evaluate", "--run", "short", "--data", "mixed.jsonl", "--no-base")
    assert "left out, since longer: 2 rows" in short.err
    assert "left out" not in done("evaluate", "--model", "base", "--data", "mixed.jsonl").err
    save_csv("moods.csv")
    train("moods", *COLUMNS, data="moods.csv")
    assert "mood" in refusal("evaluate", "--model", "base", "--data", "moods.csv")
    told = done("evaluate", "--run", "moods", "--data", "moods.csv", "--no-base").out
    assert (
        told == done("evaluate", "--run", "moods", "--data", "moods.csv", "--no-base", *COLUMNS).out
    )
    assert told == done("evaluate", "--model", "moods/model", "--data", "moods.csv", *COLUMNS).out
    Path("one.csv").write_text("subject,mood\nthe cat,no\n")  # whose labels alone are not enough
    assert (
        "1 row, 2 candidates"
        in done("evaluate", "--run", "moods", "--data", "one.csv", "--no-base").out
    )
    Path("other.csv").write_text("topic,mood\nthe cat,no\n")
    other = ("--prompt-template", "{topic} is")
    assert (
        "1 row,"
        in done("evaluate", "--run", "moods", "--data", "other.csv", "--no-base", *other).out
    )


@pytest.mark.parametrize("more", [("--evaluation", "texts.jsonl"), ("--eval-split", 0.5)], ids=str)
def test_the_rows_of_a_run_are_those_it_was_evaluated_on(
    more: tuple[object, ...], here: Path
) -> None:
    train("evaluated", *more)
    losses = Journal("evaluated/journal.jsonl").evaluations
    table = cells(done("evaluate", "--run", "evaluated", "--batch-size", 2).out)
    assert [float(value) for value in table["loss"]] == pytest.approx(
        [losses[step]["loss"] for step in (0, 4)], abs=1e-6
    )


@pytest.mark.parametrize(
    "method", [(), ("--method", "adamw", "--lora-rank", 2)], ids=["zeroth-order", "adamw"]
)
def test_a_plan_counts_evaluations_of_rows_that_are_split_off(
    method: tuple[object, ...], here: Path
) -> None:
    plan = (
        "plan",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "texts.jsonl",
        "--steps",
        10,
        "--evaluate-every",
        5,
        "--json",
        *method,
    )
    planned = json.loads(done(*plan, "--eval-split", 0.5).out)
    assert planned["evaluations"] == 3
    assert planned["evaluation_seconds"] > 0
    for more, option in ((("--eval-split", 1.5), "--eval-split"), ((), "--evaluate-every")):
        assert f"zo2: {option}: found" in refusal(*plan, *more)
    assert "--eval-split: found 0.5 without the rows" in refusal(
        "plan", "--method", "zeroth-order", "--model", "base", "--eval-split", 0.5
    )


# Runs that train on completions and are evaluated on other rows, and samples


CANDIDATES = [
    {"prompt": "the cat", "candidates": [" sat", " ran"], "answer": index} for index in (0, 1, 0)
]
LABELS = [{"prompt": "the cat", "label": label} for label in ("sat", "ran", "sat")]
ANSWERED = [
    {"prompt": "the cat", "answers": ["sat", "ran"]},
    {"prompt": "the dog", "answers": ["ran"]},
]


def evaluations(options: TrainOptions) -> dict[int, dict[str, float]]:
    return {
        step: dict(results)
        for step, results in Journal(options.output / "journal.jsonl").evaluations.items()
    }


JUDGED: dict[str, tuple[list[dict[str, Any]], set[str]]] = {  # rows, and what is measured on them
    "candidates": (CANDIDATES, {"choice_loss", "accuracy"}),
    "labels": (LABELS, {"choice_loss", "accuracy"}),
    "answers": (ANSWERED, {"f1", "exact_match"}),
}


@pytest.mark.parametrize(("rows", "measured"), JUDGED.values(), ids=JUDGED)
def test_a_run_on_completions_is_evaluated_on_other_rows(
    rows: list[dict[str, Any]],
    measured: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = small_run(tmp_path)
    finish(plain)
    evaluation, judged = write_rows(tmp_path / "evaluation.jsonl", rows), tmp_path / "judged"
    finish(
        replace(
            plain, output=judged, evaluation=evaluation, evaluate_every=2, keep_best=True, samples=1
        )
    )
    best = "f1" if "f1" in measured else "choice loss"
    assert f"step 3: evaluation {best} " in capsys.readouterr().err
    journals = [Journal(path / "journal.jsonl") for path in (plain.output, judged)]
    assert journals[0].updates == journals[1].updates, "steps take no notice of it"
    assert journals[1].evaluations.keys() == {0, 2, 3}
    for step, values in journals[1].evaluations.items():
        assert values.keys() == measured, "steps minimise another loss"
        shown = ("F1", "exact match") if best == "f1" else ("accuracy",)
        expected = ", ".join(
            f"{name} {values[name.lower().replace(' ', '_')]:.1%}" for name in shown
        )
        arguments = ("--at", step, "--data", evaluation, "--no-base", "--max-new-tokens", 6)
        assert f"{expected}," in run_here("evaluate", "--run", judged, *arguments).out
    written = [json.loads(line) for line in (judged / "samples.jsonl").read_text().splitlines()]
    assert [(sample["prompt"], sample["expected"].strip()) for sample in written] == [
        ("the cat", "sat")
    ] * 2
    assert "evaluation_loss" not in (judged / "metrics.jsonl").read_text()
    assert f"| step | {best} |" in (judged / "model" / "README.md").read_text()
    pytest.importorskip("matplotlib")
    report = page([read_run(judged)])
    assert f"evaluation {best}, first and last" in report
    assert "evaluation loss" not in report


def test_the_columns_of_a_run_are_those_of_both_files(tmp_path: Path) -> None:
    rows = [
        {"text": "the cat", "completion": f"{word} on", "label": word}
        for word in ("sat", "ran", "sat")
    ]
    labels = [{"text": row["text"], "label": row["label"]} for row in rows]
    data, evaluation = (
        write_rows(tmp_path / "all.jsonl", rows),
        write_rows(tmp_path / "labels.jsonl", labels),
    )
    options = small_run(
        tmp_path, data=data, evaluation=evaluation, rows=RowOptions(prompt_template="{text}")
    )
    finish(options)
    assert evaluations(options)[3].keys() == {"choice_loss", "accuracy"}


def samples(options: TrainOptions) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (options.output / "samples.jsonl").read_text().splitlines()
    ]


def test_samples_are_what_generate_writes_before_and_after_training(tmp_path: Path) -> None:
    options = small_run(tmp_path, samples=2)
    finish(options)
    written = samples(options)
    assert [(sample["step"], sample["row"]) for sample in written] == [
        (0, 0),
        (0, 1),
        (3, 0),
        (3, 1),
    ]
    first_row = json.loads(options.data.read_text().splitlines()[0])
    assert written[0]["prompt"] == first_row["prompt"]
    assert written[0]["expected"].strip() == first_row["completion"].strip()
    for sample in written:
        arguments = ("--prompt", sample["prompt"], "--max-new-tokens", 9, "--at", sample["step"])
        ended = run_here("generate", "--run", options.output, *arguments)
        assert ended.out.split() == f"{sample['prompt']} {sample['generated']}".split()


def test_a_resumed_run_adds_the_samples_that_are_missing_and_a_report_shows_them(
    tmp_path: Path,
) -> None:
    options = small_run(tmp_path, samples=1)
    finish(options)
    whole = samples(options)
    (options.output / "samples.jsonl").write_text(json.dumps(whole[0]) + '\n{"step": 3, "ro')
    for _ in range(2):  # the second time nothing is missing
        finish(options, resume=True)
        assert samples(options) == whole
    run_here("report", options.output, "--output", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    shown = [
        "Samples of run",
        "after 0 steps",
        "after 3 steps",
        *(sample["generated"] for sample in whole),
    ]
    assert [text for text in shown if text not in page] == []
    finish(replace(options, steps=5, schedule_steps=3), resume=True)
    assert [sample["step"] for sample in samples(options)] == [0, 3, 5]


NOUNS = WORDS[3:]


def test_words_are_compared_without_articles_and_punctuation() -> None:
    assert normalized("  The quick, brown Fox! ") == "quick brown fox"
    assert f1_of_words("The cat.", "a cat") == 1
    assert f1_of_words("cat and dog", "dog") == pytest.approx(0.5)  # precision 1/3, recall 1
    assert f1_of_words("cat cat", "cat") == pytest.approx(2 / 3)
    assert f1_of_words("", "cat") == f1_of_words("dog", "cat") == 0
    assert f1_of_words("no", "no answer") == 0
    assert f1_of_words("No answer.", "no answer") == 1


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(
        tmp_path / "model", small_config("llama", max_position_embeddings=32, vocab_size=len(WORDS))
    )
    save_tokenizer(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_the_model_writes_is_compared(writer: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained("model")
    tokenizer: Any = AutoTokenizer.from_pretrained("model")
    rows, matches = [], 0
    for number in range(5):
        prompt = " ".join(NOUNS[number : number + 1 + number % 3])
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        options = {
            "max_new_tokens": 4,
            "do_sample": False,
            "pad_token_id": 0,
            "attention_mask": torch.ones_like(ids),
        }
        written = model.generate(ids, eos_token_id=tokenizer.eos_token_id, **options)
        text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip()
        is_right = number % 2 == 0 and normalized(text) != ""
        matches += is_right
        rows.append(
            {"prompt": prompt, "answers": ["xyzzy", f"the {text}"] if is_right else ["xyzzy"]}
        )
    assert matches
    (writer / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        f"F1 {matches / 5:.1%}, exact match {matches / 5:.1%}, 5 rows"
        in done(
            "evaluate",
            "--model",
            "model",
            "--data",
            "asked.jsonl",
            "--max-new-tokens",
            "4",
            "--batch-size",
            "2",
        ).out
    )
