"""Read the rows of a data file as tokens.

Every row is tokenised once, when the file is read, and kept in memory. A malformed row is therefore refused before the
first step, and a run can resume at any step without reading the earlier rows.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zo2adapters.tasks.chat_template import render_chat
from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.row_source import Cell, at_row, parsed_rows
from zo2adapters.tasks.rows import Choice, Label, LabelledRow, Question, Rows, TokenizedRow
from zo2core.errors import DataError, OptionError
from zo2core.ranges import counted, require_whole

TOO_LONG = "shorten this row or remove it, or raise `sequence_length`, up to what the model takes"  # remedy
MOST_ANSWER_TOKENS = 50  # most tokens of an answer that is generated in an evaluation of a run


class DataFiles(NamedTuple):
    """The files of a run, and how their rows are read."""

    data: Path
    evaluation: Path | None  # None: no file to evaluate on
    options: RowOptions
    eval_split: float | None = None  # share of the training rows that is evaluated on; None: none
    keeps_sources: bool = False  # whether rows of text are kept as JSON as well

    def read(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sequence_length: int,
        labelled_for: PretrainedConfig | None,
        vocabulary: int | None = None,
    ) -> tuple[Rows, Rows | None]:
        """Read and tokenise the rows to train on, and those to evaluate on. See ``read_rows``.

        Rows to evaluate on may also have answers. These are generated with at most 50 tokens, and half the sequence length.
        """
        reading: Any = {"sequence_length": sequence_length, "labelled_for": labelled_for, "vocabulary": vocabulary}
        reading |= {"keeps_sources": self.keeps_sources}
        rows = read_rows(self.data, tokenizer, options=self.options, **reading)
        if self.eval_split is not None:
            return rows.split(self.eval_split)
        if self.evaluation is None:
            return rows, None
        new = min(MOST_ANSWER_TOKENS, sequence_length // 2)
        return rows, read_rows(self.evaluation, tokenizer, options=rows.options, new_tokens=new, **reading)


def read_rows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    options: RowOptions | None = None,
    labelled_for: PretrainedConfig | None = None,
    new_tokens: int | None = None,
    keeps_sources: bool = False,
    vocabulary: int | None = None,
) -> Rows:
    """Read and tokenise a data file. The first row says which format the rows have.

    Rows of text follow the conventions of TRL's SFTTrainer: ``text``, with loss on every token; or ``messages``, with loss
    on the assistant's answers or on every token; or ``prompt`` and ``completion``, two strings or two lists of messages,
    with loss on the completion. Other keys are ignored. The tokenizer's EOS is appended to strings that do not end with it;
    the chat template ends conversations.

    Args:
        path: The file.
        tokenizer: The model's tokenizer.
        sequence_length: Most tokens of a row, with an answer that is generated.
        options: How the rows are read.
        labelled_for: Config of the model that classifies the rows; None: a causal language model.
        new_tokens: Most tokens of the answers that are generated to rows with answers; None: such rows are texts.
        keeps_sources: Whether rows of text are kept as JSON as well.
        vocabulary: Rows of the model's embedding; None: unknown.
    """
    require_whole("sequence_length", sequence_length, 2)
    options = RowOptions() if options is None else options
    if labelled_for is None:
        options = with_labels(options, path)
    reader = _RowReader(tokenizer, options, sequence_length, labelled_for, new_tokens, keeps_sources)
    columns: tuple[str, ...] = ()
    rows = []
    for line, source in parsed_rows(path):
        try:
            row = reader.tokenized(source, line)
            if row is not None:
                _require_known(row.parts, tokenizer, vocabulary)
                rows.append(row)
        except DataError as error:  # the error lacks path and line
            raise at_row(error, path, line) from error.__cause__
        columns = columns or tuple(source)
    if not rows:
        raise DataError(
            path,
            found=f"{counted(reader.dropped, 'row')}, all of more than {counted(sequence_length, 'token')}",
            expected="a row that is short enough, with --too-long drop",
            remedy="raise `sequence_length`, or pass --too-long cut",
        )
    return Rows(
        rows=tuple(rows),
        format=reader.format,
        truncated=reader.truncated,
        dropped=reader.dropped,
        new_tokens=reader.new_tokens,
        columns=columns,
        options=options,
    )


def with_labels(options: RowOptions, path: Path) -> RowOptions:
    """The options with the labels that a file has, if its rows are prompts with labels and the options name no labels."""
    if options.labels:
        return options
    labels = options.labels_in(row for _, row in parsed_rows(path))
    if len(labels) == 1:
        raise DataError(
            path,
            found=f"the label {labels[0]!r} in every row",
            expected="at least two labels, which are compared",
            remedy="name all labels with --labels, or name the column as --completion-column",
        )
    return replace(options, labels=labels)


class _RowReader:
    """Tokenises the rows of one file."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: RowOptions,
        length: int,
        config: PretrainedConfig | None,
        new_tokens: int | None,
        keeps_sources: bool,  # noqa: FBT001 - called in one place
    ) -> None:
        self._tokenizer, self._options, self._length = tokenizer, options, length
        self._config, self._most_new, self._keeps_sources = config, new_tokens, keeps_sources
        self.format = RowFormat.TEXT if config is None else RowFormat.LABELS
        self.truncated = self.dropped = self.new_tokens = 0
        self._is_first = True

    def tokenized(self, source: dict[str, Any], line: int) -> TokenizedRow | LabelledRow | Choice | Question | None:
        """A row of the file as tokens; None: it is left out, since it is too long."""
        row = self._options.converted(source, takes_labels=self._config is not None)
        if self._is_first:
            self._recognise(row)
        match self.format:
            case RowFormat.LABELS:
                return self._labelled(row)
            case RowFormat.CANDIDATES:
                return self._choice(row)
            case RowFormat.PREFERENCES:
                return self._preference(row)
            case RowFormat.ANSWERS:
                return self._question(row)
        return self._text(row, source, line)

    def _recognise(self, row: Mapping[str, Any]) -> None:
        """Recognise the format of the file by its first row."""
        self._is_first = False
        known = RowFormat.of(row)
        if self._config is not None or (known is RowFormat.ANSWERS and self._most_new is None):
            return
        self.format = known
        if known is RowFormat.ANSWERS:
            assert self._most_new is not None
            self.new_tokens = self._most_new
            if self.new_tokens >= self._length:
                raise OptionError(
                    "max_new_tokens",
                    found=f"{self.new_tokens}, where prompt and answer together may have {self._length} tokens",
                    expected=f"at most {self._length - 1}",
                    remedy="pass a smaller value, or raise `sequence_length` if the model supports longer rows",
                )

    def _takes(self, tokens: int) -> bool:
        """Whether a row of this length is kept, perhaps shortened."""
        choice, most = self._options.too_long, self._length - self.new_tokens
        if tokens <= most:
            return True
        if choice == "drop":
            self.dropped += 1
            return False
        is_cut = self.format in (RowFormat.TEXT, RowFormat.LABELS)
        if is_cut and choice != "refuse":
            self.truncated += 1
            return True
        whole = "" if is_cut else ", with candidates, preferences or answers, which cannot be cut"
        raise DataError(
            "row",
            found=f"a row of {counted(tokens, 'token')}{whole}",
            expected=f"at most {most}"
            + ("" if choice == "auto" else f" with --too-long {choice}")
            + (", so that `max_new_tokens` fit, too" if self.new_tokens else ""),
            remedy=TOO_LONG
            + (", or lower `max_new_tokens`" if self.new_tokens else "")
            + f"; or pass --too-long {'cut or drop' if is_cut else 'drop'}",
        )

    def _text(self, row: dict[str, Any], source: Mapping[str, Any], line: int) -> TokenizedRow | None:
        kept = json.dumps({**source, **row}) if self._keeps_sources else ""
        if self._keeps_sources and isinstance(row.get("prompt"), str) and "completion" not in row:
            row["completion"] = self._tokenizer.eos_token or " "
        ids, prompt, later = self._sequence(row)
        if not self._takes(len(ids)):
            return None
        _require_prediction(len(ids), prompt, self._length)
        later = tuple((start, min(end, self._length)) for start, end in later if start < self._length)
        return TokenizedRow(array("i", ids[: self._length]), prompt, line, later, kept)

    def _labelled(self, row: Mapping[str, Any]) -> LabelledRow | None:
        assert self._config is not None
        texts = [row[key] for key in ("text", "text_pair") if key in row]
        is_valid = "text" in row and all(isinstance(text, str) and text for text in texts)
        _require(is_valid, _keys(row), "a text 'text', perhaps 'text_pair'", "add or correct them")
        label = _label(row.get("label"), self._config)
        whole = self._tokenizer(*texts, verbose=False)["input_ids"]
        _require(bool(whole), "a text of no tokens", "at least 1 token", "lengthen the text, or remove the row")
        if not self._takes(len(whole)):
            return None
        kept = self._tokenizer(*texts, verbose=False, truncation=True, max_length=self._length)
        return LabelledRow(array("i", kept["input_ids"]), array("i", kept.get("token_type_ids", [])), label)

    def _choice(self, row: Mapping[str, Any]) -> Choice | None:
        prompt, answer, candidates = row.get("prompt"), row.get("answer"), row.get("candidates")
        is_valid = isinstance(prompt, str) and _are_texts(candidates, 2) and all(candidates or ())
        expected = "a text 'prompt' and two or more texts 'candidates'"
        _require(is_valid, _keys(row), expected, "add the missing keys")
        assert isinstance(prompt, str)
        assert isinstance(candidates, list)
        right: Any = answer.value if isinstance(answer, Cell) else answer
        right = [candidates.index(answer)] if answer in candidates else right
        right = right if isinstance(right, list) else [right]
        is_valid = bool(right) and all(type(index) is int and 0 <= index < len(candidates) for index in right)
        found, expected = f"{json.dumps(answer)[:40]} as 'answer'", "one of the candidates, or its index from 0"
        _require(is_valid, found, expected, "write the right candidate")
        return self._taken(tokenized_choice(prompt, candidates, right, self._tokenizer))

    def _preference(self, row: Mapping[str, Any]) -> Choice | None:
        keys = ("prompt", "chosen", "rejected")
        kinds = {type(row.get(key)) for key in keys}
        found = _keys(row) if type(None) in kinds else json.dumps(row)[:60]
        expected = "'prompt', 'chosen' and 'rejected', all texts or all lists of messages"
        _require(kinds in ({str}, {list}), found, expected, "correct the row")
        both = [self._sequence({"prompt": row["prompt"], "completion": row[key]})[:2] for key in keys[1:]]
        return self._taken(_choice_of(both, [0]))

    def _taken(self, choice: Choice) -> Choice | None:
        lengths = ", ".join(str(len(candidate)) for candidate in choice.candidates)
        found = f"a common prompt of {len(choice.prompt)} tokens, completions of {lengths} tokens"
        _require(all(choice.parts), found, "at least 1 token of each", "lengthen the texts, or remove the row")
        return choice if self._takes(max(tokens for tokens, _ in choice.sequences)) else None

    def _question(self, row: Mapping[str, Any]) -> Question | None:
        prompt, answers = row.get("prompt"), row.get("answers")
        is_valid = isinstance(prompt, str) and _are_texts(answers, 1)
        _require(is_valid, _keys(row), "a text 'prompt' and a list of texts 'answers'", "add the missing keys")
        assert isinstance(answers, list)
        ids = tuple(self._tokenizer(prompt, verbose=False)["input_ids"])
        _require(bool(ids), "a prompt of 0 tokens", "at least 1", "write a prompt, or remove the row")
        return Question(ids, tuple(answers)) if self._takes(len(ids)) else None

    def _sequence(self, row: dict[str, Any]) -> tuple[list[int], int, tuple[tuple[int, int], ...]]:
        """Token ids, the number of those before the first that is learned, and later ranges that are not learned."""
        match [key for key in ("text", "prompt", "completion", "messages") if key in row]:
            case ["text"]:
                return _text_ids(_string(row, "text"), self._tokenizer), 0, ()
            case ["messages"] if self._options.train_on == "answers":
                return self._answers(_messages(row, "messages"))
            case ["messages"]:
                return self._chat_ids(_messages(row, "messages")), 0, ()
            case ["prompt", "completion"] if isinstance(row["prompt"], list):
                messages = _messages(row, "prompt")
                prompt = self._chat_ids(messages, reply_follows=True)
                whole = self._chat_ids(messages + _messages(row, "completion"))
            case ["prompt", "completion"]:
                text = _string(row, "prompt", may_be_empty=True)
                prompt = _text_ids(text, self._tokenizer, append_eos=False)
                whole = _text_ids(text + _string(row, "completion"), self._tokenizer)
            case present:
                found = f"the keys {', '.join(map(repr, present or row)) or '(none)'}"
                expected = "'text', or 'prompt' and 'completion', or 'messages'"
                remedy = "keep the keys of one of these formats"
                if not present and row:
                    remedy += ", or name columns, such as --text-column or --prompt-template"
                raise DataError("row", found=found, expected=expected, remedy=remedy)
        return whole, _prompt_length(prompt, whole), ()

    def _answers(self, messages: list[dict[str, Any]]) -> tuple[list[int], int, tuple[tuple[int, int], ...]]:
        """A conversation of which the assistant's answers are learned: what ``_sequence`` returns."""
        whole = self._chat_ids(messages)
        answers: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = _prompt_length(self._chat_ids(messages[:index], reply_follows=True) if index else [], whole)
            is_last = index == len(messages) - 1
            end = len(whole) if is_last else _prompt_length(self._chat_ids(messages[: index + 1]), whole)
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
        bounds = [*answers, (len(whole), len(whole))]
        later = tuple((end, start) for (_, end), (start, _) in itertools.pairwise(bounds) if end < start)
        return whole, answers[0][0], later

    def _chat_ids(self, messages: list[Any], *, reply_follows: bool = False) -> list[int]:
        found, expected = "messages, with a tokenizer that has no chat template", "a tokenizer with a chat template"
        remedy = "use a chat model's tokenizer, or write rows of strings"
        _require(bool(self._tokenizer.chat_template), found, expected, remedy)
        at = self._options.rendered_at
        text = render_chat(messages, self._tokenizer, reply_follows=reply_follows, rendered_at=at)
        # The template writes the special tokens; the tokenizer would add them a second time.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def tokenized_choice(
    prompt: str, candidates: Sequence[str], answers: Iterable[int], tokenizer: PreTrainedTokenizerBase
) -> Choice:
    """Tokenise a question. Each candidate is appended to its prompt as it is, without an EOS.

    A token that spans the end of the prompt and the start of a candidate counts as candidate.
    """
    alone = _text_ids(prompt, tokenizer, append_eos=False)
    wholes = [_text_ids(prompt + candidate, tokenizer, append_eos=False) for candidate in candidates]
    return _choice_of([(whole, _prompt_length(alone, whole)) for whole in wholes], answers)


def _choice_of(sequences: Sequence[tuple[list[int], int]], answers: Iterable[int]) -> Choice:
    """Sequences, each with the length of its prompt, as completions of the prompt that they share."""
    shared = min(length for _, length in sequences)
    return Choice(tuple(sequences[0][0][:shared]), tuple(tuple(ids[shared:]) for ids, _ in sequences), tuple(answers))


def _require(condition: bool, found: str, expected: str, remedy: str) -> None:  # noqa: FBT001 - like an assert
    if not condition:
        raise DataError("row", found=found, expected=expected, remedy=remedy)


def _require_known(parts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, vocabulary: int | None) -> None:
    """Refuse a token that the model's embedding does not have."""
    if vocabulary is not None and (largest := max(map(max, parts))) >= vocabulary:
        raise DataError(
            "row",
            found=f"the token {tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}",
            expected=f"ids below {vocabulary}, the rows of the model's embedding",
            remedy="use the tokenizer that belongs to the model, or enlarge the embedding with resize_token_embeddings",
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


def _prompt_length(prompt: list[int], whole: list[int]) -> int:
    # The prompt ends where the two tokenisations differ. That is usually its own length, but a token that spans its end and
    # the completion's start ("is " + "blue") counts as completion, so that the whole completion is learned.
    differs = [alone != joined for alone, joined in zip(prompt, whole, strict=False)]
    return [*differs, True].index(True)


def _text_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, append_eos: bool = True) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [*ids, eos] if append_eos and eos is not None and ids[-1:] != [eos] else ids


def _keys(row: Mapping[str, Any]) -> str:
    return f"the keys {', '.join(map(repr, row))}"


def _are_texts(value: Any, least: int) -> bool:
    return isinstance(value, list) and len(value) >= least and all(isinstance(text, str) for text in value)


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


# Labels of models that classify or predict numbers


def classifies(config: PretrainedConfig) -> bool:
    """Whether a model's rows have one class each."""
    if config.problem_type is None:
        return int(config.num_labels or 1) > 1
    return bool(config.problem_type == "single_label_classification")


def rates_once(config: PretrainedConfig) -> bool:
    """Whether a model's rows, if they have no class, have one number each instead of a list."""
    return int(config.num_labels or 1) == 1 and config.problem_type != "multi_label_classification"


def padding_of(config: PretrainedConfig) -> int:
    """The config's padding token, by which a decoder that classifies finds the last token of a row."""
    pad, vocabulary = getattr(config, "pad_token_id", None), config.get_text_config().vocab_size
    if pad is None or not 0 <= pad < vocabulary:
        raise OptionError(
            "model",
            found=f"{pad} as the config's pad_token_id",
            expected=f"a token from 0 to {vocabulary - 1}, by which the model finds the end of a row",
            remedy="write the tokenizer's padding token into config.json",
        )
    return int(pad)


def _label(value: Any, config: PretrainedConfig) -> Label:
    """A row's label as the model's loss takes it."""
    count, found = int(config.num_labels or 1), f"{json.dumps(value)[:40]} as 'label'"
    held = value.value if isinstance(value, Cell) else value
    if classifies(config):
        names: dict[str, Any] = dict(config.label2id or {})
        index: Any = names.get(value, held) if isinstance(value, str) else value
        index = int(index) if isinstance(index, float) and index.is_integer() else index
        expected = f"a class from 0 to {count - 1}, or one of {', '.join(list(names)[:8])}"
        _require(type(index) is int and 0 <= index < count, found, expected, "correct the label")
        return int(index)
    numbers, is_one = held if isinstance(held, list) else [held], rates_once(config)
    are_numbers = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    is_valid = are_numbers and len(numbers) == count and isinstance(held, list) is not is_one
    _require(is_valid, found, "a number" if is_one else f"a list of {count} numbers", "correct the label")
    return float(held) if is_one else tuple(map(float, numbers))
