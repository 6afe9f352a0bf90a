"""Answers that a model generates to a few prompts of its data before and after training: ``samples.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from zo2adapters.models.checkpoint import end_token_ids
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.rows import Choice, Question, Rows, TokenizedRow
from zo2adapters.trainers.run_directory import read_samples
from zo2core import Engine
from zo2core.errors import OptionError
from zo2core.ranges import counted

_MOST_TOKENS = 50  # most tokens of an answer


class Prompt(NamedTuple):
    """A prompt of the data."""

    ids: tuple[int, ...]  # at least one token
    expected: str  # the completion, the right candidate, or a right answer


class Samples:
    """The prompts of a run that are answered."""

    def __init__(
        self, model: HFBlockModel, rows: Rows, count: int, tokenizer: PreTrainedTokenizerBase, pad_token_id: int
    ) -> None:
        self._model, self._tokenizer, self._pad = model, tokenizer, pad_token_id
        self._prompts = [self._prompt(row) for row in list(rows)[:count]]
        self.longest_prompt = max(len(prompt.ids) for prompt in self._prompts)
        room = _MOST_TOKENS if model.longest_row is None else model.longest_row - self.longest_prompt
        self._most = min(_MOST_TOKENS, room)
        if self._most < 1:
            found = f"a prompt of {counted(self.longest_prompt, 'token')}, the model's longest sequence"
            raise OptionError("samples", found=found, expected="room for an answer", remedy="leave it out")

    @property
    def shape(self) -> tuple[int, int]:
        """Number of prompts, and most tokens of a prompt with its answer."""
        return len(self._prompts), self.longest_prompt + self._most

    def write(self, engine: Engine, directory: Path, step: int) -> str | None:
        """Answer the prompts with a runner's current weights, unless the file has the answers of this step."""
        earlier = read_samples(directory)
        if any(sample["step"] == step for sample in earlier):
            return None
        columns = generate(
            engine,
            self._model,
            [prompt.ids for prompt in self._prompts],
            max_new_tokens=self._most,
            eos_token_ids=end_token_ids(self._model, self._tokenizer),
            pad_token_id=self._pad,
        )
        answers = zip(*columns, strict=True)
        new = [
            {
                "step": step,
                "row": number,
                "prompt": self._text(prompt.ids),
                "expected": prompt.expected,
                "generated": self._text([token for token in answer if token is not None]),
            }
            for number, (prompt, answer) in enumerate(zip(self._prompts, answers, strict=True))
        ]
        return "".join(json.dumps(sample) + "\n" for sample in [*earlier, *new])

    def _prompt(self, row: Any) -> Prompt:
        match row:
            case TokenizedRow() if row.prompt_length:
                end = row.later_prompts[0][0] if row.later_prompts else None
                answer = row.input_ids[row.prompt_length : end]
                return Prompt(tuple(row.input_ids[: row.prompt_length]), self._text(answer))
            case Choice():
                return Prompt(row.prompt, self._text(row.candidates[row.answer]))
            case Question():
                return Prompt(row.prompt, row.answers[0])
        raise OptionError(
            "samples",
            found="rows without a prompt",
            expected="rows with a prompt, such as prompt and completion",
            remedy="leave it out, or pass rows with prompts as --evaluation",
        )

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
