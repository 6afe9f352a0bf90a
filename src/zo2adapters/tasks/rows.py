"""JSONL files as tokenised rows for a causal language model.

Every row is tokenised once, when the file is read, and held at four bytes a token. That costs memory in proportion to
the file, and buys two things: a bad row is refused before the first step, and a run restarts at any step by arithmetic.
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
    prompt_length: int  # leading tokens without loss
    line: int  # of the file, from 1

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The sequences of the row: tokens of each, and for how many of these the loss needs logits."""
        return [(len(self.input_ids), len(self.input_ids) - max(self.prompt_length, 1))]


class _Tokens(Protocol):
    @property
    def input_ids(self) -> "array[int]": ...


TOO_LONG = "shorten this row or remove it, or raise `sequence_length`, up to what the model takes"  # what to do

Row = TypeVar("Row", bound=_Tokens)


@dataclass(frozen=True, slots=True)
class TokenRows(Generic[Row]):
    """The rows of a data file, in file order: each is one sequence of tokens."""

    rows: tuple[Row, ...]  # at least one
    truncated: int  # rows that lost their end to the sequence length

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
        """Tokens of the longest row."""
        return max(len(row.input_ids) for row in self.rows)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.input_ids) for row in self.rows)

    @property
    def most_sequences(self) -> int:
        """Sequences that a row is."""
        return 1


@dataclass(frozen=True, slots=True)
class Dataset(TokenRows[TokenizedRow]):
    """Rows to predict the next tokens of."""

    format: ClassVar = RowFormat.TEXT

    def digest(self) -> str:
        """SHA-256 over what the rows become as batches: tokens, and which of them are without loss."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(b"%d %d\n" % (len(row.input_ids), row.prompt_length))
            digest.update(row.input_ids)
        return digest.hexdigest()


def read_dataset(path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase, *, sequence_length: int) -> Dataset:
    """Read and tokenise a JSONL file whose rows follow the conventions of TRL's SFTTrainer.

    A row has `text` or `messages`, with loss on every token, or `prompt` and `completion`, two strings or two lists of
    messages, with loss on the completion; other keys are ignored. Strings get the tokenizer's EOS at their end unless
    they have it; what ends a conversation is up to the chat template.

    Args:
        path: File in UTF-8, with or without byte order mark; blank lines are skipped.
        tokenizer: Tokenizer of the model; messages need one with a chat template.
        sequence_length: Most tokens a row may keep, at least 2; longer rows lose their end.

    Returns:
        The tokenised rows and how many of them were cut.

    Raises:
        DataError: The file cannot be read, or a row is malformed or leaves nothing to predict.
        OptionError: `sequence_length` is below 2.
    """
    require_at_least("sequence_length", sequence_length, 2)
    rows, truncated = [], 0
    for line, row in parsed_rows(path):
        try:
            ids, prompt = tokenized_row(row, tokenizer)
            _require_prediction(len(ids), prompt, sequence_length)
        except DataError as error:  # about the row; only here its path and line are known
            raise _at_line(error, path, line) from error.__cause__
        truncated += len(ids) > sequence_length
        rows.append(TokenizedRow(array("i", ids[:sequence_length]), prompt, line))
    return Dataset(tuple(rows), truncated)


def _require_prediction(tokens: int, prompt: int, sequence_length: int) -> None:
    """Refuse a row that has no token to predict: one behind the prompt, and not the row's first, within the length."""
    _require(
        tokens > 1 or prompt > 0,
        f"a text of {'1 token' if tokens else 'no tokens'}",
        "at least 2 tokens, of which the first predicts the second",
        "lengthen the text, or remove the row",
    )
    _require(
        tokens > prompt,
        f"a prompt of {prompt} tokens, and no token of a completion",
        "at least one token behind the prompt",
        "write a completion, or remove the row",
    )
    _require(
        prompt < sequence_length,
        f"a prompt of {prompt} tokens, which leaves none of the {sequence_length} that a row may have to its completion",
        f"a prompt of at most {sequence_length - 1} tokens",
        TOO_LONG,
    )


def parsed_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a JSONL file's rows as JSON objects, without the keys that are null.

    Args:
        path: File in UTF-8, with or without byte order mark; blank lines are skipped.

    Yields:
        Line, from 1, and row; at least one.

    Raises:
        DataError: The file cannot be read, a row is no JSON object, or there is none.
    """
    line, empty = 0, True
    try:
        with open_regular(path) as file:
            # Bytes split at line feeds alone; str.splitlines would cut inside a string that holds U+2028.
            for line, raw in enumerate(file, 1):
                if raw.strip(b"\xef\xbb\xbf \t\r\n"):  # the first three are the byte order mark
                    row, empty = _parsed(raw), False
                    yield line, row
    except DataError as error:
        raise _at_line(error, path, line) from error.__cause__
    except OSError as error:
        raise DataError(path, found=reason(error), expected="a readable file", remedy="check the path") from error
    if empty:
        raise DataError(path, found="no rows", expected="a JSON object on each line", remedy="write at least one")


def completion_ids(prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Tokenise a prompt and what follows it, without an EOS of our own.

    Returns:
        Token ids of both, and how many of them are the prompt's.
    """
    whole = _text_ids(prompt + completion, tokenizer, closed=False)
    return whole, _parting(_text_ids(prompt, tokenizer, closed=False), whole)


def _require(condition: bool, found: str, expected: str, remedy: str) -> None:  # noqa: FBT001 - as an assert takes it
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
        found = f"what is not JSON in UTF-8 ({error})".replace("line 1 ", "")  # json counts within this line
        raise DataError("row", found=found, expected=expected, remedy=remedy) from error
    _require(isinstance(row, dict), json.dumps(row)[:40], expected, remedy)
    return {key: value for key, value in row.items() if value is not None}


def tokenized_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Tokenise a row as ``read_dataset`` does.

    Returns:
        Token ids, and how many of them are the prompt's.

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
            prompt = _text_ids(text, tokenizer, closed=False)
            whole = _text_ids(text + _string(row, "completion"), tokenizer)
        case present:
            found = f"the keys {', '.join(map(repr, present or row)) or '(none)'}"
            expected = "'text', or 'prompt' and 'completion', or 'messages'"
            raise DataError("row", found=found, expected=expected, remedy="keep the keys of exactly one kind of row")
    return whole, _parting(prompt, whole)


def _parting(prompt: list[int], whole: list[int]) -> int:
    # The prompt ends where the two tokenisations part: mostly at its own length, but a token that merges its end with the
    # completion's start ("is " + "blue") counts as completion, so that nothing of the completion goes unlearned.
    parted = [ours != theirs for ours, theirs in zip(prompt, whole, strict=False)]
    return [*parted, True].index(True)


def _text_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, closed: bool = True) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [*ids, eos] if closed and eos is not None and ids[-1:] != [eos] else ids


def _chat_ids(messages: list[Any], tokenizer: PreTrainedTokenizerBase, *, reply_follows: bool = False) -> list[int]:
    found, expected = "messages, and a tokenizer without a chat template", "a tokenizer with a chat template"
    _require(bool(tokenizer.chat_template), found, expected, "use a chat model's tokenizer, or write rows of strings")
    text = render_chat(messages, tokenizer, reply_follows=reply_follows)
    # The template writes the special tokens itself; the tokenizer would add them a second time.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _string(row: dict[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row[key]
    _require(isinstance(value, str), f"{json.dumps(value)[:40]} as {key!r}", "a string", f"write {key!r} as a string")
    _require(value != "" or may_be_empty, f"an empty {key!r}", "text to learn from", "fill it in or remove the row")
    return str(value)


def _messages(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    for extra in ("tools", "chat_template_kwargs"):  # a template may print these: without them it is another text
        _require(not row.get(extra), repr(extra), "messages alone", f"remove {extra!r} from the row")
    value = row[key]
    messages = [fields if isinstance(fields, dict) else {} for fields in value] if isinstance(value, list) else [{}]
    typed = all(isinstance(fields.get(name), str) for fields in messages for name in ("role", "content"))
    expected = "a list of objects with two strings, 'role' and 'content'"
    _require(typed, f"{json.dumps(value)[:40]} as {key!r}", expected, f"write {key!r} as such a list")
    _require(any(fields["content"] for fields in messages), f"an empty {key!r}", "some content", "fill in or remove it")
    return messages
