"""The formats of rows, and the options that say how a file's rows get one: columns, a template,
labels, lengths.

Columns that nobody has named are chosen by a survey of all rows.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from itertools import takewhile
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, NamedTuple

from zo2adapters.tasks.option_tree import Option
from zo2adapters.tasks.row_source import at_row, first_row, parsed_rows, row_error
from zo2adapters.tasks.row_values import Cell, Row, shown
from zo2core.errors import DataError, OptionError, without_effect
from zo2core.ranges import counted

# keys that a column can be named for
_NAMED = ("text", "prompt", "completion", "label", "messages")
# keys that go with a prompt
_KEPT = ("completion", "label", "candidates", "answer", "answers", "chosen", "rejected")
_TEXTS = ("text", "prompt", "messages")  # keys of what a row begins with
# keys of rows whose label is not what is learned
_LEARNED = {"completion", "candidates", "chosen", "answers"}
# keys of texts or messages
_MESSAGES = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_LISTED = 12  # columns that a message lists
_JUDGING = re.compile(  # names of columns that may say how good a row is
    r"(.*[\W_])?(accept(ed)?|chosen|correct|feedback|good|helpful|labels?|passed|preferred|quality|"
    r"rank|ratings?|rejected|rewards?|scores?|votes?)([\W_].*)?",
    re.IGNORECASE,
)
_MOST_LABELS = 20  # different texts of a column of labels
_LEAST_REPEATS = 5  # rows for each label, on average
_LONGEST_LABEL = 50  # characters
# share of the rows in which a column of labels may be empty by mistake; such a row is refused
_MOST_EMPTY = 0.5
_PAIRS = (  # columns of prompts and completions in well-known data sets
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("input", "output"),
    ("source", "target"),
)
_CONTEXT = ("input", "context")  # texts that go with an instruction
_ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response "
    "that appropriately completes the request.\\n\\n"
)
# by a key of a converted row: the columns that it is made from, and what it is, in words
_FORMATS = {
    "candidates": (
        ("prompt", "candidates", "answer", "label"),
        "prompts with candidates, one of which is right",
    ),
    "chosen": (("prompt", "chosen", "rejected"), "prompts with a chosen and a rejected completion"),
    "messages": (
        ("messages", "conversations"),
        "conversations, of which the assistant's answers are learned",
    ),
    "answers": (("prompt", "answers"), "prompts with right answers"),
    "completion": (("prompt", "completion"), "prompts with completions, which are learned"),
    "prompt": (("prompt",), "prompts"),
}
_PLAIN = (("text",), "texts, of which every token is learned")
_LABELLED = ("text", "text_pair", "label")  # keys of a row for a classifier
_KNOWN = {
    "text",
    "prompt",
    "completion",
    "messages",
    "candidates",
    "chosen",
    "rejected",
    "label",
    "answers",
}


class RowFormat(Enum):
    """The format of a row; the value lists its keys, for messages."""

    TEXT = "text, or prompt and completion"
    CANDIDATES = "prompt, candidates and answer"
    PREFERENCES = "prompt, chosen and rejected"
    ANSWERS = "prompt and answers"
    LABELS = "text and label"

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RowFormat:
        """Recognise the format of a row for a causal language model by its keys."""
        formats = {"candidates": cls.CANDIDATES, "chosen": cls.PREFERENCES, "answers": cls.ANSWERS}
        return next((known for key, known in formats.items() if key in row), cls.TEXT)


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How the rows of a data file are read."""

    prompt_template: Annotated[str | None, Option("data")] = None
    r"""Prompt of each row, with names of columns between braces, such as "Tweet:
    {text}\nSentiment:", where \n is a line break. A space is put before the completion or label,
    unless one of the two has one.
    """
    text_column: Annotated[str | None, Option("data")] = None
    """Column that has the text, if it is not called text."""
    prompt_column: Annotated[str | None, Option("data")] = None
    """Column that has the prompt, if it is not called prompt."""
    completion_column: Annotated[str | None, Option("data")] = None
    """Column that has the completion, if it is not called completion."""
    label_column: Annotated[str | None, Option("data")] = None
    """Column that has the label, if it is not called label.

    For a causal language model, a prompt with a label is a row with candidates: all labels are
    compared.
    """
    messages_column: Annotated[str | None, Option("data")] = None
    """Column that has the messages, if it is not called messages."""
    labels: Annotated[tuple[str, ...], Option("data")] = ()
    """Texts of the labels, such as terrible great; a row names its label by this text or by its
    index from 0. By default the labels are those that occur in the training file.
    """
    train_on: Annotated[Literal["answers", "all"], Option("data")] = "answers"
    """Tokens of messages that are learned: those of the assistant's answers, or all."""
    too_long: Annotated[Literal["auto", "cut", "split", "drop", "refuse"], Option("data")] = "auto"
    """What happens to rows longer than --sequence-length: cut removes their end, split makes
    several rows of a text, drop leaves them out, refuse stops. auto splits .txt files, cuts other
    texts and completions, and refuses rows with candidates, preferences or answers, which cannot
    be cut.
    """

    rendered_at: Annotated[str | None, Option("data")] = None
    """Date and time for chat templates that write them, such as 2026-01-31T12:00:00; by default
    those of the run's start.
    """

    def require_valid(self, *, takes_labels: bool = False) -> None:
        """Check the template and the labels."""
        if self.prompt_template is not None:
            _require_template(self.prompt_template)
            if (column := self.prompt_column) is not None:
                remedy = f"write {{{column}}} in the template, or leave one of the two out"
                raise OptionError(
                    "prompt_column", f"{column} with --prompt-template", "one of the two", remedy
                )
        if self.rendered_at is not None:
            try:
                datetime.fromisoformat(self.rendered_at)
            except ValueError as error:
                expected = "a date and time, such as 2026-01-31T12:00:00"
                raise OptionError(
                    "rendered_at", repr(self.rendered_at[:80]), expected, "correct it"
                ) from error
        found = " ".join(map(repr, self.labels))
        if self.labels and takes_labels:
            raise without_effect(
                "labels", f"{found} for a model that has labels in its config", "none"
            )
        if self.labels and (
            len(set(self.labels)) < max(len(self.labels), 2) or not all(self.labels)
        ):
            raise OptionError(
                "labels", found, "at least two different texts", "pass the text of each label once"
            )

    def require_labelled(self, *, are_labelled: bool) -> None:
        """Refuse labels that no row has, given as an option."""
        if self.labels and not are_labelled:
            found = f"{' '.join(self.labels)} for rows without labels"
            raise without_effect(
                "labels", found, "rows with a prompt and a label, or --label-column NAME"
            )

    @property
    def names_columns(self) -> bool:
        """Whether a column or a template is named."""
        return bool(self._columns) or self.prompt_template is not None

    @property
    def prompt_columns(self) -> list[str]:
        """The columns from which a prompt is made: those of the template, or the column of
        prompts.
        """
        if self.prompt_template is None:
            return [self.prompt_column or "prompt"]
        columns = (column for _, column, _, _ in Formatter().parse(self.prompt_template))
        return list(dict.fromkeys(column for column in columns if column is not None))

    @property
    def _columns(self) -> dict[str, str]:
        """Named columns by the key that a row needs."""
        named = ((key, getattr(self, f"{key}_column")) for key in _NAMED)
        return {key: column for key, column in named if column is not None}

    def converted(self, row: Mapping[str, Any], *, takes_labels: bool = False) -> Row:
        """Convert a row of a data file to the keys of a row format."""
        source = row if isinstance(row, Row) else Row(row)
        keys = {column: key for key, column in self._columns.items()}
        read = {column: _read(keys.get(column, column), value) for column, value in row.items()}
        origins = {key: f"the column {column!r}" for key, column in self._columns.items()}
        if self.prompt_template is not None:
            origins["text" if takes_labels else "prompt"] = "the text of --prompt-template"
        if "conversations" in read and not self.names_columns and "messages" not in read:
            read["messages"] = read.pop("conversations")
            origins["messages"] = "the column 'conversations'"
        values = Row(read, empty=source.empty)
        if takes_labels:
            self._require_label(values)
        formed = _with_prompt_of_both(self._formed(values, takes_labels=takes_labels))
        return Row(formed, empty=source.empty, origins=origins)

    def _formed(self, row: Row, *, takes_labels: bool) -> dict[str, Any]:
        """The values of a row by the keys of a row format."""
        if not self.names_columns:
            return dict(row) if takes_labels else self._with_candidates(dict(row))
        formed = self._named_values(row, takes_labels=takes_labels)
        self._add_kept(formed, row, takes_labels=takes_labels)
        if takes_labels:
            return formed
        if self.prompt_template is not None and isinstance(formed.get("completion"), str):
            formed["completion"] = _separated(formed["prompt"], formed["completion"])
        self._require_prompt(formed, row)
        return self._with_candidates(formed)

    def _named_values(self, row: Row, *, takes_labels: bool) -> dict[str, Any]:
        """The values of the named columns and of the template, or else the row's own text."""
        named = {
            key: _column(row, column, f"--{key}-column") for key, column in self._columns.items()
        }
        if self.prompt_template is not None:
            named["text" if takes_labels else "prompt"] = self._filled(self.prompt_template, row)
        elif not named.keys() & _TEXTS:
            named |= {key: row[key] for key in _TEXTS if key in row}
        return named

    def _add_kept(self, formed: dict[str, Any], row: Row, *, takes_labels: bool) -> None:
        """Add the values that go with the named ones, under the keys that they have in the row."""
        companions: tuple[str, ...] = ("label", "text_pair")
        if not takes_labels:
            companions = _KEPT if "prompt" in formed else ()
        # a column that is named for another key, such as labels called completion
        named = self._columns.values()
        for key in companions:
            is_learned = key == "label" and "completion" in formed
            if key in row and key not in formed and key not in named and not is_learned:
                formed[key] = row[key]

    def _require_prompt(self, formed: Mapping[str, Any], row: Row) -> None:
        """Refuse a row whose named label has no prompt before it."""
        label = self.label_column
        if label is None or "completion" in formed or "prompt" in formed:
            return
        others = ", ".join(map(repr, formed.keys() - {"label"})) or "no text"
        column = next((name for name in row if name != label and is_column(name)), "text")
        remedy = f"pass --prompt-column NAME, or --prompt-template such as '{{{column}}} Label:'"
        raise row_error(f"a label, and {others}", "a prompt before the label", remedy)

    def _require_label(self, row: Row, *, is_learned: bool = False) -> None:
        """Refuse a label that is empty, and one that is learned and is not there."""
        column = self.label_column or "label"
        label = row.get(column)
        if label is None and not is_learned and column not in row.empty:
            return
        if label is None or (isinstance(label, str) and not label.strip()):
            found = f"{shown(label) if column in row else row.empty.get(column, 'no value')} in"
            raise row_error(
                f"{found} the column {column!r}",
                "a label in every row",
                "remove the row or fill it",
            )

    def _with_candidates(self, row: dict[str, Any]) -> dict[str, Any]:
        """Turn a prompt with a label into a prompt with candidates, if the labels are known."""
        if not self.labels or not {"prompt", "label"} <= row.keys() or row.keys() & _LEARNED:
            return row
        label = row.pop("label")
        self._require_label(Row({self.label_column or "label": label}))
        index = self._label_index(label)
        if index is None or not 0 <= index < len(self.labels):
            raise self._unknown_label(label)
        prompt = row["prompt"]
        candidates = list(self.labels)
        if isinstance(prompt, str):
            candidates = [_separated(prompt, text) for text in self.labels]
        return {**row, "candidates": candidates, "answer": index}

    def _label_index(self, label: Any) -> int | None:
        """The index of a label, or the label itself where it is one, whether in range or not."""
        is_number = type(label) is int and self._by_index
        index = None if is_number else self._index_of(label)
        if index is not None or not self._by_index:
            return index
        number = label.value if isinstance(label, Cell) else label
        return int(number) if type(number) in (int, float) and number % 1 == 0 else None

    def _unknown_label(self, label: Any) -> DataError:
        """The error about a label that is none of the named ones."""
        listed = ", ".join(map(repr, self.labels[:_LISTED]))
        return row_error(
            f"{shown(label)} in the column {self.label_column or 'label'!r}",
            f"one of {listed}, or the number of one of them, from 0",
            _nearest(str(label), self.labels)
            or "correct the label, or name all labels with --labels",
        )

    @property
    def _by_index(self) -> bool:
        """Whether a number is an index: where labels are numbers themselves, it is one of them."""
        return not all(map(_is_number, self.labels))

    def _index_of(self, label: Any) -> int | None:
        texts = [str(label), label_text(label)] if isinstance(label, (str, int, float)) else []
        return next((self.labels.index(text) for text in texts if text in self.labels), None)

    def labels_in(self, rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """The different labels of prompts, sorted; empty if the rows are not prompts with
        labels.
        """
        prompt, completion, label = (
            getattr(self, f"{key}_column") or key for key in ("prompt", "completion", "label")
        )
        other = _LEARNED - {"completion"} | (
            set() if self.label_column and not self.completion_column else {completion}
        )
        labels = set()
        for row in rows:
            if (self.prompt_template is None and prompt not in row) or row.keys() & other:
                return ()
            if isinstance(row.get(label), (str, int, float)) and str(row[label]).strip():
                # rows without one are refused
                labels.add(label_text(row[label]))
        return tuple(
            sorted(
                labels, key=lambda text: (0, int(text), text) if _is_number(text) else (1, 0, text)
            )
        )

    def _filled(self, template: str, row: Row) -> str:
        values = {
            column: _column(row, column, "--prompt-template") for column in self.prompt_columns
        }
        for column, value in values.items():
            if not isinstance(value, (str, int, float)):
                found = f"{shown(value)} in the column {column!r}"
                remedy = "name another column in the template"
                raise row_error(found, "text or a number for --prompt-template", remedy)
        parts = (
            (with_line_breaks(text), column) for text, column, _, _ in Formatter().parse(template)
        )
        return "".join(
            text if column is None else f"{text}{values[column]}" for text, column in parts
        )


def _with_prompt_of_both(formed: dict[str, Any]) -> dict[str, Any]:
    """A row of preferences whose prompt is what its two answers begin with, as TRL's trainers take
    it: two texts, or two lists of messages, beside which the prompt may stand as a text.
    """
    chosen = formed.get("chosen")
    rejected = formed.get("rejected")
    prompt = formed.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
        shared = _shared_length(chosen, rejected)
        if chosen[:shared].endswith(" "):
            shared -= 1  # which begins an answer
    elif isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
        shared = _shared_length(chosen, rejected)
        _require_last_message(prompt, chosen[:shared])
    else:
        return formed
    if not shared:
        return formed
    both = {"chosen": chosen[shared:], "rejected": rejected[shared:]}
    return {**formed, "prompt": chosen[:shared], **both}


def _shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items two texts or lists have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _require_last_message(prompt: object, messages: Sequence[Any]) -> None:
    """Refuse a prompt that is another text than that of the last message of two conversations."""
    last = messages[-1] if messages else None
    content = last.get("content") if isinstance(last, dict) else None
    if prompt is not None and prompt != content:
        raise row_error(
            f"{shown(prompt)} as the prompt, and {shown(content)} as the last message that both "
            "conversations have",
            "the same text",
            "remove the prompt, or correct the row",
        )


def require_columns(path: Path, options: RowOptions) -> None:
    """Refuse a file whose first row lacks a column that the options name."""
    numbered = first_row(path)
    if numbered is None:
        return
    number, row = numbered
    named = {column: f"--{key}-column" for key, column in options._columns.items()}
    if options.prompt_template is not None:
        named |= dict.fromkeys(options.prompt_columns, "--prompt-template")
    with at_row(path, number):
        for column, option in named.items():
            _column(row, column, option)


def first_format(path: Path, options: RowOptions, *, takes_labels: bool) -> RowFormat | None:
    """The format of a file's rows by the first one, which is refused if it cannot be read.

    None: other rows decide, such as those with other labels.
    """
    numbered = first_row(path)
    if numbered is None:
        return None
    number, row = numbered
    with at_row(path, number):
        converted = options.converted(row, takes_labels=takes_labels)
    if takes_labels:
        return RowFormat.LABELS
    has_label = {"prompt", "label"} <= converted.keys() and not converted.keys() & _LEARNED
    return None if has_label else RowFormat.of(converted)


def label_text(label: Any) -> str:
    """The text of a label. pandas writes whole numbers as 1.0 where a column has an empty cell."""
    whole = None if type(label) is str else re.fullmatch(r"(-?\d+)\.0", str(label))
    return str(label) if whole is None else whole[1]


def _read(key: str, value: Any) -> Any:
    """A row's value as its key has it: cells of CSV as texts or lists, and ShareGPT's messages with
    role and content.
    """
    if isinstance(value, Cell) and key not in ("label", "answer"):
        held = value.value if key in ("candidates", "answers", *_MESSAGES) else value
        are_messages = isinstance(held, list) and all(
            isinstance(item, dict) and {"role", "from"} & {*item} for item in held
        )
        value = (
            held
            if are_messages or (isinstance(held, list) and key not in _MESSAGES)
            else str(value)
        )
    if key not in _MESSAGES or not isinstance(value, list):
        return value
    return [
        _message(item) if isinstance(item, dict) and {"from", "value"} <= item.keys() else item
        for item in value
    ]


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message of ShareGPT's form."""
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {"role": _ROLES.get(str(turn["from"]), turn["from"]), "content": turn["value"], **others}


def _require_template(template: str) -> None:
    """Refuse a template without plain names of columns."""
    found = repr(template[:60])
    is_plain = False
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
        is_plain = bool(parts) and all(
            name and not {*".["} & {*name} and not (form or change) for name, form, change in parts
        )
    except ValueError as error:
        found += f" ({error})"
    if not is_plain:
        expected = "text with names of columns between braces, such as 'Tweet: {text} Sentiment:'"
        raise OptionError(
            "prompt_template",
            found,
            expected,
            "name at least one column; write {{ and }} for braces",
        )


def _column(row: Row, column: str, option: str) -> Any:
    if column in row:
        return row[column]
    if column in row.empty:
        found = f"{row.empty[column]} in the column {column!r}"
        raise row_error(found, f"a value, since {option} names it", "fill it in or remove the row")
    names = ", ".join(map(repr, list(row)[:_LISTED])) or "none"
    found = f"no value in a column {column!r}; the row's columns are {names}"
    remedy = _nearest(column, list(row)) or "name a column of the file"
    raise row_error(found, f"the column {column!r} that {option} names", remedy)


def with_line_breaks(text: str) -> str:
    r"""A text of the command line with line breaks and tabs in place of \n and \t."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def is_column(column: str) -> bool:
    """Whether a template can name a column."""
    return bool(column) and not set("{}.[!:") & set(column)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """A remedy with the name that was probably meant; None if no name is similar."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"write {near[0]!r} if that is meant" if near else None


def _separated(prompt: str, text: str) -> str:
    """A text after a prompt, with a space before it unless one of the two has one."""
    return text if not prompt or prompt[-1].isspace() or text[:1].isspace() else f" {text}"


# Columns that nobody has named, by the columns and values of all rows


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
        for number, row in numbered:
            with at_row(path, number):
                chosen._require_label(row, is_learned=True)
    labels = () if takes_labels else chosen.labels or chosen.labels_in(rows)
    with at_row(path, 1):
        first = replace(chosen, labels=labels).converted(rows[0], takes_labels=takes_labels)
    use = ColumnUse()
    read = columns_read(chosen, first, takes_labels=takes_labels)
    for row in rows:
        use.add(row, read)
    unused = tuple(use.unread)
    if takes_labels:
        return Survey(chosen, RowFormat.LABELS, "texts with labels", labels, unused)
    listed = ", ".join(map(repr, labels[:6])) + (", ..." if len(labels) > 6 else "")
    kind = f"prompts with one of {len(labels)} labels: {listed}" if labels else _format_of(first)[1]
    return Survey(chosen, RowFormat.of(first), kind, labels, unused)


def columns_read(
    options: RowOptions, converted: Iterable[str], *, takes_labels: bool = False
) -> set[str]:
    """The columns of a file that a row with these keys is made from."""
    keys = _LABELLED if takes_labels else _format_of(converted)[0]
    made = {"text", "prompt"} if options.prompt_template is not None else {"prompt"}
    read = {getattr(options, f"{key}_column", None) or key for key in keys if key not in made}
    return read | (set(options.prompt_columns) if made & set(keys) else set())


class ColumnUse:
    """Which columns of a file are read, and of the others how often each is true and false."""

    def __init__(self) -> None:
        self.read: dict[str, None] = {}  # the columns that are read, in order
        self._others: dict[str, Counter[bool | None]] = {}

    def add(self, row: Row, read: Collection[str]) -> None:
        """Count a row of the file, of which these columns are read."""
        for column, value in row.items():
            if column in read:
                self.read[column] = None
            else:
                self._others.setdefault(column, Counter())[_truth(value)] += 1

    @property
    def unread(self) -> list[str]:
        """The columns that no row reads, those first that may say which rows are good."""
        unread = [column for column in self._others if column not in self.read]
        return sorted(unread, key=lambda column: not self._may_judge(column))

    def judgement(self, column: str) -> str | None:
        """How often a column says true, and false; None: it says something else, or only one."""
        counts = self._others.get(column, Counter())
        if {*counts} != {True, False}:
            return None
        return f"true in {counted(counts[True], 'row')}, false in {counted(counts[False], 'row')}"

    def notices(self, used_for: str) -> list[str]:
        """Lines about columns that no row reads."""
        if not self.unread:
            return []
        listed = ", ".join(self.unread[:_LISTED]) + (", ..." if len(self.unread) > _LISTED else "")
        columns = f"the column{'s' if len(self.read) > 1 else ''} {' and '.join(self.read)}"
        lines = [f"{used_for}: {columns}; not used: {listed}"]
        for column in filter(self._may_judge, self.unread):
            counts = self.judgement(column)
            lines.append(
                f"{column}{f' ({counts})' if counts else ''} may say which rows are good, and is "
                "not used: if it does, keep the good rows alone"
            )
        return lines

    def _may_judge(self, column: str) -> bool:
        return bool(_JUDGING.fullmatch(column)) or self.judgement(column) is not None


def _truth(value: Any) -> bool | None:
    """A bool, also as a cell of CSV; None for another value."""
    if isinstance(value, Cell):
        return {"true": True, "false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def _completed(path: Path, rows: Sequence[Row], options: RowOptions) -> RowOptions:
    """The options with the columns that the user has not named."""
    if not options.names_columns:
        return _named(path, rows, options)
    columns = _columns_of(rows)
    answer = options.label_column or options.completion_column
    if options.text_column is not None or options.messages_column is not None:
        return options
    if options.prompt_template is None and options.prompt_column is None:
        texts = _texts(rows, except_for=answer)
        if answer not in columns or "prompt" in columns or not texts:
            return options
        return _with_prompt(options, rows, texts)
    if answer is None and not set(columns) & set(_KEPT):
        others = [name for name in columns if name not in options.prompt_columns]
        return replace(options, label_column=_label_of(rows, others))
    return options


def _with_prompt(options: RowOptions, rows: Sequence[Row], texts: Sequence[str]) -> RowOptions:
    """The options with the column called text, or else that of the longest texts, as the prompt.

    It is in a template that ends with the name of the labels, if rows have labels.
    """
    text = (
        "text"
        if "text" in texts
        else max(texts, key=lambda name: sum(len(row[name]) for row in rows))
    )
    label = options.label_column
    if label is None or not is_column(text) or not is_column(label):
        return replace(options, prompt_column=text)
    return replace(options, prompt_template=f"{{{text}}}\\n{label.capitalize()}:")


def _texts(rows: Sequence[Row], *, except_for: str | None) -> list[str]:
    """The columns that have a text in every row."""
    return [
        name
        for name in _columns_of(rows)
        if name != except_for and all(isinstance(row.get(name), str) for row in rows)
    ]


def _columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns of the first row that have a value in any row."""
    return [name for name in rows[0].columns if any(name in row for row in rows)]


def _named(path: Path, rows: Sequence[Row], options: RowOptions) -> RowOptions:
    """The options with the columns that the rows seem to have."""
    columns = _columns_of(rows)
    if {"messages", "conversations", "chosen", "candidates"} & set(columns) or {
        "prompt",
        "label",
    } <= set(columns):
        return options
    if {"prompt", "completion"} <= set(columns):
        if _is_label(rows, "completion"):
            return replace(options, label_column="completion")
        return _with_context(rows, "prompt", options)
    for prompt, completion in _PAIRS:
        if {prompt, completion} <= set(columns):
            return _with_context(rows, prompt, replace(options, completion_column=completion))
    label = _label_of(rows, columns)
    texts = _texts(rows, except_for=label)
    if label is not None and texts:
        return _with_prompt(replace(options, label_column=label), rows, texts)
    if set(columns) & _KNOWN:
        return options
    found = ", ".join(map(repr, columns[:_LISTED]))
    example = f"--text-column {shlex.quote(columns[0])}"
    if len(columns) > 1:
        prompt, completion, *_ = map(shlex.quote, columns)
        example = f"--prompt-column {prompt} --completion-column {completion}"
    expected = "columns of a prompt and of a completion or label, text, or messages"
    raise DataError(
        path,
        f"the columns {found}",
        expected,
        f"name them, such as {example}",
    )


def _with_context(rows: Sequence[Row], prompt: str, options: RowOptions) -> RowOptions:
    """The options with the prompt, in sections as alpaca has them if rows have a system text or a
    context, too.
    """
    texts = [
        name
        for name in _texts(rows, except_for=options.completion_column)
        if any(row[name].strip() for row in rows)
    ]
    sections = [name for name in ("system", prompt, *_CONTEXT) if name == prompt or name in texts]
    if len(sections) == 1:
        return options if prompt == "prompt" else replace(options, prompt_column=prompt)
    template = (
        "".join(f"### {name.capitalize()}:\\n{{{name}}}\\n\\n" for name in sections)
        + "### Response:\\n"
    )
    preamble = _ALPACA if sections == ["instruction", "input"] else ""
    return replace(options, prompt_template=preamble + template)


def _label_of(rows: Sequence[Row], columns: Sequence[str]) -> str | None:
    """The column of labels: the one called label, else the last one whose labels are words, else
    the last one.
    """
    named = [name for name in reversed(columns) if _is_label(rows, name)]
    words = [
        name
        for name in named
        if not any(str(row.get(name, "")).lstrip("-").isdecimal() for row in rows)
    ]
    return "label" if "label" in named else next(iter([*words, *named]), None)


def _is_label(rows: Sequence[Row], column: str) -> bool:
    """Whether a column has a few short values that occur again and again; by mistake it may be
    empty in a few rows.
    """
    values = [row[column] for row in rows if str(row.get(column, "")).strip()]
    if len(values) < (1 - _MOST_EMPTY) * len(rows) and column != "label":
        return False
    if not all(
        isinstance(value, (str, int, float)) and len(str(value)) <= _LONGEST_LABEL
        for value in values
    ):
        return False
    if any(isinstance(value, float) and value % 1 for value in values):
        return False
    different = len(set(map(str, values)))
    return 2 <= different <= min(_MOST_LABELS, len(rows) // _LEAST_REPEATS)


def _format_of(row: Iterable[str]) -> tuple[Sequence[str], str]:
    return next((known for key, known in _FORMATS.items() if key in row), _PLAIN)
