"""JSONL files as tokenised rows for a causal language model.

Every row is tokenised once, when the file is read, and kept in memory at four bytes a token. A malformed row is therefore
refused before the first step, and a run can resume at any step without reading the earlier rows.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from zo2adapters.ranges import require_at_least
from zo2adapters.tasks.chat_template import render_chat
from zo2adapters.tasks.row_format import RowFormat
from zo2core import DataError
from zo2core.errors import reason
from zo2core.io.durable import open_regular


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """One row of a data file, as tokens."""

    input_ids: "array[int]"  # (length,), int32
    prompt_length: int  # number of leading tokens without loss
    line: int  # line of the file, from 1

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The sequences of the row: tokens of each, and for how many of these the loss needs logits."""
        return [(len(self.input_ids), len(self.input_ids) - max(self.prompt_length, 1))]


class _Tokens(Protocol):
    @property
    def input_ids(self) -> "array[int]": ...


TOO_LONG = "shorten this row or remove it, or raise `sequence_length`, up to what the model takes"  # remedy

Row = TypeVar("Row", bound=_Tokens)


@dataclass(frozen=True, slots=True)
class TokenRows(Generic[Row]):
    """The rows of a data file, in file order; each is one sequence of tokens."""

    rows: tuple[Row, ...]  # at least one
    truncated: int  # number of rows that were shortened to the sequence length

    def __post_init__(self) -> None:
        assert self.rows, "a dataset holds at least one row"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row."""
        return max(len(row.input_ids) for row in self.rows)

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(len(row.input_ids) for row in self.rows)

    @property
    def most_sequences(self) -> int:
        """Most sequences of a row."""
        return 1


@dataclass(frozen=True, slots=True)
class Dataset(TokenRows[TokenizedRow]):
    """Rows for next-token prediction."""

    format: ClassVar = RowFormat.TEXT

    def digest(self) -> str:
        """SHA-256 over the tokens of all rows and the lengths of their prompts."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(b"%d %d\n" % (len(row.input_ids), row.prompt_length))
            digest.update(row.input_ids)
        return digest.hexdigest()


def read_dataset(path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase, *, sequence_length: int) -> Dataset:
    """Read and tokenise a JSONL file whose rows follow the conventions of TRL's SFTTrainer.

    A row has ``text`` or ``messages``, with loss on every token, or ``prompt`` and ``completion``, two strings or two lists
    of messages, with loss on the completion; other keys are ignored. The tokenizer's EOS is appended to strings that do not
    end with it; the chat template ends conversations.

    Args:
        path: File in UTF-8, with or without byte order mark; blank lines are skipped.
        tokenizer: The model's tokenizer; rows of messages need one with a chat template.
        sequence_length: Most tokens of a row, at least 2; longer rows lose their end.

    Returns:
        The tokenised rows, with the number of rows that were shortened.

    Raises:
        DataError: if the file cannot be read, or a row is malformed or has no token to predict.
        OptionError: if ``sequence_length`` is below 2.
    """
    require_at_least("sequence_length", sequence_length, 2)
    rows, truncated = [], 0
    for line, row in parsed_rows(path):
        try:
            ids, prompt = tokenized_row(row, tokenizer)
            _require_prediction(len(ids), prompt, sequence_length)
        except DataError as error:  # the error lacks path and line
            raise _at_line(error, path, line) from error.__cause__
        truncated += len(ids) > sequence_length
        rows.append(TokenizedRow(array("i", ids[:sequence_length]), prompt, line))
    return Dataset(tuple(rows), truncated)


def _require_prediction(tokens: int, prompt: int, sequence_length: int) -> None:
    """Refuse a row without a token to predict: one after the prompt, not the row's first, and within the length."""
    _require(
        tokens > 1 or prompt > 0,
        f"a text of {'1 token' if tokens else 'no tokens'}",
        "at least 2 tokens, of which the first predicts the second",
        "lengthen the text, or remove the row",
    )
    _require(
        tokens > prompt,
        f"a prompt of {prompt} tokens, and no token of a completion",
        "at least one token after the prompt",
        "write a completion, or remove the row",
    )
    _require(
        prompt < sequence_length,
        f"a prompt of {prompt} tokens, which leaves no token of the row's {sequence_length} for the completion",
        f"a prompt of at most {sequence_length - 1} tokens",
        TOO_LONG,
    )


def parsed_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a JSONL file's rows as JSON objects, without keys whose value is null.

    Args:
        path: File in UTF-8, with or without byte order mark; blank lines are skipped.

    Yields:
        The line, from 1, and the row.

    Raises:
        DataError: if the file cannot be read, a row is not a JSON object, or there is no row.
    """
    line, empty = 0, True
    try:
        with open_regular(path) as file:
            # Bytes are split at line feeds alone; str.splitlines would split inside a string with U+2028.
            for line, raw in enumerate(file, 1):
                if raw.strip(b"\xef\xbb\xbf \t\r\n"):  # the first three are the byte order mark
                    row, empty = _parsed(raw), False
                    yield line, row
    except DataError as error:
        raise _at_line(error, path, line) from error.__cause__
    except OSError as error:
        raise DataError(path, found=reason(error), expected="a readable file", remedy="check the path") from error
    if empty:
        raise DataError(path, found="no rows", expected="a JSON object on each line", remedy="write at least one row")


def completion_ids(prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Tokenise a prompt and its completion, without appending an EOS.

    Returns:
        Token ids of both together, and the number of those that belong to the prompt.
    """
    whole = _text_ids(prompt + completion, tokenizer, append_eos=False)
    return whole, _prompt_length(_text_ids(prompt, tokenizer, append_eos=False), whole)


def _require(condition: bool, found: str, expected: str, remedy: str) -> None:  # noqa: FBT001 - like an assert
    if not condition:
        raise DataError("row", found=found, expected=expected, remedy=remedy)


def _at_line(error: DataError, path: str | os.PathLike[str], line: int) -> DataError:
    return DataError(f"{path}, line {line}", found=error.found, expected=error.expected, remedy=error.remedy)


def _parsed(raw: bytes) -> dict[str, Any]:
    expected, remedy = "a JSON object", "write one JSON object per line, in UTF-8"
    try:
        row = json.loads(raw.decode("utf-8-sig").strip())
        json.dumps(row, ensure_ascii=False).encode()  # fails on half a surrogate pair, which no tokenizer takes
    except (ValueError, RecursionError) as error:
        found = f"text that is not JSON in UTF-8 ({error})".replace("line 1 ", "")  # json counts lines within this one
        raise DataError("row", found=found, expected=expected, remedy=remedy) from error
    _require(isinstance(row, dict), json.dumps(row)[:40], expected, remedy)
    return {key: value for key, value in row.items() if value is not None}


def tokenized_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Tokenise a row as ``read_dataset`` does.

    Returns:
        Token ids, and the number of those that belong to the prompt.

    Raises:
        DataError: if the row is malformed.
    """
    match [key for key in ("text", "prompt", "completion", "messages") if key in row]:
        case ["text"]:
            return _text_ids(_string(row, "text"), tokenizer), 0
        case ["messages"]:
            return _chat_ids(_messages(row, "messages"), tokenizer), 0
        case ["prompt", "completion"] if isinstance(row["prompt"], list):
            messages = _messages(row, "prompt")
            prompt = _chat_ids(messages, tokenizer, reply_follows=True)
            whole = _chat_ids(messages + _messages(row, "completion"), tokenizer)
        case ["prompt", "completion"]:
            text = _string(row, "prompt", may_be_empty=True)
            prompt = _text_ids(text, tokenizer, append_eos=False)
            whole = _text_ids(text + _string(row, "completion"), tokenizer)
        case present:
            found = f"the keys {', '.join(map(repr, present or row)) or '(none)'}"
            expected = "'text', or 'prompt' and 'completion', or 'messages'"
            raise DataError("row", found=found, expected=expected, remedy="keep the keys of one of these formats")
    return whole, _prompt_length(prompt, whole)


def _prompt_length(prompt: list[int], whole: list[int]) -> int:
    # The prompt ends where the two tokenisations differ. That is usually its own length, but a token that spans its end and
    # the completion's start ("is " + "blue") counts as completion, so that the whole completion is learned.
    differs = [alone != joined for alone, joined in zip(prompt, whole, strict=False)]
    return [*differs, True].index(True)


def _text_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, append_eos: bool = True) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [*ids, eos] if append_eos and eos is not None and ids[-1:] != [eos] else ids


def _chat_ids(messages: list[Any], tokenizer: PreTrainedTokenizerBase, *, reply_follows: bool = False) -> list[int]:
    found, expected = "messages, with a tokenizer that has no chat template", "a tokenizer with a chat template"
    _require(bool(tokenizer.chat_template), found, expected, "use a chat model's tokenizer, or write rows of strings")
    text = render_chat(messages, tokenizer, reply_follows=reply_follows)
    # The template writes the special tokens; the tokenizer would add them a second time.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _string(row: dict[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row[key]
    _require(isinstance(value, str), f"{json.dumps(value)[:40]} as {key!r}", "a string", f"write {key!r} as a string")
    _require(value != "" or may_be_empty, f"an empty {key!r}", "text to learn from", "fill it in or remove the row")
    return str(value)


def _messages(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    for extra in ("tools", "chat_template_kwargs"):  # a template may print these, and the text would differ without them
        _require(not row.get(extra), repr(extra), "messages alone", f"remove {extra!r} from the row")
    value = row[key]
    messages = [fields if isinstance(fields, dict) else {} for fields in value] if isinstance(value, list) else [{}]
    typed = all(isinstance(fields.get(name), str) for fields in messages for name in ("role", "content"))
    expected = "a list of objects with two strings, 'role' and 'content'"
    _require(typed, f"{json.dumps(value)[:40]} as {key!r}", expected, f"write {key!r} as such a list")
    _require(any(fields["content"] for fields in messages), f"an empty {key!r}", "some content", "fill in or remove it")
    return messages
