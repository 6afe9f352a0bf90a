"""A task for rows with a chosen and a rejected completion: DPO, with the base as reference model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.candidates import Choice, Choices
from zo2adapters.tasks.objectives import BETA, CandidateScores, PreferenceLoss, preference_batch
from zo2adapters.tasks.scoring import score
from zo2adapters.tasks.task import Task, TaskOptions
from zo2core import Batch, Engine, StepResult


class PreferenceTask(Task):
    """A task for rows with a chosen and a rejected completion, with DPO's loss. See ``Task``."""

    def __init__(self, model: HFBlockModel, rows: Choices, options: TaskOptions) -> None:
        self._model, self._options = model, options
        self._forward = PreferenceLoss(model, beta=BETA if options.beta is None else options.beta)
        self._references: dict[Choice, tuple[float, ...]] = {}
        self.provenance = {"objective": options.objective, "beta": self._forward.beta}

    def prepare(
        self, open_base: Callable[[], AbstractContextManager[Engine]], rows_to_come: Callable[[], Sequence[Choice]]
    ) -> None:
        """Compute the log-likelihoods of these rows under the base, the reference model of DPO. See ``Task``."""
        rows = list(dict.fromkeys(rows_to_come()))
        if rows:
            with open_base() as base:
                self._references = dict(zip(rows, self._scored(base, rows), strict=True))

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """Make a batch with two sequences for each row, and their log-likelihoods under the reference model."""
        completions = [row.candidates for row in rows]
        references = [self._references[row] for row in rows]
        return preference_batch([row.prompt for row in rows], completions, references, pad_token_id=self._options.pad)

    def step(self, engine: Engine, rows: Sequence[Choice], batch: Batch) -> StepResult:
        """Take a step on DPO's loss."""
        return engine.step(batch, self._forward)

    def evaluate(self, engine: Engine, rows: Choices) -> dict[str, float]:
        """Compute DPO's loss, and the share of rows whose chosen completion gained more likelihood than the rejected one."""
        pairs = zip(self._scored(engine, rows.rows), map(self._references.__getitem__, rows), strict=True)
        gains = [torch.tensor(now, dtype=torch.float64) - torch.tensor(base, dtype=torch.float64) for now, base in pairs]
        rated = [CandidateScores(gain, (0,)) for gain in gains]
        right = sum(bool(scores[0] > scores[1]) for scores, _ in rated)
        return {"loss": float(self._forward.value(rated)), "accuracy": right / len(rated)}

    def _scored(self, engine: Engine, rows: Sequence[Choice]) -> tuple[tuple[float, ...], ...]:
        batch_size = self._options.micro_batch_size or 2 * self._options.batch_size
        prompts, completions = [row.prompt for row in rows], [row.candidates for row in rows]
        options: dict[str, Any] = {"batch_size": batch_size, "pad_token_id": self._options.pad}
        return score(engine, self._model, prompts, completions, **options).log_likelihoods
