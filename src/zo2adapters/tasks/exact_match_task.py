"""Prompts and completions, trained on the share of prompts that the model does not continue by their completion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.language_modelling_task import LanguageModelling
from zo2adapters.tasks.rows import Dataset, TokenizedRow
from zo2adapters.tasks.sharding import gather_in_order, is_own_shard
from zo2adapters.tasks.task import StepReport, TaskOptions, TrainingEngine
from zo2core import Batch, OptionError, Runner, ZOEngine


class ExactMatch(LanguageModelling):
    """Prompts and completions, compared token for token with the likeliest text. See ``Task``.

    Raises:
        OptionError: if a row has no prompt.
    """

    def __init__(self, model: HFBlockModel, rows: Dataset, options: TaskOptions) -> None:
        super().__init__(model, rows, options)
        self._model = model
        if not all(row.prompt_length for row in rows):
            raise OptionError(
                "objective",
                found=f"{options.objective} for rows without a prompt",
                expected="rows with prompt and completion",
                remedy="choose another objective, or other rows",
            )

    def step(self, engine: TrainingEngine, rows: Sequence[TokenizedRow], batch: Batch) -> StepReport:
        """Take a step, by text that is generated at each of its evaluations."""
        assert isinstance(engine, ZOEngine), "an objective without a gradient was refused"
        return engine.tell([self._wrong(engine, rows, at) / len(rows) for at in engine.ask()])

    def evaluate(self, engine: Runner, rows: Dataset) -> dict[str, float]:
        """One less the share of matches, and it."""
        starts = range(0, len(rows), self._options.batch_size)
        own = [start for number, start in enumerate(starts) if is_own_shard(engine, number)]
        counts = [self._wrong(engine, rows.rows[start : start + self._options.batch_size], None) for start in own]
        wrong = int(sum(gather_in_order(engine, counts, [1] * len(starts), rows.rows)))
        return {"loss": wrong / len(rows), "exact_match": 1 - wrong / len(rows)}

    def _wrong(self, engine: Runner, rows: Sequence[TokenizedRow], at: Any) -> int:
        return sum(self._wrong_together(engine, group, at) for group in self._groups(rows))

    def _groups(self, rows: Sequence[TokenizedRow]) -> Iterator[list[TokenizedRow]]:
        """Rows in order, so many at a time that the longest prompt and the longest completion fit the model together."""
        room = self._model.longest_row or math.inf
        group: list[TokenizedRow] = []
        for row in rows:
            together = [*group, row]
            longest = max(own.prompt_length for own in together)
            if group and longest + max(len(own.input_ids) - own.prompt_length for own in together) > room:
                yield group
                together = [row]
            group = together
        yield group

    def _wrong_together(self, engine: Runner, rows: Sequence[TokenizedRow], at: Any) -> int:
        prompts = [row.input_ids[: row.prompt_length] for row in rows]
        wanted = [list(row.input_ids[row.prompt_length :]) for row in rows]
        options: dict[str, Any] = {"max_new_tokens": max(map(len, wanted)), "pad_token_id": self._options.pad, "at": at}
        columns = list(generate(engine, self._model, prompts, **options))
        written = [list(row) for row in zip(*columns, strict=True)]
        return sum(own[: len(answer)] != answer for own, answer in zip(written, wanted, strict=True))
