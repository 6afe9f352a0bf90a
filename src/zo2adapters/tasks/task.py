"""Tasks: how a run trains on rows of one format, and how it is evaluated on them."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from zo2adapters.models.batches import pack
from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.batches import choice_batch, collate, file_batches, preference_batch, with_completion
from zo2adapters.tasks.measures import Measuring, measured
from zo2adapters.tasks.objectives import (
    BETA,
    CandidateScores,
    ChoiceError,
    ChoiceF1Error,
    ChoiceLoss,
    ChoiceObjective,
    PreferenceLoss,
    Scored,
    score,
    sharded_forwards,
)
from zo2adapters.tasks.registry import MODEL_LOSS
from zo2adapters.tasks.rewards import RewardOptions
from zo2adapters.tasks.row_options import RowFormat
from zo2adapters.tasks.row_reader import padding_of
from zo2adapters.tasks.rows import Choice, Rows
from zo2core import Batch, Engine, Forward, StepResult
from zo2core.errors import OptionError
from zo2core.io.durable import open_regular


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options of a run that concern its task."""

    objective: str  # name of the task or FILE.py:function; "auto" until the registry has chosen a task
    pad: int  # token id at padded positions
    batch_size: int  # number of rows in a batch
    micro_batch_size: int | None = None  # sequences that run at a time; None runs all of a batch
    beta: float | None = None  # strength of DPO's penalty; None is the default
    pack: bool = False  # whether rows of a batch are concatenated instead of padded
    per_row: bool = False  # whether each row of a batch has a loss and a direction of its own
    differentiates: bool = False  # whether steps take the gradient of the objective
    rewards: RewardOptions | None = None  # rewards of what the model writes; None: there are none
    tokenizer: Any = None  # the model's, for rewards of texts
    seed: int = 0  # of the run


class Task:
    """A task on the model's own loss, and what all tasks have in common."""

    forward: Forward | None = None  # what steps minimise; None: the model's own loss
    provenance: Mapping[str, Any] = MappingProxyType({})
    """Values that the steps depend on and the options do not determine, as JSON values for the journal's header."""

    measured: Mapping[str, float] = MappingProxyType({})
    """What the last step has measured beside its losses, by name."""

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
        self._model, self._options = model, options
        self._pad = padding_of(model.config) if rows.format is RowFormat.LABELS else options.pad

    def prepare(
        self, open_base: Callable[[], AbstractContextManager[Engine]], rows_to_come: Callable[[], Sequence[Any]]
    ) -> None:
        """Compute what the task needs from the base model, before the first step of a new or resumed run.

        The default needs nothing, and calls neither argument.
        """

    def close(self) -> None:
        """End what the task has started. May be called twice. By default there is nothing."""

    def batch(self, rows: Sequence[Any]) -> Batch:
        """Make a batch from the rows of one step: padded to one length, or packed."""
        batch = collate(rows, pad_token_id=self._pad)
        return pack(batch) if self._options.pack else batch

    def step(self, engine: Engine, rows: Sequence[Any], batch: Batch) -> StepResult:
        """Take one step."""
        return engine.step(batch, self.forward)

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Evaluate the current weights."""
        options, size = self._options, self._options.batch_size
        if rows.format is RowFormat.LABELS:  # each batch's loss is the model's own, and takes no micro-batches
            size = options.micro_batch_size or size
        measuring = Measuring(options.tokenizer, options.pad, batch_size=size, packed=options.pack)
        return measured(engine, self._model, rows, measuring).results


class FunctionTask(Task):
    """A task for rows of text with a function of model and batch as objective, which runs block by block."""

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
        super().__init__(model, rows, options)
        self.forward = CalledForward(model, user_function(options.objective))

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute the mean of the function over batches, and the model's own loss."""
        assert self.forward is not None
        values, _ = sharded_forwards(engine, file_batches(rows, self._options.batch_size), self.batch, self.forward)
        loss = math.fsum(value for [value] in values) / len(values)
        return {"loss": loss, "model_loss": super().evaluate(engine, rows)["loss"]}


class CandidatesTask(Task):
    """What tasks for rows with candidates have in common."""

    def _scored(self, engine: Engine, rows: Sequence[Choice]) -> Scored:
        """The candidates' log-likelihoods by the current weights."""
        options, sequences = self._options, max(len(row.candidates) for row in rows)
        size = options.micro_batch_size or options.batch_size * sequences
        prompts, candidates = [row.prompt for row in rows], [row.candidates for row in rows]
        return score(engine, self._model, prompts, candidates, batch_size=size, pad_token_id=options.pad)


class ChoiceTask(CandidatesTask):
    """A task for rows with candidates.

    The objective is the loss over the candidates, 1 - accuracy, 1 - F1 of the second candidate, or the model's own loss on
    the right candidate alone, one sequence a row.
    """

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
        super().__init__(model, rows, options)
        kinds: dict[str, type[ChoiceObjective]] = {"accuracy": ChoiceError, "f1": ChoiceF1Error}
        self._objective = kinds.get(options.objective, ChoiceLoss)(model)
        self._learns_answer = options.objective == MODEL_LOSS
        if self._learns_answer:
            self.provenance = {"objective": MODEL_LOSS}  # which does not say it for other rows
        else:
            self.forward = self._objective
        if options.objective == "f1" and len({len(row.candidates) for row in rows}) > 1:
            raise OptionError(
                "objective",
                found=f"{options.objective} for rows with different numbers of candidates",
                expected="the same candidates in each row",
                remedy="pass another objective, or other rows",
            )

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """Make a batch with a sequence for each candidate, or for the right ones."""
        pad = self._options.pad
        if self._learns_answer:
            return collate([with_completion(row.prompt, row.candidates[row.answer]) for row in rows], pad_token_id=pad)
        prompts, candidates = [row.prompt for row in rows], [row.candidates for row in rows]
        return choice_batch(prompts, candidates, [row.answers for row in rows], pad_token_id=pad)

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute the objective and accuracy. For the model's own loss, the objective is another one, with its own name."""
        scored = self._scored(engine, rows)
        right = sum(index in row.answers for row, index in zip(rows, scored.choices(), strict=True))
        rated = [
            CandidateScores(torch.tensor(means, dtype=torch.float64), row.answers)
            for means, row in zip(scored.means, rows, strict=True)
        ]
        name = "choice_loss" if self._learns_answer else "loss"
        return {name: float(self._objective.value(rated)), "accuracy": right / len(rows)}


class PreferenceTask(CandidatesTask):
    """A task for rows with a chosen and a rejected completion: DPO, with the base as reference model."""

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
        super().__init__(model, rows, options)
        self.forward = self._objective = PreferenceLoss(model, beta=BETA if options.beta is None else options.beta)
        self._references: dict[Choice, tuple[float, ...]] = {}
        self.provenance = {"objective": options.objective, "beta": self._objective.beta}

    def prepare(
        self, open_base: Callable[[], AbstractContextManager[Engine]], rows_to_come: Callable[[], Sequence[Choice]]
    ) -> None:
        """Compute the log-likelihoods of these rows under the base, the reference model of DPO. See ``Task``."""
        rows = list(dict.fromkeys(rows_to_come()))
        if rows:
            with open_base() as base:
                self._references = dict(zip(rows, self._scored(base, rows).log_likelihoods, strict=True))

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """Make a batch with two sequences for each row, and their log-likelihoods under the reference model."""
        prompts, completions = [row.prompt for row in rows], [row.candidates for row in rows]
        references = [self._references[row] for row in rows]
        return preference_batch(prompts, completions, references, pad_token_id=self._options.pad)

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute DPO's loss, and the share of rows whose chosen completion gained more likelihood than the rejected one."""
        pairs = zip(self._scored(engine, rows).log_likelihoods, map(self._references.__getitem__, rows), strict=True)
        gains = [torch.tensor(now, dtype=torch.float64) - torch.tensor(base, dtype=torch.float64) for now, base in pairs]
        right = sum(bool(gain[0] > gain[1]) for gain in gains)
        loss = self._objective.value([CandidateScores(gain, (0,)) for gain in gains])
        return {"loss": float(loss), "accuracy": right / len(gains)}


def user_function(name: str) -> Any:
    """Import a function by ``FILE.py:function``.

    The source is compiled here: Python's import might load a ``.pyc`` file from ``__pycache__``, which no digest of the
    source covers.
    """
    path, _, function = name.rpartition(":")
    try:
        spec = importlib.util.spec_from_file_location("zo2_objective", path)
        assert spec is not None, "a path that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        with open_regular(path) as file:
            code = compile(file.read(), path, "exec")
        sys.modules[spec.name] = module  # classes of the module look it up there
        exec(code, module.__dict__)  # noqa: S102 - the user named this program
        objective = getattr(module, function)
        if not callable(objective):
            raise TypeError(f"{function} is a {type(objective).__name__}, not a function")
    except Exception as error:  # the user's program may raise anything
        raise OptionError(
            "objective",
            found=f"{name}, which cannot be imported ({type(error).__name__}: {error})"[:300],
            expected="FILE.py:function, a function of the model and a batch that returns a number",
            remedy="check the path and the name",
        ) from error

    def one_number(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        value = objective(model, batch)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value
        found = (
            f"{f'shape {list(value.shape)}' if isinstance(value, torch.Tensor) else type(value).__name__} from {function}"
        )
        raise OptionError("objective", found=found, expected="a 0-d tensor", remedy="return the loss of the batch")

    return one_number
