"""The rows of data files as tokens, four bytes each where there are many, and batches of them.

The order of training is one of endless shuffled epochs; sequences are padded, also those of prompts
with candidates.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zo2adapters.tasks.row_options import ColumnUse, RowFormat, RowOptions, columns_read
from zo2adapters.tasks.row_source import DataFile, at_row, row_error
from zo2adapters.tasks.row_values import Cell, Row, shown
from zo2adapters.tasks.tokenizer import render_chat
from zo2core.errors import BatchError, DataError, OptionError
from zo2core.ranges import counted, require_whole
from zo2core.sweep.microbatch import IGNORE_INDEX

# keys of a batch that the model's forward does not take
PROMPT = "prompt"
ANSWER = "is_answer"
REFERENCE = "reference"
T = TypeVar("T")
Prompts: TypeAlias = Sequence[Sequence[int]]  # token ids of each prompt
Candidates: TypeAlias = Sequence[Prompts]  # token ids of the candidates of each prompt
Label = int | float | tuple[float, ...]  # a class, a number, or a number for each class
# token ids, the number of those before the first that is learned, and later ranges that are not
_Sequence: TypeAlias = tuple[list[int], int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class _Text:
    """A row that is one sequence."""

    input_ids: array[int]  # (length,), int32

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The texts of the row, each as its tokens."""
        return [self.input_ids]


@dataclass(frozen=True, slots=True)
class TokenizedRow(_Text):
    """A row of text, or of a prompt and its completion."""

    prompt_length: int  # number of leading tokens without loss
    line: int  # line of the file, or number of the row, from 1
    # start and end of further tokens without loss, within the row
    later_prompts: tuple[tuple[int, int], ...] = ()
    source: str = ""  # the row of the file as JSON, for runs that need it

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The sequences of the row: tokens of each, and for how many of these the loss needs
        logits.
        """
        without_loss = max(self.prompt_length, 1) + sum(
            end - start for start, end in self.later_prompts
        )
        return [(len(self.input_ids), len(self.input_ids) - without_loss)]

    @property
    def content(self) -> bytes:
        """What a digest of rows covers."""
        later = repr(self.later_prompts).encode() if self.later_prompts else b""
        return (
            b"%d %d\n" % (len(self.input_ids), self.prompt_length)
            + self.input_ids.tobytes()
            + later
        )


@dataclass(frozen=True, slots=True)
class LabelledRow(_Text):
    """A text, or two, with a label."""

    token_type_ids: array[int]  # (length,), int32; empty if the tokenizer makes none
    label: Label

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Tokens of each sequence, and for how many of these the loss needs logits."""
        return [(len(self.input_ids), 1)]

    @property
    def content(self) -> bytes:
        """What a digest of rows covers."""
        return json.dumps(
            [self.input_ids.tolist(), self.token_type_ids.tolist(), self.label]
        ).encode()


@dataclass(frozen=True, slots=True)
class Choice:
    """A prompt with candidates. Of preferences, the first candidate is the chosen one."""

    prompt: tuple[int, ...]  # tokens before the candidates; at least one
    candidates: tuple[tuple[int, ...], ...]  # tokens of each candidate; at least two candidates
    answers: tuple[int, ...]  # indices of the right candidates, at least one

    @property
    def answer(self) -> int:
        """Index of the right candidate, the first if several are right."""
        return self.answers[0]

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The texts of the row, each as its tokens."""
        return [self.prompt, *self.candidates]

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Tokens of each sequence, and for how many of these the loss needs logits."""
        return [
            (len(self.prompt) + len(candidate), len(candidate)) for candidate in self.candidates
        ]

    @property
    def content(self) -> bytes:
        """What a digest of rows covers."""
        return json.dumps([self.prompt, self.candidates, self.answer, self.answers[1:]]).encode()


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its right answers."""

    prompt: tuple[int, ...]  # token ids, at least one
    answers: tuple[str, ...]  # right answers, at least one

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The texts of the row, each as its tokens."""
        return [self.prompt]

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Tokens of each sequence, and for how many of these the loss needs logits."""
        return [(len(self.prompt), 1)]


AnyRow = TokenizedRow | LabelledRow | Choice | Question


@dataclass(frozen=True)
class Rows(Sequence[Any]):
    """The rows of a data file, in file order."""

    rows: tuple[Any, ...]  # at least one of the four classes above, by the format
    format: RowFormat = RowFormat.TEXT
    truncated: int = 0  # number of rows that were shortened to the sequence length
    dropped: int = 0  # number of longer rows that were left out
    divided: int = 0  # number of longer texts that became several rows
    # number of conversations that became a row for each answer
    by_turn: int = 0
    new_tokens: int = 0  # most tokens of an answer that is generated to each row
    columns: tuple[str, ...] = ()  # of the file's first row
    # how the file was read, with the labels that it has
    options: RowOptions = field(default_factory=RowOptions)
    use: ColumnUse = field(default_factory=ColumnUse, compare=False)  # of the file's columns
    sha256: str = ""  # of the file's content; empty if it was not computed. See ``DataFile``

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, with an answer that is generated."""
        longest: int = max(tokens for row in self.rows for tokens, _ in row.sequences)
        return longest + self.new_tokens

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows. A prompt counts once."""
        return sum(len(part) for row in self.rows for part in row.parts)

    @cached_property
    def most_sequences(self) -> int:
        """Most sequences of a row."""
        return max(len(row.sequences) for row in self.rows)

    @property
    def are_labelled(self) -> bool:
        """Whether the rows are prompts with labels, which became their candidates."""
        return self.format is RowFormat.CANDIDATES and "candidates" not in self.columns

    def digest(self) -> str:
        """SHA-256 over the tokens of all rows, the lengths of their prompts, their labels and
        answers.
        """
        if self.format is RowFormat.ANSWERS:
            return hashlib.sha256(
                json.dumps([[row.prompt, row.answers] for row in self.rows]).encode()
            ).hexdigest()
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(row.content)
        return digest.hexdigest()

    def split(self, share: float) -> tuple[Rows, Rows]:
        """Split the rows into those to train on and those to evaluate on, each in file order."""
        units = list(range(len(self)))
        if self.by_turn:  # the answers of a conversation stay together
            first_lines = {row.line: number for number, row in reversed([*enumerate(self)])}
            units = [first_lines[row.line] for row in self]
        different = list(dict.fromkeys(units))
        count = len(different)
        if count < 2:
            raise OptionError("eval_split", "1 row", "at least 2", "leave it out, or add rows")
        order = shuffled(count, "evaluation 0")
        held_out = {
            different[index] for index in order[: min(max(round(count * share), 1), count - 1)]
        }
        parts = [
            tuple(row for row, unit in zip(self, units, strict=True) if (unit in held_out) is kind)
            for kind in (False, True)
        ]
        return replace(self, rows=parts[0]), replace(self, rows=parts[1])


def shuffled(count: int, seed: int | str) -> list[int]:
    """All indices below a count, in an order that depends on the seed alone."""
    generator = Random(seed)  # noqa: S311 - the order of rows is not a secret
    # Sorted by draws, because Python promises the sequence of random() across its versions, not
    # that of shuffle(), and a resumed run may use another version.
    return sorted(range(count), key=lambda _: generator.random())


def training_batches(
    rows: Sequence[T], *, batch_size: int, seed: int, first_step: int = 0
) -> Iterator[list[T]]:
    """Iterate over epochs without end; the order of rows in an epoch depends on the seed and the
    epoch only.
    """
    require_whole("batch_size", batch_size, 1)
    require_whole("first_step", first_step, 0)
    epoch, skipped = divmod(first_step * batch_size, len(rows))
    # The seed is hashed because Random takes the absolute value of an integer.
    seeds = (
        int(hashlib.sha256(f"{seed} {number}".encode()).hexdigest(), 16) for number in count(epoch)
    )
    indices = islice(
        chain.from_iterable(shuffled(len(rows), seed) for seed in seeds), skipped, None
    )
    return ([rows[index] for index in islice(indices, batch_size)] for _ in count())


def file_batches(rows: Sequence[T], batch_size: int) -> list[Sequence[T]]:
    """All rows once, in file order; the last batch may be smaller."""
    require_whole("batch_size", batch_size, 1)
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def collate(
    rows: Sequence[TokenizedRow | LabelledRow], *, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Pad rows on the right into one batch."""
    input_ids = _padded([row.input_ids for row in rows], pad_token_id)
    position = torch.arange(input_ids.shape[1])
    tokens = position < torch.tensor([[len(row.input_ids)] for row in rows])
    batch = {"input_ids": input_ids, "attention_mask": tokens.to(torch.int64)}
    labelled = [row for row in rows if isinstance(row, LabelledRow)]
    if labelled:
        batch["labels"] = torch.tensor([row.label for row in labelled])
        if labelled[0].token_type_ids:
            batch["token_type_ids"] = _padded([row.token_type_ids for row in labelled], 0)
        return batch
    prompt = torch.zeros_like(tokens)
    for index, row in enumerate(rows):
        assert isinstance(row, TokenizedRow)
        for start, end in ((0, row.prompt_length), *row.later_prompts):
            prompt[index, start:end] = True
    return {**batch, "labels": input_ids.masked_fill(prompt | ~tokens, IGNORE_INDEX)}


def _padded(rows: Sequence[array[int]], padding: int) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding)


def with_completion(
    prompt: Sequence[int], completion: Sequence[int], line: int = 0
) -> TokenizedRow:
    """A row that learns a completion."""
    return TokenizedRow(array("i", [*prompt, *completion]), len(prompt), line)


def choice_batch(
    prompts: Prompts,
    candidates: Candidates,
    answers: Sequence[int | Sequence[int]],
    *,
    pad_token_id: int = 0,
) -> dict[str, torch.Tensor]:
    """Make a batch for objectives of candidates; each pair of prompt and candidate is a row.

    Args:
        prompts: Token ids of each prompt, at least one.
        candidates: Two or more candidates of each prompt, as token ids, at least one.
        answers: Index of the right candidate of each prompt, or the indices of several.
        pad_token_id: Token id at padded positions.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``, each (rows, tokens), int64, with labels
        for the candidates' tokens alone; ``prompt``, the index of a row's prompt, and
        ``is_answer``, 1 where its candidate is right, each (rows,), int64.

    Raises:
        BatchError: if there is no prompt, or a prompt or candidate is empty, or a prompt has fewer
            than two candidates or none that is right.
    """
    rows: list[TokenizedRow] = []
    prompt_of: list[int] = []
    is_answer: list[int] = []
    if not prompts:
        raise BatchError("prompts", "none", "at least one prompt", "pass prompts")
    for number, (prompt, options, answer) in enumerate(
        zip(prompts, candidates, answers, strict=True)
    ):
        right = [answer] if isinstance(answer, int) else list(answer)
        if (
            not prompt
            or len(options) < 2
            or not all(options)
            or not right
            or not set(right) <= set(range(len(options)))
        ):
            sizes = [len(candidate) for candidate in options]
            found = f"{len(prompt)} tokens, candidates of {sizes} tokens, answer {answer}"
            expected = (
                "a prompt and at least two candidates, all with tokens, and the index of a right "
                "candidate"
            )
            raise BatchError(f"prompts[{number}]", found, expected, "add what is missing")
        rows += [with_completion(prompt, candidate) for candidate in options]
        prompt_of += [number] * len(options)
        is_answer += [int(index in right) for index in range(len(options))]
    batch = collate(rows, pad_token_id=pad_token_id)
    return {**batch, PROMPT: torch.tensor(prompt_of), ANSWER: torch.tensor(is_answer)}


def preference_batch(
    prompts: Prompts,
    candidates: Candidates,
    references: Sequence[Sequence[float]],
    *,
    pad_token_id: int = 0,
) -> dict[str, torch.Tensor]:
    """Make a batch for ``PreferenceLoss``.

    Args:
        prompts: Token ids of each prompt, at least one.
        candidates: The chosen and the rejected completion of each prompt, as token ids, at least
            one.
        references: Log-likelihoods of these two under the reference model, from ``score``, for each
            prompt.
        pad_token_id: Token id at padded positions.

    Returns:
        The batch of ``choice_batch``, and ``reference``, (rows,), float64.

    Raises:
        BatchError: if there is no prompt, or a prompt or completion is empty, or a prompt does not
            have two completions and two references.
    """
    for number, (completions, likelihoods) in enumerate(zip(candidates, references, strict=True)):
        if len(completions) != 2 or len(likelihoods) != 2:
            found = f"{len(completions)} candidates, {len(likelihoods)} references"
            expected = "a chosen and a rejected candidate, and the log-likelihood of each"
            raise BatchError(f"prompts[{number}]", found, expected, "add what is missing")
    batch = choice_batch(prompts, candidates, [0] * len(prompts), pad_token_id=pad_token_id)
    return {**batch, REFERENCE: torch.tensor(references, dtype=torch.float64).view(-1)}


# remedy
TOO_LONG = "shorten this row or remove it, or raise `sequence_length`, up to what the model takes"
MOST_ANSWER_TOKENS = 50  # most tokens of an answer that is generated in an evaluation of a run


@dataclass(frozen=True)
class RowReader:
    """Reads data files as rows of tokens. The first row of a file says which format its rows have.

    Rows of text follow the conventions of TRL's SFTTrainer: ``text``, with loss on every token; or
    ``messages``, with loss on the assistant's answers or on every token; or ``prompt`` and
    ``completion``, two strings or two lists of messages, with loss on the completion. Other keys
    are ignored. The tokenizer's EOS is appended to strings that do not end with it; the chat
    template ends conversations.
    """

    tokenizer: PreTrainedTokenizerBase
    sequence_length: int  # most tokens of a row, with an answer that is generated
    options: RowOptions = field(default_factory=RowOptions)
    # of the model that classifies the rows; None: a causal language model
    labelled_for: PretrainedConfig | None = None
    # most tokens of answers that are generated; None: rows with answers are texts
    new_tokens: int | None = None
    keeps_sources: bool = False  # whether rows of text are kept as JSON as well, for rewards
    # columns of these rows that the rewards read beside the prompt; None: any
    rewards_read: Collection[str] | None = None
    vocabulary: int | None = None  # rows of the model's embedding; None: unknown
    digests: bool = False  # whether the digests of files are computed, for the record of a run

    def read_files(
        self, data: Path, evaluation: Path | None, eval_split: float | None
    ) -> tuple[Rows, Rows | None]:
        """Read the rows to train on, and those to evaluate on: of a file, or a share of the
        training rows.

        Rows to evaluate on may also have answers. These are generated with at most 50 tokens, and
        half the sequence length.
        """
        rows = self.read(data)
        if eval_split is not None:
            return rows.split(eval_split)
        if evaluation is None:
            return rows, None
        new = min(MOST_ANSWER_TOKENS, self.sequence_length // 2)
        return rows, replace(self, options=rows.options, new_tokens=new).read(evaluation)

    def read(self, path: Path) -> Rows:
        """Read and tokenise a data file."""
        require_whole("sequence_length", self.sequence_length, 2)
        with DataFile(path) as file:
            takes_labels = self.labelled_for is not None
            options = self.options if takes_labels else _with_labels(self.options, file)
            rows: list[AnyRow] = []
            lengths: list[int] = []
            divided = 0
            by_turn = 0
            splits = options.too_long == "split" or (
                options.too_long == "auto" and file.has_whole_texts
            )
            use = ColumnUse()
            kind = RowFormat.LABELS
            columns = tuple[str, ...]()
            for line, source in file.rows():
                with at_row(path, line):
                    row = options.converted(source, takes_labels=takes_labels)
                    if not columns:
                        kind = self._format_of(row)
                        columns = tuple(source)
                    use.add(source, self._columns_read(options, row, source))
                    made = self._tokenized(kind, row, source, line)
                    by_turn += len(made) > 1
                    if splits and made[0][1] > self._most(kind) and "text" in row:
                        made = self._pieces(row, line)
                        divided += 1
                    for tokenized, length in made:
                        lengths.append(length)
                        if self._is_kept(kind, length):
                            self._require_learnable(tokenized, length)
                            rows.append(tokenized)
            digest = file.sha256() if self.digests else ""
        self._require_unjudged(path, options, use)
        long = sum(length > self._most(kind) for length in lengths)
        dropped = len(lengths) - len(rows)
        if not rows:
            found = (
                f"{counted(dropped, 'row')}, all of more than "
                f"{counted(self.sequence_length, 'token')}"
            )
            remedy = "raise `sequence_length`, or pass --too-long cut"
            raise DataError(path, found, "a row that is short enough, with --too-long drop", remedy)
        new_tokens = self.sequence_length - self._most(kind)
        return Rows(
            rows=tuple(rows),
            format=kind,
            truncated=long - dropped,
            dropped=dropped,
            divided=divided,
            by_turn=by_turn,
            new_tokens=new_tokens,
            columns=columns,
            options=options,
            use=use,
            sha256=digest,
        )

    def _columns_read(self, options: RowOptions, row: Row, source: Row) -> Collection[str]:
        """The columns of a row of the file that the row is made from, or that rewards read."""
        if not self.keeps_sources:
            takes_labels = self.labelled_for is not None
            return columns_read(options, row, takes_labels=takes_labels)
        if self.rewards_read is None:
            return source.keys()
        return {*columns_read(options, ["prompt"]), *self.rewards_read}

    def _require_unjudged(self, path: Path, options: RowOptions, use: ColumnUse) -> None:
        """Refuse rows for KTO: completions to learn, and others to avoid."""
        is_chosen = options.names_columns or self.keeps_sources
        judged = None if is_chosen else use.judgement("label")
        if judged is not None and "label" in use.unread and "completion" in use.read:
            found = f"the column 'label', {judged}, beside completions, as in rows for KTO"
            remedy = (
                "keep the rows whose label is true, or pass --completion-column completion to "
                "learn all of them"
            )
            raise DataError(path, found, "rows whose completions are all learned", remedy)

    def _format_of(self, row: Mapping[str, Any]) -> RowFormat:
        """The format of a file, by its first row."""
        if self.labelled_for is not None:
            return RowFormat.LABELS
        kind = RowFormat.of(row)
        if kind is not RowFormat.ANSWERS:
            return kind
        if self.new_tokens is None:
            return RowFormat.TEXT
        together = (
            f": prompt and answer together have at most `sequence_length`, {self.sequence_length}"
        )
        require_whole(
            "max_new_tokens", self.new_tokens, 1, self.sequence_length - 1, otherwise=together
        )
        return kind

    def _most(self, kind: RowFormat) -> int:
        """Most tokens of a row, without an answer that is generated."""
        return self.sequence_length - (self.new_tokens or 0 if kind is RowFormat.ANSWERS else 0)

    def _is_kept(self, kind: RowFormat, tokens: int) -> bool:
        """Whether a row of this length is kept, perhaps shortened."""
        choice = self.options.too_long
        is_cut = kind in (RowFormat.TEXT, RowFormat.LABELS)
        if tokens <= self._most(kind) or choice == "drop":
            return tokens <= self._most(kind)
        if is_cut and choice not in ("refuse", "split"):
            return True
        generates = kind is RowFormat.ANSWERS
        uncut = "" if is_cut else ", with candidates, preferences or answers, which cannot be cut"
        asked = "" if choice == "auto" else f" with --too-long {choice}"
        expected = (
            "at most "
            f"{self._most(kind)}{asked}{', so that `max_new_tokens` fit, too' if generates else ''}"
        )
        remedy = (
            f"{TOO_LONG}{', or lower `max_new_tokens`' if generates else ''}; or pass --too-long "
        )
        raise row_error(
            f"a row of {counted(tokens, 'token')}{uncut}",
            expected,
            remedy + ("cut or drop" if is_cut else "drop"),
        )

    def _require_learnable(self, row: AnyRow, tokens: int) -> None:
        """Refuse a text without a token to predict, and a token that the model's embedding does not
        have.
        """
        if isinstance(row, TokenizedRow):
            _require_prediction(tokens, row.prompt_length, self.sequence_length)
        if self.vocabulary is not None and (largest := max(map(max, row.parts))) >= self.vocabulary:
            found = (
                f"the token {self.tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}"
            )
            expected = f"ids below {self.vocabulary}, the rows of the model's embedding"
            remedy = (
                "use the tokenizer that belongs to the model, or enlarge the embedding with "
                "resize_token_embeddings"
            )
            raise row_error(found, expected, remedy)

    def _tokenized(
        self, kind: RowFormat, row: Row, source: Mapping[str, Any], line: int
    ) -> Sequence[tuple[AnyRow, int]]:
        """A row as tokens, shortened where that is possible, and its length; several, of a
        conversation that is learned turn by turn.
        """
        if kind is RowFormat.TEXT:
            return self._texts(row, source, line)
        if kind is RowFormat.LABELS:
            return [self._labelled(row)]
        if kind is RowFormat.ANSWERS:
            return [self._question(row)]
        return [self._choice(row) if kind is RowFormat.CANDIDATES else self._preference(row)]

    def _texts(
        self, row: Row, source: Mapping[str, Any], line: int
    ) -> list[tuple[TokenizedRow, int]]:
        source_text = json.dumps({**source, **row}) if self.keeps_sources else ""
        most = self.sequence_length
        if self.keeps_sources and isinstance(row.get("prompt"), str) and "completion" not in row:
            row["completion"] = self.tokenizer.eos_token or " "
        made: list[tuple[TokenizedRow, int]] = []
        for ids, prompt, ranges in self._sequences(row):
            later = tuple((start, min(end, most)) for start, end in ranges if start < most)
            tokenized = TokenizedRow(array("i", ids[:most]), prompt, line, later, source_text)
            made.append((tokenized, len(ids)))
        return made

    def _pieces(self, row: Row, line: int) -> list[tuple[TokenizedRow, int]]:
        """A text as rows of at most the sequence length, all of whose tokens are learned; a last
        token by itself, which nothing predicts, is left out.
        """
        ids = _text_ids(_string(row, "text"), self.tokenizer)
        starts = range(0, len(ids), self.sequence_length)
        pieces = (ids[start : start + self.sequence_length] for start in starts)
        return [
            (TokenizedRow(array("i", piece), 0, line), len(piece))
            for piece in pieces
            if len(piece) > 1
        ]

    def _labelled(self, row: Row) -> tuple[LabelledRow, int]:
        assert self.labelled_for is not None
        expected = "a text 'text', perhaps 'text_pair', and a label"
        _require({"text", "label"} <= row.keys(), row.contents, expected, "add or correct them")
        texts = [_string(row, key) for key in ("text", "text_pair") if key in row]
        label = _label(row, self.labelled_for)
        whole = self.tokenizer(*texts, verbose=False)["input_ids"]
        _require(
            bool(whole),
            "a text of no tokens",
            "at least 1 token",
            "lengthen the text, or remove the row",
        )
        encoded = self.tokenizer(
            *texts, verbose=False, truncation=True, max_length=self.sequence_length
        )
        types = array("i", encoded.get("token_type_ids", []))
        return LabelledRow(array("i", encoded["input_ids"]), types, label), len(whole)

    def _choice(self, row: Row) -> tuple[Choice, int]:
        expected = "a text 'prompt', and two or more texts 'candidates' or a label"
        is_whole = {"prompt", "candidates"} <= row.keys()
        _require(is_whole, row.contents, expected, "add the missing keys")
        prompt = _string(row, "prompt", may_be_empty=True)
        candidates = _texts(row, "candidates", least=2)
        answer = row.get("answer")
        right: Any = answer.value if isinstance(answer, Cell) else answer
        right = [candidates.index(answer)] if answer in candidates else right
        right = right if isinstance(right, list) else [right]
        is_valid = bool(right) and all(
            type(index) is int and 0 <= index < len(candidates) for index in right
        )
        found = row.at("answer") if "answer" in row else row.contents
        expected = "as 'answer' one of the candidates, or its index from 0"
        _require(is_valid, found, expected, "write the right candidate")
        return _with_tokens(tokenized_choice(prompt, candidates, right, self.tokenizer))

    def _preference(self, row: Row) -> tuple[Choice, int]:
        keys = ("prompt", "chosen", "rejected")
        expected = "'prompt', 'chosen' and 'rejected', all texts or all lists of messages"
        _require({*keys} <= row.keys(), row.contents, expected, "add the missing keys")
        kinds = {type(row[key]) for key in keys}
        found = ", ".join(map(row.at, keys))
        _require(kinds in ({str}, {list}), found, expected, "correct the row")
        both = [
            self._sequence(
                Row(
                    {"prompt": row["prompt"], "completion": row[key]},
                    origins={"prompt": row.named("prompt"), "completion": row.named(key)},
                )
            )[:2]
            for key in keys[1:]
        ]
        return _with_tokens(_choice_of(both, [0]))

    def _question(self, row: Row) -> tuple[Question, int]:
        expected = "a text 'prompt' and a list of texts 'answers'"
        is_whole = {"prompt", "answers"} <= row.keys()
        _require(is_whole, row.contents, expected, "add the missing keys")
        prompt = _string(row, "prompt", may_be_empty=True)
        answers = _texts(row, "answers", least=1, may_be_empty=True)
        ids = tuple(self.tokenizer(prompt, verbose=False)["input_ids"])
        found = f"{row.at('prompt')}, which has no tokens"
        _require(bool(ids), found, "at least 1 token", "write a prompt, or remove the row")
        return Question(ids, tuple(answers)), len(ids)

    def _sequences(self, row: Row) -> list[_Sequence]:
        """What ``_sequence`` returns; of messages whose answers are learned and that the chat
        template renders otherwise once more follow, one for each answer.
        """
        if "messages" not in row or self.options.train_on != "answers" or "text" in row:
            return [self._sequence(row)]
        messages = _messages(row, "messages")
        whole = self._answers(messages)
        return self._turns(messages) if whole is None else [whole]

    def _turns(self, messages: list[dict[str, Any]]) -> list[_Sequence]:
        """A sequence for each answer of a conversation, which ends with it and learns it alone: as
        the model sees the messages before when it answers.
        """
        turns: list[_Sequence] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            text = self._rendered(messages[: index + 1])
            whole = self._chat_tokens(text)
            start = self._answer_start(messages[:index], text, whole)
            if start is None or start >= len(whole):
                found = "a chat template that renders an answer otherwise than it asks for one"
                raise row_error(
                    found,
                    "the prompt for an answer at the start of the answer",
                    "pass --train-on all, or write rows with 'prompt' and 'completion'",
                )
            turns.append((whole, start, ()))
        return turns

    def _sequence(self, row: Row) -> _Sequence:
        """Token ids, the number of those before the first that is learned, and later ranges that
        are not learned.
        """
        match [key for key in ("text", "prompt", "completion", "messages") if key in row]:
            case ["text"]:
                return _text_ids(_string(row, "text"), self.tokenizer), 0, ()
            case ["messages"]:
                return self._chat_ids(_messages(row, "messages")), 0, ()
            case ["prompt", "completion"] if isinstance(row["prompt"], list):
                messages = _messages(row, "prompt")
                prompt = self._chat_ids(messages, reply_follows=True)
                whole = self._chat_ids(messages + _messages(row, "completion"))
            case ["prompt", "completion"]:
                text = _string(row, "prompt", may_be_empty=True)
                prompt = _text_ids(text, self.tokenizer, append_eos=False)
                whole = _text_ids(text + _string(row, "completion"), self.tokenizer)
            case present:
                remedy = "keep the keys of one of these formats"
                if not present and row:
                    remedy += ", or name columns, such as --text-column NAME or --prompt-template"
                contents = {key: row[key] for key in present or row}
                raise row_error(
                    Row(contents, empty=row.empty).contents,
                    "'text', or 'prompt' and 'completion', or 'messages'",
                    remedy,
                )
        return whole, _prompt_length(prompt, whole), ()

    def _answers(self, messages: list[dict[str, Any]]) -> _Sequence | None:
        """A conversation of which the assistant's answers are learned: what ``_sequence`` returns.

        None: the chat template renders an answer otherwise once more messages follow.
        """
        text = self._rendered(messages)
        whole = self._chat_tokens(text)
        answers: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = self._answer_start(messages[:index], text, whole)
            end = len(whole)
            if index < len(messages) - 1:
                end = _prompt_length(self._chat_ids(messages[: index + 1]), whole)
            if start is None or start >= end:
                return None
            answers.append((start, end))
        expected = "at least one message of the assistant, whose tokens are learned"
        found = "messages without an answer, that is without the role 'assistant'"
        _require(bool(answers), found, expected, "add the answer, or pass --train-on all")
        bounds = [*answers, (len(whole), len(whole))]
        later = tuple(
            (end, start) for (_, end), (start, _) in itertools.pairwise(bounds) if end < start
        )
        return whole, answers[0][0], later

    def _answer_start(
        self, messages: list[dict[str, Any]], text: str, whole: list[int]
    ) -> int | None:
        """The number of tokens before an answer to these messages, in a longer conversation.

        None: the conversation's text does not repeat that of the last message.
        """
        if not messages:
            return 0
        asked = self._rendered(messages, reply_follows=True)
        content = messages[-1].get("content")
        if isinstance(content, str) and content and content in asked:
            question = asked[: asked.rindex(content) + len(content)]
            if not text.startswith(question):
                return None
        return _prompt_length(self._chat_tokens(asked), whole)

    def _chat_ids(self, messages: list[Any], *, reply_follows: bool = False) -> list[int]:
        return self._chat_tokens(self._rendered(messages, reply_follows=reply_follows))

    def _chat_tokens(self, text: str) -> list[int]:
        """The tokens of a rendered chat.

        The template writes the special tokens; the tokenizer would add them a second time.
        """
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _rendered(self, messages: list[Any], *, reply_follows: bool = False) -> str:
        found, expected = (
            "messages, with a tokenizer that has no chat template",
            "a tokenizer with a chat template",
        )
        remedy = "use a chat model's tokenizer, or write rows of strings"
        _require(bool(self.tokenizer.chat_template), found, expected, remedy)
        rendered_at = self.options.rendered_at
        return render_chat(
            messages, self.tokenizer, reply_follows=reply_follows, rendered_at=rendered_at
        )


def with_labels(options: RowOptions, path: Path) -> RowOptions:
    """The options with the labels that a file has, if its rows are prompts with labels and the
    options name no labels.
    """
    with DataFile(path) as file:
        return _with_labels(options, file)


def _with_labels(options: RowOptions, file: DataFile) -> RowOptions:
    labels = options.labels or options.labels_in(row for _, row in file.rows())
    if len(labels) == 1:
        remedy = "name all labels with --labels, or pass --completion-column NAME"
        found = f"the label {labels[0]!r} in every row"
        raise DataError(file.path, found, "at least two labels, which are compared", remedy)
    return replace(options, labels=tuple(labels))


def tokenized_choice(
    prompt: str,
    candidates: Sequence[str],
    answers: Iterable[int],
    tokenizer: PreTrainedTokenizerBase,
) -> Choice:
    """Tokenise a question. Each candidate is appended to its prompt as it is, without an EOS.

    A token that spans the end of the prompt and the start of a candidate counts as candidate.
    """
    alone = _text_ids(prompt, tokenizer, append_eos=False)
    wholes = [
        _text_ids(prompt + candidate, tokenizer, append_eos=False) for candidate in candidates
    ]
    return _choice_of([(whole, _prompt_length(alone, whole)) for whole in wholes], answers)


def _choice_of(sequences: Sequence[tuple[list[int], int]], answers: Iterable[int]) -> Choice:
    """Sequences, each with the length of its prompt, as completions of the prompt that they
    share.
    """
    shared = min(length for _, length in sequences)
    return Choice(
        tuple(sequences[0][0][:shared]),
        tuple(tuple(ids[shared:]) for ids, _ in sequences),
        tuple(answers),
    )


def _with_tokens(choice: Choice) -> tuple[Choice, int]:
    """A choice whose texts all have tokens, and the tokens of its longest sequence."""
    lengths = ", ".join(str(len(candidate)) for candidate in choice.candidates)
    found = f"a common prompt of {len(choice.prompt)} tokens, completions of {lengths} tokens"
    _require(
        all(choice.parts),
        found,
        "at least 1 token of each",
        "lengthen the texts, or remove the row",
    )
    return choice, max(tokens for tokens, _ in choice.sequences)


def _require(condition: bool, found: str, expected: str, remedy: str) -> None:  # noqa: FBT001 - like an assert
    if not condition:
        raise row_error(found, expected, remedy)


def _require_prediction(tokens: int, prompt: int, sequence_length: int) -> None:
    """Refuse a row without a token to predict: one after the prompt, not the row's first, and
    within the length.
    """
    found = f"a text of {'1 token' if tokens else 'no tokens'}"
    expected = "at least 2 tokens, of which the first predicts the second"
    _require(tokens > 1 or prompt > 0, found, expected, "lengthen the text, or remove the row")
    found = f"a prompt of {counted(prompt, 'token')}"
    expected, remedy = (
        "at least one token after the prompt",
        "write a completion, or remove the row",
    )
    _require(tokens > prompt, f"{found}, and no token of a completion", expected, remedy)
    found = f"{found}, which leaves no token of the row's {sequence_length} for the completion"
    _require(
        prompt < sequence_length,
        found,
        f"a prompt of at most {sequence_length - 1} tokens",
        f"{TOO_LONG}; or pass --too-long drop",
    )


def _prompt_length(prompt: list[int], whole: list[int]) -> int:
    # The prompt ends where the two tokenisations differ. That is usually its own length, but a
    # token that spans its end and the completion's start ("is " + "blue") counts as completion, so
    # that the whole completion is learned.
    differs = [alone != joined for alone, joined in zip(prompt, whole, strict=False)]
    return [*differs, True].index(True)


def _text_ids(
    text: str, tokenizer: PreTrainedTokenizerBase, *, append_eos: bool = True
) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [*ids, eos] if append_eos and eos is not None and ids[-1:] != [eos] else ids


def _string(row: Row, key: str, *, may_be_empty: bool = False) -> str:
    value = row[key]
    is_text = isinstance(value, str)
    _require(is_text, row.at(key), "a text", "write a text there, or remove the row")
    is_filled = value != "" or may_be_empty
    _require(is_filled, row.at(key), "a text that is not empty", "fill it in, or remove the row")
    return str(value)


def _texts(row: Row, key: str, *, least: int, may_be_empty: bool = False) -> list[str]:
    """A list of texts."""
    values = row[key]
    expected = f"a list of at least {counted(least, 'text')}"
    is_list = isinstance(values, list) and len(values) >= least
    _require(is_list, row.at(key), expected, "correct the row, or remove it")
    for number, value in enumerate(values, 1):
        is_text = isinstance(value, str) and (value != "" or may_be_empty)
        found = f"{shown(value)} as text {number} of {row.named(key)}"
        expected = "a text" if may_be_empty else "a text that is not empty"
        _require(is_text, found, expected, "fill it in, or remove it")
    return list(values)


def _messages(row: Row, key: str) -> list[dict[str, Any]]:
    for extra in ("tools", "chat_template_kwargs"):
        # a template may print these, and the text would differ without them
        _require(
            not row.get(extra), repr(extra), "messages alone", f"remove {extra!r} from the row"
        )
    messages = row[key]
    expected = "a list of objects with two texts, 'role' and 'content'"
    remedy = "correct the row, or remove it"
    _require(isinstance(messages, list), row.at(key), expected, remedy)
    for number, message in enumerate(messages, 1):
        where = f"message {number} of {row.named(key)}"
        _require(isinstance(message, dict), f"{shown(message)} as {where}", expected, remedy)
        for name in ("role", "content"):
            value = shown(message[name]) if name in message else "nothing"
            is_text = isinstance(message.get(name), str)
            _require(is_text, f"{value} as {name!r} of {where}", expected, remedy)
    has_content = any(message["content"] for message in messages)
    expected = "messages, of which at least one has a content that is not empty"
    _require(has_content, row.at(key), expected, "fill it in, or remove the row")
    return list(messages)


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
    """The config's padding token, by which a decoder that classifies finds the last token of
    a row.
    """
    pad = getattr(config, "pad_token_id", None)
    vocabulary = config.get_text_config().vocab_size
    if pad is None or not 0 <= pad < vocabulary:
        expected = f"a token from 0 to {vocabulary - 1}, by which the model finds the end of a row"
        remedy = "write the tokenizer's padding token into config.json"
        raise OptionError("model", f"{pad} as the config's pad_token_id", expected, remedy)
    return int(pad)


def _label(row: Row, config: PretrainedConfig) -> Label:
    """A row's label as the model's loss takes it."""
    return _class_of(row, config) if classifies(config) else _numbers_of(row, config)


def _class_of(row: Row, config: PretrainedConfig) -> int:
    """The class that a row's label names, or whose number it is."""
    value = row["label"]
    held = value.value if isinstance(value, Cell) else value
    count = int(config.num_labels or 1)
    names: dict[str, Any] = dict(config.label2id or {})
    index: Any = names.get(value, held) if isinstance(value, str) else value
    index = int(index) if isinstance(index, float) and index.is_integer() else index
    expected = f"a class from 0 to {count - 1}, or one of {', '.join(list(names)[:8])}"
    is_valid = type(index) is int and 0 <= index < count
    _require(is_valid, row.at("label"), expected, "correct the label")
    return int(index)


def _numbers_of(row: Row, config: PretrainedConfig) -> float | tuple[float, ...]:
    """The number that a row's label is, or the numbers of which it is a list."""
    value = row["label"]
    held = value.value if isinstance(value, Cell) else value
    count = int(config.num_labels or 1)
    is_one = rates_once(config)
    numbers = held if isinstance(held, list) else [held]
    are_numbers = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    is_valid = are_numbers and len(numbers) == count and isinstance(held, list) is not is_one
    expected = "a number" if is_one else f"a list of {count} numbers"
    _require(is_valid, row.at("label"), expected, "correct the label")
    return float(held) if is_one else tuple(map(float, numbers))
