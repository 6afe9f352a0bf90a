"""Data files as tokenised rows for a causal language model.

Every row is tokenised once, when the file is read, and kept in memory at four bytes a token. A malformed row is therefore
refused before the first step, and a run can resume at any step without reading the earlier rows.
"""

import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from zo2adapters.tasks.chat_template import render_chat
from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.row_source import at_row, parsed_rows
from zo2core.errors import DataError
from zo2core.ranges import counted, require_whole


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """One row of a data file, as tokens."""

    input_ids: "array[int]"  # (length,), int32
    prompt_length: int  # number of leading tokens without loss
    line: int  # line of the file, or number of the row, from 1
    later_prompts: tuple[tuple[int, int], ...] = ()  # start and end of further tokens without loss, within the row
    source: str = ""  # the row of the file as JSON, for runs that need it

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The sequences of the row: tokens of each, and for how many of these the loss needs logits."""
        without_loss = max(self.prompt_length, 1) + sum(end - start for start, end in self.later_prompts)
        return [(len(self.input_ids), len(self.input_ids) - without_loss)]


TOO_LONG = "shorten this row or remove it, or raise `sequence_length`, up to what the model takes"  # remedy

AnyRow = TypeVar("AnyRow")


@dataclass(frozen=True, slots=True)
class FileRows(Generic[AnyRow]):
    """The rows of a data file, in file order."""

    rows: tuple[AnyRow, ...]  # at least one
    truncated: int = 0  # number of rows that were shortened to the sequence length
    dropped: int = 0  # number of longer rows that were left out

    def __post_init__(self) -> None:
        assert self.rows, "a dataset holds at least one row"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> AnyRow:
        return self.rows[index]

    def __iter__(self) -> Iterator[AnyRow]:
        return iter(self.rows)

    @property
    def most_sequences(self) -> int:
        """Most sequences of a row."""
        return 1


class _Tokens(Protocol):
    @property
    def input_ids(self) -> "array[int]": ...


Row = TypeVar("Row", bound=_Tokens)


@dataclass(frozen=True, slots=True)
class TokenRows(FileRows[Row]):
    """The rows of a data file; each is one sequence of tokens."""

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row."""
        return max(len(row.input_ids) for row in self.rows)

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(len(row.input_ids) for row in self.rows)


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
            if row.later_prompts:
                digest.update(repr(row.later_prompts).encode())
        return digest.hexdigest()


def read_dataset(
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    options: RowOptions | None = None,
    keeps_sources: bool = False,
    vocabulary: int | None = None,
) -> Dataset:
    """Read and tokenise a data file whose rows follow the conventions of TRL's SFTTrainer.

    A row has ``text``, with loss on every token; or ``messages``, with loss on the assistant's answers or on every token; or
    ``prompt`` and ``completion``, two strings or two lists of messages, with loss on the completion. Other keys are ignored.
    The tokenizer's EOS is appended to strings that do not end with it; the chat template ends conversations.
    """
    require_whole("sequence_length", sequence_length, 2)
    options = RowOptions() if options is None else options
    rows, truncated, dropped = [], 0, 0
    for line, source in parsed_rows(path):
        try:
            row = options.converted(source)
            kept = json.dumps({**source, **row}) if keeps_sources else ""
            if keeps_sources and isinstance(row.get("prompt"), str) and "completion" not in row:
                row["completion"] = tokenizer.eos_token or " "
            ids, prompt, later = _tokenized(row, tokenizer, options)
            is_long = len(ids) > sequence_length
            if is_long and options.too_long == "drop":
                dropped += 1
                continue
            _require(
                not is_long or options.too_long != "refuse",
                f"a row of {counted(len(ids), 'token')}",
                f"at most {sequence_length} with --too-long refuse",
                f"{TOO_LONG}; or pass --too-long cut or drop",
            )
            _require_prediction(len(ids), prompt, sequence_length)
            require_known("row", ids[:sequence_length], tokenizer, vocabulary)
        except DataError as error:  # the error lacks path and line
            raise at_row(error, path, line) from error.__cause__
        truncated += is_long
        later = tuple((start, min(end, sequence_length)) for start, end in later if start < sequence_length)
        rows.append(TokenizedRow(array("i", ids[:sequence_length]), prompt, line, later, kept))
    require_kept(path, len(rows), dropped, sequence_length)
    return Dataset(tuple(rows), truncated, dropped)


def converted_rows(
    path: str | os.PathLike[str], options: RowOptions, *, takes_labels: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a data file's rows, with the keys of a row format. See ``parsed_rows`` and ``RowOptions.converted``."""
    for line, row in parsed_rows(path):
        try:
            yield line, options.converted(row, takes_labels=takes_labels)
        except DataError as error:
            raise at_row(error, path, line) from error


def require_known(where: str, ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, vocabulary: int | None) -> None:
    """Refuse a token that the model's embedding does not have."""
    if vocabulary is not None and (largest := max(ids, default=0)) >= vocabulary:
        raise DataError(
            where,
            found=f"the token {tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}",
            expected=f"ids below {vocabulary}, the rows of the model's embedding",
            remedy="use the tokenizer that belongs to the model, or enlarge the embedding with resize_token_embeddings",
        )


def require_kept(path: str | os.PathLike[str], kept: int, dropped: int, sequence_length: int) -> None:
    """Refuse a file of which no row was short enough."""
    if not kept:
        raise DataError(
            path,
            found=f"{counted(dropped, 'row')}, all of more than {counted(sequence_length, 'token')}",
            expected="a row that is short enough, with --too-long drop",
            remedy="raise `sequence_length`, or pass --too-long cut",
        )


def is_dropped(where: str, tokens: int, sequence_length: int, options: RowOptions) -> bool:
    """Whether a row that cannot be cut is left out."""
    if tokens <= sequence_length or options.too_long != "cut":
        return tokens > sequence_length and options.too_long == "drop"
    raise DataError(
        where,
        found=f"{counted(tokens, 'token')} in a row with candidates, preferences or answers, which cannot be cut",
        expected=f"at most {sequence_length} with --too-long cut",
        remedy=f"{TOO_LONG}; or pass --too-long drop",
    )


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
        f"a prompt of {counted(prompt, 'token')}, and no token of a completion",
        "at least one token after the prompt",
        "write a completion, or remove the row",
    )
    _require(
        prompt < sequence_length,
        f"a prompt of {counted(prompt, 'token')}, which leaves no token of the row's {sequence_length} for the completion",
        f"a prompt of at most {sequence_length - 1} tokens",
        TOO_LONG,
    )


def completion_ids(prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Tokenise a prompt and its completion, without appending an EOS."""
    whole = _text_ids(prompt + completion, tokenizer, append_eos=False)
    return whole, _prompt_length(_text_ids(prompt, tokenizer, append_eos=False), whole)


def _require(condition: bool, found: str, expected: str, remedy: str) -> None:  # noqa: FBT001 - like an assert
    if not condition:
        raise DataError("row", found=found, expected=expected, remedy=remedy)


def tokenized_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, options: RowOptions) -> tuple[list[int], int]:
    """Tokenise a row as ``read_dataset`` does, with loss on every token of messages."""
    ids, prompt, _ = _tokenized(row, tokenizer, replace(options, train_on="all"))
    return ids, prompt


def _tokenized(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, options: RowOptions
) -> tuple[list[int], int, tuple[tuple[int, int], ...]]:
    """Token ids, the number of those before the first that is learned, and later ranges that are not learned."""
    at = options.rendered_at
    match [key for key in ("text", "prompt", "completion", "messages") if key in row]:
        case ["text"]:
            return _text_ids(_string(row, "text"), tokenizer), 0, ()
        case ["messages"] if options.train_on == "answers":
            return _answers(_messages(row, "messages"), tokenizer, at)
        case ["messages"]:
            return _chat_ids(_messages(row, "messages"), tokenizer, at), 0, ()
        case ["prompt", "completion"] if isinstance(row["prompt"], list):
            messages = _messages(row, "prompt")
            prompt = _chat_ids(messages, tokenizer, at, reply_follows=True)
            whole = _chat_ids(messages + _messages(row, "completion"), tokenizer, at)
        case ["prompt", "completion"]:
            text = _string(row, "prompt", may_be_empty=True)
            prompt = _text_ids(text, tokenizer, append_eos=False)
            whole = _text_ids(text + _string(row, "completion"), tokenizer)
        case present:
            found = f"the keys {', '.join(map(repr, present or row)) or '(none)'}"
            expected = "'text', or 'prompt' and 'completion', or 'messages'"
            remedy = "keep the keys of one of these formats"
            if not present and row:
                remedy += ", or name columns, such as --text-column or --prompt-template"
            raise DataError("row", found=found, expected=expected, remedy=remedy)
    return whole, _prompt_length(prompt, whole), ()


def _answers(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, at: str | None
) -> tuple[list[int], int, tuple[tuple[int, int], ...]]:
    """A conversation of which the assistant's answers are learned: what ``_tokenized`` returns."""
    whole = _chat_ids(messages, tokenizer, at)
    answers: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _chat_ids(messages[:index], tokenizer, at, reply_follows=True) if index else []
        is_last = index == len(messages) - 1
        end = len(whole) if is_last else _prompt_length(_chat_ids(messages[: index + 1], tokenizer, at), whole)
        start = _prompt_length(before, whole)
        _require(
            start < end,
            "a chat template that changes an answer once more messages follow",
            "answers that stay the same in a longer conversation",
            "pass --train-on all, or write a row with 'prompt' and 'completion' for each answer",
        )
        answers.append((start, end))
    _require(
        bool(answers),
        "messages without an answer, that is without the role 'assistant'",
        "at least one message of the assistant, whose tokens are learned",
        "add the answer, or pass --train-on all",
    )
    later = tuple((end, start) for (_, end), (start, _) in itertools.pairwise(answers) if end < start)
    if answers[-1][1] < len(whole):
        later = (*later, (answers[-1][1], len(whole)))
    return whole, answers[0][0], later


def _prompt_length(prompt: list[int], whole: list[int]) -> int:
    # The prompt ends where the two tokenisations differ. That is usually its own length, but a token that spans its end and
    # the completion's start ("is " + "blue") counts as completion, so that the whole completion is learned.
    differs = [alone != joined for alone, joined in zip(prompt, whole, strict=False)]
    return [*differs, True].index(True)


def _text_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, append_eos: bool = True) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [*ids, eos] if append_eos and eos is not None and ids[-1:] != [eos] else ids


def _chat_ids(
    messages: list[Any], tokenizer: PreTrainedTokenizerBase, at: str | None, *, reply_follows: bool = False
) -> list[int]:
    found, expected = "messages, with a tokenizer that has no chat template", "a tokenizer with a chat template"
    _require(bool(tokenizer.chat_template), found, expected, "use a chat model's tokenizer, or write rows of strings")
    text = render_chat(messages, tokenizer, reply_follows=reply_follows, rendered_at=at)
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
