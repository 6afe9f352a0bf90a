"""MeZO's tasks and P-RGE's: rows of each format become the prompts that the papers print."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done, refusal, run_here
from models import WORDS, save_model, save_tokenizer, small_config

from zo2adapters.cli import main
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
SAW_EVE = {"text": "Ann saw Eve. She left.", "target": {"span1_text": "Ann", "span2_text": "She"}, "label": False}
BANKS = {"word": "bank", "sentence1": "The bank lends.", "sentence2": "The bank is green.", "label": "false"}
BANK = 'Does the word "bank" have the same meaning in these two sentences? Yes, No?\nThe bank lends.\nThe bank is green.\n'
WET = {"premise": "It rained.", "choice1": "I got wet.", "choice2": "The sun set.", "question": "effect", "label": 0}
RAINED = {"premise": "I got wet. ", "choice1": "It rained.", "choice2": "I slept.", "question": "cause", "label": 0}
GLAD = {"query": "@placeholder was glad", "answers": [{"text": "Ann"}]}
MISS = {"entities": ["Ann", "Miss Ann", "Eve"], "query": GLAD["query"], "answers": ["Miss Ann", "Ann"]}
LOOKED = {"sentence": "Ann saw Eve because _ looked.", "option1": "Ann", "option2": "Eve", "answer": "2"}
CATS = {"title": "Cats", "context": "Cats purr.", "question": " Who purrs? ", "answers": {"text": ["Cats", "cats"]}}
TWO = {"passage": "Two cats.", "question": "How many?", "answers_spans": {"spans": ["2", "two"], "types": ["number"]}}
PAIR = {"sentence1": "A.", "sentence2": "B.", "label": 1}
SENTENCES = "Yes or No?\nSentence 1: A.\nSentence 2: B.\n"
Asked = tuple[str, list[str], Any]

# Rows as the benchmark's own files have them, or as ``datasets`` gives them, and what becomes of them.
CASES: list[tuple[str, dict[str, Any], list[Asked]]] = [
    ("sst2", {"sentence": "a fine film ", "label": 1}, [("a fine film It was", [" terrible", " great"], 1)]),
    ("rte", {**RAIN, "label": "not_entailment"}, [(RAINS, YES, 1)]),
    ("rte", {**RAIN, "label": 0}, [(RAINS, YES, 0)]),
    (
        "cb",
        {"premise": "It may rain.", "hypothesis": "it rains", "label": "neutral"},
        [('Suppose It may rain. Can we infer that "it rains"? Yes, No, or Maybe?\n', ["Yes", "No", "Maybe"], 2)],
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
        {"passage": {"text": "Cats purr.", "questions": [{"question": "Who?", "answers": ANSWERS}]}},
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
        [("Are these two questions asking the same thing? Yes or No?\nQuestion 1: A?\nQuestion 2: B?\n", NO, 0)],
    ),
    (
        "qnli",
        {"question": "A?", "sentence": "B.", "label": 0},
        [("Does this sentence answer the question? Yes or No?\nSentence 1: A?\nSentence 2: B.\n", YES, 0)],
    ),
    ("wnli", PAIR, [(f"Given the first sentence, is the second sentence true? {SENTENCES}", NO, 1)]),
    ("winogrande", LOOKED, [("Ann saw Eve because", [" Ann looked.", " Eve looked."], 1)]),
    ("squad", CATS, [("Title: Cats\nContext: Cats purr.\nQuestion: Who purrs?\nAnswer:", ["Cats", "cats"], " Cats\n")]),
    ("drop", TWO, [("Passage: Two cats.\nQuestion: How many?\nAnswer:", ["2", "two"], " 2\n")]),
]


def test_every_benchmark_has_a_case() -> None:
    assert BENCHMARKS.keys() == {name for name, *_ in CASES}


@pytest.mark.parametrize(("name", "row", "asked"), CASES)
def test_prompts_are_those_of_the_papers(name: str, row: dict[str, Any], asked: list[Asked]) -> None:
    """Of answers that are chosen, and in squad and drop of answers that are written."""
    keys = ("answers", "completion") if name in ("squad", "drop") else ("candidates", "answer")
    assert list(BENCHMARKS[name].questions(row)) == [dict(zip(("prompt", *keys), values, strict=True)) for values in asked]


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


def test_parts_are_sampled_once_and_do_not_overlap(sst2: Path, tmp_path: Path) -> None:
    command = ["rows", "--task", "sst2", "--data", str(sst2), "--train-rows", "20", "--test-rows", "5", "--shots", "2"]
    said = done(*command, "--output", tmp_path / "rows").out
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
    done(*command, "--output", tmp_path / "again")
    done(*command, "--output", tmp_path / "other", "--seed", "1")
    assert rows_of(tmp_path / "again" / "train.jsonl") == train
    assert rows_of(tmp_path / "other" / "train.jsonl") != train


def test_what_is_wrong_is_one_line(sst2: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="task: found 'sst'; expected one of boolq, cb"):
        benchmark_of("sst")
    with pytest.raises(DataError, match=r"found no train.jsonl"):
        benchmark_rows(BENCHMARKS["sst2"], tmp_path, seed=0)
    with pytest.raises(DataError, match=r"train.jsonl, line 1: found a row that cannot be read \(KeyError"):
        benchmark_rows(BENCHMARKS["rte"], sst2, seed=0)
    (sst2 / "validation.jsonl").write_text('{"sentence": "hidden", "label": -1}\n')
    with pytest.raises(DataError, match=r"validation.jsonl, line 1: found -1; expected one of negative, positive"):
        benchmark_rows(BENCHMARKS["sst2"], sst2, seed=0)
    with pytest.raises(SystemExit) as ended:
        main(["rows", "--task", "sst2", "--data", str(sst2), "--output", str(tmp_path / "new" / "rows")])
    assert ended.value.code == 2
    assert not (tmp_path / "new").exists()


def test_without_a_network_the_hub_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = pytest.importorskip("datasets")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        DataError, match="nyu-mll/glue:sst2:train: found ConnectionError: no route to host; expected rows of text"
    ):
        benchmark_rows(BENCHMARKS["sst2"], None, seed=0)
    features = datasets.Features(
        sentence=datasets.Value("string"), label=datasets.ClassLabel(names=["negative", "positive"])
    )
    rows = {"sentence": ["a"] * 8, "label": [0, 1] * 4}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: datasets.Dataset.from_dict(rows, features))
    parts = benchmark_rows(BENCHMARKS["sst2"], None, seed=0)
    assert [len(rows) for rows in parts.values()] == [6, 2, 8]
    assert [row["answer"] for row in parts["test"]] == [0, 1] * 4
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'zo2core\[data\]'; in a clone: pip install '\.\[data\]'"):
        benchmark_rows(BENCHMARKS["sst2"], None, seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = small_config("llama", vocab_size=len(WORDS), max_position_embeddings=64)
    save_tokenizer(save_model(tmp_path / "base", config, torch.float32))
    (tmp_path / "sst2").mkdir()
    for name in ("train", "validation"):
        rows = [{"sentence": f"the {word}", "label": number % 2} for number, word in enumerate(WORDS)]
        (tmp_path / "sst2" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_one_command_does_what_its_parts_do(folder: Path) -> None:
    options = ["--model", folder / "base", "--steps", 6, "--lr", 1e-3, "--evaluate-every", 2, "--batch-size", 2]
    ended = run_here(
        "train", "--task", "sst2", "--data", folder / "sst2", "--shots", 2, "--output", folder / "run", *options
    )
    assert ended.status == 0, ended.err
    scores = [line for line in ended.out.splitlines() if "accuracy" in line]
    assert [line.partition(":")[0] for line in scores] == ["zero-shot", "with 2 demonstrations", "fine-tuned"]
    assert (
        run_here("rows", "--task", "sst2", "--data", folder / "sst2", "--shots", 2, "--output", folder / "rows").status == 0
    )
    for name in ("train", "dev", "test", "in-context"):
        ours, theirs = (folder / where / f"{name}.jsonl" for where in ("run.rows", "rows"))
        assert ours.read_bytes() == theirs.read_bytes()
    rows = ["--data", folder / "rows" / "train.jsonl", "--evaluation", folder / "rows" / "dev.jsonl"]
    assert run_here("train", *rows, "--keep-best", "--output", folder / "parts", *options).status == 0
    ours, theirs = (folder / run / "model" / "model.safetensors" for run in ("run", "parts"))
    assert ours.read_bytes() == theirs.read_bytes()
    for model, line in ((folder / "base", scores[0]), (folder / "parts" / "model", scores[2])):
        evaluating = ["evaluate", "--model", model, "--data", folder / "rows" / "test.jsonl", "--batch-size", 2]
        assert run_here(*evaluating).out.strip() == line.partition(": ")[2]


def test_rows_that_a_killed_process_left_are_used_again_and_others_are_refused(folder: Path) -> None:
    options = ["--model", folder / "base", "--steps", 1, "--lr", 1e-3, "--batch-size", 2]
    given = ["train", "--task", "sst2", "--data", folder / "sst2", "--output", folder / "run", *options]
    assert run_here("rows", "--task", "sst2", "--data", folder / "sst2", "--output", folder / "run.rows").status == 0
    whole = (folder / "run.rows" / "test.jsonl").read_bytes()
    (folder / "run.rows" / "test.jsonl").write_bytes(whole + b"\n")
    assert "run.rows: found something at this path" in refusal(*given)
    assert (folder / "run.rows").exists()
    (folder / "run.rows" / "test.jsonl").write_bytes(whole)
    ended = run_here(*given)
    assert ended.status == 0, ended
    assert f"{folder / 'run.rows'}: " in ended.out


def test_an_interruption_before_the_run_leaves_no_rows_and_later_one_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    options = ["--model", folder / "base", "--steps", 1, "--lr", 1e-3, "--batch-size", 2]
    given = ["train", "--task", "sst2", "--data", folder / "sst2", "--output", folder / "run", *options]
    with monkeypatch.context() as patch:
        patch.setattr(Evaluate, "run", interrupted)
        assert run_here(*given).status == 130
    assert not (folder / "run.rows").exists()
    assert run_here(*given).status == 0
    assert f"continue the run with zo2 train --resume {folder / 'run'}" in refusal(*given)
    assert "leave --task out" in refusal("train", "--task", "sst2", "--resume", folder / "run")
    assert run_here("train", "--resume", folder / "run").status == 0
