"""What a data file's rows are, by their columns and values: which columns to train on where nobody has named them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.tasks.row_source import at_row, parsed_rows
from zo2core import DataError

_MOST_LABELS = 20  # different texts of a column of labels
_LEAST_REPEATS = 5  # rows for each label, on average
_LONGEST_LABEL = 50  # characters
_PAIRS = (  # columns of prompts and completions in well-known data sets
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("input", "output"),
    ("source", "target"),
)
_KNOWN = {"text", "prompt", "completion", "messages", "candidates", "chosen", "rejected", "label", "answers"}


class Survey(NamedTuple):
    """How a file's rows are read."""

    options: RowOptions
    kind: str  # what the rows are, in words
    labels: tuple[str, ...]  # labels of a causal language model's rows; empty: they have none
    named: tuple[str, ...]  # options that the survey has set


def survey(path: Path, options: RowOptions, *, takes_labels: bool) -> Survey:
    """Look at all rows of a data file.

    Args:
        path: The file.
        options: Columns that the user has named; if there are any, no others are chosen.
        takes_labels: Whether the model classifies texts.

    Raises:
        DataError: if the file cannot be read, or its columns do not say what to train on.
    """
    rows = [row for _, row in parsed_rows(path)]
    chosen = options if options.names_columns or takes_labels else _named(path, rows, options)
    changed = tuple(
        name
        for name in ("prompt_template", "prompt_column", "completion_column", "label_column")
        if getattr(chosen, name) != getattr(options, name)
    )
    labels = () if takes_labels else chosen.labels or chosen.labels_in(rows)
    try:
        first = replace(chosen, labels=labels).converted(rows[0], takes_labels=takes_labels)
    except DataError as error:
        raise at_row(error, path, 1) from error
    return Survey(chosen, _kind(first, labels, takes_labels=takes_labels), labels, changed)


def _named(path: Path, rows: Sequence[Mapping[str, Any]], options: RowOptions) -> RowOptions:
    """The options with the columns that the rows seem to have.

    Raises:
        DataError: if the rows have none of the known keys, and no columns that look like texts and labels.
    """
    columns = list(rows[0])
    if {"messages", "chosen", "candidates"} & set(columns) or {"prompt", "label"} <= set(columns):
        return options
    if {"prompt", "completion"} <= set(columns):
        return replace(options, label_column="completion") if _is_label(rows, "completion") else options
    for prompt, completion in _PAIRS:
        if {prompt, completion} <= set(columns):
            return replace(options, prompt_column=prompt, completion_column=completion)
    label = next((name for name in reversed(columns) if _is_label(rows, name)), None)
    texts = [name for name in columns if name != label and all(isinstance(row.get(name), str) for row in rows)]
    if label is not None and texts:
        text = "text" if "text" in texts else max(texts, key=lambda name: sum(len(row[name]) for row in rows))
        if not set("{}.[!:") & {*text, *label}:
            return replace(options, prompt_template=f"{{{text}}}\\n{label.capitalize()}:", label_column=label)
    if set(columns) & _KNOWN:
        return options
    raise DataError(
        path,
        found=f"the columns {', '.join(map(repr, columns[:12]))}",
        expected="columns of a prompt and of a completion or label, text, or messages",
        remedy="name them, such as --prompt-template '{question} Answer:' --completion-column reply",
    )


def _is_label(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    """Whether a column has a few short values that occur again and again."""
    values = [row.get(column) for row in rows]
    if not all(isinstance(value, (str, int)) and len(str(value)) <= _LONGEST_LABEL and str(value) for value in values):
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
    kinds = {
        "messages": "conversations, of which the assistant's answers are learned",
        "chosen": "prompts with a chosen and a rejected completion",
        "candidates": "prompts with candidates, one of which is right",
        "completion": "prompts with completions, which are learned",
    }
    return next((words for key, words in kinds.items() if key in row), "texts, of which every token is learned")
