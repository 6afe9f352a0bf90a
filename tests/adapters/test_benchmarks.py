"""MeZO's tasks and P-RGE's: rows of each format become the prompts that the papers print."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from command_lines import done, refusal, run_here, write_rows
from engines import assert_equal
from models import WORDS, save_model, save_tokenizer, small_config
from runs import rows_of, weights_of

from zo2adapters.commands.evaluate import Evaluate
from zo2adapters.tasks.benchmarks import BENCHMARKS, benchmark_of, benchmark_rows
from zo2core.errors import DataError, MissingPackageError, OptionError

YES, NO = ["Yes", "No"], ["No", "Yes"]
RAIN = {"premise": "It rains.", "hypothesis": "It is wet."}
RAINS = 'It rains.\nDoes this mean that "It is wet." is true? Yes or No?\n'
IS_IT = 'Ann saw Eve.{}\nIn the previous sentence, does the pronoun "{}" refer to Ann? Yes or No?\n'
WHO = 'Cats purr.\nQuestion: Who?\nI found this answer "{}". Is that correct? Yes or No?\n'
ANSWERS = [{"text": "cats", "label": 1}, {"text": "dogs", "label": 0}]
PASSAGE = {
    "text": "Ann met Eve.\n@highlight\nAnn won",
    "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 24, "end": 26}],
}
SAW_EVE = {
    "text": "Ann saw Eve. She left.",
    "target": {"span1_text": "Ann", "span2_text": "She"},
    "label": False,
}
BANKS = {
    "word": "bank",
    "sentence1": "The bank lends.",
    "sentence2": "The bank is green.",
    "label": "false",
}
BANK = (
    'Does the word "bank" have the same meaning in these two sentences? Yes, No?\nThe bank '
    "lends.\nThe bank is green.\n"
)
WET = {
    "premise": "It rained.",
    "choice1": "I got wet.",
    "choice2": "The sun set.",
    "question": "effect",
    "label": 0,
}
RAINED = {
    "premise": "I got wet. ",
    "choice1": "It rained.",
    "choice2": "I slept.",
    "question": "cause",
    "label": 0,
}
GLAD = {"query": "@placeholder was glad", "answers": [{"text": "Ann"}]}
MISS = {
    "entities": ["Ann", "Miss Ann", "Eve"],
    "query": GLAD["query"],
    "answers": ["Miss Ann", "Ann"],
}
LOOKED = {
    "sentence": "Ann saw Eve because _ looked.",
    "option1": "Ann",
    "option2": "Eve",
    "answer": "2",
}
CATS = {
    "title": "Cats",
    "context": "Cats purr.",
    "question": " Who purrs? ",
    "answers": {"text": ["Cats", "cats"]},
}
TWO = {
    "passage": "Two cats.",
    "question": "How many?",
    "answers_spans": {"spans": ["2", "two"], "types": ["number"]},
}
PAIR = {"sentence1": "A.", "sentence2": "B.", "label": 1}
SENTENCES = "Yes or No?\nSentence 1: A.\nSentence 2: B.\n"
Asked = tuple[str, list[str], Any]
PARTS = ("train", "dev", "test", "in-context")

# Rows as the benchmark's own files have them, or as ``datasets`` gives them, and what becomes of
# them.
CASES: list[tuple[str, dict[str, Any], list[Asked]]] = [
    (
        "sst2",
        {"sentence": "a fine film ", "label": 1},
        [("a fine film It was", [" terrible", " great"], 1)],
    ),
    ("rte", {**RAIN, "label": "not_entailment"}, [(RAINS, YES, 1)]),
    ("rte", {**RAIN, "label": 0}, [(RAINS, YES, 0)]),
    (
        "cb",
        {"premise": "It may rain.", "hypothesis": "it rains", "label": "neutral"},
        [
            (
                'Suppose It may rain. Can we infer that "it rains"? Yes, No, or Maybe?\n',
                ["Yes", "No", "Maybe"],
                2,
            )
        ],
    ),
    (
        "boolq",
        {"passage": "Cats purr.", "question": "do cats purr", "label": True},
        [("Cats purr. Do cats purr?\n", NO, 1)],
    ),
    ("wsc", SAW_EVE, [(IS_IT.format(" She left.", "she"), NO, 0)]),
    (
        "wsc",
        {"text": "Ann saw Eve.", "span1_text": "Ann", "span2_text": "Eve", "label": 1},
        [(IS_IT.format("", "eve"), NO, 1)],
    ),
    ("wic", BANKS, [(BANK, NO, 0)]),
    (
        "multirc",
        {
            "passage": {
                "text": "Cats purr.",
                "questions": [{"question": "Who?", "answers": ANSWERS}],
            }
        },
        [(WHO.format("cats"), NO, 1), (WHO.format("dogs"), NO, 0)],
    ),
    (
        "multirc",
        {"paragraph": "Cats purr.", "question": "Who?", "answer": "cats", "label": 1},
        [(WHO.format("cats"), NO, 1)],
    ),
    ("copa", WET, [("It rained so", [" I got wet.", " the sun set."], 0)]),
    ("copa", RAINED, [("I got wet because", [" it rained.", " I slept."], 0)]),
    (
        "record",
        {"passage": PASSAGE, "qas": [GLAD]},
        [("Ann met Eve.\n- Ann won\n-", [" Ann was glad", " Eve was glad"], [0])],
    ),
    (
        "record",
        {"passage": "Ann met Eve.", **MISS},
        [("Ann met Eve.\n-", [" Ann was glad", " Miss Ann was glad", " Eve was glad"], [0, 1])],
    ),
    ("mrpc", PAIR, [(f"Do the following two sentences mean the same thing? {SENTENCES}", NO, 1)]),
    (
        "qqp",
        {"question1": "A?", "question2": "B?", "label": "not_duplicate"},
        [
            (
                "Are these two questions asking the same thing? Yes or No?\nQuestion 1: "
                "A?\nQuestion 2: B?\n",
                NO,
                0,
            )
        ],
    ),
    (
        "qnli",
        {"question": "A?", "sentence": "B.", "label": 0},
        [
            (
                "Does this sentence answer the question? Yes or No?\nSentence 1: A?\nSentence 2: "
                "B.\n",
                YES,
                0,
            )
        ],
    ),
    (
        "wnli",
        PAIR,
        [(f"Given the first sentence, is the second sentence true? {SENTENCES}", NO, 1)],
    ),
    ("winogrande", LOOKED, [("Ann saw Eve because", [" Ann looked.", " Eve looked."], 1)]),
    (
        "squad",
        CATS,
        [
            (
                "Title: Cats\nContext: Cats purr.\nQuestion: Who purrs?\nAnswer:",
                ["Cats", "cats"],
                " Cats\n",
            )
        ],
    ),
    ("drop", TWO, [("Passage: Two cats.\nQuestion: How many?\nAnswer:", ["2", "two"], " 2\n")]),
]


def test_every_benchmark_has_a_case() -> None:
    assert BENCHMARKS.keys() == {name for name, *_ in CASES}


@pytest.mark.parametrize(("name", "row", "asked"), CASES)
def test_prompts_are_those_of_the_papers(
    name: str, row: dict[str, Any], asked: list[Asked]
) -> None:
    """Of answers that are chosen, and in squad and drop of answers that are written."""
    keys = ("answers", "completion") if name in ("squad", "drop") else ("candidates", "answer")
    assert list(BENCHMARKS[name].questions(row)) == [
        dict(zip(("prompt", *keys), values, strict=True)) for values in asked
    ]


@pytest.fixture
def sst2(tmp_path: Path) -> Path:
    directory = tmp_path / "sst2"
    directory.mkdir()
    for name, count in (("train", 40), ("validation", 12)):
        rows = [
            {"sentence": f"{name} {number}", "label": number % 2, "idx": number}
            for number in range(count)
        ]
        write_rows(directory / f"{name}.jsonl", rows)
    return directory


def test_parts_are_sampled_once_and_do_not_overlap(sst2: Path, tmp_path: Path) -> None:
    command = (
        "rows",
        "--task",
        "sst2",
        "--data",
        sst2,
        "--train-rows",
        20,
        "--test-rows",
        5,
        "--shots",
        2,
    )
    said = done(*command, "--output", tmp_path / "rows").out
    assert (
        "20 rows in train.jsonl, 20 rows in dev.jsonl, 5 rows in test.jsonl, 5 rows in "
        "in-context.jsonl" in said
    )
    train, dev, test, shown = (rows_of(tmp_path / "rows" / f"{name}.jsonl") for name in PARTS)
    prompts = [row["prompt"] for row in (*train, *dev)]
    assert len(set(prompts)) == 40
    assert all(prompt.startswith("train") for prompt in prompts)
    assert all(row["prompt"].startswith("validation") for row in test)
    first, second = train[:2]
    before = "".join(
        row["prompt"] + row["candidates"][row["answer"]] + "\n\n" for row in (first, second)
    )
    assert [row["prompt"] for row in shown] == [before + row["prompt"] for row in test]
    done(*command, "--output", tmp_path / "again")
    done(*command, "--output", tmp_path / "other", "--seed", "1")
    assert rows_of(tmp_path / "again" / "train.jsonl") == train
    assert rows_of(tmp_path / "other" / "train.jsonl") != train


def test_what_is_wrong_is_one_line(sst2: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="task: found 'sst'; expected one of boolq, cb"):
        benchmark_of("sst")
    with pytest.raises(DataError, match=r"found no train.jsonl"):
        benchmark_rows(BENCHMARKS["sst2"], tmp_path, seed=0)
    with pytest.raises(
        DataError, match=r"train.jsonl, line 1: found a row that cannot be read \(KeyError"
    ):
        benchmark_rows(BENCHMARKS["rte"], sst2, seed=0)
    (sst2 / "validation.jsonl").write_text('{"sentence": "hidden", "label": -1}\n')
    with pytest.raises(
        DataError, match=r"validation.jsonl, line 1: found -1; expected one of negative, positive"
    ):
        benchmark_rows(BENCHMARKS["sst2"], sst2, seed=0)
    refusal("rows", "--task", "sst2", "--data", sst2, "--output", tmp_path / "new" / "rows")
    assert not (tmp_path / "new").exists()


def test_without_a_network_the_hub_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = pytest.importorskip("datasets")
    unreachable = MagicMock(side_effect=ConnectionError("no route to host\nand more"))
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    told = "nyu-mll/glue:sst2:train: found ConnectionError: no route to host; expected rows of text"
    with pytest.raises(DataError, match=told):
        benchmark_rows(BENCHMARKS["sst2"], None, seed=0)
    label = datasets.ClassLabel(names=["negative", "positive"])
    features = datasets.Features(sentence=datasets.Value("string"), label=label)
    rows = {"sentence": ["a"] * 8, "label": [0, 1] * 4}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, split: datasets.Dataset.from_dict(rows, features)
    )
    parts = benchmark_rows(BENCHMARKS["sst2"], None, seed=0)
    assert [len(rows) for rows in parts.values()] == [6, 2, 8]
    assert [row["answer"] for row in parts["test"]] == [0, 1] * 4
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        MissingPackageError,
        match=r"pip install 'zo2core\[data\]'; in a clone: pip install '\.\[data\]'",
    ):
        benchmark_rows(BENCHMARKS["sst2"], None, seed=0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = small_config("llama", vocab_size=len(WORDS), max_position_embeddings=64)
    save_tokenizer(save_model(tmp_path / "base", config, torch.float32))
    (tmp_path / "sst2").mkdir()
    for name in ("train", "validation"):
        rows = [
            {"sentence": f"the {word}", "label": number % 2} for number, word in enumerate(WORDS)
        ]
        write_rows(tmp_path / "sst2" / f"{name}.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


ON_TASK = ("--task", "sst2", "--data", "sst2")
OPTIONS = ("--model", "base", "--lr", 1e-3, "--batch-size", 2)
ONE_STEP = (
    "train",
    "--method",
    "zeroth-order",
    *ON_TASK,
    "--output",
    "run",
    *OPTIONS,
    "--steps",
    1,
)


def test_one_command_does_what_its_parts_do(folder: Path) -> None:
    options = (*OPTIONS, "--steps", 6, "--evaluate-every", 2)
    out = done(
        "train", "--method", "zeroth-order", *ON_TASK, "--shots", 2, "--output", "run", *options
    ).out
    scores = [line for line in out.splitlines() if "accuracy" in line]
    assert [line.partition(":")[0] for line in scores] == [
        "zero-shot",
        "with 2 demonstrations",
        "fine-tuned",
    ]
    done("rows", *ON_TASK, "--shots", 2, "--output", "rows")
    for name in PARTS:
        assert (folder / "run.rows" / f"{name}.jsonl").read_bytes() == (
            folder / "rows" / f"{name}.jsonl"
        ).read_bytes()
    rows = ("--data", "rows/train.jsonl", "--evaluation", "rows/dev.jsonl")
    done("train", "--method", "zeroth-order", *rows, "--keep-best", "--output", "parts", *options)
    assert_equal(weights_of("run/model"), weights_of("parts/model"))
    for model, line in (("base", scores[0]), ("parts/model", scores[2])):
        evaluated = done(
            "evaluate", "--model", model, "--data", "rows/test.jsonl", "--batch-size", 2
        )
        assert evaluated.out.strip() == line.partition(": ")[2]


def test_rows_that_a_killed_process_left_are_used_again_and_others_are_refused(
    folder: Path,
) -> None:
    done("rows", *ON_TASK, "--output", "run.rows")
    test = folder / "run.rows" / "test.jsonl"
    whole = test.read_bytes()
    test.write_bytes(whole + b"\n")
    assert "run.rows: found something at this path" in refusal(*ONE_STEP)
    assert test.exists()
    test.write_bytes(whole)
    assert "run.rows: " in done(*ONE_STEP).out


def test_an_interruption_before_the_run_leaves_no_rows_and_later_one_resumes(
    folder: Path,
) -> None:
    with patch.object(Evaluate, "run", side_effect=KeyboardInterrupt):
        assert run_here(*ONE_STEP).status == 130
    assert not (folder / "run.rows").exists()
    done(*ONE_STEP)
    assert "continue the run with zo2 train --resume run" in refusal(*ONE_STEP)
    assert "leave --task out" in refusal(
        "train", "--method", "zeroth-order", "--task", "sst2", "--resume", "run"
    )
    done("train", "--resume", "run")
