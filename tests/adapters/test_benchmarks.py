"""MeZO's tasks and P-RGE's: rows of each format become the prompts that the papers print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zo2adapters.cli import main
from zo2adapters.tasks.benchmarks import BENCHMARKS, Sizes, benchmark_of, benchmark_rows
from zo2core.errors import DataError, MissingPackageError, OptionError

# Rows as the benchmark's own files have them, or as ``datasets`` gives them, and what becomes of them.
CASES: dict[str, list[tuple[dict[str, Any], list[tuple[str, list[str], Any]]]]] = {
    "sst2": [({"sentence": "a fine film ", "label": 1}, [("a fine film It was", [" terrible", " great"], 1)])],
    "rte": [
        (
            {"premise": "It rains.", "hypothesis": "It is wet.", "label": "not_entailment"},
            [('It rains.\nDoes this mean that "It is wet." is true? Yes or No?\n', ["Yes", "No"], 1)],
        ),
        (
            {"premise": "It rains.", "hypothesis": "It is wet.", "label": 0},
            [('It rains.\nDoes this mean that "It is wet." is true? Yes or No?\n', ["Yes", "No"], 0)],
        ),
    ],
    "cb": [
        (
            {"premise": "It may rain.", "hypothesis": "it rains", "label": "neutral"},
            [('Suppose It may rain. Can we infer that "it rains"? Yes, No, or Maybe?\n', ["Yes", "No", "Maybe"], 2)],
        )
    ],
    "boolq": [
        (
            {"passage": "Cats purr.", "question": "do cats purr", "label": True},
            [("Cats purr. Do cats purr?\n", ["No", "Yes"], 1)],
        )
    ],
    "wsc": [
        (
            {"text": "Ann saw Eve. She left.", "target": {"span1_text": "Ann", "span2_text": "She"}, "label": False},
            [
                (
                    'Ann saw Eve. She left.\nIn the previous sentence, does the pronoun "she" refer to Ann? Yes or No?\n',
                    ["No", "Yes"],
                    0,
                )
            ],
        ),
        (
            {"text": "Ann saw Eve.", "span1_text": "Ann", "span2_text": "Eve", "label": 1},
            [
                (
                    'Ann saw Eve.\nIn the previous sentence, does the pronoun "eve" refer to Ann? Yes or No?\n',
                    ["No", "Yes"],
                    1,
                )
            ],
        ),
    ],
    "wic": [
        (
            {"word": "bank", "sentence1": "The bank lends.", "sentence2": "The bank is green.", "label": "false"},
            [
                (
                    'Does the word "bank" have the same meaning in these two sentences? Yes, No?\n'
                    "The bank lends.\nThe bank is green.\n",
                    ["No", "Yes"],
                    0,
                )
            ],
        )
    ],
    "multirc": [
        (
            {
                "passage": {
                    "text": "Cats purr.",
                    "questions": [
                        {"question": "Who?", "answers": [{"text": "cats", "label": 1}, {"text": "dogs", "label": 0}]}
                    ],
                }
            },
            [
                ('Cats purr.\nQuestion: Who?\nI found this answer "cats". Is that correct? Yes or No?\n', ["No", "Yes"], 1),
                ('Cats purr.\nQuestion: Who?\nI found this answer "dogs". Is that correct? Yes or No?\n', ["No", "Yes"], 0),
            ],
        ),
        (
            {"paragraph": "Cats purr.", "question": "Who?", "answer": "cats", "label": 1},
            [('Cats purr.\nQuestion: Who?\nI found this answer "cats". Is that correct? Yes or No?\n', ["No", "Yes"], 1)],
        ),
    ],
    "copa": [
        (
            {"premise": "It rained.", "choice1": "I got wet.", "choice2": "The sun set.", "question": "effect", "label": 0},
            [("It rained so", [" I got wet.", " the sun set."], 0)],
        ),
        (
            {"premise": "I got wet. ", "choice1": "It rained.", "choice2": "I slept.", "question": "cause", "label": 0},
            [("I got wet because", [" it rained.", " I slept."], 0)],
        ),
    ],
    "record": [
        (
            {
                "passage": {
                    "text": "Ann met Eve.\n@highlight\nAnn won",
                    "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 24, "end": 26}],
                },
                "qas": [{"query": "@placeholder was glad", "answers": [{"text": "Ann"}]}],
            },
            [("Ann met Eve.\n- Ann won\n-", [" Ann was glad", " Eve was glad"], [0])],
        ),
        (
            {
                "passage": "Ann met Eve.",
                "query": "@placeholder was glad",
                "entities": ["Ann", "Miss Ann", "Eve"],
                "answers": ["Miss Ann", "Ann"],
            },
            [("Ann met Eve.\n-", [" Ann was glad", " Miss Ann was glad", " Eve was glad"], [0, 1])],
        ),
    ],
    "mrpc": [
        (
            {"sentence1": "A.", "sentence2": "B.", "label": 1},
            [
                (
                    "Do the following two sentences mean the same thing? Yes or No?\nSentence 1: A.\nSentence 2: B.\n",
                    ["No", "Yes"],
                    1,
                )
            ],
        )
    ],
    "qqp": [
        (
            {"question1": "A?", "question2": "B?", "label": "not_duplicate"},
            [
                (
                    "Are these two questions asking the same thing? Yes or No?\nQuestion 1: A?\nQuestion 2: B?\n",
                    ["No", "Yes"],
                    0,
                )
            ],
        )
    ],
    "qnli": [
        (
            {"question": "A?", "sentence": "B.", "label": 0},
            [("Does this sentence answer the question? Yes or No?\nSentence 1: A?\nSentence 2: B.\n", ["Yes", "No"], 0)],
        )
    ],
    "wnli": [
        (
            {"sentence1": "A.", "sentence2": "B.", "label": 1},
            [
                (
                    "Given the first sentence, is the second sentence true? Yes or No?\nSentence 1: A.\nSentence 2: B.\n",
                    ["No", "Yes"],
                    1,
                )
            ],
        )
    ],
    "winogrande": [
        (
            {"sentence": "Ann saw Eve because _ looked.", "option1": "Ann", "option2": "Eve", "answer": "2"},
            [("Ann saw Eve because", [" Ann looked.", " Eve looked."], 1)],
        )
    ],
}
WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "squad": (
        {"title": "Cats", "context": "Cats purr.", "question": " Who purrs? ", "answers": {"text": ["Cats", "cats"]}},
        {
            "prompt": "Title: Cats\nContext: Cats purr.\nQuestion: Who purrs?\nAnswer:",
            "completion": " Cats\n",
            "answers": ["Cats", "cats"],
        },
    ),
    "drop": (
        {"passage": "Two cats.", "question": "How many?", "answers_spans": {"spans": ["2", "two"], "types": ["number"]}},
        {"prompt": "Passage: Two cats.\nQuestion: How many?\nAnswer:", "completion": " 2\n", "answers": ["2", "two"]},
    ),
}


def test_every_benchmark_has_a_case() -> None:
    assert BENCHMARKS.keys() == CASES.keys() | WRITTEN.keys()


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_the_papers(name: str) -> None:
    for row, asked in CASES[name]:
        rows = [{"prompt": prompt, "candidates": candidates, "answer": answer} for prompt, candidates, answer in asked]
        assert list(BENCHMARKS[name].questions(row)) == rows


@pytest.mark.parametrize("name", WRITTEN)
def test_prompts_of_answers_that_are_written(name: str) -> None:
    row, asked = WRITTEN[name]
    assert list(BENCHMARKS[name].questions(row)) == [asked]


@pytest.fixture
def sst2(tmp_path: Path) -> Path:
    directory = tmp_path / "sst2"
    directory.mkdir()
    for name, count in (("train", 40), ("validation", 12)):
        rows = [{"sentence": f"{name} {number}", "label": number % 2, "idx": number} for number in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_parts_are_sampled_once_and_do_not_overlap(sst2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rows", "--task", "sst2", "--data", str(sst2), "--train-rows", "20", "--test-rows", "5", "--shots", "2"]
    main([*command, "--output", str(tmp_path / "rows")])
    said = capsys.readouterr().out
    assert "20 rows in train.jsonl, 20 rows in dev.jsonl, 5 rows in test.jsonl, 5 rows in in-context.jsonl" in said
    train, dev, test, shown = (
        rows_of(tmp_path / "rows" / f"{name}.jsonl") for name in ("train", "dev", "test", "in-context")
    )
    prompts = [row["prompt"] for row in (*train, *dev)]
    assert len(set(prompts)) == 40
    assert all(prompt.startswith("train") for prompt in prompts)
    assert all(row["prompt"].startswith("validation") for row in test)
    first, second = train[:2]
    before = "".join(row["prompt"] + row["candidates"][row["answer"]] + "\n\n" for row in (first, second))
    assert [row["prompt"] for row in shown] == [before + row["prompt"] for row in test]
    main([*command, "--output", str(tmp_path / "again")])
    main([*command, "--output", str(tmp_path / "other"), "--seed", "1"])
    assert rows_of(tmp_path / "again" / "train.jsonl") == train
    assert rows_of(tmp_path / "other" / "train.jsonl") != train


def test_what_is_wrong_is_one_line(sst2: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="task: found 'sst'; expected one of boolq, cb"):
        benchmark_of("sst")
    with pytest.raises(DataError, match=r"found no train.jsonl"):
        benchmark_rows(BENCHMARKS["sst2"], tmp_path, Sizes(), seed=0)
    with pytest.raises(DataError, match=r"train.jsonl, line 1: found a row that cannot be read \(KeyError"):
        benchmark_rows(BENCHMARKS["rte"], sst2, Sizes(), seed=0)
    (sst2 / "validation.jsonl").write_text('{"sentence": "hidden", "label": -1}\n')
    with pytest.raises(DataError, match=r"validation.jsonl, line 1: found -1; expected one of negative, positive"):
        benchmark_rows(BENCHMARKS["sst2"], sst2, Sizes(), seed=0)
    with pytest.raises(SystemExit) as ended:
        main(["rows", "--task", "sst2", "--data", str(sst2), "--output", str(tmp_path / "rows")])
    assert ended.value.code == 2
    assert not (tmp_path / "rows").exists()


def test_without_a_network_the_hub_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = pytest.importorskip("datasets")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        DataError, match="nyu-mll/glue:sst2:train: found ConnectionError: no route to host; expected rows of text"
    ):
        benchmark_rows(BENCHMARKS["sst2"], None, Sizes(), seed=0)
    features = datasets.Features(
        sentence=datasets.Value("string"), label=datasets.ClassLabel(names=["negative", "positive"])
    )
    rows = {"sentence": ["a"] * 8, "label": [0, 1] * 4}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: datasets.Dataset.from_dict(rows, features))
    parts = benchmark_rows(BENCHMARKS["sst2"], None, Sizes(), seed=0)
    assert [len(rows) for rows in parts] == [6, 2, 8]
    assert [row["answer"] for row in parts.test] == [0, 1] * 4
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'zo2core\[data\]'"):
        benchmark_rows(BENCHMARKS["sst2"], None, Sizes(), seed=0)
