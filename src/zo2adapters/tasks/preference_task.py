"""Rows with a chosen and a rejected completion, trained by DPO; the reference model is the base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.candidates import Choice, Choices
from zo2adapters.tasks.objectives import BETA, CandidateScores, PreferenceLoss, preference_batch
from zo2adapters.tasks.scoring import score
from zo2adapters.tasks.task import StepReport, Task, TaskOptions, TrainingEngine
from zo2core import Batch, Runner


class PreferenceTask(Task):
    """Rows with a chosen and a rejected completion, by DPO's loss. See ``Task``."""

    def __init__(self, model: HFBlockModel, rows: Choices, options: TaskOptions) -> None:
        self._model, self._options = model, options
        self._forward = PreferenceLoss(model, beta=BETA if options.beta is None else options.beta)
        self._references: dict[Choice, tuple[float, ...]] = {}
        self.provenance = {"objective": options.objective, "beta": self._forward.beta}

    def prepare(
        self, open_base: Callable[[], AbstractContextManager[Runner]], rows_to_come: Callable[[], Sequence[Choice]]
    ) -> None:
        """Compute the log-likelihoods of the rows to come under the base, the reference of DPO's loss. See ``Task``."""
        rows = list(dict.fromkeys(rows_to_come()))
        if rows:
            with open_base() as base:
                self._references = dict(zip(rows, self._scored(base, rows), strict=True))

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """Two rows a preference, with their references."""
        given = [row.candidates for row in rows]
        references = [self._references[row] for row in rows]
        return preference_batch([row.prompt for row in rows], given, references, pad_token_id=self._options.pad)

    def step(self, engine: TrainingEngine, rows: Sequence[Choice], batch: Batch) -> StepReport:
        """Take a step on DPO's loss."""
        return engine.step(batch, self._forward)

    def evaluate(self, engine: Runner, rows: Choices) -> dict[str, float]:
        """DPO's loss, and for how many rows the chosen completion has gained more on the base than the rejected one."""
        pairs = zip(self._scored(engine, rows.rows), map(self._references.__getitem__, rows), strict=True)
        margins = [torch.tensor(own, dtype=torch.float64) - torch.tensor(base, dtype=torch.float64) for own, base in pairs]
        rated = [CandidateScores(margin, (0,)) for margin in margins]
        gained = sum(bool(scores[0] > scores[1]) for scores, _ in rated)
        return {"loss": float(self._forward.value(rated)), "accuracy": gained / len(rated)}

    def _scored(self, engine: Runner, rows: Sequence[Choice]) -> tuple[tuple[float, ...], ...]:
        own, prompts, given = self._options, [row.prompt for row in rows], [row.candidates for row in rows]
        options: dict[str, Any] = {"batch_size": own.micro_batch_size or 2 * own.batch_size, "pad_token_id": own.pad}
        return score(engine, self._model, prompts, given, **options).log_likelihoods
