"""A task for prompts and completions: the share of prompts that the model does not continue with their completion."""

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
    """A task that compares completions, token for token, with greedy generation. See ``Task``.

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
                remedy="pass another objective, or other rows",
            )

    def step(self, engine: TrainingEngine, rows: Sequence[TokenizedRow], batch: Batch) -> StepReport:
        """Take a step; text is generated at each of its evaluations."""
        assert isinstance(engine, ZOEngine), "the registry refuses first-order steps on this objective"
        return engine.tell([self._mismatches(engine, rows, at) / len(rows) for at in engine.ask()])

    def evaluate(self, engine: Runner, rows: Dataset) -> dict[str, float]:
        """Compute the share of rows that match, and ``loss``, 1 minus that share."""
        size = self._options.batch_size
        starts = range(0, len(rows), size)
        own_starts = [start for number, start in enumerate(starts) if is_own_shard(engine, number)]
        counts = [self._mismatches(engine, rows.rows[start : start + size], None) for start in own_starts]
        mismatches = int(sum(gather_in_order(engine, counts, [1] * len(starts), rows.rows)))
        return {"loss": mismatches / len(rows), "exact_match": 1 - mismatches / len(rows)}

    def _mismatches(self, engine: Runner, rows: Sequence[TokenizedRow], at: Any) -> int:
        return sum(self._mismatches_of_group(engine, group, at) for group in self._groups(rows))

    def _groups(self, rows: Sequence[TokenizedRow]) -> Iterator[list[TokenizedRow]]:
        """Yield rows in order, in groups whose longest prompt and longest completion together fit the model's length."""
        limit = self._model.longest_row or math.inf
        group: list[TokenizedRow] = []
        for row in rows:
            extended = [*group, row]
            longest_prompt = max(member.prompt_length for member in extended)
            longest_completion = max(len(member.input_ids) - member.prompt_length for member in extended)
            if group and longest_prompt + longest_completion > limit:
                yield group
                extended = [row]
            group = extended
        yield group

    def _mismatches_of_group(self, engine: Runner, rows: Sequence[TokenizedRow], at: Any) -> int:
        prompts = [row.input_ids[: row.prompt_length] for row in rows]
        completions = [list(row.input_ids[row.prompt_length :]) for row in rows]
        options: dict[str, Any] = {"max_new_tokens": max(map(len, completions)), "pad_token_id": self._options.pad, "at": at}
        columns = list(generate(engine, self._model, prompts, **options))
        generated = [list(row) for row in zip(*columns, strict=True)]
        return sum(tokens[: len(right)] != right for tokens, right in zip(generated, completions, strict=True))
