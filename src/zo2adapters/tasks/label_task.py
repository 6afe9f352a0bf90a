"""A task for texts with labels, for models that classify or predict numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.labelled import LabelledRow, LabelledRows, classifies, labelled_batch, padding_of
from zo2adapters.tasks.task import Task, TaskOptions, gather_in_order, is_own_shard
from zo2core import Batch, Engine, StepResult


class LabelTask(Task):
    """A task for texts with labels, with the model's own loss and the padding token of its config. See ``Task``."""

    def __init__(self, model: HFBlockModel, rows: LabelledRows, options: TaskOptions) -> None:
        self._model, self._pad = model, padding_of(model.config)
        self._rows_at_once = options.micro_batch_size or options.batch_size

    def batch(self, rows: Sequence[LabelledRow]) -> Batch:
        """Pad the rows to one length."""
        return labelled_batch(rows, pad_token_id=self._pad)

    def step(self, engine: Engine, rows: Sequence[LabelledRow], batch: Batch) -> StepResult:
        """Take a step on the model's own loss."""
        return engine.step(batch)

    def evaluate(self, engine: Engine, rows: LabelledRows) -> dict[str, float]:
        """Compute the mean loss over rows and, for rows with a class, accuracy."""
        return evaluate_labels(engine, self._model, rows, batch_size=self._rows_at_once, pad=self._pad)


def evaluate_labels(
    engine: Engine, model: HFBlockModel, rows: LabelledRows, *, batch_size: int, pad: int
) -> dict[str, float]:
    """Evaluate the current weights on texts with labels."""
    outputs = evaluated_batches(engine, model, rows, batch_size=batch_size, pad=pad)
    losses, right, _ = zip(*outputs, strict=True)
    means = [math.fsum(values) / len(rows) for values in (losses, right)]
    return dict(zip(("loss", "accuracy"), means, strict=True)) if classifies(model.config) else {"loss": means[0]}


def evaluated_batches(
    engine: Engine,
    model: HFBlockModel,
    rows: LabelledRows,
    *,
    batch_size: int,
    pad: int,
    progress: Callable[[int], object] = lambda rows: None,
) -> list[tuple[float, float, int]]:
    """Evaluate the current weights on texts with labels, batch by batch."""
    groups = [rows.rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]

    def batches() -> Iterator[Batch]:
        for number, group in enumerate(groups):
            progress(len(group))
            if is_own_shard(engine, number):
                yield labelled_batch(group, pad_token_id=pad)

    outputs = engine.forwards(batches(), CalledForward(model, _loss_and_right))
    own_values = [value for outputs_of_sweep in outputs for output in outputs_of_sweep for value in output.tolist()]
    values = gather_in_order(engine, own_values, [2] * len(groups), rows.rows)
    return list(zip(values[::2], values[1::2], map(len, groups), strict=True))


def _loss_and_right(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """A batch's loss times its number of rows, and its number of rows whose likeliest class is right: (2,), float64."""
    output, labels = model(**batch), batch["labels"]
    right = (output.logits.argmax(-1) == labels).sum() if labels.dim() == 1 else labels.new_zeros(())
    return torch.stack([output.loss.double() * len(labels), right.double()])
