"""Data files of every kind, columns and templates, lengths, and rows that are taken from the training file."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import refusal, run_here
from models import WORDS, save_model, save_tokenizer, small_config
from runs import finish, outcome, small_run
from tokenized_rows import ANSWER, ASK, TOKENIZER, make_tokenizer, text_of

from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.row_source import data_sha256, parsed_rows, saved_path
from zo2adapters.tasks.rows import Rows, collate
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_directory import RunDirectory
from zo2adapters.trainers.trainer import Trainer
from zo2core import Journal
from zo2core.errors import DataError, MissingPackageError, OptionError

datasets: Any = importlib.import_module("datasets")  # these packages have no types
pa: Any = importlib.import_module("pyarrow")
pq: Any = importlib.import_module("pyarrow.parquet")

ROWS = [{"text": "The sky", "kind": "good", "n": 1}, {"text": 'a "b", c\nd', "kind": "bad", "n": 2}]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_json(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def save_dataset(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(list(rows)).save_to_disk(path)
    return path


def save_splits(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    both = {"train": datasets.Dataset.from_list(list(rows)), "test": datasets.Dataset.from_list(list(rows[:1]))}
    datasets.DatasetDict(both).save_to_disk(path)
    return Path(f"{path}:train")


KINDS: dict[str, Callable[[Path, Sequence[dict[str, Any]]], Path]] = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "saved": save_dataset,
    "splits": save_splits,
}
every_kind = pytest.mark.parametrize("name", KINDS)


@every_kind
def test_every_kind_of_file_has_the_same_rows(name: str, tmp_path: Path) -> None:
    path = KINDS[name](tmp_path / name, ROWS)
    expected = [{**row, "n": str(row["n"])} for row in ROWS] if name.endswith("csv") else ROWS
    assert list(parsed_rows(path)) == list(enumerate(expected, 1))
    template = RowOptions(prompt_template="{n}. {text}\\nKind:", completion_column="kind")
    dataset = RowReader(TOKENIZER, 99, template).read(path)
    assert [text_of(row) for row in dataset] == ["1. The sky\nKind: good</s>", '2. a "b", c\nd\nKind: bad</s>']


@every_kind
def test_a_digest_changes_with_the_rows_and_with_nothing_else(name: str, tmp_path: Path) -> None:
    for folder in ("first", "again", "other"):
        (tmp_path / folder).mkdir()
    paths = [KINDS[name](tmp_path / folder / name, ROWS) for folder in ("first", "other")]
    other = KINDS[name](tmp_path / "again" / name, ROWS[:1])
    assert data_sha256(paths[0]) == data_sha256(paths[1] if name.startswith("rows") else paths[0])
    assert data_sha256(paths[0]) != data_sha256(other)


@every_kind
def test_an_error_names_file_row_column_and_the_nearest_name(name: str, tmp_path: Path) -> None:
    path = KINDS[name](tmp_path / name, ROWS)
    with pytest.raises(DataError) as caught:
        RowReader(TOKENIZER, 99, RowOptions(text_column="txt")).read(path)
    unit = "line" if name.endswith("jsonl") else "row"
    assert caught.value.where == f"{path}, {unit} 1"
    assert "'txt'" in caught.value.found
    assert "--columns text" in caught.value.expected
    assert "'text'" in caught.value.remedy


def test_a_run_trains_on_each_kind_alike_and_its_provenance_has_the_digest(tmp_path: Path) -> None:
    rows = [{"prompt": "the cat", "completion": f" {word}"} for word in WORDS[5:11]]
    shared = small_run(tmp_path)
    losses = []
    for name, write in KINDS.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        path = write(tmp_path / "data" / name, rows)
        options = replace(shared, data=path, output=tmp_path / f"run-{name}")
        finish(options)
        with contextlib.closing(Journal(options.output / "journal.jsonl")) as journal:
            assert journal.header is not None
            assert journal.header["provenance"]["data sha256"] == data_sha256(path)
            losses.append([update.losses for update in journal.updates])
        with Trainer(RunDirectory.options(options.output), resume=True, quiet=True) as trainer:
            assert trainer.engine.version == 3
    assert len(losses[0]) == 3
    assert losses == losses[:1] * len(KINDS)


MALFORMED: dict[str, tuple[str, str, str]] = {
    "a cell too many": ("rows.csv", "a,b\n1,2,3\n", "row 1"),
    "a column twice": ("rows.csv", "a,a\n1,2\n", "'a', 'a'"),
    "an open quote": ("rows.csv", 'a,b\n1,2\n"3,4\n', "row 2"),
    "no rows of CSV": ("rows.csv", "a,b\n", "no rows"),
    "an empty list": ("rows.json", "[]", "no rows"),
    "a list of texts": ("rows.json", '[{"text": "a b"}, "c"]', "row 2"),
    "a list that is cut": ("rows.json", '[{"text": "a b"}', "not JSON"),
    "an object over lines": ("rows.json", '{\n"text": "a b"}', "line 1"),
    "no Parquet": ("rows.parquet", "text", "a Parquet file"),
    "tabs named as such": ("rows.tsv", "a\tb\n1\t2\n", "ends with .csv, .json, .jsonl or .parquet"),
    "plain text": ("rows.txt", "some text\n", "the ending .txt"),
    "a spreadsheet": ("rows.xlsx", "PK\x03\x04", "save it as CSV"),
    "semicolons": ("rows.csv", "a;b\n1;2\n", "commas instead of semicolons"),
    "tabs": ("rows.csv", "a\tb\n1\t2\n", "commas instead of tabs"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused(name: str, tmp_path: Path) -> None:
    file, content, named = MALFORMED[name]
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError) as caught:
        list(parsed_rows(tmp_path / file))
    assert named in str(caught.value)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "rows.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPackageError, match="pip install 'pyarrow'"):
        list(parsed_rows(path))


def test_a_split_that_is_missing_lists_the_others(tmp_path: Path) -> None:
    path = save_splits(tmp_path / "splits", ROWS)
    for wrong in (path.with_name("splits"), path.with_name("splits:dev")):
        with pytest.raises(DataError, match="train, test"):
            list(parsed_rows(wrong))
    saved = save_dataset(tmp_path / "saved", ROWS)
    with pytest.raises(DataError, match="without the split"):
        list(parsed_rows(saved.with_name("saved:train")))


def test_the_hub_is_asked_for_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    held = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)

    def load(name: str, configuration: str | None, split: str) -> Any:
        asked.append((name, configuration, split))
        return held

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = [{"text": "a", "label": "good"}, {"text": "b", "label": "bad"}]
    assert [row for _, row in parsed_rows(Path("user/tweets:train"))] == rows
    assert [row for _, row in parsed_rows(Path("user/tweets:small:train[:10%]"))] == rows
    assert asked == [("user/tweets", None, "train"), ("user/tweets", "small", "train[:10%]")]
    assert saved_path(Path("user/tweets:train")) == "user/tweets:train"
    assert data_sha256(Path("user/tweets:train")) == data_sha256(Path("user/other:train"))


def test_a_hub_that_cannot_be_reached_is_one_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match="ConnectionError: no route"):
        list(parsed_rows(Path("tweets:train")))


# Columns, templates and labels


def choices(tmp_path: Path, rows: Sequence[dict[str, Any]], **options: Any) -> Rows:
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    read = RowReader(TOKENIZER, 99, RowOptions(**options)).read(path)
    assert read.format is RowFormat.CANDIDATES
    return read


def spoken(read: Rows) -> list[tuple[str, list[str], int]]:
    def text(ids: Sequence[int]) -> str:
        return str(TOKENIZER.decode(list(ids)))

    return [(text(row.prompt), [text(candidate) for candidate in row.candidates], row.answer) for row in read]


def test_a_prompt_with_a_label_is_compared_with_all_labels(tmp_path: Path) -> None:
    read = choices(tmp_path, ROWS, prompt_template="{text}\\nKind:", label_column="kind")
    assert [(candidates, answer) for _, candidates, answer in spoken(read)] == [
        ([" bad", " good"], 1),
        ([" bad", " good"], 0),
    ]


def test_labels_that_are_numbers_get_their_texts_in_order(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
    read = choices(tmp_path, rows, prompt_template="{text} It was", labels=("terrible", "great"))
    assert [(texts, answer) for _, texts, answer in spoken(read)] == [
        ([" terrible", " great"], 1),
        ([" terrible", " great"], 0),
    ]
    read = choices(tmp_path, [{"text": "a", "label": 10}, {"text": "b", "label": 9}], prompt_template="{text}:")
    assert [(texts, answer) for _, texts, answer in spoken(read)] == [([" 9", " 10"], 1), ([" 9", " 10"], 0)]


def test_completions_may_be_the_labels(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": " good"}, {"prompt": "b", "completion": " bad"}]
    read = choices(tmp_path, rows, label_column="completion")
    assert spoken(read) == [("a", [" bad", " good"], 1), ("b", [" bad", " good"], 0)]


def test_labels_of_the_evaluation_are_those_of_the_training_file(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    options = RowOptions(prompt_template="{text}", label_column="kind")
    evaluation = write_jsonl(tmp_path / "evaluation.jsonl", ROWS[:1])
    _, read = RowReader(TOKENIZER, 99, options).read_files(data, evaluation, None)
    assert read is not None
    assert read.format is RowFormat.CANDIDATES
    assert [len(row.candidates) for row in read] == [2]
    write_jsonl(evaluation, [{"text": "a", "kind": "goof"}])
    with pytest.raises(DataError) as caught:
        RowReader(TOKENIZER, 99, options).read_files(data, evaluation, None)
    assert caught.value.where == f"{evaluation}, line 1"
    assert "'good'" in caught.value.remedy


@pytest.mark.parametrize("label_column", ["kind", None])
def test_an_empty_label_is_no_label_but_refused_by_row_and_column(tmp_path: Path, label_column: str | None) -> None:
    rows = [{"prompt": row["text"], label_column or "label": row["kind"]} for row in ROWS]
    rows.append({"prompt": "a", label_column or "label": " "})
    with pytest.raises(DataError) as caught:
        choices(tmp_path, rows, label_column=label_column)
    assert caught.value.where == f"{tmp_path / 'rows.jsonl'}, line 3"
    assert caught.value.found == f"that the column {label_column or 'label'!r} is empty"
    assert caught.value.remedy == "remove the row or fill it"


def test_a_label_without_a_prompt_is_told_with_a_column_of_the_row(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        choices(tmp_path, [{"kind": "good", "review": "a"}], label_column="kind")
    assert "'{review} Label:'" in caught.value.remedy


def test_one_label_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the label 'good' in every row"):
        choices(tmp_path, ROWS[:1], prompt_template="{text}", label_column="kind")


@pytest.mark.parametrize("template", ["no column", "{}", "{text", "{text!r}", "{text:>9}", "{text.upper}", "{text[0]}"])
def test_a_template_without_plain_columns_is_refused(template: str) -> None:
    with pytest.raises(OptionError) as caught:
        RowOptions(prompt_template=template).require_valid()
    assert caught.value.where == "prompt_template"


def test_a_list_in_a_template_is_refused_by_row_and_column(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": ["a"], "completion": "b"}])
    with pytest.raises(DataError, match=r"line 1: found .* in the column 'text'"):
        RowReader(TOKENIZER, 9, RowOptions(prompt_template="{text}")).read(path)


# Messages


def test_messages_learn_the_answers_and_nothing_between_them(tmp_path: Path) -> None:
    talk = [ASK, ANSWER, {"role": "user", "content": "The sky?"}, {"role": "assistant", "content": "The sky is"}, ASK]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"talk": talk}])
    (row,) = RowReader(TOKENIZER, 99, RowOptions(messages_column="talk")).read(path)
    labels = collate([row], pad_token_id=0)["labels"][0]
    learned = TOKENIZER.decode([token for token in labels.tolist() if token >= 0])
    assert learned == "It is blue.<|end|>The sky is<|end|>"
    assert row.sequences == [(len(row.input_ids), int((labels[1:] >= 0).sum()))]
    options = RowOptions(messages_column="talk", train_on="all")
    (everything,) = RowReader(TOKENIZER, 99, options).read(path)
    assert (everything.prompt_length, everything.later_prompts) == (0, ())
    assert Rows((row,)).digest() != Rows((replace(row, later_prompts=()),)).digest()


def test_messages_without_an_answer_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [ASK]}])
    with pytest.raises(DataError, match=r"line 1.*'assistant'.*--train-on all"):
        RowReader(TOKENIZER, 99).read(path)


def test_a_template_that_rewrites_earlier_answers_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    )
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [ASK, ANSWER, ASK, ANSWER]}])
    with pytest.raises(DataError, match="changes an answer"):
        RowReader(make_tokenizer(template=template), 99).read(path)


# What holds for rows of each format

FORMATS: dict[RowFormat, dict[str, Any]] = {
    RowFormat.TEXT: {"text": "The sky"},
    RowFormat.LABELS: {"text": "The sky", "label": 1},
    RowFormat.CANDIDATES: {"prompt": "The", "candidates": [" sky", " is"], "answer": 0},
    RowFormat.PREFERENCES: {"prompt": "The", "chosen": " sky", "rejected": " is"},
    RowFormat.ANSWERS: {"prompt": "The", "answers": ["sky"]},
}
every_format = pytest.mark.parametrize("form", FORMATS)


def changed(form: RowFormat, text: str) -> dict[str, Any]:
    """The row of a format with another text in place of its first word."""
    row: dict[str, Any] = json.loads(json.dumps(FORMATS[form]).replace("The", text))
    return row


def reader(form: RowFormat, length: int, tokenizer: Any = TOKENIZER, **options: Any) -> RowReader:
    config = small_config("llama", num_labels=2) if form is RowFormat.LABELS else None
    return RowReader(tokenizer, length, labelled_for=config, new_tokens=2 if form is RowFormat.ANSWERS else None, **options)


@every_format
def test_rows_that_are_too_long_are_cut_dropped_or_refused(form: RowFormat, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [FORMATS[form], changed(form, "The sky is blue. The")])
    can_be_cut = form in (RowFormat.TEXT, RowFormat.LABELS)
    for choice in ("auto", "cut", "drop", "refuse"):
        reading = reader(form, 4, options=RowOptions(too_long=choice))
        if choice == "drop" or (can_be_cut and choice != "refuse"):
            rows = reading.read(path)
            assert (rows.format, len(rows)) == (form, 1 if choice == "drop" else 2)
            assert (rows.truncated, rows.dropped) == ((0, 1) if choice == "drop" else (1, 0))
            assert rows.longest <= 4
        else:
            with pytest.raises(DataError, match=r"line 2.*--too-long") as caught:
                reading.read(path)
            assert ("cannot be cut" in str(caught.value)) == (not can_be_cut)
    write_jsonl(path, [changed(form, "The sky is blue. The")])
    with pytest.raises(DataError, match="1 row, all of more than 4 tokens"):
        reader(form, 4, options=RowOptions(too_long="drop")).read(path)


@every_format
def test_a_token_beyond_the_embedding_is_refused_with_file_and_line(form: RowFormat, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    size = len(tokenizer) - 1
    path = write_jsonl(tmp_path / "rows.jsonl", [FORMATS[form], changed(form, "<new>")])
    reader(form, 64, tokenizer, vocabulary=size + 1).read(path)
    with pytest.raises(DataError, match=rf"line 2: found the token '<new>' with the id {size}; expected ids below {size}"):
        reader(form, 64, tokenizer, vocabulary=size).read(path)


@every_format
def test_a_digest_of_tokens_tells_rows_and_their_order_apart(form: RowFormat, tmp_path: Path) -> None:
    rows = [FORMATS[form], changed(form, "What")]
    files = [rows, rows[::-1], rows[:1], [rows[0], rows[0]]]
    digests = [reader(form, 64).read(write_jsonl(tmp_path / "rows.jsonl", file)).digest() for file in [*files, rows]]
    assert len(set(digests)) == len(files)
    assert digests[-1] == digests[0]


def test_the_number_of_rows_left_out_is_printed(tmp_path: Path) -> None:
    options = small_run(tmp_path)
    write_jsonl(options.data, [{"text": "the cat"}, {"text": "the cat sat on the mat"}, {"text": "the dog"}])
    arguments = ("--model", options.model, "--data", options.data, "--too-long", "drop", "--sequence-length", 3)
    ended = run_here("train", *arguments, "--output", tmp_path / "out", "--steps", 1)
    assert "left out, since longer: 1 row\n" in ended.err
    assert "left out, since longer: 1 row\n" in run_here("evaluate", *arguments).err


# Rows to evaluate on that are taken from the training file


def with_split(tmp_path: Path, **changes: Any) -> TrainOptions:
    return small_run(tmp_path, eval_split=0.25, evaluate_every=2, **changes)


def test_a_split_takes_rows_out_of_the_training_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"the {word}"} for word in "abcdefgh"])
    rows = RowReader(TOKENIZER, 9).read(path)
    train, evaluation = rows.split(0.25)
    lines = [[row.line for row in part] for part in (train, evaluation)]
    assert sorted(lines[0] + lines[1]) == list(range(1, 9))
    assert len(lines[1]) == 2
    assert lines == [sorted(part) for part in lines]
    assert [part.digest() for part in rows.split(0.25)] == [train.digest(), evaluation.digest()]


def test_a_run_with_a_split_evaluates_records_and_resumes(tmp_path: Path) -> None:
    options = with_split(tmp_path)
    finish(options)
    whole = outcome(options.output)
    assert [row["step"] for row in whole["metrics"] if "evaluation_loss" in row] == [0, 2, 3]
    record = json.loads((options.output / "options.json").read_text())
    assert record["options"]["eval_split"] == 0.25
    assert {"data sha256", "evaluation sha256"} <= record["tokens"].keys()
    with Trainer(replace(options, steps=3), resume=True, quiet=True) as trainer:
        assert trainer.engine.version == 3
    with pytest.raises(DataError, match="evaluation sha256"):
        Trainer(replace(options, eval_split=0.5), resume=True, quiet=True)


def test_a_split_out_of_range_is_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama", vocab_size=len(WORDS)))
    save_tokenizer(base)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "The sky"}] * 2)
    arguments = ("train", "--model", base, "--data", path, "--output", tmp_path / "out")
    for share in (0, 1, "nan", 1.5):
        assert "--evaluation" in refusal(*arguments, "--evaluation", share)
    assert not (tmp_path / "out").exists()


def csv_rows(path: Path, text: str) -> Path:
    path.with_suffix(".csv").write_text(text)
    return path.with_suffix(".csv")


def test_cells_are_texts_where_a_format_has_texts(tmp_path: Path) -> None:
    numbers = csv_rows(tmp_path / "numbers", "question,answer\nwhat is 0 + 2?,2\n")
    options = RowOptions(prompt_column="question", completion_column="answer")
    assert options.converted(next(parsed_rows(numbers))[1]) == {"prompt": "what is 0 + 2?", "completion": "2"}
    lists = csv_rows(tmp_path / "lists", 'prompt,completion\nlist,"[""Oslo"", 1, {""a"": 2}]"\n')
    assert RowOptions().converted(next(parsed_rows(lists))[1])["completion"] == '["Oslo", 1, {"a": 2}]'
    messages = json.dumps([{"role": "user", "content": "hi"}]).replace('"', '""')
    named = csv_rows(tmp_path / "named", f'talk\n"{messages}"\n')
    converted = RowOptions(messages_column="talk").converted(next(parsed_rows(named))[1])
    assert converted == {"messages": [{"role": "user", "content": "hi"}]}
    candidates = csv_rows(
        tmp_path / "candidates", 'prompt,candidates,answer\nthe,"[""1"", ""2""]",1\nthe,"[""a"", ""b""]",1\n'
    )
    rows = RowReader(TOKENIZER, 64).read(candidates)
    assert rows.format is RowFormat.CANDIDATES
    assert [row.answer for row in rows] == [0, 1]


@pytest.mark.parametrize(("cells", "labels"), [("0 1", ("0", "1")), ("0.0 1.0", ("0", "1")), ("4.5 -1.0", ("-1", "4.5"))])
def test_numbers_in_any_column_of_labels_are_labels_or_their_indices(
    tmp_path: Path, cells: str, labels: tuple[str, ...]
) -> None:
    first, second = cells.split()
    path = csv_rows(tmp_path / "rows", f"text,mood\nthe cat,{first}\nthe dog,{second}\n")
    options = RowOptions(prompt_template="{text}", label_column="mood")
    found = options.labels_in(row for _, row in parsed_rows(path))
    assert found == labels
    options = replace(options, labels=found if "4.5" in cells else ("bad", "good"))
    answers = [options.converted(row)["answer"] for _, row in parsed_rows(path)]
    assert answers == ([1, 0] if "4.5" in cells else [0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_booleans_are_the_labels_that_pandas_writes_and_no_indices(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path / kind, [{"prompt": "the cat", "label": False}, {"prompt": "the dog", "label": True}])
    found = RowOptions().labels_in(row for _, row in parsed_rows(path))
    assert found == ("False", "True")
    options = RowOptions(labels=found)
    converted = [options.converted(row) for _, row in parsed_rows(path)]
    assert [(row["candidates"], row["answer"]) for row in converted] == [([" False", " True"], 0), ([" False", " True"], 1)]
    with pytest.raises(DataError, match=r"1: found .* as 'label'; expected one of 'no', 'yes'"):
        RowReader(TOKENIZER, 64, RowOptions(labels=("no", "yes"))).read(path)
    numbers = small_config("llama", num_labels=2)
    with pytest.raises(DataError, match="as 'label'; expected a class from 0 to 1"):
        RowReader(TOKENIZER, 64, RowOptions(text_column="prompt"), labelled_for=numbers).read(path)


@pytest.mark.parametrize("row", [{"candidates": ["a", "b"], "answer": True}, {"completion": True}])
def test_booleans_are_refused_where_an_index_or_a_text_belongs(tmp_path: Path, row: dict[str, Any]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "the", **row}])
    with pytest.raises(DataError, match="line 1: found true as"):
        RowReader(TOKENIZER, 64).read(path)


def test_a_column_without_a_name_is_an_index(tmp_path: Path) -> None:
    path = csv_rows(tmp_path / "rows", ",prompt,completion\n0,name a fox,red\n")
    assert next(parsed_rows(path))[1] == {"Unnamed: 0": "0", "prompt": "name a fox", "completion": "red"}
    rows = RowReader(TOKENIZER, 64).read(path)
    assert rows.format is RowFormat.TEXT
    assert rows[0].prompt_length


@pytest.mark.parametrize("column", ["conversations", "messages", "talk"])
def test_messages_of_sharegpt_get_roles_and_contents(tmp_path: Path, column: str) -> None:
    turns = [{"from": "human", "value": "the"}, {"from": "gpt", "value": "cat"}]
    given = write_jsonl(tmp_path / "given.jsonl", [{"id": "x", column: turns}])
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]
    same = write_jsonl(tmp_path / "same.jsonl", [{"messages": messages}])
    options = RowOptions(messages_column="talk" if column == "talk" else None)
    rows = [RowReader(TOKENIZER, 64, options).read(given), RowReader(TOKENIZER, 64).read(same)]
    assert rows[0].digest() == rows[1].digest()


def test_a_directory_without_a_tokenizer_is_told_as_such(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    with pytest.raises(DataError, match=r"no usable tokenizer \(none of its files has one\)"):
        load_tokenizer(base)


@pytest.mark.parametrize("kind", ["messages", "preferences"])
def test_a_template_that_writes_the_time_gets_that_of_the_runs_start_and_the_run_resumes(tmp_path: Path, kind: str) -> None:
    options = small_run(tmp_path, optimization=Optimization(lr=1e-5))  # whatever the time makes of the rows
    settings = Path(options.model) / "tokenizer_config.json"
    digits = f"{{% for digit in strftime_now('%f') %}}{{{{ {WORDS[4:14]}[digit | int] }}}} {{% endfor %}}"
    template = digits + "{% for m in messages %}{{ m.content }} {% endfor %}"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    row = {"messages": turns} if kind == "messages" else {"prompt": turns[:1], "chosen": turns[1:], "rejected": turns[:1]}
    write_jsonl(options.data, [row] * 4)
    with Trainer(replace(options, steps=2), quiet=True) as trainer:
        trainer.train()
    saved = RunDirectory.options(options.output)
    assert saved.rows.rendered_at is not None
    with Trainer(saved.with_steps(3), resume=True, quiet=True) as trainer:
        trainer.train()
    with pytest.raises(OptionError, match="rendered_at"):
        replace(saved.rows, rendered_at="noon").require_valid()
