"""Tasks for rows with candidates: training on MeZO's loss over the candidates, on accuracy, or on F1."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import MappingProxyType
from typing import ClassVar

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.batches import collate
from zo2adapters.tasks.candidates import Choice, Choices
from zo2adapters.tasks.objectives import (
    CandidateScores,
    ChoiceError,
    ChoiceF1Error,
    ChoiceLoss,
    ChoiceObjective,
    choice_batch,
)
from zo2adapters.tasks.rows import TokenizedRow
from zo2adapters.tasks.scoring import score
from zo2adapters.tasks.task import Task, TaskOptions
from zo2core import Batch, Engine, StepResult
from zo2core.errors import OptionError


class ChoiceTask(Task):
    """A task for rows with candidates, with the objective of a subclass. See ``Task``."""

    objective: ClassVar[type[ChoiceObjective]]
    evaluated: ClassVar[str] = "loss"  # name of the objective's value in an evaluation

    def __init__(self, model: HFBlockModel, rows: Choices, options: TaskOptions) -> None:
        self._model, self._options = model, options
        self._forward = self.objective(model)

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """Make a batch with a sequence for each candidate."""
        candidates = [row.candidates for row in rows]
        answers = [(row.answer, *row.also) for row in rows]
        return choice_batch([row.prompt for row in rows], candidates, answers, pad_token_id=self._options.pad)

    def step(self, engine: Engine, rows: Sequence[Choice], batch: Batch) -> StepResult:
        """Take a step on the objective."""
        return engine.step(batch, self._forward)

    def evaluate(self, engine: Engine, rows: Choices) -> dict[str, float]:
        """Compute the objective and accuracy."""
        scored = score(
            engine,
            self._model,
            [row.prompt for row in rows],
            [row.candidates for row in rows],
            batch_size=self._options.micro_batch_size or self._options.batch_size * rows.most_sequences,
            pad_token_id=self._options.pad,
        )
        right = sum(row.is_right(index) for row, index in zip(rows, scored.choices(), strict=True))
        rated = [
            CandidateScores(torch.tensor(means, dtype=torch.float64), (row.answer, *row.also))
            for means, row in zip(scored.means, rows, strict=True)
        ]
        return {self.evaluated: float(self._forward.value(rated)), "accuracy": right / len(rows)}


class ChoiceLossTask(ChoiceTask):
    """A task for rows with candidates: cross entropy over the candidates' scores."""

    objective = ChoiceLoss


class AnswerTask(ChoiceLossTask):
    """A task for rows with candidates: the model's own loss on the right candidate alone, one sequence a row.

    An evaluation compares the candidates, so its loss is another one than that of the steps, and has another name.
    """

    evaluated = "choice_loss"
    provenance = MappingProxyType({"objective": "loss"})  # which does not say it for other rows

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """Make a batch of the prompts with their right candidates."""
        sequences = [
            TokenizedRow(array("i", [*row.prompt, *row.candidates[row.answer]]), len(row.prompt), 0) for row in rows
        ]
        return collate(sequences, pad_token_id=self._options.pad)

    def step(self, engine: Engine, rows: Sequence[Choice], batch: Batch) -> StepResult:
        """Take a step on the model's own loss."""
        return engine.step(batch)


class AccuracyTask(ChoiceTask):
    """A task for rows with candidates: the share of rows whose likeliest candidate is wrong."""

    objective = ChoiceError


class F1Task(ChoiceTask):
    """A task for rows with candidates: 1 - F1 of the second candidate."""

    objective = ChoiceF1Error

    def __init__(self, model: HFBlockModel, rows: Choices, options: TaskOptions) -> None:
        super().__init__(model, rows, options)
        if len({len(row.candidates) for row in rows}) > 1:
            raise OptionError(
                "objective",
                found=f"{options.objective} for rows with different numbers of candidates",
                expected="the same candidates in each row",
                remedy="pass another objective, or other rows",
            )
