"""Data files of preferences: rows of ``prompt``, ``chosen`` and ``rejected``, as for TRL's DPOTrainer.

A task for rows with a chosen and a rejected completion: DPO, with the base as reference model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.candidates import Choice, Choices, read_choice_rows, row_error
from zo2adapters.tasks.objectives import BETA, CandidateScores, PreferenceLoss, preference_batch
from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.rows import require_known, tokenized_row
from zo2adapters.tasks.scoring import score
from zo2adapters.tasks.task import Task, TaskOptions
from zo2core import Batch, Engine, StepResult

_KEYS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Preferences(Choices):
    """The rows of a file of preferences, in file order; the first candidate is the chosen one."""

    format: ClassVar = RowFormat.PREFERENCES


def read_preferences(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    options: RowOptions | None = None,
    vocabulary: int | None = None,
) -> Preferences:
    """Read and tokenise a file of preferences."""
    tokenized = partial(_tokenized, tokenizer=tokenizer, options=options or RowOptions())
    known = partial(require_known, tokenizer=tokenizer, vocabulary=vocabulary)
    kept, dropped = read_choice_rows(path, tokenized, known, sequence_length, options or RowOptions())
    return Preferences(kept, dropped=dropped)


def _tokenized(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: RowOptions) -> Choice:
    kinds = {type(row.get(key)) for key in _KEYS}
    if kinds not in ({str}, {list}):
        found = f"the keys {', '.join(map(repr, row))}" if type(None) in kinds else json.dumps(row)[:60]
        raise row_error(found, "'prompt', 'chosen' and 'rejected', all texts or all lists of messages", "correct the row")
    both = [tokenized_row({"prompt": row["prompt"], "completion": row[key]}, tokenizer, options) for key in _KEYS[1:]]
    shared = min(length for _, length in both)
    choice = Choice(tuple(both[0][0][:shared]), tuple(tuple(ids[shared:]) for ids, _ in both), 0)
    if not choice.prompt or not all(choice.candidates):
        lengths = " and ".join(str(len(candidate)) for candidate in choice.candidates)
        found = f"a common prompt of {shared} tokens, completions of {lengths} tokens"
        raise row_error(found, "at least 1 token of each", "lengthen the texts, or remove the row")
    return choice


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
