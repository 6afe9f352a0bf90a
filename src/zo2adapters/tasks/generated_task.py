"""Tasks whose objective is a function of what the model writes: all evaluations of a step generate together."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.generation import Generation
from zo2adapters.tasks.language_modelling_task import LanguageModelling
from zo2adapters.tasks.next_token import Sampling
from zo2adapters.tasks.rows import Dataset, TokenizedRow
from zo2adapters.tasks.task import TaskOptions, is_own_shard
from zo2core import Batch, Engine, Evaluation, StepResult
from zo2core.errors import OptionError


class Continued(NamedTuple):
    """A row and what the model wrote after its prompt."""

    row: TokenizedRow
    tokens: Sequence[int]  # with the token that ended it, if it has ended


class GeneratedTask(LanguageModelling):
    """A task for rows with prompts. See ``Task``."""

    def __init__(self, model: HFBlockModel, rows: Dataset, options: TaskOptions, *, ends: Sequence[int] = ()) -> None:
        super().__init__(model, rows, options)
        self._model, self._ends = model, ends
        if not all(row.prompt_length for row in rows):
            option = "objective" if options.rewards is None else "reward"
            expected = "rows with a prompt, after which text is generated"
            remedy = f"pass other rows, or leave `{option}` out"
            raise OptionError(option, found="rows without a prompt", expected=expected, remedy=remedy)

    @abstractmethod
    def _new_tokens(self, row: TokenizedRow) -> int:
        """Most tokens of a row's continuation; rows that run together have the largest number."""

    @abstractmethod
    def _losses(self, continued: Sequence[Continued]) -> list[float]:
        """The loss of each row."""

    def _sampling(self, step: int) -> Sampling | None:
        """How the tokens of a step are sampled; None takes the likeliest token, as evaluations do."""
        return None

    def step(self, engine: Engine, rows: Sequence[TokenizedRow], batch: Batch) -> StepResult:
        """Take a step; text is generated at all of its evaluations together."""
        sampling = self._sampling(engine.version)
        evaluations = engine.ask()
        losses = self._losses(
            [c for of_evaluation in self._continued(engine, rows, evaluations, sampling) for c in of_evaluation]
        )
        starts = range(0, len(losses), len(rows))
        return engine.tell([math.fsum(losses[start : start + len(rows)]) / len(rows) for start in starts])

    def _evaluated(self, engine: Engine, rows: Dataset) -> tuple[list[range], list[Continued]]:
        """Continue this worker's part of the rows with the present weights."""
        size = self._options.batch_size
        parts = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
        own = [rows[index] for number, part in enumerate(parts) if is_own_shard(engine, number) for index in part]
        return parts, self._continued(engine, own, [None], None)[0] if own else []

    def _continued(
        self,
        engine: Engine,
        rows: Sequence[TokenizedRow],
        evaluations: Sequence[Evaluation | None],
        sampling: Sampling | None,
    ) -> list[list[Continued]]:
        """Continue the prompts of rows at each evaluation."""
        continued: list[list[Continued]] = [[] for _ in evaluations]
        for group in self._groups(rows) if evaluations else ():
            generation = Generation(
                engine,
                self._model,
                max_new_tokens=max(map(self._new_tokens, group)),
                sampling=sampling,
                eos_token_ids=self._ends,
                pad_token_id=self._options.pad,
                evaluations=evaluations,
                allowed=engine.activation_bytes,
            )
            made = generation.continuations([row.input_ids[: row.prompt_length] for row in group])
            for so_far, tokens in zip(continued, made, strict=True):
                so_far += map(Continued, group, tokens)
        return continued

    def _groups(self, rows: Sequence[TokenizedRow]) -> Iterator[list[TokenizedRow]]:
        """Yield rows in order, in groups whose longest prompt and longest continuation together fit the model's length."""
        limit = self._model.longest_row or math.inf
        group: list[TokenizedRow] = []
        for row in rows:
            extended = [*group, row]
            longest = max(member.prompt_length for member in extended) + max(map(self._new_tokens, extended))
            if group and longest > limit:
                yield group
                extended = [row]
            group = extended
        yield group
