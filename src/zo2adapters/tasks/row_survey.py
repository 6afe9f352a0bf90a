"""What a data file's rows are, by their columns and values: which columns to train on where nobody has named them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zo2adapters.tasks.row_options import RowFormat, RowOptions, empty_label, is_column
from zo2adapters.tasks.row_source import at_row, parsed_rows
from zo2core.errors import DataError

_MOST_LABELS = 20  # different texts of a column of labels
_LEAST_REPEATS = 5  # rows for each label, on average
_LONGEST_LABEL = 50  # characters
_MOST_EMPTY = 0.5  # share of the rows in which a column of labels may be empty by mistake; such a row is refused
_PAIRS = (  # columns of prompts and completions in well-known data sets
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("input", "output"),
    ("source", "target"),
)
_ANSWERS = {"completion", "label", "candidates", "answer", "answers", "chosen", "rejected"}  # go with a prompt
_CONTEXT = ("input", "context")  # texts that go with an instruction
_ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response "
    "that appropriately completes the request.\\n\\n"
)
_FORMATS = {  # by a key of a converted row: the columns that it is made from, and what it is, in words
    "candidates": (("prompt", "candidates", "answer", "label"), "prompts with candidates, one of which is right"),
    "chosen": (("prompt", "chosen", "rejected"), "prompts with a chosen and a rejected completion"),
    "messages": (("messages", "conversations"), "conversations, of which the assistant's answers are learned"),
    "completion": (("prompt", "completion"), "prompts with completions, which are learned"),
}
_PLAIN = (("text",), "texts, of which every token is learned")
_LABELLED = ("text", "text_pair", "label")  # keys of a row for a classifier
_KNOWN = {"text", "prompt", "completion", "messages", "candidates", "chosen", "rejected", "label", "answers"}


class Survey(NamedTuple):
    """How a file's rows are read."""

    options: RowOptions
    format: RowFormat
    kind: str  # what the rows are, in words
    labels: tuple[str, ...]  # labels of a causal language model's rows; empty: they have none
    unused: tuple[str, ...]  # columns that are not trained on


def survey(path: Path, options: RowOptions, *, takes_labels: bool) -> Survey:
    """Look at all rows of a data file."""
    numbered = list(parsed_rows(path))
    rows = [row for _, row in numbered]
    chosen = options if takes_labels else _completed(path, rows, options)
    if chosen.label_column is not None and options.label_column is None:
        _require_labels(path, numbered, chosen.label_column)
    labels = () if takes_labels else chosen.labels or chosen.labels_in(rows)
    try:
        first = replace(chosen, labels=labels).converted(rows[0], takes_labels=takes_labels)
    except DataError as error:
        raise at_row(error, path, 1) from error
    unused = _unused(rows, chosen, first, takes_labels=takes_labels)
    form = RowFormat.LABELS if takes_labels else RowFormat.of(first)
    return Survey(chosen, form, _kind(first, labels, takes_labels=takes_labels), labels, unused)


def _unused(
    rows: Sequence[Mapping[str, Any]], options: RowOptions, first: Mapping[str, Any], *, takes_labels: bool
) -> tuple[str, ...]:
    """The columns that are not trained on."""
    keys = _LABELLED if takes_labels else _format_of(first)[0]
    made = {"text", "prompt"} if options.prompt_template is not None else {"prompt"}
    used = {getattr(options, f"{key}_column", None) or key for key in keys if key not in made}
    used |= set(options.prompt_columns) if made & set(keys) else set()
    return tuple(dict.fromkeys(column for row in rows for column in row if column not in used))


def _completed(path: Path, rows: Sequence[Mapping[str, Any]], options: RowOptions) -> RowOptions:
    """The options with the columns that the user has not named."""
    if not options.names_columns:
        return _named(path, rows, options)
    columns, answer = list(rows[0]), options.label_column or options.completion_column
    if options.text_column is not None or options.messages_column is not None:
        return options
    if options.prompt_template is None and options.prompt_column is None:
        texts = _texts(rows, except_for=answer)
        if answer not in columns or "prompt" in columns or not texts:
            return options
        return _with_prompt(options, _longest(rows, texts), label=options.label_column)
    if answer is None and not set(columns) & _ANSWERS:
        return replace(
            options, label_column=_label_of(rows, [name for name in columns if name not in options.prompt_columns])
        )
    return options


def _with_prompt(options: RowOptions, text: str, *, label: str | None) -> RowOptions:
    """The options with a column as the prompt, in a template that ends with the name of the labels."""
    if label is None or not is_column(text) or not is_column(label):
        return replace(options, prompt_column=text)
    return replace(options, prompt_template=f"{{{text}}}\\n{label.capitalize()}:")


def _texts(rows: Sequence[Mapping[str, Any]], *, except_for: str | None) -> list[str]:
    """The columns that have a text in every row."""
    return [name for name in rows[0] if name != except_for and all(isinstance(row.get(name), str) for row in rows)]


def _longest(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> str:
    """The column called text, or else the one with the longest texts."""
    return "text" if "text" in texts else max(texts, key=lambda name: sum(len(row[name]) for row in rows))


def _require_labels(path: Path, rows: Sequence[tuple[int, Mapping[str, Any]]], column: str) -> None:
    """Refuse rows whose label is empty."""
    for number, row in rows:
        if not str(row.get(column, "")).strip():
            raise at_row(empty_label(column), path, number)


def _named(path: Path, rows: Sequence[Mapping[str, Any]], options: RowOptions) -> RowOptions:
    """The options with the columns that the rows seem to have."""
    columns = list(rows[0])
    if {"messages", "conversations", "chosen", "candidates"} & set(columns) or {"prompt", "label"} <= set(columns):
        return options
    if {"prompt", "completion"} <= set(columns):
        is_label = _is_label(rows, "completion")
        given = replace(options, label_column="completion") if is_label else options
        return given if is_label else _with_context(rows, "prompt", given)
    for prompt, completion in _PAIRS:
        if {prompt, completion} <= set(columns):
            return _with_context(rows, prompt, replace(options, completion_column=completion))
    label = _label_of(rows, columns)
    texts = _texts(rows, except_for=label)
    if label is not None and texts:
        return replace(_with_prompt(options, _longest(rows, texts), label=label), label_column=label)
    if set(columns) & _KNOWN:
        return options
    raise DataError(
        path,
        found=f"the columns {', '.join(map(repr, columns[:12]))}",
        expected="columns of a prompt and of a completion or label, text, or messages",
        remedy=f"name them, such as {_example(columns)}",
    )


def _with_context(rows: Sequence[Mapping[str, Any]], prompt: str, options: RowOptions) -> RowOptions:
    """The options with the prompt, in sections as alpaca has them if rows have a system text or a context, too."""
    texts = [name for name in _texts(rows, except_for=options.completion_column) if any(row[name].strip() for row in rows)]
    sections = [name for name in ("system", prompt, *_CONTEXT) if name == prompt or name in texts]
    if len(sections) == 1:
        return options if prompt == "prompt" else replace(options, prompt_column=prompt)
    template = "".join(f"### {name.capitalize()}:\\n{{{name}}}\\n\\n" for name in sections) + "### Response:\\n"
    preamble = _ALPACA if sections == ["instruction", "input"] else ""
    return replace(options, prompt_template=preamble + template)


def _example(columns: Sequence[str]) -> str:
    """Options that name columns of the file, for a remedy."""
    named = f"text={columns[0]}" if len(columns) == 1 else f"prompt={columns[0]},completion={columns[1]}"
    return f"--columns {shlex.quote(named)}"


def _label_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str | None:
    """The column of labels: the one called label, else the last one whose labels are words, else the last one."""
    named = [name for name in reversed(columns) if _is_label(rows, name)]
    words = [name for name in named if not any(str(row.get(name, "")).lstrip("-").isdecimal() for row in rows)]
    return "label" if "label" in named else next(iter([*words, *named]), None)


def _is_label(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    """Whether a column has a few short values that occur again and again; by mistake it may be empty in a few rows."""
    values = [row[column] for row in rows if str(row.get(column, "")).strip()]
    if len(values) < (1 - _MOST_EMPTY) * len(rows) and column != "label":
        return False
    if not all(isinstance(value, (str, int, float)) and len(str(value)) <= _LONGEST_LABEL for value in values):
        return False
    if any(isinstance(value, float) and value % 1 for value in values):
        return False
    different = len(set(map(str, values)))
    return 2 <= different <= min(_MOST_LABELS, len(rows) // _LEAST_REPEATS)


def _kind(row: Mapping[str, Any], labels: Sequence[str], *, takes_labels: bool) -> str:
    """What a converted row is, in words."""
    if takes_labels:
        return "texts with labels"
    if labels:
        shown = ", ".join(map(repr, labels[:6])) + (", ..." if len(labels) > 6 else "")
        return f"prompts with one of {len(labels)} labels: {shown}"
    return _format_of(row)[1]


def _format_of(row: Mapping[str, Any]) -> tuple[Sequence[str], str]:
    return next((known for key, known in _FORMATS.items() if key in row), _PLAIN)
