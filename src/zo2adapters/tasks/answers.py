"""Evaluate generated answers by F1 over words and exact match, as in SQuAD."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.model_directory import end_token_ids
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.row_source import location
from zo2adapters.tasks.rows import TOO_LONG, FileRows, converted_rows, is_dropped, require_kept, require_known
from zo2adapters.tasks.task import gather_in_order, is_own_shard
from zo2core import Engine
from zo2core.errors import DataError
from zo2core.ranges import counted

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its right answers."""

    prompt: tuple[int, ...]  # token ids, at least one
    answers: tuple[str, ...]  # right answers, at least one

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The sequences of the row: tokens of each, and for how many of these logits are needed."""
        return [(len(self.prompt), 1)]


@dataclass(frozen=True, slots=True)
class Questions(FileRows[Question]):
    """The rows of a file of prompts with right answers, in file order. These rows are never shortened."""

    format: ClassVar = RowFormat.ANSWERS

    max_new_tokens: int = field(kw_only=True)  # most tokens of a generated answer

    @property
    def longest(self) -> int:
        """Most tokens of a prompt with an answer."""
        return max(len(row.prompt) for row in self.rows) + self.max_new_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(row.prompt) for row in self.rows)

    def digest(self) -> str:
        """SHA-256 over prompts and answers."""
        return hashlib.sha256(json.dumps([[row.prompt, row.answers] for row in self.rows]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """How well a model answered the prompts of a file."""

    texts: tuple[str, ...]  # generated answer to each prompt of this worker
    f1: float  # mean over prompts of the best F1 with a right answer, 0 to 1
    exact_match: float  # share of prompts whose generated answer is a right one, 0 to 1
    f1_of_rows: tuple[float, ...]  # of each prompt
    exact_match_of_rows: tuple[float, ...]  # of each prompt, 0 or 1


def read_questions(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    max_new_tokens: int,
    options: RowOptions | None = None,
    vocabulary: int | None = None,
) -> Questions:
    """Read a file of rows with ``prompt`` and ``answers``."""
    options = RowOptions() if options is None else options
    most_tokens = sequence_length - max_new_tokens
    questions, dropped = [], 0
    for line, row in converted_rows(path, options):
        where = location(path, line)
        prompt: Any = row.get("prompt")
        answers: Any = row.get("answers")
        if not isinstance(prompt, str) or not _texts(answers):
            found = f"the keys {', '.join(map(repr, row))}"
            expected = "a text 'prompt' and a list of texts 'answers'"
            raise DataError(where, found=found, expected=expected, remedy="add the missing keys")
        ids = tuple(tokenizer(prompt, verbose=False)["input_ids"])
        if is_dropped(where, len(ids), most_tokens, options):
            dropped += 1
            continue
        if not 0 < len(ids) <= most_tokens:
            is_long = len(ids) > most_tokens
            raise DataError(
                where,
                found=f"a prompt of {counted(len(ids), 'token')}",
                expected=f"1 to {most_tokens}, so that `max_new_tokens` fit, too",
                remedy=f"{TOO_LONG}, or lower `max_new_tokens`" if is_long else "write a prompt, or remove the row",
            )
        require_known(where, ids, tokenizer, vocabulary)
        questions.append(Question(ids, tuple(answers)))
    require_kept(path, len(questions), dropped, most_tokens)
    return Questions(tuple(questions), dropped=dropped, max_new_tokens=max_new_tokens)


def answer(
    engine: Engine,
    model: HFBlockModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Questions,
    *,
    batch_size: int,
    pad_token_id: int,
    progress: Callable[[int], object],
) -> AnswerScores:
    """Generate an answer to each prompt, greedily up to the end of the line, and compare it with the right ones."""
    line_end = tokenizer("\n", add_special_tokens=False)["input_ids"]
    ends = {*end_token_ids(model, tokenizer), *line_end[-1:]}
    options: dict[str, Any] = {
        "max_new_tokens": questions.max_new_tokens,
        "eos_token_ids": ends,
        "pad_token_id": pad_token_id,
    }
    groups = [questions.rows[start : start + batch_size] for start in range(0, len(questions), batch_size)]
    texts: list[str] = []
    f1, exact = [], []
    for number, group in enumerate(groups):
        if not is_own_shard(engine, number):
            progress(len(group))
            continue
        columns = list(generate(engine, model, [row.prompt for row in group], **options))
        for tokens, row in zip(zip(*columns, strict=True), group, strict=True):
            raw = str(tokenizer.decode([token for token in tokens if token is not None], skip_special_tokens=True))
            text = raw.strip().partition("\n")[0].strip()
            texts.append(text)
            f1.append(max(f1_of_words(text, right) for right in row.answers))
            exact.append(float(any(normalized(text) == normalized(right) for right in row.answers)))
        progress(len(group))
    counts = [len(group) for group in groups]
    f1_of_rows, exact_of_rows = (tuple(gather_in_order(engine, values, counts, questions.rows)) for values in (f1, exact))
    f1_mean, exact_mean = (sum(values) / len(questions) for values in (f1_of_rows, exact_of_rows))
    return AnswerScores(tuple(texts), f1_mean, exact_mean, f1_of_rows, exact_of_rows)


def evaluate_answers(
    engine: Engine,
    model: HFBlockModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Questions,
    *,
    batch_size: int,
    pad_token_id: int,
) -> dict[str, float]:
    """Evaluate the current weights by the answers that they generate. See ``answer``."""
    options: dict[str, Any] = {"batch_size": batch_size, "pad_token_id": pad_token_id, "progress": lambda rows: None}
    scores = answer(engine, model, tokenizer, questions, **options)
    return {"f1": scores.f1, "exact_match": scores.exact_match}


def normalized(text: str) -> str:
    """Remove case, punctuation, articles and superfluous space from a text."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1_of_words(text: str, right: str) -> float:
    """The F1 of the words that two texts share, from 0 to 1; for a right text of "no answer" it is 0 or 1."""
    words, right_words = normalized(text).split(), normalized(right).split()
    if right in ("CANNOTANSWER", "no answer"):
        return float(words == right_words)
    shared = sum((Counter(words) & Counter(right_words)).values())
    return 2 * shared / (len(words) + len(right_words)) if shared else 0.0


def _texts(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(text, str) for text in value)
